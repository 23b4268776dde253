"""The executor of findings, which does nothing in a plan; deleting and inverting, batch by batch, by a run.

A task of Spark that may only say where something is to be done has an act of its own (``janitor/spark/sweep/task.py``).

Between planning a topic and deleting its rows, the topic may be deleted, created again or given another ttl. So each
batch reads the topic's metadata again and is dropped when it has moved (rule S2); a reader then loses no more than the
metadata allowed an instant before. Before that it asks whether this run may still write at all (rule S12). A batch that
was written is paid for with nothing open (S11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol, cast

from janitor.report import Observer, ignore_progress
from janitor.rules.policy import Rule
from janitor.sweep.compaction import DeletedRanges
from janitor.sweep.context import TopicWork
from janitor.sweep.findings import NOTHING_DONE, Batch, Counted, Done, Due, Finding, Invalid, Read
from janitor.sweep.ledger import Booking, Ledger
from janitor.sweep.permission import Pacer, Permission, Withheld
from tms_core.errors import ArchiveError, StoreError
from tms_core.tables.base import KeyReads, KeyTable, MessageReads, MessageTable, MetadataReads, PayloadReads
from tms_core.tables.read_only import read_only_error
from tms_core.topic import TopicId


class Moved(Exception):
    """A topic's metadata changed between planning and deleting (rule S2); the batch was dropped."""


class NotArchived(Withheld):
    """Rows could not be archived, so nothing more is deleted."""

    def __init__(self, error: ArchiveError) -> None:
        super().__init__(str(error))


class Unsure(Exception):
    """The store failed on a batch, so it is not known which of its rows went."""

    def __init__(self, due: Due, at_ms: int, error: StoreError) -> None:
        super().__init__(str(error))
        self.due = due
        self.at_ms = at_ms
        self.error = error


class Act(Protocol):
    """An executor of findings. All of it raises ``Interrupted`` when the pass is over, and has then done nothing."""

    def alive(self) -> None:
        """Called before every jump.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def progress(self, read: Read) -> None:
        """Told of every page.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def apply(self, finding: Finding) -> Done:
        """Execute a finding.

        Raises:
            Moved: the topic has changed since the finding; nothing was done.
            Withheld: nothing may be changed in this topic now; nothing was.
            Unsure: the store failed on the way.
            StoreError: the store failed; nothing was done.
            Interrupted: the pass is over; nothing was done.
        """
        ...

    def pay(self, taken: Counted) -> None:
        """Called after rows were deleted; waits until they are within the rate.

        Raises:
            Interrupted: the pass is over.
        """
        ...


class Saved(Protocol):
    """Rows that are safe elsewhere."""

    @property
    def keys(self) -> Sequence[bytes]:
        """Whose rows; nothing else may be deleted."""
        ...

    def discard(self) -> None:
        """Forget them again, because they stay where they are."""
        ...


class Keeper(Protocol):
    """Keeps rows that are about to be deleted (``janitor.archive``)."""

    def save(
        self, topic: TopicId, generation: int, table: MessageReads | PayloadReads, rule: Rule, keys: Sequence[bytes]
    ) -> Saved:
        """Return when the rows are safe.

        Raises:
            ArchiveError: they are not; nothing may be deleted.
        """
        ...


def nothing() -> None:
    """There is nothing to ask."""


class Preview:
    """The act of a plan: nothing, and all would be done.

    Args:
        alive: called after every page; may raise ``Interrupted``.
        observer: told about progress.
    """

    def __init__(self, alive: Callable[[], None] = nothing, observer: Observer = ignore_progress) -> None:
        self.alive = alive
        self._observer = observer

    def progress(self, read: Read) -> None:
        self._observer(read.phase, read.topic, read.rows)
        self.alive()

    def apply(self, finding: Finding) -> Done:
        """Leave the rows where they are."""
        match finding:
            case Due(hold=None):
                return Done(finding.batch.keys)
            case Invalid():
                return Done(cells=finding.cells)
            case _:
                return NOTHING_DONE

    def pay(self, taken: Counted) -> None:
        """Looking costs nothing."""


class Sweep:
    """The act of a run; threads that sweep different parts of the store may share it.

    Args:
        metadata: read again before every batch.
        permission: asked before every batch.
        pacer: how fast.
        ledger: where it is announced.
        keeper: where rows go before they are deleted; None for nowhere.
        observer: told about progress.
        booking: the observer of deletions; None: the result of a run is known after it.

    Attributes:
        deleted: where rows were; to be closed.
    """

    def __init__(
        self,
        metadata: MetadataReads,
        permission: Permission,
        pacer: Pacer,
        ledger: Ledger,
        keeper: Keeper | None = None,
        observer: Observer = ignore_progress,
        booking: Booking | None = None,
    ) -> None:
        self._metadata = metadata
        self._permission = permission
        self._pacer = pacer
        self._ledger = ledger
        self._keeper = keeper
        self._observer = observer
        self._booking = booking
        self.deleted = DeletedRanges()
        self._archive_error: ArchiveError | None = None
        self._lock = Lock()

    def alive(self) -> None:
        self._permission.alive()

    def progress(self, read: Read) -> None:
        if read.phase == "invert":
            self.deleted.no_more("message")
        self._observer(read.phase, read.topic, read.rows)
        self._permission.alive()

    def pay(self, taken: Counted) -> None:
        if self._booking is not None:
            self._booking.add(taken)
        self._pacer.pay(taken.rows)

    def apply(self, finding: Finding) -> Done:
        if isinstance(finding, Invalid):
            return self._invert(finding)
        if not isinstance(finding, Due) or finding.hold is not None or not finding.batch.keys:
            return NOTHING_DONE
        table, keys = finding.table, self._allowed(finding)
        if not isinstance(table, KeyTable):
            raise read_only_error()
        if not keys:
            return NOTHING_DONE
        # Before they are: an error here leaves nothing done, and only ranges before this one are worked on yet.
        self.deleted.add(table, keys)
        at_ms = self._ledger.announce(finding.work, finding.batch._replace(keys=keys))
        try:
            table.delete(keys, finding.batch.origin)
        except StoreError as error:
            raise Unsure(finding, at_ms, error) from error
        return Done(keys, at_ms=at_ms)

    def _allowed(self, due: Due) -> list[bytes]:
        """Return the keys of those rows that may be deleted now: of all of a batch, or of those that are archived."""
        self._permission.check(due.work.topic.topic)
        self._refuse_if_moved(due.work)
        return due.batch.keys if self._keeper is None else self._keep(self._keeper, due.work, due.table, due.batch)

    def _invert(self, invalid: Invalid) -> Done:
        self._permission.check(invalid.topic)
        if not isinstance(invalid.table, MessageTable):
            raise read_only_error()
        at_ms = self._ledger.announce_inverting(invalid)
        changed = invalid.table.invert(invalid.cells)
        cells = [cell for cell, done in zip(invalid.cells, changed, strict=True) if done]
        return Done(cells=cells, at_ms=at_ms)

    def _refuse_if_moved(self, work: TopicWork) -> None:
        if self._metadata.get(work.topic.topic.prefix) != work.raw:
            raise Moved

    def _keep(self, keeper: Keeper, work: TopicWork, table: KeyReads, batch: Batch) -> list[bytes]:
        """Have the rows kept; returns the keys of those that are. The topic may have moved meanwhile."""
        if self._archive_error is not None:
            raise NotArchived(self._archive_error)
        try:
            source = cast(MessageReads | PayloadReads, table)
            saved = keeper.save(work.topic.topic, batch.generation, source, batch.rule, batch.keys)
        except ArchiveError as error:
            self._archive_error = error
            raise NotArchived(error) from error
        try:
            self._permission.check(work.topic.topic)
            self._refuse_if_moved(work)
        except Exception:
            saved.discard()
            raise
        return list(saved.keys)
