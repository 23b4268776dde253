"""Decisions of the manager: ids, pointers, conflicts, outcomes, and the invalid list."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support import each_raises, raising
from tests.transaction.managers import BASE, NOW_MS, SpyStorage, state
from tms_core.clock import ManualClock
from tms_core.errors import (
    BadArgument,
    CannotSnapshot,
    ChangesTooLarge,
    Conflict,
    FormatError,
    NoSnapshot,
    NotInProgress,
    StoreError,
)
from tms_core.transaction.manager import writes
from tms_core.transaction.manager.conflicts import ChangeLimits
from tms_core.transaction.manager.durable import ManagerStopped
from tms_core.transaction.manager.journal import LogFailed
from tms_core.transaction.manager.manager import MAX_CHECKPOINTS, TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage, MemoryStorage, RecoveredLog
from tms_core.transaction.model import InProgressType, Transaction, TransactionType

SECOND = 1_000
DAY = 86_400 * SECOND


def read_pointer(manager: TransactionManager) -> int:
    return manager.visibility().read_pointer


def invalid(manager: TransactionManager) -> list[int]:
    return list(manager.visibility().invalid)


def in_progress(manager: TransactionManager) -> list[int]:
    return [entry.write_pointer for entry in manager.visibility().in_progress]


def commit_one(manager: TransactionManager, *changes: bytes) -> Transaction:
    one = manager.start_short()
    manager.can_commit(one.transaction_id, changes)
    manager.commit(one.transaction_id)
    return one


# --- ids and pointers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1, 101])
def test_start_with_an_invalid_timeout_is_rejected(clock: ManualClock, seconds: int) -> None:
    with (
        TransactionManager(MemoryStorage(), clock, max_timeout_seconds=100) as manager,
        pytest.raises(BadArgument, match=f"timeout .* {seconds} "),
    ):
        manager.start_short(seconds)
    with TransactionManager(MemoryStorage(), clock, max_timeout_seconds=100) as manager:
        manager.start_short(100)


def test_name_of_a_client_is_cut_off(manager: TransactionManager) -> None:
    one = manager.start_short(client="x" * 1_000_000)
    assert manager.clients() == {one.transaction_id: "x" * 255}


# --- conflicts -------------------------------------------------------------------------------------------------------


def test_changes_conflict_with_every_commit_since_the_start(manager: TransactionManager) -> None:
    older, long = manager.start_short(), manager.start_long()
    first, second = manager.start_short(), manager.start_short()
    for one, key in ((first, b"a"), (second, b"b")):
        manager.can_commit(one.transaction_id, [key])
        manager.commit(one.transaction_id)
    # Each of these transactions starts after the previous commit.
    for key in (b"k", b"k", b"other"):
        commit_one(manager, key)
    for one in (older, long):
        for key in (b"a", b"b", b"k"):
            with pytest.raises(Conflict):
                manager.can_commit(one.transaction_id, [key])


def test_commit_that_conflicts_is_rejected_each_time(manager: TransactionManager) -> None:
    first, second = manager.start_short().transaction_id, manager.start_short().transaction_id
    for one in (first, second):
        manager.can_commit(one, [b"k"])
    manager.commit(first)
    each_raises(Conflict, *[lambda: manager.commit(second)] * 2)
    assert in_progress(manager) == [second]


def test_commit_during_long_transactions_keeps_no_changes(manager: TransactionManager) -> None:
    long = manager.start_long()
    commit_one(manager, b"k")
    assert state(manager).committed == {}
    manager.can_commit(long.transaction_id, [b"k"])


@pytest.mark.parametrize(
    ("limits", "fits", "text"),
    [
        (ChangeLimits(count=2), [b"abc", b"d"], "has 3 entries and exceeds the limit of 2"),
        (ChangeLimits(size_bytes=5), [b"abc", b"de"], "has total size of 6 bytes and exceeds the limit of 5 bytes"),
    ],
)
def test_can_commit_above_the_limit_of_changes_is_rejected(
    clock: ManualClock, limits: ChangeLimits, fits: list[bytes], text: str
) -> None:
    with TransactionManager(MemoryStorage(), clock, limits=limits) as manager:
        one = manager.start_short().transaction_id
        manager.can_commit(one, fits)
        with pytest.raises(ChangesTooLarge, match=f"transaction {one} {text}"):
            manager.can_commit(one, [*fits, b"f"])


# --- ends of transactions --------------------------------------------------------------------------------------------


def test_call_for_an_ended_transaction_is_rejected_and_names_invalid(manager: TransactionManager) -> None:
    done, hidden = commit_one(manager).transaction_id, manager.start_short().transaction_id
    manager.invalidate(hidden)
    for one, end in ((done, ""), (hidden, r" \(it is known to be invalid\)")):
        text = rf"^canCommit\(\) is called for transaction {one} that is not in progress{end}$"
        each_raises(NotInProgress, partial(manager.commit, one), partial(manager.can_commit, one, []), match=text)


def test_abort_of_a_long_transaction_as_a_short_one_keeps_it_invalid(manager: TransactionManager) -> None:
    one = manager.checkpoint(manager.start_long())
    for _ in range(2):
        manager.abort(replace(one, type=TransactionType.SHORT))
        assert invalid(manager) == [one.transaction_id, one.write_pointer]


def test_abort_leaves_a_transaction_that_it_names_as_a_checkpoint(manager: TransactionManager) -> None:
    one, other = manager.start_short(), manager.start_short()
    manager.abort(replace(one, checkpoint_write_pointers=(other.transaction_id,)))
    assert in_progress(manager) == [other.transaction_id]


def test_checkpoint_is_listed_once_with_the_timeout_of_its_transaction(manager: TransactionManager) -> None:
    one = manager.start_short(7)
    first, second = manager.checkpoint(one).write_pointer, manager.checkpoint(one)
    assert second.checkpoint_write_pointers == (first, second.write_pointer)
    parent, child, _ = manager.visibility().in_progress
    assert child == replace(parent, write_pointer=first, type=InProgressType.CHECKPOINT, checkpoints=())
    for pointer in (first, one.transaction_id):
        manager.invalidate(pointer)
    assert manager.invalid_size() == 3


@pytest.mark.parametrize("end", ["can_commit", "commit", "commit_and_start", "checkpoint"])
def test_call_with_the_pointer_of_a_checkpoint_is_rejected(manager: TransactionManager, end: str) -> None:
    one = manager.checkpoint(manager.start_short())
    calls: dict[str, Callable[[], object]] = {
        "can_commit": lambda: manager.can_commit(one.write_pointer, []),
        "commit": lambda: manager.commit(one.write_pointer),
        "commit_and_start": lambda: manager.commit_and_start(one.write_pointer),
        "checkpoint": lambda: manager.checkpoint(replace(one, transaction_id=one.write_pointer)),
    }
    with pytest.raises(NotInProgress, match=f"{one.write_pointer} .*checkpoint"):
        calls[end]()
    assert not manager.start_short().is_visible(one.write_pointer)
    manager.commit(one.transaction_id)
    assert manager.start_short().is_visible(one.write_pointer)


def test_belongs_to_does_not_set_an_owner(manager: TransactionManager) -> None:
    one = manager.start_short().transaction_id
    assert manager.belongs_to(one, "ada")
    assert manager.begin_write(one, "bob")
    manager.end_write(one)
    assert (manager.belongs_to(one, "ada"), manager.belongs_to(one, "bob")) == (False, True)


# --- timeouts --------------------------------------------------------------------------------------------------------


def test_expiry_at_the_timeout_needs_one_more_millisecond(manager: TransactionManager, clock: ManualClock) -> None:
    one = manager.start_short(30)
    clock.advance(30 * SECOND)
    assert manager.expire() == 0
    clock.advance(1)
    assert manager.expire() == 1
    assert (invalid(manager), in_progress(manager)) == ([one.transaction_id], [])
    assert read_pointer(manager) == BASE


def test_abort_of_a_timed_out_short_transaction_makes_it_valid(manager: TransactionManager, clock: ManualClock) -> None:
    one, long = manager.checkpoint(manager.start_short()), manager.start_long()
    clock.advance(2 * DAY)
    manager.expire()
    manager.abort(one)
    manager.abort(long)
    assert invalid(manager) == [long.transaction_id]


@pytest.mark.parametrize("step_seconds", [-3600, -10, 0, 10])
def test_restart_after_a_clock_step_keeps_each_timeout(clock: ManualClock, tmp_path: Path, step_seconds: int) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), clock) as previous:
        one = previous.checkpoint(previous.start_short(30))
        clock.step(step_seconds * SECOND)
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        assert len(in_progress(manager)) == 2
        clock.advance((30 - max(0, step_seconds)) * SECOND)
        assert manager.expire() == 0
        clock.advance(1)
        assert manager.expire() == 2
        assert invalid(manager) == [one.transaction_id, one.write_pointer]


@pytest.mark.parametrize("step_seconds", [0, -600])
def test_restart_after_a_transaction_of_a_clock_set_back_leaves_it_its_time(
    clock: ManualClock, tmp_path: Path, step_seconds: int
) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), clock) as previous:
        previous.start_short(60)
        clock.step(-3600 * SECOND)
        previous.start_short(30)
        clock.step(step_seconds * SECOND)
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        clock.advance(30 * SECOND)
        assert manager.expire() == 0
        clock.advance(1)
        assert manager.expire() == 1


def test_restart_with_a_clock_set_back_twice_keeps_a_long_transaction_whole(clock: ManualClock, tmp_path: Path) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), clock) as previous:
        previous.start_short(60)
        clock.step(-2 * 86400 * SECOND)
        long = previous.checkpoint(previous.start_long())
        clock.step(-600 * SECOND)
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        clock.advance(60 * SECOND + 1)
        assert manager.expire() == 1
        assert in_progress(manager) == [long.transaction_id, long.write_pointer]


def test_abort_after_a_restart_leaves_older_transactions_invalid(clock: ManualClock, tmp_path: Path) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), clock) as previous:
        old = previous.start_short()
        previous.invalidate(old.transaction_id)
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        manager.abort(old)
        one = manager.start_short()
        manager.invalidate(one.transaction_id)
        manager.abort(replace(one, checkpoint_write_pointers=(old.transaction_id,)))
        assert invalid(manager) == [old.transaction_id]


def test_abort_with_unknown_checkpoints_is_small_in_the_log(clock: ManualClock, tmp_path: Path) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        one = manager.start_short()
        manager.abort(replace(one, checkpoint_write_pointers=tuple(range(one.transaction_id, BASE + MAX_CHECKPOINTS))))
        [log] = tmp_path.glob("txlog.*")
        assert log.stat().st_size < 1_000


@pytest.mark.parametrize("ends", ["aborted", "invalidated", "timed out"])
@pytest.mark.parametrize("writes", ["transaction", "checkpoint"])
@pytest.mark.parametrize("written", [True, False], ids=["written", "being written"])
def test_abort_after_an_end_during_a_write_stays_invalid(
    manager: TransactionManager, clock: ManualClock, ends: str, writes: str, written: bool
) -> None:
    one = manager.checkpoint(manager.start_short())
    pointer = one.write_pointer if writes == "checkpoint" else one.transaction_id
    assert manager.begin_write(pointer)
    if ends == "aborted":
        manager.abort(one)
    elif ends == "invalidated":
        manager.invalidate(one.transaction_id)
    else:
        clock.advance(DAY)
        manager.expire()
    if written:
        manager.end_write(pointer)
    manager.abort(one)
    assert invalid(manager) == [one.transaction_id, one.write_pointer]


def test_abort_with_too_many_checkpoints_is_rejected(manager: TransactionManager) -> None:
    one = manager.start_short()
    with pytest.raises(BadArgument, match="100001 checkpoints"):
        manager.abort(replace(one, checkpoint_write_pointers=range(MAX_CHECKPOINTS + 1)))
    assert in_progress(manager) == [one.transaction_id]


def test_late_writes_of_forgotten_transactions_are_forgotten(manager: TransactionManager) -> None:
    for _ in range(1000):
        one = manager.start_short()
        manager.begin_write(one.transaction_id)
        manager.abort(one)
        manager.end_write(one.transaction_id)
        manager.truncate_invalid([one.transaction_id])
    assert len(manager._writes._places) <= 101


def test_abort_with_messages_left_invalidates_and_logs_the_topic(
    manager: TransactionManager, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = manager.start_short(), manager.start_short()
    for transaction in (one, two):
        manager.note_written(transaction.transaction_id, "default:orders", 3)
    manager.note_rolled_back(one.transaction_id, "default:orders", 2)
    manager.note_rolled_back(two.transaction_id, "default:orders", 3)
    with caplog.at_level("INFO"):
        manager.abort(one)
        manager.abort(two)
    assert invalid(manager) == [one.transaction_id]
    assert f"{one.transaction_id} is invalidated, not aborted: not rolled back: default:orders" in caplog.text


def test_commit_releases_the_noted_writes(manager: TransactionManager) -> None:
    for _ in range(1000):
        one = manager.checkpoint(manager.start_short())
        for pointer in (one.transaction_id, one.write_pointer):
            manager.note_written(pointer, "default:orders")
        manager.commit(one.transaction_id)
        # A write after the commit is not noted.
        manager.note_written(one.transaction_id, "default:orders")
    assert not manager._writes._places


# --- the invalid list ------------------------------------------------------------------------------------------------


def test_transaction_keeps_the_invalid_list_of_its_start(manager: TransactionManager) -> None:
    hidden = [manager.start_short().transaction_id for _ in range(2)]
    manager.invalidate(hidden[0])
    reader = manager.start_short()
    manager.invalidate(hidden[1])
    manager.truncate_invalid(hidden[:1])
    assert list(reader.invalids) == hidden[:1]


def test_reset_clears_transactions_and_keeps_ids_increasing(manager: TransactionManager, clock: ManualClock) -> None:
    manager.invalidate(manager.start_short().transaction_id)
    last = manager.start_long().transaction_id
    clock.step(-DAY)
    manager.reset()
    seen = manager.visibility()
    assert (list(seen.invalid), seen.in_progress) == ([], ())
    one = manager.start_short()
    assert one.transaction_id > last
    assert one.is_visible(last)


# --- waiting for the outcome -----------------------------------------------------------------------------------------


def test_decisions_are_synced_before_their_responses(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    assert storage.calls == ["log", "log", "save"]
    storage.calls.clear()
    one = manager.start_short()
    assert storage.calls == ["append", "sync 1"]
    manager.can_commit(one.transaction_id, [b"k"])
    assert storage.calls[2:] == ["append"]
    manager.can_commit(one.transaction_id, [b"k"])
    assert storage.calls[3:] == ["append", "sync 3"]
    manager.visibility()
    manager.clients()
    for refused in (manager.commit, lambda pointer: manager.can_commit(pointer, [])):
        with pytest.raises(NotInProgress):
            refused(7)
    assert storage.calls[5:] == ["sync 3"] * 4
    manager.commit(one.transaction_id)
    assert storage.calls[9:] == ["append", "sync 4"]


def test_snapshot_syncs_the_old_log_and_starts_a_new_log(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    manager.start_short()
    storage.calls.clear()
    manager.take_snapshot()
    manager.start_short()
    assert storage.calls == ["sync 1", "log", "save", "append", "sync 1"]


def test_failed_log_write_stops_the_manager_until_a_snapshot(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    manager.start_short()
    storage.failure = LogFailed("the disk is full.")
    with pytest.raises(LogFailed):
        manager.start_short()
    storage.failure, storage.save_failure = None, StoreError("the disk is full.")
    assert_unusable(manager, StoreError, "disk is full")
    storage.save_failure = None
    storage.calls.clear()
    manager.start_short()
    assert storage.calls == ["save", "log", "append", "sync 1"]
    assert manager.is_running


def test_abort_after_a_commit_that_did_not_reach_the_disk_invalidates(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        transaction = manager.start_short()
        pointer = transaction.transaction_id
        manager.can_commit(pointer, [])
        manager.note_written(pointer, "default:orders")
        with monkeypatch.context() as full:
            full.setattr(os, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(LogFailed):
                manager.commit(pointer)
        assert manager.status(pointer) == "in progress"
        manager.abort(transaction)
        assert manager.status(pointer) == "invalid"
        assert not manager.start_short().is_visible(pointer)


def test_ledger_of_invalid_transactions_is_bounded_and_complete(
    manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_MAX_POINTERS", 20)
    transactions = [manager.start_short() for _ in range(60)]
    for transaction in transactions:
        manager.note_written(transaction.transaction_id, "default:orders")
        manager.invalidate(transaction.transaction_id)
    assert len(manager._writes._places) <= 20
    for transaction in transactions:
        manager.abort(transaction)
        assert manager.status(transaction.transaction_id) == "invalid"
    clean = manager.start_short()
    manager.abort(clean)
    assert manager.status(clean.transaction_id) == "ended"


def test_manager_with_a_damaged_log_does_not_start_again(clock: ManualClock) -> None:
    class DamagedStorage(SpyStorage):
        def recover(self) -> RecoveredLog:
            if self.failure is not None:
                raise FormatError("transaction log txlog.1: an edit of version 0")
            return super().recover()

    storage = DamagedStorage()
    manager = TransactionManager(storage, clock)
    storage.failure = LogFailed("the disk is full.")
    with pytest.raises(LogFailed):
        manager.start_short()
    with pytest.raises(StoreError, match="version 0"):
        manager.start_short()


def test_waiter_for_a_replaced_log_leaves_the_new_one_alone(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    storage.failure = LogFailed("the disk is full.")
    replaced = manager._log
    with pytest.raises(LogFailed):
        manager.start_short()
    storage.failure = None
    manager.visibility()
    storage.failure = LogFailed("the disk is full.")
    with pytest.raises(LogFailed):
        manager._sync(replaced, 1)
    storage.failure = None
    assert manager.is_running


def test_call_of_a_closed_manager_is_rejected(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    manager.close()
    assert_unusable(manager, ManagerStopped, "has stopped")
    assert storage.calls[-1] == "close"


def assert_unusable(manager: TransactionManager, error: type[Exception], reason: str) -> None:
    calls = (manager.start_short, manager.visibility, manager.take_snapshot, manager.reset, manager.expire)
    each_raises(error, *calls, match=reason)
    each_raises(CannotSnapshot, manager.encoded_snapshot, match=reason)
    each_raises(NoSnapshot, manager.latest, match=reason)
    assert not manager.is_running


def test_close_after_a_failed_log_leaves_the_disk_as_it_is(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    storage.failure = LogFailed("the disk is full.")
    with pytest.raises(LogFailed):
        manager.start_short()
    storage.calls.clear()
    for _ in range(2):
        manager.close()
    assert "save" not in storage.calls


def test_snapshot_that_cannot_be_written_leaves_the_manager_running(clock: ManualClock) -> None:
    storage = SpyStorage()
    manager = TransactionManager(storage, clock)
    storage.save_failure = StoreError("the disk is full.")
    with pytest.raises(StoreError):
        manager.take_snapshot()
    manager.start_short()
    assert manager.is_running


def test_reset_with_a_failed_write_stops_the_manager_until_a_call(clock: ManualClock) -> None:
    class FailingStorage(SpyStorage):
        def save(self, snapshot: object) -> None:
            self.calls.append("save")
            if self.calls.count("save") == 3:
                raise StoreError("the disk is full.")

    manager = TransactionManager(FailingStorage(), clock)
    with pytest.raises(StoreError):
        manager.reset()
    assert not manager.is_running
    manager.visibility()
    assert manager.is_running


@pytest.mark.parametrize("step_ms", [86_400_000, -86_400_000, 299_000])
def test_expiry_after_a_clock_step_follows_monotonic_time(step_ms: int) -> None:
    clock = ManualClock(NOW_MS)
    with TransactionManager(MemoryStorage(), clock) as manager:
        began = manager.checkpoint(manager.start_short(30))
        clock.step(step_ms)
        later = manager.start_short(40)
        clock.advance(30_000)
        assert manager.expire() == 0
        clock.advance(1)
        assert manager.expire() == 2
        assert set(manager.visibility().invalid) == {began.transaction_id, began.write_pointer}
        clock.advance(10_000)
        assert manager.expire() == 1
        assert later.transaction_id in manager.visibility().invalid


# --- wrong clocks ----------------------------------------------------------------------------------------------------


def test_pointers_after_a_clock_jump_do_not_jump(clock: ManualClock) -> None:
    with TransactionManager(MemoryStorage(), clock) as manager:
        clock.step(365 * 86_400_000)
        clock.advance(1_000)
        right_ms = NOW_MS + 1_000
        began = manager.start_short()
        assert began.transaction_id == right_ms * 1_000_000
        assert manager.checkpoint(began).write_pointer == right_ms * 1_000_000 + 1
        assert manager.visibility().timestamp_ms == right_ms
        clock.step(-365 * 86_400_000)
        clock.advance(1)
        assert manager.start_short().transaction_id == (right_ms + 1) * 1_000_000


def test_restart_keeps_the_rest_of_each_timeout(tmp_path: Path) -> None:
    with TransactionManager(DirectoryStorage(tmp_path), ManualClock(NOW_MS)) as manager:
        manager.start_short(30)
        manager.start_short(60)
    clock = ManualClock(NOW_MS + 20_000, monotonic_ms=5)
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager:
        clock.step(-3_600_000)
        clock.advance(10_000)
        assert manager.expire() == 0
        clock.advance(1)
        assert manager.expire() == 1
        clock.advance(30_000)
        assert manager.expire() == 1
