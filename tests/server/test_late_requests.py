"""Requests of producers during a change of the leader: late rows of a former leader, and repetitions."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any
from uuid import UUID

import pytest

from tests.builders import NOW_MS, pointer
from tests.kit.messaging import read_payloads, reader
from tests.kit.servers import TOPIC, FencedServer, Rows, TwoServers
from tms_core.errors import BadRequest, StoreError, StoreUnavailable
from tms_core.messaging.producers.requests import Sent
from tms_core.tables.base import KEYS, Page, Projection
from tms_core.topic import TopicId

EVERY_ROW = reader()
#: The write pointer of a transaction in progress.
POINTER = pointer(NOW_MS)


@pytest.fixture
def sent(two: TwoServers) -> Sent:
    """Register a producer at the first server; return the identity of its first request."""
    return Sent(TOPIC, "importer", two.one.service.producers.register(TOPIC, "importer", UUID(int=1)).generation, 1)


def committed(server: FencedServer, topic: TopicId = TOPIC) -> list[bytes]:
    """Return the messages that a reader of all transactions sees."""
    return read_payloads(server.service, topic, transaction=EVERY_ROW)


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [None, POINTER])
@pytest.mark.parametrize("read", range(3))
def test_repeat_while_late_rows_arrive_exists_once(
    two: TwoServers, sent: Sent, at: int | None, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sent, arrives, arrived = Event(), Event(), Event()

    def concurrent_action() -> None:
        is_sent.set()
        arrives.wait(20)

    def first() -> None:
        with pytest.raises(StoreUnavailable):
            two.one.service.publish(TOPIC, [b"once"], pointer=at, sent=sent)
        arrived.set()

    two.one.interrupt_write(concurrent_action)
    thread = Thread(target=first)
    thread.start()
    assert is_sent.wait(20)
    two.other.take_over()
    read_page, reads = two.store.message.read, iter(range(10_000))

    def arrive(want: Projection[Any], *arguments: Any) -> Page[Any]:
        page: Page[Any] = read_page(want, *arguments)
        if want is KEYS and next(reads) == read:
            arrives.set()
            assert arrived.wait(20)
        return page

    monkeypatch.setattr(two.store.message, "read", arrive)
    two.other.service.publish(TOPIC, [b"once"], pointer=at, sent=sent)
    thread.join()
    assert committed(two.other) == [b"once"]


@pytest.mark.parametrize("ends", ["registered", "deleted"])
def test_late_rows_of_a_fenced_instance_are_never_seen(two: TwoServers, sent: Sent, ends: str) -> None:
    producers, elsewhere = two.other.service.producers, TopicId.parse("default:elsewhere")
    two.one.service.create_topic(elsewhere)

    def concurrent_action() -> None:
        two.other.take_over()
        if ends == "deleted":
            producers.delete(TOPIC, "importer")
        else:
            producers.register(TOPIC, "importer", UUID(int=2))

    two.one.interrupt_write(concurrent_action)
    with pytest.raises(StoreUnavailable):
        two.one.service.publish(elsewhere, [b"of an older instance"], sent=sent)
    two.other.service.publish(elsewhere, [b"newer"])
    assert committed(two.other, elsewhere) == [b"newer"]


def test_registration_searches_the_topics_of_producers_once_in_a_term(
    two: TwoServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[bytes] = []
    rows = two.side.rows

    def record_searches(start: bytes, stop: bytes | None, limit: int) -> Any:
        searches.extend([start] if start == b"q" else [])
        return rows(start, stop, limit)

    monkeypatch.setattr(two.side, "rows", record_searches)
    for server in (two.one, two.other, two.one):
        server.take_over()
        for name in ("a", "b"):
            server.service.producers.register(TOPIC, name, UUID(int=2))
    assert searches == [b"q"] * 3


@pytest.mark.parametrize("at", [None, POINTER])
def test_repeat_at_a_returning_leader_exists_once(two: TwoServers, sent: Sent, at: int | None) -> None:
    two.one.service.publish(TOPIC, [b"1"], pointer=at, sent=sent)
    two.other.take_over()
    two.other.service.publish(TOPIC, [b"2"], pointer=at, sent=sent._replace(sequence=2))
    two.one.take_over()
    two.one.service.publish(TOPIC, [b"2"], pointer=at, sent=sent._replace(sequence=2))
    two.one.service.publish(TOPIC, [b"3"], pointer=at, sent=sent._replace(sequence=3))
    assert committed(two.one) == [b"1", b"2", b"3"]


# --- payloads --------------------------------------------------------------------------------------------------------


def store(server: FencedServer, sent: Sent, *payloads: bytes) -> None:
    server.service.store(TOPIC, payloads, pointer=POINTER, sent=sent)


def test_failed_store_of_a_producer_deletes_no_payloads(two: TwoServers, sent: Sent) -> None:
    put = two.one.payload.put

    def put_and_fail(rows: Rows) -> None:
        put(rows[:1])
        raise StoreError("HBase is away.")

    two.one.payload.put = put_and_fail
    with pytest.raises(StoreError, match="away"):
        store(two.one, sent, b"a", b"b")
    assert len(two.store.payload.read(KEYS, b"", None, 10).items) == 1


def test_store_next_to_a_partial_request_is_rejected(two: TwoServers, sent: Sent) -> None:
    two.one.payload.put = lambda rows: two.store.payload.put(rows[:1])
    store(two.one, sent, b"a", b"b")
    two.other.take_over()
    with pytest.raises(BadRequest, match="contents"):
        store(two.other, sent, b"c", b"d")
