from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables.records import read_records, write_records
from tms_core.errors import FormatError
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.log import (
    BLOCK_BYTES,
    DELETED_TABLE,
    NEW_TABLE,
    NEXT_FILE,
    Field,
    Version,
    masked_crc,
    pack_edit,
    parse_edit,
)

NUMBERS = st.integers(0, 2**64 - 1)
KEYS = st.binary(max_size=40)
FIELDS = st.one_of(
    st.builds(Field, st.just(1), st.just(()), st.tuples(KEYS)),
    st.builds(Field, st.sampled_from([2, 3, 4, 9]), st.tuples(NUMBERS), st.just(())),
    st.builds(Field, st.just(5), st.tuples(NUMBERS), st.tuples(KEYS)),
    st.builds(Field, st.just(6), st.tuples(NUMBERS, NUMBERS), st.just(())),
    st.builds(Field, st.just(7), st.tuples(NUMBERS, NUMBERS, NUMBERS), st.tuples(KEYS, KEYS)),
)
# Sizes with which a record just fits into a block, or leaves less space than a header.
SIZES = st.one_of(st.integers(0, 200), st.integers(BLOCK_BYTES - 30, BLOCK_BYTES + 30), st.just(3 * BLOCK_BYTES))
RECORDS = st.lists(SIZES.map(lambda size: bytes(index % 251 for index in range(size))), max_size=6)


@pytest.mark.parametrize(("data", "castagnoli"), [(b"123456789", 0xE3069283), (b"", 0)])
def test_masked_crc_matches_masked_castagnoli_value(data: bytes, castagnoli: int) -> None:
    turned = castagnoli >> 15 | (castagnoli & 0x7FFF) << 17
    assert masked_crc(data) == (turned + 0xA282EAD8) % 2**32


@given(edit=st.lists(FIELDS, max_size=8))
def test_version_edit_round_trips(edit: list[Field]) -> None:
    assert parse_edit(pack_edit(edit)) == edit


@given(records=RECORDS)
def test_records_round_trip(records: list[bytes]) -> None:
    assert read_records(write_records(records)) == records


@given(records=RECORDS, padding=st.integers(0, 2 * BLOCK_BYTES))
def test_zero_padding_of_a_java_crash_adds_no_records(records: list[bytes], padding: int) -> None:
    assert read_records(write_records(records) + bytes(padding)) == records


@given(records=RECORDS.filter(bool), data=st.data())
def test_torn_end_keeps_complete_records(records: list[bytes], data: st.DataObject) -> None:
    """Check that a crash loses at most the last record and causes no error, as in LevelDB."""
    whole, last = write_records(records), write_records(records[:-1])
    cut = data.draw(st.integers(len(last), len(whole) - 1))
    # After a cut at the end of a block, LevelDB considers a fragment that is too long damage.
    if cut % BLOCK_BYTES:
        assert read_records(whole[:cut]) == records[:-1]


@pytest.mark.parametrize("table", ["system.tms.meta", "system.tms.message", "system.tms.payload"])
def test_manifest_of_java_round_trips(sample: Path, table: str) -> None:
    data = next((sample / table).glob("MANIFEST-*")).read_bytes()
    records = read_records(data)
    assert write_records(records) == data
    assert [pack_edit(parse_edit(record)) for record in records] == records


def test_manifest_of_several_blocks_round_trips(tmp_path: Path) -> None:
    database = plyvel.DB(str(tmp_path), create_if_missing=True)
    for number in range(200):
        key = b"%0200d" % number
        database.put(key, b"")
        database.compact_range(start=key, stop=key)
    data = next(tmp_path.glob("MANIFEST-*")).read_bytes()
    database.close()
    assert len(data) > 2 * BLOCK_BYTES
    records = read_records(data)
    assert write_records(records) == data
    edits = [parse_edit(record) for record in records]
    assert [pack_edit(edit) for edit in edits] == records
    sizes = {int(table.stem): table.stat().st_size for table in tmp_path.glob("*.ldb")}
    assert live(edits) == sizes
    assert len(sizes) == 200


def live(edits: Iterable[Sequence[Field]]) -> dict[int, int]:
    version = Version()
    for edit in edits:
        version.apply(edit)
    return version.live


def test_moved_table_is_live_only_on_its_new_level() -> None:
    added = Field(NEW_TABLE, (0, 5, 100), (b"a", b"b"))
    moved = [Field(NEW_TABLE, (1, 5, 100), (b"a", b"b")), Field(DELETED_TABLE, (0, 5))]
    assert live([[added], moved]) == {5: 100}
    assert live([[added], moved, [Field(DELETED_TABLE, (1, 5))]]) == {}
    assert live([[added], [Field(DELETED_TABLE, (0, 5)), added]]) == {5: 100}


@pytest.mark.parametrize(
    "record",
    [
        b"\x08",  # an unknown field
        b"\x03",  # a missing number
        b"\x03\x80",  # an unfinished number
        b"\x03" + b"\x80" * 10 + b"\x01",  # more than 64 bits
        b"\x01\x05abcd",  # a short string
        pack_edit([Field(NEW_TABLE, (0, 5, 100), (b"a", b"b"))])[:-1],
    ],
)
def test_damaged_version_edit_is_rejected(record: bytes) -> None:
    with pytest.raises(FormatError):
        parse_edit(pack_edit([Field(NEXT_FILE, (7,))]) + record)


def fragments(*sizes_and_kinds: tuple[int, int]) -> bytes:
    """Return fragments with correct checksums in any order of types."""
    out = b""
    for size, kind in sizes_and_kinds:
        whole = write_records([bytes(size)])
        body = bytes([kind]) + bytes(size)
        out += masked_crc(body).to_bytes(4, "little") + whole[4:6] + body
    return out


FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (fragments((5, MIDDLE)), "no start"),
        (fragments((5, LAST)), "no start"),
        (fragments((5, FIRST), (5, FULL)), "no end"),
        (fragments((5, FIRST), (5, FIRST)), "no end"),
        (fragments((5, FIRST)) + bytes(40), "no end"),
        (fragments((5, 9)), "unknown kind 9"),
        (fragments((5, FULL), (5, FULL)).replace(bytes(5), b"\x01" * 5, 1), "checksum"),
        (write_records([bytes(10)])[:4] + b"\xff\xff\x01" + bytes(BLOCK_BYTES - 7), " block"),
    ],
)
def test_damage_before_the_end_is_rejected(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_records(data)


def test_incomplete_record_is_skipped() -> None:
    assert read_records(fragments((5, FULL), (5, FIRST), (5, MIDDLE))) == [bytes(5)]
    assert read_records(fragments((5, FIRST), (6, MIDDLE), (7, LAST))) == [bytes(18)]
