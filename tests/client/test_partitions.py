"""Topics with partitions and routes in the clients: keys, work stealing, patterns and changed numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.client import payloads
from tests.support import in_event_loop, record_calls
from tms_core.client import BadRequest, Client, PartitionsChanged, Retry, work
from tms_core.client.testing import InProcess
from tms_core.client.transactions import partitions
from tms_core.messaging.groups.claims import Groups
from tms_core.messaging.topics.partitions import hash_key
from tms_core.rowkey import MessageId

EVENTS, BILLS, GROUP = "default:events", "default:bills", "billing"
IDLE = 0.3
QUICK = Retry(first_seconds=0.005, factor=1.5, longest_seconds=0.05)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "IDLE", QUICK)
    monkeypatch.setattr(work, "FAILED", QUICK)
    monkeypatch.setattr(partitions, "_CHANGING", Retry(attempts=50, first_seconds=0.005, longest_seconds=0.05))


def create_with_partitions(client: Client, number: int) -> None:
    client.create_topic(EVENTS, properties={"partitions": str(number)})


def change(client: Client, number: int, topic: str = EVENTS) -> None:
    client.update_topic(topic, properties={"partitions": str(number)})


def consume(client: Client, topic: str = EVENTS, group: str = GROUP, **options: Any) -> list[bytes]:
    with client.transaction() as tx:
        return [message.payload for message in tx.consume(topic, group, **options)]


def names(client: Client) -> list[str]:
    return [topic.topic for topic in client.topics() if topic.topic not in ("orders", "bills")]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_publish_with_a_key_uses_its_partition_and_without_rotates(client: Client) -> None:
    create_with_partitions(client, 4)
    for number in range(8):
        client.publish(EVENTS, [b"%d" % number], key=b"user 7")
    assert payloads(client, f"{EVENTS}-{hash_key(b'user 7') % 4}") == [b"%d" % number for number in range(8)]
    client.create_topic("default:turns", properties={"partitions": "3"})
    for _ in range(6):
        client.publish("default:turns", [b"x"])
    with client.transaction() as tx:
        for _ in range(3):
            tx.publish("default:turns", [b"y"])
    assert [payloads(client, f"default:turns-{at}") for at in range(3)] == [[b"x", b"x", b"y"]] * 3


@in_event_loop
async def test_key_of_any_publish_chooses_the_partition(server: InProcess, client: Client) -> None:
    create_with_partitions(client, 4)
    async with server.async_client() as loop:
        for payload in (b"0", b"1"):
            await loop.publish(EVENTS, [payload], key="user 7")
        async with loop.transaction() as tx:
            await tx.publish(EVENTS, [b"2"], key=b"user 7")
    with client.producer(BILLS, "importer") as producer, producer.transaction() as tx:
        tx.publish(EVENTS, [b"3"], key=b"user 7")
    assert payloads(client, f"{EVENTS}-{hash_key(b'user 7') % 4}") == [b"0", b"1", b"2", b"3"]


def test_publish_async_rotates_among_partitions(client: Client) -> None:
    create_with_partitions(client, 2)
    for number in range(2):
        client.publish_async(EVENTS, [b"%d" % number])
        client.flush()
    assert [payloads(client, f"{EVENTS}-{number}") for number in range(2)] == [[b"0"], [b"1"]]


def test_publish_with_outdated_partitions_uses_current_partitions(server: InProcess, client: Client) -> None:
    create_with_partitions(client, 2)
    assert consume(client) == []  # now the client knows two empty partitions
    with server.client() as other:
        change(other, 3)
        change(other, 5)
    client.publish(EVENTS, [b"1"], key=b"k")
    assert consume(client) == [b"1"]


@pytest.mark.parametrize("ahead", [False, True], ids=["published at commit", "stored before"])
def test_publish_in_a_transaction_uses_current_partitions(server: InProcess, client: Client, ahead: bool) -> None:
    create_with_partitions(client, 2)
    assert consume(client) == []
    with server.client() as other:
        change(other, 3)
        change(other, 5)
    with client.transaction() as tx:
        tx.publish(EVENTS, [b"x" * (9_000_000 if ahead else 1)], key=b"k")
    assert [len(one) for one in consume(client)] == [9_000_000 if ahead else 1]


def test_publish_to_routes_copies_the_message_to_each_or_to_none(client: Client) -> None:
    client.create_topic(EVENTS, properties={"routes": '{"users": 2, "pages": 3}'})
    key = {"users": b"ada", "pages": b"/cart"}
    client.publish(EVENTS, [b"1"], key=key)
    with client.transaction() as tx:
        tx.publish(EVENTS, [b"2"], key=key)
    with client.transaction() as tx:
        tx.publish(EVENTS, [b"3"], key=key)
        tx.roll_back()
    users, pages = f"{EVENTS}-users", f"{EVENTS}-pages"
    assert payloads(client, f"{users}-{hash_key(b'ada') % 2}") == [b"1", b"2"]
    assert payloads(client, f"{pages}-{hash_key(b'/cart') % 3}") == [b"1", b"2"]
    assert (consume(client, users), consume(client, pages)) == ([b"1", b"2"], [b"1", b"2"])
    client.publish(EVENTS, [b"4"])
    assert (consume(client, users), consume(client, pages)) == ([b"4"], [b"4"])
    for wrong in ({"users": b"ada"}, {"users": b"ada", "pages": b"/", "more": b""}):
        with pytest.raises(BadRequest, match="users, pages"):
            client.publish(EVENTS, [b"5"], key=wrong)
    with pytest.raises(BadRequest, match=users):
        client.publish(users, [b"5"], key=key)
    assert consume(client, users) == []


def test_publish_with_an_invalid_or_missing_key_is_rejected(client: Client) -> None:
    create_with_partitions(client, 2)
    with pytest.raises(BadRequest, match="bytes or text"):
        client.publish(EVENTS, [b"1"], key=7)  # type: ignore[call-overload]
    with client.transaction() as tx:
        with pytest.raises(BadRequest, match=r"transaction.* key"):
            client.publish(EVENTS, [b"1"], transaction=tx.transaction, key=b"7")  # type: ignore[call-overload]
        with pytest.raises(PartitionsChanged):
            client.publish(EVENTS, [b"1"], transaction=tx.transaction)
    with pytest.raises(PartitionsChanged, match="events-0"):
        payloads(client, EVENTS)
    assert consume(client) == []


# --- consuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["partition", "none"])
def test_consume_uses_partitions_without_a_claim(client: Client, order: str) -> None:
    create_with_partitions(client, 3)
    for number in range(3):
        client.publish(EVENTS, [b"%d" % number])
    with client.transaction() as one, client.transaction() as two:
        first = next(one.consume(EVENTS, GROUP, order=order)).payload
        second = next(two.consume(EVENTS, GROUP, order=order)).payload
        assert len({first, second, *consume(client, order=order)}) == 3
    client.publish(EVENTS, [b"3"])
    assert consume(client, order=order) == [b"3"]


def test_work_finds_the_only_partition_without_a_claim(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    create_with_partitions(client, 10)
    # All polls start at the first partition, so the worker polls the free partition last.
    monkeypatch.setattr(client._core.random, "random", lambda: 0.0)
    for number in range(10):
        client.publish(EVENTS, [b"%d" % number])
    with client.transaction() as tx:
        held = {message.payload for message in tx.consume(EVENTS, GROUP, limit=9)}
        found = [batch[0].payload for _, batch in client.work(EVENTS, GROUP, idle_seconds=1)]
    assert {*found} == {b"%d" % number for number in range(10)} - held


def test_dead_letters_are_those_of_the_whole_topic(client: Client) -> None:
    create_with_partitions(client, 2)
    client.publish(EVENTS, [b"bad"])
    for tx, _ in client.work(EVENTS, GROUP, max_deliveries=1, idle_seconds=IDLE):
        tx.roll_back()
    assert payloads(client, "default:events-dead") == [b"bad"]


def test_consume_starts_with_the_partition_of_the_last_poll(client: Client) -> None:
    create_with_partitions(client, 3)
    client.publish(EVENTS, [b"a"], key=b"k")
    assert consume(client) == [b"a"]
    client.publish(EVENTS, [b"b"], key=b"k")
    with pytest.MonkeyPatch.context() as patch:
        polls = record_calls(patch, Groups, "poll")
        assert consume(client, limit=1) == [b"b"]
    assert [str(topic) for _, topic, *_ in polls] == [f"{EVENTS}-{hash_key(b'k') % 3}"]


def test_consume_with_a_pattern_reads_all_matching_topics(client: Client) -> None:
    create_with_partitions(client, 2)
    client.create_topic("default:events-more")
    client.create_topic("default:event")
    for topic in (EVENTS, EVENTS, "default:events-more", "default:event"):
        client.publish(topic, [topic.encode()])
    assert sorted(consume(client, "default:events*")) == [b"default:events", b"default:events", b"default:events-more"]
    client.publish(EVENTS, [b"again"])
    found = [batch[0].payload for _, batch in client.work("default:events-*", GROUP, idle_seconds=IDLE)]
    assert found == [b"again"]
    with pytest.raises(BadRequest):
        client.work("orders*", GROUP)


@pytest.mark.parametrize("order", ["partition", "none"])
def test_consumer_set_back_reads_the_partitions_again(client: Client, order: str) -> None:
    create_with_partitions(client, 1)
    client.publish(EVENTS, [b"old"], key=b"k")
    change(client, 2)
    client.publish(EVENTS, [b"new"], key=b"k")
    assert [message for _ in range(3) for message in consume(client, order=order)] == [b"old", b"new"]
    for partition in ("events-0", "events-f2-0", "events-f2-1"):
        client.set_position(f"default:{partition}", GROUP, MessageId(0, 0))
    found = [message for _ in range(4) for message in consume(client, order=order)]
    assert (found if order == "partition" else sorted(found, reverse=True)) == [b"old", b"new"]


def test_consumer_deleted_from_a_sealed_partition_reads_it_first(client: Client) -> None:
    create_with_partitions(client, 1)
    client.publish(EVENTS, [b"old"])
    change(client, 2)
    assert [consume(client) for _ in range(2)] == [[b"old"], []]
    client.delete_position(f"{EVENTS}-0", GROUP)
    client.publish(EVENTS, [b"new"])
    assert [consume(client) for _ in range(2)] == [[b"old"], [b"new"]]
