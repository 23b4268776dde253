"""Requests to a messaging service and their results, as values without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from tms_core.errors import BadRequest
from tms_core.rowkey import LONG_MAX, MessageId
from tms_core.topic import INT_MAX
from tms_core.transaction.model import Transaction

#: The memory of a message in addition to its payload, in bytes; measured. It bounds a page of empty messages, too.
MESSAGE_BYTES = 160
#: How long a fetch may wait for a message, in seconds.
MOST_WAIT_SECONDS = 60
#: The most bytes that the label of a producer's transaction may have.
LABEL_BYTES = 1000


class RollbackRange(NamedTuple):
    """The contiguous rows that a publish wrote into the message table; first and last row included.

    Attributes:
        pointer: their write pointer.
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
    """A list of messages with separate lists of ids and payloads, so that passing it on makes no object per message.

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
        encoded: their encoded form, once a reader has made it; it does not depend on the reader.
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
        limit: the most messages to return, at least 1.
        limit_bytes: the memory in bytes after which no further message is returned; at least one is returned.
        transaction: the reading transaction; None sees everything, including rolled back messages.
        wait_seconds: the longest wait for a message.

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
        if not 0 <= self.wait_seconds <= MOST_WAIT_SECONDS:
            raise BadRequest(
                f"A poll cannot wait for {self.wait_seconds} s.", f"Give 0 to {MOST_WAIT_SECONDS} whole seconds."
            )
        if self.limit < 1:
            raise BadRequest(f"A limit of {self.limit} messages is not possible.", "Give 1 or more.")
        if isinstance(self.start, int) and not 0 <= self.start <= LONG_MAX:
            raise BadRequest(f"{self.start} is not a time.", "Give milliseconds since the epoch.")


class Ages(NamedTuple):
    """The ages of a topic's messages.

    Attributes:
        messages: the number of live messages, including rolled back and uncommitted messages.
        older: the number of messages older than the given age.
        at_least: whether counting stopped early, so that both numbers may be larger.
        hold_seconds: how long the server's janitor holds rows that a shorter TTL makes due; None: unknown.
    """

    messages: int
    older: int
    at_least: bool
    hold_seconds: int | None = None
