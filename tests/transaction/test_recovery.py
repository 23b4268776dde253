"""Recovery of a manager after a crash at any byte: every acknowledged decision exists."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

from tests.builders import encode_snapshot
from tests.transaction.managers import BASE, NOW_MS, ReadOnlyStorage, recover_state, state, timeless
from tests.transaction.test_edits import EDITS
from tests.transaction.test_log import VERSION_3, edits, header, marker
from tests.transaction.vectors import TEPHRA, load, names, snapshot_of
from tms_core.clock import ManualClock
from tms_core.errors import FormatError
from tms_core.transaction.codec.edits import Edit, EditState, encode_edit
from tms_core.transaction.codec.log import read_log
from tms_core.transaction.manager.journal import LogFile
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.state import ManagerState
from tms_core.transaction.manager.storage import DirectoryStorage
from tms_core.transaction.model import InProgress, InProgressType, Snapshot, TransactionType, VisibilityState

LONG_TIMEOUT_MS = 86_400_000
#: The largest log that is cut at every byte.
LOG_BYTES = 2_048


def replay(snapshot: Snapshot, *history: Edit) -> Snapshot:
    found = ManagerState(snapshot, LONG_TIMEOUT_MS)
    for edit in history:
        found.apply(edit)
    return timeless(found.snapshot(0))


def found_in(files: dict[str, bytes], directory: Path) -> Snapshot:
    """Return the state that a manager recovers from these files without changing them."""
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    with TransactionManager(ReadOnlyStorage(directory), ManualClock(NOW_MS)) as manager:
        return state(manager)


def run_transactions(directory: Path, clock: ManualClock) -> TransactionManager:
    manager = TransactionManager(DirectoryStorage(directory), clock)
    one, two = manager.start_short(), manager.start_short()
    manager.can_commit(one.transaction_id, [b"a", b"\x00\xff"])
    manager.can_commit(two.transaction_id, [b"b"])
    manager.commit(one.transaction_id)
    manager.checkpoint(manager.start_long())
    manager.invalidate(manager.checkpoint(manager.start_short()).transaction_id)
    manager.abort(manager.checkpoint(manager.start_short()))
    manager.abort(manager.start_long())
    gone = manager.start_short().transaction_id
    manager.invalidate(gone)
    manager.truncate_invalid([gone])
    clock.advance(1)
    manager.invalidate(manager.start_short().transaction_id)
    return manager


@pytest.mark.parametrize("name", ["recovery-local", "recovery-sequencefile"])
def test_recovery_of_tephras_directory_is_tephras_state(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "tx"
    shutil.copytree(TEPHRA / name, directory)
    expected = json.loads((directory / "expected-state.json").read_text(encoding="utf-8"))
    assert recover_state(directory) == timeless(snapshot_of({**expected, "timestamp": 0}))
    # The recover_state state is in the snapshot from which the next manager recovers.
    assert recover_state(directory) == timeless(snapshot_of({**expected, "timestamp": 0}))


@pytest.mark.parametrize("kept", range(6))
def test_recovery_with_fewer_snapshots_uses_the_logs(tmp_path: Path, kept: int) -> None:
    directory = tmp_path / "tx"
    shutil.copytree(TEPHRA / "recovery-local", directory)
    for path in sorted(directory.glob("snapshot.*"))[kept:]:
        path.unlink()
    expected = json.loads((directory / "expected-state.json").read_text(encoding="utf-8"))
    assert recover_state(directory) == timeless(snapshot_of({**expected, "timestamp": 0}))


@pytest.mark.parametrize("name", names("snapshots"))
def test_recovery_of_a_snapshot_of_any_version_fills_gaps(tmp_path: Path, name: str) -> None:
    expected = load(f"snapshots/{name}.json")
    data = (TEPHRA / "snapshots" / f"{name}.bin").read_bytes()
    seen = found_in({f"snapshot.{expected['timestamp']}": data}, tmp_path / "tx").visibility
    assert list(seen.invalid) == expected["invalid"]
    assert {entry["writePointer"] for entry in expected["inProgress"]} <= {
        one.write_pointer for one in seen.in_progress
    }
    assert all(one.type is not None for one in seen.in_progress)


def test_recovery_of_entries_without_a_type_finds_long_transactions() -> None:
    day = LONG_TIMEOUT_MS
    given = {BASE + 1: NOW_MS + 30_000, BASE + 2: NOW_MS + day, BASE + 3: -1, BASE + 4: NOW_MS + day - 9_999}
    entries = tuple(InProgress(pointer, expires, BASE, None) for pointer, expires in given.items())
    seen = replay(Snapshot(VisibilityState(0, BASE, BASE + 4, in_progress=entries))).visibility
    long = (InProgressType.LONG, NOW_MS + day)
    found = [(one.type, one.expiration_ms) for one in seen.in_progress]
    assert found == [(InProgressType.SHORT, NOW_MS + 30_000), long, long, long]


def test_recovery_of_checkpoints_without_entries_has_them_in_progress() -> None:
    parent = InProgress(BASE + 1, NOW_MS, BASE, InProgressType.SHORT, (BASE + 2, BASE + 3))
    seen = replay(Snapshot(VisibilityState(0, BASE, BASE + 3, in_progress=(parent,)))).visibility
    assert [one.write_pointer for one in seen.in_progress] == [BASE + 1, BASE + 2, BASE + 3]
    assert [one.type for one in seen.in_progress][1:] == [InProgressType.CHECKPOINT] * 2


NOTHING = Snapshot(VisibilityState(0, BASE, BASE))


def start_edit(number: int, **fields: object) -> Edit:
    given = {"expiration_ms": NOW_MS + 1, "visibility_upper_bound": BASE, "type": TransactionType.SHORT, **fields}
    return Edit(BASE + number, EditState.IN_PROGRESS, **given)  # type: ignore[arg-type]


def test_replay_of_a_start_without_a_type_takes_minus_one_for_long() -> None:
    seen = replay(NOTHING, start_edit(1, type=None), start_edit(2, type=None, expiration_ms=-1)).visibility
    assert [one.type for one in seen.in_progress] == [InProgressType.SHORT, InProgressType.LONG]
    assert seen.in_progress[1].expiration_ms == NOW_MS + LONG_TIMEOUT_MS


@pytest.mark.parametrize(("kind", "invalid"), [(TransactionType.SHORT, []), (TransactionType.LONG, [BASE + 1])])
def test_replay_of_an_abort_without_a_type_uses_that_of_the_start(kind: TransactionType, invalid: list[int]) -> None:
    seen = replay(NOTHING, start_edit(1, type=kind), Edit(BASE + 1, EditState.ABORTED)).visibility
    assert (list(seen.invalid), seen.in_progress) == (invalid, ())


def test_replay_of_an_abort_of_an_unknown_transaction_invalidates() -> None:
    committing = Edit(BASE + 1, EditState.COMMITTING, changes=frozenset([b"k"]))
    assert list(replay(NOTHING, committing, Edit(BASE + 1, EditState.ABORTED)).visibility.invalid) == [BASE + 1]
    assert replay(NOTHING, Edit(BASE + 1, EditState.ABORTED)) == timeless(NOTHING)


def test_replay_of_a_commit_after_the_timeout_makes_it_valid() -> None:
    ends = (Edit(BASE + 1, EditState.INVALID), Edit(BASE + 1, EditState.COMMITTED))
    assert list(replay(NOTHING, start_edit(1), *ends).visibility.invalid) == []


def test_replay_of_a_checkpoint_after_the_end_hides_it() -> None:
    late = Edit(BASE + 2, EditState.CHECKPOINT, parent_write_pointer=BASE + 1)
    seen = replay(NOTHING, start_edit(1), Edit(BASE + 1, EditState.COMMITTED), late).visibility
    assert (list(seen.invalid), seen.write_pointer) == ([BASE + 2], BASE + 2)


def test_replay_in_another_order_keeps_lists_ascending() -> None:
    changes = frozenset([b"k"])
    history = [start_edit(9), start_edit(3), start_edit(1), start_edit(2)]
    history += [
        Edit(BASE + 3, EditState.COMMITTED, commit_pointer=BASE + 8, can_commit=True, changes=changes),
        Edit(BASE + 2, EditState.COMMITTED, commit_pointer=BASE + 7, can_commit=True, changes=changes),
    ]
    found = ManagerState(NOTHING, LONG_TIMEOUT_MS)
    for edit in history:
        found.apply(edit)
    assert list(found.in_progress) == [BASE + 1, BASE + 9]
    assert list(found.committed.copy()) == [BASE + 7, BASE + 8]


def test_replay_of_an_abort_never_issued_shows_nothing_to_come() -> None:
    made_up = Edit(BASE + 10**12, EditState.ABORTED, type=TransactionType.SHORT)
    seen = replay(NOTHING, start_edit(1), made_up).visibility
    assert (seen.read_pointer, seen.write_pointer) == (BASE + 1, BASE + 1)


def test_replay_of_an_edit_no_manager_writes_is_rejected() -> None:
    with pytest.raises(FormatError, match="MOVE_WATERMARK"):
        replay(NOTHING, Edit(1, EditState.MOVE_WATERMARK))


def test_recovery_keeps_a_timed_out_checkpoint_invalid(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    manager = TransactionManager(DirectoryStorage(tmp_path / "tx"), clock)
    one = manager.start_short()
    checkpoint = manager.checkpoint(one).write_pointer
    manager.abort(one)
    clock.advance(LONG_TIMEOUT_MS)
    manager.expire()
    shutil.copytree(tmp_path / "tx", tmp_path / "crashed")
    seen = recover_state(tmp_path / "crashed", clock).visibility
    assert (list(seen.invalid), seen.in_progress) == ([checkpoint], ())
    manager.close()


def test_recovery_after_a_clock_that_stepped_back_keeps_the_order(tmp_path: Path) -> None:
    for days_back in range(3):
        with TransactionManager(
            DirectoryStorage(tmp_path), ManualClock(NOW_MS - days_back * LONG_TIMEOUT_MS)
        ) as manager:
            manager.invalidate(manager.start_short().transaction_id)
            left = state(manager)
    assert recover_state(tmp_path, ManualClock(1)) == left
    assert len(left.visibility.invalid) == 3


@pytest.mark.no_cover
def test_recovery_of_our_log_cut_at_every_byte_has_whole_records(tmp_path: Path) -> None:
    run_transactions(tmp_path / "tx", ManualClock(NOW_MS)).take_snapshot()
    [path] = (tmp_path / "tx").glob("txlog.*")
    first = min((tmp_path / "tx").glob("snapshot.*"))
    base = {first.name: first.read_bytes()}
    history = list(read_log(path))
    data = path.read_bytes()
    ends = list(accumulate((8 + len(encode_edit(edit)) for edit in history), initial=0))
    assert ends[-1] == len(data) <= LOG_BYTES
    start = found_in(base, tmp_path / "cut")
    cut_at_every_byte(base, path.name, data, ends, lambda count: replay(start, *history[:count]), tmp_path / "cut")


@pytest.mark.no_cover
def test_recovery_of_an_hdfs_log_cut_at_every_byte_has_whole_batches(tmp_path: Path) -> None:
    # Without the other edits of the vectors, some of which no manager writes.
    numbers = [number for number, edit in enumerate(EDITS) if edit.state is not EditState.MOVE_WATERMARK]
    pieces, counts = [header(VERSION_3)], [0]
    for start in range(0, len(numbers), 3):
        batch = numbers[start : start + 3]
        pieces.append(marker(len(batch)) + b"".join(edits(number, number + 1) for number in batch))
        counts.append(counts[-1] + len(batch))
    data = b"".join(pieces)
    assert len(data) <= LOG_BYTES
    ends = list(accumulate(map(len, pieces[1:]), initial=len(pieces[0])))
    history = [EDITS[number] for number in numbers]

    def expected(batches: int) -> Snapshot:
        return replay(NOTHING, *history[: counts[batches]])

    base = {f"snapshot.{NOW_MS}": encode_snapshot(NOTHING)}
    cut_at_every_byte(base, f"txlog.{NOW_MS}", data, ends, expected, tmp_path / "cut")


def cut_at_every_byte(
    base: dict[str, bytes],
    name: str,
    data: bytes,
    ends: list[int],
    expected: Callable[[int], Snapshot],
    directory: Path,
) -> None:
    """Recover from each prefix of a log; ``ends`` are the offsets at which one more record is complete."""
    states = [expected(number) for number in range(len(ends))]
    found_in(base, directory)
    for size in range(len(data) + 1):
        complete = max([number for number, end in enumerate(ends) if end <= size], default=0)
        assert found_in({name: data[:size]}, directory) == states[complete], f"cut after {size} bytes"


def test_recovery_after_a_torn_log_reads_the_next_log_too(tmp_path: Path) -> None:
    directory = tmp_path / "tx"
    with TransactionManager(DirectoryStorage(directory), ManualClock(NOW_MS)):
        pass
    for snapshot in sorted(directory.glob("snapshot.*"))[1:]:
        snapshot.unlink()
    torn, complete = LogFile(directory / f"txlog.{NOW_MS + 5}"), LogFile(directory / f"txlog.{NOW_MS + 6}")
    torn.sync(torn.append(start_edit(1)))
    complete.sync(complete.append(start_edit(2)))
    with (directory / f"txlog.{NOW_MS + 5}").open("ab") as stream:
        stream.write(bytes(7))
    assert [one.write_pointer for one in recover_state(directory).visibility.in_progress] == [BASE + 1, BASE + 2]
