"""Avro's numbers: what the server's and the client's side of CDAP's protocol have in common.

A number is zig-zag encoded and written seven bits a byte, the lowest first; the top bit says that another byte follows.
``docs/rest.md``, "Avro", has worked examples.
"""

from __future__ import annotations

#: From it on a byte of a number says that another follows.
MORE = 0x80
#: A 64-bit number takes at most so many bytes of 7 bits.
_LONG_BYTES = 10


def zigzag(value: int) -> int:
    """A signed 64-bit number as an unsigned one: small for small numbers of either sign."""
    return (value << 1) ^ (value >> 63)


def encode_long(value: int) -> bytes:
    """A signed 64-bit number."""
    rest = zigzag(value)
    found = bytearray()
    while rest >= MORE:
        found.append(rest & 0x7F | MORE)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def decode_long(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it.

    Raises:
        IndexError: the bytes end inside it.
        ValueError: it has more than 64 bits.
    """
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if value >> 64 or (byte >= MORE and shift == 7 * _LONG_BYTES):
            raise ValueError("a number has more than 64 bits")
        if byte < MORE:
            return (value >> 1) ^ -(value & 1), at
