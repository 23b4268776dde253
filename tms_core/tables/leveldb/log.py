"""Logs from outside: whether LevelDB would read one to its end, found out before it opens it, and how far it goes.

A log holds the newest rows, and all of a small store. Both libraries answer a record that they cannot read in the same
way: the rest of its block is dropped, with a line in a log file at most, and the next table is written without those
rows. One flipped bit is enough. So the log is read first, and where something was lost the folder is not opened.

A crash leaves a log that is torn at its end, which loses nothing that was durable. It is told from damage by what comes
behind the place that cannot be read: another record is begun only when the one before is whole. So a flipped bit in the
very last record is taken for a torn end, as LevelDB takes it too.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from tms_core.tables.leveldb.manifest_codec import BLOCK_BYTES, FIRST, FULL, HEADER, LAST, MIDDLE, PADDING, masked_crc

#: The kind of a fragment that begins a record: the last byte of its header.
_BEGINNING = re.compile(b"[%c%c]" % (FULL, FIRST))
_KIND_AT = HEADER.size - 1
#: The head of a record, which is a batch: the sequence number of its first write, and how many it has.
_BATCH = struct.Struct("<QI")


class Damage(NamedTuple):
    """Something in a log that cannot be read, and that no crash explains.

    Attributes:
        offset: of its first byte.
        stop: LevelDB drops what is there up to this byte; and up to the next beginning of a record, where that lies
            behind it.
        reason: what is wrong.
    """

    offset: int
    stop: int
    reason: str


def find_damage(log: bytes) -> Damage | None:
    """The first place at which a log is damaged; None where it is whole, or only torn at its end.

    Takes about 0.1 s for 4 MiB in records of 100 bytes.
    """
    at = 0
    #: Bytes of a record whose end is to come; None: none was begun.
    begun: int | None = None
    while len(log) - at >= HEADER.size:
        if (left := _block_stop(at) - at) < HEADER.size:
            at += left
            continue
        if problem := _problem(log, at):
            return _judge(log, at, problem)
        _, length, kind = HEADER.unpack_from(log, at)
        stop = at + HEADER.size + length
        # A beginning without a byte may be followed by another one: old writers left it where a block had no room.
        if kind in (FULL, FIRST) and begun:
            return Damage(at, at, "the record before it has no end")
        if kind in (MIDDLE, LAST) and begun is None:
            return Damage(at, stop, "a record has no beginning")
        begun = (begun or 0) + length if kind in (FIRST, MIDDLE) else None
        at = stop
    return None


def last_sequence(log: bytes) -> int:
    """The sequence number of the last write in a log whose record is whole; 0 in an empty one.

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
    """Why the fragment there cannot be read; empty if it can."""
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


def _judge(log: bytes, at: int, problem: str) -> Damage | None:
    """Whether what cannot be read is damage; None if it is the torn end of the log."""
    behind = _next_beginning(log, at + 1)
    if behind is None:
        return None
    return Damage(at, min(_block_stop(at), len(log)), f"{problem}, and good records follow from byte {behind} on")


def _next_beginning(log: bytes, start: int) -> int | None:
    """Where the first readable fragment lies that begins a record; lengths in between are not to be relied on."""
    for found in _BEGINNING.finditer(log, start + _KIND_AT):
        at = found.start() - _KIND_AT
        if _block_stop(at) - at >= HEADER.size and not _problem(log, at):
            return at
    return None


def _block_stop(at: int) -> int:
    return at - at % BLOCK_BYTES + BLOCK_BYTES
