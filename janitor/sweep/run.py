"""One run as a value: its id and mode, the clock reading, the store, the settings, the transactions, and every topic.

All of it is gathered once and then only read, with one exception: a topic whose metadata moved is read again (rule
S2). A plan and a run are given the same value and so come to the same decisions.

What a registered consumer has not read is held (``server.consumers.floor``). The rules stay as they are: such rows are
due, and a run's frontier stops short of them, as it does for other reasons (rule S8). Only the cut-off of the current
generation is lowered: messages of an old generation cannot be read any longer. The remembered frontier is the one
without consumers, so that rows are deleted at once, and are no jump, when the consumer has read them or is forgotten.
Positions are read once, when a pass starts. That is enough, because rows that are not held then never will be
(``tms_core.consumers``).

How many of a topic's messages may be deleted because all its consumers have processed them (rule L7, ``retention:
consumed``) is decided once for each topic, before its first row is deleted, and is a number in its frontier from then
on. A run announces it and then asks the consumers again, so a consumer that registers meanwhile has either been asked,
or starts after it (:mod:`tms_core.consumers.retention`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from janitor.boundary.claim import Refutation
from janitor.report import DataTable
from janitor.rules.frontier import admit, advance, stand_still
from janitor.rules.policy import Frontier, Hold
from janitor.rules.ranges import Lifetime
from janitor.state.base import Claim, ClockAnchor, FrontierRecord, RunRecord, StoreRecord
from janitor.state.figures import GuardNote
from janitor.state.records import Mode
from janitor.sweep.transactions import (
    Decided,
    Observed,
    TransactionView,
    TxState,
    oldest_open_ms,
    search_since_ms,
    until_decided,
)
from tms_core.consumers.positions import Floor, Position
from tms_core.consumers.retention import announce, announced, processed
from tms_core.errors import FormatError, MetadataError, StoreError
from tms_core.rowkey import Cutoff
from tms_core.tables.base import KeyRange, Reads
from tms_core.tables.lease import LeaseRecord
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState

#: What came due in less time than this is not worth a visit of its own.
LEAST_WINDOW_MS = 60_000


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings that a run rests on.

    Attributes:
        hold_seconds: how long a frontier that jumps is held.
        protect: shell patterns of topics whose rows are never deleted.
        lifetime: how long transactions may write, and how far clocks may differ.
        lifetime_known: whether that lifetime is configured; without it nothing is claimed.
        snapshot_interval_seconds: how often the transaction service writes a snapshot.
        consumer_hold_seconds: how long after its ttl a message is held that a consumer has not read; None: not at all.
        snapshots_wanted: whether a missing source of snapshots is worth a warning; False where the settings chose none.
        batch_rows: rows per page, and so per batch.
        rows_per_second: the limit on deleting, of a Spark task its share; None for none.
        history_days: how long past runs are remembered.
        archive_days: how long archived rows are kept.
    """

    hold_seconds: int
    protect: tuple[str, ...]
    lifetime: Lifetime
    lifetime_known: bool
    snapshot_interval_seconds: int
    consumer_hold_seconds: int | None = None
    snapshots_wanted: bool = True
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
    """One topic as a pass sees it.

    Attributes:
        raw: the metadata row's value when it was read; what S2 compares with.
        record: what to remember of the frontier once the pass has applied it.
        counts_held: whether rows that are due and held are counted; an incremental pass does so only when the hold is
            new, or, of what waits for a consumer, when much more has come due.
        waits: whether so little has come due since the last pass that an incremental one leaves the topic for later.
    """

    topic: TopicMetadata
    raw: bytes
    frontier: Frontier
    record: FrontierRecord
    waits: bool = False
    counts_held: bool = True


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of a plan file: its ranges, and the pointers of each topic.

    Attributes:
        frontiers: how far each topic's frontier went. A range may have rows that this one held.
    """

    by_topic: Mapping[tuple[DataTable, TopicId], tuple[KeyRange, ...]]
    pointers: Mapping[TopicId, frozenset[int]]
    frontiers: Mapping[TopicId, Frontier] = field(default_factory=dict)

    def ranges(self, table: DataTable, topic: TopicId) -> tuple[KeyRange, ...]:
        return self.by_topic.get((table, topic), ())


#: How much of the store a pass reads.
PassKind = Literal["full", "frequent", "incremental"]
#: Of a question, which starts nothing.
NO_RUN = RunRecord("", "plan", 0)


def none_is_new(_: TopicMetadata) -> bool:
    """Return no topic is known to be new."""
    return False


@dataclass(frozen=True, slots=True)
class Preparation:
    """What every question and every run rests on besides the tables.

    Attributes:
        now: the clocks; ``wall_ms`` is the moment rows are judged by.
        measured: the same moment as elapsed time is measured by, so that a wrong wall clock does not shorten a hold.
        record: what is known of the store; a fresh one for a store that is not the one remembered.
        unknown: whether no adopted store is remembered, this one or another, and the store records no other state and
            no other transactions.
        decided: until when transactions have ended.
        ids: the snapshot's invalid list beside what was known of it; of none without a usable snapshot.
        refutation: how the last claim was refuted; None: it was not.
    """

    now: ClockAnchor
    measured: ClockAnchor
    record: StoreRecord
    unknown: bool
    tx: TxState
    ids: Observed
    notes: list[GuardNote]
    decided: Decided
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
        """Whether this store, or this transaction system, is another than was adopted (rule S13)."""
        return not self.adopted or any(note.guard == "identity" for note in self.notes)

    def speaks_against(self, claim: Claim | None) -> bool:
        """Return whether a transaction that the claim takes for decided has become invalid since."""
        if claim is None or claim.made_ms >= self.ids.seen_ms:
            return False
        return any(pointer <= claim.bound for pointer in self.ids.new[:1])


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a pass judges by.

    On the way to a Spark task it leaves behind what is open, and what only the planning of topics needs.

    Attributes:
        store: the whole store.
        terms: the settings.
        transactions: what is known of transactions.
        records: frontiers as remembered (rule S8).
        ready: what it rests on.
        record: the run as the state records it; without an id for a question that is no run.
        kind: ``full``: read also what no rule speaks of, and look at payloads of any pointer; ``incremental``: leave
            topics alone in which little has come due ("Incremental passes" in ``docs/explanation/decisions.md``);
            ``frequent``: neither.
        label: set on what an executor would do if the store were adopted; None once it is.
        patterns: topics in scope; empty for all.
        limits: ranges a plan file allows; None without one.
        paused: patterns of topics in which nothing is changed.
        quarantined: topics that are passed by, because they failed too often (rule S9).
        consumers: hold what they have not read; None: nothing is held for consumers.
        processed: what all consumers have processed (rule L7); None: that is not known.
        newborn: whether a topic is known to have been made with nothing in it, and is still what it was made as.
        lease: the lease record that tasks compare with; None: there is none to lose.
        topics: by metadata row key; topics whose metadata does not parse are not in it.
        unparsed: why, for those.
        reread_topics: metadata row keys of topics that moved during the pass. What one part of the store was rid of by
            what they were may still be in another one, and the other way round.
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
    consumers: ConsumerHolds | None = None
    processed: ProcessedRows | None = None
    newborn: Callable[[TopicMetadata], bool] = none_is_new
    lease: LeaseRecord | None = None
    topics: dict[bytes, TopicWork] = field(default_factory=dict)
    unparsed: dict[bytes, str] = field(default_factory=dict)
    reread_topics: set[bytes] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        left_behind: dict[str, Any] = {
            "store": None,
            "ready": None,
            "records": {},
            "consumers": None,
            "processed": None,
        }
        left_behind["newborn"] = none_is_new
        return {item.name: left_behind.get(item.name, getattr(self, item.name)) for item in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

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
        """Return the moment rows are judged by (the effective now)."""
        return self.transactions.now_ms

    @property
    def now(self) -> ClockAnchor:
        """Return what elapsed time is measured by."""
        return self.ready.now if self.label is Hold.FIRST_CONTACT else self.ready.measured

    @property
    def proves(self) -> bool:
        """Return whether a part that it covers is evidence: it reads everything, under a snapshot, with nothing put
        aside.
        """
        scoped = self.patterns or self.limits is not None
        return self.full and self.transactions.snapshot is not None and not scoped and not self.has_aside

    def search_since_ms(self) -> int | None:
        """Return from which publish time on message rows are searched for invalid pointers; None: not at all.

        Reads the record of every open id, of which there may be a million.
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
        """Plan one topic again by its metadata as it is now; threads read the topics from a copy (:meth:`known`)."""
        self.reread_topics.add(key)
        value = self.store.metadata.get(key)
        work = None if value is None else self._plan(key, value)
        if work is None:
            self.topics.pop(key, None)
        else:
            self.topics[key] = work

    def known(self) -> list[tuple[bytes, TopicWork]]:
        """Return the topics in the order of their keys, as they are planned now."""
        return sorted(self.topics.items())

    def is_newly_known(self, prefix: bytes) -> bool:
        """Return whether a topic that was not there when the pass started has metadata now: the next pass judges its
        rows.
        """
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

    def is_aside(self, prefix: bytes) -> bool:
        """Return whether nothing is changed in this topic, so that nothing can be proven about it."""
        return self.is_paused(prefix) or self.is_quarantined(prefix)

    @property
    def has_aside(self) -> bool:
        """Return whether there may be topics in which nothing is changed."""
        return bool(self.paused or self.quarantined)

    def _plan(self, key: bytes, value: bytes) -> TopicWork | None:
        try:
            topic = TopicMetadata.parse(key, value)
        except MetadataError as error:
            self.unparsed[key] = str(error)
            return None
        # The record is taken before all that follows, so holds for consumers and transactions never look like a jump
        # backwards, and their end never like a jump forwards (S8).
        frontier, record = self._frontier(topic)
        if topic.holds_transactions:
            frontier = until_decided(frontier, self.ready.decided.before_ms)
        if self.consumers is not None:
            frontier = self.consumers.lower(topic, frontier)
        has_more = False
        if self.processed is not None and self.in_scope(key):
            frontier, has_more = self.processed.extend(topic, frontier)
        if self.limits is not None:
            frontier = frontier.within(self.limits.frontiers.get(topic.topic, frontier))
        waits = self.incremental and not has_more and self._may_wait(topic, frontier)
        counts_held = not (self.incremental and self._is_old(topic, frontier, record))
        return TopicWork(topic, value, frontier, record, waits, counts_held)

    def _frontier(self, topic: TopicMetadata) -> tuple[Frontier, FrontierRecord]:
        record = self.records.get(topic.topic)
        if topic.topic.matches(self.paused):
            return Frontier.closed(self.now_ms, topic, Hold.PAUSED), stand_still(record, self.now)
        if topic.topic in self.quarantined:
            return Frontier.closed(self.now_ms, topic, Hold.QUARANTINED), stand_still(record, self.now)
        if self.terms.protects(topic.topic):
            return Frontier.closed(self.now_ms, topic, Hold.PROTECTED), stand_still(record, self.now)
        if self.label is Hold.FIRST_CONTACT or (record is None and self.newborn(topic)):
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

    def _is_old(self, topic: TopicMetadata, frontier: Frontier, record: FrontierRecord) -> bool:
        """Return whether the rows held by a frontier were counted recently."""
        known = self.records.get(topic.topic)
        if known is None:
            return False
        if frontier.hold is Hold.FRONTIER:
            return known.pending == record.pending
        # It grows all the time it is held, so it is counted again whenever a hundredth of the longest hold has passed.
        step_ms = max(LEAST_WINDOW_MS, (self.terms.consumer_hold_seconds or 0) * 10)
        held = frontier.hold in (Hold.CONSUMER, Hold.TRANSACTION) and frontier.cutoff.ms < known.cutoff_ms
        return held and frontier.due.ms // step_ms == known.cutoff_ms // step_ms

    def _may_wait(self, topic: TopicMetadata, frontier: Frontier) -> bool:
        """Return whether the time since the last pass is less than a minute, or a hundredth of the TTL; not all of
        it.
        """
        record = self.records.get(topic.topic)
        if record is None or frontier.hold is not None or record.generation != topic.generation:
            return False
        if record.pending is not None or record.approved is not None:
            return False  # an operator waits for it to be let go
        ttl_ms = topic.ttl_seconds * 1000
        window_ms = min(ttl_ms, max(LEAST_WINDOW_MS, ttl_ms // 100))
        return 0 <= frontier.cutoff.ms - record.cutoff_ms < window_ms


def parse_or_none(key: bytes, value: bytes) -> TopicMetadata | None:
    """Return a metadata row, None where it does not parse."""
    try:
        return TopicMetadata.parse(key, value)
    except MetadataError:
        return None


# -- consumers ---------------------------------------------------------------------------------------------------------


class ConsumerHolds:
    """The consumers as one pass knows them.

    Args:
        floor: the source of positions, and the longest hold.

    Attributes:
        waiting: for whom a topic's rows are held, the consumer that is furthest behind.

    Raises:
        StoreError: positions could not be read, so what to hold is not known.
    """

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._positions = floor.positions.all()
        self.waiting: dict[TopicId, Position] = {}

    def lower(self, topic: TopicMetadata, frontier: Frontier) -> Frontier:
        """Return a topic's frontier, lowered to the oldest message that one of its consumers has not read."""
        self.waiting.pop(topic.topic, None)
        positions = self._positions.get((topic.topic, topic.generation))
        if positions is None:
            return frontier
        cutoff = self._cutoff(topic, frontier, positions)
        if cutoff >= frontier.cutoff:
            return frontier
        self.waiting[topic.topic] = min(positions, key=lambda position: position.id)
        return replace(frontier, cutoff=cutoff, hold=frontier.hold or Hold.CONSUMER)

    def _cutoff(self, topic: TopicMetadata, frontier: Frontier, positions: list[Position]) -> Cutoff:
        try:
            return self._floor.lowered(topic, frontier.due, positions)
        except StoreError:
            # As far as can be told they have read nothing; reading the topic's rows will show what is wrong.
            return self._floor.lowest(frontier.due)


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """What consumers have processed, as one pass knows it.

    Attributes:
        side: where their positions and claims are.
        snapshot: the facts about transactions; read before the claims are.
        hold_seconds: how old a row is at least that goes.
        announces: whether rows will go, and not only be shown.
        unknown: why nothing goes of a topic whose consumers cannot be read.
    """

    side: SideTable
    snapshot: VisibilityState
    hold_seconds: int
    announces: bool = False
    unknown: dict[TopicId, str] = field(default_factory=dict)

    def extend(self, topic: TopicMetadata, frontier: Frontier) -> tuple[Frontier, bool]:
        """Return a topic's frontier with what L7 takes, and whether that is more than was announced before."""
        self.unknown.pop(topic.topic, None)
        if not topic.consumed:
            return frontier, False
        # Never past the oldest open transaction: it may still publish there, or give back what it has claimed.
        limit_ms = max(0, min(frontier.now_ms - self.hold_seconds * 1000, oldest_open_ms(self.snapshot)))
        try:
            upto = min(limit_ms << 16, self._processed(topic))
            if upto <= frontier.due.ms << 16:
                return frontier, False
            is_more = upto > announced(self.side, topic)
            if self.announces and is_more and frontier.hold is None:
                # L7: announce, then read the consumers again. A consumer that registers in between either is in the
                # second reading, or reads the announcement and starts after it.
                announce(self.side, topic, upto)
                upto = min(upto, self._processed(topic))
        except (StoreError, FormatError) as error:
            # L7: unknown positions count as unread.
            self.unknown[topic.topic] = str(error)
            return frontier, False
        return replace(frontier, processed=upto), is_more

    def _processed(self, topic: TopicMetadata) -> int:
        return processed(self.side, topic, self.snapshot.dummy_transaction())
