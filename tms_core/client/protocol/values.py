"""Timeouts, limits and retries of a client, as values that can be printed and compared.

The defaults suit a server in the same data center. Pauses between attempts grow and have jitter, so that clients do not
all reconnect to a restarted server at the same time.
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
    """The measurement of one attempt to publish or to poll.

    Attributes:
        operation: ``publish`` or ``poll``; storing payloads of a transaction counts as a publish.
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


#: A hook that the client calls after each attempt to publish or to poll.
Measure = Callable[[Measured], None]


class _Positive:
    """A base class for dataclasses whose numbers must be positive."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigurationError(f"{type(self).__name__}.{field.name} is {value}.", "Use a number above 0.")


@dataclass(frozen=True, slots=True)
class Timeouts(_Positive):
    """Time limits of a client, in seconds.

    Attributes:
        connect_seconds: the limit for opening a connection to the server.
        answer_seconds: the limit for each piece of a response, including the first.
        send_seconds: the limit for each piece of a request.
        free_connection_seconds: the longest wait for a free connection in the pool.
        transaction_seconds: the limit for a complete call to the transaction service.
        close_seconds: the limit for publishing queued messages when the client is closed or the program exits; longer
            than ``Buffer.delivery_seconds``, so that retries can outlast an outage of the server. Running calls to the
            transaction service can extend it.
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
        connections: the maximum number of connections to the server.
        idle_connections: the maximum number of idle connections in the pool.
        idle_seconds: how long an idle connection stays open; less than the server's 75 s, because a publish over a
            connection that the server is closing has an unknown outcome.
        request_bytes: the maximum size of the payloads in a request; the server accepts 10 MB by default
            (``server.max_request_mb``).
        transaction_bytes: the maximum size of the payloads that a transaction keeps in memory; a larger transaction
            sends payloads before the commit.
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
        attempts: the maximum number of attempts; 1: no retry; None: only time limits apply.
        first_seconds: the first pause, before jitter shortens it.
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
        """Return whether another attempt is allowed after this number of failures."""
        return self.attempts is None or failures < self.attempts

    def pause_seconds(self, failures: int, random: Random, asked_seconds: float | None = None) -> float:
        """Return the pause after this number of failures (at least 1), in seconds; jitter removes at most half of it.

        Args:
            random: the source of the jitter.
            asked_seconds: the pause that the server requests; the returned pause is not shorter.
        """
        try:
            whole = min(self.longest_seconds, self.first_seconds * self.factor ** (failures - 1))
        except OverflowError:
            whole = self.longest_seconds
        pause = whole * (1 + random.random()) / 2
        return pause if asked_seconds is None else max(pause, min(asked_seconds, self.longest_asked_seconds))


class WhenFull(Enum):
    """The policy of ``publish_async`` for a message that does not fit into the buffer."""

    #: Wait for space; no message is lost.
    BLOCK = "block"
    #: Drop the message, and count it.
    DROP_NEWEST = "drop newest"
    #: Drop the oldest messages in the buffer, and count them.
    DROP_OLDEST = "drop oldest"
    #: Raise ``BufferFull``.
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Buffer(_Positive):
    """The buffer of ``publish_async``.

    Attributes:
        messages: the maximum number of waiting messages.
        size_bytes: the maximum size of the waiting payloads; an empty buffer accepts a larger message.
        batch_messages: the maximum number of messages in a request.
        linger_seconds: the time that a batch waits for further messages.
        when_full: the policy for a message that does not fit.
        retry: the number of attempts to publish a batch, and the pauses between them.
        delivery_seconds: the time for retries, from the first attempt on; longer than a failover to another server
            takes (``server.leader``).
    """

    messages: int = 10_000
    size_bytes: int = 16_000_000
    batch_messages: int = 1_000
    linger_seconds: float = 0.01
    when_full: WhenFull = WhenFull.BLOCK
    retry: Retry = Retry(attempts=None)
    delivery_seconds: float = 120
