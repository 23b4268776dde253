"""What really happened in the simulated world: every row, every topic, every transaction.

The janitor sees clocks that step, snapshots that get lost and a store that is restored behind its back. The model sees
none of that: it keeps honest time and remembers what was written and what became of it. It never asks the janitor.

The assumptions under which the janitor's promises hold are constants here, so that a reader finds them in one place:
the server's and the janitor's clock differ by less than the allowance while no guard has tripped, no transaction's
time-out is longer than the maximum lifetime, and what the clocks differ by comes out of the grace period.
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

#: When every history begins: an honest day in 2023, at a whole second.
START_MS = 1_700_000_000_000

LIFETIME_MS = 2 * HOUR_MS
GRACE_MS = HOUR_MS
ALLOWANCE_MS = 5 * MINUTE_MS
HOLD_MS = HOUR_MS
INTERVAL_MS = 5 * MINUTE_MS

#: The server's clock is never further off than this, either way.
SKEW_MS = MINUTE_MS
#: The janitor's clock passes for right up to here; with the server's it makes less than the allowance.
ERROR_MS = 200 * SECOND_MS
#: A write that passed the server's lifetime check lands at most this much later: the grace, less what clocks take.
LATE_MS = GRACE_MS - ALLOWANCE_MS
#: A machine that boots with a clock ahead by less than this looks like one that was switched off for a while.
UNNOTICED_MS = 7 * DAY_MS
#: A machine that boots with a clock behind by this much is in a year before the janitor's last run.
LOST_MS = -10 * 365 * DAY_MS

Table = Literal["message", "payload"]
RowId = tuple[Table, bytes]


@dataclass(slots=True)
class Row:
    """A row that is in the store, or should be.

    Attributes:
        time_ms: the time in its key, by the server's clock.
        pointer: the write pointer it was written with; None without a transaction.
        refers: a message that takes its payload from the payload table.
        negated: its pointer was negated, by its client or by the janitor.
        unrecognized: its key is not one of ours, or nobody knows its topic; it must stay for ever.
        lost_cause: its transaction failed and no list names it any more, through no fault of the janitor: its client
            could not reach it when it rolled back, or an operator restored it. Readers see it; nobody can help that.
        origin: topic and generation it was published in, where it came from the archive; None: where it is.
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
        """Topic and generation it was published in."""
        return self.origin or (self.topic, self.generation)

    @property
    def tail(self) -> bytes:
        """What of its key stays the same wherever it is restored to."""
        return self.key[len(topic_id(self.topic).prefix) + GENERATION_BYTES :]

    @property
    def id(self) -> RowId:
        return self.table, self.key

    @property
    def readable(self) -> bool:
        """Whether a transactional reader asks the transaction lists about it."""
        return self.table == "message" and self.pointer is not None and not self.negated


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic's metadata as it is stored.

    Attributes:
        generation: negative once deleted.
        garbled: somebody made the row unreadable.
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
    """One client's transaction, as the client knows it.

    Attributes:
        pointers: its id, then its checkpoints.
        topics: where it has published; where it must roll back.
        done: it has committed or aborted, and writes no more. A client that was timed out goes on until it notices.
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
