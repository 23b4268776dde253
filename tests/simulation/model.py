"""The true history of the simulated world: every row, every topic, every transaction.

The janitor sees clock steps, lost snapshots and restored stores. The model does not: it keeps true time and the fate of
every write, and never reads the janitor's state.

The constants are the assumptions of the janitor's guarantees: the clocks of server and janitor differ by less than the
allowance while no guard trips, no timeout exceeds the maximum lifetime, and the grace period covers the clock skew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tms_core.rowkey import GENERATION_BYTES
from tms_core.topic import TopicId, encode_properties

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

#: True time at the start of every history, in 2023.
START_MS = 1_700_000_000_000

LIFETIME_MS = 2 * HOUR_MS
GRACE_MS = HOUR_MS
ALLOWANCE_MS = 5 * MINUTE_MS
HOLD_MS = HOUR_MS
INTERVAL_MS = 5 * MINUTE_MS

#: Maximum error of the server's clock, ahead or behind.
SKEW_MS = MINUTE_MS
#: Maximum error of a correct janitor clock; with the server's error it is below the allowance.
ERROR_MS = 200 * SECOND_MS
#: Maximum delay of a write after the server's lifetime check: the grace period minus the clock allowance.
LATE_MS = GRACE_MS - ALLOWANCE_MS
#: A smaller clock error after a boot looks like a machine that was switched off.
UNNOTICED_MS = 7 * DAY_MS
#: A clock error that puts a boot years before the janitor's last run.
LOST_MS = -10 * 365 * DAY_MS

Table = Literal["message", "payload"]
RowId = tuple[Table, bytes]


@dataclass(slots=True)
class Row:
    """A row that the store must contain.

    Attributes:
        time_ms: the time in its key, by the server's clock.
        pointer: the write pointer it was written with; None without a transaction.
        refers: whether the message has its payload in the payload table.
        negated: whether its client or the janitor inverted it.
        unrecognized: whether its key is foreign or its topic unknown; it must never be deleted.
        lost_cause: whether its transaction failed and is on no list: its client's rollback missed the row,
            or an operator restored it. Readers see the row; the janitor cannot prevent it.
        origin: the original topic and generation of a row restored from the archive; None for other rows.
    """

    table: Table
    key: bytes
    topic: str
    generation: int
    time_ms: int
    pointer: int | None = None
    refers: bool = False
    negated: bool = False
    unrecognized: bool = False
    lost_cause: bool = False
    origin: tuple[str, int] | None = None

    @property
    def home(self) -> tuple[str, int]:
        """The topic and generation of its publish."""
        return self.origin or (self.topic, self.generation)

    @property
    def tail(self) -> bytes:
        """The part of its key that a restore to another topic keeps."""
        return self.key[len(topic_id(self.topic).prefix) + GENERATION_BYTES :]

    @property
    def id(self) -> RowId:
        return self.table, self.key

    @property
    def readable(self) -> bool:
        """Whether its visibility depends on the transaction lists."""
        return self.table == "message" and self.pointer is not None and not self.negated


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic's metadata as it is stored.

    Attributes:
        generation: negative once deleted.
        garbled: whether the row is unreadable.
    """

    generation: int
    ttl_seconds: int
    garbled: bool = False

    @property
    def usable(self) -> bool:
        """Whether the server serves the topic."""
        return self.generation > 0 and not self.garbled

    def encode(self) -> bytes:
        ttl = "soon" if self.garbled else str(self.ttl_seconds)
        return encode_properties({"generation": str(self.generation), "ttl": ttl})


@dataclass(slots=True)
class Client:
    """A transaction from the point of view of its client.

    Attributes:
        pointers: its id, then its checkpoints.
        topics: topics of its publishes, which a rollback must visit.
        done: whether the client has committed or aborted. A client continues after a timeout until it notices.
    """

    pointers: list[int]
    long: bool
    topics: set[str] = field(default_factory=set)
    done: bool = False

    @property
    def id(self) -> int:
        return self.pointers[0]

    @property
    def write_pointer(self) -> int:
        return self.pointers[-1]


def topic_id(name: str) -> TopicId:
    return TopicId("sim", name)
