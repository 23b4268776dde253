"""The transaction service over Thrift, with thriftpy2 as the client, and with hostile clients."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import select
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thriftpy2.thrift import TApplicationException

from tests.support import PATIENCE_SECONDS, each_raises, wait_until
from tests.transaction.managers import BASE, NOW_MS, PreviousStorage, SpyStorage, served
from tests.transaction.raw_client import (
    STATUS,
    call_service,
    connect,
    encode_call,
    is_closed,
    load_interface,
    make_thrift_client,
    read_response,
    receive,
)
from tests.transaction.vectors import load
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, TmsError, Unavailable
from tms_core.logs.loggers import AUDIT
from tms_core.security.files import read_token
from tms_core.server.memory import LentMemory, Memory
from tms_core.settings.models import TransactionSettings
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.thrift import transaction_fields
from tms_core.transaction.codec.wire import Failure, Kind, MessageKind
from tms_core.transaction.manager.conflicts import ChangeLimits
from tms_core.transaction.manager.journal import LogFailed
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import Log, MemoryStorage
from tms_core.transaction.rpc import service as module
from tms_core.transaction.rpc.calls import METHODS, answer
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import LENGTH, ServiceUnavailable, TokenRequired, TokenUnreadable, as_text
from tms_core.transaction.rpc.service import MAX_FRAME_BYTES, Level, TransactionService
from tms_core.web.failed_attempts import FailedAttempts

#: The memory that large calls share with other requests.
MEMORY_BYTES = 32 << 20


@pytest.fixture
def manager(clock: ManualClock) -> Iterator[TransactionManager]:
    with TransactionManager(MemoryStorage(), clock, limits=ChangeLimits(count=2)) as manager:
        yield manager


@pytest.fixture
def client(service: TransactionService) -> Iterator[Any]:
    with closing(make_thrift_client(service)) as client:
        yield client


# --- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "seconds", "client_id"),
    [
        ("startShort", (), 1, 30, "unknown"),
        ("startShortTimeout", (7,), 1, 7, "unknown"),
        ("startShortWithTimeout", (7,), 1, 7, "unknown"),
        ("startShortClientId", ("me",), 1, 30, "me"),
        ("startShortWithClientIdAndTimeOut", ("me", 7), 1, 7, "me"),
        ("startLong", (), 2, 86_400, "unknown"),
        ("startLongClientId", ("me",), 2, 86_400, "me"),
    ],
)
def test_start_method_sets_type_timeout_and_client(
    client: Any,
    manager: TransactionManager,
    method: str,
    arguments: tuple[Any, ...],
    kind: int,
    seconds: int,
    client_id: str,
) -> None:
    found = getattr(client, method)(*arguments)
    assert (found.transactionId, found.writePointer, found.readPointer, found.type) == (BASE + 1, BASE + 1, BASE, kind)
    [entry] = manager.visibility().in_progress
    assert entry.expiration_ms == NOW_MS + seconds * 1000
    assert manager.clients() == {BASE + 1: client_id}


def test_conflict_raises_in_new_calls_and_is_false_in_old_calls(client: Any) -> None:
    thrift = load_interface()
    first, second = client.startShortClientId("me"), client.startShort()
    assert client.canCommitTx(first, {b"k\x00\xff"}).value is True
    assert client.canCommitTx(second, {b"k\x00\xff"}).value is True
    assert client.commitTx(first).value is True
    with pytest.raises(thrift.TTransactionConflictException) as raised:
        client.commitOrThrow(second.transactionId, second.writePointer)
    error = raised.value
    assert (error.transactionId, error.conflictingClient) == (second.transactionId, "me")
    assert error.conflictingKey == r"k\x00\xFF"
    with pytest.raises(thrift.TTransactionConflictException):
        client.canCommitOrThrow(second.transactionId, {b"k\x00\xff"})
    assert client.canCommitTx(second, {b"k\x00\xff"}).value is False
    assert client.commitTx(second).value is False


def test_bad_arguments_are_javas_errors_and_internal_errors_of_the_old_call(client: Any) -> None:
    one, late, unnamed = client.startShort(), "timeout must be positive but is 0 seconds", "ClientId must not be null"
    for name, arguments, text in (
        ("startShortWithTimeout", (0,), late),
        ("startShortWithClientIdAndTimeOut", ("me", 0), late),
        ("commitAndStart", (one.transactionId, "me", 0), late),
        ("startShortClientId", (None,), unnamed),
        ("startLongClientId", (None,), unnamed),
        ("commitAndStart", (one.transactionId, None), unnamed),
    ):
        with pytest.raises(load_interface().TGenericException) as raised:
            getattr(client, name)(*arguments)
        assert raised.value.message == text
        assert raised.value.originalExceptionClass == "java.lang.IllegalArgumentException"
    with pytest.raises(TApplicationException) as internal:
        client.startShortTimeout(0)
    assert internal.value.type == TApplicationException.INTERNAL_ERROR


def test_too_many_changes_raise_in_new_calls_and_are_false_in_old_calls(client: Any) -> None:
    one, changes = client.startShort(), {b"1", b"2", b"3"}
    with pytest.raises(load_interface().TGenericException) as raised:
        client.canCommitOrThrow(one.transactionId, changes)
    assert raised.value.originalExceptionClass == "org.apache.tephra.TransactionSizeException"
    assert client.canCommitTx(one, changes).value is False


def test_call_on_an_ended_transaction_raises_not_in_progress(client: Any) -> None:
    one = client.startShort()
    client.commitOrThrow(one.transactionId, one.writePointer)
    error = load_interface().TTransactionNotInProgressException
    for name, *arguments in (
        ("commitOrThrow", one.transactionId, one.writePointer),
        ("commitTx", one),
        ("canCommitOrThrow", one.transactionId, set()),
        ("canCommitTx", one, set()),
        ("checkpoint", one),
    ):
        with pytest.raises(error, match=str(one.transactionId)):
            getattr(client, name)(*arguments)


def test_other_calls_invalidate_abort_truncate_and_list(
    client: Any, manager: TransactionManager, clock: ManualClock
) -> None:
    one, two = client.startShort(), client.startShort()
    checkpoint = client.checkpoint(two)
    assert checkpoint.checkpointWritePointers == [checkpoint.writePointer]
    assert (client.invalidateTx(one.transactionId), client.invalidateTx(7)) == (True, False)
    assert client.invalidTxSize() == 1
    clock.advance(1)
    with pytest.raises(load_interface().TInvalidTruncateTimeException):
        client.truncateInvalidTxBefore(NOW_MS + 1)
    found = client.inProgressClients()
    assert (found.transactionIds, found.clientIds) == ([two.transactionId], ["unknown"])
    manager.note_published(checkpoint.writePointer, "default:orders", NOW_MS + 2)
    manager.note_published(two.transactionId, "default:orders", NOW_MS + 1)
    manager.note_published(two.transactionId, "default:bills", NOW_MS + 3)
    manager.note_published(7, "default:bills", NOW_MS)
    topics = client.inProgressTopics()
    published_topics = zip(topics.transactionIds, topics.topics, topics.firstPublishMs, strict=True)
    assert sorted(published_topics) == [
        (two.transactionId, "default:bills", NOW_MS + 3),
        (two.transactionId, "default:orders", NOW_MS + 1),
    ]
    client.abortTx(checkpoint)
    assert not manager.published()
    assert manager.visibility().in_progress == ()
    assert client.truncateInvalidTx({7}).value is False
    assert client.truncateInvalidTx({one.transactionId}).value is True
    client.invalidateTx(client.startShort().transactionId)
    assert client.truncateInvalidTxBefore(2**63 - 1).value is True
    client.startLong()
    client.pruneNow()
    client.resetState()
    assert manager.visibility().in_progress == ()


def test_service_of_a_stopped_manager_reports_it(client: Any, manager: TransactionManager) -> None:
    manager.close()
    assert client.status() == "NOTOK"
    with pytest.raises(load_interface().TTransactionCouldNotTakeSnapshotException, match="has stopped"):
        client.getSnapshot()
    with pytest.raises(TApplicationException, match="has stopped"):
        client.startShort()


# --- frames ----------------------------------------------------------------------------------------------------------


def test_request_frames_of_tephra_get_a_response(service: TransactionService, manager: TransactionManager) -> None:
    frames = [
        bytes.fromhex(vector["frame_hex"]) for vector in load("thrift/frames.json") if vector["direction"] == "request"
    ]
    with connect(service) as connection:
        connection.sendall(b"".join(frames))
        for _ in frames:
            size = int.from_bytes(receive(connection, 4))
            assert receive(connection, size)[:4] == b"\x80\1\0\2"
    assert len(manager.visibility().in_progress) == 2


@pytest.mark.parametrize(
    ("question", "name", "fields"),
    [
        ('status -> "OK"', "status", []),
        ("invalidateTx(5) -> false", "invalidateTx", [wire.i64(1, 5)]),
        ("resetState -> void", "resetState", []),
        ("truncateInvalidTx({7}) -> TBoolean(false)", "truncateInvalidTx", [wire.i64s(1, [7], Kind.SET)]),
        ("commitOrThrow(5,5) -> TTransactionNotInProgressException", "commitOrThrow", [wire.i64(1, 5), wire.i64(2, 5)]),
    ],
)
def test_answer_is_tephras_to_the_byte(
    manager: TransactionManager, question: str, name: str, fields: list[bytes]
) -> None:
    [frame] = [vector["frame_hex"] for vector in load("thrift/frames.json") if vector["call"] == question]
    data = answer(manager, wire.message(MessageKind.CALL, name, 0, *fields))
    assert (len(data).to_bytes(4) + data).hex() == frame


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda value: partial(wire.i64, value=value)),
    st.integers(-(2**31), 2**31 - 1).map(lambda value: partial(wire.i32, value=value)),
    st.binary(max_size=9).map(lambda value: partial(wire.string, value=value)),
    st.booleans().map(lambda value: partial(wire.boolean, value=value)),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda values: partial(wire.i64s, values=values)),
    st.lists(st.binary(max_size=3), max_size=4).map(lambda values: partial(wire.strings, values=values)),
    st.just(lambda number: wire.structure(number, wire.i64(1, BASE + 1), wire.i64(2, BASE))),
)


@given(method=st.sampled_from(sorted(METHODS)), values=st.dictionaries(st.integers(-2, 9), VALUES, max_size=4))
def test_every_method_responds_to_any_arguments(method: str, values: dict[int, Callable[[int], bytes]]) -> None:
    with TransactionManager(MemoryStorage(), ManualClock(NOW_MS)) as manager:
        manager.start_short()
        data = wire.message(MessageKind.CALL, method, 7, *(make(number) for number, make in values.items()))
        found = wire.read_message(answer(manager, data))
        assert (found.name, found.number) == (method, 7)
        assert found.kind in (MessageKind.REPLY, MessageKind.EXCEPTION)
        assert manager.is_running


def test_unknown_method_gets_an_error_response(service: TransactionService) -> None:
    with connect(service) as connection:
        for name, kind in (("tidyUp", 1), ("commitTx", 7), ("invalidateTx", 7), ("truncateInvalidTx", 2)):
            found = call_service(connection, encode_call(name, number=9))
            assert (found.name, found.number) == (name, 9)
            assert found.fields.get(2) == (None if found.kind == MessageKind.REPLY else kind)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        (MAX_FRAME_BYTES + 1).to_bytes(4),
        b"\0\0\0\4abcd",
        b"\0\0\0\0",
        bytes.fromhex(load("thrift/frames.json")[6]["frame_hex"]),
    ],
)
def test_client_of_another_protocol_is_disconnected_without_others(
    service: TransactionService, client: Any, data: bytes
) -> None:
    with connect(service) as connection:
        connection.sendall(data)
        assert is_closed(connection)
    assert client.status() == "OK"


def test_connection_above_the_limit_is_rejected_alone(
    service: TransactionService, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.status() == "OK"
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)
    # Otherwise an accepted connection looks refused once its time for a request is over.
    monkeypatch.setattr(module, "REQUEST_SECONDS", 2 * PATIENCE_SECONDS)
    with connect(service) as connection:
        assert is_closed(connection)
    assert client.status() == "OK"


def test_new_connection_replaces_a_long_silent_connection(
    service: TransactionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(module, "NEW_SILENT_SECONDS", 0.0)
    # Otherwise an accepted connection looks refused once its time for a request is over.
    monkeypatch.setattr(module, "REQUEST_SECONDS", 2 * PATIENCE_SECONDS)
    with ExitStack() as stack:
        one, other, new = (stack.enter_context(connect(service)) for _ in range(3))
        for connection in (other, one):
            assert call_service(connection).fields == {0: b"OK"}
        wait_until(lambda: len(service._awaiting) == 3)
        # A connection without a response is closed first, however long the others are silent.
        assert call_service(stack.enter_context(connect(service))).fields == {0: b"OK"}
        assert is_closed(new)
        assert is_closed(stack.enter_context(connect(service)))
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.0)
        assert call_service(stack.enter_context(connect(service))).fields == {0: b"OK"}
        assert is_closed(other)
        assert call_service(one).fields == {0: b"OK"}


@pytest.mark.parametrize(("files", "most"), [(256, 64), (3, 1), (10**6, 1000), (resource.RLIM_INFINITY, 1000)])
def test_connections_are_bounded_by_open_files(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert module._connection_limit() == most


def large_call() -> bytes:
    """Return a call, with its length, that is too large to be read together with several others."""
    changes = [b"%d" % number for number in range(20_000)]
    large = encode_call("canCommitOrThrow", wire.i64(1, 7), wire.strings(2, changes, Kind.SET))
    assert len(large) > 2 * module.LARGE_BYTES + LENGTH.size
    return large


def test_connection_without_a_whole_call_is_closed(
    service: TransactionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(service) as waiting, connect(service) as slow, ExitStack() as stack:
        for connection in (waiting, slow):
            assert call_service(connection).fields == {0: b"OK"}
        with monkeypatch.context() as patched:
            patched.setattr(module, "REQUEST_SECONDS", 0.01)
            for _ in range(3):
                assert is_closed(stack.enter_context(connect(service)))
            slow.sendall(b"\0\0\1\0abc")
            assert is_closed(slow)
        assert call_service(waiting).fields == {0: b"OK"}


def test_incomplete_large_calls_block_only_large_calls(service: TransactionService) -> None:
    large, begins = large_call(), 4 + module.LARGE_BYTES
    with ExitStack() as stack:
        begun = [stack.enter_context(connect(service)) for _ in range(module.LARGE_REQUESTS)]
        for connection in begun:
            connection.sendall(large[:begins])
        wait_until(service._large.locked)
        late, small = stack.enter_context(connect(service)), stack.enter_context(connect(service))
        late.sendall(large)
        assert call_service(small).fields == {0: b"OK"}
        assert select.select([late], [], [], 0) == ([], [], [])
        begun[0].close()
        assert read_response(late).name == "canCommitOrThrow"
        assert call_service(begun[1], large[begins:]).name == "canCommitOrThrow"


def test_stalled_large_calls_are_closed_and_release_their_places(
    service: TransactionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, begins = large_call(), 4 + module.LARGE_BYTES
    with ExitStack() as stack:
        begun = [stack.enter_context(connect(service)) for _ in range(module.LARGE_REQUESTS)]
        late = stack.enter_context(connect(service))
        with monkeypatch.context() as patched:
            patched.setattr(module, "LARGE_SECONDS", 0.01)
            for connection in begun:
                connection.sendall(large[:begins])
            assert all(map(is_closed, begun))
        assert call_service(late, large).name == "canCommitOrThrow"


def test_large_calls_with_few_bytes_received_hold_no_place(service: TransactionService) -> None:
    large = large_call()
    with ExitStack() as stack:
        begun = [stack.enter_context(connect(service)) for _ in range(module.LARGE_REQUESTS)]
        late = stack.enter_context(connect(service))
        for connection in begun:
            connection.sendall(large[:100])
        wait_until(lambda: len(service._awaiting) == len(begun) + 1)
        assert call_service(late, large).name == "canCommitOrThrow"
        assert call_service(begun[0], large[100:]).name == "canCommitOrThrow"


def test_client_that_does_not_read_is_cut_off_alone(
    service: TransactionService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = 48 << 20  # more than sockets hold
    monkeypatch.setattr(module, "answer", lambda *_: bytes(size))
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", size)
    with connect(service) as first, connect(service) as second:
        first.sendall(STATUS)
        wait_until(lambda: len(service._unread) == 1)
        # A single client may leave any number of bytes unread.
        second.sendall(STATUS)
        slow = first.getsockname()
        assert receive(second, 4 + size) == size.to_bytes(4) + bytes(size)
        with pytest.raises((AssertionError, ConnectionResetError)):
            receive(first, 4 + size)
    assert re.search(rf"{re.escape(str(slow))} .*\bread\b", caplog.text)


def test_concurrent_clients_get_their_own_responses(service: TransactionService) -> None:
    def work(name: str) -> list[int]:
        with TransactionClient(service.address, PATIENCE_SECONDS) as client:
            begun = [client.start_short(client=name).transaction_id for _ in range(10)]
            assert {pointer for pointer, who in client.clients().items() if who == name} == set(begun)
            for pointer in begun:
                client.can_commit(pointer, [f"{pointer}".encode()])
                client.commit(pointer)
            return begun

    with ThreadPoolExecutor(16) as workers:
        begun = [pointer for found in workers.map(work, map(str, range(48))) for pointer in found]
    assert len(set(begun)) == len(begun) == 480


# --- start, stop and background work ---------------------------------------------------------------------------------


def test_address_of_ip_version_6_has_brackets(manager: TransactionManager) -> None:
    assert TransactionService(manager, "[::1]:1").address == "[::1]:1"


def test_start_with_a_port_in_use_names_the_setting(service: TransactionService, manager: TransactionManager) -> None:
    with pytest.raises(ConfigurationError, match=rf"transactions\.thrift .*127\.0\.0\.1:{service.port}"):
        TransactionService(manager, service.address).start()


def test_stop_answers_a_call_in_flight_and_closes_silent_connections(clock: ManualClock) -> None:
    storage = SlowStorage()
    with (
        served(TransactionManager(storage, clock)) as service,
        connect(service) as silent,
        connect(service) as busy,
        ThreadPoolExecutor(1) as stopper,
    ):
        busy.sendall(encode_call("startShort"))
        assert storage.in_sync.wait(PATIENCE_SECONDS)
        stopped = stopper.submit(service.stop)
        assert is_closed(silent)
        storage.go_on.set()
        assert read_response(busy).fields[0][1] == BASE + 1
        assert is_closed(busy)
        stopped.result(PATIENCE_SECONDS)


def test_stop_closes_a_call_that_does_not_end(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.01)
    storage = SlowStorage()
    manager = TransactionManager(storage, clock)
    with served(manager) as service, connect(service) as busy, ThreadPoolExecutor(1) as stopper:
        busy.sendall(encode_call("startShort"))
        assert storage.in_sync.wait(PATIENCE_SECONDS)
        stopped = stopper.submit(service.stop)
        assert is_closed(busy)
        storage.go_on.set()
        stopped.result(PATIENCE_SECONDS)


class SlowStorage(SpyStorage):
    """A storage whose first sync of an edit waits until the test sets ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.in_sync, self.go_on = threading.Event(), threading.Event()

    def log(self, timestamp_ms: int) -> Log:
        log = super().log(timestamp_ms)
        sync = log.sync

        def sync_slowly(position: int) -> None:
            if position:
                self.in_sync.set()
                assert self.go_on.wait(PATIENCE_SECONDS)
            sync(position)

        log.sync = sync_slowly  # type: ignore[method-assign]
        return log


def test_service_expires_transactions_and_takes_snapshots(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    manager.start_short(1)
    with served(manager, cleanup_seconds=0.01, snapshot_seconds=0.01):
        clock.advance(2_000)
        wait_until(lambda: manager.invalid_size() == 1)
        before = storage.calls.count("save")
        wait_until(lambda: storage.calls.count("save") > before)


def test_default_intervals_are_1_s_for_cleanup_and_60_s_for_snapshots(
    manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[float] = []

    async def sleep(seconds: float) -> None:
        intervals.append(seconds)
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    with served(manager):
        wait_until(lambda: len(intervals) == 2)
    assert sorted(intervals) == [1, 60]


def test_failed_snapshot_is_logged_and_retried(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    storage.save_failure = LogFailed("the disk is full.")
    with caplog.at_level(logging.ERROR), served(manager, cleanup_seconds=60, snapshot_seconds=0.01):
        wait_until(lambda: "the disk is full" in caplog.text)
        storage.save_failure = None
        before = storage.calls.count("save")
        wait_until(lambda: storage.calls.count("save") > before)


def test_error_of_the_log_shows_its_path_in_the_log_only(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    with served(manager) as service, TransactionClient(service.address) as client:
        storage.failure = storage.save_failure = LogFailed("/srv/tx/log cannot be written.", "Look at /srv/tx.")
        for call in (client.start_short, client.encoded_snapshot):
            with pytest.raises(TmsError, match="… cannot be written") as caught:
                call()
            assert "/srv" not in str(caught.value)
    assert "/srv/tx/log" in caplog.text


def test_periodic_task_with_a_bug_is_logged_and_repeated(
    manager: TransactionManager, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bugs, expire = iter([ZeroDivisionError("a bug"), ZeroDivisionError("a bug")]), manager.expire

    def expire_at_last() -> int:
        if (bug := next(bugs, None)) is not None:
            raise bug
        return expire()

    monkeypatch.setattr(manager, "expire", expire_at_last)
    manager.start_short(1)
    clock.advance(2_000)
    with served(manager, cleanup_seconds=0.01):
        wait_until(lambda: manager.invalid_size() == 1)
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "a bug" in record.message
    assert record.exc_info is not None


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["canCommitOrThrow", "canCommitTx", "truncateInvalidTx"])
def test_change_set_of_too_many_keys_is_rejected_before_it_is_read(manager: TransactionManager, name: str) -> None:
    one = manager.start_short()
    first = wire.structure(1, *transaction_fields(one)) if name == "canCommitTx" else wire.i64(1, one.transaction_id)
    # Empty strings: 1 MB on the wire, and more than 30 MB as objects.
    keys = [b""] * (wire.MAX_STRINGS + 1)
    data = wire.message(MessageKind.CALL, name, 7, first, wire.strings(2, keys, Kind.SET))
    tracemalloc.start()
    try:
        found = wire.read_message(answer(manager, data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert found.number == 7
    if name == "canCommitOrThrow":
        assert "too large" in as_text(found.fields[3], 1)
    elif name == "canCommitTx":
        assert found.fields[0] == {1: False}
    else:
        assert found.kind == MessageKind.EXCEPTION
    manager.can_commit(one.transaction_id, keys[:-1])


def test_large_call_takes_memory_of_the_server_and_waits_until_there_is_some(service: TransactionService) -> None:
    memory = Memory(MEMORY_BYTES, PATIENCE_SECONDS)
    large, begins = large_call(), 4 + module.LARGE_BYTES
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    other = memory.share(lambda: None)
    lasting = int(MEMORY_BYTES * 0.75)
    try:
        asyncio.run_coroutine_threadsafe(other.take(lasting - 1000), loop).result(PATIENCE_SECONDS)
        service.room = LentMemory(memory, loop).take
        with connect(service) as connection, connect(service) as small:
            connection.sendall(large[:begins])
            wait_until(lambda: memory.waiting == 1)
            assert call_service(small).name == "status"
            loop.call_soon_threadsafe(other.close)
            wait_until(lambda: 3 * (len(large) - 4) < memory.used_bytes < lasting - 1000)
            assert call_service(connection, large[begins:]).name == "canCommitOrThrow"
        wait_until(lambda: memory.used_bytes == 0)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    # After the listener has stopped, all memory of the server is free.
    with connect(service) as connection:
        assert call_service(connection, large).name == "canCommitOrThrow"


def test_large_call_without_memory_gets_an_error_and_the_connection_continues(service: TransactionService) -> None:
    @asynccontextmanager
    async def no_room(size: int, abort: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
        if size:
            raise Unavailable("none", "later")
        yield abort

    service.room = no_room
    with connect(service) as connection:
        refused = call_service(connection, large_call())
        assert (refused.kind, refused.fields[2]) == (MessageKind.EXCEPTION, Failure.PROTOCOL_ERROR)
        assert as_text(refused.fields, 1) == module.NO_MEMORY
        assert call_service(connection).name == "status"


def test_list_longer_than_a_frame_does_not_keep_transactions_from_ending(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 22,000 invalid ids take 176 kB, above the limit of this test; 17 MB above the real limit take too long to send.
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 128 << 10)
    with TransactionManager(PreviousStorage(*range(1, 22_001)), clock) as manager, served(manager) as service:
        with TransactionClient(service.address, PATIENCE_SECONDS) as client:
            one, two = client.start_short(), client.start_long()
            assert len(one.invalids) == 22_000
            more = client.checkpoint(one)
            assert more.checkpoint_write_pointers[-1] == more.write_pointer > one.write_pointer
            assert more.invalids is one.invalids
            client.abort(more)
            client.abort(two)
            assert manager.status(one.transaction_id) == "ended"
            # A long transaction becomes invalid, so the call contains the type and the id.
            assert manager.status(two.transaction_id) == "invalid"
            # As the client of Tephra.
            client._has_id_calls = False
            client.abort(client.checkpoint(client.start_short()))
            assert client.truncate_invalid(one.invalids)
            assert client.invalid_size() == 1
        with connect(service) as connection:
            connection.sendall((module.MAX_FRAME_BYTES + 1).to_bytes(4))
            assert is_closed(connection)


# --- a token ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(manager: TransactionManager, tmp_path: Path) -> Iterator[TransactionService]:
    (tmp_path / "token").write_bytes(b" secret\n")
    with served(manager, tokens={Level.CLIENT: lambda: read_token("token_file", tmp_path / "token", 1)}) as service:
        yield service


def client_with(service: TransactionService, token_file: Path | None, **settings: Any) -> TransactionClient:
    return TransactionClient.configured(TransactionSettings(thrift=service.address, token_file=token_file, **settings))


def test_call_with_the_only_token_may_do_everything(guarded: TransactionService, tmp_path: Path) -> None:
    with client_with(guarded, tmp_path / "token") as client:
        client.commit(client.start_short().transaction_id)
        assert client.latest().snapshot.write_pointer


@pytest.mark.parametrize("token", [b"wrong", b"secre", b"secret2"])
def test_call_with_a_wrong_token_does_nothing(
    guarded: TransactionService, manager: TransactionManager, tmp_path: Path, token: bytes
) -> None:
    (tmp_path / "mine").write_bytes(token)
    with client_with(guarded, tmp_path / "mine") as client, pytest.raises(TokenRequired):
        client.start_short()
    assert not manager.visibility().in_progress


def test_call_without_a_token_does_nothing(guarded: TransactionService, manager: TransactionManager) -> None:
    pointer = manager.start_short().transaction_id
    with TransactionClient(guarded.address) as client:
        for _ in range(2):
            with pytest.raises(TokenRequired) as caught:
                client.invalidate(pointer)
            assert "transactions.token_file" in caught.value.hint
    assert [entry.write_pointer for entry in manager.visibility().in_progress] == [pointer]


class InstantAttempts(FailedAttempts):
    """Failed attempts without delays."""

    async def delay(self, address: str) -> None:
        self.note(address)


def test_only_attempts_without_the_token_are_slowed_down(
    guarded: TransactionService, tmp_path: Path, clock: ManualClock
) -> None:
    guarded.failed = failed = InstantAttempts(clock)
    (tmp_path / "mine").write_bytes(b"wrong")
    for file in (tmp_path / "mine", None, tmp_path / "token"):
        with client_with(guarded, file) as client:
            if file == tmp_path / "token":
                client.commit(client.start_short().transaction_id)
            else:
                with pytest.raises(ServiceUnavailable):
                    client.start_short()
    assert {address: count for address, (count, _) in failed._failed.items()} == {"127.0.0.1": 2.0}


def test_large_call_before_the_token_is_cut_off(guarded: TransactionService) -> None:
    with connect(guarded) as connection:
        connection.sendall((module.LARGE_BYTES + 1).to_bytes(4))
        assert is_closed(connection)


@pytest.mark.parametrize("for_clients", [True, False], ids=["token for clients", "clients without a token"])
def test_administrative_call_without_the_administrative_token_does_nothing(
    manager: TransactionManager, tmp_path: Path, for_clients: bool
) -> None:
    client_token, admin_token = tmp_path / "client", tmp_path / "admin"
    client_token.write_bytes(b"of clients")
    admin_token.write_bytes(b"of operators")
    files = {Level.ADMIN: admin_token} | ({Level.CLIENT: client_token} if for_clients else {})
    tokens = {level: partial(read_token, "token_file", file, 1) for level, file in files.items()}
    with served(manager, tokens=tokens) as service:
        invalid = manager.start_short().transaction_id
        manager.invalidate(invalid)
        token = client_token if for_clients else None
        with client_with(service, token) as client:
            client.commit(client.start_short().transaction_id)
            client.invalidate(client.start_short().transaction_id)
            each_raises(
                TokenRequired,
                lambda: client.truncate_invalid([invalid]),
                lambda: client.truncate_invalid_before(2**62),
                client.reset,
                client.encoded_snapshot,
                match=r"transactions\.admin_token_file",
            )
        assert manager.invalid_size() == 2
        with client_with(service, token, admin_token_file=admin_token) as operator:
            operator.commit(operator.start_short().transaction_id)
            assert operator.encoded_snapshot()
            assert operator.truncate_invalid([invalid])
        assert manager.invalid_size() == 1


def test_administrative_call_of_an_old_message_without_version_needs_the_token(manager: TransactionManager) -> None:
    manager.invalidate(manager.start_short().transaction_id)
    with served(manager, tokens={Level.ADMIN: lambda: b"of operators"}) as service, connect(service) as connection:
        name = b"resetState"
        frame = len(name).to_bytes(4) + name + b"\1" + (1).to_bytes(4) + b"\0"
        connection.sendall(len(frame).to_bytes(4) + frame)
        assert b"administrative token" in connection.recv(1000)
    assert manager.invalid_size() == 1


@pytest.mark.parametrize("setting", ["token_file", "admin_token_file"])
def test_missing_or_empty_token_file_is_named_in_the_error(
    guarded: TransactionService, tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    settings = TransactionSettings.model_validate({"thrift": guarded.address, setting: tmp_path / "none"})

    def assert_refused(reason: str) -> None:
        with TransactionClient.configured(settings) as client, pytest.raises(ServiceUnavailable, match=reason):
            client.start_short()

    assert_refused(rf"^transactions\.{setting} .* cannot be read")
    (tmp_path / "none").write_bytes(b"\n")
    assert_refused(rf"^transactions\.{setting} .* is empty")
    (tmp_path / "none").write_bytes(b"other")
    assert_refused(rf"rejects the token of transactions\.{setting}\.")
    assert "cannot be read" not in caplog.text


def test_unreadable_token_of_the_service_is_an_error_of_the_service(
    guarded: TransactionService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").write_bytes(b"secret")
    (tmp_path / "token").unlink()
    with client_with(guarded, tmp_path / "mine") as client:
        for _ in range(2):
            with pytest.raises(TokenUnreadable) as caught:
                client.start_short()
            assert str(tmp_path) not in str(caught.value)
        assert caught.value.code == ServiceUnavailable.code
        (tmp_path / "token").write_bytes(b"secret")
        client.commit(client.start_short().transaction_id)
    assert caplog.text.count(f"token_file {tmp_path / 'token'} cannot be read") == 1
    assert not [record for record in caplog.records if record.name == AUDIT]


def test_unreadable_administrative_token_leaves_the_calls_of_clients(
    manager: TransactionManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "client").write_bytes(b"of clients")
    (tmp_path / "mine").write_bytes(b"of operators")
    files = {Level.ADMIN: tmp_path / "admin", Level.CLIENT: tmp_path / "client"}
    tokens = {level: partial(read_token, "token_file", file, 1) for level, file in files.items()}
    with served(manager, tokens=tokens) as service:
        token = tmp_path / "client"
        with client_with(service, token) as client:
            client.commit(client.start_short().transaction_id)
        operator = client_with(service, token, admin_token_file=tmp_path / "mine")
        with operator, pytest.raises(TokenUnreadable):
            operator.encoded_snapshot()
    assert f"{tmp_path / 'admin'} cannot be read" in caplog.text


def test_token_for_a_service_without_authentication_is_ignored(service: TransactionService, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"secret")
    with client_with(service, tmp_path / "token") as client:
        client.commit(client.start_short().transaction_id)
