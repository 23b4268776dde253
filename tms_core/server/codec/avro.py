"""CDAP's Avro (schemas V1), implemented by hand, because every message passes through it.

A general Avro library interprets a schema for each value. Here the few records are known, so decoding a message costs
one slice. A body cannot cause large allocations by a false length, because each item needs at least one byte of the
body. An array may have several blocks, also blocks with a size in bytes (a negative count). Trailing bytes, invalid
lengths and unknown union branches are rejected. ``docs/reference/rest.md`` has the encoding with worked examples.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from operator import add

from tms_core.errors import BadRequest
from tms_core.messaging.model import FetchedMessage, FetchRequest, MessageList, RollbackRange, SharedList
from tms_core.rowkey import MessageId
from tms_core.server.codec.bodies import CHUNK_BYTES, PublishRequest, message_id, too_many, transaction
from tms_core.topic import INT_MAX, INT_MIN
from tms_core.transaction.codec.varint import MORE, read_varint, varint, zigzag

_END = b"\0"
#: The size of a message in addition to its payload, as CDAP counts it for a chunk: 20 bytes for the id, and 8.
_MESSAGE_BYTES = 20 + 8
#: The memory of a message's object and its list entry, without its bytes.
_OBJECT_BYTES = 48
#: The encoded length of a message id, 20 bytes.
_ID_LENGTH = b"\x28"


class AvroCodec:
    """CDAP's content type (:class:`tms_core.server.codec.bodies.Codec`).

    Args:
        max_messages: the maximum number of messages in a publish request.
    """

    content_type = b"avro/binary"

    def __init__(self, max_messages: int = sys.maxsize) -> None:
        self._max_messages = max_messages

    def read_publish(self, body: bytes) -> PublishRequest:
        reader = _Reader(body, "PublishRequest")
        try:
            pointer = None if reader.take_branch(2) else reader.take_long()
            messages = reader.take_array(self._max_messages)
        except IndexError as error:
            raise reader.cut_short() from error
        reader.end()
        return PublishRequest(pointer, messages)

    def publish_cost(self, body: bytes) -> int:
        """Return the memory of the messages in a body and of their objects, in bytes."""
        return len(body) + _OBJECT_BYTES * min(len(body) // 2, self._max_messages)

    def read_rollback(self, body: bytes) -> RollbackRange:
        reader = _Reader(body, "PublishResponse")
        try:
            if reader.take_branch(2):
                raise reader.wrong("transactionWritePointer is null, so there is nothing to roll back")
            found = RollbackRange(
                reader.take_long(), reader.take_long(), reader.take_int(), reader.take_long(), reader.take_int()
            )
        except IndexError as error:
            raise reader.cut_short() from error
        reader.end()
        return found

    def read_group_rollback(self, body: bytes) -> tuple[int, MessageId | None]:
        return self.read_rollback(body).pointer, None

    def read_poll(self, body: bytes) -> FetchRequest:
        reader = _Reader(body, "ConsumeRequest")
        try:
            start = reader.take_start()
            inclusive = reader.take_boolean()
            limit = INT_MAX if reader.take_branch(2) else reader.take_int()
            reads_in = None if reader.take_branch(2) else transaction(reader.take_bytes())
        except IndexError as error:
            raise reader.cut_short() from error
        reader.end()
        return FetchRequest(start, inclusive, limit, reads_in)

    def write_published(self, written: RollbackRange) -> bytes:
        return _END + b"".join(map(_number, written))

    def write_messages(self, pages: Iterable[Sequence[FetchedMessage]]) -> Iterator[bytes]:
        """Yield one array, with a block for each piece; the last piece closes the array.

        No Python loop runs per message, because encoding dominates the cost of a poll.
        """
        block: list[bytes] = []
        count = size = 0
        for page in pages:
            if not page:
                yield b""
                continue
            if isinstance(page, SharedList):
                encoded = _encode_items(page)
                if count and size + len(encoded) > CHUNK_BYTES:
                    yield b"".join([varint(count), *block])
                    block.clear()
                    count = size = 0
                block.append(encoded)
                count += len(page)
                size += len(encoded)
                continue
            messages = MessageList.of(page)
            ids, payloads = messages.ids, messages.payloads
            lengths = list(map(len, payloads))
            weights = _weights(lengths, size)
            first = 0
            # A block may already have ``size`` bytes of the previous page; it stops after the message that fills it.
            while (stop := bisect_left(weights, weights[first] - size + CHUNK_BYTES, first + 1)) <= len(page):
                block += _items(ids[first:stop], lengths[first:stop], payloads[first:stop])
                yield b"".join([varint(count + stop - first), *block])
                block.clear()
                count = size = 0
                first = stop
            block += _items(ids[first:], lengths[first:], payloads[first:])
            count += len(page) - first
            size += weights[-1] - weights[first]
        yield b"".join([varint(count), *block, _END]) if count else _END


def _weights(lengths: list[int], size: int) -> Sequence[int]:
    """Return the cumulative size of a piece before each message and after the last message, starting with ``size``."""
    if lengths.count(lengths[0]) == len(lengths):
        weight = lengths[0] + _MESSAGE_BYTES
        return range(size, size + weight * len(lengths) + 1, weight)
    return list(accumulate(map(add, lengths, repeat(_MESSAGE_BYTES)), initial=size))


def _encode_items(messages: SharedList) -> bytes:
    """Return the encoded items of shared messages; the first reader encodes them."""
    if messages.encoded is None:
        lengths = list(map(len, messages.payloads))
        messages.encoded = b"".join(_items(messages.ids, lengths, messages.payloads))
    return messages.encoded


def _items(ids: Sequence[bytes], lengths: Sequence[int], payloads: Sequence[bytes]) -> list[bytes]:
    """Return the encoded parts of messages. Filling the list column by column takes half the time of row by row."""
    items = [_ID_LENGTH] * (4 * len(ids))
    items[1::4] = ids
    items[2::4] = map(_LENGTHS.__getitem__, lengths)
    items[3::4] = payloads
    return items


class _Reader:
    """A cursor in a body; a truncated body raises an IndexError."""

    def __init__(self, data: bytes, record: str) -> None:
        self._data = data
        self._at = 0
        self._record = record

    def take_long(self) -> int:
        byte = self._data[self._at]
        if byte < MORE:
            self._at += 1
            return (byte >> 1) ^ -(byte & 1)
        try:
            value, self._at = read_varint(self._data, self._at)
        except ValueError as error:
            raise self.wrong(f"{error}") from error
        return value

    def take_int(self) -> int:
        value = self.take_long()
        if not INT_MIN <= value <= INT_MAX:
            raise self.wrong(f"{value} has more than 32 bits")
        return value

    def take_branch(self, branches: int) -> int:
        branch = self.take_long()
        if not 0 <= branch < branches:
            raise self.wrong(f"a union has {branches} branches, so branch {branch} does not exist")
        return branch

    def take_boolean(self) -> bool:
        byte = self._data[self._at]
        if byte > 1:
            raise self.wrong(f"a boolean is 0 or 1, not {byte}")
        self._at += 1
        return byte == 1

    def take_bytes(self) -> bytes:
        length = self.take_long()
        if length < 0:
            raise self.wrong(f"the length {length} is negative")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError
        return self._data[start : self._at]

    def take_start(self) -> MessageId | int | None:
        branch = self.take_branch(3)
        if branch == 0:
            return message_id(self.take_bytes())
        return self.take_long() if branch == 1 else None

    def take_array(self, limit: int) -> list[bytes]:
        """Return an array of byte strings; the frequent lengths of one or two bytes are decoded inline for speed."""
        found: list[bytes] = []
        add, data = found.append, self._data
        while count := self.take_long():
            # In Avro, the size of the block in bytes follows a negative count; a reader may ignore it.
            if count < 0:
                self.take_long()
                count = -count
            if len(found) + count > limit:
                raise too_many(limit)
            at = self._at
            for _ in range(count):
                length = data[at]
                if length < MORE:
                    at += 1
                elif data[at + 1] < MORE:
                    length = length & 0x7F | data[at + 1] << 7
                    at += 2
                else:
                    self._at = at
                    length = zigzag(self.take_long())
                    at = self._at
                if length & 1:
                    raise self.wrong("a length is negative")
                # A length beyond the end of the body makes the next read raise the IndexError.
                end = at + (length >> 1)
                add(data[at:end])
                at = end
            self._at = at
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes follow it")

    def cut_short(self) -> BadRequest:
        return self.wrong("it is truncated")

    def wrong(self, reason: str) -> BadRequest:
        return BadRequest(f"The body is not an Avro {self._record}: {reason}.")


class _Lengths(dict[int, bytes]):
    """A table of encoded payload lengths; rare lengths are encoded on demand."""

    def __missing__(self, length: int) -> bytes:
        return varint(length)


#: Encodes a number of a response; cached, because the responses of a transaction have mostly the same numbers.
_number = lru_cache(maxsize=1024)(varint)
_LENGTHS = _Lengths((length, varint(length)) for length in range(4096))
