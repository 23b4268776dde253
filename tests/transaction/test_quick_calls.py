"""Calls that the event loop of the transaction service executes itself: selection, time, and order."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support import PATIENCE_SECONDS, in_event_loop, wait_until
from tests.transaction.managers import served
from tests.transaction.raw_client import call_service, connect, encode_call, is_closed, read_response
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc import quick_calls
from tms_core.transaction.rpc import service as module
from tms_core.transaction.rpc.calls import answer
from tms_core.transaction.rpc.connection import LENGTH
from tms_core.transaction.rpc.quick_calls import QuickCalls, QuickConnection
from tms_core.transaction.rpc.service import Level, TransactionService

START = encode_call("startShort")


class CallRecorder:
    """The threads that execute calls, and the simulated duration of each call.

    Attributes:
        threads: the name of the thread of each call.
        seconds: the duration of the next calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.seconds = self._now = 0.0
        monkeypatch.setattr(module, "answer", self._answer)
        monkeypatch.setattr(quick_calls, "time", SimpleNamespace(perf_counter=lambda: self._now))

    def _answer(self, manager: TransactionManager, frame: bytes, _: str = "") -> bytes:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self._now += self.seconds
        return answer(manager, frame)

    def call(self, connection: socket.socket, name: str = "startShort", *fields: bytes) -> str:
        call_service(connection, encode_call(name, *fields))
        return self.threads[-1]

    def call_until_loop(self, connection: socket.socket) -> None:
        while self.call(connection) != LOOP:
            pass


@contextmanager
def hold_loop(service: TransactionService) -> Iterator[None]:
    """Block the event loop, which receives everything that is sent in the block in one iteration."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(PATIENCE_SECONDS)

    assert service._loop is not None
    service._loop.call_soon_threadsafe(hold)
    assert held.wait(PATIENCE_SECONDS)
    yield
    go_on.set()


LOOP, WORKER = "transaction-service", "transactions"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallRecorder:
    return CallRecorder(monkeypatch)


def test_call_that_is_slow_or_no_start_is_done_by_a_worker(
    monkeypatch: pytest.MonkeyPatch, recorder: CallRecorder, service: TransactionService, manager: TransactionManager
) -> None:
    with connect(service) as connection:
        recorder.call_until_loop(connection)
        assert recorder.call(connection, "startShortClientId", wire.string(1, "x" * quick_calls.MAX_BYTES)) == WORKER
        assert recorder.call(connection, "getSnapshot") == WORKER
        assert recorder.call(connection) == LOOP
        monkeypatch.setattr(quick_calls, "MAX_IDS", 0)
        manager.invalidate(manager.start_short().transaction_id)
        assert recorder.call(connection) == WORKER


def test_slow_sync_blocks_the_event_loop_only_once(recorder: CallRecorder, service: TransactionService) -> None:
    with connect(service) as connection:
        recorder.call_until_loop(connection)
        recorder.seconds = quick_calls.MAX_SECONDS
        assert [recorder.call(connection) for _ in range(3)] == [LOOP, WORKER, WORKER]
        recorder.seconds = 0
        assert [recorder.call(connection) for _ in range(2)] == [WORKER, LOOP]


def test_loop_waits_for_a_slow_disk_once_among_quick_calls(
    monkeypatch: pytest.MonkeyPatch, recorder: CallRecorder, service: TransactionService
) -> None:
    done: list[tuple[str, str]] = []

    def answer_slowly(_: TransactionManager, frame: bytes, __: str = "") -> bytes:
        name = wire.read_message(frame).name
        done.append((name, threading.current_thread().name.partition("_")[0]))
        recorder._now += 0 if name == "canCommitTx" else recorder.seconds
        return wire.message(MessageKind.REPLY, name, 1)

    with connect(service) as connection:
        recorder.call_until_loop(connection)
        monkeypatch.setattr(module, "answer", answer_slowly)
        recorder.seconds = quick_calls.MAX_SECONDS
        for name in ["startShort", "canCommitTx", "commitTx"] * 3:
            recorder.call(connection, name)
    assert [name for name, who in done if who == LOOP and name != "canCommitTx"] == ["startShort"]


@pytest.mark.parametrize("other", ["startShort", "getSnapshot"])
def test_concurrent_calls_run_in_workers(recorder: CallRecorder, service: TransactionService, other: str) -> None:
    with connect(service) as first, connect(service) as second:
        while LOOP not in (recorder.call(first), recorder.call(second)):
            pass
        with hold_loop(service):
            first.sendall(START)
            second.sendall(encode_call(other))
        for connection in (first, second):
            read_response(connection)
    assert recorder.threads[-2:] == [WORKER, WORKER]


def test_first_call_of_a_new_connection_is_read_from_the_stream(
    recorder: CallRecorder, service: TransactionService
) -> None:
    with connect(service) as old, connect(service) as new:
        recorder.call_until_loop(old)
        assert len(service._new) == 1
        assert [recorder.call(new) for _ in range(2)] == [WORKER, LOOP]
        assert not service._new


def test_quick_call_before_the_token_is_not_done(recorder: CallRecorder, manager: TransactionManager) -> None:
    with (
        served(manager, tokens={Level.CLIENT: lambda: b"secret"}) as service,
        connect(service) as authenticated,
        connect(service) as other,
    ):
        call_service(authenticated, encode_call("authenticate", wire.string(1, "secret")))
        recorder.call_until_loop(authenticated)
        done = len(recorder.threads)
        call_service(other, START)
        assert is_closed(other)
        assert len(recorder.threads) == done


def test_malformed_quick_call_closes_its_connection(recorder: CallRecorder, service: TransactionService) -> None:
    with connect(service) as connection:
        recorder.call_until_loop(connection)
        broken = START[LENGTH.size : -1]
        connection.sendall(LENGTH.pack(len(broken)) + broken)
        assert is_closed(connection)
        wait_until(lambda: not service._connections)
    with connect(service) as connection:
        assert recorder.call(connection) == WORKER


def test_connection_with_an_immediate_response_is_not_the_most_silent(
    recorder: CallRecorder, service: TransactionService
) -> None:
    with connect(service) as first, connect(service) as second:
        recorder.call_until_loop(second)
        recorder.call(first)
        latest: list[object] = []
        for connection in (second, first, second):
            assert recorder.call(connection) == LOOP
            latest.append(list(service._awaiting)[-1])
    assert latest[0] is latest[2] is not latest[1]


class QuickConnectionKit:
    """A quick connection with a simulated transport; the response to a call repeats its bytes.

    Attributes:
        done: the calls that the event loop has executed.
        sent: the responses.
        unread: the number of unsent bytes of the transport.
        failure: the error of the next calls; None: they succeed.
    """

    def __init__(self, manager: TransactionManager) -> None:
        self.done: list[bytes] = []
        self.sent: list[bytes] = []
        self.unread, self.aborted = 0, False
        self.failure: Exception | None = None
        self.quick = QuickCalls(manager, self.do, is_local=True)
        for _ in range(quick_calls.AFTER):
            self.quick.note()
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda *_: None)
        self.connection = QuickConnection(self.quick, self.accept, self.loop)
        self.connection.connection_made(cast(asyncio.Transport, self))
        self.connection.task = cast("asyncio.Task[None]", asyncio.current_task())
        self.quick.awaiting[self.connection.task] = 0
        self.connection.data_received(b"first")
        self.connection.note_response(5)

    def accept(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        self.reader = reader

    def do(self, frame: bytes) -> bytes:
        self.done.append(frame)
        if self.failure is not None:
            raise self.failure
        return frame

    async def read(self) -> bytes:
        """Return the bytes after the first call in the stream, at the end of this iteration."""
        await asyncio.sleep(0)
        self.connection.eof_received()
        return (await self.reader.read()).removeprefix(b"first")

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, _: str) -> None:
        """Return no information."""

    def is_closing(self) -> bool:
        """Report the connection as closing, so that the caller does not close it."""
        return True

    def abort(self) -> None:
        self.aborted = True


@in_event_loop
async def test_call_after_an_unread_response_is_read_from_the_stream(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    kit.unread = 1
    kit.connection.data_received(START)
    assert await kit.read() == START
    assert not kit.done


@in_event_loop
async def test_bytes_after_a_held_call_are_read_with_it_from_the_stream(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    second = encode_call("startShort", number=2)
    for data in (START, second):
        kit.connection.data_received(data)
    assert await kit.read() == START + second
    assert (kit.done, kit.quick.under_way) == ([], 0)


@in_event_loop
async def test_bytes_after_a_call_that_began_go_to_the_stream(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    for data in (b"whole", START):
        kit.connection.data_received(data)
    await asyncio.sleep(0)
    kit.connection.note_response(len(b"whole"))
    kit.connection.data_received(START)
    assert await kit.read() == b"whole" + 2 * START
    assert not kit.done


@in_event_loop
async def test_held_call_is_read_before_the_end_of_the_stream(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    kit.connection.data_received(START)
    kit.connection.eof_received()
    assert await kit.reader.read() == b"first" + START
    await asyncio.sleep(0)
    assert not kit.done


@in_event_loop
async def test_lost_connection_discards_its_held_call(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    kit.connection.data_received(START)
    kit.connection.connection_lost(None)
    assert kit.quick.under_way == 0
    await asyncio.sleep(0)
    assert not kit.done


@in_event_loop
async def test_calls_of_one_turn_are_read_from_the_stream_in_order(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    kit.connection.data_received(START)
    kit.connection.data_received(encode_call("startShort", number=2))
    assert await kit.read() == START + encode_call("startShort", number=2)
    assert (kit.done, kit.quick.under_way) == ([], 0)


@in_event_loop
async def test_call_that_fails_closes_its_connection_and_is_not_repeated(manager: TransactionManager) -> None:
    kit = QuickConnectionKit(manager)
    kit.failure = MemoryError()
    kit.connection.data_received(START)
    assert await kit.read() == b""
    assert kit.aborted
    assert (len(kit.done), kit.quick.under_way) == (1, 0)
