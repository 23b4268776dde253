"""What an operator sees of a janitor, as one frozen value.

The status page, ``janitor status``, the API and the metrics are all drawn from it, so that they cannot contradict each
other (rule S15). It is taken now and then, by the daemon or from the state alone, and handed out on request: a
reader never waits for a sweep and never makes the janitor read a table.

Times are milliseconds since the epoch. In JSON, write pointers are decimal strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from janitor.state.base import CounterKey
from janitor.state.figures import BlockedReaders, ConsumerFigures, GuardNote, SnapshotRead, StatisticsFigures
from janitor.state.records import Mode

#: How a run ends that has not done its work.
_BAD_RESULTS = frozenset({"failed", "lost", "blocked", "partial"})


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic's queue, and how far behind its cleaning is.

    Attributes:
        generation: the metadata's, signed.
        messages, size_bytes, oldest_ms, newest_ms, counted_ms: as the background count found them; None before it did.
        overdue_rows: rows that were due in the last run and stayed; of both tables.
        oldest_overdue_ms: the time of the oldest of them; None without any.
        sizes: its sizes so far as pairs of time and bytes, oldest first, at most 24; only of the 200 largest topics.
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
    """Deletions of one topic that wait.

    Attributes:
        reason: a ``Hold``.
        rows, size_bytes, oldest_ms: what waited in the last run.
        until_ms: when it goes by itself; None: never.
        command: what lets it go; empty where nothing has to be done.
        cause: what has happened to the topic, in words, where that is known; empty otherwise.
        keep: what keeps the rows, as commands: each alone is enough.
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
    """A topic that failed too often (rule S9)."""

    topic: str
    since_ms: int
    strikes: int
    error: str
    probe_ms: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a line.

    Attributes:
        mode: ``plan`` or ``apply``.
        result: ``done``, ``partial``, ``blocked`` (by a guard), ``interrupted`` (by a signal or a pause), ``failed`` or
            ``lost``; empty while it goes on.
        deleted_bytes: of the rows that were deleted; about, since values are estimated.
        messages: as of :class:`janitor.report.MessagesLeft`; empty for a run of an older version.
        store_bytes: what the store took on its disk "before" and "after"; empty for a run of an older version.
        error: why it failed, empty otherwise.
        blocked_by: the guards that stopped it.
    """

    id: str
    mode: Mode
    started_ms: int
    finished_ms: int | None
    result: str
    expired: int = 0
    old_generation: int = 0
    invalid_transaction: int = 0
    held: int = 0
    duration_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    full: bool = False
    errors: Sequence[str] = ()
    error: str = ""
    blocked_by: Sequence[str] = ()
    deleted_bytes: int = 0
    processed: int = 0
    store_bytes: Mapping[str, int | None] = field(default_factory=dict)
    messages: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Return whether it has not done its work, and that is no matter of adoption, which is said elsewhere."""
        return self.result in _BAD_RESULTS and tuple(self.blocked_by) != ("adoption",)


@dataclass(frozen=True, slots=True)
class Running:
    """A run under way.

    Attributes:
        rows: how many were read.
        done, expected: how many messages that are due were read, and about how many there were, as far as topics were
            counted before; 0: that is not known.
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
    """The transaction snapshot, and the invalid transactions that are open by it.

    Attributes:
        oldest_open: the transactions that have been open longest, at most ten.
    """

    open: int = 0
    oldest_open: Sequence[OpenTransaction] = ()


NO_SNAPSHOT = SnapshotFigures()


@dataclass(frozen=True, slots=True)
class BoundaryFigures:
    """The prune boundary: the claim in force, and what holds back one made now.

    Attributes:
        refuted: how the last claim turned out to be false, until there is another one; empty otherwise.
        last: the boundary that was claimed last, in force or not; None where none is wanted.
    """

    bound: str | None = None
    made_ms: int | None = None
    run_id: str | None = None
    limits: Sequence[tuple[str, str]] = ()
    obstacles: Sequence[str] = ()
    refuted: str = ""
    last: str | None = None


class AheadTopic(NamedTuple):
    """A topic whose messages are dated ahead of the clock, and so outlive their ttl."""

    topic: str
    newest_ms: int


class Overdue(NamedTuple):
    """Rows of one table and rule that are due and still there."""

    table: str
    rule: str
    rows: int
    oldest_ms: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """The whole status of a janitor.

    Attributes:
        process: ``running`` in a daemon; ``between_runs`` when it was taken from the state alone and runs are started
            from outside, the last one not long ago; ``down`` otherwise.
        mode: ``apply`` or ``plan_only`` (``janitor.apply: false``).
        schedule: in words, as in ``every 60 s``.
        every_seconds: how often sweeps run; None by a crontab, or from outside.
        started_ms: when the daemon started; None when none runs.
        heartbeat_ms: when the daemon, or else the last run, last showed that it was alive.
        history_since_ms: when the state started; nothing older is known.
        leader: whether this process has the lease.
        lease_holder: who has it; empty for none.
        skew_seconds: how far wall time is ahead, by the clock it was compared with.
        late: transactions that readers have waited for longest first; known while a daemon runs that can ask.
        statistics: None before the store was ever counted on Spark.
        ahead: topics whose newest message, as far as they were counted, is dated ahead of the clock by more than its
            allowance.
        failing: jobs of the daemon that failed when they were last done, and why.
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
    last_run: RunSummary | None = None
    last_success_ms: Mapping[str, int] = field(default_factory=dict)
    paused: Sequence[tuple[str, int]] = ()
    quarantined: Sequence[Quarantined] = ()
    held: Sequence[HeldTopic] = ()
    overdue: Sequence[Overdue] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    guards: Sequence[GuardNote] = ()
    snapshot: SnapshotFigures = NO_SNAPSHOT
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
        rest = {name: getattr(self, name) for name in self.__slots__ if name not in ("counters", "topics")}
        document = {name: _plain(value) for name, value in rest.items()}
        document["paused"] = [{"pattern": pattern, "since_ms": since_ms} for pattern, since_ms in self.paused]
        document["guards"] = [note.to_json() for note in self.guards]
        # Thousands of them, and asdict copies each field by field.
        document["topics"] = [{name: getattr(topic, name) for name in TopicFigures.__slots__} for topic in self.topics]
        return document


def _plain(value: Any) -> Any:
    """Return a value of the status as JSON has it."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
