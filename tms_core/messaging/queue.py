"""Group commit: everything that is queued for a topic goes to the disk at once, and one batch at a time.

A synced write takes as long for one message as for a thousand, so while one batch is being written the next one
gathers. Each batch reads the topic's metadata and the clock, writes, and only then answers; so a topic that was deleted
meanwhile takes no more. A few threads serve all topics in turn, a batch each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from tms_core.clock import HonestClock
from tms_core.errors import BadRequest, MessagingError, PartitionsChanged, TransactionExpired
from tms_core.messaging.answer import Answer
from tms_core.messaging.ids import milliseconds
from tms_core.messaging.lines import Lines
from tms_core.messaging.partitions import FAMILIES, PART_OF, SEALED
from tms_core.messaging.topics import FORBIDDEN, REQUIRED, TRANSACTIONS, TopicRegistry
from tms_core.messaging.work import Work
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import transaction_ms

R = TypeVar("R")

#: Bytes after which a batch takes no further request, so that memory and waiting are bounded.
BATCH_BYTES = 8 << 20
#: What a row costs beside its payload, in bytes.
_ROW_BYTES = 100


class WriteRequest(Generic[R]):
    """The messages that one client wants to have written.

    Attributes:
        messages: the payloads.
        pointer: of its transaction; None without one.
        ttl_ms: a ttl of their own; None without one.
        size: bytes of the payloads together.
        answer: done when it is durable, or will not be.
    """

    __slots__ = ("answer", "messages", "pointer", "size", "ttl_ms")

    def __init__(self, messages: Sequence[bytes], pointer: int | None, ttl_ms: int | None = None) -> None:
        self.messages = tuple(messages)
        self.pointer = pointer
        self.ttl_ms = ttl_ms
        self.size = sum(map(len, messages))
        self.answer: Answer[R] = Answer()


class WriterContext(NamedTuple):
    """The parts that all writers of a store share.

    Attributes:
        topics: read before each batch.
        lines: where ids come from.
        clock: what time it is.
        max_lifetime_ms: how long after its begin a transaction may write.
        work: runs batches, and counts requests.
    """

    topics: TopicRegistry
    lines: Lines
    clock: HonestClock
    max_lifetime_ms: int
    work: Work


class Queue(ABC, Generic[R]):
    """The queue of one topic and one table.

    Args:
        topic: whose it is.
        context: what all writers share.
    """

    def __init__(self, topic: TopicId, context: WriterContext) -> None:
        self.topic = topic
        self._context = context
        self._queue: deque[WriteRequest[R]] = deque()
        self._busy = False
        self._lock = Lock()

    @property
    def is_busy(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return self._busy

    def submit(self, request: WriteRequest[R]) -> Answer[R]:
        """Queue a request; its answer comes when a batch has it.

        Raises:
            Unavailable: the service is closed.
        """
        self._context.work.accept(request.size)
        with self._lock:
            self._queue.append(request)
            idle, self._busy = not self._busy, True
        if idle:
            self._context.work.run(self._run)
        return request.answer

    def settle(self) -> None:
        """Return when what was handed over before is written, or will not be."""
        with suppress(MessagingError):
            self.submit(WriteRequest((), None)).result()

    @abstractmethod
    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[WriteRequest[R]]) -> None:
        """Write a batch and answer it."""

    def _run(self) -> None:
        """Write the next batch, and have this called again if there is more."""
        batch = self._take()
        with _Owed(batch):
            topic = self._context.topics.get(self.topic)
            _require_open(topic)
            if fitting := [request for request in batch if _fits(topic, request)]:
                self._write(topic, self._context.clock.publish_ms(), fitting)
        self._context.work.done(len(batch), sum(request.size for request in batch))
        with self._lock:
            more = self._busy = bool(self._queue)
        if more:
            self._context.work.run(self._run)

    def _take(self) -> list[WriteRequest[R]]:
        """Take what is queued, up to a number of bytes."""
        batch: list[WriteRequest[R]] = []
        size = 0
        with self._lock:
            while self._queue and size < BATCH_BYTES:
                request = self._queue.popleft()
                batch.append(request)
                size += request.size + _ROW_BYTES * len(request.messages)
        return batch

    def _in_time(self, request: WriteRequest[R], at: int) -> bool:
        """Whether the transaction may still write at that position; answers if not.

        What decides is the time the row will have, which may be ahead of the clock: the janitor relies on it that no
        row of a transaction is younger than this (rule L5).
        """
        if request.pointer is None:
            return True
        if transaction_ms(request.pointer) + self._context.max_lifetime_ms > milliseconds(at):
            return True
        request.answer.set_exception(
            TransactionExpired(
                f"Transaction {request.pointer} is older than {self._context.max_lifetime_ms // 1000} s, "
                "the longest a transaction may write.",
                "Start another one.",
            )
        )
        return False


def _fits(topic: TopicMetadata, request: WriteRequest[R]) -> bool:
    """Whether the topic takes what is (or is not) published in a transaction; answers if not."""
    wanted, pointer = topic.properties.get(TRANSACTIONS), request.pointer
    if pointer is None and not request.messages:
        said = ("A message outside a transaction has a payload.", "Send at least one.")
    elif wanted == REQUIRED and pointer is None:
        said = (f"Topic {topic.topic} takes messages in transactions only.", "Publish in a transaction.")
    elif wanted == FORBIDDEN and pointer is not None:
        said = (f"Topic {topic.topic} takes no messages in transactions.", "Publish outside of one.")
    else:
        return True
    request.answer.set_exception(BadRequest(*said))
    return False


def _require_open(topic: TopicMetadata) -> None:
    """See that a topic takes messages, and no partition of it does in its place."""
    if FAMILIES in topic.properties or SEALED in topic.properties:
        name = topic.topic if FAMILIES in topic.properties else topic.properties.get(PART_OF)
        raise PartitionsChanged(
            f"Topic {topic.topic} takes no messages itself.", f"Publish to a partition that {name} names now."
        )


class _Owed(Generic[R]):
    """The answers still owed to the requests of a batch: an error that ends it goes to all that have no answer.

    Args:
        batch: the requests.
    """

    def __init__(self, batch: Sequence[WriteRequest[R]]) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        """Nothing is answered yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            for request in self._batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
        return True
