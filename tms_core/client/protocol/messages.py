"""The bodies of requests and answers, in CDAP's Avro: built and read once, for both clients.

A response of any length is read piece by piece, so memory holds one piece and its last, incomplete message.
``docs/reference/rest.md`` has the encoding. A ttl of single messages is ours, not CDAP's, and so goes in JSON.
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
#: Where a reader begins: at a message, at a time, or at the beginning.
Start = MessageId | datetime | None

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_VALUE, _NULL = b"\0", b"\2"
_ID_BYTES = 20
#: What a payload may be given as.
_BYTES = bytes | bytearray | memoryview


class Message(NamedTuple):
    """A message.

    Attributes:
        id: where it stands in its topic; ids grow, and a poll can start after an id.
        payload: the bytes that were published.
    """

    id: MessageId
    payload: bytes

    @property
    def time(self) -> datetime:
        """Return when it was published; milliseconds, UTC."""
        return time_at(self.id.publish_ms)


def payloads_of(messages: object) -> list[bytes]:
    """Payloads as a list of our own, which the caller cannot change later.

    Raises:
        BadRequest: it is one payload instead of several, or one of them is not bytes.
    """
    if isinstance(messages, str | _BYTES) or not isinstance(messages, Iterable):
        raise BadRequest(f"Messages are given as a list, not as {_kind(messages)}.", "Write [message], also for one.")
    found = list(messages)
    for payload in found:
        if not isinstance(payload, _BYTES):
            raise BadRequest(f"A payload is bytes, not {_kind(payload)}.", "Encode it: text.encode().")
    return [bytes(payload) for payload in found]


def _is_count(given: object) -> bool:
    return isinstance(given, int) and 1 <= given <= INT_MAX


def _kind(given: object) -> str:
    return type(given).__name__


def encode_publish(pointer: int | None, payloads: Sequence[bytes]) -> bytes:
    """PublishRequest.

    Args:
        pointer: the transaction's write pointer; None: outside of one.
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
    """PublishRequest with a ttl of these messages."""
    messages = [{"base64": base64.b64encode(payload).decode("ascii")} for payload in payloads]
    fields = {"transactionWritePointer": pointer, "messages": messages, "ttlSeconds": ttl_seconds}
    return json.dumps(fields).encode()


def encode_rollback(published: RollbackRange) -> bytes:
    """PublishResponse, as a server answers it."""
    return _VALUE + b"".join(map(varint, published))


def encode_poll(start: Start, limit: int | None, transaction: Transaction | None, *, inclusive: bool) -> bytes:
    """ConsumeRequest.

    Raises:
        BadRequest: a start that is none, a time that names no zone or lies before 1970, or a limit that is none.
    """
    if limit is not None and not _is_count(limit):
        raise BadRequest(f"A limit of {limit} messages is not possible.", "Give 1 or more.")
    parts = [_start(start, inclusive=inclusive), b"\1" if inclusive else b"\0"]
    parts.append(_NULL if limit is None else _VALUE + varint(limit))
    parts.append(_NULL if transaction is None else _VALUE + _bytes(encode_transaction(transaction)))
    return b"".join(parts)


def decode_published(body: bytes) -> RollbackRange:
    """PublishResponse.

    Raises:
        FormatError: it is none.
    """
    try:
        branch, at = read_varint(body, 0)
        values = []
        for _ in RollbackRange._fields:
            value, at = read_varint(body, at)
            values.append(value)
    except (IndexError, ValueError) as error:
        raise FormatError("the answer to publish is no PublishResponse") from error
    if branch or at != len(body):
        raise FormatError("the answer to publish is no PublishResponse")
    return RollbackRange(*values)


def decode_published_json(body: bytes) -> RollbackRange:
    """PublishResponse in JSON.

    Raises:
        FormatError: it is none.
    """
    try:
        given = json.loads(body)
        rows = given["rollbackRange"]
        names = ("startTimestamp", "startSequenceId", "endTimestamp", "endSequenceId")
        return RollbackRange(int(given["transactionWritePointer"]), *(int(rows[name]) for name in names))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("the answer to publish is no PublishResponse") from error


class MessageDecoder:
    """ConsumeResponse, whose bytes come in pieces.

    A decoder that holds only the bytes of an incomplete message.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held = 0
        self._needed = 0
        self._left = 0
        self._ended = False

    def feed(self, piece: bytes) -> list[Message]:
        """Return the messages that became whole with another piece.

        Raises:
            Unanswered: the bytes are no ConsumeResponse.
        """
        self._parts.append(piece)
        self._held += len(piece)
        if self._held < self._needed:
            return []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        found: list[Message] = []
        try:
            at = self._read(data, found)
        except (ValueError, FormatError) as error:
            raise Unanswered(f"The answer to poll cannot be read: {error}.", _OTHER_SERVER) from error
        self._parts = [data[at:]]
        self._held = len(data) - at
        return found

    def end(self) -> None:
        """There are no more bytes.

        Raises:
            Unanswered: the last of them did not complete the response.
        """
        if not self._ended:
            raise Unanswered("The answer to poll is cut short.", "Poll again from the last message on.")

    def _read(self, data: bytes, found: list[Message]) -> int:
        """Return the complete messages and the position after them."""
        at, size = 0, len(data)
        while at < size:
            try:
                at = self._message(data, at, found) if self._left else self._block(data, at)
            except IndexError:
                break
        return at

    def _block(self, data: bytes, at: int) -> int:
        if self._ended:
            raise ValueError("bytes follow its end")
        count, at = read_varint(data, at)
        if count < 0:
            _, at = read_varint(data, at)
            count = -count
        self._left, self._ended = count, not count
        return at

    def _message(self, data: bytes, at: int, found: list[Message]) -> int:
        self._needed = 0
        length, start = read_varint(data, at)
        if length != _ID_BYTES:
            raise ValueError(f"an id of {length} bytes")
        id_end = start + length
        length, payload = read_varint(data, id_end)
        if length < 0:
            raise ValueError(f"a payload of {length} bytes")
        end = payload + length
        if end > len(data):
            self._needed = end - at
            raise IndexError
        found.append(Message(MessageId.parse(data[start:id_end]), data[payload:end]))
        self._left -= 1
        return end


def time_at(time_ms: int) -> datetime:
    """Return a time from milliseconds since 1970-01-01 UTC."""
    return _EPOCH + timedelta(milliseconds=time_ms)


def milliseconds(time: datetime) -> int:
    """Return a time as milliseconds since 1970-01-01 UTC; a fraction is dropped.

    Raises:
        BadRequest: it names no zone, or lies before 1970.
    """
    if time.tzinfo is None:
        raise BadRequest(f"{time} names no time zone.", "Write datetime(…, tzinfo=UTC), or datetime.now(UTC).")
    found = (time - _EPOCH) // timedelta(milliseconds=1)
    if found < 0:
        raise BadRequest(f"{time} lies before 1970.", "Give a later time, or None for the beginning.")
    return found


def seconds(ttl: timedelta | int | str) -> int:
    """Return a ttl in whole seconds, rounded up.

    Raises:
        BadRequest: it is not above 0, is more than 2^31 - 1 seconds, or is not a span of time.
    """
    if isinstance(ttl, str):
        span_ms = int(ttl) * 1000 if ttl.isdecimal() and ttl.isascii() else parse_span(ttl)
        if span_ms is None:
            raise BadRequest(f"{ttl!r} is not a ttl.", "Write 7d, 1h30m, a timedelta, or whole seconds as a number.")
        ttl = timedelta(milliseconds=min(span_ms, (INT_MAX + 1) * 1000))
    found = -(-ttl // timedelta(seconds=1)) if isinstance(ttl, timedelta) else ttl
    if not _is_count(found):
        raise BadRequest(f"A ttl of {found} s is not possible.", f"Give whole seconds from 1 to {INT_MAX}.")
    return found


_OTHER_SERVER = "See that the URL is that of tms serve, and no proxy changes what it says."


def _start(start: Start, *, inclusive: bool) -> bytes:
    if start is None:
        return varint(2)
    if isinstance(start, datetime):
        # A server looks at ``inclusive`` only where an id is given, as CDAP does.
        return varint(1) + varint(milliseconds(start) + (not inclusive))
    if not isinstance(start, MessageId):
        raise BadRequest(f"{start!r} is no place to begin at.", "Give a message's id, a time with its zone, or None.")
    return varint(0) + _bytes(start.pack())


def _bytes(data: bytes) -> bytes:
    return varint(len(data)) + data
