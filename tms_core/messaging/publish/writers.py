"""The writers of all topics, one for messages and one for payloads of each that something is written to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from weakref import WeakValueDictionary

from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.pipeline import MessageWriteBatch, PayloadWriteBatch
from tms_core.messaging.publish.queue import Queue
from tms_core.topic import TopicId

#: Writers that are kept though they have nothing to write.
_RECENT_WRITERS = 64


class Writers:
    """A factory of a topic's writers.

    A writer lives as long as it has something to write, or is one of the last few that were made, so that names that
    are no longer used cost nothing.
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
        """Return whether something is still to be written to topics of which it is told that they are meant, by their
        keys.
        """
        with self._lock:
            writers: list[Queue] = [*self._messages.values(), *self._payloads.values()]
        return any(writer.is_busy and concerns(writer.topic.prefix) for writer in writers)

    def close(self) -> None:
        """Let go of those that have nothing to write."""
        self._recent.clear()
        self._latest = None
