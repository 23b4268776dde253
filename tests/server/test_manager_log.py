"""A transaction manager and its log, in a folder or in rows that several servers share."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.hbase.conftest import hbase, hbase_tables
from tests.kit.side import FaultySide
from tests.support import each_raises
from tests.test_side import hbase_side
from tests.transaction.managers import BASE, NOW_MS, state
from tms_core.clock import ManualClock
from tms_core.errors import Conflict, FormatError, StoreError, StoreUnavailable
from tms_core.server.ha import manager_log
from tms_core.server.ha.leadership import not_leader_error
from tms_core.server.ha.manager_log import SideLog, SideStorage, leadership_lost_error, read_root
from tms_core.tables.base import Page
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.side import MemorySide, SideTable
from tms_core.transaction.codec.edits import Edit, EditState
from tms_core.transaction.codec.snapshot import read_snapshot
from tms_core.transaction.manager.journal import LogFailed
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage, Storage
from tms_core.transaction.model import Snapshot, Transaction

__all__ = ["hbase", "hbase_tables"]

#: A function that opens the same log as another manager.
Open = Callable[[], Storage]


class SharedLog:
    """A factory of storages in one side table, of which only the newest has the lease."""

    def __init__(self, side: SideTable) -> None:
        self.side = side
        self.fence = 0

    def __call__(self) -> SideStorage:
        return SideStorage(self.side, self.lease)

    def lease(self) -> Callable[[], bool]:
        self.fence += 1
        fence = self.fence
        return lambda: fence == self.fence


def of_folder(path: Path, _: pytest.FixtureRequest) -> Open:
    held: list[Storage] = []

    def open_storage() -> Storage:
        # The previous storage is dead, and its lock is free.
        for storage in held:
            storage.close()
        held.append(DirectoryStorage(path))
        return held[-1]

    return open_storage


T = TypeVar("T")

PLACES: dict[str, Callable[[Path, pytest.FixtureRequest], Open]] = {
    "folder": of_folder,
    "memory": lambda *_: SharedLog(MemorySide()),
    "leveldb": lambda path, request: SharedLog(closing(LevelDBSide(path / "side"), request)),
    "hbase": lambda _, request: SharedLog(closing(hbase_side(request.getfixturevalue("hbase_tables")), request)),
}


def closing(side: SideTable, request: pytest.FixtureRequest) -> SideTable:
    request.addfinalizer(side.close)
    return side


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return PLACES[request.param](tmp_path / "tx", request)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def side() -> MemorySide:
    return MemorySide()


@pytest.fixture
def shared(side: MemorySide) -> SharedLog:
    return SharedLog(side)


def work(manager: TransactionManager) -> list[Transaction]:
    """Start and end transactions in all ways; return the transactions in progress."""
    one, two, three = manager.start_short(), manager.start_short(), manager.start_long()
    manager.can_commit(one.transaction_id, [b"a", b"\x00\xff"])
    manager.commit(one.transaction_id)
    manager.abort(two)
    manager.invalidate(manager.start_short().transaction_id)
    return [manager.checkpoint(manager.start_short()), three]


def manager_of(side: SideTable, clock: ManualClock) -> TransactionManager:
    """Return a manager that always considers itself the leader."""
    return TransactionManager(SideStorage(side, lambda: lambda: True), clock)


# --- every storage ---------------------------------------------------------------------------------------------------


def test_manager_after_a_crash_knows_each_answer_of_many_clients(place: Open, clock: ManualClock) -> None:
    previous = TransactionManager(place(), clock)

    def start_one(number: int) -> tuple[int, bool]:
        transaction = previous.start_short().transaction_id
        if number % 2:
            previous.can_commit(transaction, [b"%d" % number])
            previous.commit(transaction)
        return transaction, bool(number % 2)

    with ThreadPoolExecutor(8) as threads:
        answered = list(threads.map(start_one, range(40)))
    assert len({transaction for transaction, _ in answered}) == 40
    manager = TransactionManager(place(), clock)
    for transaction, committed in answered:
        assert manager.status(transaction) == ("ended" if committed else "in progress")


def test_commit_after_a_takeover_asks_again_first(shared: SharedLog, clock: ManualClock) -> None:
    previous = TransactionManager(shared(), clock)
    transaction = previous.start_short().transaction_id
    previous.can_commit(transaction, [b"a"])
    manager = TransactionManager(shared(), clock)
    with pytest.raises(Conflict):
        manager.commit(transaction)
    manager.can_commit(transaction, [b"a"])
    manager.commit(transaction)


# --- several servers -------------------------------------------------------------------------------------------------


def test_previous_manager_cannot_write_to_the_log_of_its_successor(side: MemorySide, clock: ManualClock) -> None:
    previous = manager_of(side, clock)
    manager = manager_of(side, clock)
    with pytest.raises(LogFailed, match=leadership_lost_error().message):
        previous.start_short()
    manager.start_short()
    assert manager.status(BASE + 1) == "in progress"


def test_previous_manager_that_leads_again_reads_changes_of_others(shared: SharedLog, clock: ManualClock) -> None:
    previous = TransactionManager(shared(), clock)
    first = previous.start_short().transaction_id
    between = TransactionManager(shared(), clock)
    second = between.start_short().transaction_id
    between.invalidate(first)
    previous.resume()
    assert previous.is_running
    assert (previous.status(first), previous.status(second)) == ("invalid", "in progress")
    before = len(rows(shared.side))
    previous.resume()
    assert len(rows(shared.side)) == before


def test_manager_of_a_follower_waits_until_it_leads(side: MemorySide, clock: ManualClock) -> None:
    leads = False

    def lease() -> Callable[[], bool]:
        if not leads:
            raise not_leader_error()
        return lambda: True

    manager = TransactionManager(SideStorage(side, lease), clock)
    assert not manager.is_running
    assert manager.last_pointer == 0
    each_raises(StoreUnavailable, manager.start_short, manager.resume, manager.expire, match=not_leader_error().message)
    assert rows(side) == []
    leads = True
    manager.resume()
    assert manager.start_short().transaction_id == BASE + 1
    manager.close()


def test_root_names_the_address_of_the_last_manager(shared: SharedLog, clock: ManualClock) -> None:
    assert read_root(shared.side) is None
    logs = set()
    for address in ("one:1", "other:2"):
        storage = shared()
        storage.address = address
        TransactionManager(storage, clock)
        root = read_root(shared.side)
        assert root is not None
        assert root.address == address
        logs.add(root.log)
    assert len(logs) == 1


# --- late writes -----------------------------------------------------------------------------------------------------


def rows(side: SideTable) -> list[bytes]:
    return [key for key, _ in side.rows(b"", None, 1000).items]


@pytest.mark.parametrize("does_it", [False, True])
def test_crash_at_any_change_keeps_acknowledged_changes(clock: ManualClock, does_it: bool) -> None:
    at, died = 0, True
    while died:
        side = MemorySide()
        late = FaultySide(side)
        late.fails_at, late.does_it = at, does_it
        started: list[int] = []
        committed: list[int] = []
        try:
            previous = TransactionManager(SideStorage(late, lambda: lambda: True), clock)
            for number in range(6):
                started.append(previous.start_short().transaction_id)
                if number % 2:
                    previous.commit(started[-1])
                    committed.append(started[-1])
                if number == 3:
                    previous.take_snapshot()
            died = False
        except StoreError:
            pass
        manager = TransactionManager(SideStorage(FaultySide(side), lambda: lambda: True), clock)
        for transaction in started:
            wanted = {"ended"} if transaction in committed else {"in progress", "ended"}
            if transaction not in committed and transaction != started[-1]:
                wanted = {"in progress"}
            assert manager.status(transaction) in wanted, f"at {at}"
        assert manager.start_short().transaction_id > max([0, *started])
        at += 1
    assert at > 15


@pytest.mark.parametrize("does_it", [False, True])
def test_change_without_a_response_is_found_by_the_next_change(
    side: MemorySide, clock: ManualClock, does_it: bool
) -> None:
    late = FaultySide(side)
    manager = TransactionManager(SideStorage(late, lambda: lambda: True), clock)
    transaction_ids = manager.start_short().transaction_id
    late.fails_at, late.does_it = late.changes, does_it
    with pytest.raises(LogFailed):
        manager.commit(transaction_ids)
    late.fails_at = -1
    assert manager.status(transaction_ids) == ("ended" if does_it else "in progress")


@pytest.mark.parametrize("does_it", [False, True])
def test_snapshot_whose_root_change_got_no_response_is_kept(
    side: MemorySide, clock: ManualClock, does_it: bool
) -> None:
    late = FaultySide(side)
    manager = TransactionManager(SideStorage(late, lambda: lambda: True), clock)
    expected = work(manager)
    # First a part of the snapshot, then the root.
    late.fails_at, late.does_it = late.changes + 1, does_it
    for _ in range(2):
        with pytest.raises(StoreError):
            manager.take_snapshot()
        late.fails_at = late.changes + 1
    late.fails_at = -1
    manager.take_snapshot()
    again = manager_of(side, clock)
    assert [again.status(one.transaction_id) for one in expected] == ["in progress"] * 2


@pytest.mark.parametrize("at", [1, 2, 3])
def test_snapshot_that_replaces_a_snapshot_during_its_read_is_read(
    side: MemorySide, clock: ManualClock, at: int
) -> None:
    previous = manager_of(side, clock)
    transaction_ids = [previous.start_short().transaction_id for _ in range(3)]
    late = FaultySide(side)
    calls = 0

    def concurrent_action(_: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            if at < 3:
                # The log grows after the position that was read.
                transaction_ids.append(previous.start_short().transaction_id)
            previous.take_snapshot()

    late.before = concurrent_action
    manager = TransactionManager(SideStorage(late, lambda: lambda: True), clock)
    assert manager.is_running
    assert [manager.status(one) for one in transaction_ids] == ["in progress"] * len(transaction_ids)
    assert calls > at


@pytest.mark.parametrize("at", [b"xr", b"xl"])
def test_manager_paused_in_a_takeover_decides_nothing(shared: SharedLog, clock: ManualClock, at: bytes) -> None:
    late = FaultySide(shared.side)
    previous = TransactionManager(SideStorage(late, shared.lease), clock)
    transaction = previous.start_short()
    late.fails_at = late.changes
    with pytest.raises(LogFailed):
        previous.start_short()
    late.fails_at = -1
    leaders: list[TransactionManager] = []

    def concurrent_action(key: bytes) -> None:
        if key.startswith(at):
            late.before = lambda _: None
            leaders.append(TransactionManager(shared(), clock))

    late.before = concurrent_action
    with pytest.raises(StoreError):
        previous.abort(transaction)
    [leader] = leaders
    assert leader.is_in_progress(transaction.transaction_id)
    leader.start_short()
    assert TransactionManager(shared(), clock).status(transaction.transaction_id) == "in progress"


def test_late_snapshot_of_a_previous_manager_loses_nothing(shared: SharedLog, clock: ManualClock) -> None:
    late = FaultySide(shared.side)
    previous = TransactionManager(SideStorage(late, lambda: lambda: True), clock)
    transaction_ids = [previous.start_short().transaction_id]

    def concurrent_action(key: bytes) -> None:
        if key == b"xr":
            late.before = lambda _: None
            transaction_ids.append(TransactionManager(shared(), clock).start_short().transaction_id)

    late.before = concurrent_action
    with pytest.raises(StoreUnavailable, match="taken over"):
        previous.take_snapshot()
    manager = TransactionManager(shared(), clock)
    assert [manager.status(one) for one in transaction_ids] == ["in progress"] * 2


def test_snapshot_of_a_previous_manager_deletes_no_later_snapshot(
    shared: SharedLog, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = TransactionManager(SideStorage(shared.side, lambda: lambda: True), clock)
    transaction_id = previous.start_short().transaction_id
    page = shared.side.rows

    def take_over(start: bytes, *rest: Any) -> Page[list[tuple[bytes, bytes]]]:
        if start == b"xs":
            monkeypatch.undo()
            TransactionManager(shared(), clock)
        return page(start, *rest)

    monkeypatch.setattr(shared.side, "rows", take_over)
    with suppress(StoreUnavailable):
        previous.take_snapshot()
    assert TransactionManager(shared(), clock).status(transaction_id) == "in progress"


# --- rows ------------------------------------------------------------------------------------------------------------


def test_edits_larger_than_a_row_are_whole_or_count_for_nothing(
    side: MemorySide, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_log, "ROW_BYTES", 50)
    late = FaultySide(side)
    previous = TransactionManager(SideStorage(late, lambda: lambda: True), clock)
    one, two = previous.start_short().transaction_id, previous.start_short().transaction_id
    keys = [b"%d" % key * 20 for key in range(20)]
    previous.can_commit(one, keys)
    previous.commit(one)
    previous.can_commit(two, [b"another"])
    late.fails_at = late.changes + 2
    with pytest.raises(LogFailed):
        previous.commit(two)
    manager = manager_of(side, clock)
    assert (manager.status(one), manager.status(two)) == ("ended", "in progress")
    manager.start_short()
    again = manager_of(side, clock)
    assert state(again) == state(manager_of(side, clock))
    found: Snapshot = read_snapshot(io.BytesIO(again.encoded_snapshot()))
    assert set(keys) in [set(changes) for changes in found.committed.values()]


def test_new_snapshot_deletes_the_older_and_edits_before_it(side: MemorySide, clock: ManualClock) -> None:
    managers = 3
    for _ in range(managers):
        manager = manager_of(side, clock)
        for _ in range(5):
            manager.start_short()
        manager.take_snapshot()
        manager.take_snapshot()
    assert [key[:2] for key in rows(side)] == [b"xl"] * managers + [b"xr", b"xs"]


def root_with(side: SideTable, **changed: object) -> bytes:
    """Return the root with changed fields."""
    return json.dumps(json.loads(side.get(b"xr") or b"") | changed).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda side: side.put([(b"xr", b"{}")]), " root "),
        (lambda side: side.delete([key for key in rows(side) if key[:2] == b"xs"]), "0 of 1 rows"),
        (lambda side: side.delete([b"xr"]), " root "),
        (lambda side: side.put([(b"xr", b'{"name": "z", "parts": "1"}')]), " root "),
        (lambda side: side.put([(b"xr", root_with(side, name="no hexadecimal"))]), " root "),
        (lambda side: side.put([(b"xr", root_with(side, first="1"))]), " root "),
        (lambda side: side.delete([[key for key in rows(side) if key[:2] == b"xl"][1]]), "cell 1 "),
    ],
    ids=["root", "snapshot", "no root", "root of another kind", "root name", "root number", "cell"],
)
def test_recovery_of_damaged_rows_is_rejected(
    side: MemorySide, clock: ManualClock, damage: Callable[[SideTable], None], message: str
) -> None:
    manager = manager_of(side, clock)
    for _ in range(3):
        manager.start_short()
    damage(side)
    with pytest.raises(FormatError, match=message):
        manager_of(side, clock)
    tries = iter([not_leader_error()])

    def lease_after_errors() -> Callable[[], bool]:
        for error in tries:
            raise error
        return lambda: True

    other = TransactionManager(SideStorage(side, lease_after_errors), clock)
    with pytest.raises(StoreError, match=message):
        other.resume()


def test_sync_writes_all_waiting_edits_in_one_row(side: MemorySide) -> None:
    log = SideLog(side, 0, lambda: True)
    for pointer in range(5):
        log.append(Edit(pointer, EditState.INVALID))
    log.sync(1)
    log.sync(5)
    log.close()
    assert len(rows(side)) == 1
