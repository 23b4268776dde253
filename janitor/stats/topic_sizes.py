"""How many messages lie in each topic, and how many bytes: counted in the background, slowly, exactly.

Nothing waits for these figures, so they have a small budget of rows of their own and are never on a sweep's way. What
is counted is what lies there: the rows of a topic's living generation in both tables, also those that are due and not
swept yet, rolled back or not committed yet. What a sweep would take is in the plan.

* ``messages``: rows of the message table.
* ``size_bytes``: of those rows the key, 8 bytes of write pointer where there is one, and the payload; of the topic's
  rows in the payload table the key and the payload. What a store adds (salt, column names) or saves (compression) is
  not in it. This is what the bytes of a topic are everywhere: held rows of it is told by its part of the messages,
  ``janitor spark stats`` counts by the same rule, and where rows go uncounted, in plans, runs and topics not counted
  yet, it is estimated from keys and what the store says of its files.
* ``oldest_ms``, ``newest_ms``: publish times of the first and the last of the messages.

Unrecognized keys (rule L0) and rows whose value cannot be read are left out. Exact means that every row was looked at,
not that it was at one moment: published messages while a topic is counted may be in this count or in the next one.

Topics share the budget in turns (:mod:`janitor.stats.scheduler`): those swept since their count first, which are
counted anew at once, then those never counted, then those counted longest ago.
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

#: Rows that the count reads per second: a small budget beside the sweeps.
ROWS_PER_SECOND = 50_000
#: Rows of one page at most: what is read before a request to stop the count is noticed.
PAGE_ROWS = 1000
#: Rows of a table's first page, when it is not known yet how large they are.
FIRST_PAGE_ROWS = 100
#: About how many bytes one page may hold in memory.
PAGE_BYTES = 4 << 20
#: How many of the ledger's last entries are asked for what was swept since it was counted.
SWEPT_ENTRIES = 500
#: How often a step that goes on adds to the sizes over time, in milliseconds.
SIZES_EVERY_MS = 60_000
#: How long a turn lasts, in seconds of the budget.
TURN_SECONDS = 2
#: What a write pointer counts for.
POINTER_BYTES = 8

#: Payloads are read to be measured, so a large one counts as so many rows of this size.
ROW_BYTES = 4096

_log = logging.getLogger(__name__)


class TopicSizeCounter:
    """Counts the topics of one store, again and again.

    Args:
        store: is only read; a face that cannot write will do.
        state: where counts are kept.
        clock: what counts are dated and paced by.
        rows_per_second: the budget.
        refresh_seconds: how old a count may become before it is made again.
        is_stopping: whether the process is ending; asked before every page and in every wait.
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
        #: The budget, which others may share; ends a wait with ``StopRequested``.
        self.pacer = Pacer(rows_per_second, clock, self._raise_if_stopping)
        self._turns = CountScheduler(
            self, clock, self.pacer, turn_rows=rows_per_second * TURN_SECONDS, refresh_seconds=refresh_seconds
        )
        self._found: dict[TopicId, TopicCount | None] = {}
        self._swept: set[TopicId] = set()
        #: Whether counts were saved that the sizes over time do not have yet.
        self._sized, self._sized_ms = True, clock.monotonic_ms()

    def step(self) -> None:
        """Count due rows, until nothing is unfinished, or until the process is stopping; to be called now and then.

        A topic that cannot be read keeps the count it had, with its time, and is tried again when it is due again.

        Raises:
            StoreError: the metadata could not be read, or counts could not be read or saved.
        """
        if not self._is_stopping():
            self._turns.step()
            self._save_sizes()

    def living(self) -> Sequence[Life]:
        """Return the topics that exist: swept topics, then by the age of the count; drop the counts of others."""
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

    def outdated(self, life: Life) -> bool:
        """Return whether a topic was swept since it was counted."""
        return life[0] in self._swept

    def begin(self, life: Life) -> Generator[int, None, TopicCount]:
        """Yield a new count of a topic."""
        tally = _Tally.begin(*life)
        while not tally.done:
            size_bytes = tally.size_bytes
            rows = tally.read(self._store)
            yield max(rows, (tally.size_bytes - size_bytes) // ROW_BYTES)
        return tally.count(self._clock.now_ms())

    def finished(self, life: Life, found: TopicCount) -> None:
        """Keep a count."""
        self._found[life[0]] = found

    def failed(self, life: Life, error: StoreError) -> None:
        """Say once that a topic could not be counted."""
        _log.warning("topic %s could not be counted, its figures stay as they were: %s", life[0], error)

    def save(self) -> None:
        """Save what was counted since."""
        if self._found:
            self._state.save_counts(self._found)
            self._sized = False
        self._found = {}
        if self._clock.monotonic_ms() - self._sized_ms >= SIZES_EVERY_MS:
            self._save_sizes()

    def _save_sizes(self) -> None:
        """Add the counts to the sizes over time: when a step is over, and now and then in one that goes on."""
        self._sized_ms = self._clock.monotonic_ms()
        if not self._sized:
            save_sizes(self._state, self._state.counts())
            self._sized = True

    def _raise_if_stopping(self) -> None:
        if self._is_stopping():
            raise StopRequested("the count was stopped.")


@dataclass(slots=True)
class _Tally:
    """A topic's count under way.

    Attributes:
        messages_from, payloads_from: where the next page starts; None once that table is done.
        limit: rows of the next page.
        rows: rows read.
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
        """Return one page more, of the message table first; returns how many rows it had."""
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
            fitting = PAGE_BYTES * rows // max(1, self.size_bytes - before)
            self.limit = max(1, min(PAGE_ROWS, fitting))
        return rows

    def _read_messages(self, store: Reads, start: bytes) -> tuple[int, bytes | None]:
        # Rows are in the order of their times; a negative one, which is none of ours, lies behind all others.
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
    """Return the publish or write time in a key: of either table it is what stands before the last two bytes."""
    return int.from_bytes(key[-10:-2], "big", signed=True)
