"""Reads a topic of a server: continues after incomplete responses, and finds its last message."""

from __future__ import annotations

from collections.abc import Iterator

from janitor.spark.stream.offsets import StreamPosition
from tms_core.client import Client, Message, MessageId, TopicId, Transaction, Unanswered, Unavailable
from tms_core.client.protocol.messages import time_at

#: The first interval in which the last message is searched, in milliseconds, and the factor of the next ones.
_FIRST_STEP_MS, _STEP_FACTOR = 1_000, 32
#: A time so short that its messages are read rather than searched, in milliseconds.
_SHORT_MS = 64


def messages(
    client: Client, topic: TopicId, place: StreamPosition, *, view: Transaction | None, limit: int | None = None
) -> Iterator[Message]:
    """Yield the messages after a position, in order; after a broken response, continue after the last message.

    Args:
        topic: the topic.
        place: the position before the first message.
        view: the visible transactions; None: all messages.
        limit: the most messages.

    Raises:
        MessagingError: the server does not respond, or rejects the request.
    """
    remaining, came = limit, True
    while remaining is None or remaining > 0:
        try:
            poll = client.poll(topic, start=place.start, inclusive=place.inclusive, limit=remaining, transaction=view)
            with poll as found:
                came = False
                for message in found:
                    place, came = StreamPosition.after_message(message.id), True
                    remaining = None if remaining is None else remaining - 1
                    yield message
        except (Unanswered, Unavailable):
            if not came:
                raise
        else:
            return


def newest(client: Client, topic: TopicId, now_ms: int) -> MessageId | None:
    """Return the last message of a topic, committed or not; None: the topic is empty.

    The server does not report the last message, so it is searched by time: back from now in growing steps, then by
    bisection.

    Args:
        topic: the topic.
        now_ms: the probable time of the last message.
    """

    def some_since(ms: int) -> bool:
        with client.poll(topic, start=time_at(ms), limit=1) as found:
            return next(found, None) is not None

    low = high = now_ms
    step_ms = _FIRST_STEP_MS
    while not some_since(low):
        if low == 0:
            return None
        low, high = max(0, low - step_ms), low
        step_ms *= _STEP_FACTOR
    while high - low > _SHORT_MS:
        middle = (low + high) // 2
        low, high = (middle, high) if some_since(middle) else (low, middle)
    last = None
    for message in messages(client, topic, StreamPosition(low), view=None):
        last = message.id
    return last
