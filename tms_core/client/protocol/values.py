"""Timeouts, limits and retries of a client, as values that can be printed and compared.

The defaults fit a server in the same building. Pauses grow, so that a server that comes back is not met by all clients
at once, and are drawn at random for the same reason.
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
    """What one publish or one poll came to; a retried attempt is reported each time.

    Attributes:
        operation: ``publish`` or ``poll``; storing payloads of a transaction is a publish, too.
        topic: the topic, or the partition.
        messages, payload_bytes: how many were sent or received, and their size.
        seconds: until a publish was acknowledged, or the first byte of a poll's response.
        error: the name of the exception; empty where there was none.
    """

    operation: Literal["publish", "poll"]
    topic: TopicId
    messages: int
    payload_bytes: int
    seconds: float
    error: str = ""


#: Told of publishes and polls.
Measure = Callable[[Measured], None]


class _Positive:
    """Values of which each number is above 0."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # those that inherit from it are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigurationError(f"{type(self).__name__}.{field.name} is {value}.", "Give a number above 0.")


@dataclass(frozen=True, slots=True)
class Timeouts(_Positive):
    """How long to wait before giving up, in seconds.

    Attributes:
        connect_seconds: for a connection to the server.
        answer_seconds: for the first and each further piece of a response.
        send_seconds: for each piece of a request.
        free_connection_seconds: for a connection of the pool, where all are busy.
        transaction_seconds: for one whole call of the transaction service.
        close_seconds: for the publishing of queued messages when the client is closed or the program exits; longer than
            ``Buffer.delivery_seconds``, so that a server may be away just then. A call of the transaction service that
            is under way is waited for besides.
    """

    connect_seconds: float = 5
    answer_seconds: float = 60
    send_seconds: float = 60
    free_connection_seconds: float = 60
    transaction_seconds: float = 30
    close_seconds: float = 150


@dataclass(frozen=True, slots=True)
class Limits(_Positive):
    """How much a client holds at most.

    Attributes:
        connections: to the server, at once.
        idle_connections: kept for later.
        idle_seconds: how long; shorter than the server keeps them (75 s), because a publish that meets a connection
            just being closed is of unknown outcome.
        request_bytes: payloads in one request; the server takes 10 MB by default (``server.max_request_mb``).
        transaction_bytes: payloads that a transaction keeps in memory; larger transactions are sent before the commit.
    """

    connections: int = 20
    idle_connections: int = 10
    idle_seconds: float = 30
    request_bytes: int = 4_000_000
    transaction_bytes: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Retry(_Positive):
    """How often, and after which pauses, something is tried again.

    Attributes:
        attempts: how often altogether; 1: never again; None: as often as there is time for.
        first_seconds: the first pause, before chance shortens it.
        factor: how much longer each further pause is.
        longest_seconds: no pause is longer, unless the server asks for a longer one (``Retry-After``).
        longest_asked_seconds: no pause is longer that a server asks for.
    """

    attempts: int | None = 4
    first_seconds: float = 0.1
    factor: float = 2
    longest_seconds: float = 5
    longest_asked_seconds: float = 60

    def again(self, failures: int) -> bool:
        """Return whether it is tried again after so many failures."""
        return self.attempts is None or failures < self.attempts

    def pause_seconds(self, failures: int, random: Random, asked_seconds: float | None = None) -> float:
        """Return how long to wait after so many failures (1 and more): between half of the pause and all of it.

        Args:
            failures: how many.
            random: what shortens the pause.
            asked_seconds: how long the server asks to be left alone; the pause is not shorter.
        """
        try:
            whole = min(self.longest_seconds, self.first_seconds * self.factor ** (failures - 1))
        except OverflowError:
            whole = self.longest_seconds
        pause = whole * (1 + random.random()) / 2
        return pause if asked_seconds is None else max(pause, min(asked_seconds, self.longest_asked_seconds))


class WhenFull(Enum):
    """What ``publish_async`` does with a message for which there is no room."""

    #: Wait until there is; nothing is lost.
    BLOCK = "block"
    #: Drop it, and count it.
    DROP_NEWEST = "drop newest"
    #: Drop those that have waited longest, and count them.
    DROP_OLDEST = "drop oldest"
    #: Raise ``BufferFull``.
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Buffer(_Positive):
    """Where ``publish_async`` puts messages, and how they leave.

    Attributes:
        messages: how many may wait.
        size_bytes: how many bytes of payload may wait; a larger message is accepted if no other waits.
        batch_messages: how many are published in one request.
        linger_seconds: how long a message waits for company.
        when_full: the treatment of a message without room.
        retry: the pauses after which a batch that was not published is tried again, and how often at most.
        delivery_seconds: how long a batch is tried again, from its first attempt on; longer than another server needs
            to take over from one that died (``server.leader``).
    """

    messages: int = 10_000
    size_bytes: int = 16_000_000
    batch_messages: int = 1_000
    linger_seconds: float = 0.01
    when_full: WhenFull = WhenFull.BLOCK
    retry: Retry = Retry(attempts=None)
    delivery_seconds: float = 120
