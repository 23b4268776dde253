"""The status of a janitor for operators, as one frozen value.

The status page, ``janitor status``, the API and the metrics all use it, so they cannot contradict each other (rule
S15). The daemon collects it from time to time, or it is collected from the state alone. A reader never waits for a
sweep and never makes the janitor read a table.

Times are milliseconds since the epoch. In JSON, write pointers are decimal strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from janitor.state.base import CounterKey
from janitor.state.figures import BlockedReaders, ConsumerFigures, GuardNote, SnapshotRead, StatisticsFigures
from janitor.state.records import Pause, RunRecord
from janitor.state.values import pack


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic's queue, and the delay of its deletions.

    Attributes:
        generation: the metadata's, signed.
        messages, size_bytes, oldest_ms, newest_ms, counted_ms: from the background count; None: not counted yet.
        overdue_rows: rows of both tables that were due in the last run and stayed.
        oldest_overdue_ms: the time of the oldest of them; None: there are none.
        sizes: past sizes as pairs of time and bytes, oldest first, at most 24; only of the 200 largest topics.
    """

    tms_namespace: str
    topic: str
    generation: int
    ttl_seconds: int
    messages: int | None = None
    size_bytes: int | None = None
    oldest_ms: int | None = None
    newest_ms: int | None = None
    counted_ms: int | None = None
    overdue_rows: int = 0
    oldest_overdue_ms: int | None = None
    sizes: Sequence[tuple[int, int]] = ()

    @property
    def name(self) -> str:
        return f"{self.tms_namespace}:{self.topic}"


@dataclass(frozen=True, slots=True)
class HeldTopic:
    """Held deletions of one topic.

    Attributes:
        reason: a ``Hold``.
        rows, size_bytes, oldest_ms: the held rows in the last run.
        until_ms: the time when the hold ends by itself; None: never.
        command: the command that releases them; empty: no action is required.
        cause: the change of the topic that caused the hold, in words; empty: not known.
        keep: commands that keep the rows; each alone is enough.
    """

    topic: str
    reason: str
    rows: int
    size_bytes: int
    oldest_ms: int | None
    until_ms: int | None
    command: str
    cause: str = ""
    keep: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A topic that failed too often (invariant S9)."""

    topic: str
    since_ms: int
    strikes: int
    error: str
    probe_ms: int


@dataclass(frozen=True, slots=True)
class Running:
    """A current run.

    Attributes:
        rows: the number of read rows.
        done, expected: the number of due messages read, and their approximate total in counted topics; 0: not known.
    """

    id: str
    started_ms: int
    heartbeat_ms: int
    phase: str
    topic: str
    rows: int
    done: int = 0
    expected: int = 0


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An invalid transaction whose client may still write, or which awaits a full pass."""

    pointer: str
    began_ms: int
    first_seen_ms: int


@dataclass(frozen=True, slots=True)
class SnapshotFigures(SnapshotRead):
    """The transaction snapshot, and its open invalid transactions.

    Attributes:
        oldest_open: the transactions that have been open longest, at most ten.
    """

    open: int = 0
    oldest_open: Sequence[OpenTransaction] = ()


@dataclass(frozen=True, slots=True)
class BoundaryFigures:
    """The prune boundary in force, and the limits of a boundary that could be proven now.

    Attributes:
        refuted: the refutation of the last boundary, until another one is proven; empty otherwise.
        last: the last proven boundary, in force or not; None: no boundary is wanted.
    """

    bound: str | None = None
    made_ms: int | None = None
    run_id: str | None = None
    limits: Sequence[tuple[str, str]] = ()
    obstacles: Sequence[str] = ()
    refuted: str = ""
    last: str | None = None


@dataclass(frozen=True, slots=True)
class AheadTopic:
    """A topic with messages dated in the future, which therefore outlive their TTL."""

    topic: str
    newest_ms: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Rows of one table and rule that are due and still exist."""

    table: str
    rule: str
    rows: int
    oldest_ms: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """The whole status of a janitor.

    Attributes:
        process: ``running``: a daemon; ``between_runs``: collected from the state alone, and runs are started from
            outside, the last one recently; ``down`` otherwise.
        mode: ``apply`` or ``plan_only`` (``janitor.apply: false``).
        schedule: in words, such as ``every 60 s``.
        every_seconds: the interval of sweeps; None: by a crontab, or from outside.
        started_ms: when the daemon started; None: there is no daemon.
        heartbeat_ms: the last heartbeat of the daemon, or else of the last run.
        history_since_ms: when the state started; nothing older is known.
        leader: whether this process has the lease.
        lease_holder: the holder of the lease; empty if it does not exist.
        skew_seconds: how far wall time is ahead, by the clock it was compared with.
        late: transactions that readers have waited for longest, first; known only from a daemon that can ask.
        statistics: None: the store was never counted on Spark.
        ahead: counted topics whose newest message is dated ahead of the clock by more than its allowance.
        failing: the errors of the daemon's jobs whose last call failed.
        counters: every counter since the state started, without the prefix.
    """

    version: str
    store: str
    process: Literal["running", "between_runs", "down"]
    mode: Literal["apply", "plan_only"]
    schedule: str
    now_ms: int
    every_seconds: int | None = None
    started_ms: int | None = None
    heartbeat_ms: int | None = None
    next_run_ms: int | None = None
    history_since_ms: int | None = None
    adopted_ms: int | None = None
    leader: bool = False
    lease_holder: str = ""
    running: Running | None = None
    last_run: RunRecord | None = None
    last_success_ms: Mapping[str, int] = field(default_factory=dict)
    paused: Sequence[Pause] = ()
    quarantined: Sequence[Quarantined] = ()
    held: Sequence[HeldTopic] = ()
    overdue: Sequence[Overdue] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    guards: Sequence[GuardNote] = ()
    snapshot: SnapshotFigures = SnapshotFigures()
    boundary: BoundaryFigures = BoundaryFigures()
    skew_seconds: Mapping[str, float] = field(default_factory=dict)
    topics: Sequence[TopicFigures] = ()
    consumers: Sequence[ConsumerFigures] = ()
    late: Sequence[BlockedReaders] = ()
    statistics: StatisticsFigures | None = None
    ahead: Sequence[AheadTopic] = ()
    failing: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[CounterKey, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values; counters are for the metrics and not in it."""
        document: dict[str, Any] = pack(self)
        del document["counters"]
        return document
