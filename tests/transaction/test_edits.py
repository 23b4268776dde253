"""Log records: Tephra's own bytes both ways, older layouts, and damage."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transaction.vectors import BASE, TIME_MS, load
from tms_core.errors import FormatError
from tms_core.transaction.codec.edits import Edit, EditState, decode_edit, encode_edit, read_edit
from tms_core.transaction.codec.varint import CHUNK_BYTES
from tms_core.transaction.model import TransactionType

VECTORS = load("txlog/edits-v4.json")
LONGS = st.integers(-(2**63), 2**63 - 1)
#: The edits of the vectors, in order.
EDITS = [
    Edit(BASE + 1, EditState.IN_PROGRESS, TIME_MS + 30_000, visibility_upper_bound=BASE, type=TransactionType.SHORT),
    Edit(BASE + 2, EditState.IN_PROGRESS, TIME_MS + 86_400_000, visibility_upper_bound=BASE, type=TransactionType.LONG),
    Edit(BASE + 3, EditState.CHECKPOINT, parent_write_pointer=BASE + 1),
    Edit(BASE + 1, EditState.COMMITTING, changes=frozenset({b"k1"})),
    Edit(BASE + 1, EditState.COMMITTED, commit_pointer=BASE + 4, can_commit=True, changes=frozenset({b"k1"})),
    Edit(BASE + 2, EditState.ABORTED, type=TransactionType.LONG, checkpoints=(BASE + 5,)),
    Edit(BASE + 6, EditState.ABORTED, type=TransactionType.SHORT, checkpoints=()),
    Edit(BASE + 7, EditState.INVALID),
    Edit(0, EditState.TRUNCATE_INVALID_TX, truncated=frozenset({BASE + 7})),
    Edit(0, EditState.TRUNCATE_INVALID_TX, truncated_before_ms=TIME_MS),
    Edit(BASE + 8, EditState.COMMITTED, commit_pointer=BASE + 9),
    Edit(BASE + 10, EditState.MOVE_WATERMARK),
]
PAIRS = list(zip(VECTORS, EDITS, strict=True))
STARTED = bytes.fromhex(VECTORS[0]["hex"])


def test_vectors_cover_each_edit_state() -> None:
    assert {edit.state for edit in EDITS} == set(EditState)
    assert len(VECTORS) == len(EDITS)


@pytest.mark.parametrize(("vector", "edit"), PAIRS)
def test_edit_is_read_and_written_with_the_bytes_of_tephra(vector: dict[str, str], edit: Edit) -> None:
    data = bytes.fromhex(vector["hex"])
    assert decode_edit(data) == edit
    assert encode_edit(edit) == data
    # The values are equal to those that Tephra printed.
    printed = dict(re.findall(r"(\w+)=(\[.*?\]|[^,}]*)", vector["text"]))
    assert printed["state"].replace("INPROGRESS", "IN_PROGRESS") == edit.state.name
    assert printed["writePointer"] == str(edit.write_pointer)
    assert printed["canCommit"] == str(edit.can_commit).lower()
    assert printed["type"] == ("null" if edit.type is None else edit.type.name)
    assert printed["checkpointPointers"] == ("null" if edit.checkpoints is None else str(list(edit.checkpoints)))


@pytest.mark.parametrize(
    ("version", "length", "left_out"),
    [(-3, 58, {}), (-2, 42, {"type": None}), (-1, 34, {"type": None, "visibility_upper_bound": 0})],
)
def test_decode_of_an_older_layout_omits_fields_it_lacks(
    version: int, length: int, left_out: dict[str, int | None]
) -> None:
    edit = decode_edit(version.to_bytes(1, "big", signed=True) + STARTED[1:length])
    kept = {"visibility_upper_bound": BASE, "type": TransactionType.SHORT} | left_out
    assert edit == Edit(BASE + 1, EditState.IN_PROGRESS, TIME_MS + 30_000, **kept)  # type: ignore[arg-type]


@given(
    st.builds(
        Edit,
        LONGS,
        st.sampled_from(EditState),
        LONGS,
        LONGS,
        st.booleans(),
        st.frozensets(st.binary(max_size=20), max_size=3),
        LONGS,
        st.none() | st.sampled_from(TransactionType),
        st.frozensets(LONGS, max_size=3),
        LONGS,
        LONGS,
        st.none() | st.lists(LONGS, max_size=3).map(tuple),
    )
)
def test_any_edit_is_decoded_as_encoded(edit: Edit) -> None:
    assert decode_edit(encode_edit(edit)) == edit


def test_decode_of_an_edit_with_extra_bytes_is_rejected() -> None:
    with pytest.raises(FormatError, match=r"71 .* 70"):
        decode_edit(STARTED + b"\x00")


@pytest.mark.parametrize(
    ("at", "damage", "message"),
    [
        (0, b"\x00", "version 0"),
        (0, b"\xfb", "version -5"),
        (9, b"\x00\x00\x00\x08", "EditState 8"),
        (30, b"\xff\xff\xff\xff", "count of -1"),
        (42, b"\x00\x00\x00\x02", "TransactionType 2"),
        (46, b"\xff\xff\xff\xff", "count of -1"),
        (66, b"\xff\xff\xff\xfe", "count of -2"),
    ],
)
def test_decode_of_a_damaged_edit_names_the_damage(at: int, damage: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_edit(STARTED[:at] + damage + STARTED[at + len(damage) :])


def test_read_of_an_absurd_length_allocates_no_memory() -> None:
    reads: list[int] = []

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            reads.append(size or 0)
            return super().read(size)

    with pytest.raises(EOFError):
        read_edit(Stream(STARTED[:30] + b"\x00\x00\x00\x01\x7f\xff\xff\xff" + bytes(100)))
    assert max(reads) == CHUNK_BYTES
