"""The writers of all topics: for each topic that is written to, one for messages and one for payloads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from weakref import WeakValueDictionary

from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.pipeline import MessageWriteBatch, PayloadWriteBatch
from tms_core.messaging.publish.queue import Queue
from tms_core.topic import TopicId

#: The number of idle writers that are kept.
_RECENT_WRITERS = 64


class Writers:
    """A factory of a topic's writers.

    A writer lives while it has requests, or while it is one of the last few created, so that unused topics cost
    nothing.
    """

    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._recent: deque[Queue] = deque(maxlen=_RECENT_WRITERS)
        self._latest: Queue | None = None
        self._messages: WeakValueDictionary[TopicId, Queue] = WeakValueDictionary()
        self._payloads: WeakValueDictionary[TopicId, Queue] = WeakValueDictionary()
        self._lock = Lock()

    def message(self, topic: TopicId) -> Queue:
        """Return the writer of a topic's messages."""
        latest = self._latest
        if latest is not None and latest.topic is topic:
            return latest
        with self._lock:
            writer = self._messages.get(topic)
            if writer is None:
                writer = self._messages[topic] = Queue(topic, self._context, MessageWriteBatch)
                self._recent.append(writer)
            self._latest = writer
            return writer

    def payload(self, topic: TopicId) -> Queue:
        """Return the writer of a topic's stored payloads."""
        with self._lock:
            writer = self._payloads.get(topic)
            if writer is None:
                writer = self._payloads[topic] = Queue(topic, self._context, PayloadWriteBatch)
            return writer

    def settle(self, topic: TopicId) -> None:
        """Wait until earlier accepted requests of a topic are written, or failed."""
        self.message(topic).settle()
        self.payload(topic).settle()

    def are_busy(self, concerns: Callable[[bytes], bool]) -> bool:
        """Return whether some selected topics have requests without an outcome.

        Args:
            concerns: selects topics, by the start of their keys.
        """
        with self._lock:
            writers: list[Queue] = [*self._messages.values(), *self._payloads.values()]
        return any(writer.is_busy and concerns(writer.topic.prefix) for writer in writers)

    def close(self) -> None:
        """Forget the idle writers."""
        self._recent.clear()
        self._latest = None
