"""Streams of topics with partitions: complete and in order while partitions change."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest

from tests.builders import NOW_MS
from tests.spark.streams import ORDERS, TTL_SECONDS, Query, StreamKit, scene, texts
from tms_core.client import Transaction
from tms_core.errors import Refused
from tms_core.messaging.topics.partitions import hash_key, layout_of
from tms_core.rowkey import MessageKey
from tms_core.tables.base import MESSAGES, MessageValue
from tms_core.topic import TopicId

EVENTS = "default:events"


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamKit]:
    with scene(monkeypatch) as made:
        made.client.create_topic(EVENTS, ttl=TTL_SECONDS, properties={"partitions": "4"})
        yield made


def change(kit: StreamKit, partitions: int, topic: str = EVENTS) -> None:
    kit.clock.advance(1)
    kit.client.update_topic(topic, ttl=TTL_SECONDS, properties={"partitions": str(partitions)})


def publish(kit: StreamKit, *payloads: int, topic: str = EVENTS, key: str | None = None) -> None:
    """Publish messages with distinct keys or one key, with a new client."""
    with kit.server.client() as client:
        for payload in payloads:
            kit.clock.advance(1)
            client.publish(topic, texts(payload), key=key or str(payload))


def publish_in(kit: StreamKit, transaction: Transaction, key: str, payload: str | int) -> None:
    """Publish a message in a transaction to the current partition of its key."""
    topic = kit.client.topic(EVENTS)
    layout = layout_of(topic.topic, topic.properties)
    assert layout
    kit.clock.advance(1)
    kit.client.publish(layout.place(hash_key(key)), texts(payload), transaction=transaction)


def topics_of(query: Query, number: int) -> list[list[str]]:
    return [sorted({row["topic"] for row in part}) for part in query.parts(number)]


def test_stream_reads_each_partition_in_its_own_task(kit: StreamKit) -> None:
    query = kit.query(topic=EVENTS)
    publish(kit, *range(40))
    assert sorted(query.drain()) == sorted(texts(*range(40)))
    assert topics_of(query, 0) == [[f"events-{number}"] for number in range(4)]
    for part in query.parts(0):
        assert [int(row["payload"]) for row in part] == sorted(int(row["payload"]) for row in part)
    assert not query.plan()


def test_partitions_share_the_batch_limit(kit: StreamKit) -> None:
    query, smallest = kit.query(topic=EVENTS, maxMessagesPerBatch=8), kit.query(topic=EVENTS, maxMessagesPerBatch=1)
    publish(kit, *range(20))
    publish(kit, *range(20, 28), key="one")
    for reading, most in ((query, 8), (smallest, 4)):
        assert sorted(reading.drain()) == sorted(texts(*range(28)))
        assert max(len(reading.rows(number)) for number in range(len(reading.offsets))) == most
    assert [len(part) for part in query.parts(0)] == [2] * 4


def test_batch_of_partitions_is_repeatable_after_changes(kit: StreamKit) -> None:
    query = kit.query(topic=EVENTS, maxMessagesPerBatch=4)
    publish(kit, *range(12), key="one")
    query.drain()
    before = [query.rows(number) for number in range(3)]
    query.kill()
    publish(kit, 12)
    change(kit, 2)
    assert [query.rows(number) for number in range(3)] == before
    del query.offsets[1]
    with pytest.raises(Refused, match=r"after:.* after:"):
        query.rows(1)


def test_new_partitions_are_read_after_the_previous_ones(kit: StreamKit) -> None:
    query = kit.query(topic=EVENTS, maxMessagesPerBatch=4)
    publish(kit, 1, 2, 3)
    undecided = kit.server.manager.start_short()
    publish_in(kit, undecided, "k", 4)
    change(kit, 2)
    publish(kit, 5, key="k")
    assert sorted(query.drain()) == texts(1, 2, 3), "the new partitions wait for the undecided message"
    kit.commit(undecided)
    assert sorted(query.drain()[:4]) == texts(1, 2, 3, 4)
    assert query.all_payloads()[4:] == texts(5)
    assert topics_of(query, len(query.offsets) - 1)[0][0].startswith("events-f2-")


def test_sealed_partitions_return_a_late_message(kit: StreamKit) -> None:
    query = kit.query(topic=EVENTS)
    publish(kit, 1)
    change(kit, 2)
    publish(kit, 2)
    assert query.drain() == texts(1, 2)
    kit.clock.advance(1)
    late = MessageKey(TopicId.parse(f"{EVENTS}-3"), 1, kit.clock.now_ms(), 0)
    kit.server.store.message.put([(late.pack(), MessageValue(None, b"late"))])
    # The row was written by another process.
    kit.server.service.invalidate()
    assert query.drain() == [*texts(1, 2), b"late"]


def test_topic_that_gets_partitions_continues_from_its_offset(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=2)
    kit.publish(*range(5))
    query.plan()
    assert json.loads(query.offsets[0])["version"] == 1
    query.kill()
    change(kit, 3, ORDERS)
    publish(kit, *range(5, 15), topic=ORDERS)
    found = query.drain()
    assert found[:5] == texts(*range(5))
    assert sorted(found[5:]) == sorted(texts(*range(5, 15)))
    assert {json.loads(offset)["version"] for offset in query.offsets[-2:]} == {2}


@pytest.mark.parametrize(
    ("begin", "expected"), [("latest", [3, 4]), (NOW_MS + 3, [2, 3, 4]), ("earliest", [1, 2, 3, 4])]
)
def test_partitions_of_two_families_start_at_the_given_position(
    begin: str | int, expected: list[int], kit: StreamKit
) -> None:
    publish(kit, 1)
    change(kit, 2)
    publish(kit, 2)
    query = kit.query(topic=EVENTS, startingPosition=begin)
    query.plan()
    query.kill()
    publish(kit, 3)
    change(kit, 3)
    publish(kit, 4)
    assert query.drain() == texts(*expected)


def test_new_partitions_start_at_a_future_time(kit: StreamKit) -> None:
    query = kit.query(topic=EVENTS, startingPosition=NOW_MS + 1000)
    query.plan()
    change(kit, 2)
    publish(kit, 1)
    assert query.drain() == []
    kit.clock.advance(1000)
    publish(kit, 2)
    assert query.drain() == texts(2)


def test_available_now_query_ignores_later_partitions(kit: StreamKit) -> None:
    query = kit.query(topic=EVENTS)
    publish(kit, 1, 2)
    query.reader = query.new_reader()
    query.reader.prepareForTriggerAvailableNow()
    publish(kit, 3)
    change(kit, 2)
    publish(kit, 4)
    assert sorted(query.drain()) == texts(1, 2)
    query.kill()
    assert sorted(query.drain()) == texts(1, 2, 3, 4)


def test_deleted_partitions_report_expired_messages(kit: StreamKit) -> None:
    strict, patient = kit.query(topic=EVENTS), kit.query(topic=EVENTS, failOnDataLoss="false")
    full = kit.query(topic=EVENTS, maxMessagesPerBatch=4)
    publish(kit, *range(12), key="one")
    for query in (strict, patient, full):
        query.plan()
    patient.kill()
    change(kit, 2)
    kit.server.store.message.delete([key for key, _ in kit.server.store.message.read(MESSAGES, b"", None, 100).items])
    change(kit, 3)
    publish(kit, 12)
    while strict.plan():
        pass
    assert strict.payloads(len(strict.offsets) - 1) == texts(12)
    assert {part["topic"][:-1] for part in json.loads(strict.offsets[-1])["parts"]} <= {
        f"{EVENTS}-f2-",
        f"{EVENTS}-f3-",
    }
    with pytest.raises(Refused, match=rf"{EVENTS}-\d .*expired"):
        full.plan()
    with pytest.raises(Refused, match=rf"{EVENTS}-\d .* 12 messages .* 0 "):
        strict.rows(0)
    assert patient.rows(0) == []


def test_partitions_of_recreated_topic_are_reported(kit: StreamKit) -> None:
    strict, patient = kit.query(topic=EVENTS), kit.query(topic=EVENTS, failOnDataLoss="false")
    change(kit, 2)
    publish(kit, 1)
    assert strict.drain() == patient.drain() == texts(1)
    kit.client.delete_topic(EVENTS)
    kit.client.create_topic(EVENTS, properties={"partitions": "3"})
    publish(kit, 2)
    with pytest.raises(Refused, match=f"{EVENTS} .*generation 1 "):
        strict.plan()
    patient.plan()
    [row] = patient.rows(len(patient.offsets) - 1)
    assert (row["payload"], row["generation"]) == (b"2", 2)


def test_stream_of_topic_with_routes_names_the_routes(kit: StreamKit) -> None:
    kit.client.create_topic("default:clicks", properties={"routes": '{"users": 2, "pages": 3}'})
    with pytest.raises(Refused, match=r"topic .*default:clicks-users, default:clicks-pages"):
        kit.query(topic="default:clicks").plan()
    query = kit.query(topic="default:clicks-users")
    kit.client.publish("default:clicks", texts(1), key={"users": b"u", "pages": b"p"})
    assert query.drain() == texts(1)


class History:
    """A random history: producers with keys, changing partitions and a killed query."""

    def __init__(self, kit: StreamKit, seed: int) -> None:
        self.kit, self.random = kit, Random(seed)
        self.query = kit.query(topic=EVENTS, maxMessagesPerBatch=self.random.choice((3, 6, 50)))
        self.open: dict[int, tuple[Transaction, list[tuple[str, int]]]] = {}
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.read: dict[int, list[dict[str, object]]] = {}
        self.number = 0

    def produce(self) -> None:
        who = self.random.randrange(3)
        self.number += 1
        key = f"{who}.{self.random.randrange(3)}"
        self.kit.clock.advance(1)
        if who in self.open:
            publish_in(self.kit, self.open[who][0], key, f"{key} {self.number}")
            self.open[who][1].append((key, self.number))
        else:
            self.kit.client.publish(EVENTS, texts(f"{key} {self.number}"), key=key)
            self.sent[key].append(self.number)

    def begin(self) -> None:
        self.open.setdefault(self.random.randrange(3), (self.kit.server.manager.start_short(), []))

    def decide(self) -> None:
        if self.open:
            tx, messages = self.open.pop(self.random.choice(sorted(self.open)))
            if self.random.random() < 0.3:
                self.kit.invalidate(tx)
                return
            self.kit.commit(tx)
            for key, number in messages:
                self.sent[key].append(number)

    def change(self) -> None:
        change(self.kit, self.random.randint(1, 4))

    def plan(self) -> None:
        if self.query.plan():
            number = len(self.query.offsets) - 1
            self.read[number] = self.query.rows(number)

    def kill(self) -> None:
        self.query.kill()


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(6))
def test_partitions_of_random_history_keep_order_per_key(seed: int, kit: StreamKit) -> None:
    history = History(kit, seed)
    steps = {"produce": 8, "begin": 2, "decide": 3, "change": 1.5, "plan": 5, "kill": 1}
    for step in history.random.choices(tuple(steps), tuple(steps.values()), k=80):
        getattr(history, step)()
    while history.open:
        history.decide()
    history.query.drain()
    found: dict[str, list[int]] = defaultdict(list)
    for number in range(len(history.query.offsets)):
        of_key: dict[str, set[str]] = defaultdict(set)
        for row in history.query.rows(number):
            key, sent = row["payload"].decode().split()
            found[key].append(int(sent))
            of_key[key].add(row["topic"])
        assert all(len(topics) == 1 for topics in of_key.values()), "tasks of a batch run concurrently"
    assert found == {key: sent for key, sent in history.sent.items() if sent}
    assert {number: history.query.rows(number) for number in history.read} == history.read
