"""Publishing in the background: bounded, ordered, counted, and without silent loss."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.client.faults import Faults, faulty_async_client, faulty_client
from tests.kit.client import BILLS, ORDERS, payloads
from tests.server.conftest import serving
from tests.support import PATIENCE_SECONDS, in_event_loop
from tms_core.client import (
    BadRequest,
    Buffer,
    BufferFull,
    Client,
    ClientClosed,
    Limits,
    NotPublished,
    Retry,
    Timeouts,
    WhenFull,
)
from tms_core.client.publish.buffer import MessageBatch, MessageBuffer, PublishFigures
from tms_core.client.testing import InProcess
from tms_core.errors import TmsError
from tms_core.topic import TopicId

A, B = TopicId.parse("x:a"), TopicId.parse("x:b")
SOON = Retry(attempts=3, first_seconds=0.001, longest_seconds=0.001)


def wait_for_publishers() -> None:
    """Wait until no thread publishes."""
    for thread in threading.enumerate():
        if thread.name == "tms-publish":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


# --- the buffer ------------------------------------------------------------------------------------------------------


def fill_buffer(buffer: Buffer, *given: tuple[TopicId, bytes]) -> MessageBuffer:
    waiting = MessageBuffer(buffer, request_bytes=100)
    for topic, payload in given:
        assert waiting.offer(topic, payload)
    return waiting


def test_take_returns_a_batch_of_the_topic_that_waits_longest() -> None:
    waiting = fill_buffer(Buffer(batch_messages=2), (A, b"1"), (B, b"2"), (A, b"3"), (A, b"4"))
    found = []
    while batch := waiting.take():
        found.append(batch)
        waiting.settle(None)
    assert found == [MessageBatch(A, 0, [b"1", b"3"]), MessageBatch(B, 1, [b"2"]), MessageBatch(A, 3, [b"4"])]
    assert waiting.figures == PublishFigures(published=4)


def test_take_limits_a_batch_to_a_request_or_one_message() -> None:
    waiting = fill_buffer(Buffer(), (A, bytes(60)), (A, bytes(40)), (A, bytes(1)), (A, bytes(200)), (A, bytes(1)))
    sizes = []
    while batch := waiting.take():
        sizes.append([len(payload) for payload in batch.payloads])
    assert sizes == [[60, 40], [1], [200], [1]]


@pytest.mark.parametrize(
    "buffer", [Buffer(messages=2, when_full=WhenFull.BLOCK), Buffer(size_bytes=2, when_full=WhenFull.BLOCK)]
)
def test_offer_to_a_full_buffer_is_rejected_until_a_take(buffer: Buffer) -> None:
    waiting = fill_buffer(buffer, (A, b"1"), (A, b"2"))
    assert not waiting.offer(A, b"3")
    waiting.take()
    assert waiting.offer(A, b"3")
    assert waiting.figures == PublishFigures(waiting=3)


def test_offer_to_a_full_buffer_drops_newest_or_oldest_and_counts() -> None:
    newest = fill_buffer(Buffer(messages=2, when_full=WhenFull.DROP_NEWEST), (A, b"1"), (A, b"2"), (A, b"3"), (B, b"4"))
    assert newest.take() == MessageBatch(A, 0, [b"1", b"2"])
    buffer = Buffer(messages=3, when_full=WhenFull.DROP_OLDEST)
    oldest = fill_buffer(buffer, (A, b"1"), (B, b"2"), (A, b"3"), (A, b"4"), (B, b"5"))
    assert oldest.take() == MessageBatch(A, 2, [b"3", b"4"])
    assert (newest.figures.dropped, oldest.figures.dropped) == (2, 2)


class Outcomes(list[tuple[bytes, Exception | None]]):
    """A callback with a false truth value until its first call."""

    def __call__(self, payload: bytes, error: Exception | None) -> None:
        self.append((payload, error))


def test_drop_of_a_message_calls_a_callback_with_false_truth_value() -> None:
    buffer, outcomes = MessageBuffer(Buffer(messages=1, when_full=WhenFull.DROP_NEWEST), request_bytes=100), Outcomes()
    for payload in (b"1", b"2"):
        buffer.offer(A, payload, on_delivery=outcomes)
    [(on_delivery, payload, error)] = buffer.callbacks()
    assert (on_delivery is outcomes, payload, type(error)) == (True, b"2", BufferFull)


def test_offer_of_a_message_larger_than_the_buffer_is_accepted_alone() -> None:
    waiting = fill_buffer(Buffer(size_bytes=10), (A, bytes(50)))
    assert not waiting.offer(A, b"1")


def test_offer_to_a_full_buffer_with_raise_is_rejected() -> None:
    waiting = fill_buffer(Buffer(messages=1, when_full=WhenFull.RAISE), (A, b"1"))
    with pytest.raises(BufferFull, match=r"^1 "):
        waiting.offer(A, b"2")
    assert waiting.figures == PublishFigures(waiting=1)


def test_mark_is_settled_after_the_response_to_all_earlier_messages() -> None:
    waiting = fill_buffer(Buffer(batch_messages=1), (A, b"1"), (A, b"2"))
    mark = waiting.mark()
    waiting.offer(A, b"3")
    found = []
    while waiting.take():
        found.append(waiting.is_settled(mark))
        waiting.settle(None)
        found.append(waiting.is_settled(mark))
    assert found == [False, False, False, True, True, True]


def test_raise_failures_reports_each_failure_once() -> None:
    waiting = fill_buffer(Buffer(), (A, b"1"), (B, b"2"), (B, b"3"))
    waiting.take()
    waiting.settle(TmsError("The disk is full."))
    with pytest.raises(NotPublished, match=r"^1 .* The disk is full") as caught:
        waiting.raise_failures()
    assert caught.value.messages == 1
    waiting.raise_failures()
    waiting.abandon(TmsError("Nobody publishes."))
    with pytest.raises(NotPublished, match=r"^2 "):
        waiting.raise_failures()
    assert waiting.figures == PublishFigures(failed=3)


# --- the thread ------------------------------------------------------------------------------------------------------


def test_flush_of_many_messages_keeps_order_and_ends_the_thread(server: InProcess, client: Client) -> None:
    sent = [b"%d" % number for number in range(3000)]
    with server.client(buffer=Buffer(batch_messages=100)) as producer:
        for message in sent:
            producer.publish_async(ORDERS, [message])
        producer.publish_async(BILLS, [b"x"])
        producer.flush()
        assert producer.publish_figures == PublishFigures(published=3001)
        assert payloads(client, ORDERS) == sent
        assert payloads(client, BILLS) == [b"x"]
        wait_for_publishers()
        producer.publish_async(BILLS, [b"y"])
    assert payloads(client, BILLS) == [b"x", b"y"]


def test_publish_async_with_a_lost_response_is_retried(server: InProcess, client: Client, faults: Faults) -> None:
    faults.at("publish", "after", times=1)
    with faulty_client(server, faults, buffer=Buffer(retry=SOON)) as producer:
        producer.publish_async(ORDERS, [b"1"])
    assert payloads(client, ORDERS) == [b"1", b"1"]


def test_publish_async_without_responses_reports_each_loss(
    server: InProcess, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.at("publish", "before")
    with faulty_client(server, faults, buffer=Buffer(retry=SOON)) as producer:
        producer.publish_async(ORDERS, [b"1", b"2"])
        with pytest.raises(NotPublished, match=r"^2 "):
            producer.flush()
        assert producer.publish_figures == PublishFigures(failed=2, retries=2)
        producer.publish_async(ORDERS, [b"3"])
        with pytest.raises(NotPublished, match=r"^1 "):
            producer.close()
    assert "2 messages for default:orders were not published" in caplog.text


@in_event_loop
async def test_close_sends_messages_that_linger(server: InProcess, client: Client) -> None:
    buffer = Buffer(linger_seconds=10 * PATIENCE_SECONDS)
    with server.client(buffer=buffer) as producer:
        producer.publish_async(ORDERS, [b"1"])
    async with server.async_client(buffer=buffer) as async_producer:
        await async_producer.publish_async(ORDERS, [b"2"])
    assert payloads(client, ORDERS) == [b"1", b"2"]


def hold(faults: Faults) -> tuple[threading.Event, threading.Event]:
    """Hold every request; return the event of a held request and the event that releases all."""
    held, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        held.set()
        assert go_on.wait(PATIENCE_SECONDS)

    faults.on_step = wait
    return held, go_on


def test_publish_async_with_a_full_buffer_blocks_until_a_response(
    server: InProcess, client: Client, faults: Faults
) -> None:
    held, go_on = hold(faults)
    with faulty_client(server, faults, buffer=Buffer(messages=2, batch_messages=1)) as producer:
        producer.publish_async(ORDERS, [b"1"])
        assert held.wait(PATIENCE_SECONDS)
        # One message is being sent, and two wait.
        producer.publish_async(ORDERS, [b"2", b"3"])
        blocked = threading.Thread(target=producer.publish_async, args=(ORDERS, [b"4", b"5"]))
        blocked.start()
        with pytest.raises(NotPublished, match=r"^3 "):
            producer.flush(timeout_seconds=0.01)
        assert blocked.is_alive()
        go_on.set()
        blocked.join(PATIENCE_SECONDS)
        producer.flush()
    assert payloads(client, ORDERS) == [b"1", b"2", b"3", b"4", b"5"]


def test_close_ends_a_blocked_publish_and_sends_the_buffer(server: InProcess, client: Client, faults: Faults) -> None:
    held, go_on = hold(faults)
    codes: list[str] = []

    def publish() -> None:
        try:
            producer.publish_async(ORDERS, [b"3"])
        except ClientClosed as error:
            codes.append(error.code)

    with faulty_client(server, faults, buffer=Buffer(messages=1, batch_messages=1)) as producer:
        producer.publish_async(ORDERS, [b"1"])
        assert held.wait(PATIENCE_SECONDS)
        producer.publish_async(ORDERS, [b"2"])
        blocked = threading.Thread(target=publish)
        closing = threading.Thread(target=producer.close)
        blocked.start()
        closing.start()
        blocked.join(PATIENCE_SECONDS)
        go_on.set()
        closing.join(PATIENCE_SECONDS)
    assert codes == [ClientClosed.code]
    assert payloads(client, ORDERS) == [b"1", b"2"]


def test_publish_async_of_threads_keeps_the_order_of_each(server: InProcess, client: Client) -> None:
    with server.client(buffer=Buffer(messages=50, batch_messages=20)) as producer:

        def work(name: bytes) -> None:
            for number in range(200):
                producer.publish_async(ORDERS, [name + b"%03d" % number])

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, (b"a", b"b", b"c")))
    found = payloads(client, ORDERS)
    for name in (b"a", b"b", b"c"):
        assert [message for message in found if message[:1] == name] == [name + b"%03d" % at for at in range(200)]


def test_failed_batch_leaves_all_others_published(
    server: InProcess, client: Client, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: str) -> None:
        if faults.seen["publish"] == 1:
            raise RuntimeError("this is a mistake in the program")

    faults.on_step = fail
    with faulty_client(server, faults, buffer=Buffer(batch_messages=1)) as producer:
        producer.publish_async(ORDERS, [b"1", b"2"])
        producer.publish_async(BILLS, [b"3"])
        with pytest.raises(NotPublished, match=r"^1 .*RuntimeError: this is a mistake"):
            producer.flush()
    assert payloads(client, ORDERS) == [b"2"]
    assert payloads(client, BILLS) == [b"3"]
    assert "publishing failed" in caplog.text


@pytest.mark.parametrize("messages", [b"one", "two", [b"good", "three"], [None], 5])
@in_event_loop
async def test_publish_without_a_payload_is_rejected_alone(
    server: InProcess, client: Client, messages: list[bytes]
) -> None:
    with pytest.raises(BadRequest):
        client.publish_async(ORDERS, messages)
    for ttl in (None, 5):
        with pytest.raises(BadRequest):
            client.publish(ORDERS, messages, ttl=ttl)
    async with server.async_client() as producer:
        with pytest.raises(BadRequest):
            await producer.publish_async(ORDERS, messages)
        with pytest.raises(BadRequest):
            await producer.publish(ORDERS, messages)
    client.publish_async(ORDERS, [b"good"])
    client.flush()
    assert client.publish_figures == PublishFigures(published=1)
    assert payloads(client, ORDERS) == [b"good"]


def test_publish_async_copies_a_mutable_payload(client: Client) -> None:
    given = bytearray(b"1")
    messages: list[Any] = [given, memoryview(b"2")]
    client.publish_async(ORDERS, messages)
    given[0] = 0
    client.publish(BILLS, messages)
    client.flush()
    assert payloads(client, ORDERS) == [b"1", b"2"]
    assert payloads(client, BILLS) == [b"\0", b"2"]


def test_close_with_a_hanging_server_reports_unpublished_messages(server: InProcess, faults: Faults) -> None:
    _, go_on = hold(faults)
    timeouts = Timeouts(close_seconds=0.01)
    with faulty_client(server, faults, buffer=Buffer(batch_messages=1), timeouts=timeouts) as producer:
        producer.publish_async(ORDERS, [b"1", b"2", b"3"])
        with pytest.raises(NotPublished, match=r"0\.01 s") as caught:
            producer.close()
        assert caught.value.messages == producer.publish_figures.failed == 3
    go_on.set()
    wait_for_publishers()
    assert producer.publish_figures == PublishFigures(failed=3)


def test_child_process_starts_with_an_empty_buffer(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as producer:
        producer.publish_async(ORDERS, [b"parent"])
        producer.flush()
        wait_for_publishers()
        parents = producer._wire._http
        monkeypatch.setattr("os.getpid", lambda: -1)
        assert producer.publish_figures == PublishFigures()
        producer.publish_async(ORDERS, [b"child"])
        producer.flush()
        assert producer.publish_figures == PublishFigures(published=1)
    monkeypatch.undo()
    parents.close()
    assert payloads(client, ORDERS) == [b"parent", b"child"]


def exit_thread(_: str) -> None:
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_close_after_a_failed_thread_reports_unpublished_messages(server: InProcess, faults: Faults) -> None:
    faults.on_step = exit_thread
    with faulty_client(server, faults, buffer=Buffer(batch_messages=1)) as producer:
        producer.publish_async(ORDERS, [b"1", b"2"])
        with pytest.raises(NotPublished):
            producer.close()
        assert producer.publish_figures.failed == 2
    # Otherwise its error would fail the next test.
    wait_for_publishers()


# --- the task --------------------------------------------------------------------------------------------------------


def in_loop(server: InProcess, faults: Faults, **options: object) -> Callable[[], None]:
    async def main() -> None:
        async with faulty_async_client(server, faults, **options) as producer:
            for number in range(20):
                await producer.publish_async(ORDERS, [b"%d" % number])
            await producer.flush()
            await producer.publish_async(ORDERS, [b"last"])

    return lambda: asyncio.run(main())


def test_async_close_publishes_all_in_order(server: InProcess, client: Client, faults: Faults) -> None:
    faults.at("publish", "before", times=1)
    in_loop(server, faults, buffer=Buffer(messages=3, batch_messages=2, retry=SOON), limits=Limits(request_bytes=3))()
    assert payloads(client, ORDERS) == [*(b"%d" % number for number in range(20)), b"last"]


@in_event_loop
async def test_async_flush_without_responses_reports_the_loss(server: InProcess, faults: Faults) -> None:
    faults.at("publish", "before")
    async with faulty_async_client(server, faults, buffer=Buffer(retry=SOON)) as producer:
        await producer.publish_async(ORDERS, [b"1", b"2"])
        with pytest.raises(NotPublished, match=r"^2 "):
            await producer.flush()


@in_event_loop
async def test_async_close_after_a_cancelled_task_reports_the_loss(server: InProcess) -> None:
    producer = server.async_client()
    await producer.publish_async(ORDERS, [b"1", b"2"])
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == "tms-publish"]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(NotPublished, match=r"^2 "):
        await producer.close()


@in_event_loop
async def test_async_flush_that_takes_too_long_is_an_error(server: InProcess, faults: Faults) -> None:
    faults.at("publish", "before", times=1)
    stuck = asyncio.Event()

    async def pause(_: asyncio.Event, __: float) -> None:
        await stuck.wait()

    async with faulty_async_client(server, faults, pause=pause, buffer=Buffer(retry=SOON)) as producer:
        await producer.publish_async(ORDERS, [b"1"])
        with pytest.raises(NotPublished, match=r"^1 "):
            await producer.flush(timeout_seconds=0.01)
        assert producer.publish_figures.waiting == 1
        stuck.set()


@in_event_loop
async def test_async_close_with_a_hanging_server_reports_unpublished(server: InProcess) -> None:
    class HangingTransport(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await asyncio.Event().wait()
            raise AssertionError

    producer = server.async_client(transport=HangingTransport(), timeouts=Timeouts(close_seconds=0.01))
    await producer.publish_async(ORDERS, [b"1", b"2"])
    with pytest.raises(NotPublished, match=r"0\.01 s") as caught:
        await producer.close()
    assert caught.value.messages == producer.publish_figures.failed == 2
    assert len(asyncio.all_tasks()) == 1


# --- the end of the program ------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from tms_core.client import Buffer, Client, Options, Timeouts

timeouts = Timeouts(answer_seconds=3600, close_seconds=float(sys.argv[2]))
client = Client(sys.argv[1], options=Options(timeouts=timeouts, buffer=Buffer(linger_seconds=0.3)))
client.publish_async("default:orders", [b"1"])
"""


def program(url: str, close_seconds: float, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + end, url, str(close_seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


@pytest.mark.parametrize("end", ["", "client.close()"], ids=["unclosed", "closed"])
def test_program_with_a_hanging_server_ends_and_reports_the_loss(end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = program(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1, end)
    assert "1 messages" in ended.stderr
    assert ended.returncode == bool(end)


FORK = """
child = os.fork()
if not child:
    client.publish_async("default:orders", [b"2"])
    client.flush(60)
    os._exit(client.publish_figures.published)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 1
"""


@pytest.mark.parametrize(("end", "expected"), [("", {b"1"}), (FORK, {b"1", b"2"})], ids=["unclosed", "forked"])
def test_program_without_close_publishes_all_once(end: str, expected: set[bytes]) -> None:
    with serving() as server:
        url = f"http://127.0.0.1:{server.port}"
        with Client(url) as client:
            client.create_topic(ORDERS)
            ended = program(url, PATIENCE_SECONDS, end)
            found = payloads(client, ORDERS)
    assert ended.returncode == 0, ended.stderr
    assert set(found) == expected
    assert len(found) == len(expected)
