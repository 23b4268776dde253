"""Lineage of a LevelDB store: growing numbers that distinguish a store from its backup."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables.records import write_records
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.lineage import StoreTrace, trace_folder
from tms_core.tables.leveldb.log import last_sequence
from tms_core.tables.leveldb.store import LevelDBStore

MESSAGE = "system.tms.message"
#: The number of bytes after which LevelDB writes a table.
MANY_BYTES = 5 << 20

_keys = count()


def write(folder: Path, *, batches: int = 1, rows: int = 1, row_bytes: int = 10) -> None:
    """Write to one folder as another program that opens it once."""
    with closing(plyvel.DB(str(folder))) as database:
        for _ in range(batches):
            batch = database.write_batch()
            for _ in range(rows):
                batch.put(b"%09d" % next(_keys), bytes(row_bytes))
            batch.write()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with LevelDBStore(tmp_path / "messaging", create=True):
        pass
    write(tmp_path / "messaging" / MESSAGE, rows=3)
    return tmp_path / "messaging"


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 200_000))
def test_last_sequence_of_truncated_log_is_of_last_whole_batch(sizes: list[int], cut: int) -> None:
    sequences, records, number = [0], [], 1
    for size in sizes:
        records.append(number.to_bytes(8, "little") + (size + 1).to_bytes(4, "little") + bytes(size))
        number += size + 1
        sequences.append(number - 1)
    log = write_records(records)
    whole = sum(len(write_records(records[: index + 1])) <= cut for index in range(len(records)))
    assert last_sequence(log) == sequences[-1]
    assert last_sequence(log[:cut]) == sequences[whole]


@pytest.mark.parametrize("row_bytes", [1, 40_000, 100_000])
def test_sequence_number_counts_each_row(path: Path, row_bytes: int) -> None:
    before = trace_folder(path / MESSAGE).sequence
    write(path / MESSAGE, batches=7, rows=5, row_bytes=row_bytes)
    assert trace_folder(path / MESSAGE).sequence == before + 35


def test_lineage_of_an_open_store_counts_the_last_write(path: Path) -> None:
    with LevelDBStore(path) as store:
        before = store.lineage()["metadata"]["sequence"]
        assert store.metadata.compare_and_set(b"a", None, b"b")
        assert store.lineage()["metadata"]["sequence"] == before + 1


def test_growing_store_has_no_restore_evidence(path: Path) -> None:
    for number in range(8):
        with LevelDBStore(path) as store:
            known = store.lineage()
            store.message.compact(b"", b"\xff")
            assert store.find_restore_evidence(known) is None
        write(path / MESSAGE, batches=3, rows=number, row_bytes=MANY_BYTES // 3)
        with LevelDBStore(path) as store:
            assert store.find_restore_evidence(known) is None


def keep_backup(path: Path) -> None:
    """Leave the restored backup unchanged."""


def write_more_rows(path: Path) -> None:
    """Write more rows to the restored backup than the store had."""
    write(path / MESSAGE, rows=1000)


def write_more_files(path: Path) -> None:
    """Write more rows and files, with more openings, than the store had; keep the first tables."""
    for _ in range(3):
        write(path / MESSAGE, batches=4, row_bytes=MANY_BYTES)


@pytest.mark.parametrize("then", [keep_backup, write_more_rows, write_more_files])
def test_backup_copied_over_the_store_is_restore_evidence(path: Path, then: Callable[[Path], None]) -> None:
    backup = shutil.copytree(path, path.with_name("backup"))
    for _ in range(2):
        write(path / MESSAGE, batches=4, row_bytes=MANY_BYTES)
    with LevelDBStore(path) as store:
        known = store.lineage()
    for file in path.glob("*/*"):
        file.unlink()
    shutil.copytree(backup, path, dirs_exist_ok=True)
    then(path)
    with LevelDBStore(path) as store:
        reason = store.find_restore_evidence({"message": known["message"]})
        assert "the message table went back" in (reason or "")


def test_restore_evidence_survives_later_writes(path: Path) -> None:
    with LevelDBStore(path) as store:
        known = dict(store.lineage())
    known["metadata"] = {**known["metadata"], "sequence": known["metadata"]["sequence"] + 1}
    with LevelDBStore(path) as store:
        for number in range(9):
            store.metadata.compare_and_set(b"%d" % number, None, b"")
        assert "the metadata table went back" in (store.find_restore_evidence(known) or "")


def test_missing_lineage_fields_are_no_restore_evidence(path: Path) -> None:
    with LevelDBStore(path) as store:
        known = dict(store.lineage())
    known["message"] = {**known["message"], "birth_ns": None, "generation": None}
    with LevelDBStore(path) as store:
        assert store.find_restore_evidence(known) is None


def test_sequence_includes_a_log_that_becomes_a_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path / MESSAGE, rows=5)
    before = trace_folder(path / MESSAGE).sequence
    read = Path.read_bytes

    def read_late(file: Path) -> bytes:
        if file.suffix == ".log":
            # The opening converts the log into a table.
            plyvel.DB(str(path / MESSAGE)).close()
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert trace_folder(path / MESSAGE).sequence == before


def test_lineage_ignores_a_log_that_disappeared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = StoreTrace(path, {})
    glob = Path.glob

    def read_late(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        return [*found, folder / "000099.log"] if pattern == "*.log" else found

    monkeypatch.setattr(Path, "glob", read_late)
    assert trace.current_marks()["message"]["sequence"] == 3


def test_frozen_lineage_ignores_later_writes(path: Path) -> None:
    trace = StoreTrace(path, {"message": trace_folder(path / MESSAGE)}, frozen=True)
    known = trace.current_marks()
    write(path / MESSAGE, rows=9)
    assert trace.current_marks() == known
    assert trace.find_restore_evidence(known) is None
