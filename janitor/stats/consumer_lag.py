"""The lag of each consumer: counted exactly in the background, within the common budget of all counts.

:mod:`tms_core.consumers.lag` defines the lag. This module counts it for all topics repeatedly, and saves the results
with their times for metrics and status. Topics take turns in the budget (:mod:`janitor.stats.scheduler`), so a consumer
with a lag of a billion messages does not delay the results of other consumers.

The position of a consumer group includes its claims of committed transactions. The results also have the number of open
claims and of redelivered ranges. Both use the newest snapshot, so a claim whose transaction has ended since still
counts as open. A transaction manager, if available, reports the transactions that block readers.

The count only reads; it saves its results as notes in the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Sequence
from typing import NamedTuple, Protocol

from janitor.state.base import State
from janitor.state.figures import CONSUMERS, LATE, BlockedReaders, ConsumerFigures
from janitor.stats.scheduler import CountScheduler, Life
from janitor.sweep.executor import Pacer
from tms_core.clock import Clock
from tms_core.consumers import lag
from tms_core.consumers.claim_rows import claims_of
from tms_core.consumers.claims import ConsumerGroup, GroupClaim, view_group
from tms_core.consumers.lag import Lag, LagTables
from tms_core.consumers.positions import Position, Positions
from tms_core.errors import FormatError, StoreError
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata, living_topics
from tms_core.transaction.model import Transaction, late_transactions

#: The number of rows in a turn of one topic.
TURN_ROWS = 100_000
#: The time for which a transaction may block readers before it is late, in milliseconds.
LATE_MS = 60_000
#: The maximum number of late transactions that are saved, and of topics for each.
MAX_LATE, MAX_TOPICS = 20, 20

#: A reader without a snapshot, for which each transaction may be in progress.
UNINFORMED = Transaction(read_pointer=0, transaction_id=0, write_pointer=0)

_log = logging.getLogger(__name__)


class ConsumerCount(NamedTuple):
    """The counts of one consumer.

    Attributes:
        open_claims, redelivered: as for :class:`janitor.state.figures.ConsumerFigures`.
    """

    lag: Lag
    open_claims: int
    redelivered: int


class LagCount:
    """A repeated count of the unread messages of all consumers of a store.

    Args:
        tables: the tables; only read.
        side: the side table with positions and claims; only read.
        state: stores the results.
        clock: the clock for the times of results.
        pacer: the budget, shared with all other counts; called before every page.
        refresh_seconds: the age after which a count is repeated.
        reader: returns the current view of transactions; called before claims are read.
    """

    def __init__(
        self,
        tables: LagTables,
        side: SideTable,
        state: State,
        clock: Clock,
        pacer: Pacer,
        *,
        refresh_seconds: int = 60,
        reader: Callable[[], Transaction] = lambda: UNINFORMED,
    ) -> None:
        self._tables = tables
        self._side = side
        self._positions = Positions(side)
        self._reader = reader
        self._state = state
        self._clock = clock
        self._turns = CountScheduler(self, clock, pacer, turn_rows=TURN_ROWS, refresh_seconds=refresh_seconds)
        self._present: dict[Life, tuple[TopicMetadata, Collection[Position]]] = {}
        self._figures: dict[Life, list[ConsumerFigures]] = {}
        for figures in CONSUMERS.read(state):
            life = (TopicId(figures.tms_namespace, figures.topic), figures.generation)
            self._figures.setdefault(life, []).append(figures)

    def step(self) -> None:
        """Count due topics, until no count is unfinished or the process is stopping; call this repeatedly.

        A topic that cannot be read keeps its last results with their time, until it is due again.

        Raises:
            StoreError: the metadata or the positions could not be read, or the results could not be saved.
        """
        self._turns.step()

    def list_topics(self) -> Sequence[Life]:
        """Return topics with consumers; drop the results of other topics."""
        topics = {(topic.topic, topic.generation): topic for topic in living_topics(self._tables.store.metadata.rows())}
        self._present = {life: (topics[life], found) for life, found in self._positions.all().items() if life in topics}
        self._figures = {life: figures for life, figures in self._figures.items() if life in self._present}
        return list(self._present)

    def is_outdated(self, life: Life) -> bool:
        """Return False: only time makes these results outdated."""
        return False

    def begin(self, life: Life) -> Generator[int, None, list[ConsumerCount]]:
        """Yield a new count of a topic."""
        topic, positions = self._present[life]
        reader = self._reader()
        moved: list[Position] = []
        claimed: dict[str, tuple[int, int]] = {}
        for position in positions:
            claims = self._claims(topic, position)
            now = view_group(position.id, claims, reader)
            moved.append(position._replace(id=now.base))
            claimed[position.name] = len(now.open), sum(claim.tries > 1 for claim in (*now.open, *now.free))
            if claims:
                yield len(claims)
        lags = yield from lag.count(self._tables, topic, moved, self._clock.now_ms())
        return [ConsumerCount(found, *claimed[found.position.name]) for found in lags]

    def _claims(self, topic: TopicMetadata, position: Position) -> list[GroupClaim]:
        try:
            return [claim for _, claim in claims_of(self._side, ConsumerGroup.of(topic, position.name))]
        except FormatError as error:
            raise StoreError(str(error)) from error

    def note_result(self, life: Life, found: list[ConsumerCount]) -> None:
        """Store the results of a topic's consumers."""
        topic, _ = self._present[life]
        self._figures[life] = [_figures(topic, counted, self._clock.now_ms()) for counted in found]

    def note_failure(self, life: Life, error: StoreError) -> None:
        """Log the first failure to count a topic's consumers."""
        _log.warning("the lag of the consumers of %s could not be counted: %s", life[0], error)

    def save(self) -> None:
        """Save changed results; an adoption may have deleted the stored results."""
        CONSUMERS.save(self._state, [figures for life in sorted(self._figures) for figures in self._figures[life]])


def _figures(topic: TopicMetadata, counted: ConsumerCount, counted_ms: int) -> ConsumerFigures:
    found = counted.lag
    return ConsumerFigures(
        tms_namespace=topic.topic.namespace,
        topic=topic.topic.topic,
        generation=topic.generation,
        consumer=found.position.name,
        position_ms=found.position.id.publish_ms,
        updated_ms=found.position.updated_ms,
        lag_messages=found.messages,
        oldest_unread_ms=found.oldest_ms,
        expired=found.expired,
        counted_ms=counted_ms,
        open_claims=counted.open_claims,
        redelivered=counted.redelivered,
    )


# -- late transactions, which have been in progress for long and block readers in transactions -------------------------


class LateSource(Protocol):
    """A local or remote transaction manager that reports transactions in progress."""

    def published(self) -> dict[int, dict[str, int]]:
        """Return the topics that transactions in progress have published to, with the time of the first message."""
        ...

    def clients(self) -> dict[int, str]:
        """Return the clients of transactions, by id."""
        ...


def note_late(state: State, transactions: LateSource, clock: Clock) -> None:
    """Save the present late transactions.

    Raises:
        TransactionError: the transaction service does not respond.
        StateError: the state could not be read or written.
    """
    late = late_transactions(transactions.published(), transactions.clients(), clock.now_ms() - LATE_MS)
    found = [
        BlockedReaders(
            transaction=str(transaction.pointer),
            client=transaction.client,
            since_ms=transaction.since_ms,
            topics=[topic for topic, _ in transaction.topics[:MAX_TOPICS]],
            more_topics=max(0, len(transaction.topics) - MAX_TOPICS),
        )
        for transaction in late[:MAX_LATE]
    ]
    LATE.save(state, found)
