"""The two layers of a MANIFEST, as pure bytes: log records, and the version edits in them.

LevelDB's libraries do not show their MANIFEST, and one of its numbers has to be read and put right
(:mod:`tms_core.tables.leveldb.manifest`). This is as much of the format as that takes: strict where LevelDB is strict,
so that what it would refuse we refuse, and forgiving at the one place where it forgives, a last record whose writer
died.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c

from tms_core.errors import FormatError

#: Logs and MANIFESTs are cut into blocks of this many bytes; a record's fragments never cross one.
BLOCK_BYTES = 32768
#: Masked CRC-32C of kind and data, length of the data, kind.
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
#: A fragment's kind by whether its record was begun before and goes on after.
_KINDS = {(False, False): FULL, (False, True): FIRST, (True, True): MIDDLE, (True, False): LAST}
#: What a crash of the Java library leaves: a file extended with zeros.
PADDING = 0

LOG, NEXT_FILE, SEQUENCE, DELETED_TABLE, NEW_TABLE, PREVIOUS_LOG = 2, 3, 4, 6, 7, 9
#: How many numbers, then how many byte strings, each field of a version edit has: comparator, log, next file, last
#: sequence, compaction pointer, deleted table, new table (level, number, bytes; first key, last key), previous log.
_SHAPES = {
    1: (0, 1),
    LOG: (1, 0),
    NEXT_FILE: (1, 0),
    SEQUENCE: (1, 0),
    5: (1, 1),
    DELETED_TABLE: (2, 0),
    NEW_TABLE: (3, 2),
    PREVIOUS_LOG: (1, 0),
}


class Field(NamedTuple):
    """One field of a version edit: a tag, its numbers, then its byte strings."""

    tag: int
    numbers: tuple[int, ...]
    strings: tuple[bytes, ...] = ()


def live_tables(edits: Sequence[Sequence[Field]]) -> dict[int, int]:
    """Replay version edits to the tables in force and their recorded sizes in bytes."""
    live: dict[tuple[int, int], int] = {}
    for edit in edits:
        # Within one edit deletions come first: a table that only moves is deleted on one level, new on another.
        for field in edit:
            if field.tag == DELETED_TABLE:
                live.pop((field.numbers[0], field.numbers[1]), None)
        for field in edit:
            if field.tag == NEW_TABLE:
                live[field.numbers[0], field.numbers[1]] = field.numbers[2]
    return {number: size for (_, number), size in live.items()}


def read_records(data: bytes) -> list[bytes]:
    """The records of a log or MANIFEST, as LevelDB reads them: one whose writer died half-way is left out at the end.

    Raises:
        FormatError: a checksum, a length or the order of fragments is wrong.
    """
    records: list[bytes] = []
    begun: list[bytes] = []
    for kind, fragment in _fragments(data):
        if (kind in (FULL, FIRST) and any(begun)) or (kind == PADDING and begun):
            raise FormatError("a record has no end")
        if kind in (MIDDLE, LAST) and not begun:
            raise FormatError("a record has no beginning")
        if kind in (FULL, FIRST):
            begun = []
        if kind in (FIRST, MIDDLE):
            begun.append(fragment)
        elif kind in (FULL, LAST):
            records.append(b"".join([*begun, fragment]))
            begun = []
        elif kind != PADDING:
            raise FormatError(f"a fragment is of the unknown kind {kind}")
    return records


def _fragments(data: bytes) -> Iterator[tuple[int, bytes]]:
    for block in (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)):
        offset = 0
        while offset + HEADER.size <= len(block):
            checksum, length, kind = HEADER.unpack_from(block, offset)
            end = offset + HEADER.size + length
            if kind == PADDING and length == 0:
                yield PADDING, b""
                break
            if end > len(block):
                if len(block) < BLOCK_BYTES:
                    return
                raise FormatError("a fragment is longer than its block")
            if masked_crc(block[offset + 6 : end]) != checksum:
                raise FormatError("a checksum does not match")
            yield kind, block[offset + HEADER.size : end]
            offset = end


def write_records(records: Sequence[bytes]) -> bytes:
    """The bytes of a log or MANIFEST with these records."""
    out = bytearray()
    for record in records:
        rest, begun = record, False
        while rest or not begun:
            room = BLOCK_BYTES - len(out) % BLOCK_BYTES
            if room < HEADER.size:
                out += bytes(room)
                room = BLOCK_BYTES
            part, rest = rest[: room - HEADER.size], rest[room - HEADER.size :]
            kind = _KINDS[begun, bool(rest)]
            out += HEADER.pack(masked_crc(bytes([kind]) + part), len(part), kind) + part
            begun = True
    return bytes(out)


def parse_edit(record: bytes) -> list[Field]:
    """The fields of one version edit.

    Raises:
        FormatError: an unknown tag, or a field that is cut short.
    """
    fields = []
    position = 0
    while position < len(record):
        tag, position = _varint(record, position)
        if tag not in _SHAPES:
            raise FormatError(f"a version edit has the unknown field {tag}")
        numbers: list[int] = []
        strings: list[bytes] = []
        for _ in range(_SHAPES[tag][0]):
            number, position = _varint(record, position)
            numbers.append(number)
        for _ in range(_SHAPES[tag][1]):
            length, position = _varint(record, position)
            if position + length > len(record):
                raise FormatError("a version edit is cut short")
            strings.append(record[position : position + length])
            position += length
        fields.append(Field(tag, tuple(numbers), tuple(strings)))
    return fields


def pack_edit(edit: Sequence[Field]) -> bytes:
    """The bytes of one version edit."""
    out = bytearray()
    for tag, numbers, strings in edit:
        for number in (tag, *numbers):
            out += _pack_varint(number)
        for string in strings:
            out += _pack_varint(len(string)) + string
    return bytes(out)


def masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli) as LevelDB stores it: turned, so that it may lie in data that has a checksum of its own."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise FormatError("a version edit is cut short")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise FormatError("a version edit has a number of more than 64 bits")


def _pack_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
