"""Damaged and torn logs: the difference at every byte and bit."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables.records import file_contents, flip, flipped, read_records, write_records
from tests.tables.test_leveldb_codec import FIRST, FULL, LAST, MIDDLE, RECORDS, fragments
from tms_core.errors import StoreError
from tms_core.tables.base import KEYS, MessageValue, TableName
from tms_core.tables.leveldb.clone import clone
from tms_core.tables.leveldb.layout import FOLDERS
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.log import BLOCK_BYTES, find_damage
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.leveldb.store import LevelDBStore, release

MIB = 1 << 20
ROWS = 3000


@given(records=RECORDS, padding=st.sampled_from([0, 6, 7, BLOCK_BYTES, MIB]))
def test_written_records_have_no_damage(records: list[bytes], padding: int) -> None:
    assert find_damage(write_records(records) + bytes(padding)) is None


@given(records=RECORDS, share=st.floats(0, 1), padding=st.sampled_from([0, 1, 7, BLOCK_BYTES, MIB]))
def test_truncated_log_has_no_damage(records: list[bytes], share: float, padding: int) -> None:
    whole = write_records(records)
    assert find_damage(whole[: round(share * len(whole))] + bytes(padding)) is None


@pytest.mark.parametrize(
    ("log", "offset", "words"),
    [
        (fragments((5, MIDDLE)), 0, "no start"),
        (fragments((5, LAST), (5, FULL)), 0, "no start"),
        (fragments((5, FIRST), (5, FULL)), 12, "no end"),
        (fragments((5, FIRST), (5, FIRST)), 12, "no end"),
        (fragments((5, FULL), (5, 9), (5, FULL)), 12, "unknown kind 9"),
        (fragments((5, FULL)) + bytes(BLOCK_BYTES - 12) + fragments((5, FULL)), 12, "zeros"),
    ],
)
def test_impossible_fragments_are_damage(log: bytes, offset: int, words: str) -> None:
    damage = find_damage(log)
    assert damage is not None
    assert damage.offset == offset
    assert words in damage.reason


@pytest.mark.parametrize("padding", [0, MIB - 2000])
def test_flipped_bit_is_damage_except_in_the_last_record(padding: int) -> None:
    rng = random.Random(4)
    records = [rng.randbytes(size) for size in (1, 0, 40, 7, 120, 30)]
    whole, last = write_records(records), len(write_records(records[:-1]))
    for bit in range(8 * len(whole)):
        log = flipped(whole, bit) + bytes(padding)
        damage = find_damage(log)
        assert (damage is None) is (bit // 8 >= last)
        if damage is not None:
            assert damage.offset <= bit // 8 < damage.stop <= len(log)


def key(number: int) -> bytes:
    return b"%08d" % number


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of an open store with its log; C++ LevelDB converts the log into a table on close."""
    place = tmp_path_factory.mktemp("crashed")
    with LevelDBStore(place / "open", create=True) as store:
        for number in range(ROWS):
            store.message.put([(key(number), MessageValue(None, b"row %d" % number))])
        return shutil.copytree(place / "open", place / "messaging")


@pytest.fixture
def folder(crashed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(crashed, tmp_path / "messaging")


def log_of(folder: Path) -> Path:
    [log] = (folder / FOLDERS["message"]).glob("*.log")
    return log


OPENERS: dict[str, Callable[[Path], object]] = {
    "to sweep": LevelDBStore,
    "to plan": lambda path: clone(path, path.with_name("clones")),
    "to release": release,
}


@pytest.mark.parametrize("opener", OPENERS)
def test_open_with_flipped_bit_is_rejected_and_changes_nothing(folder: Path, opener: str) -> None:
    log = log_of(folder)
    flip(log, log.stat().st_size // 2)
    before = log.read_bytes()
    with pytest.raises(StoreError) as refused:
        OPENERS[opener](folder)
    assert f"{log} is damaged at byte " in str(refused.value)
    assert "readable records follow" in str(refused.value)
    assert "CDAP" in str(refused.value)
    assert "Nothing was changed" in (refused.value.hint or "")
    assert log.read_bytes() == before
    flip(log, log.stat().st_size // 2)
    with LevelDBStore(folder) as store:
        assert len(store.message.read(KEYS, b"", None, 2 * ROWS).items) == ROWS


def test_leveldb_silently_loses_rows_after_flipped_bit(folder: Path) -> None:
    log = log_of(folder)
    flip(log, log.stat().st_size // 2)
    with closing(plyvel.DB(str(log.parent))) as database:
        assert 0 < ROWS - len(list(database.iterator(include_value=False))) < ROWS


@pytest.mark.parametrize("left", [1, 6, 7, 20])
def test_open_with_truncated_last_record_returns_all_others(folder: Path, left: int) -> None:
    log = log_of(folder)
    last = len(write_records(read_records(log.read_bytes())[:-1]))
    os.truncate(log, last + left)
    with LevelDBStore(folder) as store:
        assert store.message.read(KEYS, b"", None, 2 * ROWS).items == [key(number) for number in range(ROWS - 1)]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("table", FOLDERS)
def test_open_with_damaged_log_in_any_table_changes_no_file(folder: Path, opener: str, table: TableName) -> None:
    for name in FOLDERS.values():
        if name != FOLDERS["message"]:
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(folder / FOLDERS["message"], folder / name)
    [log] = (folder / FOLDERS[table]).glob("*.log")
    flip(log, log.stat().st_size // 2)

    before = file_contents(folder)
    with pytest.raises(StoreError, match="Nothing was changed"):
        OPENERS[opener](folder)
    assert file_contents(folder) == before


def test_open_with_damaged_log_of_side_table_changes_no_file(folder: Path) -> None:
    with closing(LevelDBSide(side_path(folder))) as side:
        side.put([(b"a", b"1")])
        side.put([(b"b", b"2")])
        shutil.copytree(side_path(folder), folder.with_name("taken"))
    shutil.rmtree(side_path(folder))
    folder.with_name("taken").rename(side_path(folder))
    [log] = side_path(folder).glob("*.log")
    flip(log, 20)
    before = file_contents(folder, side_path(folder))
    with pytest.raises(StoreError, match="Nothing was changed"):
        LevelDBStore(folder)
    assert file_contents(folder, side_path(folder)) == before
