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

from janitor.report import GuardNote
from janitor.state.base import CounterKey

#: How a run ends that has not done its work.
_BAD_RESULTS = frozenset({"failed", "lost", "stopped", "partial"})


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
class ConsumerFigures:
    """How far one consumer has read, as the background count found it.

    Attributes:
        position_ms: publish time of the last message it has read; 0: it has read none.
        updated_ms: when it said so.
        lag_messages: how many messages it had not read.
        oldest_unread_ms: publish time of the oldest of them; None when it had read all.
        expired: whether messages may have expired before it has read them.
        open_claims: of a group, how many ranges of messages transactions have claimed that are in progress.
        redelivered: of a group, how many ranges that are not processed were given out more than once.
    """

    tms_namespace: str
    topic: str
    generation: int
    consumer: str
    position_ms: int
    updated_ms: int
    lag_messages: int
    oldest_unread_ms: int | None
    expired: bool
    counted_ms: int
    open_claims: int = 0
    redelivered: int = 0


@dataclass(frozen=True, slots=True)
class StatisticsFigures:
    """What lay in the whole store when it was last counted on Spark.

    Attributes:
        rows, payload_rows, size_bytes: of all topics and generations.
        overdue: rows of both tables that the law takes, by rule.
        orphans: payload rows that no message refers to.
        missing: references to payloads of which there is no row.
        blocking: the undecided write pointer that has held up readers longest; None without one.
        blocking_topic: a topic it has written to, with the number of its generation.
        blocking_since_ms: when it started.
    """

    counted_ms: int
    rows: int = 0
    payload_rows: int = 0
    size_bytes: int = 0
    overdue: Mapping[str, int] = field(default_factory=dict)
    orphans: int = 0
    missing: int = 0
    blocking: str | None = None
    blocking_topic: str | None = None
    blocking_since_ms: int | None = None


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
        result: ``done``, ``partial``, ``stopped`` (by a guard), ``halted`` (by a signal or a pause), ``failed`` or
            ``lost``; empty while it goes on.
        deleted_bytes: of the rows that were deleted; about, since values are estimated.
        messages: as of :class:`janitor.report.MessagesLeft`; empty for a run of an older version.
        store_bytes: what the store took on its disk "before" and "after"; empty for a run of an older version.
        error: why it failed, empty otherwise.
        stopped_by: the guards that stopped it.
    """

    id: str
    mode: str
    started_ms: int
    finished_ms: int | None
    result: str
    expired: int = 0
    old_generation: int = 0
    invalid_transaction: int = 0
    held: int = 0
    duration_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    thorough: bool = False
    errors: Sequence[str] = ()
    error: str = ""
    stopped_by: Sequence[str] = ()
    deleted_bytes: int = 0
    processed: int = 0
    store_bytes: Mapping[str, int | None] = field(default_factory=dict)
    messages: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Return whether it has not done its work, and that is no matter of adoption, which is said elsewhere."""
        return self.result in _BAD_RESULTS and tuple(self.stopped_by) != ("adoption",)


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
class SnapshotFigures:
    """The transaction snapshot.

    Attributes:
        timestamp_ms: None without one.
        problem: a ``txstate.Problem``; empty when it is used.
        oldest_open: the transactions that have been open longest, at most ten.
    """

    timestamp_ms: int | None = None
    source: str = ""
    problem: str = ""
    message: str = ""
    invalid: int = 0
    open: int = 0
    in_progress: int = 0
    oldest_open: Sequence[OpenTransaction] = ()


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


@dataclass(frozen=True, slots=True)
class BlockedReaders:
    """Readers in transactions that wait at the messages of a transaction in progress.

    Attributes:
        client: who holds it; empty where that is not known.
        since_ms: when the first of its messages was published.
        topics: where it has published.
        more_topics: how many topics there are beside those.
        command: what ends it; its writes are hidden for good.
    """

    transaction: str
    client: str
    since_ms: int
    topics: Sequence[str]
    more_topics: int = 0
    command: str = ""

    @property
    def readers(self) -> str:
        """Of which topics readers wait, in words."""
        named = ", ".join(self.topics[:3])
        more = len(self.topics[3:]) + self.more_topics
        return f"{named} and {more} more" if more else named


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
