"""The number of messages and bytes of each topic: counted exactly and slowly in the background.

Nothing waits for the results, so counts have a separate, small budget of rows and never delay a sweep. A count covers
all rows of a topic's current generation in both tables, including rows that are due, rolled back or not committed. A
plan shows the rows that a sweep would delete.

* ``messages``: rows of the message table.
* ``size_bytes``: for each of these rows the key, 8 bytes for a write pointer, and the payload; for the topic's rows in
  the payload table the key and the payload. The overhead (salt, column names) and compression of a store do not count.
  All sizes of topics use this unit: held rows get their share by the number of messages, ``janitor spark stats`` counts
  by the same rule, and plans, runs and topics without a count estimate it from keys and the store's file sizes.
* ``oldest_ms``, ``newest_ms``: publish times of the first and the last message.

Unrecognized keys (rule L0) and rows with an unreadable value do not count. A count reads every row, but not all rows at
the same time: a message that is published during the count may be in this count or in the next.

Topics take turns in the budget (:mod:`janitor.stats.scheduler`): first topics that were swept since their count, then
topics without a count, then the topics with the oldest counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from janitor.state.base import State, TopicCount
from janitor.state.topic_history import save_sizes
from janitor.stats.scheduler import CountScheduler, Life
from janitor.sweep.executor import Pacer, never
from tms_core.clock import Clock
from tms_core.errors import MetadataError, StopRequested, StoreError
from tms_core.rowkey import GENERATION_BYTES, MESSAGE_TAIL_BYTES, NEGATIVE, PAYLOAD_TAIL_BYTES, generation_prefix
from tms_core.tables.base import MESSAGES, PAYLOADS, Reads
from tms_core.topic import TopicId, TopicMetadata

#: The budget in rows per second, small compared with sweeps.
ROWS_PER_SECOND = 50_000
#: The maximum number of rows in a page; the count checks for a stop request after each page.
PAGE_ROWS = 1000
#: The number of rows in the first page of a table, before their size is known.
FIRST_PAGE_ROWS = 100
#: The approximate memory of one page, in bytes.
PAGE_BYTES = 4 << 20
#: The number of last ledger entries that are searched for swept topics.
SWEPT_ENTRIES = 500
#: The interval at which a long step saves sizes in the history of topics, in milliseconds.
SIZES_EVERY_MS = 60_000
#: The length of a turn, in seconds of the budget.
TURN_SECONDS = 2
#: The size of a write pointer in bytes.
POINTER_BYTES = 8

#: Payloads are read to be measured, so a large payload counts as several rows of this size.
ROW_BYTES = 4096

_log = logging.getLogger(__name__)


class TopicSizeCounter:
    """A repeated count of the topics of one store.

    Args:
        store: the store; only read.
        state: stores the counts.
        clock: the clock for the times of counts and for the budget.
        rows_per_second: the budget.
        refresh_seconds: the age after which a count is repeated.
        is_stopping: whether the process is stopping; checked before every page and in every wait.
    """

    def __init__(
        self,
        store: Reads,
        state: State,
        clock: Clock,
        *,
        rows_per_second: int = ROWS_PER_SECOND,
        refresh_seconds: int = 60,
        is_stopping: Callable[[], bool] = never,
    ) -> None:
        self._store = store
        self._state = state
        self._clock = clock
        self._is_stopping = is_stopping
        #: The budget, possibly shared; raises ``StopRequested`` in a wait if the process is stopping.
        self.pacer = Pacer(rows_per_second, clock, self._raise_if_stopping)
        self._turns = CountScheduler(
            self, clock, self.pacer, turn_rows=rows_per_second * TURN_SECONDS, refresh_seconds=refresh_seconds
        )
        self._found: dict[TopicId, TopicCount | None] = {}
        self._swept: set[TopicId] = set()
        #: Whether the history of sizes has all saved counts, and the time of its last update.
        self._has_saved_sizes, self._sizes_saved_ms = True, clock.monotonic_ms()

    def step(self) -> None:
        """Count due topics, until no count is unfinished or the process is stopping.

        A topic that cannot be read keeps its previous count with its time, and is retried when it is due again.

        Raises:
            StoreError: the metadata could not be read, or counts could not be read or saved.
        """
        if not self._is_stopping():
            self._turns.step()
            self._save_sizes()

    def list_topics(self) -> Sequence[Life]:
        """Return existing topics: swept topics first, then by age of the count; drop the counts of other topics."""
        unreadable, living = set(), {}
        for key, value in self._store.metadata.rows():
            try:
                metadata = TopicMetadata.parse(key, value)
            except MetadataError:
                unreadable.add(TopicId.from_prefix(key))
                continue
            if not metadata.deleted:
                living[metadata.topic] = metadata.generation
        counts: dict[TopicId, TopicCount | None] = {**self._state.counts(), **self._found}
        self._found.update({topic: None for topic in counts if topic not in living and topic not in unreadable})
        at_ms = {topic: count.counted_ms for topic, count in counts.items() if count is not None}
        swept = self._state.ledger(SWEPT_ENTRIES)
        self._swept = {entry.topic for entry in swept if entry.at_ms > at_ms.get(entry.topic, entry.at_ms)}
        order = sorted(living, key=lambda topic: (topic not in self._swept, at_ms.get(topic, -1)))
        return [(topic, living[topic]) for topic in order]

    def is_outdated(self, life: Life) -> bool:
        """Return whether a topic was swept since its count."""
        return life[0] in self._swept

    def begin(self, life: Life) -> Generator[int, None, TopicCount]:
        """Yield a new count of a topic."""
        tally = _Tally.begin(*life)
        while not tally.done:
            size_bytes = tally.size_bytes
            rows = tally.read(self._store)
            yield max(rows, (tally.size_bytes - size_bytes) // ROW_BYTES)
        return tally.count(self._clock.now_ms())

    def note_result(self, life: Life, found: TopicCount) -> None:
        """Keep a count in memory until :meth:`save`."""
        self._found[life[0]] = found

    def note_failure(self, life: Life, error: StoreError) -> None:
        """Log the first failure to count a topic."""
        _log.warning("topic %s could not be counted and keeps its previous count: %s", life[0], error)

    def save(self) -> None:
        """Save the counts since the last call."""
        if self._found:
            self._state.save_counts(self._found)
            self._has_saved_sizes = False
        self._found = {}
        if self._clock.monotonic_ms() - self._sizes_saved_ms >= SIZES_EVERY_MS:
            self._save_sizes()

    def _save_sizes(self) -> None:
        """Add the counts to the history of sizes: after a step, and at intervals in a long step."""
        self._sizes_saved_ms = self._clock.monotonic_ms()
        if not self._has_saved_sizes:
            save_sizes(self._state, self._state.counts())
            self._has_saved_sizes = True

    def _raise_if_stopping(self) -> None:
        if self._is_stopping():
            raise StopRequested("the count was stopped.")


@dataclass(slots=True)
class _Tally:
    """An unfinished count of a topic.

    Attributes:
        messages_from, payloads_from: the start of the next page; None when the table is complete.
        limit: the number of rows in the next page.
        rows: the number of read rows.
    """

    topic: TopicId
    generation: int
    messages_from: bytes | None
    payloads_from: bytes | None
    limit: int = FIRST_PAGE_ROWS
    rows: int = 0
    messages: int = 0
    size_bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None

    @classmethod
    def begin(cls, topic: TopicId, generation: int) -> _Tally:
        start = generation_prefix(topic.prefix, generation)
        return cls(topic, generation, start, start)

    @property
    def done(self) -> bool:
        return self.messages_from is None and self.payloads_from is None

    def count(self, now_ms: int) -> TopicCount:
        return TopicCount(self.messages, self.size_bytes, self.oldest_ms, self.newest_ms, now_ms)

    def read(self, store: Reads) -> int:
        """Read the next page, first of the message table, then of the payload table; return its number of rows."""
        before = self.size_bytes
        if self.messages_from is not None:
            rows, resume = self._read_messages(store, self.messages_from)
            self.messages_from = resume
        elif self.payloads_from is not None:
            rows, resume = self._read_payloads(store, self.payloads_from)
            self.payloads_from = resume
        else:
            return 0
        self.rows += rows
        if resume is None:
            self.limit = FIRST_PAGE_ROWS
        elif rows:
            affordable_rows = PAGE_BYTES * rows // max(1, self.size_bytes - before)
            self.limit = max(1, min(PAGE_ROWS, affordable_rows))
        return rows

    def _read_messages(self, store: Reads, start: bytes) -> tuple[int, bytes | None]:
        # Rows are sorted by time; negative times, which no server writes, sort after all others.
        stop = generation_prefix(self.topic.prefix, self.generation) + NEGATIVE
        page = store.message.read(MESSAGES, start, stop, self.limit)
        key_bytes = len(self.topic.prefix) + GENERATION_BYTES + MESSAGE_TAIL_BYTES
        found = [(key, value) for key, value in page.items if len(key) == key_bytes]
        self.messages += len(found)
        for key, value in found:
            pointer_bytes = 0 if value.pointer is None else POINTER_BYTES
            self.size_bytes += len(key) + pointer_bytes + len(value.payload or b"")
        if found:
            self.oldest_ms = _time_ms(found[0][0]) if self.oldest_ms is None else self.oldest_ms
            self.newest_ms = _time_ms(found[-1][0])
        return len(page.items), page.resume

    def _read_payloads(self, store: Reads, start: bytes) -> tuple[int, bytes | None]:
        stop = generation_prefix(self.topic.prefix, self.generation + 1)
        page = store.payload.read(PAYLOADS, start, stop, self.limit)
        key_bytes = len(self.topic.prefix) + GENERATION_BYTES + PAYLOAD_TAIL_BYTES
        for key, payload in page.items:
            if len(key) == key_bytes and _time_ms(key) >= 0:
                self.size_bytes += len(key) + len(payload)
        return len(page.items), page.resume


def _time_ms(key: bytes) -> int:
    """Return the publish or write time in a key: in both tables it precedes the last two bytes."""
    return int.from_bytes(key[-10:-2], "big", signed=True)
