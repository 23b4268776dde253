"""Servers that have one transaction manager together: each answers as its leader does, or says that none leads."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Semaphore, Thread

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.transaction.managers import BASE, NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, NotInProgress, StoreError
from tms_core.server.ha.leadership import Leadership
from tms_core.server.ha.manager_log import SideStorage, root_of
from tms_core.server.ha.member import HaMember
from tms_core.server.ha.rota import SideCell
from tms_core.server.ha.shared_manager import SharedManager
from tms_core.server.managing import Managed, managed, show
from tms_core.settings.models import LeaderSettings, Settings, load
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import Failure, MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage, Recovered
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.line import OutcomeUnknown, ServiceUnavailable, SocketConnection
from tms_core.transaction.rpc.passing import OtherService
from tms_core.transaction.rpc.service import WORKERS, TransactionService

SECONDS = 15
OVER_MS = SECONDS * 1000 + 1


class Node:
    """One of the servers."""

    def __init__(
        self,
        side: MemorySide,
        name: str,
        clock: ManualClock,
        token_file: Path | None = None,
        former: Callable[[], Recovered] | None = None,
    ) -> None:
        lease = Lease(SideCell(side, b"l"), name, SECONDS, clock, wall_clocks=False)
        self.leadership = Leadership(lease, clock, fencing_delay_seconds=0)
        self.shared = SharedManager(
            side,
            self.leadership,
            clock,
            clock_allowance_seconds=300,
            token_file=token_file,
            former=former,
            begun=self.begun,
        )
        token = None if token_file is None else token_file.read_bytes
        self.service = TransactionService(
            self.shared.manager, port=0, cleanup_seconds=0.01, snapshot_seconds=0.01, token=token, several=self.shared
        )
        self.service.start()
        self.shared.at(self.service.address)
        self.takeovers = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def begun(self, manager: TransactionManager) -> None:
        self.meanwhile()
        assert manager.running
        self.takeovers += 1

    def look(self) -> bool:
        """Look who leads; returns whether this one does."""
        for _ in range(100):
            self.leadership.step(self.shared.ready)
            if self.leadership.leads or not self.leadership.holds:
                break
        return self.leadership.leads

    def stop(self) -> None:
        self.service.stop()
        self.shared.close()


class Servers:
    """Two of them, of which the first leads."""

    def __init__(self, stack: ExitStack, token_file: Path | None = None) -> None:
        self.clock = ManualClock(NOW_MS)
        self.side = MemorySide()
        self.first, self.second = (Node(self.side, name, self.clock, token_file) for name in ("a", "b"))
        self.clients = []
        for node in (self.first, self.second):
            stack.callback(node.stop)
            settings = Settings().transactions.model_copy(update={"token_file": token_file})
            self.clients.append(
                stack.enter_context(TransactionClient.configured(settings, address=node.service.address))
            )
        assert self.first.look()
        assert not self.second.look()

    def change(self) -> None:
        """The first is not heard of for a while, and the second leads."""
        self.clock.advance(OVER_MS)
        assert self.second.look()


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def test_given_two_servers_when_either_is_asked_then_the_leaders_manager_answers(servers: Servers) -> None:
    one, other = servers.clients
    ids = [client.start_short().transaction_id for client in (one, other, one, other)]
    assert ids == [BASE + 1 + number for number in range(4)]
    other.can_commit(ids[0], [b"a"])
    one.commit(ids[0])
    with pytest.raises(NotInProgress):
        other.commit(ids[0])
    assert other.latest().snapshot.open_pointers == one.latest().snapshot.open_pointers == frozenset(ids[1:])
    assert (servers.first.takeovers, servers.second.takeovers) == (1, 0)
    assert not servers.second.shared.manager.running


def test_given_another_leader_when_either_is_asked_then_it_answers_and_knows_all(servers: Servers) -> None:
    begun = servers.clients[1].start_short(3600).transaction_id
    servers.change()
    for client in servers.clients:
        assert begun in client.latest().snapshot.open_pointers
    servers.clients[0].invalidate(begun)
    assert servers.clients[1].invalid_size() == 1
    assert not servers.first.look()
    assert not servers.first.leadership.leads


def test_given_a_leader_that_is_back_when_asked_then_it_knows_what_the_other_one_answered(servers: Servers) -> None:
    servers.change()
    begun = servers.clients[1].start_short(3600).transaction_id
    for _ in range(2):
        assert not servers.first.look()
    servers.clock.advance(OVER_MS)
    assert servers.first.look()
    assert servers.clients[0].start_short().transaction_id > begun
    assert servers.clients[1].invalidate(begun)
    assert servers.first.takeovers == 2


def test_given_a_leader_that_is_gone_when_the_other_is_asked_then_nothing_was_done_and_it_says_so(
    servers: Servers,
) -> None:
    servers.clients[1].start_short()
    servers.first.service.stop()
    for _ in range(2):
        with pytest.raises(ServiceUnavailable, match="cannot be asked"):
            servers.clients[1].start_short()


def test_given_no_leader_when_asked_then_it_says_so(servers: Servers) -> None:
    servers.clock.advance(OVER_MS)
    with pytest.raises(ServiceUnavailable, match="No server manages"):
        servers.clients[0].start_short()
    # The other one asks the first, which passes it on no further.
    with pytest.raises(ServiceUnavailable, match=r"cannot be asked.*not managed here now"):
        servers.clients[1].start_short()


def test_given_a_connection_to_a_leader_that_is_one_no_more_when_asked_then_the_new_one_is_looked_for(
    servers: Servers,
) -> None:
    third = Node(servers.side, "c", servers.clock)
    with TransactionClient(third.service.address) as client:
        begun = client.start_short(3600).transaction_id
        servers.change()
        # As if it had been looked for at this moment.
        third.shared._looked_ms = servers.clock.running_ms()
        with pytest.raises(ServiceUnavailable, match="not manage them any more"):
            client.start_short()
        assert client.start_short().transaction_id > begun
    third.stop()


def test_given_no_log_yet_when_a_server_that_does_not_lead_is_asked_then_it_says_so() -> None:
    node = Node(MemorySide(), "a", ManualClock(NOW_MS))
    with (
        TransactionClient(node.service.address) as client,
        pytest.raises(ServiceUnavailable, match="No server manages"),
    ):
        client.start_short()
    node.stop()


def test_given_a_server_that_took_over_in_a_tenure_that_is_over_when_it_leads_again_then_it_takes_over_anew(
    servers: Servers,
) -> None:
    transaction = servers.clients[0].start_short(3600)
    servers.change()
    for _ in range(2):
        assert not servers.first.look()
    servers.clock.advance(OVER_MS)
    # The first takes over, and is paused before its term begins.
    goes_on = Event()
    servers.first.meanwhile = partial(goes_on.wait, 60)
    servers.first.leadership.step(servers.first.shared.ready)
    assert servers.first.leadership.holds
    assert not servers.second.look()
    assert not servers.second.look()
    servers.change()
    servers.clients[1].abort(transaction)
    servers.second.leadership.resign()
    goes_on.set()
    assert not servers.first.look()
    assert servers.first.look()
    assert not servers.first.shared.manager.is_in_progress(transaction.transaction_id)


def test_given_a_folder_that_cannot_be_read_when_a_server_is_to_lead_then_it_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> Recovered:
        raise PermissionError(13, "Permission denied")

    node = Node(MemorySide(), "a", ManualClock(NOW_MS), former=fail)
    with caplog.at_level(logging.ERROR):
        assert not node.look()
    assert "does not begin" in caplog.text
    node.stop()


def test_given_a_damaged_log_when_a_server_is_asked_or_is_to_lead_then_it_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = MemorySide()
    side.put([(b"xr", b"{}")])
    node = Node(side, "a", ManualClock(NOW_MS))
    with TransactionClient(node.service.address) as client, pytest.raises(ServiceUnavailable, match="cannot be read"):
        client.start_short()
    with caplog.at_level(logging.ERROR):
        assert not node.look()
    assert "does not begin" in caplog.text
    node.stop()


def test_given_a_token_when_calls_are_passed_on_then_it_is_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"secret")
    with ExitStack() as stack:
        servers = Servers(stack, token)
        assert servers.clients[1].start_short().transaction_id == BASE + 1


def test_given_calls_that_are_none_when_they_are_passed_on_then_they_are_answered_as_by_the_leader_and_disturb_no_one(
    servers: Servers,
) -> None:
    servers.clients[1].start_short()
    known = servers.second.shared._other
    without_its_argument = wire.message(MessageKind.CALL, "startShortTimeout", 7)
    answers = []
    for node in (servers.first, servers.second):
        line = SocketConnection(node.service.address, 60)
        answers.append(line.pass_on(without_its_argument, 60))
        with pytest.raises(EOFError):
            line.pass_on(b"\xff" * 1000, 60)
        line.close()
    assert answers[0] == answers[1]
    assert wire.read_message(answers[0]).fields[2] == Failure.PROTOCOL_ERROR
    assert servers.second.shared._other is known


def test_given_a_leader_that_is_cut_off_in_the_middle_when_asked_then_it_is_not_known_whether_it_was_done(
    servers: Servers,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_the_first() -> None:
        connection, _ = listener.accept()
        with connection:
            size = int.from_bytes(connection.recv(4), "big")
            request = wire.read_message(connection.recv(size))
            reply = wire.message(MessageKind.REPLY, request.name, request.number)
            connection.sendall(len(reply).to_bytes(4, "big") + reply)
            connection.recv(4096)

    thread = Thread(target=answer_the_first)
    thread.start()
    storage = SideStorage(servers.side, lambda: lambda: True)
    storage.address = f"127.0.0.1:{listener.getsockname()[1]}"
    TransactionManager(storage, servers.clock)
    with pytest.raises(OutcomeUnknown):
        servers.clients[1].start_short()
    thread.join()
    listener.close()


def test_given_calls_that_wait_for_a_leader_that_is_paused_when_this_server_leads_then_it_answers_others(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, waiting = Event(), Semaphore(0)

    def paused(_: bytes) -> bytes:
        waiting.release()
        goes_on.wait(60)
        raise ServiceUnavailable("it is gone.")

    monkeypatch.setattr(servers.second.shared, "pass_on", paused)
    with ThreadPoolExecutor(WORKERS) as threads:
        try:
            stuck = [threads.submit(servers.clients[1].start_short) for _ in range(WORKERS)]
            for _ in stuck:
                assert waiting.acquire(timeout=60)
            servers.change()
            assert servers.clients[0].start_short().transaction_id > BASE
        finally:
            goes_on.set()
        for one in stuck:
            with pytest.raises(ServiceUnavailable, match="gone"):
                one.result()


def test_given_the_manager_of_another_log_at_the_address_when_calls_are_to_be_passed_on_then_it_is_not_asked(
    servers: Servers,
) -> None:
    root = root_of(servers.side)
    assert root is not None
    frame = wire.message(MessageKind.CALL, "startShort", 7)
    for log, expected in ((root.log, True), ("another", False)):
        other = OtherService(servers.first.service.address, log, None)
        if expected:
            assert wire.read_message(other.ask(frame)).number == 7
        else:
            with pytest.raises(ServiceUnavailable, match="not managed here"):
                other.ask(frame)
        other.close()
        other.close()


def test_given_a_server_that_cannot_write_its_last_snapshot_when_it_ends_then_it_ends_all_the_same(
    servers: Servers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("it is gone.")

    monkeypatch.setattr(SideStorage, "save", fail)
    servers.first.service.stop()
    with caplog.at_level(logging.WARNING):
        servers.first.shared.close()
    assert "left no snapshot" in caplog.text
    assert not servers.first.shared.ready()


# --- settings --------------------------------------------------------------------------------------------------------


def settings_of(tmp_path: Path, slots: int = 1, thrift: str = "127.0.0.1:0") -> Settings:
    environ = {
        "TMS_STORAGE__KIND": "hbase",
        "TMS_TRANSACTIONS__DIRECTORY": str(tmp_path / "tx"),
        "TMS_TRANSACTIONS__THRIFT": thrift,
        "TMS_SERVER__LEADER__ADVERTISE": "http://localhost:0",
        "TMS_SERVER__LEADER__SLOTS": str(slots),
        "TMS_SERVER__LEADER__ORDINAL": "0",
    }
    return load(None, environ, {}).settings


def made(settings: Settings, side: MemorySide, stack: ExitStack, leader: LeaderSettings | None = None) -> Managed:
    clock, store = ManualClock(NOW_MS), MemoryStore()
    member = HaMember(store, side, side, leader or settings.server.leader, clock)
    transactions = managed(settings, clock, store, side, member, stack)
    show(transactions, settings, store, side, clock, registry := CollectorRegistry())
    assert b"tms_open_claims" in generate_latest(registry)
    shared = transactions.shared
    if shared is not None:
        member.slots.leaderships[0].step(shared.ready)
        assert member.slots.leaderships[0].leads
        assert b"tms_open_claims 0.0" in generate_latest(registry)
    return transactions


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("thrift", ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"])
def test_given_several_servers_when_made_then_requests_ask_the_manager_where_it_always_is_in_their_process(
    tmp_path: Path, slots: int, thrift: str
) -> None:
    side = MemorySide()
    with ExitStack() as stack:
        found = made(settings_of(tmp_path, slots, thrift), side, stack)
        assert (found.manager is None) == (slots > 1)
        assert isinstance(found.asked, TransactionClient)
        assert found.asked.invalid_size() == 0
        root = root_of(side)
        assert root is not None
        assert root.address.startswith("localhost:")


def test_given_a_folder_of_a_manager_that_was_alone_when_several_begin_then_they_go_on_from_it(tmp_path: Path) -> None:
    with TransactionManager(DirectoryStorage(tmp_path / "tx"), ManualClock(NOW_MS)) as former:
        begun = former.start_short(3600).transaction_id
        former.invalidate(former.start_short().transaction_id)
    side = MemorySide()
    with ExitStack() as stack:
        found = made(settings_of(tmp_path), side, stack)
        assert found.manager is not None
        assert (found.manager.invalid_size(), found.manager.status(begun)) == (1, "in progress")
    with ExitStack() as stack, pytest.raises(ConfigurationError, match="log in HBase") as caught:
        made(settings_of(tmp_path), side, stack, LeaderSettings())
    assert "server.leader.advertise" in caught.value.hint


def test_given_a_server_alone_on_hbase_when_made_then_its_manager_has_a_folder(tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = made(settings_of(tmp_path), MemorySide(), stack, LeaderSettings())
        assert found.manager is found.own is found.asked
        assert (tmp_path / "tx").is_dir()
