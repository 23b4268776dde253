"""The facts that a pass has before it starts: the time, the transactions, every topic and its cutoff.

All of it is gathered once and then only read, with one exception: a topic whose metadata moved is read again (rule
S2). A plan and a run get the same run context and therefore decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from janitor.report import DataTable
from janitor.rules.frontier import admit, advance, stand_still
from janitor.rules.policy import Frontier, Hold
from janitor.rules.references import Lifetime
from janitor.state.base import ClockAnchor, FrontierRecord
from janitor.sweep.consumers import ConsumerHolds, ProcessedRows
from janitor.sweep.transactions import TransactionView, until_decided
from tms_core.errors import MetadataError
from tms_core.tables.base import KeyRange, MetadataReads
from tms_core.topic import TopicId, TopicMetadata

#: What came due in less time than this is not worth a visit of its own.
LEAST_WINDOW_MS = 60_000


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings that decisions on rows rest on.

    Attributes:
        hold_seconds: how long a frontier that jumps is held.
        protect: shell patterns of topics whose rows are never deleted.
        lifetime: how long transactions may write, and how far clocks may differ.
        lifetime_known: whether that lifetime is configured; without it nothing is claimed.
        snapshot_interval_seconds: how often the transaction service writes a snapshot.
        consumer_hold_seconds: how long after its ttl a message is held that a consumer has not read; None: not at all.
    """

    hold_seconds: int
    protect: tuple[str, ...]
    lifetime: Lifetime
    lifetime_known: bool
    snapshot_interval_seconds: int
    consumer_hold_seconds: int | None = None

    def protects(self, topic: TopicId) -> bool:
        return matches(topic, self.protect)


@dataclass(frozen=True, slots=True)
class TopicWork:
    """One topic as a pass sees it.

    Attributes:
        raw: the metadata row's value when it was read; what S2 compares with.
        record: what to remember of the frontier once the pass has applied it.
        counts_held: whether rows that are due and held are counted; a lazy pass does so only when the hold is new,
            or, of what waits for a consumer, when much more has come due.
        waits: whether so little has come due since the last pass that a lazy one leaves the topic for later.
    """

    topic: TopicMetadata
    raw: bytes
    frontier: Frontier
    record: FrontierRecord
    waits: bool = False
    counts_held: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a plan file: its ranges, and the pointers of each topic.

    Attributes:
        frontiers: how far each topic's frontier went. A range may have rows that this one held.
    """

    by_topic: Mapping[tuple[DataTable, TopicId], tuple[KeyRange, ...]]
    pointers: Mapping[TopicId, frozenset[int]]
    frontiers: Mapping[TopicId, Frontier] = field(default_factory=dict)

    def ranges(self, table: DataTable, topic: TopicId) -> tuple[KeyRange, ...]:
        return self.by_topic.get((table, topic), ())


def none_is_new(_: TopicMetadata) -> bool:
    """Return no topic is known to be new."""
    return False


@dataclass(slots=True)
class RunContext:
    """Everything a pass judges by.

    Attributes:
        now: what elapsed time is measured by.
        now_ms: the moment rows are judged by (the effective now).
        records: frontiers as remembered (rule S8).
        topics: by metadata row key; topics whose metadata does not parse are not in it.
        unparsed: why, for those.
        reread_topics: metadata row keys of topics that moved during the pass. One part of the store may be clean of old
            rows while another is not.
        transactions: the facts about transactions.
        search_since_ms: from which publish time on message rows are searched for invalid pointers; None: not at all.
        thorough: read also what no rule speaks of, and at payloads of any pointer.
        label: set on findings that wait for adoption; None once it is.
        patterns: topics in scope; empty for all.
        limits: ranges a plan file allows; None without one.
        paused: patterns of topics in which nothing is changed.
        quarantined: topics that are passed by, because they failed too often (rule S9).
        lazy: leave topics alone in which little has come due (``docs/explanation/decisions.md``, "Incremental passes").
        consumers: hold unread messages; None: nothing is held for consumers.
        processed: what all consumers have processed (rule L7); None: that is not known.
        decided_ms: the transactions of all messages before this time were decided a while ago.
        newborn: whether a topic was created empty and is unchanged.
    """

    now: ClockAnchor
    now_ms: int
    metadata: MetadataReads
    terms: Terms
    transactions: TransactionView
    records: Mapping[TopicId, FrontierRecord]
    search_since_ms: int | None = None
    thorough: bool = True
    label: Hold | None = None
    patterns: tuple[str, ...] = ()
    limits: Limits | None = None
    paused: tuple[str, ...] = ()
    quarantined: Collection[TopicId] = ()
    lazy: bool = False
    consumers: ConsumerHolds | None = None
    processed: ProcessedRows | None = None
    decided_ms: int = 0
    newborn: Callable[[TopicMetadata], bool] = none_is_new
    topics: dict[bytes, TopicWork] = field(default_factory=dict)
    unparsed: dict[bytes, str] = field(default_factory=dict)
    reread_topics: set[bytes] = field(default_factory=set)

    def load_topics(self) -> None:
        """Read the whole metadata table."""
        planned = ((key, self._plan(key, value)) for key, value in self.metadata.rows())
        self.topics = {key: work for key, work in planned if work is not None}

    def reread(self, key: bytes) -> None:
        """Read one topic's metadata again and plan it again, while other threads may read the context."""
        self.reread_topics.add(key)
        value = self.metadata.get(key)
        work = None if value is None else self._plan(key, value)
        others = {other: known for other, known in self.topics.items() if other != key}
        self.topics = others if work is None else {**others, key: work}

    def is_newly_known(self, prefix: bytes) -> bool:
        """Return whether a topic that was not there when the pass started has metadata now: the next pass judges its
        rows.
        """
        value = None if prefix in self.unparsed else self.metadata.get(prefix)
        return value is not None and parse_or_none(prefix, value) is not None

    def in_scope(self, prefix: bytes) -> bool:
        if not self.patterns:
            return True
        topic = TopicId.from_prefix(prefix)
        return topic is not None and matches(topic, self.patterns)

    def is_paused(self, prefix: bytes) -> bool:
        topic = TopicId.from_prefix(prefix)
        return topic is not None and matches(topic, self.paused)

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
        frontier, record = self._frontier(topic)
        if topic.holds_transactions:
            frontier = until_decided(frontier, self.decided_ms)
        if self.consumers is not None:
            frontier = self.consumers.lower(topic, frontier)
        has_more = False
        if self.processed is not None and self.in_scope(key):
            frontier, has_more = self.processed.extend(topic, frontier)
        if self.limits is not None:
            frontier = frontier.within(self.limits.frontiers.get(topic.topic, frontier))
        waits = self.lazy and not has_more and self._may_wait(topic, frontier)
        counts_held = not (self.lazy and self._is_old(topic, frontier, record))
        return TopicWork(topic, value, frontier, record, waits, counts_held)

    def _frontier(self, topic: TopicMetadata) -> tuple[Frontier, FrontierRecord]:
        record = self.records.get(topic.topic)
        if matches(topic.topic, self.paused):
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


def matches(topic: TopicId, patterns: tuple[str, ...]) -> bool:
    """Return whether a topic's name fits one of the shell patterns."""
    return any(fnmatchcase(str(topic), pattern) for pattern in patterns)


def parse_or_none(key: bytes, value: bytes) -> TopicMetadata | None:
    """Return a metadata row, None where it does not parse."""
    try:
        return TopicMetadata.parse(key, value)
    except MetadataError:
        return None
