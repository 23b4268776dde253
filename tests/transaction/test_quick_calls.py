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
from tms_core.clock import ManualClock
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc import quick_calls
from tms_core.transaction.rpc import service as module
from tms_core.transaction.rpc.calls import answer
from tms_core.transaction.rpc.connection import LENGTH
from tms_core.transaction.rpc.quick_calls import QuickCalls, QuickConnection
from tms_core.transaction.rpc.service import Level, TransactionService


@pytest.fixture
def manager(clock: ManualClock) -> Iterator[TransactionManager]:
    with TransactionManager(MemoryStorage(), clock) as manager:
        yield manager


START = encode_call("startShort")


class Doers:
    """Remembers which thread has done each call, and says how long each takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.seconds = self._now = 0.0
        monkeypatch.setattr(module, "answer", self._answer)
        monkeypatch.setattr(quick_calls, "time", SimpleNamespace(perf_counter=lambda: self._now))

    def _answer(self, manager: TransactionManager, frame: bytes, _: str = "") -> bytes:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self._now += self.seconds
        return answer(manager, frame)

    def last(self, connection: socket.socket, name: str = "startShort", *fields: bytes) -> str:
        call_service(connection, encode_call(name, *fields))
        return self.threads[-1]

    def until_loop(self, connection: socket.socket) -> None:
        while self.last(connection) != LOOP:
            pass


@contextmanager
def one_turn(service: TransactionService) -> Iterator[None]:
    """What comes in the block comes to the service in one turn of its loop."""
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
def doers(monkeypatch: pytest.MonkeyPatch) -> Doers:
    return Doers(monkeypatch)


def test_call_that_is_slow_or_no_start_is_done_by_a_worker(
    monkeypatch: pytest.MonkeyPatch, doers: Doers, service: TransactionService, manager: TransactionManager
) -> None:
    with connect(service) as connection:
        doers.until_loop(connection)
        assert doers.last(connection, "startShortClientId", wire.string(1, "x" * quick_calls.MAX_BYTES)) == WORKER
        assert doers.last(connection, "getSnapshot") == WORKER
        assert doers.last(connection) == LOOP
        monkeypatch.setattr(quick_calls, "MAX_IDS", 0)
        manager.invalidate(manager.start_short().transaction_id)
        assert doers.last(connection) == WORKER


def test_slow_sync_blocks_the_event_loop_only_once(doers: Doers, service: TransactionService) -> None:
    with connect(service) as connection:
        doers.until_loop(connection)
        doers.seconds = quick_calls.MAX_SECONDS
        assert [doers.last(connection) for _ in range(3)] == [LOOP, WORKER, WORKER]
        doers.seconds = 0
        assert [doers.last(connection) for _ in range(2)] == [WORKER, LOOP]


def test_loop_waits_for_a_slow_disk_once_among_quick_calls(
    monkeypatch: pytest.MonkeyPatch, doers: Doers, service: TransactionService
) -> None:
    done: list[tuple[str, str]] = []

    def slow_but(_: TransactionManager, frame: bytes, __: str = "") -> bytes:
        name = wire.read_message(frame).name
        done.append((name, threading.current_thread().name.partition("_")[0]))
        doers._now += 0 if name == "canCommitTx" else doers.seconds
        return wire.message(MessageKind.REPLY, name, 1)

    with connect(service) as connection:
        doers.until_loop(connection)
        monkeypatch.setattr(module, "answer", slow_but)
        doers.seconds = quick_calls.MAX_SECONDS
        for name in ["startShort", "canCommitTx", "commitTx"] * 3:
            doers.last(connection, name)
    assert [name for name, who in done if who == LOOP and name != "canCommitTx"] == ["startShort"]


@pytest.mark.parametrize("other", ["startShort", "getSnapshot"])
def test_concurrent_calls_run_in_workers(doers: Doers, service: TransactionService, other: str) -> None:
    with connect(service) as first, connect(service) as second:
        while LOOP not in (doers.last(first), doers.last(second)):
            pass
        with one_turn(service):
            first.sendall(START)
            second.sendall(encode_call(other))
        for connection in (first, second):
            read_response(connection)
    assert doers.threads[-2:] == [WORKER, WORKER]


def test_first_call_of_a_new_connection_is_read_from_the_stream(doers: Doers, service: TransactionService) -> None:
    with connect(service) as old, connect(service) as new:
        doers.until_loop(old)
        assert len(service._new) == 1
        assert [doers.last(new) for _ in range(2)] == [WORKER, LOOP]
        assert not service._new


def test_quick_call_before_the_token_is_not_done(doers: Doers, manager: TransactionManager) -> None:
    with (
        served(manager, tokens={Level.CLIENT: lambda: b"secret"}) as service,
        connect(service) as friend,
        connect(service) as foe,
    ):
        call_service(friend, encode_call("authenticate", wire.string(1, "secret")))
        doers.until_loop(friend)
        done = len(doers.threads)
        call_service(foe, START)
        assert is_closed(foe)
        assert len(doers.threads) == done


def test_malformed_quick_call_closes_its_connection(doers: Doers, service: TransactionService) -> None:
    with connect(service) as connection:
        doers.until_loop(connection)
        broken = START[LENGTH.size : -1]
        connection.sendall(LENGTH.pack(len(broken)) + broken)
        assert is_closed(connection)
        wait_until(lambda: not service._connections)
    with connect(service) as connection:
        assert doers.last(connection) == WORKER


def test_connection_with_an_immediate_response_is_not_the_most_silent(
    doers: Doers, service: TransactionService
) -> None:
    with connect(service) as first, connect(service) as second:
        doers.until_loop(second)
        doers.last(first)
        latest: list[object] = []
        for connection in (second, first, second):
            assert doers.last(connection) == LOOP
            latest.append(list(service._awaiting)[-1])
    assert latest[0] is latest[2] is not latest[1]


class Alone:
    """A connection without a socket, on which calls have come one by one; each is answered with its bytes."""

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
        """All that is in the stream behind the first call, until nothing more comes in this turn."""
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
    alone = Alone(manager)
    alone.unread = 1
    alone.connection.data_received(START)
    assert await alone.read() == START
    assert not alone.done


@in_event_loop
async def test_bytes_after_a_held_call_are_read_with_it_from_the_stream(manager: TransactionManager) -> None:
    alone = Alone(manager)
    second = encode_call("startShort", number=2)
    for data in (START, second):
        alone.connection.data_received(data)
    assert await alone.read() == START + second
    assert (alone.done, alone.quick.under_way) == ([], 0)


@in_event_loop
async def test_bytes_after_a_call_that_began_go_to_the_stream(manager: TransactionManager) -> None:
    alone = Alone(manager)
    for data in (b"whole", START):
        alone.connection.data_received(data)
    await asyncio.sleep(0)
    alone.connection.note_response(len(b"whole"))
    alone.connection.data_received(START)
    assert await alone.read() == b"whole" + 2 * START
    assert not alone.done


@in_event_loop
async def test_held_call_is_read_before_the_end_of_the_stream(manager: TransactionManager) -> None:
    alone = Alone(manager)
    alone.connection.data_received(START)
    alone.connection.eof_received()
    assert await alone.reader.read() == b"first" + START
    await asyncio.sleep(0)
    assert not alone.done


@in_event_loop
async def test_lost_connection_discards_its_held_call(manager: TransactionManager) -> None:
    alone = Alone(manager)
    alone.connection.data_received(START)
    alone.connection.connection_lost(None)
    assert alone.quick.under_way == 0
    await asyncio.sleep(0)
    assert not alone.done


@in_event_loop
async def test_calls_of_one_turn_are_read_from_the_stream_in_order(manager: TransactionManager) -> None:
    alone = Alone(manager)
    alone.connection.data_received(START)
    alone.connection.data_received(encode_call("startShort", number=2))
    assert await alone.read() == START + encode_call("startShort", number=2)
    assert (alone.done, alone.quick.under_way) == ([], 0)


@in_event_loop
async def test_call_that_fails_closes_its_connection_and_is_not_repeated(manager: TransactionManager) -> None:
    alone = Alone(manager)
    alone.failure = MemoryError()
    alone.connection.data_received(START)
    assert await alone.read() == b""
    assert alone.aborted
    assert (len(alone.done), alone.quick.under_way) == (1, 0)
