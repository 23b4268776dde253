"""Doing what a walk finds: deleting and inverting, batch by batch.

Between planning a topic and deleting its rows, the topic may be deleted, created again or given another ttl. So each
batch reads the topic's metadata again and is dropped when it has moved (rule S2); what a reader then loses is never
more than what the metadata allowed an instant before. A batch that was written is paid for with nothing open (S11).
"""

from __future__ import annotations

from collections.abc import Sequence

from janitor.compaction import DeletedRanges
from janitor.pacing import Pacer
from janitor.walk import Moved
from janitor.world import TopicWork
from tms_core.tables.base import KeyTable, Store, TxCell


class Sweep:
    """The act of a run.

    Args:
        store: what is swept.
        pacer: how fast.
    """

    def __init__(self, store: Store, pacer: Pacer) -> None:
        self._store = store
        self._pacer = pacer
        self.deleted = DeletedRanges()

    def delete(self, work: TopicWork, table: KeyTable, keys: Sequence[bytes]) -> None:
        if self._store.metadata.get(work.topic.topic.prefix) != work.raw:
            raise Moved
        table.delete(keys)
        self.deleted.add(table, keys)
        self._pacer.pay(len(keys))

    def sync(self) -> None:
        """Return when all that was deleted survives a crash of the machine."""
        for table in {part.table.name: part.table for part in self.deleted.slices}.values():
            table.sync()

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        changed = self._store.message.invert(cells)
        self._pacer.pay(len(cells))
        return changed
