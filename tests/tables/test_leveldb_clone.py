from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import raising
from tms_core.errors import StoreBusy, StoreError, StoreLayoutError, StoreNotFound
from tms_core.tables.base import KEYS
from tms_core.tables.leveldb.clone import ClonedStore, clone, remove_stale
from tms_core.tables.leveldb.layout import identity
from tms_core.tables.leveldb.store import LevelDBStore

TABLES = ("system.tms.meta", "system.tms.message", "system.tms.payload")
EVERYTHING = (b"", None, 1_000_000)


def fingerprint(path: Path) -> dict[str, tuple[str, int]]:
    return {
        str(entry.relative_to(path)): (
            hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else "folder",
            entry.stat().st_mtime_ns,
        )
        for entry in [path, *path.rglob("*")]
    }


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "messaging.janitor"


def test_clone_has_all_rows_and_keeps_the_original(vector: Any, tmp_path: Path, state: Path) -> None:
    path = vector.copy_to(tmp_path / "messaging")
    before = fingerprint(path)
    with clone(path, state) as cloned:
        assert set(cloned.message.read(KEYS, *EVERYTHING).items) == set(vector.of("message"))
        assert cloned.disk_bytes() == sum((path / name).stat().st_size for name in before if name.count("/") == 1)
        assert set(cloned.payload.read(KEYS, *EVERYTHING).items) == set(vector.of("payload"))
        assert {key for key, _ in cloned.metadata.rows()} == set(vector.of("meta"))
        assert fingerprint(path) == before
    assert fingerprint(path) == before
    assert list(state.iterdir()) == []


def test_clone_links_tables_and_copies_other_files(sample: Path, state: Path) -> None:
    with clone(sample, state) as cloned:
        assert isinstance(cloned, ClonedStore)
        assert cloned.linked
        copied = [file for file in sample.rglob("*") if file.suffix == ".log" or file.name.startswith(("MANI", "CURR"))]
        assert cloned.copied_bytes == sum(file.stat().st_size for file in copied)
        assert (sample / TABLES[1] / "000016.sst").stat().st_nlink == 2
    assert (sample / TABLES[1] / "000016.sst").stat().st_nlink == 1


def test_clone_of_damaged_store_names_the_original_file(sample: Path, state: Path) -> None:
    table = sample / TABLES[1] / "000016.sst"
    table.write_bytes(table.read_bytes()[:1000])
    with pytest.raises(StoreError, match="is not a complete table") as damaged:
        clone(sample, state)
    assert damaged.value.message.startswith(f"{table} ")
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_clone_without_hard_links_copies_the_tables(
    sample: Path, state: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(Path, "hardlink_to", raising(OSError(number, os.strerror(number))))
    before = fingerprint(sample)
    with clone(sample, state) as cloned:
        assert isinstance(cloned, ClonedStore)
        assert not cloned.linked
        assert cloned.copied_bytes > sum(file.stat().st_size for file in sample.rglob("*.sst"))
        assert len(cloned.message.read(KEYS, *EVERYTHING).items) == 9897
    assert fingerprint(sample) == before


@pytest.mark.parametrize(("call", "words"), [("hardlink_to", "Input/output error"), ("mkdir", "No space left")])
def test_failed_clone_leaves_no_files(
    sample: Path, state: Path, monkeypatch: pytest.MonkeyPatch, call: str, words: str
) -> None:
    state.mkdir()
    mkdir = Path.mkdir

    def fail(self: Path, *_: object, **__: object) -> None:
        if self == state:
            mkdir(self, exist_ok=True)
        else:
            raise OSError(errno.EIO if call == "hardlink_to" else errno.ENOSPC, words)

    monkeypatch.setattr(Path, call, fail)
    with pytest.raises(StoreError, match=words):
        clone(sample, state)
    assert list(state.iterdir()) == []


def test_clone_of_store_in_another_process_raises_store_busy(
    sample: Path, state: Path, hold: Callable[[Path], Any]
) -> None:
    holder = hold(sample / TABLES[2])
    with pytest.raises(StoreBusy, match=str(holder.pid)):
        clone(sample, state)
    assert list(state.iterdir()) == []


def test_clone_of_store_open_in_this_process_keeps_its_locks(
    sample: Path, state: Path, hold: Callable[[Path], Any]
) -> None:
    with LevelDBStore(sample):
        with pytest.raises(StoreBusy, match="in this process"):
            clone(sample, state)
        for table in TABLES:
            assert hold(sample / table).output.startswith("failed")


def test_clone_of_store_without_locks_and_payloads_creates_none(sample: Path, state: Path) -> None:
    # A backup, or a store on a file system that cannot be written.
    for lock in sample.rglob("LOCK"):
        lock.unlink()
    shutil.rmtree(sample / TABLES[2])
    before = fingerprint(sample)
    with clone(sample, state) as cloned:
        assert len(cloned.message.read(KEYS, *EVERYTHING).items) == 9897
        assert cloned.payload.read(KEYS, *EVERYTHING).items == []
        assert cloned.identity() == identity(sample)
    assert fingerprint(sample) == before


def test_original_can_be_opened_while_clone_is_open(sample: Path, state: Path, hold: Callable[[Path], Any]) -> None:
    with clone(sample, state) as cloned:
        assert hold(sample / TABLES[1]).output == "open"
        assert len(cloned.message.read(KEYS, *EVERYTHING).items) == 9897


def test_original_is_locked_during_cloning(
    sample: Path, state: Path, hold: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copyfile, messages = shutil.copyfile, list[str]()

    def copy(source: Path, target: Path) -> None:
        if not messages:
            messages.extend(hold(sample / table).output for table in TABLES)
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy)
    clone(sample, state).close()
    assert [words.split()[0] for words in messages] == ["failed"] * 3


def test_clone_of_missing_or_unknown_store_is_rejected(tmp_path: Path, state: Path) -> None:
    with pytest.raises(StoreNotFound):
        clone(tmp_path / "missing", state)
    LevelDBStore(tmp_path / "store", create=True).close()
    (tmp_path / "store" / "default.tms.message.t.1").mkdir()
    with pytest.raises(StoreLayoutError):
        clone(tmp_path / "store", state)
    assert remove_stale(state) == 0
    assert not state.exists()


@pytest.mark.parametrize("inside", ["", "state", "system.tms.message"])
def test_clone_inside_the_store_is_rejected(sample: Path, inside: str) -> None:
    before = fingerprint(sample)
    with pytest.raises(StoreError, match="next to the store"):
        clone(sample, sample / inside)
    assert fingerprint(sample) == before


CLONE = """
import sys
from tms_core.tables.leveldb.clone import clone
kept = clone(sys.argv[1], sys.argv[2])
print("cloned", flush=True)
sys.stdin.read()
"""


def test_stale_clones_of_dead_processes_are_removed(sample: Path, state: Path, child: Callable[..., Any]) -> None:
    dead = child(CLONE, sample, state)
    alive = child(CLONE, sample, state)
    assert (dead.output, alive.output) == ("cloned", "cloned")
    with clone(sample, state) as mine:
        assert len(list(state.iterdir())) == 3
        dead.kill()
        (state / "leveldb-clone-notes.txt").write_text("not a clone")
        assert remove_stale(state) == 1
        assert remove_stale(state) == 0
        assert len(mine.message.read(KEYS, *EVERYTHING).items) == 9897
    assert len(list(state.iterdir())) == 2
    alive.kill()
    assert remove_stale(state) == 1
    assert [entry.name for entry in state.iterdir()] == ["leveldb-clone-notes.txt"]
