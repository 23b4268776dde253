"""ManagerServers that share a transaction manager: each responds like the leader, or reports that none leads."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.kit.certificates import make_certificate
from tests.kit.sockets import SocketServer
from tests.support import PATIENCE_SECONDS, raising, wait_until
from tests.transaction.managers import BASE, NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, FormatError, NotInProgress, StoreError, TmsError, TransactionError
from tms_core.server import managing, serving
from tms_core.server.ha import shared_manager
from tms_core.server.ha.leadership import CHECK_SECONDS, Leadership
from tms_core.server.ha.manager_log import SideStorage, read_root
from tms_core.server.ha.member import HaMember
from tms_core.server.ha.shared_manager import RemoteService, SharedManager
from tms_core.server.ha.slot_assignment import SideCell
from tms_core.server.managing import (
    ServerTransactions,
    _advertised_address,
    check_manager,
    open_manager,
    register_metrics,
)
from tms_core.server.serving import _OpenResources
from tms_core.settings.models import LeaderSettings, Settings, load
from tms_core.tables.base import MessageValue
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import Failure, MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage, RecoveredLog
from tms_core.transaction.model import TX_PER_MS
from tms_core.transaction.rpc import service as rpc_service
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import NOT_MANAGED_HERE, OutcomeUnknown, ServiceUnavailable, SocketConnection
from tms_core.transaction.rpc.service import WORKERS, Level, TransactionService

SECONDS = 15
OVER_MS = SECONDS * 1000 + 1


class ManagerServer:
    """A server with the shared transaction manager and its service."""

    def __init__(
        self,
        side: MemorySide,
        name: str,
        clock: ManualClock,
        token_file: Path | None = None,
        previous: Callable[[], RecoveredLog] | None = None,
    ) -> None:
        lease = Lease(SideCell(side, b"l"), name, SECONDS, clock, wall_clocks=False)
        self.leadership = Leadership(lease, clock, fencing_delay_seconds=0)
        storage = SideStorage(side, self.leadership.lease_check, previous)
        manager, connect = TransactionManager(storage, clock), partial(SocketConnection, token_file=token_file)
        self.shared = SharedManager(
            manager, storage, self.leadership, side, clock, connect=connect, on_takeover=self.record_takeover
        )
        tokens = {} if token_file is None else {Level.CLIENT: token_file.read_bytes}
        self.service = TransactionService(
            self.shared.manager,
            "127.0.0.1:0",
            cleanup_seconds=0.01,
            snapshot_seconds=0.01,
            tokens=tokens,
            router=self.shared,
        )
        self.service.start()
        self.shared.set_address(self.service.address)
        self.takeovers = 0
        self.during_takeover: Callable[[], object] = lambda: None

    def record_takeover(self, manager: TransactionManager) -> None:
        self.during_takeover()
        assert manager.is_running
        self.takeovers += 1

    def check_leases(self) -> bool:
        """Check the leadership; return whether this server leads."""
        for _ in range(100):
            self.leadership.step(self.shared.is_ready)
            if self.leadership.leads or not self.leadership.holds:
                break
        return self.leadership.leads

    def stop(self) -> None:
        self.service.stop()
        self.shared.close()


class ManagerServers:
    """Two servers with a shared transaction manager, the first of which leads, and a client of each."""

    def __init__(self, stack: ExitStack, token_file: Path | None = None) -> None:
        self.clock = ManualClock(NOW_MS)
        self.side = MemorySide()
        self.first, self.second = (ManagerServer(self.side, name, self.clock, token_file) for name in ("a", "b"))
        self.clients = []
        for server in (self.first, self.second):
            stack.callback(server.stop)
            settings = Settings().transactions.model_copy(update={"token_file": token_file})
            client = TransactionClient.configured(settings, address=server.service.address)
            self.clients.append(stack.enter_context(client))
        assert self.first.check_leases()
        assert not self.second.check_leases()

    def change(self) -> None:
        """Let the lease of the first server expire so that the second leads."""
        self.clock.advance(OVER_MS)
        assert self.second.check_leases()


@pytest.fixture
def servers() -> Iterator[ManagerServers]:
    with ExitStack() as stack:
        yield ManagerServers(stack)


def test_orderly_change_of_leader_logs_no_warning(servers: ManagerServers, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        servers.change()
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_snapshot_during_a_change_of_leader_logs_no_error(
    servers: ManagerServers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, paused, resumed = servers.side.exchange, Event(), Event()

    def pause_first_root(key: bytes, *change: Any) -> bool:
        if key == b"xr" and not paused.is_set():
            paused.set()
            resumed.wait(PATIENCE_SECONDS)
        return exchange(key, *change)

    monkeypatch.setattr(servers.side, "exchange", pause_first_root)
    with caplog.at_level(logging.INFO):
        assert paused.wait(PATIENCE_SECONDS)
        servers.change()
        resumed.set()
        wait_until(lambda: "Another server has taken over" in caplog.text)
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_either_of_two_servers_uses_the_manager_of_the_leader(servers: ManagerServers) -> None:
    one, other = servers.clients
    ids = [client.start_short().transaction_id for client in (one, other, one, other)]
    assert ids == [BASE + 1 + number for number in range(4)]
    other.can_commit(ids[0], [b"a"])
    one.commit(ids[0])
    for commit in (other.commit, other.commit_and_start):
        with pytest.raises(NotInProgress):
            commit(ids[0])
    begun = other.commit_and_start(ids[1], client="me")
    assert begun is not None
    assert (begun.transaction_id, one.clients()[begun.transaction_id]) == (BASE + 5, "me")
    ids = [*ids[1:], begun.transaction_id]
    assert other.latest().snapshot.open_pointers == one.latest().snapshot.open_pointers == frozenset(ids[1:])
    assert (servers.first.takeovers, servers.second.takeovers) == (1, 0)
    assert not servers.second.shared.manager.is_running


def test_search_for_the_same_leader_keeps_its_connections(servers: ManagerServers) -> None:
    servers.clients[1].start_short()
    known = servers.second.shared._find_service()
    servers.clock.advance(int(CHECK_SECONDS * 1000))
    assert servers.second.shared._find_service() is known


def test_call_for_a_missing_leader_is_unavailable(servers: ManagerServers) -> None:
    servers.clients[1].start_short()
    servers.first.service.stop()
    for _ in range(2):
        with pytest.raises(ServiceUnavailable, match="is not available"):
            servers.clients[1].start_short()


def test_call_without_a_leader_is_unavailable(servers: ManagerServers) -> None:
    servers.clock.advance(OVER_MS)
    with pytest.raises(ServiceUnavailable, match="managing"):
        servers.clients[0].start_short()
    # The second server forwards the call to the first, which does not forward it again.
    with pytest.raises(ServiceUnavailable, match=NOT_MANAGED_HERE):
        servers.clients[1].start_short()


def test_call_through_a_former_leader_finds_the_new_leader(servers: ManagerServers) -> None:
    third = ManagerServer(servers.side, "c", servers.clock)
    with TransactionClient(third.service.address) as client:
        begun = client.start_short(3600).transaction_id
        servers.change()
        # As after a search for the leader.
        third.shared._checked_ms = servers.clock.monotonic_ms()
        with pytest.raises(ServiceUnavailable, match=f"{servers.first.service.address} .*no longer"):
            client.start_short()
        assert client.start_short().transaction_id > begun
    third.stop()


def test_server_does_not_lead_before_its_manager_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    server, go_on = ManagerServer(MemorySide(), "a", ManualClock(NOW_MS)), Event()
    monkeypatch.setattr(server.shared, "_on_takeover", lambda _: go_on.wait())
    with monkeypatch.context() as impatient:
        impatient.setattr(shared_manager, "_WAIT_SECONDS", 0)
        assert not server.check_leases()
        beginning = server.shared._takeover
        assert not server.check_leases()
        assert server.shared._takeover is beginning is not None
    go_on.set()
    assert server.check_leases()
    server.stop()


def test_server_that_took_over_in_an_earlier_term_takes_over_again(servers: ManagerServers) -> None:
    transaction = servers.clients[0].start_short(3600)
    servers.change()
    for _ in range(2):
        assert not servers.first.check_leases()
    servers.clock.advance(OVER_MS)
    # The first server takes over, and is paused before the start of its term.
    resume = Event()
    servers.first.during_takeover = partial(resume.wait, 60)
    servers.first.leadership.step(servers.first.shared.is_ready)
    assert servers.first.leadership.holds
    assert not servers.second.check_leases()
    assert not servers.second.check_leases()
    servers.change()
    servers.clients[1].abort(transaction)
    servers.second.leadership.resign()
    resume.set()
    assert not servers.first.check_leases()
    assert servers.first.check_leases()
    assert not servers.first.shared.manager.is_in_progress(transaction.transaction_id)


def test_server_whose_previous_folder_is_unreadable_does_not_lead(caplog: pytest.LogCaptureFixture) -> None:
    server = ManagerServer(
        MemorySide(), "a", ManualClock(NOW_MS), previous=raising(PermissionError(13, "Permission denied"))
    )
    with caplog.at_level(logging.ERROR):
        assert not server.check_leases()
    assert "Permission denied" in caplog.text
    server.stop()


def test_damaged_log_is_reported_to_callers_and_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    side = MemorySide()
    side.put([(b"xr", b"{}")])
    server = ManagerServer(side, "a", ManualClock(NOW_MS))
    with TransactionClient(server.service.address) as client, pytest.raises(ServiceUnavailable, match="cannot be read"):
        client.start_short()
    with caplog.at_level(logging.ERROR):
        assert not server.check_leases()
    assert "does not start" in caplog.text
    server.stop()


def test_forwarding_server_without_its_token_names_the_file_in_the_log_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"secret" * 8)
    with ExitStack() as stack:
        servers = ManagerServers(stack, token)
        connection = SocketConnection(servers.second.service.address, PATIENCE_SECONDS, token)
        stack.callback(connection.close)
        token.unlink()
        with pytest.raises(ServiceUnavailable) as caught:
            connection.call("startShort", (), PATIENCE_SECONDS)
    assert "token" in caught.value.message
    assert str(tmp_path) not in str(caught.value)
    assert f"{token} cannot be read" in caplog.text


def test_bad_calls_are_forwarded_and_get_the_response_of_the_leader(servers: ManagerServers) -> None:
    servers.clients[1].start_short()
    known = servers.second.shared._remote
    without_its_argument = wire.message(MessageKind.CALL, "startShortTimeout", 7)
    answers = []
    for server in (servers.first, servers.second):
        line = SocketConnection(server.service.address, 60)
        answers.append(line.forward_call(without_its_argument, 60))
        with pytest.raises(EOFError):
            line.forward_call(b"\xff" * 1000, 60)
        line.close()
    assert answers[0] == answers[1]
    assert wire.read_message(answers[0]).fields[2] == Failure.PROTOCOL_ERROR
    assert servers.second.shared._remote is known


def test_call_that_is_cut_off_at_the_leader_has_an_unknown_outcome(servers: ManagerServers) -> None:
    def answer_first_call(connection: socket.socket) -> None:
        size = int.from_bytes(connection.recv(4), "big")
        request = wire.read_message(connection.recv(size))
        reply = wire.message(MessageKind.REPLY, request.name, request.number)
        connection.sendall(len(reply).to_bytes(4, "big") + reply)
        connection.recv(4096)

    # Its snapshots would compete with the takeover below for the root.
    servers.first.service.stop()
    storage = SideStorage(servers.side, lambda: lambda: True)
    with SocketServer(answer_first_call) as leader:
        storage.address = leader.address
        assert TransactionManager(storage, servers.clock).is_running
        with pytest.raises(OutcomeUnknown):
            servers.clients[1].start_short()


@pytest.mark.parametrize("leads", ["this", "another"])
def test_call_to_a_paused_leader_gets_a_response(
    servers: ManagerServers, monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    received, resume = Event(), Event()

    def pause_and_fail(*_: object) -> bytes:
        received.set()
        resume.wait(60)
        raise FormatError("no response is expected.")

    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        try:
            servers.clients[1].start_short()
            monkeypatch.setattr(rpc_service, "answer", pause_and_fail)
            waiting = thread.submit(servers.clients[1].start_short)
            assert received.wait(60)
            monkeypatch.undo()
            known = servers.second.shared._remote
            if leads == "this":
                servers.change()
            else:
                third = ManagerServer(servers.side, "c", servers.clock)
                stack.callback(third.stop)
                assert not third.check_leases()
                servers.clock.advance(OVER_MS)
                assert third.check_leases()
                servers.clients[1].start_short()
            with pytest.raises(OutcomeUnknown, match="closed the connection"):
                waiting.result()
        finally:
            resume.set()
    assert known is not None
    with pytest.raises(ServiceUnavailable):
        known.forward_call(b"")


def test_new_leader_responds_while_calls_wait_for_the_former_leader(
    servers: ManagerServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, waiting = Event(), Semaphore(0)

    def pause_and_fail(_: bytes) -> bytes:
        waiting.release()
        resume.wait(60)
        raise ServiceUnavailable("it is gone.")

    monkeypatch.setattr(servers.second.shared, "forward_call", pause_and_fail)
    with ThreadPoolExecutor(WORKERS) as threads:
        try:
            stuck = [threads.submit(servers.clients[1].start_short) for _ in range(WORKERS)]
            for _ in stuck:
                assert waiting.acquire(timeout=60)
            servers.change()
            assert servers.clients[0].start_short().transaction_id > BASE
        finally:
            resume.set()
        for one in stuck:
            with pytest.raises(ServiceUnavailable, match="gone"):
                one.result()


def test_manager_of_another_log_gets_no_call(servers: ManagerServers) -> None:
    root = read_root(servers.side)
    assert root is not None
    frame = wire.message(MessageKind.CALL, "startShort", 7)
    for log, expected in ((root.log, True), ("another", False)):
        other = RemoteService(servers.first.service.address, log, SocketConnection)
        if expected:
            assert wire.read_message(other.forward_call(frame)).number == 7
        else:
            with pytest.raises(ServiceUnavailable, match=NOT_MANAGED_HERE):
                other.forward_call(frame)
        other.close()
        other.close()


def test_server_that_cannot_write_its_last_snapshot_ends(
    servers: ManagerServers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SideStorage, "save", raising(StoreError("it is gone.")))
    servers.first.service.stop()
    with caplog.at_level(logging.WARNING):
        servers.first.shared.close()
    assert "it is gone." in caplog.text
    assert not servers.first.shared.is_ready()


# --- settings --------------------------------------------------------------------------------------------------------


def settings_of(tmp_path: Path, slots: int = 1, thrift: str = "127.0.0.1:0") -> Settings:
    environ = {
        "TMS_STORAGE__KIND": "hbase",
        "TMS_TRANSACTIONS__DIRECTORY": str(tmp_path / "tx"),
        "TMS_TRANSACTIONS__THRIFT": thrift,
        "TMS_TRANSACTIONS__ALLOW_WITHOUT_TOKEN": "true",
        "TMS_SERVER__LEADER__ADVERTISE": "http://localhost:0",
        "TMS_SERVER__LEADER__SLOTS": str(slots),
        "TMS_SERVER__LEADER__ORDINAL": "0",
    }
    return load(None, environ, {}).settings


def changed(settings: Settings, **sections: dict[str, object]) -> Settings:
    """Return settings with other values in some sections."""
    update = {name: getattr(settings, name).model_copy(update=values) for name, values in sections.items()}
    return settings.model_copy(update=update)


def open_transactions(
    settings: Settings,
    side: MemorySide,
    stack: ExitStack,
    leader: LeaderSettings | None = None,
    store: MemoryStore | None = None,
) -> ServerTransactions:
    clock, store = ManualClock(NOW_MS), store or MemoryStore()
    member = HaMember(store, side, side, leader or settings.server.leader, clock)
    transactions = open_manager(settings, clock, store, side, member, stack)
    register_metrics(transactions, side, clock, registry := CollectorRegistry())
    assert b"tms_open_claims" in generate_latest(registry)
    shared = transactions.shared
    if shared is not None:
        member.slots.leaderships[0].step(shared.is_ready)
        assert member.slots.leaderships[0].leads
        assert b"tms_open_claims 0.0" in generate_latest(registry)
    return transactions


@pytest.mark.parametrize("trusts", [True, False])
@pytest.mark.parametrize("name", ["", "localhost"])
def test_servers_over_tls_ask_each_other_by_certificate(tmp_path: Path, trusts: bool, name: str) -> None:
    tls, other = (make_certificate(tmp_path / f"{name}.pem", tmp_path / f"{name}.key") for name in ("one", "other"))
    found, side = settings_of(tmp_path), MemorySide()
    host = "127.0.0.1" if name else "localhost"
    leader = found.server.leader.model_copy(update={"certificate_name": name, "advertise": f"http://{host}:0"})
    certificates = {"tls": tls, "ca_file": (tls if trusts else other).certificate}
    settings = changed(found, transactions=certificates, server={"leader": leader})
    with ExitStack() as stack:
        for transactions in (open_transactions(settings, side, stack), follower(settings, side, stack)):
            assert isinstance(transactions.global_manager, TransactionClient)
            if trusts:
                assert transactions.global_manager.start_short().transaction_id
            else:
                with pytest.raises(ServiceUnavailable, match="over TLS"):
                    transactions.global_manager.start_short()


def follower(
    settings: Settings, side: MemorySide, stack: ExitStack, store: MemoryStore | None = None
) -> ServerTransactions:
    """Return the parts of a second server that is not the leader."""
    store, clock = store or MemoryStore(), ManualClock(NOW_MS)
    member = HaMember(store, side, side, settings.server.leader, clock)
    return open_manager(settings, clock, store, side, member, stack)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("thrift", ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"])
def test_requests_of_several_servers_ask_their_own_process(tmp_path: Path, slots: int, thrift: str) -> None:
    side = MemorySide()
    with ExitStack() as stack:
        found = open_transactions(settings_of(tmp_path, slots, thrift), side, stack)
        assert (found.manager is None) == (slots > 1)
        assert isinstance(found.global_manager, TransactionClient)
        assert found.global_manager.invalid_size() == 0
        root = read_root(side)
        assert root is not None
        assert root.address.startswith("localhost:")


@pytest.mark.parametrize("slots", [1, 2])
def test_managed_on_the_network_without_a_token_is_rejected_unless_allowed(tmp_path: Path, slots: int) -> None:
    refused = changed(settings_of(tmp_path, slots, "0.0.0.0:0"), transactions={"allow_without_token": False})
    with pytest.raises(ConfigurationError, match=r"transactions\.thrift is 0\.0\.0\.0:0") as caught:
        check_manager(refused)
    assert "transactions.allow_without_token" in caught.value.hint
    (tmp_path / "token").write_bytes(b"0123456789abcdef0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    allowed = changed(refused, transactions={"token_file": tmp_path / "token"})
    check_manager(allowed)
    with ExitStack() as stack:
        assert open_transactions(allowed, MemorySide(), stack).address


def test_several_servers_continue_from_the_folder_of_one(tmp_path: Path) -> None:
    with TransactionManager(DirectoryStorage(tmp_path / "tx"), ManualClock(NOW_MS)) as previous:
        begun = previous.start_short(3600).transaction_id
        previous.invalidate(previous.start_short().transaction_id)
    side = MemorySide()
    with ExitStack() as stack:
        found = open_transactions(settings_of(tmp_path), side, stack)
        assert found.manager is not None
        assert (found.manager.invalid_size(), found.manager.status(begun)) == (1, "in progress")
    with ExitStack() as stack, pytest.raises(ConfigurationError, match="HBase") as caught:
        open_transactions(settings_of(tmp_path), side, stack, LeaderSettings())
    assert "server.leader.advertise" in caught.value.hint


def test_lone_server_does_not_start_on_a_shared_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side, store, clock = MemorySide(), MemoryStore(), ManualClock(NOW_MS)

    class WaitingMember(HaMember):
        def start(self, *arguments: Any) -> None:
            side.delete([b"it"])  # the other server has searched before this server recorded its log
            with ExitStack() as stack:
                open_transactions(settings_of(tmp_path / "other"), side, stack)
            super().start(*arguments)

    @contextmanager
    def open_waiting_member(*_: object) -> Iterator[HaMember]:
        member = WaitingMember(store, side, side, LeaderSettings(), clock)
        try:
            yield member
        finally:
            member.stop()

    for name, stub in (("_open", _OpenResources(store, created=False)), ("_side", side)):
        monkeypatch.setattr(serving, name, lambda *_, stub=stub: stub)
    monkeypatch.setattr("tms_core.server.ha.member.on_hbase", open_waiting_member)
    environ = {
        "TMS_STORAGE__KIND": "hbase",
        "TMS_TRANSACTIONS__DIRECTORY": str(tmp_path / "tx"),
        "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0",
        "TMS_SERVER__PORT": "0",
    }
    with pytest.raises(ConfigurationError, match="HBase"), serving.serving(None, environ, {}, janitor=False):
        pass


def settings_with(kind: str, **transactions: object) -> Settings:
    return changed(Settings(), storage={"kind": kind}, transactions={"thrift": "127.0.0.1:0", **transactions})


def open_alone(settings: Settings, stack: ExitStack) -> ServerTransactions:
    """Return the transactions of a single server."""
    clock, store, side = ManualClock(NOW_MS), MemoryStore(), MemorySide()
    found = open_manager(settings, clock, store, side, None, stack)
    registry = CollectorRegistry()
    register_metrics(found, side, clock, registry)
    assert (b"tms_open_claims" in generate_latest(registry)) == (found.own is not None)
    return found


def test_manager_in_memory_keeps_nothing_and_demands_its_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    settings = settings_with("memory", source="manager", directory=str(tmp_path / "tx"), token_file=token)
    with ExitStack() as stack, pytest.raises(TmsError, match="token"):
        open_alone(settings, stack)
    token.touch(0o600)
    token.write_bytes(b"secret" * 8)
    with ExitStack() as stack:
        found = open_alone(settings, stack)
        assert found.address is not None
        with TransactionClient(found.address) as client, pytest.raises(TransactionError):
            client.start_short()
        with TransactionClient.configured(settings.transactions, address=found.address) as client:
            assert 0 <= client.start_short().transaction_id - BASE < TX_PER_MS
    assert not (tmp_path / "tx").exists()


@pytest.mark.parametrize(("mode", "token"), [(0o600, b"short"), (0o644, b"secret" * 8)])
def test_administrative_token_that_is_rejected_is_named_by_its_setting(tmp_path: Path, mode: int, token: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(token)
    file.chmod(mode)
    settings = settings_with("memory", source="manager", directory=str(tmp_path / "tx"), admin_token_file=file)
    with ExitStack() as stack, pytest.raises(TmsError, match=r"^transactions\.admin_token_file "):
        open_alone(settings, stack)


@pytest.mark.parametrize(
    ("listens", "advertise", "reached"),
    [
        ("10.0.0.7:15165", "http://server-1:11015", "10.0.0.7:15165"),
        ("0.0.0.0:15165", "http://10.0.0.8:11015", "10.0.0.8:15165"),
        ("[::]:15165", "http://[fd00::8]:11015", "[fd00::8]:15165"),
        ("[fd00::7]:15165", "http://server-1:11015", "[fd00::7]:15165"),
    ],
)
def test_manager_is_reached_where_it_listens_or_its_server_is(listens: str, advertise: str, reached: str) -> None:
    assert _advertised_address(advertise, cast(TransactionService, SimpleNamespace(address=listens))) == reached


# --- the first log ---------------------------------------------------------------------------------------------------


def store_with(*pointers: int | None) -> MemoryStore:
    """Return a store with messages of these write pointers."""
    store = MemoryStore()
    rows = [(b"%09d" % number, MessageValue(pointer, b"x")) for number, pointer in enumerate(pointers)]
    store.message.put(rows)
    return store


def test_first_shared_log_needs_the_folder_of_known_transactions(tmp_path: Path) -> None:
    settings, side = settings_of(tmp_path), MemorySide()
    store = store_with(None, -BASE, BASE)
    with ExitStack() as stack, pytest.raises(ConfigurationError, match=r"transactions\.directory .*/tx") as caught:
        open_transactions(settings, side, stack, store=store)
    assert f"mkdir -p {tmp_path / 'tx'}" in caught.value.hint
    assert side.rows(b"x", b"y", 10).items == []
    elsewhere = changed(settings, transactions={"directory": "webhdfs://a:1/tx"})
    with ExitStack() as stack, pytest.raises(ConfigurationError, match="not a folder on this machine"):
        open_transactions(elsewhere, side, stack, store=store)
    (tmp_path / "tx").mkdir()
    with ExitStack() as stack:
        assert open_transactions(settings, side, stack, store=store).shared is not None
    # The log exists now.
    rmtree(tmp_path / "tx")
    with ExitStack() as stack:
        assert follower(settings, side, stack, store).shared


def test_first_shared_log_of_inverted_messages_needs_no_folder(tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Readers never see messages that were rolled back, regardless of the manager.
        found = open_transactions(settings_of(tmp_path), MemorySide(), stack, store=store_with(None, -BASE))
        assert found.shared is not None
    assert not (tmp_path / "tx").exists()


def test_search_for_transactions_in_doubt_after_many_rows_finds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "MAX_ROWS", 4)
    monkeypatch.setattr(managing, "PAGE_ROWS", 2)
    assert not managing.may_have_undecided(store_with(*[None] * 4))
    assert managing.may_have_undecided(store_with(*[None] * 5))
    assert managing.may_have_undecided(store_with(None, None, BASE))


def test_waiting_server_leads_no_unknown_transactions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, side, store, clock = settings_of(tmp_path), MemorySide(), MemoryStore(), ManualClock(NOW_MS)
    member = HaMember(store, side, side, settings.server.leader, clock)
    with ExitStack() as stack:
        shared = open_manager(settings, clock, store, side, member, stack).shared
        assert shared is not None
        store.message.put([(b"key", MessageValue(BASE, b"x"))])
        leadership = member.slots.leaderships[0]
        with caplog.at_level(logging.ERROR):
            leadership.step(shared.is_ready)
        assert leadership.holds
        assert not leadership.leads
        assert "does not start" in caplog.text
        assert f"mkdir -p {tmp_path / 'tx'}" in caplog.text
        assert read_root(side) is None
        (tmp_path / "tx").mkdir()
        leadership.step(shared.is_ready)
        assert leadership.leads
