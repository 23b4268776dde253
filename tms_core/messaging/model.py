"""Requests to a messaging service and their results, as values without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from tms_core.errors import BadRequest
from tms_core.rowkey import LONG_MAX, MessageId
from tms_core.topic import INT_MAX
from tms_core.transaction.model import Transaction

#: The measured memory of a message without its payload, in bytes. It also bounds a page of empty messages.
MESSAGE_BYTES = 160
#: The maximum time that a fetch may wait for a message, in seconds.
MAX_WAIT_SECONDS = 60
#: The maximum size of the label of a producer's transaction, in bytes.
LABEL_BYTES = 1000


class RollbackRange(NamedTuple):
    """The contiguous rows that a publish wrote into the message table, from the first to the last row inclusive.

    Attributes:
        pointer: the write pointer of the rows.
        start_ms, start_sequence: the id of the first row.
        end_ms, end_sequence: the id of the last row.
    """

    pointer: int
    start_ms: int
    start_sequence: int
    end_ms: int
    end_sequence: int


class FetchedMessage(NamedTuple):
    """A message as a consumer sees it.

    Attributes:
        id: 20 bytes, see :class:`tms_core.rowkey.MessageId`.
        payload: the published bytes.
    """

    id: bytes
    payload: bytes


class MessageList(Sequence[FetchedMessage]):
    """A list of messages, stored as a list of ids and a list of payloads, without an object per message.

    Args:
        ids, payloads: as of :class:`FetchedMessage`.
    """

    __slots__ = ("ids", "payloads")

    def __init__(self, ids: list[bytes], payloads: list[bytes]) -> None:
        self.ids = ids
        self.payloads = payloads

    @classmethod
    def of(cls, messages: Sequence[FetchedMessage]) -> MessageList:
        if isinstance(messages, MessageList):
            return messages
        return cls([message.id for message in messages], [message.payload for message in messages])

    @property
    def size(self) -> int:
        """Return the memory of the messages in bytes."""
        return sum(map(len, self.payloads)) + MESSAGE_BYTES * len(self.payloads)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[FetchedMessage]:
        return map(FetchedMessage, self.ids, self.payloads)

    @overload
    def __getitem__(self, at: int) -> FetchedMessage: ...
    @overload
    def __getitem__(self, at: slice) -> MessageList: ...
    def __getitem__(self, at: int | slice) -> FetchedMessage | MessageList:
        if isinstance(at, slice):
            return MessageList(self.ids[at], self.payloads[at])
        return FetchedMessage(self.ids[at], self.payloads[at])


class SharedList(MessageList):
    """An immutable list of messages that several readers share.

    Attributes:
        encoded: the encoded messages, set by the first reader; the encoding does not depend on the reader.
    """

    __slots__ = ("encoded", "size")

    size: int

    def __init__(self, messages: MessageList) -> None:
        super().__init__(messages.ids, messages.payloads)
        self.size = messages.size
        self.encoded: bytes | None = None


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The start, the limit and the visibility of a fetch.

    Attributes:
        start: a message id, a publish time in milliseconds (>= 0), or None for the first message.
        inclusive: whether to return the message with the id ``start``.
        limit: the maximum number of messages, at least 1.
        limit_bytes: the maximum memory of the messages in bytes; a first message is returned whatever its size.
        transaction: the reading transaction; None reads all messages, including rolled back messages.
        wait_seconds: the maximum wait for a message.

    Raises:
        BadRequest: a limit below 1, a start time below 0, or a wait of more than a minute.
    """

    start: MessageId | int | None = None
    inclusive: bool = True
    limit: int = INT_MAX
    transaction: Transaction | None = None
    limit_bytes: int = LONG_MAX
    wait_seconds: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.wait_seconds <= MAX_WAIT_SECONDS:
            raise BadRequest(
                f"A poll cannot wait for {self.wait_seconds} s.", f"Use 0 to {MAX_WAIT_SECONDS} whole seconds."
            )
        if self.limit < 1:
            raise BadRequest(f"A limit of {self.limit} messages is not possible.", "Use a limit of at least 1.")
        if isinstance(self.start, int) and not 0 <= self.start <= LONG_MAX:
            raise BadRequest(f"{self.start} is not a time.", "Use milliseconds since 1970.")


class Ages(NamedTuple):
    """The ages of a topic's messages.

    Attributes:
        messages: the number of unexpired messages, including rolled back and uncommitted messages.
        older: the number of messages older than the given age.
        at_least: whether counting stopped at its limit, so that both numbers are lower bounds.
        hold_seconds: how long the server's janitor holds rows that a shorter TTL makes due; None: unknown.
    """

    messages: int
    older: int
    at_least: bool
    hold_seconds: int | None = None
