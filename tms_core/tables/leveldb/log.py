"""LevelDB's logs as pure bytes, including the MANIFEST: records, damage, and version edits.

LevelDB's libraries do not show their MANIFEST, and one of its numbers has to be read and corrected
(:mod:`tms_core.tables.leveldb.manifest`). This module implements only that part of the format. It refuses what LevelDB
would refuse, and it tolerates, as LevelDB does, a last record whose writer died.

A log has the newest rows, and all rows of a small store. Both libraries handle an unreadable record in the same way:
they drop the rest of its block, with a line in a log file at most, and write the next table without those rows. One
flipped bit suffices. Therefore the log is read first, and a folder with lost records is not opened.

A crash leaves a log with a torn last record, which loses no durable data. It is distinguished from damage by the bytes
after it: a writer starts another record only after the previous one is whole. Therefore a flipped bit in the very last
record counts as a torn record, as in LevelDB.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import google_crc32c

from tms_core.errors import FormatError

#: Logs and MANIFESTs are cut into blocks of this many bytes; a record's fragments never cross one.
BLOCK_BYTES = 32768
#: Masked CRC-32C of kind and data, length of the data, kind.
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
#: The kind of a fragment, by whether its record started before it and continues after it.
_KINDS = {(False, False): FULL, (False, True): FIRST, (True, True): MIDDLE, (True, False): LAST}
#: The kind in a file that a crash of the Java library has extended with zeros.
PADDING = 0

LOG, NEXT_FILE, SEQUENCE, DELETED_TABLE, NEW_TABLE, PREVIOUS_LOG = 2, 3, 4, 6, 7, 9
#: The numbers of integers and of byte strings of each field of a version edit: comparator, log, next file, last
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
#: The kinds of fragments that start a record: the last byte of the header.
_BEGINNING = re.compile(b"[%c%c]" % (FULL, FIRST))
_KIND_AT = HEADER.size - 1
#: The head of a record, which is a batch: the sequence number of its first write, and the number of its writes.
_BATCH = struct.Struct("<QI")


class Field(NamedTuple):
    """One field of a version edit: a tag, its numbers, then its byte strings."""

    tag: int
    numbers: tuple[int, ...]
    strings: tuple[bytes, ...] = ()


class Version:
    """The result of the version edits of a MANIFEST.

    Attributes:
        log: the first log in force.
        previous_log: one more log in force; 0: none.
        next_file: all lower file numbers were issued; 0: not recorded.
        sequence: the highest sequence number of a write in a table.
    """

    def __init__(self) -> None:
        self.log = self.previous_log = self.next_file = self.sequence = 0
        self._live: dict[tuple[int, int], int] = {}

    @property
    def live(self) -> dict[int, int]:
        """Return the tables in force and their recorded sizes in bytes."""
        return {number: size for (_, number), size in self._live.items()}

    def apply(self, edit: Sequence[Field]) -> None:
        """Apply the next version edit."""
        # Within one edit deletions come first: a table that only moves is deleted on one level, new on another.
        for field in edit:
            if field.tag == DELETED_TABLE:
                self._live.pop((field.numbers[0], field.numbers[1]), None)
        for field in edit:
            self._take(field)

    def _take(self, field: Field) -> None:
        if field.tag == NEW_TABLE:
            self._live[field.numbers[0], field.numbers[1]] = field.numbers[2]
        elif field.tag == LOG:
            self.log = field.numbers[0]
        elif field.tag == PREVIOUS_LOG:
            self.previous_log = field.numbers[0]
        elif field.tag == NEXT_FILE:
            self.next_file = max(self.next_file, field.numbers[0])
        elif field.tag == SEQUENCE:
            self.sequence = max(self.sequence, field.numbers[0])


def read_records(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a log or MANIFEST, as LevelDB reads them, without a last record whose writer died.

    It reads one block at a time, so a file of any size takes the memory of its longest record.

    Raises:
        FormatError: a checksum, a length or the order of fragments is wrong.
    """
    fragments: list[bytes] = []
    for kind, fragment in _fragments(stream):
        if (kind in (FULL, FIRST) and any(fragments)) or (kind == PADDING and fragments):
            raise FormatError("a record has no end")
        if kind in (MIDDLE, LAST) and not fragments:
            raise FormatError("a record has no beginning")
        if kind in (FULL, FIRST):
            fragments = []
        if kind in (FIRST, MIDDLE):
            fragments.append(fragment)
        elif kind in (FULL, LAST):
            yield b"".join([*fragments, fragment])
            fragments = []
        elif kind != PADDING:
            raise FormatError(f"a fragment is of the unknown kind {kind}")


def _fragments(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while block := stream.read(BLOCK_BYTES):
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


def pack_records(records: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a log or MANIFEST with these records, piece by piece."""
    room = BLOCK_BYTES
    for record in records:
        rest, has_fragment = record, False
        while rest or not has_fragment:
            if room < HEADER.size:
                yield bytes(room)
                room = BLOCK_BYTES
            part, rest = rest[: room - HEADER.size], rest[room - HEADER.size :]
            kind = _KINDS[has_fragment, bool(rest)]
            yield HEADER.pack(masked_crc(bytes([kind]) + part), len(part), kind) + part
            room, has_fragment = (room - HEADER.size - len(part)) or BLOCK_BYTES, True


def parse_edit(record: bytes) -> list[Field]:
    """Return the fields of one version edit.

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
    """Return the bytes of one version edit."""
    out = bytearray()
    for tag, numbers, strings in edit:
        for number in (tag, *numbers):
            out += _pack_varint(number)
        for string in strings:
            out += _pack_varint(len(string)) + string
    return bytes(out)


def masked_crc(data: bytes) -> int:
    """Return CRC-32C (Castagnoli) as LevelDB stores it: masked, so that data with checksums can have a checksum."""
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


class Damage(NamedTuple):
    """An unreadable place in a log that no crash explains.

    Attributes:
        offset: its first byte.
        stop: LevelDB drops data up to this byte, or up to the start of the next record if that is later.
        reason: the defect.
    """

    offset: int
    stop: int
    reason: str


def find_damage(log: bytes) -> Damage | None:
    """Return the first place at which a log is damaged; None if it is complete, or only its last record is torn.

    Takes about 0.1 s for 4 MiB in records of 100 bytes.
    """
    at = 0
    #: The size of an incomplete record so far, in bytes; None: there is no such record.
    incomplete_bytes: int | None = None
    while len(log) - at >= HEADER.size:
        if (room := _block_stop(at) - at) < HEADER.size:
            at += room
            continue
        if problem := _problem(log, at):
            return _find_damage(log, at, problem)
        _, length, kind = HEADER.unpack_from(log, at)
        stop = at + HEADER.size + length
        # An empty first fragment may be followed by another first fragment: old writers left it at the end of a block.
        if kind in (FULL, FIRST) and incomplete_bytes:
            return Damage(at, at, "the record before it has no end")
        if kind in (MIDDLE, LAST) and incomplete_bytes is None:
            return Damage(at, stop, "a record has no beginning")
        incomplete_bytes = (incomplete_bytes or 0) + length if kind in (FIRST, MIDDLE) else None
        at = stop
    return None


def last_sequence(log: bytes) -> int:
    """Return the sequence number of the last write in a log whose record is whole; 0 in an empty one.

    Checksums are not checked: a log may be long, and is being written.
    """
    last, head = 0, b""
    for start in range(0, len(log), BLOCK_BYTES):
        end, block_end = start, min(start + BLOCK_BYTES, len(log))
        while end + HEADER.size <= block_end:
            _, length, kind = HEADER.unpack_from(log, end)
            begin, end = end + HEADER.size, end + HEADER.size + length
            if end > block_end or kind == PADDING:
                break
            head = b"" if kind in (FULL, FIRST) else head
            head += log[begin : min(end, begin + _BATCH.size - len(head))]
            if kind in (FULL, LAST) and len(head) == _BATCH.size:
                sequence, count = _BATCH.unpack(head)
                last = max(last, sequence + count - 1)
    return last


def _problem(log: bytes, at: int) -> str:
    """Return why a fragment cannot be read; empty: it can."""
    checksum, length, kind = HEADER.unpack_from(log, at)
    stop = at + HEADER.size + length
    if kind == PADDING and not length:
        return "there are zeros instead of a record"
    if stop > _block_stop(at):
        return "a record is longer than its block"
    if stop > len(log):
        return "a record is longer than the file"
    if masked_crc(log[at + _KIND_AT : stop]) != checksum:
        return "a checksum does not match"
    return "" if kind in (FULL, FIRST, MIDDLE, LAST) else f"a record is of the unknown kind {kind}"


def _find_damage(log: bytes, at: int, problem: str) -> Damage | None:
    """Return whether what cannot be read is damage; None if it is the torn last record of the log."""
    start = _next_beginning(log, at + 1)
    if start is None:
        return None
    return Damage(at, min(_block_stop(at), len(log)), f"{problem}, and good records follow from byte {start} on")


def _next_beginning(log: bytes, start: int) -> int | None:
    """Return where the first readable fragment lies that starts a record; lengths in between are not to be relied
    on.
    """
    for found in _BEGINNING.finditer(log, start + _KIND_AT):
        at = found.start() - _KIND_AT
        if _block_stop(at) - at >= HEADER.size and not _problem(log, at):
            return at
    return None


def _block_stop(at: int) -> int:
    return at - at % BLOCK_BYTES + BLOCK_BYTES
