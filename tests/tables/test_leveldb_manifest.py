from __future__ import annotations

import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import every
from tests.support import raising
from tests.tables.records import file_contents, flip, flipped, read_records, write_records
from tests.tables.test_leveldb import raw_rows
from tms_core.errors import StoreBusy, StoreError
from tms_core.tables.base import KEYS, MESSAGES, MessageValue
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.log import BLOCK_BYTES, DELETED_TABLE, NEW_TABLE, Field, pack_edit, parse_edit
from tms_core.tables.leveldb.manifest import current_manifest, prepare, rename_tables, repair
from tms_core.tables.leveldb.store import LevelDBStore

MESSAGE = "system.tms.message"
TABLES = 300


def overstate(folder: Path) -> None:
    """Record every table 4 bytes too large and name it ``.sst``, as CDAP's library would have."""
    manifest = current_manifest(folder)
    edits = [parse_edit(record) for record in read_records(manifest.read_bytes())]
    for edit in edits:
        for index, field in enumerate(edit):
            if field.tag == NEW_TABLE:
                level, number, size = field.numbers
                edit[index] = field._replace(numbers=(level, number, size + 4))
    manifest.write_bytes(write_records([pack_edit(edit) for edit in edits]))
    rename_tables(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database of 300 tables, all recorded too large, in a MANIFEST of several blocks."""
    folder = tmp_path_factory.mktemp("large") / "database"
    database = plyvel.DB(str(folder), create_if_missing=True)
    for number in range(TABLES):
        key = b"%0200d" % number
        database.put(key, b"%d" % number)
        database.compact_range(start=key, stop=key)
    database.close()
    overstate(folder)
    return folder


def test_repair_of_many_wrong_sizes_makes_every_row_readable(large: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(large, tmp_path / "database")
    assert current_manifest(folder).stat().st_size > 2 * BLOCK_BYTES
    assert raw_rows(folder) == {}, "plyvel reports no error"
    folder = shutil.copytree(large, tmp_path / "another")
    assert repair(folder) == TABLES
    assert raw_rows(folder) == {b"%0200d" % number: b"%d" % number for number in range(TABLES)}


def test_second_repair_changes_nothing(sample: Path) -> None:
    # Java pads the file when it crashes.
    manifest = current_manifest(sample / MESSAGE)
    manifest.write_bytes(manifest.read_bytes().ljust(1 << 20, b"\0"))
    assert repair(sample / MESSAGE) == 1
    before = file_contents(sample / MESSAGE)
    assert repair(sample / MESSAGE) == 0
    assert file_contents(sample / MESSAGE) == before


def test_repair_keeps_all_fields_but_wrong_sizes(sample: Path) -> None:
    folder = sample / MESSAGE
    old = [parse_edit(record) for record in read_records(current_manifest(folder).read_bytes())]
    assert repair(folder) == 1
    new = [parse_edit(record) for record in read_records(current_manifest(folder).read_bytes())]
    for old_edit, new_edit in zip(old, new[:-1], strict=True):
        for before, after in zip(old_edit, new_edit, strict=True):
            if before.tag == NEW_TABLE and before.numbers[1] == 16:
                assert after == before._replace(numbers=(1, 16, (folder / "000016.sst").stat().st_size))
            else:
                assert after == before
    # Number 17 was reserved for the next file, so 18 is the MANIFEST, and 19 is the next number.
    assert current_manifest(folder).name == "MANIFEST-000018"
    assert new[-1] == [(3, (19,), ())]


class Crash(BaseException):
    """A crash of the machine."""


@pytest.mark.parametrize("late", [False, True])
def test_crash_at_any_step_of_prepare_loses_no_row(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Crash before each disk operation, with unsynced data torn, and after it."""
    with LevelDBStore(shutil.copytree(sample, tmp_path / "whole")) as store:
        expected = every(store.message, MESSAGES)
    steps = 0
    crashed = True
    while crashed:
        path = shutil.copytree(sample, tmp_path / f"crash-{steps}")
        twin = path / MESSAGE / "000005.sst"
        twin.rename(twin.with_suffix(".ldb"))
        with monkeypatch.context() as patch:
            crash_at(patch, steps, late=late)
            try:
                prepare(path / MESSAGE)
                crashed = False
            except Crash:
                pass
        with LevelDBStore(path) as store:
            assert every(store.message, MESSAGES) == expected, f"crash at step {steps}"
        assert not list(path.rglob("*.ldb"))
        assert not list(path.rglob("*.dbtmp"))
        assert len(list((path / MESSAGE).glob("MANIFEST-*"))) == 1
        steps += 1
    assert steps == 8


def crash_at(patch: pytest.MonkeyPatch, step: int, *, late: bool) -> None:
    countdown = iter(range(step, -1, -1))
    fsync, replace = os.fsync, Path.replace

    def crash(torn: int | None = None) -> None:
        if torn is not None and Path(f"/proc/self/fd/{torn}").is_file():
            os.ftruncate(torn, os.fstat(torn).st_size // 2)
        raise Crash

    def fsync_or_crash(handle: int) -> None:
        now = next(countdown, None) == 0
        if now and not late:
            crash(handle)
        fsync(handle)
        if now:
            crash()

    def replace_or_crash(self: Path, target: Path) -> Path:
        now = next(countdown, None) == 0
        if now and not late:
            crash()
        result = replace(self, target)
        if now:
            crash()
        return result

    patch.setattr(os, "fsync", fsync_or_crash)
    patch.setattr(Path, "replace", replace_or_crash)


def test_prepare_with_full_disk_changes_nothing(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sample / MESSAGE
    before = file_contents(folder)
    monkeypatch.setattr(os, "fsync", raising(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="Free some space"):
        prepare(folder)
    assert file_contents(folder) == before


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no table": lambda folder: (folder / "000016.sst").unlink(),
    "cut table": lambda folder: os.truncate(folder / "000016.sst", 1_000_000),
    "empty table": lambda folder: os.truncate(folder / "000016.sst", 0),
    "flipped bit": lambda folder: flip(current_manifest(folder), 100),
    "no manifest": lambda folder: current_manifest(folder).unlink(),
    "empty manifest": lambda folder: os.truncate(current_manifest(folder), 0),
    "no newline": lambda folder: (folder / "CURRENT").write_text("MANIFEST-000002"),
    "another folder": lambda folder: (folder / "CURRENT").write_text("../MANIFEST-000002\n"),
    "not ascii": lambda folder: (folder / "CURRENT").write_bytes(b"\xff\n"),
    "unknown field": lambda folder: rewrite(current_manifest(folder), b"\x08\x01"),
    "two tables": lambda folder: (folder / "000016.ldb").write_bytes(flipped((folder / "000016.sst").read_bytes(), 72)),
}


def rewrite(manifest: Path, more: bytes) -> None:
    manifest.write_bytes(write_records([*read_records(manifest.read_bytes()), more]))


@pytest.mark.parametrize("damage", DAMAGE)
def test_open_of_damaged_folder_is_rejected_and_changes_nothing(sample: Path, damage: str) -> None:
    folder = sample / MESSAGE
    DAMAGE[damage](folder)
    before = file_contents(folder)
    with pytest.raises(StoreError) as caught:
        LevelDBStore(sample)
    assert str(folder) in caught.value.message
    assert caught.value.hint
    assert file_contents(folder) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 845), cut=st.booleans())
def test_manifest_rejected_by_repair_is_rejected_by_leveldb(sample: Path, at: int, cut: bool) -> None:
    """Check also that an accepted manifest leaves rows readable."""
    path = sample.parent / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    folder = shutil.copytree(sample, path) / MESSAGE
    manifest = current_manifest(folder)
    if cut:
        os.truncate(manifest, at)
    else:
        flip(manifest, at)
    untouched = shutil.copytree(folder, path / "untouched")
    try:
        repair(folder)
    except StoreError:
        with pytest.raises(plyvel.Error):
            raw_rows(untouched)
    else:
        assert raw_rows(folder)


def write_stale_table(folder: Path, table: str) -> None:
    (folder / table).write_bytes(b"unfinished" * 100)


def test_duplicate_table_file_is_chosen_by_the_manifest(sample: Path) -> None:
    with LevelDBStore(shutil.copytree(sample, sample.parent / "whole")) as store:
        expected = every(store.message, MESSAGES)
    folder = sample / MESSAGE
    write_stale_table(folder, "000016.ldb")
    (folder / "000005.sst").rename(folder / "000005.ldb")
    write_stale_table(folder, "000005.sst")
    with LevelDBStore(sample) as store:
        assert every(store.message, MESSAGES) == expected
    assert not list(folder.glob("*.ldb"))


def test_identical_duplicate_table_file_is_removed(sample: Path) -> None:
    folder = sample / MESSAGE
    shutil.copy(folder / "000016.sst", folder / "000016.ldb")
    with LevelDBStore(sample) as store:
        assert len(every(store.message, MESSAGES)) == 9897
    assert not list(folder.glob("*.ldb"))


def test_file_number_of_unfinished_table_is_not_reused(sample: Path) -> None:
    """Check that Java cannot read a write_stale_table table next to a new table of the same number."""
    folder = sample / MESSAGE
    with LevelDBStore(sample) as store:
        store.message.put([(b"new", MessageValue(None, b"in the log"))])
        expected = every(store.message, MESSAGES)
    following = max(int(file.stem) for file in folder.glob("*.log")) + 1
    for number in range(following, following + 9):
        write_stale_table(folder, f"{number:06d}.sst")
    with LevelDBStore(sample) as store:
        numbers = [file.stem for file in folder.iterdir() if file.suffix in (".ldb", ".sst")]
        assert len(numbers) == len(set(numbers))
        assert every(store.message, MESSAGES) == expected


def test_prepare_of_folder_in_use_changes_nothing(sample: Path, hold: Callable[[Path], object]) -> None:
    hold(sample / MESSAGE)
    before = file_contents(sample / MESSAGE)
    with pytest.raises(StoreBusy):
        prepare(sample / MESSAGE)
    assert file_contents(sample / MESSAGE) == before


@pytest.mark.parametrize("form", ["{0}\n{0}\n", "{0}", "{0}\r\n", "{0}\n\n"])
def test_malformed_current_file_hints_at_working_repair_command(sample: Path, form: str) -> None:
    folder = sample / MESSAGE
    name = current_manifest(folder).name
    (folder / "CURRENT").write_bytes(form.format(name).encode())
    with pytest.raises(StoreError) as caught:
        LevelDBStore(sample)
    assert "MANIFEST" in caught.value.message
    _, _, line = caught.value.hint.rpartition(": ")
    subprocess.run(line, shell=True, check=True)  # noqa: S602 as an operator types it
    with LevelDBStore(sample) as store:
        assert len(store.message.read(KEYS, b"", None, 100_000).items) == 9897


def test_current_naming_missing_manifest_hints_at_backup(sample: Path) -> None:
    folder = sample / MESSAGE
    (folder / "CURRENT").write_text("MANIFEST-000077\nMANIFEST-000077\n")
    with pytest.raises(StoreError) as caught:
        LevelDBStore(sample)
    assert "echo" not in caught.value.hint
    assert "Restore the store from a backup" in caught.value.hint


def test_prepare_of_large_manifest_uses_little_memory(large: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(large, tmp_path / "database")
    manifest = current_manifest(folder)
    records = read_records(manifest.read_bytes())
    # As many new and deleted tables as after a year of compactions.
    gone = pack_edit([Field(NEW_TABLE, (6, 999_999, 1), (bytes(500), bytes(500)))])
    back = pack_edit([Field(DELETED_TABLE, (6, 999_999))])
    manifest.write_bytes(write_records([*records, *[gone, back] * 9_000]))
    size = manifest.stat().st_size
    tracemalloc.start()
    try:
        prepare(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 8 << 20
    assert peak < size // 4
    assert raw_rows(folder) == {b"%0200d" % number: b"%d" % number for number in range(TABLES)}
