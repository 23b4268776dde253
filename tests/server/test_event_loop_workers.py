"""Writes of an event loop: in the loop itself, or in threads after the iteration."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.builders import Call, fail_at, hold_call, watch
from tests.kit.avro import POLL_ALL, publish_body
from tests.server.client import AVRO, Client, TopicClient
from tests.server.conftest import serving
from tests.support import PATIENCE_SECONDS
from tms_core.clock import SystemClock
from tms_core.messaging.publish import workers
from tms_core.messaging.publish.workers import SMALL_BYTES, EventLoopWorkers
from tms_core.messaging.service import MessagingService
from tms_core.server.rest.context import outcome
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId

T, OTHER = TopicId("default", "t"), TopicId("default", "other")


class LoopService:
    """A service whose requests come from an event loop.

    Attributes:
        writers: the writer of each batch: ``loop`` or ``thread``.
        batches: the number of rows of each batch.
    """

    def __init__(self, threads: int = 2) -> None:
        self.workers, self.store = EventLoopWorkers(threads), MemoryStore()
        self.workers.alone = lambda _: True
        self.service = MessagingService(self.store, SystemClock(), side=MemorySide(), workers=self.workers)
        for topic in (T, OTHER):
            self.service.create_topic(topic)
        self.writers: list[str] = []
        self.batches: list[int] = []
        watch(self.store, before=self._record)

    def _record(self, call: Call) -> None:
        if call.name == "message.put":
            self.writers.append("loop" if threading.current_thread() is threading.main_thread() else "thread")
            self.batches.append(len(call.arguments[0]))

    def publish(self, *requests: Sequence[bytes], topics: Sequence[TopicId] = (T,)) -> None:
        """Publish all requests in one iteration of the event loop."""

        async def iterate() -> None:
            submit = self.service.submit_publish
            answers = [submit(topic, request, pointer=None) for topic in topics for request in requests]
            for answer in answers:
                await outcome(answer)

        asyncio.run(iterate())


@pytest.fixture
def loop() -> Iterator[LoopService]:
    service = LoopService()
    with service.service:
        yield service


def test_single_request_is_written_by_the_loop_in_its_iteration(loop: LoopService) -> None:
    async def publish() -> list[bool]:
        answer = loop.service.submit_publish(T, [b"a"], pointer=None)
        found = [answer.done()]
        await asyncio.sleep(0)
        return [*found, answer.done()]

    assert asyncio.run(publish()) == [False, True]
    assert loop.writers == ["loop"]


def test_batches_during_other_requests_are_written_by_one_thread_per_turn(loop: LoopService) -> None:
    loop.workers.alone = lambda _: False
    loop.publish([b"a"], [b"b", b"c"], [b"d"])
    loop.publish([b"e"], [b"f"], topics=[T, OTHER])
    assert loop.writers == ["thread"] * 3
    assert loop.batches == [4, 2, 2]


def test_loop_without_a_count_of_requests_does_not_write(loop: LoopService) -> None:
    loop.workers.alone = None
    loop.publish([b"a"])
    assert loop.writers == ["thread"]


def test_turn_with_all_requests_is_written_by_the_loop_at_once(loop: LoopService) -> None:
    loop.workers.alone = lambda requests: requests == 3
    loop.publish([b"a"], [b"b", b"c"], [b"d"])
    assert (loop.writers, loop.batches) == (["loop"], [4])


def test_turn_for_two_topics_is_written_by_threads(loop: LoopService) -> None:
    loop.workers.alone = lambda requests: requests == 2
    loop.publish([b"a"], topics=[T, OTHER])
    assert loop.writers == ["thread", "thread"]


def test_many_messages_without_payloads_are_written_by_a_thread(loop: LoopService) -> None:
    loop.publish([b""] * (SMALL_BYTES // 100))
    # After a slow write, threads would write everything.
    loop.workers.quick = True
    loop.publish([b""] * (SMALL_BYTES // 100 + 1))
    assert loop.writers == ["loop", "thread"]


def test_loop_does_not_wait_for_a_thread_that_writes(loop: LoopService) -> None:
    loop.workers.alone = lambda requests: requests > 1
    with hold_call(loop.store) as writing:
        theirs = threading.Thread(target=loop.service.publish, args=(OTHER, [b"theirs"]))
        theirs.start()
        assert writing.wait(PATIENCE_SECONDS)
        loop.publish([b"a"], [b"b"])
    theirs.join()
    assert loop.writers == ["thread", "thread"]


def test_loop_leaves_writes_to_threads_while_the_disk_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    # A single thread ends a batch before it starts the next.
    loop = LoopService(threads=1)
    took = iter([0.0, 2.0, 2.0, 0.0005, 0.0])
    times = (time for seconds in took for time in (100.0, 100.0 + seconds))
    monkeypatch.setattr(workers, "perf_counter", lambda: next(times))
    for message in (b"1", b"2", b"3", b"4"):
        loop.publish([message])
    # The thread reads the clock after its response.
    while not loop.workers.quick:
        time.sleep(0.001)
    loop.publish([b"5"])
    loop.service.close()
    assert loop.writers == ["loop", "loop", "thread", "thread", "loop"]


def test_failed_write_of_the_event_loop_raises_at_the_caller(loop: LoopService) -> None:
    watch(loop.store, before=fail_at("message.put", ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        loop.publish([b"a"])
    assert loop.service.workers.requests == 0


# --- in a server -----------------------------------------------------------------------------------------------------


def record_threads(writers: list[str]) -> Callable[[Call], None]:
    def record(call: Call) -> None:
        if call.name == "message.put":
            writers.append(threading.current_thread().name.partition("_")[0])

    return record


def test_lone_request_is_written_by_the_event_loop() -> None:
    store, writers = MemoryStore(), list[str]()
    with serving(store=store, loop_writes=True) as server, Client(server.port) as client, Client(server.port) as other:
        topic = TopicClient(client, "t").create()
        watch(store, before=record_threads(writers))
        for connection in (client, other):
            TopicClient(connection, "t").publish("a")
        assert topic.poll() == ["a", "a"]
    assert "http" in writers


def test_request_during_a_waiting_request_is_written_by_threads() -> None:
    store, writers = MemoryStore(), list[str]()
    with (
        serving(store=store, loop_writes=True, cache_bytes=0) as server,
        Client(server.port) as client,
        Client(server.port) as other,
    ):
        topic = TopicClient(client, "t").create()
        topic.publish("a")
        with hold_call(store, "message.rows") as reading:
            other.send("POST", f"{topic.path}/poll", POLL_ALL, content_type=AVRO)
            assert reading.wait(PATIENCE_SECONDS)
            watch(store, before=record_threads(writers))
            for _ in range(5):
                assert topic.post("publish", publish_body(b"b"), content_type=AVRO).status == 200
        assert other.answer().status == 200
    assert writers == ["publish"] * 5
