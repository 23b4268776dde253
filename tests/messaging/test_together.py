"""Concurrent clients and the janitor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise
from threading import Event
from typing import Any

import pytest

from tests.builders import HOUR, MINUTE, NOW_MS, SECOND, Call, Snapshots, adopted_janitor, hold_call, watch
from tests.kit.messaging import HOUR_SECONDS, Kit, P, named, reader
from tests.support import PATIENCE_SECONDS
from tms_core.clock import SystemClock
from tms_core.errors import TopicNotFound, Unavailable
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.messaging.publish import open_topics
from tms_core.messaging.publish.queue import Queue
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageId, MessageKey
from tms_core.tables.base import KEYS, MessageValue, Page

PRODUCERS, REQUESTS = 6, 40


@pytest.fixture(params=["cached", "stored"])
def service(kit: Kit, request: pytest.FixtureRequest) -> MessagingService:
    kit.service.close()
    cache_bytes = 1 << 16 if request.param == "cached" else 0
    kit.service = MessagingService(kit.store, SystemClock(), ServiceOptions(cache_bytes=cache_bytes), side=kit.side)
    return kit.service


def fetch(
    service: MessagingService, name: str, start: MessageId | None = None, limit: int = 10**9
) -> list[FetchedMessage]:
    pages = service.fetch(named(name), FetchRequest(start, inclusive=False, limit=limit))
    return [message for page in pages for message in page]


def run_concurrently(works: list[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(works)) as threads:
        for future in [threads.submit(work) for work in works]:
            future.result(PATIENCE_SECONDS)


def test_many_producers_and_consumers_see_each_message_once_in_order(service: MessagingService, kit: Kit) -> None:
    kit.create("other")
    produced = Event()

    def produce(producer: int) -> None:
        for request in range(REQUESTS):
            name = ("orders", "other")[request % 2]
            messages = [b"%d %d %d" % (producer, request, number) for number in range(1 + request % 4)]
            service.publish(named(name), messages, pointer=None if producer % 2 else 2**62)

    def produce_all() -> None:
        run_concurrently([partial(produce, producer) for producer in range(PRODUCERS)])
        produced.set()

    seen: list[list[FetchedMessage]] = []

    def consume(limit: int) -> None:
        found: list[FetchedMessage] = []
        ended = False
        while not ended:
            ended = produced.wait(0.001)
            while some := fetch(service, "orders", MessageId.parse(found[-1].id) if found else None, limit):
                found += some
                assert len(found) <= 10_000, "endless loop"
        seen.append(found)

    run_concurrently([produce_all, *(partial(consume, limit) for limit in (1, 7, 10**9))])
    final = fetch(service, "orders")
    assert all(found == final for found in seen)
    for name, odd in (("orders", 0), ("other", 1)):
        messages = fetch(service, name)
        ids = [message.id for message in messages]
        assert all(before < after for before, after in pairwise(ids))
        requests = [[item.payload for item in group] for _, group in groupby(messages, key=request_of)]
        expected = [
            [b"%d %d %d" % (producer, request, number) for number in range(1 + request % 4)]
            for producer in range(PRODUCERS)
            for request in range(odd, REQUESTS, 2)
        ]
        assert sorted(requests) == sorted(expected)


def request_of(message: FetchedMessage) -> bytes:
    producer, request, _ = message.payload.split()
    return producer + b" " + request


def test_many_transactions_that_store_find_their_own_payloads(service: MessagingService) -> None:
    base = SystemClock().now_ms() * 1_000_000

    def produce(number: int) -> None:
        for round_number in range(5):
            service.store(named("orders"), [b"%d %d" % (number, round_number)] * 3, pointer=base + number)
        service.publish(named("orders"), [], pointer=base + number)

    run_concurrently([partial(produce, number) for number in range(PRODUCERS)])
    payloads = [message.payload for message in fetch(service, "orders")]
    transactions = [list(group) for _, group in groupby(payloads, key=lambda payload: payload.split()[0])]
    assert sorted(transactions) == [
        [b"%d %d" % (number, round_number) for round_number in range(5) for _ in range(3)]
        for number in range(PRODUCERS)
    ]


def test_queued_requests_are_written_in_one_batch_without_the_large(kit: Kit) -> None:
    writing, go = Event(), Event()
    batches: list[int] = []

    def wait(call: Call) -> None:
        if call.name == "message.put":
            batches.append(len(call.arguments[0]))
            writing.set()
            assert go.wait(PATIENCE_SECONDS)

    watch(kit.store, before=wait)
    first = kit.service.submit_publish(named("orders"), [b"first"], pointer=None)
    assert writing.wait(PATIENCE_SECONDS)
    others = [kit.service.submit_publish(named("orders"), [b"x", b"y"], pointer=None) for _ in range(10)]
    large = kit.service.submit_publish(named("orders"), [bytes(9 << 20)], pointer=None)
    last = kit.service.submit_publish(named("orders"), [b"last"], pointer=None)
    assert kit.service.workers.requests == 13
    go.set()
    for answer in (first, *others, large, last):
        answer.result(PATIENCE_SECONDS)
    assert batches == [1, 21, 1]


def test_hanging_write_of_a_topic_does_not_block_other_topics(kit: Kit) -> None:
    kit.create("other")
    with hold_call(kit.store) as writing:
        hanging = kit.service.submit_publish(named("orders"), [b"a"], pointer=None)
        assert writing.wait(PATIENCE_SECONDS)
        kit.publish("other", b"b")
        assert not hanging.done()
        assert kit.payloads("other") == [b"b"]
    hanging.result(PATIENCE_SECONDS)


def test_publish_while_a_topic_is_opened_waits(kit: Kit) -> None:
    kit.publish("orders", b"a")
    theirs = MessageKey(named("orders"), 1, NOW_MS, 1).pack()
    kit.store.message.put([(theirs, MessageValue(None, b"theirs"))])
    kit.service.invalidate()
    opening, go = Event(), Event()
    read = kit.store.message.read

    def read_slowly(*arguments: Any) -> Page[Any]:
        opening.set()
        assert go.wait(PATIENCE_SECONDS)
        return read(*arguments)

    kit.store.message.read = read_slowly  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as threads:
        fetching = threads.submit(kit.payloads)
        assert opening.wait(PATIENCE_SECONDS)
        publishing = kit.service.submit_publish(named("orders"), [b"b"], pointer=None)
        with suppress(TimeoutError):
            publishing.result(0.2)
        go.set()
        publishing.result(PATIENCE_SECONDS)
        assert fetching.result(PATIENCE_SECONDS)[:2] == [b"a", b"theirs"]
    assert kit.payloads() == [b"a", b"theirs", b"b"]


def test_store_of_many_transactions_overwrites_nothing(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_topics, "_KNOWN_POINTERS", 2)
    for round_number in range(3):
        for number in range(4):
            kit.put("orders", P + number, b"%d %d" % (number, round_number))
    kit.publish("orders", pointer=P + 1)
    assert kit.payloads() == [b"1 0", b"1 1", b"1 2"]
    [stored] = kit.service._open_topics._stored.values()
    assert (len(stored.pointers), len(stored.hidden)) == (2, 2)


def test_publish_after_the_block_of_a_service_is_unavailable(kit: Kit) -> None:
    with kit.serve() as service:
        service.publish(named("orders"), [b"a"])
    with pytest.raises(Unavailable):
        service.publish(named("orders"), [b"b"])


def test_publish_to_missing_topics_keeps_no_queue(kit: Kit) -> None:
    for number in range(20):
        with pytest.raises(TopicNotFound):
            kit.publish(f"none{number}", b"a")
        with pytest.raises(TopicNotFound):
            kit.put(f"none{number}", P, b"a")
    kit.service.close()
    gc.collect()
    left = [item for item in gc.get_objects() if isinstance(item, Queue) and item.topic.topic.startswith("none")]
    assert left == []


# --- the janitor -----------------------------------------------------------------------------------------------------


def test_sweep_keeps_payloads_of_a_transaction_longer_than_the_ttl(kit: Kit) -> None:
    kit.restart(max_lifetime_seconds=HOUR_SECONDS)
    kit.create("short", ttl="60")
    snapshots = Snapshots(kit.clock, in_progress=[P])
    janitor_kit = adopted_janitor(kit.store, clock=kit.clock, snapshots=snapshots, hold_seconds=0)
    kit.put("short", P, b"a", b"b")
    for _ in range(10):
        kit.clock.advance(MINUTE)
        janitor_kit.engine.run_once()
    kit.put("short", P, b"c")
    reference = kit.publish("short", pointer=P)
    snapshots.in_progress = []
    for moment_ms in (0, MINUTE):
        kit.clock.advance(moment_ms)
        janitor_kit.engine.run_once()
        assert kit.payloads("short", transaction=reader()) == [b"a", b"b", b"c"]
    assert reference.start_ms == kit.clock.now_ms() - MINUTE
    kit.clock.advance(1)
    janitor_kit.engine.run_once()
    assert kit.payloads("short") == []
    assert kit.store.message.read(KEYS, b"", None, 10).items == []
    assert kit.store.payload.read(KEYS, b"", None, 10).items == []


def test_sweep_keeps_payloads_of_a_rolled_back_message_for_plain_readers(kit: Kit) -> None:
    kit.create("short", ttl="60")
    janitor_kit = adopted_janitor(kit.store, clock=kit.clock, hold_seconds=0)
    kit.put("short", P, b"a")
    kit.clock.advance(50 * SECOND)
    kit.service.rollback(named("short"), kit.publish("short", pointer=P))
    kit.clock.advance(50 * SECOND)
    janitor_kit.engine.run_once()
    assert kit.payloads("short") == [b"a"]
    assert kit.payloads("short", transaction=reader()) == []


def test_sweep_finds_payloads_of_the_oldest_transaction_that_may_write(kit: Kit) -> None:
    kit.create("short", ttl="1")
    old = (NOW_MS - HOUR + 1) * 1_000_000
    kit.put("short", old, b"a")
    assert kit.publish("short", pointer=old) == RollbackRange(old, NOW_MS, 0, NOW_MS, 0)
    janitor_kit = adopted_janitor(kit.store, clock=kit.clock, hold_seconds=0)
    kit.clock.advance(SECOND)
    janitor_kit.engine.run_once()
    assert kit.payloads("short") == [b"a"]
