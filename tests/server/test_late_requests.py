"""What producers request while the lead changes: rows of a deposed leader come late, and requests are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from threading import Event, Thread
from typing import Any
from uuid import UUID

import pytest

from tests.builders import NOW_MS, pointer
from tests.kit.messaging import reader
from tests.server.test_fenced import TOPIC, Server, Site
from tms_core.errors import BadRequest, StoreError, StoreUnavailable
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.producers.requests import Sent
from tms_core.tables.base import KEYS, Origin, Page, Want
from tms_core.topic import TopicId

ELSEWHERE = TopicId.parse("default:elsewhere")
EVERY_ROW = reader()
#: Of a transaction that can be committed.
POINTER = pointer(NOW_MS)


@pytest.fixture
def site() -> Iterator[Site]:
    with closing(Site()) as made:
        yield made


@pytest.fixture
def sent(site: Site) -> Sent:
    """The first request of a producer that the first server has registered."""
    return Sent(TOPIC, "importer", site.one.service.producers.register(TOPIC, "importer", UUID(int=1)).generation, 1)


def committed(server: Server, topic: TopicId = TOPIC) -> list[bytes]:
    """What is read when all transactions are committed."""
    pages = server.service.fetch(topic, FetchRequest(transaction=EVERY_ROW))
    return [message.payload for page in pages for message in page]


def held_up(table: Any, meanwhile: Callable[[], object]) -> None:
    """While the next write of a table is on its way, something happens."""
    put = table.put

    def late(rows: Sequence[Any]) -> None:
        table.put = put
        meanwhile()
        put(rows)

    table.put = late


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [None, POINTER])
def test_given_a_late_request_in_a_gap_when_repeated_then_it_is_written_where_readers_see_it(
    site: Site, sent: Sent, at: int | None
) -> None:
    def meanwhile() -> None:
        site.other.leads()
        site.other.service.publish(TOPIC, [b"of another program"])

    held_up(site.one.message, meanwhile)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a", b"b"], pointer=at, sent=sent)
    for _ in range(2):
        site.other.service.publish(TOPIC, [b"a", b"b"], pointer=at, sent=sent)
    assert committed(site.other) == [b"of another program", b"a", b"b"]
    assert site.rows() == [b"a", b"b", b"of another program", b"a", b"b"]


@pytest.mark.parametrize("at", [None, POINTER])
def test_given_a_request_of_which_a_part_lies_in_a_gap_when_repeated_then_it_is_there_once(
    site: Site, sent: Sent, at: int | None
) -> None:
    def meanwhile() -> None:
        site.other.leads()
        site.other.service.publish(TOPIC, [b"of another program"])

    site.one.interrupted(lambda rows: rows[:1], meanwhile)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a", b"b"], pointer=at, sent=sent)
    site.other.service.publish(TOPIC, [b"a", b"b"], pointer=at, sent=sent)
    assert committed(site.other) == [b"of another program", b"a", b"b"]


@pytest.mark.parametrize("at", [None, POINTER])
@pytest.mark.parametrize("read", range(3))
def test_given_a_repetition_when_the_late_rows_arrive_behind_one_of_its_reads_then_it_is_there_once(
    site: Site, sent: Sent, at: int | None, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sent, arrives, arrived = Event(), Event(), Event()

    def meanwhile() -> None:
        is_sent.set()
        arrives.wait(20)

    def first() -> None:
        with pytest.raises(StoreUnavailable):
            site.one.service.publish(TOPIC, [b"once"], pointer=at, sent=sent)
        arrived.set()

    held_up(site.one.message, meanwhile)
    thread = Thread(target=first)
    thread.start()
    assert is_sent.wait(20)
    site.other.leads()
    read_page, reads = site.store.message.read, iter(range(10_000))

    def arrive(want: Want[Any], *arguments: Any) -> Page[Any]:
        page: Page[Any] = read_page(want, *arguments)
        if want is KEYS and next(reads) == read:
            arrives.set()
            assert arrived.wait(20)
        return page

    monkeypatch.setattr(site.store.message, "read", arrive)
    site.other.service.publish(TOPIC, [b"once"], pointer=at, sent=sent)
    thread.join()
    assert committed(site.other) == [b"once"]


@pytest.mark.parametrize("ends", ["registered", "registered again", "deleted"])
@pytest.mark.parametrize("topic", [TOPIC, ELSEWHERE])
def test_given_an_older_instance_s_late_rows_when_that_was_fenced_at_the_next_leader_then_they_are_never_seen(
    site: Site, sent: Sent, topic: TopicId, ends: str
) -> None:
    newer, producers = UUID(int=2), site.other.service.producers
    site.one.service.create_topic(ELSEWHERE)

    def meanwhile() -> None:
        if ends == "registered again":
            site.one.service.producers.register(TOPIC, "importer", newer)
        site.other.leads()
        if ends == "deleted":
            producers.delete(TOPIC, "importer")
        else:
            assert producers.register(TOPIC, "importer", newer).generation > sent.generation

    # What is under way at the first server is not waited for there: it would end before.
    site.one.service.producers._requests.in_flight.wait_for_older = lambda *_: None  # type: ignore[method-assign]
    held_up(site.one.message, meanwhile)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(topic, [b"of an older instance"], sent=sent)
    site.other.service.publish(topic, [b"newer"])
    assert committed(site.other, topic) == [b"newer"]


def test_given_producers_of_one_topic_when_registered_then_topics_are_searched_for_once_in_each_term(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[bytes] = []
    rows = site.side.rows

    def watched(start: bytes, stop: bytes | None, limit: int) -> Any:
        searches.extend([start] if start == b"q" else [])
        return rows(start, stop, limit)

    monkeypatch.setattr(site.side, "rows", watched)
    for server in (site.one, site.other):
        server.leads()
        for name in ("a", "b"):
            server.service.producers.register(TOPIC, name, UUID(int=2))
    assert searches == [b"q"] * 2


# --- payloads --------------------------------------------------------------------------------------------------------


def store(server: Server, sent: Sent, *payloads: bytes) -> None:
    server.service.store(TOPIC, payloads, pointer=POINTER, sent=sent)


@pytest.mark.parametrize("done", range(3))
def test_given_payloads_that_come_late_when_they_were_stored_again_meanwhile_then_they_are_published_once(
    site: Site, sent: Sent, done: int
) -> None:
    put = site.one.payload.put

    def halfway(rows: Sequence[Any]) -> None:
        site.one.payload.put = put
        put(rows[:done])
        site.other.leads()
        store(site.other, sent, b"a", b"b")
        store(site.other, sent._replace(sequence=2), b"c")
        put(rows[done:])

    site.one.payload.put = halfway
    with pytest.raises(StoreUnavailable):
        store(site.one, sent, b"a", b"b")
    site.other.service.publish(TOPIC, [], pointer=POINTER, sent=sent._replace(sequence=3))
    assert committed(site.other) == [b"a", b"b", b"c"]


def test_given_a_store_that_failed_when_repeated_then_nothing_that_takes_it_back_comes_late(
    site: Site, sent: Sent
) -> None:
    put, delete = site.one.payload.put, site.one.payload.delete

    def fails(rows: Sequence[Any]) -> None:
        put(rows[:1])
        raise StoreError("HBase is away.")

    def late(keys: Sequence[bytes], origin: Origin | None) -> None:
        site.other.leads()
        store(site.other, sent, b"a", b"b")
        delete(keys, origin)

    site.one.payload.put, site.one.payload.delete = fails, late
    with pytest.raises(StoreError, match="HBase is away"):
        store(site.one, sent, b"a", b"b")
    site.other.leads()
    store(site.other, sent, b"a", b"b")
    site.other.service.publish(TOPIC, [], pointer=POINTER, sent=sent._replace(sequence=2))
    assert committed(site.other) == [b"a", b"b"]


def test_given_payloads_of_a_part_of_another_request_when_stored_under_its_number_then_it_is_refused(
    site: Site, sent: Sent
) -> None:
    site.one.payload.put = lambda rows: site.store.payload.put(rows[:1])
    store(site.one, sent, b"a", b"b")
    site.other.leads()
    with pytest.raises(BadRequest, match="sent before with other contents"):
        store(site.other, sent, b"c", b"d")
