"""Snapshot files: Tephra's bytes in both directions, and every kind of damage."""

from __future__ import annotations

import hashlib
import io
import re
from array import array
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transaction.vectors import BASE, TEPHRA, load, names, snapshot_of, state_of
from tms_core.errors import SnapshotError, UnsupportedSnapshotVersion
from tms_core.transaction.codec.snapshot import read_complete_visibility, read_snapshot, write_snapshot
from tms_core.transaction.codec.varint import CHUNK_BYTES, TruncatedSnapshot, varint
from tms_core.transaction.model import InProgress, InProgressType, Snapshot, VisibilityState

LONGS = st.integers(-(2**63), 2**63 - 1)
CHANGE_SETS = st.dictionaries(LONGS, st.frozensets(st.binary(max_size=200), max_size=5), max_size=4)
#: Head of a version 4 snapshot, up to its list of invalid ids.
HEAD = varint(4) + varint(5) + varint(6) + varint(7)


class Dribble:
    """A stream that returns ``sizes`` bytes at a time, in turn, and records the requested sizes."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._stream = io.BytesIO(data)
        self._sizes = sizes
        self.reads: list[int] = []

    def read(self, size: int, /) -> bytes:
        self.reads.append(size)
        return self._stream.read(min(size, self._sizes[len(self.reads) % len(self._sizes)]))


def vector(path: str) -> bytes:
    return (TEPHRA / f"{path}.bin").read_bytes()


def encoded(snapshot: Snapshot, version: int = 4) -> bytes:
    stream = io.BytesIO()
    write_snapshot(stream, snapshot, version)
    return stream.getvalue()


def with_invalid(ids: list[int]) -> VisibilityState:
    return VisibilityState(5, 6, 7, array("q", ids))


@st.composite
def snapshots(draw: st.DrawFn, version: int) -> Snapshot:
    entries = st.builds(
        InProgress,
        LONGS,
        LONGS,
        LONGS,
        st.sampled_from(InProgressType) if version >= 2 else st.none(),
        st.lists(LONGS, max_size=3).map(tuple) if version >= 4 else st.just(()),
    )
    in_progress = draw(st.lists(entries, max_size=4, unique_by=lambda entry: entry.write_pointer))
    invalid = array("q", draw(st.lists(LONGS, max_size=20)))
    visibility = VisibilityState(draw(LONGS), draw(LONGS), draw(LONGS), invalid, tuple(in_progress))
    return Snapshot(visibility, draw(CHANGE_SETS), draw(CHANGE_SETS))


@pytest.mark.parametrize("name", names("snapshots"))
def test_read_of_a_tephra_snapshot_equals_its_description(name: str) -> None:
    expected, data = load(f"snapshots/{name}.json"), vector(f"snapshots/{name}")
    assert hashlib.sha256(data).hexdigest() == expected["_file"]["sha256"]
    assert read_snapshot(io.BytesIO(data)) == snapshot_of(expected)
    assert read_complete_visibility(io.BytesIO(data)) == state_of(expected)


@pytest.mark.parametrize("name", [name for name in names("snapshots") if "changesets" not in name])
def test_written_snapshot_has_the_bytes_of_tephra(name: str) -> None:
    expected = load(f"snapshots/{name}.json")
    assert encoded(snapshot_of(expected), expected["version"]) == vector(f"snapshots/{name}")


@pytest.mark.parametrize("name", names("snapshots", "*changesets"))
def test_change_sets_differ_from_tephras_in_order_only(name: str) -> None:
    expected, data = load(f"snapshots/{name}.json"), vector(f"snapshots/{name}")
    ours = encoded(snapshot_of(expected), expected["version"])
    assert sorted(ours) == sorted(data)
    assert read_snapshot(io.BytesIO(ours)) == read_snapshot(io.BytesIO(data))


@pytest.mark.parametrize("name", names("snapshots-odd", "ok-*"))
def test_read_of_an_odd_snapshot_equals_tephra(name: str) -> None:
    expected = load(f"snapshots-odd/{name}.json")
    data = vector(f"snapshots-odd/{name}")
    assert read_snapshot(io.BytesIO(data)) == snapshot_of(expected["full"])
    assert read_complete_visibility(io.BytesIO(data)) == state_of(expected["visibilityState"])


def test_unsorted_list_of_tephra_0_11_is_all_invalid() -> None:
    expected = load("snapshots-odd/ok-v4-unsorted-invalid.json")["javaIsExcludedPerInvalidId"]
    state = read_complete_visibility(io.BytesIO(vector("snapshots-odd/ok-v4-unsorted-invalid")))
    assert list(expected.values()).count(True) == 1
    assert all(state.is_invalid(int(pointer)) for pointer in expected)


@pytest.mark.parametrize("name", [*names("snapshots-odd", "bad-*"), *names("snapshots-odd", "visonly-*")])
def test_snapshot_damaged_at_any_place_is_rejected(name: str) -> None:
    data = vector(f"snapshots-odd/{name}")
    kind = UnsupportedSnapshotVersion if "version" in name else SnapshotError
    for read in (read_complete_visibility, read_snapshot):
        with pytest.raises(kind):
            read(io.BytesIO(data))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "00"),
        (-1, "01"),
        (1, "02"),
        (63, "7e"),
        (-64, "7f"),
        (64, "8001"),
        (-65, "8101"),
        (8192, "808001"),
        (1_600_000_000_000, "8080f4f6905d"),
        (BASE, "8080808abbe1abb42c"),
        (2**63 - 1, "feffffffffffffffff01"),
        (-(2**63), "ffffffffffffffffff01"),
    ],
)
def test_varint_is_zig_zag_in_groups_of_seven_bits(value: int, expected: str) -> None:
    assert varint(value).hex() == expected


@given(st.data(), st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_any_snapshot_is_read_as_written_in_any_pieces(data: st.DataObject, version: int, sizes: list[int]) -> None:
    snapshot = data.draw(snapshots(version))
    written = encoded(snapshot, version)
    assert read_snapshot(Dribble(written, sizes)) == snapshot
    assert read_complete_visibility(Dribble(written, sizes)) == snapshot.visibility


@given(st.binary(max_size=30), st.integers(0, 162), st.integers(0, 30))
def test_damaged_snapshot_is_a_snapshot_error(damage: bytes, at: int, length: int) -> None:
    whole = vector("snapshots/v4-changesets")
    for read in (read_complete_visibility, read_snapshot):
        with suppress(SnapshotError):
            read(io.BytesIO(whole[:at] + damage + whole[at + length :]))


@pytest.mark.parametrize(
    "ids",
    [
        [BASE + 7 * n for n in range(511)],
        [BASE + 7 * n for n in range(512)],
        [BASE + 7 * n for n in range(5 * 512 + 3)],
        [0, *(BASE + 7 * n for n in range(2000))],
        [*(BASE + 7 * n for n in range(700)), 2**62, *(2**62 + 2**50 * n for n in range(1, 700))],
        [-BASE, *(BASE + 7 * n for n in range(600))],
        [-BASE + n for n in range(1100)],
        [2**55 + 2**51 * n for n in range(2040)],
        [2**55, *range(2**62 - 1024, 2**62)],
        [2**55 - 1, *range(2**62 - 1024, 2**62)],
        list(range(-3000, 3000)),
    ],
)
@pytest.mark.parametrize("size", [7, CHUNK_BYTES])
def test_long_lists_of_ids_of_all_lengths_are_read_whole(ids: list[int], size: int) -> None:
    data = encoded(Snapshot(with_invalid(ids)))
    assert list(read_complete_visibility(Dribble(data, [size])).invalid) == ids


def test_read_of_a_large_snapshot_uses_chunks() -> None:
    data = encoded(Snapshot(with_invalid([BASE + n for n in range(50_000)])))
    stream = Dribble(data, [CHUNK_BYTES])
    read_complete_visibility(stream)
    assert len(stream.reads) > len(data) // CHUNK_BYTES
    assert set(stream.reads) == {CHUNK_BYTES}


def test_write_of_a_large_list_uses_chunks() -> None:
    sizes: list[int] = []

    class Sink:
        def write(self, data: bytes, /) -> None:
            sizes.append(len(data))

    write_snapshot(Sink(), Snapshot(with_invalid([BASE + n for n in range(50_000)])))
    assert max(sizes) <= 2 * CHUNK_BYTES


def test_pointer_that_is_listed_twice_has_its_last_entry() -> None:
    entries = (InProgress(9, 1, 1, InProgressType.SHORT), InProgress(9, 2, 2, InProgressType.LONG))
    data = encoded(Snapshot(VisibilityState(5, 6, 7, in_progress=entries)))
    assert read_complete_visibility(io.BytesIO(data)).in_progress == entries[1:]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_snapshot_cut_anywhere_is_truncated(version: int) -> None:
    data = vector(f"snapshots/v{version}-changesets")
    for length in range(len(data)):
        with pytest.raises(TruncatedSnapshot) as caught:
            read_snapshot(io.BytesIO(data[:length]))
        assert caught.value.size_bytes == length


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "the snapshot is empty."),
        (3, "the snapshot ends inside its timestamp, after 3 bytes."),
        (8, "the snapshot ends inside its read pointer, after 8 bytes."),
        (20, "the snapshot ends inside its write pointer, after 20 bytes."),
        (30, "the snapshot ends inside its list of invalid ids, after 30 bytes."),
        (50, "the snapshot ends inside its list of transactions in progress, after 50 bytes."),
        (110, "the snapshot ends inside its committing change sets, after 110 bytes."),
        (160, "the snapshot ends inside its committed change sets, after 160 bytes."),
    ],
)
def test_truncated_snapshot_error_names_the_place(length: int, message: str) -> None:
    data = vector("snapshots/v4-changesets")[:length]
    with pytest.raises(TruncatedSnapshot) as caught:
        read_snapshot(Dribble(data, [9]))
    assert caught.value.message == message


LIST = "invalid ids, .*byte"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (varint(-2), f"count of -2, .*{LIST} 5"),
        (varint(1) + b"\x80" * 10 + b"\x00", f"64 bits, .*{LIST} 16"),
        (varint(1) + b"\x80" * 10, f"64 bits, .*{LIST} 15"),
        (varint(1) + b"\xff" * 9 + b"\x02", f"64 bits, .*{LIST} 15"),
        (varint(1) + b"\xff" * 9 + b"\x7f", f"64 bits, .*{LIST} 15"),
        (bytes(1) + varint(1) + bytes(3) + varint(3), "type 3, .*list of transactions"),
        (bytes(2) + varint(1) + varint(9) + varint(1) + varint(-1), "length of -1, .*committing change sets"),
    ],
)
def test_bytes_of_no_snapshot_are_rejected_with_their_place(body: bytes, message: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(io.BytesIO(HEAD + body))
    assert re.search(message, caught.value.message)


def test_varint_with_the_longest_padding_is_read() -> None:
    padded = b"\x88" + b"\x80" * 8 + b"\x00"
    assert list(read_complete_visibility(io.BytesIO(HEAD + varint(1) + padded + bytes(4))).invalid) == [4]


@pytest.mark.parametrize("count", [2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("before", [b"", bytes(1), bytes(2), bytes(3), bytes(2) + varint(1) + varint(9)])
def test_read_of_an_absurd_count_allocates_no_memory(count: int, before: bytes) -> None:
    with pytest.raises(TruncatedSnapshot):
        read_snapshot(io.BytesIO(HEAD + before + varint(count) + bytes(1)))
    with pytest.raises(TruncatedSnapshot):
        read_complete_visibility(io.BytesIO(HEAD + varint(count) + varint(BASE) * 600))


@pytest.mark.parametrize("version", [-1, 0, 5])
def test_unknown_version_is_rejected(version: int) -> None:
    with pytest.raises(UnsupportedSnapshotVersion, match=f"version {version}"):
        write_snapshot(io.BytesIO(), Snapshot(with_invalid([])), version)
    with pytest.raises(UnsupportedSnapshotVersion, match=f"version {version}"):
        read_complete_visibility(io.BytesIO(varint(version)))


def test_entry_without_a_type_is_written_only_in_version_1() -> None:
    snapshot = Snapshot(VisibilityState(5, 6, 7, in_progress=(InProgress(9, 1, 1, None),)))
    assert read_snapshot(io.BytesIO(encoded(snapshot, 1))) == snapshot
    with pytest.raises(SnapshotError, match=r"transaction 9 .*type"):
        encoded(snapshot, 2)
