"""The variable-length numbers of snapshot files and Avro.

A number is zig-zag encoded and stored with seven bits per byte, lowest first. Ids of transactions of the years 1971 to
2116 take exactly nine bytes, and a file may have a million of them. Therefore blocks of nine-byte numbers are decoded
with arithmetic on one large integer, several times faster than byte by byte. All other numbers are decoded by a plain
loop, which defines the format (``docs/reference/rest.md``, "Avro", has worked examples).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Protocol

from tms_core.errors import SnapshotError

#: The number of bytes in one read of a stream.
CHUNK_BYTES = 64 * 1024
#: The bytes of a 64-bit number in groups of seven bits. Shorter numbers may be padded up to this length.
_MAX_VARINT_BYTES = 10
_MAX_VARINT_BITS = 7 * _MAX_VARINT_BYTES
#: The bit of a byte that means that another byte of the number follows.
MORE = 0x80


class Readable(Protocol):
    """A source of bytes: a file, a response body."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; empty only after the last byte."""
        ...


class TruncatedSnapshot(SnapshotError):
    """The bytes are truncated: the file is still being written, or a copy was interrupted.

    Attributes:
        size_bytes: the number of existing bytes; 0: an empty file.
    """

    def __init__(self, field: str, size_bytes: int) -> None:
        where = f"ends inside its {field}, after {size_bytes} bytes" if size_bytes else "is empty"
        super().__init__(f"the snapshot {where}.", _HINT)
        self.size_bytes = size_bytes


_HINT = "Use the previous snapshot, or make Tephra write a new snapshot."


class SnapshotReader:
    """A reader of the format's primitives, whose errors contain the position.

    Attributes:
        field: the name of the current field, for errors.
    """

    def __init__(self, stream: Readable) -> None:
        self.field = "version"
        self._stream = stream
        self._buffer = b""
        self._at = 0
        self._before = 0

    def varint(self) -> int:
        """Return one number."""
        values = array("q")
        self._read_plain(1, values)
        return values[0]

    def varint_list(self) -> array[int]:
        """Return all numbers of a block list. Memory grows with the data, not with a count in it."""
        values = array("q")
        for count in self._counts():
            whole, rest = divmod(count, _BLOCK)
            for _ in range(whole):
                if not self._read_packed(values):
                    self._read_plain(_BLOCK, values)
            self._read_plain(rest, values)
        return values

    def byte_string(self) -> bytes:
        """Return a byte string, which starts with its length."""
        length = self.varint()
        if length < 0:
            raise self.corrupt(f"a length of {length}")
        if not self._buffer_bytes(length):
            raise self._truncated()
        start, self._at = self._at, self._at + length
        return self._buffer[start : self._at]

    def items(self) -> Iterator[None]:
        """Yield once before each item of a block list, for the caller to read the item."""
        for count in self._counts():
            yield from (None for _ in range(count))

    def corrupt(self, what: str) -> SnapshotError:
        """Return the error for bytes that cannot be part of a snapshot."""
        where = f"in its {self.field}, before byte {self._before + self._at}"
        return SnapshotError(f"the snapshot is corrupt: {what}, {where}.", _HINT)

    def _counts(self) -> Iterator[int]:
        """Yield the sizes of the blocks of a list, up to the empty last block."""
        while count := self.varint():
            if count < 0:
                raise self.corrupt(f"a count of {count}")
            yield count

    def _read_plain(self, count: int, values: array[int]) -> None:
        """Append ``count`` numbers of any length, at most a block."""
        self._buffer_bytes(count * _MAX_VARINT_BYTES)
        buffer, at, append = self._buffer, self._at, values.append
        shift = 0
        try:
            for _ in range(count):
                value = shift = 0
                while True:
                    byte = buffer[at]
                    at += 1
                    value |= (byte & 0x7F) << shift
                    shift += 7
                    if byte < 0x80:
                        break
                if shift > _MAX_VARINT_BITS:
                    raise OverflowError
                append((value >> 1) ^ -(value & 1))
        except (IndexError, OverflowError) as error:
            self._at = at
            if isinstance(error, IndexError) and shift < _MAX_VARINT_BITS:
                raise self._truncated() from error
            raise self.corrupt("a number of more than 64 bits") from error
        self._at = at

    def _read_packed(self, values: array[int]) -> bool:
        """Append a block of numbers; return False and read nothing if one is negative or does not have nine bytes.

        Each number is a lane of nine bytes. The same operation joins neighboring groups of 7, 14, 28 and 56 bits in all
        lanes. A number of nine bytes has 63 bits, so it never exceeds its lane.
        """
        if not self._buffer_bytes(_BLOCK_BYTES):
            return False
        lanes = int.from_bytes(self._buffer[self._at : self._at + _BLOCK_BYTES], "little")
        if lanes & _CONTINUED != _NINE_BYTES or lanes & _NEGATIVE:
            return False
        for stay, move, shift in _FOLDS:
            lanes = (lanes & stay) | ((lanes & move) >> shift)
        unpacked = bytearray((lanes >> 1).to_bytes(_BLOCK_BYTES, "little"))
        del unpacked[_LANE_BYTES - 1 :: _LANE_BYTES]
        values.extend(_LONGS.unpack(unpacked))
        self._at += _BLOCK_BYTES
        return True

    def _buffer_bytes(self, size: int) -> bool:
        """Read until the buffer has ``size`` unread bytes; return False if the stream has fewer bytes."""
        ready = len(self._buffer) - self._at
        if ready >= size:
            return True
        pieces = [self._buffer[self._at :]]
        while ready < size and (piece := self._stream.read(CHUNK_BYTES)):
            pieces.append(piece)
            ready += len(piece)
        self._before += self._at
        self._buffer, self._at = b"".join(pieces), 0
        return ready >= size

    def _truncated(self) -> TruncatedSnapshot:
        return TruncatedSnapshot(self.field, self._before + len(self._buffer))


# --- blocks of nine-byte numbers -------------------------------------------------------------------------------------

#: The numbers of a block. Larger blocks are not faster, and one number of another length makes its block slow.
_BLOCK = 512
_LANE_BYTES = 9
_BLOCK_BYTES = _BLOCK * _LANE_BYTES
_LONGS = struct.Struct(f"<{_BLOCK}q")


def _lanes(pattern: str) -> int:
    """Return a mask with the nine bytes of ``pattern`` (hex, lowest first) in every lane."""
    return int.from_bytes(bytes.fromhex(pattern) * _BLOCK, "little")


#: The continuation bits of a number, and their value for nine bytes: eight times set, then not.
_CONTINUED = _lanes("80 80 80 80 80 80 80 80 80")
_NINE_BYTES = _lanes("80 80 80 80 80 80 80 80 00")
#: The sign of a zig-zag number is its lowest bit.
_NEGATIVE = _lanes("01 00 00 00 00 00 00 00 00")
#: The groups that stay, the groups that move down, and by how many bits; the first step drops the continuation bits.
_FOLDS = (
    (_lanes("7f 00 7f 00 7f 00 7f 00 7f"), _lanes("00 7f 00 7f 00 7f 00 7f 00"), 1),
    (_lanes("ff 3f 00 00 ff 3f 00 00 ff"), _lanes("00 00 ff 3f 00 00 ff 3f 00"), 2),
    (_lanes("ff ff ff 0f 00 00 00 00 ff"), _lanes("00 00 00 00 ff ff ff 0f 00"), 4),
    (_lanes("ff ff ff ff ff ff ff 00 00"), _lanes("00 00 00 00 00 00 00 00 ff"), 8),
)


def zigzag(value: int) -> int:
    """Return the zig-zag code of a signed 64-bit number, which is small for small numbers of either sign."""
    return (value << 1) ^ (value >> 63)


def varint(value: int) -> bytes:
    """Return the shortest encoding of a signed 64-bit number."""
    rest = zigzag(value)
    encoded = bytearray()
    while rest >= MORE:
        encoded.append(rest & 0x7F | MORE)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it.

    Raises:
        IndexError: the bytes are truncated inside the number.
        ValueError: the number has more than 64 bits.
    """
    value = shift = 0
    while True:
        byte = data[at]
        # Each byte has seven bits, the lowest first; the lowest bit of the number is the sign (zig-zag, as in Avro).
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if value >> 64 or (byte >= MORE and shift == _MAX_VARINT_BITS):
            raise ValueError("a number has more than 64 bits")
        if byte < MORE:
            return (value >> 1) ^ -(value & 1), at
