"""The status of a janitor for operators, as one frozen value.

The status page, ``janitor status``, the API and the metrics all use it, so they cannot contradict each other (invariant
S15). The daemon collects it periodically; without a daemon it is collected from the state alone. A reader never waits
for a sweep and never makes the janitor read a table.

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
        generation: the generation in the metadata, signed.
        messages, size_bytes, oldest_ms, newest_ms, counted_ms: the background count; None before the first count.
        overdue_rows: the number of due rows of both tables that the last run did not delete.
        oldest_overdue_ms: the time of the oldest overdue row; None without overdue rows.
        sizes: up to 24 past sizes as pairs of time and bytes, oldest first; only for the 200 largest topics.
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
        until_ms: the time when the hold expires; None if it does not expire.
        command: the command that releases the rows; empty if no action is required.
        cause: a description of the change of the topic that caused the hold; empty if unknown.
        keep: commands that keep the rows; each of them suffices.
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
    """The run in progress.

    Attributes:
        rows: the number of read rows.
        done, expected: the number of due messages read, and their approximate total in counted topics; 0 if unknown.
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
    """An invalid transaction whose client may still write, or that no full pass has covered since."""

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
    """The prune boundary in force, and the limits of the boundary that the present evidence proves.

    Attributes:
        refuted: the refutation of the last boundary, until another boundary is proven; otherwise empty.
        last: the last proven boundary, in force or not; None if no lifetime is configured.
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
        process: ``running``: a daemon runs; ``between_runs``: no daemon, but a scheduled run was recent; ``down``
            otherwise.
        mode: ``apply`` or ``plan_only`` (``janitor.apply: false``).
        schedule: a description such as ``every 60 s``.
        every_seconds: the interval of sweeps; None for a crontab or an external schedule.
        started_ms: the start of the daemon; None without a daemon.
        heartbeat_ms: the last heartbeat of the daemon, or else of the last run.
        history_since_ms: the creation of the state; nothing older is known.
        leader: whether this process has the lease.
        lease_holder: the holder of the lease; empty without a lease.
        skew_seconds: how far wall time is ahead of other clocks, by clock.
        late: transactions that block readers, longest first; only from a daemon that reaches the transaction manager.
        statistics: the last count on Spark; None before the first count.
        ahead: counted topics whose newest message is dated in the future by more than the clock allowance.
        failing: the errors of the daemon's jobs whose last call failed.
        counters: all counters since the creation of the state, without the prefix.
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
        """Return the status as JSON values, without the counters, which are for metrics."""
        document: dict[str, Any] = pack(self)
        del document["counters"]
        return document
