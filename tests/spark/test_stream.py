"""Streams: each committed message once and in order, with repeatable batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janitor.spark.source.source import TmsSource
from janitor.spark.stream import feed as feeds
from janitor.spark.stream import messages as reading
from janitor.spark.stream.feed import Feed
from janitor.spark.stream.messages import messages, newest
from janitor.spark.stream.offsets import EARLIEST, START_OFFSET, Offset, StreamOffset, StreamPosition
from janitor.spark.stream.stream import STREAM_SCHEMA, StreamReader, StretchPartition
from tests.builders import NOW_MS
from tests.client.faults import SOON
from tests.server.conftest import serving
from tests.server.identities import TokenIdentities
from tests.spark.streams import ORDERS, TTL_SECONDS, Query, StreamKit, read_all, scene, texts
from tests.support import record_calls
from tms_core.client import Client, Message, Transaction, Unanswered
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, Refused, TopicNotFound, Unauthorized, Unavailable
from tms_core.rowkey import MessageId, MessageKey
from tms_core.tables.base import MessageValue
from tms_core.topic import TopicId


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamKit]:
    with scene(monkeypatch) as made:
        yield made


def test_stream_rows_have_all_columns(kit: StreamKit) -> None:
    kit.clock.advance(17)
    kit.client.publish(ORDERS, [b"one", b"two"])
    query = kit.query()
    assert query.plan()
    first, second = query.rows(0)
    assert first == {
        "id": str(MessageId(NOW_MS + 17, 0)),
        "namespace": "default",
        "topic": "orders",
        "generation": 1,
        "publish_ms": NOW_MS + 17,
        "published": datetime.fromtimestamp(NOW_MS // 1000, UTC).replace(microsecond=17_000),
        "sequence": 0,
        "payload": b"one",
    }
    assert (second["sequence"], second["payload"]) == (1, b"two")
    assert list(first) == STREAM_SCHEMA.names


def test_stream_splits_many_messages_into_batches(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=4)
    kit.publish(*range(10))
    assert query.drain() == texts(*range(10))
    assert [len(query.payloads(number)) for number in range(3)] == [4, 4, 2]
    assert not query.plan()
    kit.publish("more")
    assert query.plan()
    assert query.payloads(3) == [b"more"]


def test_stream_with_read_all_available_is_one_batch(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=4)
    kit.publish(*range(10))
    assert query.plan(read_all())
    assert query.payloads(0) == texts(*range(10))


def test_stream_batch_is_divided_among_partitions_in_order(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=10, partitions=3)
    kit.publish(*range(9))
    query.plan()
    assert [[row["payload"] for row in part] for part in query.parts(0)] == [
        texts(0, 1, 2, 3),
        texts(4, 5, 6, 7),
        texts(8),
    ]


def test_stream_continues_within_a_large_transaction(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=4)
    transaction = kit.server.manager.start_short()
    kit.client.store(ORDERS, texts(*range(6)), transaction=transaction)
    kit.client.publish(ORDERS, [], transaction=transaction)
    kit.commit(transaction)
    kit.publish(6)
    assert query.drain() == texts(*range(7))


def test_stream_of_large_messages_uses_several_arrow_batches(kit: StreamKit) -> None:
    kit.publish(*[b"x" * 1_500_000] * 4)
    query = kit.query()
    query.plan()
    reader = query.new_reader()
    [part] = reader.partitions(json.loads(json.dumps(START_OFFSET)), json.loads(query.offsets[0]))
    assert [batch.num_rows for batch in reader.read(part)] == [3, 1]
    reader.stop()


def test_stream_returns_only_committed_messages(kit: StreamKit) -> None:
    query = kit.query()
    kit.publish(1)
    kit.commit(kit.begin(2))
    kit.invalidate(kit.begin("invalid"))
    with kit.client.transaction() as transaction:
        written = kit.client.publish(ORDERS, [b"rolled back"], transaction=transaction.transaction)
        kit.client.rollback(ORDERS, written)
        transaction.roll_back()
    kit.publish(3)
    assert query.drain() == texts(1, 2, 3)


def test_stream_stops_before_undecided_messages(kit: StreamKit) -> None:
    query = kit.query()
    kit.publish(1)
    undecided, invalid = kit.begin(2), kit.begin("invalid")
    kit.publish(3)
    assert query.drain() == texts(1)
    kit.commit(undecided)
    assert query.drain() == texts(1, 2)
    kit.invalidate(invalid)
    assert query.drain() == texts(1, 2, 3)


def test_stream_with_committed_false_returns_all_messages(kit: StreamKit) -> None:
    query = kit.query(committed="false", maxMessagesPerBatch=2)
    kit.begin("open")
    kit.invalidate(kit.begin("invalid"))
    kit.publish("plain")
    assert query.drain() == texts("open", "invalid", "plain")
    assert query.payloads(0) == texts("open", "invalid")


def test_stream_batch_is_repeatable_after_commits_and_publishes(kit: StreamKit) -> None:
    query = kit.query()
    kit.commit(kit.begin(1))
    invalid, undecided = kit.begin("invalid"), kit.begin("undecided")
    kit.invalidate(invalid)
    kit.publish(2)
    query.plan()
    before = query.rows(0)
    query.kill()
    kit.commit(undecided)
    kit.publish(3)
    assert query.rows(0) == before
    assert [row["payload"] for row in before] == texts(1)
    assert query.drain() == texts(1, "undecided", 2, 3)


def test_killed_stream_from_latest_keeps_its_start(kit: StreamKit) -> None:
    kit.publish("before")
    query = kit.query(startingPosition="latest")
    assert query.plan(), "an empty batch that has the start position"
    assert query.payloads(0) == []
    kit.publish("after")
    query.kill()
    assert query.rows(0) == []
    assert query.plan()
    query.kill()
    kit.publish("later")
    assert query.payloads(1) == texts("after")
    assert query.drain() == texts("after", "later")


def test_stream_from_latest_of_empty_topic_reads_new_messages(kit: StreamKit) -> None:
    query = kit.query(startingPosition="latest")
    query.plan()
    kit.publish(1)
    assert query.drain() == texts(1)


class History:
    def __init__(self, kit: StreamKit, query: Query, chance: random.Random) -> None:
        self.kit = kit
        self.query = query
        self.chance = chance
        self.open: list[Transaction] = []
        self.number = 0
        #: The batches of the first read.
        self.read: dict[int, list[dict[str, Any]]] = {}

    def plain(self) -> None:
        self.number += 1
        self.kit.publish(self.number)

    def begin(self) -> None:
        self.number += 1
        self.open.append(self.kit.begin(self.number, -self.number))

    def store(self) -> None:
        self.number += 1
        transaction = self.kit.server.manager.start_short()
        self.kit.client.store(ORDERS, texts(*(f"{self.number}{part}" for part in "abc")), transaction=transaction)
        self.kit.client.publish(ORDERS, [], transaction=transaction)
        self.open.append(transaction)

    def commit(self) -> None:
        if self.open:
            self.kit.commit(self.open.pop(self.chance.randrange(len(self.open))))

    def invalidate(self) -> None:
        if self.open:
            self.kit.invalidate(self.open.pop(self.chance.randrange(len(self.open))))

    def plan(self) -> None:
        if self.query.plan():
            number = len(self.query.offsets) - 1
            self.read[number] = self.query.rows(number)

    def kill(self) -> None:
        self.query.kill()


@pytest.mark.no_cover
@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.sampled_from(["plain", "begin", "store", "commit", "invalidate", "plan", "plan", "kill"]),
        min_size=5,
        max_size=40,
    ),
    most=st.integers(1, 5),
    partitions=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_stream_of_random_history_returns_committed_messages(
    steps: list[str], most: int, partitions: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, scene(patch) as at:
        query = at.query(maxMessagesPerBatch=most, partitions=partitions)
        history = History(at, query, random.Random(seed))
        for step in steps:
            getattr(history, step)()
        for transaction in history.open:
            at.commit(transaction)
        assert query.drain() == at.committed()
        assert {number: query.rows(number) for number in history.read} == history.read


def test_stream_starts_at_the_given_position(kit: StreamKit) -> None:
    kit.publish(*range(6), pause_ms=1000)
    third = list(kit.client.poll(ORDERS))[3].id
    moment = datetime.fromtimestamp((NOW_MS + 3000) / 1000, UTC)
    for place in (third, NOW_MS + 3001, NOW_MS + 4000, moment.isoformat()):
        expected = texts(2, 3, 4, 5) if place == moment.isoformat() else texts(3, 4, 5)
        assert kit.query(startingPosition=place).drain() == expected


def test_stream_from_a_future_time_misses_no_message(kit: StreamKit) -> None:
    begin_ms = NOW_MS + 3 * TTL_SECONDS * 1000
    query = kit.query(startingPosition=begin_ms)
    assert query.drain() == []
    kit.publish("too early")
    kit.clock.advance(2 * TTL_SECONDS * 1000)
    assert query.drain() == []
    kit.clock.advance(begin_ms - kit.clock.now_ms())
    kit.publish(1)
    assert query.drain() == texts(1)


@pytest.mark.parametrize("ahead_ms", [-40 * 86_400_000, -3_000, -1, 0, 1, 5_000])
def test_newest_finds_last_message_with_any_clock(ahead_ms: int, kit: StreamKit) -> None:
    kit.publish(*range(5), pause_ms=700)
    kit.begin("the last")
    last = list(kit.client.poll(ORDERS))[-1].id
    assert newest(kit.client, TopicId.parse(ORDERS), kit.clock.now_ms() - ahead_ms) == last


def test_newest_of_many_messages_starts_near_the_last(kit: StreamKit, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = record_calls(monkeypatch, reading, "messages")
    kit.publish(*range(50), pause_ms=100)
    found = newest(kit.client, TopicId.parse(ORDERS), kit.clock.now_ms() + 86_400_000)
    assert found
    assert found.publish_ms == kit.clock.now_ms()
    [(_, _, place), *_] = reads
    assert found.publish_ms - 64 <= place.ms <= found.publish_ms


def test_newest_of_empty_topic_is_none(kit: StreamKit) -> None:
    assert newest(kit.client, TopicId.parse(ORDERS), kit.clock.now_ms()) is None


def test_available_now_query_ignores_later_messages(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=2)
    kit.publish(*range(5))
    undecided = kit.begin("undecided")
    query.reader = query.new_reader()
    query.reader.prepareForTriggerAvailableNow()
    kit.publish("later")
    assert query.plan()
    kit.commit(undecided)
    assert query.drain() == texts(*range(5))
    query.kill()
    query.reader = query.new_reader()
    query.reader.prepareForTriggerAvailableNow()
    kit.publish("much later")
    assert query.drain() == texts(*range(5), "undecided", "later")


def test_available_now_query_of_empty_topic_reads_nothing(kit: StreamKit) -> None:
    query = kit.query()
    query.reader = query.new_reader()
    query.reader.prepareForTriggerAvailableNow()
    kit.publish("later")
    assert query.drain() == []


def test_stream_without_new_messages_polls_less_often(kit: StreamKit) -> None:
    slept: list[float] = []

    class RecordingClock(ManualClock):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    query = kit.query()
    query.clock = RecordingClock(NOW_MS)
    query.plan()
    for _ in range(30):
        assert not query.plan()
    assert 0 < min(slept) < 0.05
    assert 0.5 <= slept[-1] <= 1


def test_stream_with_expired_messages_names_the_first_missing(kit: StreamKit, caplog: pytest.LogCaptureFixture) -> None:
    strict, patient = kit.query(maxMessagesPerBatch=2), kit.query(maxMessagesPerBatch=2, failOnDataLoss="false")
    kit.publish(*range(4))
    third = list(kit.client.poll(ORDERS))[2].id
    strict.plan()
    patient.plan()
    kit.clock.advance((TTL_SECONDS + 1) * 1000)
    kit.publish("after")
    with pytest.raises(Refused, match=f"{third}.*failOnDataLoss"):
        strict.plan()
    assert patient.plan()
    assert patient.payloads(1) == texts("after")
    assert f"starting with {third}" in caplog.text


def test_stream_stopped_for_longer_than_the_ttl_fails(kit: StreamKit) -> None:
    query = kit.query()
    kit.publish(1)
    query.plan()
    query.kill()
    kit.publish("expired")
    kit.clock.advance((TTL_SECONDS + 1) * 1000)
    kit.publish(2)
    with pytest.raises(Refused, match=r"2023-11-14 22:13:20 .* UTC"):
        query.plan()


def test_stream_of_idle_topic_plans_batches_and_loses_nothing(kit: StreamKit) -> None:
    query = kit.query()
    kit.publish(1)
    for _ in range(30):
        query.plan()
        kit.clock.advance(TTL_SECONDS * 100)
    assert len(query.offsets) == 1 + 29 // 3, "a batch in each quarter of the ttl"
    kit.clock.advance(TTL_SECONDS * 600)
    query.kill()
    kit.publish(2)
    query.plan()
    assert query.payloads(len(query.offsets) - 1) == texts(2)


def test_stream_blocked_by_long_transaction_reports_expiry(kit: StreamKit) -> None:
    query = kit.query()
    query.plan()
    undecided = kit.begin("undecided", long=True)
    kit.publish("after")
    for _ in range(9):
        assert not query.plan()
        kit.clock.advance(TTL_SECONDS * 100)
    kit.clock.advance(TTL_SECONDS * 200)
    kit.commit(undecided)
    with pytest.raises(Refused, match="an open transaction blocked them"):
        query.plan()


def test_stream_with_unrelated_long_transaction_keeps_planning(kit: StreamKit) -> None:
    query = kit.query()
    kit.server.manager.start_long()
    for number in range(15):
        kit.publish(number)
        kit.invalidate(kit.begin("invalid"))
        assert query.plan()
        kit.clock.advance(TTL_SECONDS * 100)


def test_stream_that_missed_late_commit_reports_possible_expiry(kit: StreamKit) -> None:
    query = kit.query()
    query.reader = query.new_reader()
    query.reader.prepareForTriggerAvailableNow()
    late = kit.begin("late", long=True)
    kit.clock.advance(100_000)
    query.drain()
    query.kill()
    kit.commit(late)
    kit.clock.advance(TTL_SECONDS * 1000 - 50_000)
    with pytest.raises(Refused, match="may have expired before the query"):
        query.plan()


def test_expired_stream_batch_fails_or_warns(kit: StreamKit, caplog: pytest.LogCaptureFixture) -> None:
    for strict in (True, False):
        query = kit.query(failOnDataLoss=str(strict).lower())
        kit.publish(1, 2)
        query.plan()
        query.kill()
        kit.clock.advance((TTL_SECONDS + 1) * 1000)
        if strict:
            with pytest.raises(Refused, match=r" 2 messages .* 0 "):
                query.rows(0)
        else:
            assert query.rows(0) == []
            assert "its task read 0 messages" in caplog.text


def test_stream_of_recreated_topic_fails_or_warns(kit: StreamKit, caplog: pytest.LogCaptureFixture) -> None:
    strict, patient = kit.query(), kit.query(failOnDataLoss="false")
    kit.publish(1)
    strict.plan()
    patient.plan()
    kit.client.delete_topic(ORDERS)
    kit.client.create_topic(ORDERS)
    kit.publish("new")
    with pytest.raises(Refused, match="generation 1 "):
        strict.plan()
    with pytest.raises(Refused, match=" 0 "):
        strict.rows(0)
    patient.plan()
    assert [(row["payload"], row["generation"]) for row in patient.rows(1)] == [(b"new", 2)]
    late = MessageKey(TopicId.parse(ORDERS), 2, NOW_MS + 1, 0)
    kit.server.store.message.put([(late.pack(), MessageValue(None, b"of another generation"))])
    assert patient.rows(0) == []
    assert "deleted and created again" in caplog.text


def test_stream_batch_with_late_rows_fails(kit: StreamKit) -> None:
    query = kit.query(committed="false")
    transaction = kit.server.manager.start_short()
    kit.client.store(ORDERS, [b"early"], transaction=transaction)
    kit.client.publish(ORDERS, [], transaction=transaction)
    kit.publish(1)
    query.plan()
    assert query.payloads(0) == texts("early", 1)
    kit.client.store(ORDERS, [b"late"], transaction=transaction)
    with pytest.raises(Refused, match=r" 2 messages .* 3 "):
        query.rows(0)


class TruncatingClient:
    """A client whose responses are truncated after ``each`` messages."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.requests: list[tuple[Any, bool, int | None]] = []

    def poll(self, _: TopicId, *, start: Any, inclusive: bool, limit: int | None, transaction: object) -> Any:
        self.requests.append((start, inclusive, limit))
        first = 0 if start is None else start.sequence + 1
        return _Answer([Message(MessageId(1, number), b"") for number in range(first, 7)][:limit], self.each)


class _Answer:
    def __init__(self, found: list[Message], each: int) -> None:
        self._found, self._each = found, each

    def __enter__(self) -> Iterator[Message]:
        yield from self._found[: self._each]
        if self._each < len(self._found):
            raise Unanswered("cut short")

    def __exit__(self, *_: object) -> None:
        pass


def test_messages_continue_after_a_truncated_response() -> None:
    client: Any = TruncatingClient(3)
    found = [message.id.sequence for message in messages(client, TopicId("a", "b"), EARLIEST, view=None, limit=6)]
    assert found == list(range(6))
    assert client.requests == [(None, True, 6), (MessageId(1, 2), False, 3)]
    complete: Any = TruncatingClient(3)
    assert len(list(messages(complete, TopicId("a", "b"), EARLIEST, view=None, limit=3))) == 3


def test_messages_of_empty_truncated_response_raise_unanswered() -> None:
    client: Any = TruncatingClient(0)
    with pytest.raises(Unanswered):
        list(messages(client, TopicId("a", "b"), EARLIEST, view=None))
    assert len(client.requests) == 1


GIVEN = {"url": "http://127.0.0.1:1", "topic": ORDERS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, r"\burl\b"),
        ({"topic": None}, "topic is missing"),
        ({"topic": "orders"}, "topic is orders"),
        ({"url": "ftp://x"}, "'ftp://x'"),
        ({"transactions": "nowhere"}, "'nowhere'"),
        ({"token": "secret"}, "token_file"),
        ({"startingOffset": "latest"}, "startingoffset .*startingPosition"),
        ({"startingPosition": "yesterday"}, "startingPosition is yesterday"),
        ({"startingPosition": "2023-11-14T22:13:20"}, "2023-11-14T22:13:20, .*zone"),
        ({"startingPosition": "9" * 30}, "startingPosition is 9"),
        ({"startingPosition": "x" * 40}, "startingPosition is x"),
        ({"maxMessagesPerBatch": "0"}, "maxMessagesPerBatch is 0"),
        ({"partitions": "many"}, "partitions is many"),
        ({"failOnDataLoss": "yes"}, "failOnDataLoss is yes"),
        ({"ca_file": "/nowhere"}, "ca_file is /nowhere"),
    ],
)
def test_stream_with_wrong_option_names_it(options: dict[str, str | None], message: str) -> None:
    given = {name: value for name, value in {**GIVEN, **options}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=message):
        TmsSource(given)


def test_rejected_options_do_not_reveal_a_secret() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TmsSource({**GIVEN, "token": "secret"})
    assert "secret" not in str(caught.value)


def test_options_of_the_other_reader_are_reported() -> None:
    stream, store = TmsSource(GIVEN), TmsSource({"leveldb": "/nowhere"})
    assert stream.schema() == STREAM_SCHEMA
    with pytest.raises(ConfigurationError, match=r"spark\.readStream"):
        stream.reader(stream.schema())
    with pytest.raises(ConfigurationError, match=r"url.*topic"):
        store.streamReader(store.schema())
    stream.streamReader(stream.schema())


def test_stream_of_missing_topic_names_it(kit: StreamKit) -> None:
    kit.client.delete_topic(ORDERS)
    with pytest.raises(TopicNotFound, match=ORDERS):
        kit.query().plan()


def test_stream_with_unreachable_server_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "RETRIES", SOON)
    reader = StreamReader(Feed.parse(GIVEN))
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 "):
        reader.latestOffset(reader.initialOffset(), read_all())
    reader.stop()


def test_stream_with_unknown_token_is_unauthorized(tmp_path: Path) -> None:
    identities = TokenIdentities(tmp_path)
    file = tmp_path / "token"
    file.write_text(identities.wrong("consumer"))
    with serving(gate=identities.gate) as server:
        options = {"url": f"http://127.0.0.1:{server.port}", "topic": ORDERS, "token_file": str(file)}
        reader = StreamReader(Feed.parse(options))
        with pytest.raises(Unauthorized):
            reader.latestOffset(reader.initialOffset(), read_all())
        file.write_text(identities.good("consumer"))
        with pytest.raises(TopicNotFound):
            reader.latestOffset(reader.initialOffset(), read_all())
        reader.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "cannot be read"),
        ({"version": 3}, "version 3, not 1 or 2"),
        ({"topic": "default:others"}, "stream of default:others, not of default:orders"),
        ({"at": "somewhere"}, "cannot be read"),
        ({"batch": [["earliest"]]}, "cannot be read"),
        ({"next": "x"}, "cannot be read"),
    ],
)
def test_stream_with_wrong_checkpoint_is_rejected(changes: dict[str, Any], message: str) -> None:
    offset = Offset(ORDERS, 1, EARLIEST, NOW_MS).to_json()
    alone = StreamOffset(ORDERS, 1, (Offset(ORDERS, 1, EARLIEST, NOW_MS),))
    assert StreamOffset.parse(offset, ORDERS) == alone
    assert alone.to_json() == offset, "the layout of checkpoints without partitions"
    with pytest.raises(Refused, match=message):
        StreamOffset.parse({**offset, **changes}, ORDERS)


def test_stream_with_gap_in_offsets_is_rejected(kit: StreamKit) -> None:
    query = kit.query(maxMessagesPerBatch=1)
    kit.publish(1, 2, 3)
    query.drain()
    del query.offsets[1]
    with pytest.raises(Refused, match=r"after:.* after:"):
        query.rows(1)


def test_stream_batch_with_equal_offsets_is_empty(kit: StreamKit) -> None:
    query = kit.query()
    kit.publish(1)
    query.plan()
    query.offsets.append(query.offsets[0])
    assert query.rows(1) == []
    reader = query.new_reader()
    assert reader.partitions(dict(START_OFFSET), dict(START_OFFSET)) == []
    reader.stop()
    reader.stop()


@pytest.mark.parametrize(
    "place",
    [EARLIEST, StreamPosition(5), StreamPosition(MessageId(1, 2, 3, 4)), StreamPosition.after_message(MessageId(1, 2))],
)
def test_stream_position_round_trips(place: StreamPosition) -> None:
    assert StreamPosition.parse(str(place)) == place


def test_stream_position_ms_is_its_start_time() -> None:
    assert (EARLIEST.ms, StreamPosition(7).ms, StreamPosition(MessageId(9, 1)).ms) == (0, 7, 9)
    assert Feed.parse({**GIVEN, "startingPosition": "7"}).begin == StreamPosition(7)


def test_stream_partition_contains_no_client(kit: StreamKit) -> None:
    query = kit.query()
    kit.publish(1)
    query.plan()
    [part] = query.new_reader().partitions(dict(START_OFFSET), json.loads(query.offsets[0]))
    assert isinstance(part, StretchPartition)
    assert not any(isinstance(value, Client) for value in vars(part).values())
