"""The dependencies of a janitor of one store: store, state, clock, snapshots and settings.

One frozen value is made where a process is put together (``janitor/app``) and handed to questions, decisions and runs,
which keep nothing besides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from janitor.archive.writer import ParquetArchive
from janitor.report import Observer, UnrecognizedKey, ignore_progress
from janitor.state.base import State
from janitor.sweep.executor import never
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Terms, none_is_new
from janitor.sweep.sweep import Division, Threads
from tms_core.clock import Clock
from tms_core.consumers.positions import Floor, Positions
from tms_core.tables.base import MetadataReads, Reads, Store
from tms_core.tables.lease import Lease
from tms_core.tables.read_only import read_only, read_only_error
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicId, TopicMetadata, readable_topics
from tms_core.transaction.source.source import SnapshotSource

logger = logging.getLogger(__name__)


class GuardedObserver:
    """An observer that cannot hurt a run (rule S15): one that fails is named in the log and not called again."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        try:
            self._observer(phase, topic, rows)
        # Whatever it raises: showing progress must never stop a deletion half-way.
        except Exception:
            logger.exception("showing progress failed; the run goes on without it")
            self._observer = ignore_progress


class UnknownRowLog:
    """Logs unrecognised rows (rules L0 and L1), each once in the life of a process."""

    def __init__(self) -> None:
        self._named: set[UnrecognizedKey | TopicId] = set()

    def name(self, outcome: Outcome, metadata: MetadataReads) -> None:
        """Log findings of a pass that were not logged before; not a topic that was made after the pass started.

        Args:
            metadata: as it is now.
        """
        unknown = outcome.unknown - self._named
        if unknown:
            # One call, however many there are: a run shows between its calls that it lives (rule S10).
            prefixes = {topic.prefix for topic in unknown}
            unknown -= {found.topic for found in readable_topics(row for row in metadata.rows() if row[0] in prefixes)}
        for found in outcome.unrecognized:
            if found not in self._named:
                logger.warning("left alone: a row of the %s table with an unrecognized key: %s", *found)
        for topic in sorted(unknown):
            logger.warning("left alone: rows of topic %s, which has no metadata that can be read", topic)
        self._named.update(outcome.unrecognized, unknown)


class Truncator(SnapshotSource, Protocol):
    """A transaction manager: that of this process, or a client of another one's."""

    def truncate_invalid(self, transaction_ids: Collection[int], /) -> bool:
        """Take ids off the invalid list (Tephra's ``truncateInvalidTx``); returns whether any was on it.

        Raises:
            TmsError: it was not done, or that is not known.
        """
        ...


class Feedback(NamedTuple):
    """The receiver of transactions that are proven clean (:mod:`janitor.run.feedback`).

    Attributes:
        manager: has the invalid list.
        participants: everything that takes part in its transactions (``janitor.boundary.participants``).
    """

    manager: Truncator
    participants: Collection[str]


def ignore_restored(_: TopicId) -> None:
    """No other code knows the contents of a topic."""


@dataclass(frozen=True, slots=True)
class Deps:
    """The dependencies of a janitor of one store.

    Attributes:
        store: the store; for questions a clone of it, or a store for reading only.
        state: its state.
        source: where transaction snapshots come from; None for nowhere.
        clock: what time it is.
        terms: the settings.
        token_hex: makes that many random bytes, as hex (``secrets.token_hex``).
        division: the parts of the store in a pass, and the executor of its steps.
        observer: told about progress; a failed observer is not called again and stops nothing (rule S15).
        is_stopping: whether to stop before the next page or batch.
        unrecognised: the subjects already logged; all of one process share it.
        side: messages with a ttl of their own (L6), consumers and their claims; None: there are none.
        newborn: whether a topic is known to have been made with nothing in it, so that it need not be held.
        lease: the lease of runs; None where nothing else can write.
        archive: where rows go before they are deleted; None for nowhere.
        feedback: the transaction manager that receives proven ids; None for none.
        restored: told of a topic that archived rows were written to.
        opened_bytes: the size of the store on its disk before it was opened for writing; None: its size is read.
        state_name: where the state is, for people.
    """

    store: Reads
    state: State
    source: SnapshotSource | None
    clock: Clock
    terms: Terms
    token_hex: Callable[[int], str]
    division: Division = field(default_factory=Threads)
    observer: Observer = ignore_progress
    is_stopping: Callable[[], bool] = never
    unknown_row_log: UnknownRowLog = field(default_factory=UnknownRowLog)
    side: SideTable | None = None
    newborn: Callable[[TopicMetadata], bool] = none_is_new
    lease: Lease | None = None
    archive: ParquetArchive | None = None
    feedback: Feedback | None = None
    restored: Callable[[TopicId], None] = ignore_restored
    opened_bytes: int | None = None
    state_name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.observer, GuardedObserver):
            object.__setattr__(self, "observer", GuardedObserver(self.observer))

    @property
    def expiries(self) -> Expiries | None:
        """Return the messages with a ttl of their own (L6); None: there are none."""
        return None if self.side is None else Expiries(self.side)

    @property
    def floor(self) -> Floor | None:
        """Return the hold on messages that registered consumers have not read; None: there is no hold."""
        seconds = self.terms.consumer_hold_seconds
        if self.side is None or seconds is None:
            return None
        return Floor(Positions(self.side), read_only(self.store), seconds)

    def writable_store(self) -> Store:
        """Return the store, to be written: questions never ask for that (rule S5).

        Raises:
            StoreError: it was opened for reading only.
        """
        if not isinstance(self.store, Store):
            raise read_only_error()
        return self.store

    def check_lease(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            LeaseLost: another process has it.
        """
        if self.lease is not None:
            self.lease.check()
