"""The data of one run: id, mode, clock, store, settings, transactions, and all topics.

A run reads them once. Only a topic whose metadata changes is read again (invariant S2). A plan and a run use the same
data and so come to the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from janitor.boundary import Refutation
from janitor.report import DataTable
from janitor.rules.policy import Frontier, Hold, admit, advance, freeze
from janitor.rules.ranges import Lifetime
from janitor.state.base import ClockAnchor, FrontierRecord, ProvenBoundary, RunRecord, StoreRecord
from janitor.state.figures import GuardNote
from janitor.state.records import Mode
from janitor.sweep.consumers import ConsumerHolds, ProcessedRows
from janitor.sweep.transactions import (
    DecidedTransactions,
    InvalidListChange,
    TransactionView,
    TxState,
    limit_to_decided,
    search_since_ms,
)
from tms_core.errors import MetadataError
from tms_core.tables.base import KeyRange, Reads
from tms_core.tables.lease import LeaseRecord
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata

#: The minimum advance of a topic's cutoff after which an incremental pass visits the topic.
MIN_WINDOW_MS = 60_000


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a run.

    Attributes:
        hold_seconds: how long a jump of the cutoff is held.
        protect: shell patterns of topics whose rows are never deleted.
        lifetime: how long transactions may write, and how far clocks may differ.
        lifetime_known: whether the lifetime is configured; otherwise no boundary is published.
        snapshot_interval_seconds: the interval at which the transaction service writes snapshots.
        consumer_hold_seconds: how long after its TTL an unread message of a consumer is held; None: not at all.
        is_snapshot_required: whether a missing source of snapshots is reported; False if the settings disable it.
        batch_rows: the maximum number of rows in a page and in a batch.
        rows_per_second: the rate limit of deletions, in a Spark task its share; None: no limit.
        history_days: how long the history of runs is kept.
        archive_days: how long archived rows are kept.
    """

    hold_seconds: int
    protect: tuple[str, ...]
    lifetime: Lifetime
    lifetime_known: bool
    snapshot_interval_seconds: int
    consumer_hold_seconds: int | None = None
    is_snapshot_required: bool = True
    batch_rows: int = 4000
    rows_per_second: float | None = None
    history_days: int = 30
    archive_days: int = 7

    @property
    def history_ms(self) -> int:
        return self.history_days * 86_400_000

    def protects(self, topic: TopicId) -> bool:
        return topic.matches(self.protect)


@dataclass(frozen=True, slots=True)
class TopicWork:
    """One topic in a pass.

    Attributes:
        raw: the value of the metadata row when it was read; invariant S2 compares it.
        record: the frontier record to save once the pass has applied the frontier.
        waits: whether an incremental pass skips the topic, because few rows have come due since the last pass.
        counts_held: whether held rows are counted. An incremental pass counts them only for a new hold, or if the
            number of rows held for a consumer has grown much.
    """

    topic: TopicMetadata
    raw: bytes
    frontier: Frontier
    record: FrontierRecord
    waits: bool = False
    counts_held: bool = True


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of a plan file: its ranges and pointers, by topic.

    Attributes:
        frontiers: the frontier of each topic in the plan. A range may contain rows that this frontier held.
    """

    by_topic: Mapping[tuple[DataTable, TopicId], tuple[KeyRange, ...]]
    pointers: Mapping[TopicId, frozenset[int]]
    frontiers: Mapping[TopicId, Frontier] = field(default_factory=dict)

    def ranges(self, table: DataTable, topic: TopicId) -> tuple[KeyRange, ...]:
        return self.by_topic.get((table, topic), ())


#: How much of the store a pass reads.
PassKind = Literal["full", "frequent", "incremental"]
#: The record of a query, which is not a run.
NO_RUN = RunRecord("", "plan", 0)


def never_created_empty(_: TopicMetadata) -> bool:
    """Return False: no topic is known to be new."""
    return False


@dataclass(frozen=True, slots=True)
class Preparation:
    """The basis of each query and each run, besides the tables.

    Attributes:
        now: the clocks; ``wall_ms`` is the time at which the rules are evaluated.
        measured: the clock reading for elapsed time, so that a wrong wall clock does not shorten a hold.
        record: the saved record of the store; a new record if the store has changed.
        unknown: whether the state knows no adopted store, and the store records no other state and no other
            transactions.
        decided: the times before which all transactions have ended.
        ids: the snapshot's invalid list compared with the ids known before; empty without a usable snapshot.
        refutation: the refutation of the last proven boundary; None: it was not refuted.
    """

    now: ClockAnchor
    measured: ClockAnchor
    record: StoreRecord
    unknown: bool
    tx: TxState
    ids: InvalidListChange
    notes: list[GuardNote]
    decided: DecidedTransactions
    refutation: Refutation | None = None

    @property
    def adopted(self) -> bool:
        return self.record.adopted_ms is not None

    @property
    def is_blocked(self) -> bool:
        """Return whether nothing may be written."""
        return not self.adopted or any(note.tripped for note in self.notes)

    @property
    def first_contact(self) -> bool:
        """Return whether this store, or its transaction system, is not the one that was adopted (invariant S13)."""
        return not self.adopted or any(note.guard == "identity" for note in self.notes)

    def contradicts(self, proven: ProvenBoundary | None) -> bool:
        """Return whether a transaction up to the boundary has become invalid since the boundary was proven."""
        if proven is None or proven.made_ms >= self.ids.seen_ms:
            return False
        return any(pointer <= proven.bound for pointer in self.ids.new[:1])


@dataclass(frozen=True, slots=True)
class Run:
    """The data of a pass.

    A Spark task gets a copy without open resources and without data that only the planning of topics needs.

    Attributes:
        store: the whole store.
        terms: the settings.
        transactions: the facts about transactions.
        records: the saved frontiers (invariant S8).
        ready: the basis of the run.
        record: the record of the run in the state; without an id for a query, which is not a run.
        kind: ``full``: also read rows that no rule deletes, and payloads of all pointers; ``incremental``: skip topics
            in which few rows have come due ("Incremental passes" in ``docs/explanation/decisions.md``); ``frequent``:
            neither.
        label: the hold that marks all findings until the store is adopted; None if it is adopted.
        patterns: the topics in scope; empty: all.
        limits: the limits of a plan file; None: no plan file.
        paused: patterns of topics in which nothing is changed.
        quarantined: topics that are skipped, because they failed too often (invariant S9).
        expiries: the expiries of messages with their own TTLs; None if there are none, or in a task.
        consumers: the holds for unread messages; None: no message is held for consumers.
        processed: the messages that all consumers have processed (rule L7); None if unknown.
        created_empty: returns whether a topic was created without rows and is unchanged since.
        lease: the lease record that tasks compare; None if no other process can write.
        topics: the topics with readable metadata, by metadata key.
        unparsed: the parse errors of the other topics, by metadata key.
        reread_topics: metadata keys of topics that changed during the pass. Some parts were swept by the old metadata
            and other parts by the new metadata, so rows may remain in either.
    """

    store: Reads
    terms: Terms
    transactions: TransactionView
    records: Mapping[TopicId, FrontierRecord]
    ready: Preparation = field(repr=False)
    record: RunRecord = NO_RUN
    kind: PassKind = "full"
    label: Hold | None = None
    patterns: tuple[str, ...] = ()
    limits: PlanLimits | None = None
    paused: tuple[str, ...] = ()
    quarantined: Collection[TopicId] = ()
    expiries: Expiries | None = None
    consumers: ConsumerHolds | None = None
    processed: ProcessedRows | None = None
    created_empty: Callable[[TopicMetadata], bool] = never_created_empty
    lease: LeaseRecord | None = None
    topics: dict[bytes, TopicWork] = field(default_factory=dict)
    unparsed: dict[bytes, str] = field(default_factory=dict)
    reread_topics: set[bytes] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[Run], tuple[Any, ...]]:
        # Not __getstate__: Python 3.11.3 and older replace it in frozen dataclasses with slots.
        omitted: dict[str, Any] = dict.fromkeys(("store", "ready", "expiries", "consumers", "processed"))
        omitted |= {"records": {}, "created_empty": never_created_empty}
        return Run, tuple(omitted.get(item.name, getattr(self, item.name)) for item in fields(self))

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def mode(self) -> Mode:
        return self.record.mode

    @property
    def full(self) -> bool:
        return self.kind == "full"

    @property
    def incremental(self) -> bool:
        return self.kind == "incremental"

    @property
    def now_ms(self) -> int:
        """Return the time at which the rules are evaluated (the effective now)."""
        return self.transactions.now_ms

    @property
    def now(self) -> ClockAnchor:
        """Return the clock reading for elapsed time."""
        return self.ready.now if self.label is Hold.FIRST_CONTACT else self.ready.measured

    @property
    def proves(self) -> bool:
        """Return whether covered keys are evidence: the run reads everything under a snapshot and skips no topic."""
        scoped = self.patterns or self.limits is not None
        return self.full and self.transactions.snapshot is not None and not scoped and not self.has_skipped_topics

    def search_since_ms(self) -> int | None:
        """Return the first publish time of the search for invalid pointers; None: no search.

        This reads the records of all open ids, up to a million.
        """
        snapshot = self.transactions.snapshot
        if snapshot is None or not len(snapshot.invalid):
            return None
        return 0 if self.full else search_since_ms(self.ready.ids.open_ids(), self.terms.lifetime)

    def load_topics(self) -> None:
        """Read the whole metadata table."""
        self.topics.clear()
        for key, value in self.store.metadata.rows():
            if (work := self._plan(key, value)) is not None:
                self.topics[key] = work

    def reread(self, key: bytes) -> None:
        """Plan one topic again by its current metadata; threads iterate over a copy of the topics (:meth:`known`)."""
        self.reread_topics.add(key)
        value = self.store.metadata.get(key)
        work = None if value is None else self._plan(key, value)
        if work is None:
            self.topics.pop(key, None)
        else:
            self.topics[key] = work

    def known(self) -> list[tuple[bytes, TopicWork]]:
        """Return a copy of the topics in key order."""
        return sorted(self.topics.items())

    def is_newly_known(self, prefix: bytes) -> bool:
        """Return whether a topic got its metadata after the start of the pass; the next pass handles its rows."""
        value = None if prefix in self.unparsed else self.store.metadata.get(prefix)
        return value is not None and parse_or_none(prefix, value) is not None

    def in_scope(self, prefix: bytes) -> bool:
        if not self.patterns:
            return True
        topic = TopicId.from_prefix(prefix)
        return topic is not None and topic.matches(self.patterns)

    def is_paused(self, prefix: bytes) -> bool:
        topic = TopicId.from_prefix(prefix)
        return topic is not None and topic.matches(self.paused)

    def is_quarantined(self, prefix: bytes) -> bool:
        return bool(self.quarantined) and TopicId.from_prefix(prefix) in self.quarantined

    def is_skipped(self, prefix: bytes) -> bool:
        """Return whether the topic is paused or quarantined, so that the pass proves nothing about it."""
        return self.is_paused(prefix) or self.is_quarantined(prefix)

    @property
    def has_skipped_topics(self) -> bool:
        """Return whether some topics may be paused or quarantined."""
        return bool(self.paused or self.quarantined)

    def _plan(self, key: bytes, value: bytes) -> TopicWork | None:
        try:
            topic = TopicMetadata.parse(key, value)
        except MetadataError as error:
            self.unparsed[key] = str(error)
            return None
        # S8: the record must not include the holds for consumers and transactions that follow, whose release would
        # otherwise look like a jump.
        frontier, record = self._frontier(topic)
        if topic.holds_transactions:
            frontier = limit_to_decided(frontier, self.ready.decided.before_ms)
        if self.consumers is not None:
            frontier = self.consumers.lower(topic, frontier)
        has_processed = False
        if self.processed is not None and self.in_scope(key):
            frontier, has_processed = self.processed.extend(topic, frontier)
        if self.limits is not None:
            frontier = frontier.within(self.limits.frontiers.get(topic.topic, frontier))
        waits = self.incremental and not has_processed and self._may_wait(topic, frontier)
        counts_held = not (self.incremental and self._has_recent_count(topic, frontier, record))
        return TopicWork(topic, value, frontier, record, waits, counts_held)

    def _frontier(self, topic: TopicMetadata) -> tuple[Frontier, FrontierRecord]:
        record = self.records.get(topic.topic)
        if topic.topic.matches(self.paused):
            return Frontier.closed(self.now_ms, topic, Hold.PAUSED), freeze(record, self.now)
        if topic.topic in self.quarantined:
            return Frontier.closed(self.now_ms, topic, Hold.QUARANTINED), freeze(record, self.now)
        if self.terms.protects(topic.topic):
            return Frontier.closed(self.now_ms, topic, Hold.PROTECTED), freeze(record, self.now)
        if self.label is Hold.FIRST_CONTACT or (record is None and self.created_empty(topic)):
            return Frontier.open(self.now_ms, topic), admit(topic, self.now)
        terms = self.terms
        return advance(
            record,
            topic,
            self.now,
            hold_seconds=terms.hold_seconds,
            allowance_ms=terms.lifetime.allowance_ms,
            now_ms=self.now_ms,
        )

    def _has_recent_count(self, topic: TopicMetadata, frontier: Frontier, record: FrontierRecord) -> bool:
        """Return whether an earlier pass counted the held rows of a frontier recently."""
        known = self.records.get(topic.topic)
        if known is None:
            return False
        if frontier.hold is Hold.FRONTIER:
            return known.pending == record.pending
        # The number of held rows grows continuously, so count them again after each hundredth of the longest hold.
        step_ms = max(MIN_WINDOW_MS, (self.terms.consumer_hold_seconds or 0) * 10)
        is_held = frontier.hold in (Hold.CONSUMER, Hold.TRANSACTION) and frontier.cutoff.ms < known.cutoff_ms
        return is_held and frontier.due.ms // step_ms == known.cutoff_ms // step_ms

    def _may_wait(self, topic: TopicMetadata, frontier: Frontier) -> bool:
        """Return whether the cutoff has advanced too little since the last pass for a visit.

        That is less than a minute or a hundredth of the TTL, whichever is longer, but at most the whole TTL.
        """
        record = self.records.get(topic.topic)
        if record is None or frontier.hold is not None or record.generation != topic.generation:
            return False
        if record.pending is not None or record.approved is not None:
            return False  # an operator expects its release
        ttl_ms = topic.ttl_seconds * 1000
        window_ms = min(ttl_ms, max(MIN_WINDOW_MS, ttl_ms // 100))
        return 0 <= frontier.cutoff.ms - record.cutoff_ms < window_ms


def parse_or_none(key: bytes, value: bytes) -> TopicMetadata | None:
    """Return the parsed metadata row; None if it does not parse."""
    try:
        return TopicMetadata.parse(key, value)
    except MetadataError:
        return None
