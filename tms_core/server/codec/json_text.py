"""JSON for clients without Avro: Avro's field names, with values that JavaScript can represent.

Payloads are text, or ``{"base64": …}`` if they are not UTF-8. Ids are 40 hex digits. 64-bit numbers are sent as
strings, and accepted as strings or numbers. Unknown fields are rejected, because with a misspelled ``ttlSeconds`` a
message would live as long as the topic's TTL. ``docs/reference/rest.md`` has examples.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tms_core.errors import BadRequest, FormatError
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.messaging.producers.rows import TransactionOutcome
from tms_core.rowkey import MessageId
from tms_core.server.codec.bodies import CHUNK_BYTES, PublishRequest, too_many, transaction
from tms_core.topic import INT_MAX, INT_MIN

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_LONG = range(-(2**63), 2**63)
_INT = range(INT_MIN, INT_MAX + 1)
#: The default limit of a poll, because clients hold the whole JSON response in memory.
POLL_MESSAGES = 1000
#: The copies of a body in memory during parsing: decoded, split and encoded again. A single character outside ASCII
#: makes all characters of a text wider.
_COPIES, _WIDE_COPIES = 3, 9
#: The maximum memory of the value that follows each of these characters, in bytes.
_OBJECT_BYTES = {b"{": 300, b"[": 100, b",": 60}
#: The maximum memory of a field in addition to its value, in bytes: its name, and its places in a pair and an object.
_FIELD_BYTES = 150
_RANGE = ("startTimestamp", "startSequenceId", "endTimestamp", "endSequenceId")


@dataclass(frozen=True, slots=True)
class JsonCodec:
    """JSON (:class:`tms_core.server.codec.bodies.Codec`).

    Attributes:
        max_messages: the maximum number of messages in a publish request.
    """

    max_messages: int = sys.maxsize
    content_type = b"application/json"

    def read_publish(self, body: bytes) -> PublishRequest:
        fields = _object(body, {"transactionWritePointer", "messages", "ttlSeconds"})
        messages = fields.get("messages")
        if messages is None:
            messages = []
        if not isinstance(messages, list):
            raise BadRequest("messages: this is not an array.")
        if len(messages) > self.max_messages:
            raise too_many(self.max_messages)
        pointer, ttl_seconds = fields.get("transactionWritePointer"), fields.get("ttlSeconds")
        return PublishRequest(
            None if pointer is None else _number("transactionWritePointer", pointer),
            [_payload(message) for message in messages],
            None if ttl_seconds is None else _number("ttlSeconds", ttl_seconds, _INT),
        )

    def publish_cost(self, body: bytes) -> int:
        """Return the memory of the copies of a body, and of as many objects as the body can have, in bytes."""
        return _memory(body)

    def read_rollback(self, body: bytes) -> RollbackRange | int:
        fields = _object(body, {"transactionWritePointer", "rollbackRange"})
        if "rollbackRange" not in fields:
            return _number("transactionWritePointer", fields.get("transactionWritePointer"))
        rows = fields["rollbackRange"]
        if not isinstance(rows, dict):
            raise BadRequest("rollbackRange: this is not an object.", "Send the unchanged response of publish.")
        _require_known_fields(rows, set(_RANGE), "rollbackRange.")
        start_ms, start_sequence, end_ms, end_sequence = (
            _number(f"rollbackRange.{name}", rows.get(name), _INT if name.endswith("Id") else _LONG) for name in _RANGE
        )
        pointer = _number("transactionWritePointer", fields.get("transactionWritePointer"))
        return RollbackRange(pointer, start_ms, start_sequence, end_ms, end_sequence)

    def read_group_rollback(self, body: bytes) -> tuple[int, MessageId | None]:
        fields = _object(body, {"transactionWritePointer", "after"})
        after = fields.get("after")
        pointer = _number("transactionWritePointer", fields.get("transactionWritePointer"))
        return pointer, None if after is None else _id("after", after)

    def read_poll(self, body: bytes) -> FetchRequest:
        fields = _object(body, {"startFrom", "inclusive", "limit", "transaction", "waitSeconds"})
        inclusive, limit, reads_in = fields.get("inclusive", True), fields.get("limit"), fields.get("transaction")
        if not isinstance(inclusive, bool):
            raise BadRequest("inclusive: this is neither true nor false.")
        start = _start(fields.get("startFrom"))
        if isinstance(start, int) and not inclusive:
            # Only here: for a start time, CDAP ignores `inclusive`, and so does the Avro codec.
            start += 1
        return FetchRequest(
            start,
            inclusive,
            POLL_MESSAGES if limit is None else _number("limit", limit, _INT),
            None if reads_in is None else transaction(_base64("transaction", reads_in)),
            wait_seconds=_number("waitSeconds", fields.get("waitSeconds", 0), _INT),
        )

    def write_published(self, written: RollbackRange) -> bytes:
        pointer, start_ms, start_sequence, end_ms, end_sequence = written
        values = (str(start_ms), start_sequence, str(end_ms), end_sequence)
        rows = dict(zip(_RANGE, values, strict=True))
        return json.dumps({"transactionWritePointer": str(pointer), "rollbackRange": rows}).encode()

    def write_messages(self, pages: Iterable[Sequence[FetchedMessage]]) -> Iterator[bytes]:
        """Yield one array."""
        parts, size, mark = ["["], 1, ""
        for page in pages:
            if not page:
                yield b""
            for id_, payload in page:
                part = f'{mark}{{"id":"{id_.hex()}","payload":{_written(payload)}}}'
                parts.append(part)
                size += len(part)
                mark = ",\n"
                if size >= CHUNK_BYTES:
                    yield "".join(parts).encode()
                    parts, size = [], 0
        parts.append("]\n")
        yield "".join(parts).encode()


def read_properties(body: bytes) -> dict[str, str]:
    """Decode a topic's properties; numbers and booleans become their text, as with CDAP's Gson."""
    if not body.strip():
        return {}
    properties = _parse(body, parse_int=str, parse_float=str)
    for name, value in properties.items():
        if isinstance(value, bool):
            properties[name] = str(value).lower()
        elif not isinstance(value, str):
            raise BadRequest(f"{name}: the value of a property must be text.")
    return properties


def read_position(body: bytes) -> MessageId:
    """Decode the position of a consumer: ``{"position": "40 hex digits"}``."""
    fields = _object(body, {"position"})
    return _id("position", fields.get("position"))


def read_registration(body: bytes) -> tuple[UUID, dict[int, TransactionOutcome]]:
    """Decode the registration of a producer: its instance, and the reported outcomes of transactions.

    ``{"instance": "a UUID", "ended": {"170…": "committed", "171…": "aborted"}}``
    """
    fields = _object(body, {"instance", "ended"})
    instance, ended = fields.get("instance"), fields.get("ended", {})
    try:
        found = UUID(instance if isinstance(instance, str) else "")
    except ValueError as error:
        raise BadRequest(
            "instance: this is not a UUID.", "Use a random UUID for each instance of the producer."
        ) from error
    if not isinstance(ended, dict) or not all(outcome in ("committed", "aborted") for outcome in ended.values()):
        raise BadRequest('ended: this is not an object with the value "committed" or "aborted" for each transaction.')
    return found, {_number("ended", name): TransactionOutcome(outcome) for name, outcome in ended.items()}


def memory_of_fields(body: bytes) -> int:
    """Return the memory for decoding an object whose fields the client names, in bytes."""
    return _memory(body) + _FIELD_BYTES * body.count(b":")


def _memory(body: bytes) -> int:
    objects = sum(size * body.count(mark) for mark, size in _OBJECT_BYTES.items())
    return (_COPIES if body.isascii() else _WIDE_COPIES) * len(body) + objects


def _object(body: bytes, fields: set[str]) -> dict[str, Any]:
    members = _parse(body)
    _require_known_fields(members, fields)
    return members


def _parse(body: bytes, **options: Any) -> dict[str, Any]:
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant, **options
        )
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BadRequest("The body is not a JSON object.")
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field occurs twice")
    return found


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _require_known_fields(members: Mapping[str, Any], fields: set[str], prefix: str = "") -> None:
    if unknown := sorted(members.keys() - fields):
        known = ", ".join(sorted(fields))
        raise BadRequest(f"{prefix}{unknown[0]}: this field does not exist.", f"Use one of {known}.")


def _number(name: str, value: Any, within: range = _LONG) -> int:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value not in within:
        raise BadRequest(f"{name}: this is not a {'64' if within is _LONG else '32'}-bit number.")
    return value


def _base64(name: str, value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{name}: this is not base64 text.") from error


def _payload(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequest("messages: a payload contains an unpaired surrogate.") from error
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return _base64("messages", value["base64"])
    raise BadRequest('messages: a payload must be text or {"base64": "…"}.')


def _written(payload: bytes) -> str:
    try:
        return json.dumps(payload.decode("utf-8"))
    except UnicodeDecodeError:
        return f'{{"base64":"{base64.b64encode(payload).decode("ascii")}"}}'


def _id(name: str, value: Any) -> MessageId:
    if not isinstance(value, str):
        raise BadRequest(f"{name}: this is not text of 40 hex digits.")
    try:
        return MessageId.from_hex(value)
    except FormatError as error:
        raise BadRequest(f"{name}: {error}.") from error


def _start(value: Any) -> MessageId | int | None:
    if value is None:
        return None
    if isinstance(value, dict) and value.keys() == {"timeMs"}:
        return _number("startFrom.timeMs", value["timeMs"])
    if isinstance(value, dict) and value.keys() == {"id"}:
        return _id("startFrom.id", value["id"])
    raise BadRequest(
        "startFrom: this is not a start.", 'Use {"id": "40 hex digits"}, {"timeMs": "1700000000000"} or null.'
    )
