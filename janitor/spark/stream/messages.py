"""Reads of a topic: polls that resume after an incomplete response, and a search for the last message."""

from __future__ import annotations

from collections.abc import Iterator

from janitor.spark.stream.offsets import StreamPosition
from tms_core.client import Client, Message, MessageId, TopicId, Transaction, Unanswered, Unavailable
from tms_core.client.protocol.messages import time_at

#: The first interval of the search for the last message, in milliseconds, and the growth factor of the next intervals.
_FIRST_STEP_MS, _STEP_FACTOR = 1_000, 32
#: The interval from which on a linear read replaces the bisection, in milliseconds.
_LINEAR_READ_MS = 64


def messages(
    client: Client, topic: TopicId, position: StreamPosition, *, view: Transaction | None, limit: int | None = None
) -> Iterator[Message]:
    """Yield the messages after a position, in order; after an incomplete response, resume after the last message.

    Args:
        position: the position before the first message.
        view: the transaction whose view filters the messages; None: read uncommitted messages, too.
        limit: the maximum number of messages; None: no limit.

    Raises:
        MessagingError: the server rejects the request, or a response fails before its first message.
    """
    remaining, progressed = limit, True
    while remaining is None or remaining > 0:
        try:
            poll = client.poll(
                topic, start=position.start, inclusive=position.inclusive, limit=remaining, transaction=view
            )
            with poll as found:
                progressed = False
                for message in found:
                    position, progressed = StreamPosition.after_message(message.id), True
                    remaining = None if remaining is None else remaining - 1
                    yield message
        except (Unanswered, Unavailable):
            if not progressed:
                raise
        else:
            return


def newest(client: Client, topic: TopicId, now_ms: int) -> MessageId | None:
    """Return the last message of a topic, committed or not; None: the topic is empty.

    The server does not report the last message. Therefore the search goes back from ``now_ms`` in growing steps until
    it finds a message, and then bisects the interval.
    """

    def has_messages_since(ms: int) -> bool:
        with client.poll(topic, start=time_at(ms), limit=1) as found:
            return next(found, None) is not None

    low = high = now_ms
    step_ms = _FIRST_STEP_MS
    while not has_messages_since(low):
        if low == 0:
            return None
        low, high = max(0, low - step_ms), low
        step_ms *= _STEP_FACTOR
    while high - low > _LINEAR_READ_MS:
        middle = (low + high) // 2
        low, high = (middle, high) if has_messages_since(middle) else (low, middle)
    last = None
    for message in messages(client, topic, StreamPosition(low), view=None):
        last = message.id
    return last
