"""Doing what a walk finds: deleting and inverting, batch by batch.

Between planning a topic and deleting its rows, the topic may be deleted, created again or given another ttl. So each
batch reads the topic's metadata again and is dropped when it has moved (rule S2); what a reader then loses is never
more than what the metadata allowed an instant before. Before that it asks whether this run may still write at all
(rule S12). A batch that was written is paid for with nothing open (S11).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol, cast

from janitor.compaction import DeletedRanges
from janitor.ledger import Ledger
from janitor.pacing import Pacer
from janitor.permission import Permission, Withheld, asked_of_memory
from janitor.policy import Rule
from janitor.state.base import LedgerEntry
from janitor.walk import Batch, Moved
from janitor.world import TopicWork
from tms_core.errors import ArchiveError, StoreError
from tms_core.rowkey import MessageKey
from tms_core.tables.base import KeyTable, MessageTable, PayloadTable, Store, TxCell
from tms_core.topic import TopicId


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
        self, topic: TopicId, generation: int, table: MessageTable | PayloadTable, rule: Rule, keys: Sequence[bytes]
    ) -> Saved:
        """Return when the rows are safe.

        Raises:
            ArchiveError: they are not; nothing may be deleted.
        """
        ...


class Sweep:
    """The act of a run; threads that walk different parts of the store may share it.

    Args:
        store: what is swept.
        permission: asked before every batch.
        pacer: how fast.
        ledger: where it is written down.
        keeper: where rows go before they are deleted; None for nowhere.

    Attributes:
        archive_error: why rows could not be kept; from then on nothing is deleted, and the rest of the run goes on.
        write_failed: whether the store refused to delete something, as it does when its disk is full.
    """

    def __init__(
        self, store: Store, permission: Permission, pacer: Pacer, ledger: Ledger, keeper: Keeper | None = None
    ) -> None:
        self._store = store
        self._permission = permission
        self._pacer = pacer
        self._ledger = ledger
        self._keeper = keeper
        self.archive_error: ArchiveError | None = None
        self.write_failed = False
        self.deleted = DeletedRanges()
        self._lock = Lock()

    def alive(self) -> None:
        self._permission.alive()

    def delete(self, work: TopicWork, table: KeyTable, batch: Batch) -> list[bytes]:
        self._permission.check(work.topic.topic)
        self._refuse_if_moved(work)
        keys = batch.keys if self._keeper is None else self._keep(self._keeper, work, table, batch)
        if not keys:
            return []
        batch = batch._replace(keys=keys)
        with self._lock, asked_of_memory():
            self._ledger.announce(work, batch)
        try:
            table.delete(keys)
        except StoreError:
            self.write_failed = True
            raise
        with self._lock:
            self._ledger.deleted(work, batch)
            self.deleted.add(table, keys)
        return keys

    def take_in(self, entries: Iterable[LedgerEntry]) -> None:
        """Told of what others took for the same run (:mod:`janitor.spark`)."""
        with self._lock:
            self._ledger.take_in(entries)

    def announced(self, entry: LedgerEntry) -> bool:
        """Whether this process itself has announced that it takes this."""
        with self._lock:
            return self._ledger.announced(entry)

    def sync(self) -> None:
        """Return when all that was deleted survives a crash of the machine."""
        for table in {part.table.name: part.table for part in self.deleted.slices}.values():
            table.sync()

    def invert(self, topic: TopicId, table: MessageTable, cells: Sequence[TxCell]) -> list[bool]:
        self._permission.check(topic)
        return table.invert(cells)

    def inverted(self, work: TopicWork | None, key: MessageKey, cell: TxCell) -> None:
        with self._lock:
            self._ledger.inverted(work, key, cell)

    def pay(self, rows: int) -> None:
        self._pacer.pay(rows)

    def _refuse_if_moved(self, work: TopicWork) -> None:
        if self._store.metadata.get(work.topic.topic.prefix) != work.raw:
            raise Moved

    def _keep(self, keeper: Keeper, work: TopicWork, table: KeyTable, batch: Batch) -> list[bytes]:
        """Have the rows kept; returns the keys of those that are. The topic may have moved meanwhile."""
        if self.archive_error is not None:
            raise Withheld
        try:
            source = cast(MessageTable | PayloadTable, table)
            saved = keeper.save(work.topic.topic, batch.generation, source, batch.rule, batch.keys)
        except ArchiveError as error:
            self.archive_error = error
            raise Withheld from error
        try:
            self._permission.check(work.topic.topic)
            self._refuse_if_moved(work)
        except Exception:
            saved.discard()
            raise
        return list(saved.keys)
