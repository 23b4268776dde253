"""Row keys as pure bytes, shared by all code that reads, writes or deletes rows.

A data key is ``namespace:topic:``, the generation (4 bytes) and a tail of fixed length, so it is parsed from its last
byte. All numbers are big-endian; generation, times and write pointers are signed, sequence ids are unsigned. Rows are
stored in byte order, so a negative number sorts *after* every positive one. ``docs/reference/formats/rows.md``, "Row
keys", has the layouts with worked examples.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from tms_core.errors import KeyFormatError, quoted
from tms_core.topic import TopicId

GENERATION_BYTES = 4
#: publish time (8) + sequence id (2)
MESSAGE_TAIL_BYTES = 10
#: write pointer (8) + write time (8) + payload sequence id (2)
PAYLOAD_TAIL_BYTES = 18
#: The lowest first byte of negative numbers, which sort after all positive numbers.
NEGATIVE = b"\x80"
#: The latest publish time or write time.
LONG_MAX = 2**63 - 1

_MESSAGE = struct.Struct(">iqH")
_PAYLOAD = struct.Struct(">iqqH")
_MESSAGE_ID = struct.Struct(">qHqH")
_HEX_ID = re.compile(r"[0-9a-fA-F]{40}")


class MessageKey(NamedTuple):
    """Key of a row of the message table."""

    topic: TopicId
    generation: int
    publish_ms: int
    sequence: int

    @classmethod
    def parse(cls, key: bytes) -> MessageKey | None:
        """Return the parts of a message key; None: the bytes are not a message key (rule L0)."""
        topic = TopicId.from_prefix(key[: -_MESSAGE.size])
        if topic is None:
            return None
        return cls(topic, *_MESSAGE.unpack(key[-_MESSAGE.size :]))

    def pack(self) -> bytes:
        return self.topic.prefix + _pack(_MESSAGE, self.generation, self.publish_ms, self.sequence)

    @property
    def time_ms(self) -> int:
        """Return the time from which the row's age is measured: the publish time."""
        return self.publish_ms


class PayloadKey(NamedTuple):
    """Key of a row of the payload table; rows sort by transaction first, only then by time."""

    topic: TopicId
    generation: int
    write_pointer: int
    write_ms: int
    sequence: int

    @classmethod
    def parse(cls, key: bytes) -> PayloadKey | None:
        """Return the parts of a payload key; None: the bytes are not a payload key (rule L0)."""
        topic = TopicId.from_prefix(key[: -_PAYLOAD.size])
        if topic is None:
            return None
        return cls(topic, *_PAYLOAD.unpack(key[-_PAYLOAD.size :]))

    def pack(self) -> bytes:
        return self.topic.prefix + _pack(_PAYLOAD, self.generation, self.write_pointer, self.write_ms, self.sequence)

    @property
    def time_ms(self) -> int:
        """Return the time from which the row's age is measured: its write time, not its message's publish time."""
        return self.write_ms


class MessageId(NamedTuple):
    """The 20-byte id that a consumer sees; the payload part is 0/0 for a message stored in the message table."""

    publish_ms: int
    sequence: int
    payload_ms: int = 0
    payload_sequence: int = 0

    @classmethod
    def parse(cls, data: bytes) -> MessageId:
        """Parse 20 bytes.

        Raises:
            KeyFormatError: the bytes have another length.
        """
        if len(data) != _MESSAGE_ID.size:
            raise KeyFormatError(f"a message id has {_MESSAGE_ID.size} bytes, not {len(data)}")
        return cls(*_MESSAGE_ID.unpack(data))

    @classmethod
    def from_hex(cls, text: str) -> MessageId:
        """Parse 40 hex digits.

        Raises:
            KeyFormatError: the text is not 40 hex digits.
        """
        if not _HEX_ID.fullmatch(text):
            raise KeyFormatError(f"{quoted(text)} is not a message id: 40 hex digits")
        return cls.parse(bytes.fromhex(text))

    def pack(self) -> bytes:
        return _pack(_MESSAGE_ID, *self)

    def __str__(self) -> str:
        return self.pack().hex()

    @property
    def in_payload_table(self) -> bool:
        """Return whether the payload table has the message; CDAP decides this by the payload time alone."""
        return self.payload_ms != 0


@dataclass(frozen=True, slots=True, order=True)
class Cutoff:
    """The time before which a row is expired, in milliseconds since the epoch; never negative.

    Policy, ranges and fetch share this type, so that all of them keep a row exactly at the cutoff.
    """

    ms: int

    def __post_init__(self) -> None:
        if not 0 <= self.ms <= LONG_MAX:
            raise ValueError(f"a cutoff must be between 0 and 2^63-1 ms, not {self.ms}")

    @classmethod
    def at(cls, now_ms: int, ttl_seconds: int) -> Cutoff:
        """Return the cutoff of a topic at ``now_ms``: ``max(0, now - ttl)``."""
        return cls(max(0, now_ms - ttl_seconds * 1000))

    def expires(self, time_ms: int) -> bool:
        """Return whether a row of this time is strictly older than the TTL."""
        return time_ms < self.ms


def topic_prefix(key: bytes) -> bytes | None:
    """Return ``namespace:topic:`` at the start of a key of any length; None if the key does not match the grammar.

    An unrecognized key may also have a topic's prefix and sort among its rows.
    """
    namespace, _, rest = key.partition(b":")
    topic, colon, _ = rest.partition(b":")
    prefix = namespace + b":" + topic + colon
    return prefix if TopicId.from_prefix(prefix) is not None else None


def generation_prefix(prefix: bytes, generation: int) -> bytes:
    """Return the key prefix of a generation; 2^31 gives the first key after all positive generations."""
    return prefix + (generation & 0xFFFFFFFF).to_bytes(GENERATION_BYTES, "big")


def time_prefix(prefix: bytes, generation: int, time_ms: int) -> bytes:
    """Return the start of a generation's message rows published at or after ``time_ms`` (>= 0)."""
    return generation_prefix(prefix, generation) + time_ms.to_bytes(8, "big")


def position_prefix(prefix: bytes, generation: int, position: int) -> bytes:
    """Return the start of a generation's message rows from a position on (``milliseconds * 65,536 + sequence``)."""
    return generation_prefix(prefix, generation) + position.to_bytes(MESSAGE_TAIL_BYTES, "big")


def pointer_prefix(prefix: bytes, generation: int, write_pointer: int) -> bytes:
    """Return the key prefix of a transaction's payload rows."""
    return generation_prefix(prefix, generation) + write_pointer.to_bytes(8, "big", signed=True)


def stop_key(prefix: bytes) -> bytes | None:
    """Return the first key after all keys with a prefix; None if all bytes of the prefix are ff."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def java_abs(pointer: int) -> int:
    """Return ``Math.abs`` of a Java long, which leaves -2^63 unchanged."""
    return pointer if pointer >= 0 or pointer == -(2**63) else -pointer


def java_hash(key: bytes) -> int:
    """Return Java's ``Arrays.hashCode`` of bytes: signed 32-bit, from 1, times 31 plus each signed byte."""
    value = 1
    for byte in key:
        value = (31 * value + (byte if byte < 128 else byte - 256)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def salt(key: bytes, buckets: int) -> bytes:
    """Return the salt byte of HBase rows: Java's ``abs(hash) % buckets``, as one byte.

    Java's abs leaves -2^31 negative, and its remainder has the sign of the dividend. Therefore a number of buckets that
    is not a power of two gives a byte outside the buckets for this one hash. This function repeats that, because CDAP
    stores the row there.
    """
    digest = java_hash(key)
    magnitude = abs(digest)
    remainder = magnitude % buckets if digest != -(2**31) else -(magnitude % buckets)
    return bytes([remainder & 0xFF])


def _pack(layout: struct.Struct, *fields: int) -> bytes:
    try:
        return layout.pack(*fields)
    except struct.error as error:
        raise KeyFormatError(f"a key cannot hold {fields}: {error}") from error
