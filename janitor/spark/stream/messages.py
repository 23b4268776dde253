"""Reading a topic of a server: on through answers that break off, and where it stops."""

from __future__ import annotations

from collections.abc import Iterator

from janitor.spark.stream.offsets import StreamPosition
from tms_core.client import Client, Message, MessageId, TopicId, Transaction, Unanswered, Unavailable
from tms_core.client.protocol.messages import time_at

#: How far back the last message is first looked for, in milliseconds, and how much farther each time.
_FIRST_STEP_MS, _STEP_FACTOR = 1_000, 32
#: A time so short that its messages are read rather than searched, in milliseconds.
_SHORT_MS = 64


def messages(
    client: Client, topic: TopicId, place: StreamPosition, *, view: Transaction | None, limit: int | None = None
) -> Iterator[Message]:
    """Yield the messages behind a place, in order; an answer that breaks off is asked for again behind the last
    message.

    Args:
        client: the requesting principal.
        topic: whose messages.
        place: where they start.
        view: what is committed; None: everything is shown.
        limit: the most there may be.

    Raises:
        MessagingError: the server does not answer, or refuses.
    """
    left, came = limit, True
    while left is None or left > 0:
        try:
            poll = client.poll(topic, start=place.start, inclusive=place.inclusive, limit=left, transaction=view)
            with poll as found:
                came = False
                for message in found:
                    place, came = StreamPosition.behind(message.id), True
                    left = None if left is None else left - 1
                    yield message
        except (Unanswered, Unavailable):
            if not came:
                raise
        else:
            return


def newest(client: Client, topic: TopicId, now_ms: int) -> MessageId | None:
    """Return the last message of a topic, committed or not; None where there is none.

    The server does not say where a topic ends, so it is searched for by time: back from now in growing steps, then by
    halving.

    Args:
        client: the requesting principal.
        topic: whose last message.
        now_ms: where it is likely to be.
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
