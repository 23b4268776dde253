"""The requests of consumers and groups: positions, claims, and polls that claim."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tms_core.client.protocol.calls import Call, Topic, array, nothing, path_of
from tms_core.client.protocol.messages import AVRO, encode_poll, time_at
from tms_core.errors import BadRequest, ConsumerConflict, ConsumerNotFound
from tms_core.rowkey import MessageId
from tms_core.topic import CONSUMER_NAME
from tms_core.transaction.model import Transaction

#: Headers of a group's poll: its order and the most deliveries; in the response the number of deliveries, and the
#: transaction that must be decided first (docs/reference/rest-consumers.md, "Claims").
ORDER, MAX_DELIVERIES, DELIVERIES, HELD = "x-tms-order", "x-tms-max-deliveries", "x-tms-deliveries", "x-tms-held"
#: A header of an empty response: the milliseconds until failed messages are delivered again.
RETRY = "x-tms-retry-ms"
#: The orders of a group.
ORDERS = ("partition", "none")
#: A request header that changes a consumer although claims are open.
FORCE = "x-tms-force"


@dataclass(frozen=True, slots=True)
class ConsumerPosition:
    """The position and the lag of a consumer.

    Attributes:
        name: the name of the consumer.
        position: the last message it has read.
        lag_messages: the number of unread messages.
        lag_is_at_least: whether there may be more, because counting stopped there.
        lag_seconds: the age of the oldest unread message; 0 without unread messages.
        updated: the time when the position was stored.
        expired: whether messages may have expired before the consumer read them.
    """

    name: str
    position: MessageId
    lag_messages: int
    lag_is_at_least: bool
    lag_seconds: float
    updated: datetime
    expired: bool


@dataclass(frozen=True, slots=True)
class OpenClaim:
    """Messages that an undecided transaction has claimed for a consumer group.

    Attributes:
        transaction: its id.
        after: the id before the first message.
        last: the id of the last message.
        deliveries: their number of deliveries, including this one.
    """

    transaction: int
    after: MessageId
    last: MessageId
    deliveries: int


@dataclass(frozen=True, slots=True)
class FailedMessages:
    """Messages that a consumer group received and has not processed.

    Attributes:
        message: the id of a message that failed alone; None: several messages failed together.
        after, last: the range: the id before the first message, and the id of the last message.
        deliveries: their number of deliveries.
        again: the time of their next delivery; None: with the next poll.
    """

    message: MessageId | None
    after: MessageId
    last: MessageId
    deliveries: int
    again: datetime | None


def position(topic: Topic, consumer: str) -> Call[MessageId]:
    path = _consumer(topic, consumer)
    return Call("GET", path, lambda body: _position(json.loads(body)), again=True, missing=ConsumerNotFound)


def claims(topic: Topic, consumer: str) -> Call[list[OpenClaim]]:
    def read(body: bytes) -> list[OpenClaim]:
        return [_claim(fields) for fields in json.loads(body).get("claims", ())]

    return Call("GET", _consumer(topic, consumer), read, again=True, missing=ConsumerNotFound)


def failed(topic: Topic, consumer: str) -> Call[list[FailedMessages]]:
    def read(body: bytes) -> list[FailedMessages]:
        return [_parse_failed(fields) for fields in json.loads(body).get("failed", ())]

    return Call("GET", _consumer(topic, consumer), read, again=True, missing=ConsumerNotFound)


def set_position(topic: Topic, consumer: str, at: MessageId, *, force: bool = False) -> Call[None]:
    body = json.dumps({"position": str(at)}).encode()
    return Call(
        "PUT",
        _consumer(topic, consumer),
        nothing,
        body,
        again=True,
        conflict=ConsumerConflict,
        headers={FORCE: "true"} if force else {},
    )


def register(topic: Topic, consumer: str) -> Call[None]:
    """Register a consumer before the first message; the response is ``ConsumerConflict`` if it exists already."""
    body = json.dumps({"position": str(MessageId(0, 0))}).encode()
    path, headers = _consumer(topic, consumer), {"if-none-match": "*"}
    return Call("PUT", path, nothing, body, again=True, conflict=ConsumerConflict, headers=headers)


def delete_position(topic: Topic, consumer: str, *, force: bool = False) -> Call[None]:
    return Call(
        "DELETE",
        _consumer(topic, consumer),
        nothing,
        missing=ConsumerNotFound,
        conflict=ConsumerConflict,
        headers={FORCE: "true"} if force else {},
    )


def check_order(order: str) -> None:
    """Check the order of a group.

    Raises:
        BadRequest: the order is unknown.
    """
    if order not in ORDERS:
        raise BadRequest(f"{order!r} is not an order of a group.", f"Give {' or '.join(ORDERS)}.")


def group_poll(
    topic: Topic, group: str, limit: int | None, transaction: Transaction, order: str, max_deliveries: int | None
) -> Call[None]:
    """Claim messages. The client does not repeat it: messages of a lost response would be committed unprocessed."""
    check_order(order)
    headers = {ORDER: order} | ({} if max_deliveries is None else {MAX_DELIVERIES: str(max_deliveries)})
    body = encode_poll(None, limit, transaction, inclusive=True)
    path = f"{_consumer(topic, group)}/poll"
    return Call("POST", path, nothing, body, AVRO, missing=ConsumerNotFound, conflict=ConsumerConflict, headers=headers)


def group_rollback(topic: Topic, group: str, pointer: int, after: MessageId | None = None) -> Call[None]:
    fields = {"transactionWritePointer": str(pointer)} | ({} if after is None else {"after": str(after)})
    path, body = f"{_consumer(topic, group)}/rollback", json.dumps(fields).encode()
    return Call("POST", path, nothing, body, again=True, missing=ConsumerNotFound, conflict=ConsumerConflict)


def positions(topic: Topic) -> Call[list[ConsumerPosition]]:
    def read(body: bytes) -> list[ConsumerPosition]:
        return [_parse_position(fields) for fields in array(body)]

    return Call("GET", path_of(topic, "consumers"), read, again=True)


def _consumer(topic: Topic, name: object) -> str:
    if not isinstance(name, str) or not CONSUMER_NAME.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be a consumer.", "Use at most 255 letters, digits, '_' and '-'.")
    return path_of(topic, f"consumers/{name}")


def _position(fields: Mapping[str, str]) -> MessageId:
    return MessageId.from_hex(fields["position"])


def _parse_position(fields: Mapping[str, Any]) -> ConsumerPosition:
    return ConsumerPosition(
        fields["name"],
        _position(fields),
        int(fields["lagMessages"]),
        bool(fields["lagIsAtLeast"]),
        float(fields["lagSeconds"]),
        time_at(int(fields["updatedMs"])),
        bool(fields["expired"]),
    )


def _claim(fields: Mapping[str, Any]) -> OpenClaim:
    first, last = MessageId.from_hex(fields["after"]), MessageId.from_hex(fields["last"])
    return OpenClaim(int(fields["transaction"]), first, last, int(fields["deliveries"]))


def _parse_failed(fields: Mapping[str, Any]) -> FailedMessages:
    message, retry_ms = fields["message"], fields["retryMs"]
    return FailedMessages(
        None if message is None else MessageId.from_hex(message),
        MessageId.from_hex(fields["after"]),
        MessageId.from_hex(fields["last"]),
        int(fields["deliveries"]),
        None if retry_ms is None else time_at(int(retry_ms)),
    )
