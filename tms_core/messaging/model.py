"""What goes into a messaging service and what comes out, as values without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tms_core.errors import BadRequest
from tms_core.rowkey import LONG_MAX, MessageId
from tms_core.topic import INT_MAX
from tms_core.transaction.model import Transaction


class RollbackRange(NamedTuple):
    """What one publish wrote into the message table: rows that are contiguous, both ends included.

    Attributes:
        pointer: the write pointer they carry.
        start_ms, start_sequence: the first of them.
        end_ms, end_sequence: the last of them.
    """

    pointer: int
    start_ms: int
    start_sequence: int
    end_ms: int
    end_sequence: int


class Message(NamedTuple):
    """A message as a consumer sees it.

    Attributes:
        id: 20 bytes, see :class:`tms_core.rowkey.MessageId`.
        payload: the bytes that were published.
    """

    id: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Where to begin, how far to go, and what may be seen.

    Attributes:
        start: a message id, a publish time in milliseconds (>= 0), or None for the beginning.
        inclusive: whether a message that has the very id ``start`` is among them.
        limit: the most messages to return, at least 1.
        transaction: who reads; None sees everything, also what was rolled back.

    Raises:
        BadRequest: a limit below 1, or a start time below 0.
    """

    start: MessageId | int | None = None
    inclusive: bool = True
    limit: int = INT_MAX
    transaction: Transaction | None = None

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise BadRequest(f"A limit of {self.limit} messages is none.", "Give 1 or more.")
        if isinstance(self.start, int) and not 0 <= self.start <= LONG_MAX:
            raise BadRequest(f"{self.start} is no time.", "Give milliseconds since the epoch.")
