"""The two languages of request and answer bodies, and what both say.

A :class:`Codec` turns a body into values and back. The content type of the request selects CDAP's own Avro
(:mod:`.avro`) or JSON (:mod:`.json_text`); the response has the same type.
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
#: The least size of a message for the limit of a request, in bytes: an empty message takes memory, too, several times
#: as much during its write.
MESSAGE_BYTES = 64
#: A message id.
_ID_BYTES = 20


class PublishRequest(NamedTuple):
    """A request to publish or to store.

    Attributes:
        pointer: the transaction's write pointer; None outside transactions.
        messages: the payloads, in order.
        ttl_seconds: the TTL of these messages; None: that of the topic.
    """

    pointer: int | None
    messages: list[bytes]
    ttl_seconds: int | None = None


class Codec(Protocol):
    """A content type. A body that cannot be decoded raises :class:`~tms_core.errors.BadRequest`, even if it is
    truncated.

    Attributes:
        content_type: the content type of requests and responses.
    """

    content_type: bytes

    def read_publish(self, body: bytes) -> PublishRequest:
        """Return the body of ``publish`` and ``store``.

        Raises:
            HTTPException: it has more messages than a request may have.
        """
        ...

    def publish_cost(self, body: bytes) -> int:
        """Return the most memory that :meth:`read_publish` takes, in bytes, including the messages."""
        ...

    def read_rollback(self, body: bytes) -> RollbackRange | int:
        """Return the body of ``rollback``, which is the answer of ``publish``; or a write pointer, in JSON."""
        ...

    def read_group_rollback(self, body: bytes) -> tuple[int, MessageId | None]:
        """Return the body of a group's ``rollback``: the transaction, and the id after which its claims are released;
        None: all claims.
        """
        ...

    def read_poll(self, body: bytes) -> FetchRequest:
        """Return the body of ``poll``."""
        ...

    def write_published(self, written: RollbackRange) -> bytes:
        """Return the answer of a transactional ``publish``."""
        ...

    def write_messages(self, pages: Iterable[Sequence[FetchedMessage]]) -> Iterator[bytes]:
        """Return the answer of ``poll``, in pieces of about :data:`CHUNK_BYTES`, at least one; empty for an empty
        page.
        """
        ...


def too_many(most_messages: int) -> HTTPException:
    """Return the error for a request with more messages than allowed."""
    return HTTPException(
        413, f"A request may have {most_messages} messages at most (server.max_request_mb, {MESSAGE_BYTES} bytes each)."
    )


def message_id(data: bytes) -> MessageId:
    """Return the id a fetch starts at; of more than 20 bytes the first count, as in CDAP."""
    try:
        return MessageId.parse(data[:_ID_BYTES])
    except FormatError as error:
        raise BadRequest(f"startFrom: {error}.") from error


def transaction(data: bytes) -> Transaction:
    """Return a transaction from the bytes that CDAP's clients send: a Thrift struct (Tephra's ``TransactionCodec``)."""
    try:
        return decode_transaction(data)
    except FormatError as error:
        raise BadRequest(f"transaction: {error}.") from error
