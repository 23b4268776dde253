"""Request and response bodies in CDAP's Avro encoding, for both clients.

A response of any length is decoded piece by piece, so memory holds one piece and at most one incomplete message.
``docs/reference/rest.md`` specifies the encoding. CDAP's schema has no TTL per message; requests with a TTL use JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tms_core.clock import parse_span
from tms_core.errors import BadRequest, FormatError, Unanswered
from tms_core.messaging.model import RollbackRange
from tms_core.rowkey import MessageId
from tms_core.topic import INT_MAX
from tms_core.transaction.codec.thrift import encode_transaction
from tms_core.transaction.codec.varint import read_varint, varint
from tms_core.transaction.model import Transaction

AVRO, JSON = "avro/binary", "application/json"
#: The start of a poll: a message, a time, or None for the first message.
Start = MessageId | datetime | None

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_VALUE, _NULL = b"\0", b"\2"
_ID_BYTES = 20
#: The accepted types of a payload.
_BYTES = bytes | bytearray | memoryview


class Message(NamedTuple):
    """A message of a topic.

    Attributes:
        id: the position in the topic; ids increase, and a poll can start at or after an id.
        payload: the published bytes.
    """

    id: MessageId
    payload: bytes

    @property
    def time(self) -> datetime:
        """Return the publish time in UTC, with a resolution of milliseconds."""
        return time_at(self.id.publish_ms)


def payloads_of(messages: object) -> list[bytes]:
    """Return immutable copies of the payloads, so that the caller cannot change queued messages.

    Raises:
        BadRequest: the argument is a single payload, or a payload is not bytes.
    """
    if isinstance(messages, str | _BYTES) or not isinstance(messages, Iterable):
        raise BadRequest(
            f"The messages are of type {_type_name(messages)}, not a list.", "Pass a single message as [message]."
        )
    found = list(messages)
    for payload in found:
        if not isinstance(payload, _BYTES):
            raise BadRequest(f"A payload is {_type_name(payload)}, not bytes.", "Encode text first: text.encode().")
    return [bytes(payload) for payload in found]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 1 <= value <= INT_MAX


def _type_name(value: object) -> str:
    return type(value).__name__


def encode_publish(pointer: int | None, payloads: Sequence[bytes]) -> bytes:
    """Encode a PublishRequest.

    Args:
        pointer: the transaction's write pointer; None: outside a transaction.
        payloads: the payloads, in order.
    """
    parts = [_NULL if pointer is None else _VALUE + varint(pointer)]
    if payloads:
        parts.append(varint(len(payloads)))
        for payload in payloads:
            parts += (varint(len(payload)), payload)
    parts.append(b"\0")
    return b"".join(parts)


def encode_publish_json(pointer: int | None, payloads: Sequence[bytes], ttl_seconds: int) -> bytes:
    """Encode a PublishRequest that sets the TTL of its messages."""
    messages = [{"base64": base64.b64encode(payload).decode("ascii")} for payload in payloads]
    fields = {"transactionWritePointer": pointer, "messages": messages, "ttlSeconds": ttl_seconds}
    return json.dumps(fields).encode()


def encode_rollback(published: RollbackRange) -> bytes:
    """Encode a rollback request, which is the server's PublishResponse."""
    return _VALUE + b"".join(map(varint, published))


def encode_poll(start: Start, limit: int | None, transaction: Transaction | None, *, inclusive: bool) -> bytes:
    """Encode a ConsumeRequest.

    Raises:
        BadRequest: the start or the limit is invalid, or a time has no zone or is before 1970.
    """
    if limit is not None and not _is_count(limit):
        raise BadRequest(f"A limit of {limit} messages is not possible.", "Use a limit of at least 1.")
    parts = [_start(start, inclusive=inclusive), b"\1" if inclusive else b"\0"]
    parts.append(_NULL if limit is None else _VALUE + varint(limit))
    parts.append(_NULL if transaction is None else _VALUE + _bytes(encode_transaction(transaction)))
    return b"".join(parts)


def decode_published(body: bytes) -> RollbackRange:
    """Decode a PublishResponse.

    Raises:
        FormatError: the bytes are not a PublishResponse.
    """
    try:
        branch, at = read_varint(body, 0)
        values = []
        for _ in RollbackRange._fields:
            value, at = read_varint(body, at)
            values.append(value)
    except (IndexError, ValueError) as error:
        raise FormatError("the answer to publish is not a PublishResponse") from error
    if branch or at != len(body):
        raise FormatError("the answer to publish is not a PublishResponse")
    return RollbackRange(*values)


def decode_published_json(body: bytes) -> RollbackRange:
    """Decode a PublishResponse in JSON.

    Raises:
        FormatError: the text is not a PublishResponse.
    """
    try:
        fields = json.loads(body)
        rows = fields["rollbackRange"]
        names = ("startTimestamp", "startSequenceId", "endTimestamp", "endSequenceId")
        return RollbackRange(int(fields["transactionWritePointer"]), *(int(rows[name]) for name in names))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("the answer to publish is not a PublishResponse") from error


class MessageDecoder:
    """A decoder of a ConsumeResponse that arrives in pieces; it keeps only the bytes of an incomplete message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._needed_bytes = 0
        self._remaining = 0
        self._is_complete = False

    def feed(self, piece: bytes) -> list[Message]:
        """Return the messages that the next piece completes.

        Raises:
            Unanswered: the bytes are not a ConsumeResponse.
        """
        self._parts.append(piece)
        self._held_bytes += len(piece)
        # Joining the pieces of a large message again after each piece would take quadratic time.
        if self._held_bytes < self._needed_bytes:
            return []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        found: list[Message] = []
        try:
            at = self._read(data, found)
        except (ValueError, FormatError) as error:
            raise Unanswered(f"The response to poll cannot be read: {error}.", _OTHER_SERVER) from error
        self._parts = [data[at:]]
        self._held_bytes = len(data) - at
        return found

    def end(self) -> None:
        """Check that the response is complete.

        Raises:
            Unanswered: the response is incomplete.
        """
        if not self._is_complete:
            raise Unanswered("The response to poll is truncated.", "Poll again after the last received message.")

    def _read(self, data: bytes, found: list[Message]) -> int:
        """Append the complete messages to ``found``, and return the position after them."""
        at, size = 0, len(data)
        while at < size:
            try:
                at = self._decode_message(data, at, found) if self._remaining else self._decode_block_count(data, at)
            except IndexError:
                break
        return at

    def _decode_block_count(self, data: bytes, at: int) -> int:
        if self._is_complete:
            raise ValueError("bytes follow the last block")
        count, at = read_varint(data, at)
        if count < 0:
            _, at = read_varint(data, at)
            count = -count
        self._remaining, self._is_complete = count, not count
        return at

    def _decode_message(self, data: bytes, at: int, found: list[Message]) -> int:
        self._needed_bytes = 0
        length, start = read_varint(data, at)
        if length != _ID_BYTES:
            raise ValueError(f"an id of {length} bytes")
        id_end = start + length
        length, payload = read_varint(data, id_end)
        if length < 0:
            raise ValueError(f"a payload of {length} bytes")
        end = payload + length
        if end > len(data):
            self._needed_bytes = end - at
            raise IndexError
        found.append(Message(MessageId.parse(data[start:id_end]), data[payload:end]))
        self._remaining -= 1
        return end


def time_at(time_ms: int) -> datetime:
    """Convert milliseconds since 1970-01-01 UTC to a time."""
    return _EPOCH + timedelta(milliseconds=time_ms)


def milliseconds(time: datetime) -> int:
    """Convert a time to milliseconds since 1970-01-01 UTC; fractions of a millisecond are dropped.

    Raises:
        BadRequest: the time has no zone, or is before 1970.
    """
    if time.tzinfo is None:
        raise BadRequest(f"{time} has no time zone.", "Write datetime(…, tzinfo=UTC), or datetime.now(UTC).")
    found = (time - _EPOCH) // timedelta(milliseconds=1)
    if found < 0:
        raise BadRequest(f"{time} is before 1970.", "Use a later time, or None for the first message.")
    return found


def seconds(ttl: timedelta | int | str) -> int:
    """Convert a TTL to whole seconds, rounded up.

    Raises:
        BadRequest: the TTL is not a span of time from 1 to 2^31 - 1 seconds.
    """
    if isinstance(ttl, str):
        span_ms = int(ttl) * 1000 if ttl.isdecimal() and ttl.isascii() else parse_span(ttl)
        if span_ms is None:
            raise BadRequest(f"{ttl!r} is not a ttl.", "Write 7d, 1h30m, a timedelta, or whole seconds as a number.")
        ttl = timedelta(milliseconds=min(span_ms, (INT_MAX + 1) * 1000))
    found = -(-ttl // timedelta(seconds=1)) if isinstance(ttl, timedelta) else ttl
    if not _is_count(found):
        raise BadRequest(f"A ttl of {found} s is not possible.", f"Use whole seconds from 1 to {INT_MAX}.")
    return found


_OTHER_SERVER = "Check that the URL is the address of tms serve, and that no proxy changes its responses."


def _start(start: Start, *, inclusive: bool) -> bytes:
    if start is None:
        return varint(2)
    if isinstance(start, datetime):
        # The server, like CDAP's, applies ``inclusive`` only to ids. To exclude a time, start a millisecond later.
        return varint(1) + varint(milliseconds(start) + (not inclusive))
    if not isinstance(start, MessageId):
        raise BadRequest(f"{start!r} is not a start position.", "Use a message's id, a time with its zone, or None.")
    return varint(0) + _bytes(start.pack())


def _bytes(data: bytes) -> bytes:
    return varint(len(data)) + data
