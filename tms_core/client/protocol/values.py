"""Timeouts, limits and retries of a client, as values that can be printed and compared.

The defaults fit a server in the same building. Pauses grow and are randomized, so that not all clients reconnect to a
restarted server at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from random import Random
from typing import Literal

from tms_core.errors import ConfigurationError
from tms_core.topic import TopicId


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a publish or a poll; each attempt is reported.

    Attributes:
        operation: ``publish`` or ``poll``; storing payloads of a transaction is a publish, too.
        topic: the topic, or the partition.
        messages, payload_bytes: the number of messages sent or received, and their size.
        seconds: the time until a publish was acknowledged, or until the first byte of a poll's response.
        error: the name of the exception; empty after a success.
    """

    operation: Literal["publish", "poll"]
    topic: TopicId
    messages: int
    payload_bytes: int
    seconds: float
    error: str = ""


#: The hook for publishes and polls.
Measure = Callable[[Measured], None]


class _Positive:
    """A base of values whose numbers must be above 0."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # those that inherit from it are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigurationError(f"{type(self).__name__}.{field.name} is {value}.", "Use a number above 0.")


@dataclass(frozen=True, slots=True)
class Timeouts(_Positive):
    """Time limits of a client, in seconds.

    Attributes:
        connect_seconds: for a connection to the server.
        answer_seconds: for the first and each further piece of a response.
        send_seconds: for each piece of a request.
        free_connection_seconds: for a free connection of the pool.
        transaction_seconds: for one whole call of the transaction service.
        close_seconds: for publishing queued messages when the client is closed or the program exits; longer than
            ``Buffer.delivery_seconds``, so that the client survives a server that is down at that time. The client also
            waits for a running call of the transaction service.
    """

    connect_seconds: float = 5
    answer_seconds: float = 60
    send_seconds: float = 60
    free_connection_seconds: float = 60
    transaction_seconds: float = 30
    close_seconds: float = 150


@dataclass(frozen=True, slots=True)
class Limits(_Positive):
    """Size limits of a client.

    Attributes:
        connections: the most concurrent connections to the server.
        idle_connections: the most idle connections in the pool.
        idle_seconds: how long an idle connection stays open; less than the server's 75 s, because a publish over a
            connection that the server is closing has an unknown outcome.
        request_bytes: the most bytes of payload in a request; the server accepts 10 MB by default
            (``server.max_request_mb``).
        transaction_bytes: the most bytes of payload that a transaction keeps in memory; a larger transaction sends them
            before the commit.
    """

    connections: int = 20
    idle_connections: int = 10
    idle_seconds: float = 30
    request_bytes: int = 4_000_000
    transaction_bytes: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Retry(_Positive):
    """The number of attempts, and the pauses between them.

    Attributes:
        attempts: the most attempts; 1: no repetition; None: no limit but the time.
        first_seconds: the first pause, before randomness shortens it.
        factor: the ratio of two successive pauses.
        longest_seconds: the longest pause, unless the server requests a longer one (``Retry-After``).
        longest_asked_seconds: the longest pause that a server can request.
    """

    attempts: int | None = 4
    first_seconds: float = 0.1
    factor: float = 2
    longest_seconds: float = 5
    longest_asked_seconds: float = 60

    def again(self, failures: int) -> bool:
        """Return whether another attempt follows after so many failures."""
        return self.attempts is None or failures < self.attempts

    def pause_seconds(self, failures: int, random: Random, asked_seconds: float | None = None) -> float:
        """Return the pause after so many failures (1 and more), in seconds: between half of the pause and all of it.

        Args:
            random: the source of randomness that shortens the pause.
            asked_seconds: the pause that the server requests; the returned pause is not shorter.
        """
        try:
            whole = min(self.longest_seconds, self.first_seconds * self.factor ** (failures - 1))
        except OverflowError:
            whole = self.longest_seconds
        pause = whole * (1 + random.random()) / 2
        return pause if asked_seconds is None else max(pause, min(asked_seconds, self.longest_asked_seconds))


class WhenFull(Enum):
    """The treatment of a message of ``publish_async`` when the buffer is full."""

    #: Wait for room; nothing is lost.
    BLOCK = "block"
    #: Drop the message, and count it.
    DROP_NEWEST = "drop newest"
    #: Drop the messages that have waited longest, and count them.
    DROP_OLDEST = "drop oldest"
    #: Raise ``BufferFull``.
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Buffer(_Positive):
    """The buffer of ``publish_async``.

    Attributes:
        messages: the most waiting messages.
        size_bytes: the most bytes of waiting payload; a larger message is accepted if no other message waits.
        batch_messages: the most messages in one request.
        linger_seconds: how long a message waits for further messages of its batch.
        when_full: the treatment of a message without room.
        retry: the pauses between attempts to publish a batch, and the most attempts.
        delivery_seconds: how long attempts are repeated, from the first one on; longer than another server needs to
            take over from a server that died (``server.leader``).
    """

    messages: int = 10_000
    size_bytes: int = 16_000_000
    batch_messages: int = 1_000
    linger_seconds: float = 0.01
    when_full: WhenFull = WhenFull.BLOCK
    retry: Retry = Retry(attempts=None)
    delivery_seconds: float = 120
