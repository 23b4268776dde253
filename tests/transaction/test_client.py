"""The client of a transaction service: calls, results, and errors without a service."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import pytest

from tests.kit.sockets import SocketServer
from tests.support import PATIENCE_SECONDS, each_raises, free_port, record_calls
from tests.transaction.managers import BASE, NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import (
    BadArgument,
    CannotSnapshot,
    ChangesTooLarge,
    Conflict,
    NoSnapshot,
    NotInProgress,
    TruncateTimeError,
)
from tms_core.settings.models import TransactionSettings
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.thrift import transaction_fields, transaction_of
from tms_core.transaction.codec.wire import Failure, MessageKind, RpcMessage
from tms_core.transaction.manager.conflicts import ChangeLimits
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction, TransactionType
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import MAX_RESPONSE_BYTES, MethodUnknown, OutcomeUnknown, ServiceUnavailable
from tms_core.transaction.rpc.service import TransactionService

#: A time limit that expires in a test.
SHORT_SECONDS = 0.2


@pytest.fixture
def manager(clock: ManualClock) -> Iterator[TransactionManager]:
    with TransactionManager(MemoryStorage(), clock, limits=ChangeLimits(count=1)) as manager:
        yield manager


@pytest.fixture
def client(service: TransactionService) -> Iterator[TransactionClient]:
    with TransactionClient(service.address, PATIENCE_SECONDS) as client:
        yield client


def test_client_calls_reach_the_manager(
    client: TransactionClient, manager: TransactionManager, clock: ManualClock
) -> None:
    one, long = client.start_short(7, "me"), client.start_long("you")
    assert (one.transaction_id, one.type, long.type) == (BASE + 1, TransactionType.SHORT, TransactionType.LONG)
    assert client.clients() == {BASE + 1: "me", BASE + 2: "you"}
    checkpoint = client.checkpoint(one)
    assert list(checkpoint.checkpoint_write_pointers) == [BASE + 3]
    client.can_commit(one.transaction_id, [b"k"])
    client.commit(one.transaction_id, checkpoint.write_pointer)
    client.abort(long)
    assert client.latest().snapshot == manager.visibility()
    assert client.latest().name == f"the transaction service {client.address}"
    assert client.invalid_size() == 1
    assert client.truncate_invalid([long.transaction_id])
    assert not client.truncate_invalid([long.transaction_id])
    assert not client.truncate_invalid_before(NOW_MS)
    assert client.invalidate(client.start_short().transaction_id)
    assert not client.invalidate(7)
    first = client.start_short()
    second = client.commit_and_start(first.transaction_id, timeout_seconds=7, client="me")
    assert second is not None
    assert second.is_visible(first.transaction_id)
    assert client.clients() == {second.transaction_id: "me"}
    clock.advance(7_001)
    assert manager.expire() == 1
    client.prune_now()
    client.reset()
    assert (client.invalid_size(), client.status()) == (0, "OK")


def test_client_of_a_restarted_service_continues(
    service: TransactionService, manager: TransactionManager, client: TransactionClient
) -> None:
    one = client.start_short()
    service.stop()
    again = TransactionService(manager, service.address)
    again.start()
    client.commit(one.transaction_id)
    again.stop()
    assert not manager.is_in_progress(one.transaction_id)


def test_rejected_calls_raise_the_errors_of_the_manager(
    client: TransactionClient, manager: TransactionManager, clock: ManualClock
) -> None:
    first, second = client.start_short(client="me"), client.start_short()
    for one in (first, second):
        client.can_commit(one.transaction_id, [b"k\xff"])
    client.commit(first.transaction_id)
    with pytest.raises(Conflict) as raised:
        client.commit(second.transaction_id)
    assert (raised.value.transaction_id, raised.value.key, raised.value.client) == (
        second.transaction_id,
        r"k\xFF",
        "me",
    )
    with pytest.raises(Conflict) as chained:
        client.commit_and_start(second.transaction_id)
    assert (chained.value.transaction_id, chained.value.key) == (second.transaction_id, r"k\xFF")
    with pytest.raises(BadArgument, match="timeout"):
        client.commit_and_start(second.transaction_id, timeout_seconds=0)
    with pytest.raises(BadArgument, match="2147483647"):
        client.commit_and_start(second.transaction_id, timeout_seconds=2**31)
    for commit in (client.commit, client.commit_and_start):
        with pytest.raises(NotInProgress, match="that is not in progress"):
            commit(first.transaction_id)
    assert list(client.clients()) == [second.transaction_id]
    with pytest.raises(ChangesTooLarge, match=" 1"):
        client.can_commit(second.transaction_id, [b"a", b"b"])
    with pytest.raises(BadArgument, match="timeout"):
        client.start_short(0)
    with pytest.raises(BadArgument, match="2147483647"):
        client.start_short(2**31)
    clock.advance(1)
    with pytest.raises(TruncateTimeError):
        client.truncate_invalid_before(NOW_MS + 1)
    manager.close()
    assert client.status() == "NOTOK"
    with pytest.raises(CannotSnapshot):
        client.encoded_snapshot()
    with pytest.raises(NoSnapshot, match="has stopped"):
        client.latest()
    with pytest.raises(ServiceUnavailable, match="startShortClientId"):
        client.start_short()


class ScriptedService(SocketServer):
    """A transaction service whose response to each call the test defines.

    Args:
        conduct: returns the response to a call; None: the service closes the connection.

    Attributes:
        calls: the names of the received calls.
    """

    def __init__(self, conduct: Callable[[RpcMessage], bytes | None]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._conduct = conduct

    def serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while size := stream.read(4):
                call = wire.read_message(stream.read(int.from_bytes(size)))
                self.calls.append(call.name)
                data = self._conduct(call)
                if data is None:
                    return
                connection.sendall(data)


@contextmanager
def scripted(
    conduct: Callable[[RpcMessage], bytes | None], seconds: float = PATIENCE_SECONDS
) -> Iterator[tuple[ScriptedService, TransactionClient]]:
    with ScriptedService(conduct) as service, TransactionClient(service.address, seconds) as client:
        yield service, client


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def reply(call: RpcMessage, *fields: bytes, number: int | None = None, name: str | None = None) -> bytes:
    return framed(
        wire.message(MessageKind.REPLY, name or call.name, call.number if number is None else number, *fields)
    )


def hang_up(_: RpcMessage) -> None:
    """Close without a response."""


def test_commit_over_a_broken_connection_is_unknown_and_not_repeated() -> None:
    with scripted(hang_up) as (service, client):
        with pytest.raises(OutcomeUnknown, match=r"commitOrThrow.*invalidate"):
            client.commit(7)
        assert service.calls == ["commitOrThrow"]


def test_calls_that_may_be_done_once_are_not_repeated() -> None:
    with scripted(hang_up) as (service, client):
        asks: list[Callable[[], object]] = [client.start_short, client.start_long, client.reset]
        asks.append(lambda: client.commit_and_start(7))
        asks += [lambda: client.invalidate(7), lambda: client.truncate_invalid([7]), lambda: client.can_commit(7, [])]
        for number, ask in enumerate(asks[:-1], 1):
            with pytest.raises(OutcomeUnknown):
                ask()
            assert len(service.calls) == number
        with pytest.raises(OutcomeUnknown):
            asks[-1]()
        assert service.calls[number:] == ["canCommitOrThrow"] * 2


def test_idempotent_call_on_a_broken_connection_is_retried() -> None:
    answers = iter([None, b""])
    with scripted(lambda call: None if next(answers) is None else reply(call)) as (service, client):
        client.abort(Transaction(7, 7, 7))
        assert service.calls == ["abortById", "abortById"]


def test_call_without_a_response_in_time_is_not_retried() -> None:
    over = threading.Event()

    def wait_until_over(_: RpcMessage) -> None:
        over.wait(PATIENCE_SECONDS)

    with scripted(wait_until_over, SHORT_SECONDS) as (service, client):
        with pytest.raises(OutcomeUnknown, match=r"0\.2 s"):
            client.status()
        over.set()
    assert service.calls == ["status"]


def test_address_of_an_http_server_is_no_transaction_service() -> None:
    with (
        scripted(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as (_, client),
        pytest.raises(ServiceUnavailable) as refused,
    ):
        client.encoded_snapshot()
    assert refused.value.message == f"The transaction service at {client.address} responds in HTTP."
    assert "transactions.thrift" in refused.value.hint


def test_call_without_a_server_is_unavailable() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with TransactionClient(f"127.0.0.1:{nobody.getsockname()[1]}") as client:
            with pytest.raises(ServiceUnavailable, match=r"transactions\.thrift"):
                client.commit(7)
            with pytest.raises(NoSnapshot, match=f"{client.address} cannot be reached"):
                client.latest()


@pytest.mark.parametrize(("source", "is_of_tms_serve"), [("manager", True), ("thrift", False)])
def test_hint_without_a_server_starts_only_the_service_of_these_settings(
    source: Literal["manager", "thrift"], is_of_tms_serve: bool
) -> None:
    settings = TransactionSettings(source=source, thrift=f"127.0.0.1:{free_port()}")
    with TransactionClient.configured(settings) as client, pytest.raises(ServiceUnavailable) as caught:
        client.commit(7)
    assert ("tms serve" in caught.value.hint) == is_of_tms_serve
    assert "transactions.thrift" in caught.value.hint


OK = wire.string(0, "OK")
NONSENSE: dict[str, Callable[[RpcMessage], bytes]] = {
    "another call's number": lambda call: reply(call, OK, number=call.number + 1),
    "another call's name": lambda call: reply(call, OK, name="getSnapshot"),
    "too large": lambda _: (MAX_RESPONSE_BYTES + 1).to_bytes(4),
    "of negative size": lambda _: b"\xff\xff\xff\xff",
    "nonsense": lambda _: framed(b"nonsense"),
    "cut off": lambda call: reply(call, OK)[:-2],
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_foreign_response_leaves_the_outcome_unknown(kind: str) -> None:
    with scripted(NONSENSE[kind], SHORT_SECONDS) as (_, client), pytest.raises(OutcomeUnknown):
        client.status()


def unknown_but(*known: str) -> Callable[[RpcMessage], bytes]:
    """Return a service that completes some calls without a result and does not know others."""

    def conduct(call: RpcMessage) -> bytes:
        if call.name in known:
            return reply(call)
        fields = (wire.string(1, "Invalid method name"), wire.i32(2, Failure.UNKNOWN_METHOD))
        return framed(wire.message(MessageKind.EXCEPTION, call.name, call.number, *fields))

    return conduct


def test_clients_of_a_tephra_service_are_unknown() -> None:
    with scripted(unknown_but()) as (_, client):
        assert client.clients() == {}
        with pytest.raises(MethodUnknown, match="resetState"):
            client.reset()


def test_commit_and_start_with_a_service_of_tephra_only_commits() -> None:
    with scripted(unknown_but("commitOrThrow")) as (service, client):
        assert client.commit_and_start(7, 8) is None
        assert client.commit_and_start(9) is None
        assert service.calls == ["commitAndStart", "commitOrThrow", "commitOrThrow"]


def test_commit_and_start_after_a_broken_connection_asks_again() -> None:
    tephras, started = unknown_but("commitOrThrow"), wire.structure(0, *transaction_fields(Transaction(9, 9, 9)))

    def begin(call: RpcMessage) -> bytes:
        return reply(call, started)

    conducts: list[Callable[[RpcMessage], bytes | None]] = [begin, reply, tephras, hang_up, tephras, tephras]
    with scripted(lambda call: conducts.pop()(call)) as (service, client):  # noqa: PLW0108
        assert client.commit_and_start(7) is None
        client.abort(Transaction(8, 8, 8))
        second = client.commit_and_start(8)
        assert second is not None
        assert second.transaction_id == 9
        called = ["commitAndStart", "commitOrThrow", "abortById", "abortById", "abortTx", "commitAndStart"]
        assert service.calls == called


def test_abort_and_checkpoint_of_tephras_service_send_the_transaction() -> None:
    transaction = Transaction(8, 8, 9, array("q", [3]), checkpoint_write_pointers=array("q", [9]))
    more = wire.structure(0, *transaction_fields(replace(transaction, write_pointer=10)))

    def conduct_as_tephra(call: RpcMessage) -> bytes:
        if call.name in ("abortTx", "checkpoint"):
            assert list(transaction_of(call.fields[1]).invalids) == [3]
            return reply(call, more) if call.name == "checkpoint" else reply(call)
        return unknown_but()(call)

    with scripted(conduct_as_tephra) as (service, client):
        assert client.checkpoint(transaction).write_pointer == 10
        client.abort(transaction)
        client.abort(transaction)
        assert service.calls == ["checkpointById", "checkpoint", "abortTx", "abortTx"]


def test_snapshot_of_invalid_bytes_is_an_unknown_outcome() -> None:
    with scripted(lambda call: reply(call, wire.string(0, b"nonsense"))) as (_, client):
        with pytest.raises(OutcomeUnknown, match="getSnapshot"):
            client.in_progress()
        with pytest.raises(NoSnapshot):
            client.latest()


def test_start_without_a_transaction_has_an_unknown_outcome() -> None:
    with (
        scripted(lambda call: reply(call, wire.structure(0))) as (_, client),
        pytest.raises(OutcomeUnknown, match="is not a number"),
    ):
        client.start_short()


@pytest.mark.parametrize("fields", [[], [wire.i64s(0, [1])]], ids=["none", "a list"])
def test_response_without_the_result_has_an_unknown_outcome(fields: list[bytes]) -> None:
    with scripted(lambda call: reply(call, *fields)) as (_, client):
        each_raises(
            (OutcomeUnknown, NoSnapshot),
            client.start_short,
            client.status,
            client.latest,
            client.invalid_size,
            client.clients,
        )


@contextmanager
def hanging() -> Iterator[str]:
    """Start a server that never responds to its connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_client_of_several_services_skips_failing_services_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record_calls(monkeypatch, TransactionClient, "_call_service")
    started = wire.structure(0, *transaction_fields(Transaction(9, 9, 9)))
    with (
        scripted(lambda call: reply(call, *[started] * call.name.startswith("start"))) as (service, _),
        hanging() as silent,
        TransactionClient([f"127.0.0.1:{free_port()}", silent, service.address], 3) as client,
    ):
        assert client.start_short().transaction_id == 9
        # Each service gets an equal share of the rest of the 3 s.
        [*_, seconds] = asked[1]
        assert seconds <= 1.5
        client.commit(9)
        assert service.calls == ["startShortClientId", "commitOrThrow"]
        assert client.address == service.address


def test_client_of_several_services_never_commits_twice() -> None:
    with (
        scripted(hang_up) as (first, _),
        scripted(reply) as (second, _),
        TransactionClient([first.address, second.address]) as client,
    ):
        with pytest.raises(OutcomeUnknown):
            client.commit(7)
        assert (first.calls, second.calls) == (["commitOrThrow"], [])
        client.commit(8)
        assert second.calls == ["commitOrThrow"]


def test_client_of_several_services_that_all_fail_says_that_nothing_was_done() -> None:
    with (
        TransactionClient([f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]) as client,
        pytest.raises(ServiceUnavailable),
    ):
        client.commit(7)
