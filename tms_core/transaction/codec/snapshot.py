"""The encoding of Tephra's snapshot files, versions 1 to 4.

A snapshot is read and written as a stream, because its list of invalid ids may be far larger than all other fields. In
memory, the list is an ``array`` of 8 bytes per id.

A cleaner needs only the first five fields. Tephra's coprocessors stop after them, so they do not detect later damage;
this module reads all fields. The format has no checksum. Layout: ``docs/reference/formats/tephra.md``, "Snapshots".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Protocol

from tms_core.errors import SnapshotError, UnsupportedSnapshotVersion
from tms_core.transaction.codec.varint import Readable, SnapshotReader, varint
from tms_core.transaction.model import InProgress, InProgressType, Snapshot, VisibilityState

#: The version that Tephra has written since 2015.
NEWEST_VERSION = 4
#: The number of invalid ids that are encoded at once; about 64 KiB.
_IDS_PER_WRITE = 8_000


class Writable(Protocol):
    """A target of bytes: a file."""

    def write(self, data: bytes, /) -> object:
        """Write all of ``data``."""
        ...


def read_snapshot(stream: Readable) -> Snapshot:
    """Read a whole snapshot. Ignore bytes after it, as Tephra does.

    Raises:
        TruncatedSnapshot: the stream is truncated inside the snapshot.
        UnsupportedSnapshotVersion: the version is not 1 to 4.
        SnapshotError: the bytes are not a snapshot.
    """
    reader = SnapshotReader(stream)
    visibility = _visibility(reader)
    reader.field = "committing change sets"
    committing = _change_sets(reader)
    reader.field = "committed change sets"
    return Snapshot(visibility, committing, _change_sets(reader))


def read_complete_visibility(stream: Readable) -> VisibilityState:
    """Read fields 1 to 5, which determine visibility, and all others to detect a truncation (invariant S14).

    Change sets are read and dropped one by one, so memory does not grow with them.

    Args:
        stream: positioned at the start of the snapshot. More may be read from it than is needed.

    Raises:
        TruncatedSnapshot: the stream is truncated inside the snapshot.
        UnsupportedSnapshotVersion: the version is not 1 to 4.
        SnapshotError: the bytes are not a snapshot.
    """
    reader = SnapshotReader(stream)
    visibility = _visibility(reader)
    for reader.field in ("committing change sets", "committed change sets"):
        for _ in reader.items():
            reader.varint()
            for _ in reader.items():
                reader.byte_string()
    return visibility


def write_snapshot(stream: Writable, snapshot: Snapshot, version: int = NEWEST_VERSION) -> None:
    """Write a snapshot, with ids and keys in ascending order (Tephra writes change sets in hash order).

    Args:
        stream: the target.
        snapshot: the snapshot. Versions 1 to 3 lose checkpoint lists, version 1 loses types.
        version: 1 to 4.

    Raises:
        UnsupportedSnapshotVersion: the version is not 1 to 4.
        SnapshotError: an entry of a snapshot of version 1 has no type, but ``version`` stores types.
    """
    _check(version)
    state = snapshot.visibility
    stream.write(b"".join(map(varint, (version, state.timestamp_ms, state.read_pointer, state.write_pointer))))
    _write_invalid(stream, state.invalid)
    stream.write(_block([_entry(entry, version) for entry in state.in_progress]))
    for change_sets in (snapshot.committing, snapshot.committed):
        stream.write(_block([varint(key) + _keys(change_sets[key]) for key in sorted(change_sets)]))


# --- reading ---------------------------------------------------------------------------------------------------------


def _visibility(reader: SnapshotReader) -> VisibilityState:
    version = reader.varint()
    _check(version)
    reader.field = "timestamp"
    timestamp_ms = reader.varint()
    reader.field = "read pointer"
    read_pointer = reader.varint()
    reader.field = "write pointer"
    write_pointer = reader.varint()
    reader.field = "list of invalid ids"
    invalid = reader.varint_list()
    reader.field = "list of transactions in progress"
    # If a pointer has several entries, the last entry counts, as in Tephra's map.
    entries = {entry.write_pointer: entry for entry in _in_progress(reader, version)}
    return VisibilityState(timestamp_ms, read_pointer, write_pointer, invalid, tuple(entries.values()))


def _in_progress(reader: SnapshotReader, version: int) -> Iterator[InProgress]:
    for _ in reader.items():
        yield InProgress(
            write_pointer=reader.varint(),
            expiration_ms=reader.varint(),
            visibility_upper_bound=reader.varint(),
            type=_type(reader) if version >= 2 else None,
            checkpoints=tuple(reader.varint_list()) if version >= 4 else (),
        )


def _type(reader: SnapshotReader) -> InProgressType:
    ordinal = reader.varint()
    try:
        return InProgressType(ordinal)
    except ValueError as error:
        raise reader.corrupt(f"type {ordinal}, which does not exist") from error


def _change_sets(reader: SnapshotReader) -> dict[int, frozenset[bytes]]:
    return {reader.varint(): frozenset(reader.byte_string() for _ in reader.items()) for _ in reader.items()}


# --- writing ---------------------------------------------------------------------------------------------------------


def _check(version: int) -> None:
    if not 1 <= version <= NEWEST_VERSION:
        raise UnsupportedSnapshotVersion(
            f"the snapshot has version {version}; versions 1 to {NEWEST_VERSION} are known.",
            "Check that the file is a Tephra snapshot.",
        )


def _write_invalid(stream: Writable, invalid: array[int]) -> None:
    """Write the invalid list as one block, in pieces, so that its encoding is never completely in memory."""
    if invalid:
        stream.write(varint(len(invalid)))
    for start in range(0, len(invalid), _IDS_PER_WRITE):
        stream.write(b"".join(map(varint, invalid[start : start + _IDS_PER_WRITE])))
    stream.write(varint(0))


def _entry(entry: InProgress, version: int) -> bytes:
    parts = [varint(entry.write_pointer), varint(entry.expiration_ms), varint(entry.visibility_upper_bound)]
    if version >= 2:
        if entry.type is None:
            raise SnapshotError(
                f"transaction {entry.write_pointer} has no type, which snapshots of version {version} store.",
                "Decide it, or write version 1.",
            )
        parts.append(varint(entry.type))
    if version >= 4:
        parts.append(_block([varint(pointer) for pointer in entry.checkpoints]))
    return b"".join(parts)


def _keys(keys: Iterable[bytes]) -> bytes:
    return _block([varint(len(key)) + key for key in sorted(keys)])


def _block(items: list[bytes]) -> bytes:
    """Return a block list: at most one block, then the empty block."""
    return (varint(len(items)) if items else b"") + b"".join(items) + varint(0)
