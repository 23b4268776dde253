"""The interface and the common parts of both content types of request and response bodies.

A :class:`Codec` decodes and encodes bodies. The content type of the request selects CDAP's Avro (:mod:`.avro`) or JSON
(:mod:`.json_text`); the response has the same type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from starlette.exceptions import HTTPException

from tms_core.errors import BadRequest, FormatError
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.rowkey import MessageId
from tms_core.transaction.codec.thrift import decode_transaction
from tms_core.transaction.model import Transaction

#: The approximate bytes of messages in a piece of a response (CDAP's messaging.http.server.consume.chunk.size).
CHUNK_BYTES = 60_000
#: The minimum size that a message counts towards the limit of a request, in bytes: even an empty message needs memory,
#: and several times as much while it is being written.
MESSAGE_BYTES = 64
#: The size of a message id in bytes.
_ID_BYTES = 20


class PublishRequest(NamedTuple):
    """A request to publish or to store.

    Attributes:
        pointer: the transaction's write pointer; None outside transactions.
        messages: the payloads, in order.
        ttl_seconds: the TTL of these messages; None: the topic's TTL.
    """

    pointer: int | None
    messages: list[bytes]
    ttl_seconds: int | None = None


class Codec(Protocol):
    """A content type; all methods raise :class:`~tms_core.errors.BadRequest` for an invalid or truncated body.

    Attributes:
        content_type: the content type of requests and responses.
    """

    content_type: bytes

    def read_publish(self, body: bytes) -> PublishRequest:
        """Decode the body of ``publish`` and ``store``.

        Raises:
            HTTPException: the request has too many messages.
        """
        ...

    def publish_cost(self, body: bytes) -> int:
        """Return the maximum memory that :meth:`read_publish` needs for a body, including the messages, in bytes."""
        ...

    def read_rollback(self, body: bytes) -> RollbackRange | int:
        """Decode the body of ``rollback``: the response of ``publish``, or in JSON a write pointer."""
        ...

    def read_group_rollback(self, body: bytes) -> tuple[int, MessageId | None]:
        """Decode a group's ``rollback``: the transaction, and the id after which claims are released; None: all."""
        ...

    def read_poll(self, body: bytes) -> FetchRequest:
        """Decode the body of ``poll``."""
        ...

    def write_published(self, written: RollbackRange) -> bytes:
        """Encode the response of a transactional ``publish``."""
        ...

    def write_messages(self, pages: Iterable[Sequence[FetchedMessage]]) -> Iterator[bytes]:
        """Encode the response of ``poll`` in at least one piece of about :data:`CHUNK_BYTES`; b"" for an empty page."""
        ...


def too_many(max_messages: int) -> HTTPException:
    """Return the error for a request with too many messages."""
    return HTTPException(
        413, f"A request may have at most {max_messages} messages (server.max_request_mb, {MESSAGE_BYTES} bytes each)."
    )


def message_id(data: bytes) -> MessageId:
    """Parse the start id of a fetch; as in CDAP, bytes after the first 20 are ignored."""
    try:
        return MessageId.parse(data[:_ID_BYTES])
    except FormatError as error:
        raise BadRequest(f"startFrom: {error}.") from error


def transaction(data: bytes) -> Transaction:
    """Decode a transaction as sent by CDAP's clients: a Thrift struct (Tephra's ``TransactionCodec``)."""
    try:
        return decode_transaction(data)
    except FormatError as error:
        raise BadRequest(f"transaction: {error}.") from error
