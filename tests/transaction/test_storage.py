"""The manager's directory: written, read and kept files, and its lock."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import raising
from tests.transaction.managers import BASE, NOW_MS, recover_state, state
from tests.transaction.vectors import TEPHRA
from tms_core.clock import ManualClock
from tms_core.errors import Conflict, FormatError, NotInProgress, StoreBusy
from tms_core.transaction.codec.edits import Edit, EditState
from tms_core.transaction.codec.log import read_log
from tms_core.transaction.manager.journal import LogFailed, LogFile
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryBusy, DirectoryFailed, DirectoryStorage
from tms_core.transaction.model import InProgressType
from tms_core.transaction.source.source import DirectorySource

fail = raising(OSError(errno.ENOSPC, "No space left on device"))


def open_manager(directory: Path, **options: int) -> TransactionManager:
    return TransactionManager(DirectoryStorage(directory, **options), ManualClock(NOW_MS))


def numbers(directory: Path, kind: str) -> list[int]:
    return sorted(int(path.suffix[1:]) for path in directory.glob(f"{kind}.*"))


def test_snapshots_of_a_running_manager_are_readable_as_a_source(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        manager.invalidate(manager.start_short().transaction_id)
        manager.take_snapshot()
        loaded = DirectorySource(tmp_path).latest()
        assert (list(loaded.snapshot.invalid), loaded.rejected) == ([BASE + 1], ())


def test_log_after_a_snapshot_has_the_number_of_the_snapshot(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        manager.start_short()
        manager.take_snapshot()
        manager.start_short()
        assert numbers(tmp_path, "txlog") == numbers(tmp_path, "snapshot")


def test_snapshots_beyond_the_limit_are_deleted_with_their_logs(tmp_path: Path) -> None:
    with open_manager(tmp_path, retain=3) as manager:
        for _ in range(5):
            manager.start_short()
            manager.take_snapshot()
        manager.start_short()
        kept = numbers(tmp_path, "snapshot")
        assert len(kept) == 3
        assert numbers(tmp_path, "txlog") == kept
        left = state(manager)
    assert recover_state(tmp_path) == left


@pytest.mark.parametrize(
    ("loss", "hint"), [("deleted", "Mount it"), ("replaced", "Mount it"), ("only the file", "newest snapshot")]
)
def test_commit_to_a_log_that_was_deleted_fails(tmp_path: Path, loss: str, hint: str) -> None:
    directory = tmp_path / "tx"
    with open_manager(directory) as manager:
        transaction = manager.start_short()
        [log] = directory.glob("txlog.*")
        if loss == "only the file":
            log.unlink()
        else:
            directory.rename(tmp_path / "elsewhere")
        if loss == "replaced":
            directory.mkdir()
            log.touch()
        with pytest.raises(LogFailed, match="deleted or replaced") as caught:
            manager.commit(transaction.transaction_id)
        assert hint in caught.value.hint


def test_manager_whose_directory_was_replaced_writes_nothing_to_it(tmp_path: Path) -> None:
    directory = tmp_path / "tx"
    with open_manager(directory) as previous:
        previous.start_short()
        previous.take_snapshot()
        directory.rename(tmp_path / "elsewhere")
        with open_manager(directory) as manager:
            manager.start_short()
            before = sorted(directory.iterdir())
            for write in (previous.start_short, previous.take_snapshot):
                with pytest.raises((LogFailed, DirectoryFailed), match="deleted or replaced"):
                    write()
            assert sorted(directory.iterdir()) == before


def test_manager_whose_directory_was_away_continues_with_its_state(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "tx", tmp_path / "elsewhere"
    with open_manager(directory) as manager:
        invalid = manager.start_short().transaction_id
        manager.invalidate(invalid)
        # The directory is an empty mount point for a while.
        directory.rename(elsewhere)
        directory.mkdir()
        for _ in range(2):
            with pytest.raises((LogFailed, DirectoryFailed)):
                manager.start_short()
        directory.rmdir()
        elsewhere.rename(directory)
        assert list(manager.start_short().invalids) == [invalid]


def test_unfinished_snapshot_is_deleted_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".in-progress.7").write_bytes(b"half")
    with open_manager(tmp_path):
        assert not (tmp_path / ".in-progress.7").exists()


def test_recovery_keeps_files_with_other_names(tmp_path: Path) -> None:
    strange = ["snapshot.123.bak", "snapshot.9223372036854775807", "snapshot.", "txlog.x", "txlog.", "notes"]
    for name in strange:
        (tmp_path / name).write_bytes(b"strange")
    with open_manager(tmp_path) as manager:
        manager.start_short()
    assert set(strange) <= {path.name for path in tmp_path.iterdir()}
    assert len(recover_state(tmp_path).visibility.in_progress) == 1


@pytest.mark.parametrize("data", [b"", b"\x08\x02", b"\xff" * 40, b"\x0a" + bytes(30)])
def test_unusable_newest_snapshot_is_recovered_from_the_logs(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with open_manager(tmp_path) as manager:
        manager.checkpoint(manager.start_short())
        manager.take_snapshot()
        manager.start_long()
        left = state(manager)
    newest = tmp_path / f"snapshot.{numbers(tmp_path, 'snapshot')[-1]}"
    newest.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert recover_state(tmp_path) == left
    assert f"{newest} is skipped" in caplog.text


def test_recovery_without_a_usable_snapshot_is_rejected(tmp_path: Path) -> None:
    for number in (7, 8):
        (tmp_path / f"snapshot.{number}").write_bytes(b"no")
    for _ in range(2):  # a failed start releases the lock
        with pytest.raises(DirectoryFailed, match="2 transaction snapshots"):
            open_manager(tmp_path)


def test_log_damaged_in_its_middle_stops_the_start(tmp_path: Path) -> None:
    log = TEPHRA / "txlog" / "local.txlog.1600000000000"
    data = bytearray(log.read_bytes())
    data[8] = 0x55
    (tmp_path / "txlog.7").write_bytes(data)
    with pytest.raises(FormatError, match=r"txlog\.7: .* 85"):
        open_manager(tmp_path)


def test_file_in_place_of_the_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tx").write_bytes(b"")
    with pytest.raises(DirectoryFailed, match="tx: File exists"):
        DirectoryStorage(tmp_path / "tx")


def test_unreadable_snapshot_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "snapshot.7").symlink_to("/proc/self/mem")  # its first page is never mapped
    with pytest.raises(DirectoryFailed):
        open_manager(tmp_path)


def test_snapshot_that_cannot_be_written_leaves_the_manager_working(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        (tmp_path / f".in-progress.{NOW_MS + 2}").mkdir()
        with pytest.raises(DirectoryFailed, match="Is a directory"):
            manager.take_snapshot()
        manager.start_short()
        left = state(manager)
        (tmp_path / f".in-progress.{NOW_MS + 2}").rmdir()
        # The next snapshot does not delete this directory, because the storage did not create it.
        (tmp_path / ".in-progress.1").mkdir()
        manager.take_snapshot()
    assert recover_state(tmp_path) == left


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of synced and renamed files in order."""
    names: list[str] = []

    def record(call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(file: int) -> None:
            names.append(Path(f"/proc/self/fd/{file}").readlink().name)
            call(file)

        return sync

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, record(getattr(os, name)))
    rename = Path.rename

    def record_rename(path: Path, target: Path) -> Path:
        names.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", record_rename)
    return names


def test_new_directory_has_a_synced_snapshot_before_its_name(tmp_path: Path, syncs: list[str]) -> None:
    directory = tmp_path / "a" / "tx"
    with open_manager(directory):
        assert (numbers(directory, "snapshot"), numbers(directory, "txlog")) == ([NOW_MS + 1], [])
        unfinished = f".in-progress.{NOW_MS + 1}"
        assert syncs == [unfinished, f"rename {unfinished}", "tx"]


def test_edit_is_synced_before_its_response(tmp_path: Path, syncs: list[str]) -> None:
    directory = tmp_path / "tx"
    with open_manager(directory) as manager:
        syncs.clear()
        manager.start_short()
        assert syncs == ["tx", f"txlog.{NOW_MS + 1}"]
        manager.start_short()
        assert syncs[2:] == [f"txlog.{NOW_MS + 1}"]
        assert len(list(read_log(directory / f"txlog.{NOW_MS + 1}"))) == 2


def test_waiting_syncs_on_a_slow_disk_share_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path / "txlog.1")
    in_sync, go_on = threading.Event(), threading.Event()
    synced: list[int] = []
    fdatasync = os.fdatasync

    def sync_slowly(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        in_sync.set()
        assert go_on.wait(60)
        fdatasync(file)

    monkeypatch.setattr(os, "fdatasync", sync_slowly)
    size = 78

    first = threading.Thread(target=lambda: log.sync(log.append(Edit(1, EditState.INVALID))))
    first.start()
    assert in_sync.wait(60)
    positions = [log.append(Edit(number, EditState.INVALID)) for number in range(2, 7)]
    others = [threading.Thread(target=log.sync, args=[position]) for position in positions]
    for thread in others:
        thread.start()
    go_on.set()
    for thread in (first, *others):
        thread.join(60)
    assert synced == [size, 6 * size]
    assert [edit.write_pointer for edit in read_log(tmp_path / "txlog.1")] == [1, 2, 3, 4, 5, 6]
    log.close()


def test_waiter_of_a_safe_edit_does_not_wait_for_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path / "txlog.1")
    started, gates = threading.Semaphore(0), [threading.Event(), threading.Event()]
    waiting = iter(gates)

    def sync_slowly(_: int) -> None:
        started.release()
        assert next(waiting).wait(60)

    monkeypatch.setattr(os, "fdatasync", sync_slowly)
    positions = [log.append(Edit(number, EditState.INVALID)) for number in (1, 2)]
    writing, safe = (threading.Thread(target=log.sync, args=[position]) for position in positions)
    writing.start()
    assert started.acquire(timeout=60)
    # Its edit misses this write. It waits before the thread whose edit is in the write.
    late = threading.Thread(target=log.sync, args=[log.append(Edit(3, EditState.INVALID))])
    for count, thread in enumerate((late, safe), start=1):
        thread.start()
        while len(log._waiting) < count:
            time.sleep(0.001)
    gates[0].set()
    assert started.acquire(timeout=60)
    safe.join(60)
    assert not safe.is_alive()
    assert late.is_alive()
    gates[1].set()
    late.join(60)
    writing.join(60)
    log.close()


def test_log_that_cannot_be_written_fails_all_waiters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path / "txlog.1")
    log.sync(log.append(Edit(1, EditState.INVALID)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(LogFailed, match=r"txlog\.1 .*No space left"):
            log.sync(log.append(Edit(2, EditState.INVALID)))
    size = (tmp_path / "txlog.1").stat().st_size
    with pytest.raises(LogFailed):
        log.sync(log.append(Edit(3, EditState.INVALID)))
    assert (tmp_path / "txlog.1").stat().st_size == size
    log.sync(1)
    log.close()
    log.close()


def test_log_write_without_memory_makes_nothing_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path / "txlog.1")
    log.sync(log.append(Edit(1, EditState.INVALID)))
    lost = log.append(Edit(2, EditState.INVALID))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", raising(MemoryError))
        with pytest.raises(MemoryError):
            log.sync(lost)
    for position in (lost, log.append(Edit(3, EditState.INVALID))):
        with pytest.raises(LogFailed, match="MemoryError"):
            log.sync(position)
    assert list(read_log(tmp_path / "txlog.1")) == [Edit(1, EditState.INVALID)]
    log.close()


def test_short_writes_are_continued_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    log = LogFile(tmp_path / "txlog.1")
    log.sync(log.append(Edit(1, EditState.INVALID)))
    log.close()
    assert list(read_log(tmp_path / "txlog.1")) == [Edit(1, EditState.INVALID)]


def test_stop_with_a_full_disk_keeps_acknowledged_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_manager(tmp_path)
    manager.start_short()
    left = state(manager)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        with pytest.raises(LogFailed):
            manager.start_short()
    manager.close()
    assert recover_state(tmp_path) == left


WRITE = os.write


def write_torn(file: int, data: bytes) -> int:
    WRITE(file, data[:40])
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "failure", "first", "is_there"),
    [("write", write_torn, False, False), ("fdatasync", fail, False, True), ("open", fail, True, False)],
)
def test_failed_log_continues_from_the_stored_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: Any, first: bool, is_there: bool
) -> None:
    manager = open_manager(tmp_path / "tx")
    kept, other = manager.start_short(), manager.start_short(client="me")
    manager.invalidate(manager.start_short().transaction_id)
    if first:  # the next record is the first of a file
        manager.take_snapshot()
    left = state(manager)
    with monkeypatch.context() as patched:
        patched.setattr(os, name, failure)
        with pytest.raises(LogFailed):
            manager.commit(kept.transaction_id)
        patched.setattr(Path, "open", fail)
        for _ in range(3):
            with pytest.raises(DirectoryFailed):
                manager.commit(kept.transaction_id)
    assert not manager.is_running
    if is_there:  # the record is complete, although the call failed
        with pytest.raises(NotInProgress):
            manager.commit(kept.transaction_id)
    else:
        assert state(manager) == left
        assert manager.clients() == {other.transaction_id: "me"}
        with pytest.raises(Conflict):
            manager.commit(kept.transaction_id)
        manager.can_commit(kept.transaction_id, [])
        manager.commit(kept.transaction_id)
    manager.invalidate(manager.start_short().transaction_id)
    shutil.copytree(tmp_path / "tx", tmp_path / "crashed")
    assert recover_state(tmp_path / "crashed") == state(manager)
    assert not list((tmp_path / "crashed").glob(".in-progress*"))
    manager.close()


def test_recovery_after_many_threads_and_snapshots_is_complete(tmp_path: Path) -> None:
    manager = open_manager(tmp_path / "tx", retain=2)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            one = manager.start_long() if chance.random() < 0.2 else manager.start_short()
            if chance.random() < 0.3:
                one = manager.checkpoint(one)
            manager.can_commit(one.transaction_id, [b"%d" % one.transaction_id])
            match chance.randrange(5):
                case 0:
                    manager.commit(one.transaction_id)
                case 1:
                    manager.abort(one)
                case 2:
                    manager.invalidate(one.transaction_id)
                    manager.truncate_invalid([one.transaction_id])
                case 3:
                    manager.take_snapshot()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(16)))
    left = state(manager)
    shutil.copytree(tmp_path / "tx", tmp_path / "crashed")
    assert len(left.visibility.in_progress) > 50
    assert recover_state(tmp_path / "crashed") == left
    manager.close()


WORKER = """
import sys
from pathlib import Path
from tms_core.clock import SystemClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage

manager = TransactionManager(DirectoryStorage(Path(sys.argv[1])), SystemClock())
while True:
    for _ in range(50):
        pointer = manager.start_long().transaction_id
        manager.can_commit(pointer, [b"%d" % pointer])
        manager.status(pointer)  # waits for the disk
        print(pointer, flush=True)
    manager.take_snapshot()
"""


def test_recovery_after_a_kill_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WORKER, tmp_path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        begun = {int(process.stdout.readline()) for _ in range(120)}
        process.send_signal(signal.SIGKILL)
        begun |= {int(line) for line in process.communicate()[0].splitlines() if line}
        found = recover_state(tmp_path)
        entries = {one.write_pointer: one.type for one in found.visibility.in_progress}
        assert begun <= entries.keys()
        assert set(entries.values()) == {InProgressType.LONG}
        assert begun <= found.committing.keys()


def test_directory_of_a_running_manager_is_busy(tmp_path: Path) -> None:
    with open_manager(tmp_path):
        with pytest.raises(DirectoryBusy, match=str(tmp_path)):
            DirectoryStorage(tmp_path)
        assert issubclass(DirectoryBusy, StoreBusy)
    storage = DirectoryStorage(tmp_path)
    storage.close()
    storage.close()


def test_snapshots_and_logs_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        manager.start_short()
        manager.take_snapshot()
        manager.start_short()
    files = [path for kind in ("snapshot", "txlog") for path in tmp_path.glob(f"{kind}.*")]
    assert len(files) >= 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
