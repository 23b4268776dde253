"""Group commit: everything that is queued for a topic goes to the disk at once, one batch at a time.

A synced write takes as long for one message as for a thousand, so the next batch gathers while one is being written.
Each batch reads the topic's metadata and the clock, writes, and only then answers; so a topic that was deleted in the
meantime takes no more messages. A few threads serve all topics in turn, a batch each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from tms_core.errors import MessagingError, TooLarge, Unavailable
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry
from tms_core.messaging.publish.pipeline import WriteBatch
from tms_core.messaging.publish.workers import Answer
from tms_core.topic import TopicId

#: Bytes after which a batch takes no further request, so that memory and waiting are bounded.
BATCH_BYTES = 8 << 20


class Queue:
    """The queue of one topic and one table.

    Args:
        batch: makes a batch; it decides which table.
    """

    def __init__(self, topic: TopicId, context: WriterContext, batch: type[WriteBatch]) -> None:
        self.topic = topic
        self._context = context
        self._batch = batch
        self._queue: deque[PublishEntry] = deque()
        self._busy = False
        self._lock = Lock()

    @property
    def is_busy(self) -> bool:
        """Return whether there are requests that are not answered yet."""
        return self._busy

    def submit(self, entry: PublishEntry) -> Answer[RollbackRange | None]:
        """Queue a request; its answer comes when a batch has it.

        Raises:
            Unavailable: the service is closed.
        """
        self._context.workers.accept(entry.weight)
        with self._lock:
            self._queue.append(entry)
            idle, self._busy = not self._busy, True
        if idle:
            self._context.workers.run(self._run)
        return entry.answer

    def settle(self) -> None:
        """Return when all requests that were submitted before are written, or will not be."""
        with suppress(MessagingError):
            self.submit(PublishEntry(())).result()

    def _run(self) -> None:
        """Write and answer the next batch, and have this called again if there is more."""
        entries = self._take()
        with _Failures(entries):
            batch = self._batch(self._context, self._context.topics.get(self.topic))
            batch.process(entries)
            # Not while an entry is noted as under way: its client may end the transaction, or send the next request,
            # at once.
            for entry in entries:
                _answer(entry)
            batch.wake()
        self._context.workers.done(len(entries), sum([entry.weight for entry in entries]))
        with self._lock:
            more = self._busy = bool(self._queue)
        if more:
            self._context.workers.run(self._run)

    def _take(self) -> list[PublishEntry]:
        """Take requests off the queue, up to a number of bytes."""
        entries: list[PublishEntry] = []
        size = 0
        with self._lock:
            while self._queue and size < BATCH_BYTES:
                entry = self._queue.popleft()
                entries.append(entry)
                size += entry.weight
        return entries


def _answer(entry: PublishEntry) -> None:
    """Give a client its outcome."""
    if isinstance(entry.outcome, BaseException):
        entry.answer.set_exception(entry.outcome)
    else:
        entry.answer.set_result(entry.outcome)


class _Failures:
    """Answers entries of a batch that an error ends; it is the error of all that have no outcome."""

    def __init__(self, entries: Sequence[PublishEntry]) -> None:
        self._entries = entries

    def __enter__(self) -> None:
        """Nothing has failed yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            largest = max(_largest(entry) for entry in self._entries)
            for entry in self._entries:
                if not entry.is_dropped:
                    others = isinstance(error, TooLarge) and _largest(entry) < largest
                    entry.drop(_try_again() if others else error)
                if not entry.answer.done():
                    _answer(entry)
        return True


def _largest(entry: PublishEntry) -> int:
    return max(map(len, entry.messages), default=0)


def _try_again() -> Unavailable:
    return Unavailable(
        "Nothing was written, because the store refused a larger message that was to be written at once.", "Try again."
    )
