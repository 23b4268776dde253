"""Group commit: the queued requests of a topic are written together with one sync, one batch at a time.

A synced write takes as long for one message as for a thousand, so requests are queued while a batch is being written.
Each batch reads the topic's metadata and the clock again, so a deleted topic rejects queued requests. A few threads
serve all topics in turn, one batch each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from weakref import WeakValueDictionary

from tms_core.errors import MessagingError, TooLarge, Unavailable
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry
from tms_core.messaging.publish.pipeline import MessageWriteBatch, PayloadWriteBatch, WriteBatch
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.topic import TopicId

#: The size of a batch in bytes after which no request is added, to limit memory and latency.
BATCH_BYTES = 8 << 20
#: The number of idle message queues that are kept in memory.
_RECENT = 64


class Queue:
    """The queue of one topic and one table.

    Args:
        batch: the class of its batches, which determines the table.
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
        """Return whether some requests have no outcome."""
        return self._busy

    def submit(self, entry: PublishEntry) -> PublishFuture[RollbackRange | None]:
        """Queue a request, and return its future outcome.

        Raises:
            Unavailable: the service is closed.
        """
        self._context.workers.accept(entry.weight)
        with self._lock:
            self._queue.append(entry)
            idle, self._busy = not self._busy, True
        if idle:
            self._context.workers.run(self._run)
        return entry.future

    def wait_for_writes(self) -> None:
        """Wait until all earlier requests have their outcome."""
        with suppress(MessagingError):
            # An entry without messages is never plain, so all stages skip a dropped one.
            entry = PublishEntry(())
            entry.drop(None)
            self.submit(entry).result()

    def _run(self) -> None:
        """Write the next batch, and set its outcomes; schedule another run if requests remain."""
        entries, weight = self._take()
        try:
            batch = self._batch(self._context, self._context.topics.get(self.topic))
            batch.process(entries)
            # Respond only after `process` has ended the reported writes. A client may immediately abort its transaction
            # or send the next request; during a reported write, the manager would invalidate the transaction, and the
            # request would be rejected.
            for entry in entries:
                entry.future.set_outcome(entry.outcome)
        except BaseException as error:  # noqa: BLE001 each client gets a response after any error
            _fail(entries, error)
        self._context.workers.done(len(entries), weight)
        with self._lock:
            # Under the lock of `submit`, so that this sees each request that found the queue busy.
            more = self._busy = bool(self._queue)
        if more:
            self._context.workers.run(self._run)

    def _take(self) -> tuple[list[PublishEntry], int]:
        """Remove and return requests from the queue, up to ``BATCH_BYTES``, and their weight."""
        entries: list[PublishEntry] = []
        size = 0
        with self._lock:
            while self._queue and size < BATCH_BYTES:
                entry = self._queue.popleft()
                entries.append(entry)
                size += entry.weight
        return entries, size


class Queues:
    """The queues of all topics: one for messages and one for payloads of each topic in use.

    A queue exists while it has requests, or while it is among the last created queues; unused topics need no memory.
    """

    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._recent: deque[Queue] = deque(maxlen=_RECENT)
        self._latest: Queue | None = None
        self._messages: WeakValueDictionary[TopicId, Queue] = WeakValueDictionary()
        self._payloads: WeakValueDictionary[TopicId, Queue] = WeakValueDictionary()
        self._lock = Lock()

    def message(self, topic: TopicId) -> Queue:
        """Return the queue of a topic's messages."""
        latest = self._latest
        if latest is not None and latest.topic is topic:
            return latest
        with self._lock:
            queue = self._messages.get(topic)
            if queue is None:
                queue = self._messages[topic] = Queue(topic, self._context, MessageWriteBatch)
                self._recent.append(queue)
            self._latest = queue
            return queue

    def payload(self, topic: TopicId) -> Queue:
        """Return the queue of a topic's stored payloads."""
        with self._lock:
            queue = self._payloads.get(topic)
            if queue is None:
                queue = self._payloads[topic] = Queue(topic, self._context, PayloadWriteBatch)
            return queue

    def wait_for_writes(self, topic: TopicId) -> None:
        """Wait until all accepted requests of a topic have their outcome."""
        self.message(topic).wait_for_writes()
        self.payload(topic).wait_for_writes()

    def are_busy(self, concerns: Callable[[bytes], bool]) -> bool:
        """Return whether some selected topics have requests without an outcome.

        Args:
            concerns: selects topics by their key prefix.
        """
        with self._lock:
            queues = [*self._messages.values(), *self._payloads.values()]
        return any(queue.is_busy and concerns(queue.topic.prefix) for queue in queues)

    def close(self) -> None:
        """Drop the idle queues."""
        self._recent.clear()
        self._latest = None


def _fail(entries: Sequence[PublishEntry], error: BaseException) -> None:
    """Set the outcomes of a failed batch; entries without an outcome get the error of the batch."""
    largest = max(map(_largest_bytes, entries))
    for entry in entries:
        if not entry.is_dropped:
            is_small = isinstance(error, TooLarge) and _largest_bytes(entry) < largest
            entry.drop(_batch_rejected() if is_small else error)
        if not entry.future.done():
            entry.future.set_outcome(entry.outcome)


def _largest_bytes(entry: PublishEntry) -> int:
    return max(map(len, entry.messages), default=0)


def _batch_rejected() -> Unavailable:
    return Unavailable(
        "The messages were not written, because the store rejected a larger message in the same batch.", "Try again."
    )
