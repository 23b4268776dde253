"""A record of Tephra's transaction log: the changes of one transaction, as bytes.

An edit has no length field; it is read field by field, so a truncated record is always the last of the stream. The
first byte is the version of the layout; each of the four versions appends fields.
``docs/reference/formats/tephra.md`` has the layout.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from tms_core.errors import FormatError
from tms_core.transaction.codec.varint import CHUNK_BYTES, Readable
from tms_core.transaction.model import TransactionType

#: The version of written edits, which is their first byte. Newer versions are lower; versions -1 to -4 are readable.
NEWEST_EDIT_VERSION = -4

_BYTE = struct.Struct(">b")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_HEAD = struct.Struct(">qiqqb")
#: The fields before the lists of changes, truncated ids and checkpoints, each including the length of the list.
_BEFORE_CHANGES, _BEFORE_TRUNCATED, _BEFORE_CHECKPOINTS = map(struct.Struct, (">bqiqqbi", ">qii", ">qqi"))
#: The encoding of a missing type and of a missing list of checkpoints.
_NULL = -1

_Kind = TypeVar("_Kind", bound=IntEnum)


class EditState(IntEnum):
    """The kind of a change, with the values of the file."""

    IN_PROGRESS = 0
    COMMITTING = 1
    COMMITTED = 2
    INVALID = 3
    ABORTED = 4
    MOVE_WATERMARK = 5
    TRUNCATE_INVALID_TX = 6
    CHECKPOINT = 7


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the manager's state (Tephra's ``TransactionEdit``). The kind of change determines its fields.

    Attributes:
        write_pointer: the transaction, or the checkpoint; 0 for TRUNCATE_INVALID_TX.
        state: the change.
        expiration_ms: the time of its timeout (IN_PROGRESS).
        commit_pointer: the pointer of its change set (COMMITTED).
        can_commit: whether its conflicts were checked (COMMITTED).
        changes: its change keys (COMMITTING, COMMITTED).
        visibility_upper_bound: its view at the start (IN_PROGRESS).
        type: short or long (IN_PROGRESS, ABORTED); None: not in the edit.
        truncated: ids taken off the invalid list (TRUNCATE_INVALID_TX).
        truncated_before_ms: older ids were removed from the invalid list; 0: ``truncated`` says which.
        parent_write_pointer: the transaction of the checkpoint (CHECKPOINT).
        checkpoints: its checkpoints, if the client named them (ABORTED).
    """

    write_pointer: int
    state: EditState
    expiration_ms: int = 0
    commit_pointer: int = 0
    can_commit: bool = False
    changes: frozenset[bytes] = frozenset()
    visibility_upper_bound: int = 0
    type: TransactionType | None = None
    truncated: frozenset[int] = frozenset()
    truncated_before_ms: int = 0
    parent_write_pointer: int = 0
    checkpoints: tuple[int, ...] | None = None


def decode_edit(data: bytes) -> Edit:
    """Decode an edit.

    Raises:
        FormatError: the data is not exactly one edit.
    """
    stream = io.BytesIO(data)
    try:
        edit = read_edit(stream)
    except EOFError as error:
        raise FormatError(f"an edit of {len(data)} bytes ends inside a field") from error
    if stream.tell() != len(data):
        raise FormatError(f"a record of {len(data)} bytes has an edit of {stream.tell()} bytes")
    return edit


def read_edit(stream: Readable) -> Edit:
    """Read one edit of any version from a stream.

    Raises:
        EOFError: the stream is truncated inside the edit.
        FormatError: the data is not an edit.
    """
    version = _read(stream, _BYTE)
    if not NEWEST_EDIT_VERSION <= version <= -1:
        raise FormatError(f"an edit of version {version}; versions -1 to {NEWEST_EDIT_VERSION} are known")
    write_pointer, state, expiration_ms, commit_pointer, can_commit = _HEAD.unpack(read_exactly(stream, _HEAD.size))
    changes = frozenset(read_exactly(stream, _read_count(stream)) for _ in range(_read_count(stream)))
    return Edit(
        write_pointer,
        _member(EditState, state),
        expiration_ms,
        commit_pointer,
        bool(can_commit),
        changes,
        visibility_upper_bound=_read(stream, _LONG) if version <= -2 else 0,
        type=_read_type(stream) if version <= -3 else None,
        truncated=frozenset(_read_longs(stream, _read_count(stream))) if version <= -3 else frozenset(),
        truncated_before_ms=_read(stream, _LONG) if version <= -3 else 0,
        parent_write_pointer=_read(stream, _LONG) if version <= -4 else 0,
        checkpoints=_read_checkpoints(stream) if version <= -4 else None,
    )


def encode_edit(edit: Edit) -> bytes:
    """Encode an edit in the newest version, with sets in ascending order (Tephra writes them in hash order)."""
    kind = _NULL if edit.type is None else edit.type
    checkpoints = _NULL if edit.checkpoints is None else len(edit.checkpoints)
    parts = [
        _BEFORE_CHANGES.pack(
            *(NEWEST_EDIT_VERSION, edit.write_pointer, edit.state, edit.expiration_ms, edit.commit_pointer),
            *(edit.can_commit, len(edit.changes)),
        )
    ]
    parts += [_INT.pack(len(key)) + key for key in sorted(edit.changes)]
    parts.append(_BEFORE_TRUNCATED.pack(edit.visibility_upper_bound, kind, len(edit.truncated)))
    parts += map(_LONG.pack, sorted(edit.truncated))
    parts.append(_BEFORE_CHECKPOINTS.pack(edit.truncated_before_ms, edit.parent_write_pointer, checkpoints))
    parts += map(_LONG.pack, edit.checkpoints or ())
    return b"".join(parts)


def read_exactly(stream: Readable, size: int) -> bytes:
    """Read exactly ``size`` bytes in pieces, so that a damaged size needs no more memory than the stream has bytes.

    Raises:
        EOFError: the stream has fewer bytes.
    """
    pieces: list[bytes] = []
    missing = size
    while missing:
        piece = stream.read(min(missing, CHUNK_BYTES))
        if not piece:
            raise EOFError(f"{missing} of {size} bytes are missing")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _read(stream: Readable, layout: struct.Struct) -> int:
    number: int = layout.unpack(read_exactly(stream, layout.size))[0]
    return number


def _read_count(stream: Readable, *, lowest: int = 0) -> int:
    count = _read(stream, _INT)
    if count < lowest:
        raise FormatError(f"an edit with a count of {count}")
    return count


def _read_longs(stream: Readable, count: int) -> tuple[int, ...]:
    return tuple(_read(stream, _LONG) for _ in range(count))


def _read_checkpoints(stream: Readable) -> tuple[int, ...] | None:
    count = _read_count(stream, lowest=_NULL)
    return None if count == _NULL else _read_longs(stream, count)


def _read_type(stream: Readable) -> TransactionType | None:
    ordinal = _read(stream, _INT)
    return None if ordinal == _NULL else _member(TransactionType, ordinal)


def _member(kind: type[_Kind], ordinal: int) -> _Kind:
    try:
        return kind(ordinal)
    except ValueError as error:
        raise FormatError(f"an edit with {kind.__name__} {ordinal}, which does not exist") from error
