"""An archive of a store, for tests of restores.

undo = Undo(store, tmp_path)
undo.sweep(orders, snapshot=visibility(NOW_MS))     # archives all of the generation's rows, and deletes them
undo.state.pause("default:orders", NOW_MS)
undo.restore(orders)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from janitor.archive import index as archived
from janitor.archive.index import ArchivedFile, Selection
from janitor.archive.restore import Request, RestoreResult, restore
from janitor.archive.writer import ParquetArchive, RunArchive, SavedFile
from janitor.rules.policy import Rule
from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.transactions import TransactionView
from tests.builders import HOUR, NOW_MS, Topic
from tms_core.clock import ManualClock
from tms_core.rowkey import generation_prefix
from tms_core.tables.base import KEYS, MessageTable, PayloadTable, Store
from tms_core.transaction.model import VisibilityState


def keys_of(topic: Topic, table: MessageTable | PayloadTable) -> list[bytes]:
    """Return the keys of a topic's generation."""
    prefix = topic.id.prefix
    start, stop = (generation_prefix(prefix, topic.generation + more) for more in (0, 1))
    return table.read(KEYS, start, stop, 1_000_000).items


@dataclass
class Undo:
    """A store, its archive and a state."""

    store: Store
    folder: Path
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS))
    state: State = field(default_factory=SqliteState.in_memory)

    def begin(self, run_id: str = "run-1", snapshot: VisibilityState | None = None) -> RunArchive:
        return ParquetArchive(self.folder, self.clock).begin(run_id, TransactionView(snapshot, NOW_MS, HOUR))

    def archive(
        self,
        topic: Topic,
        *,
        run_id: str = "run-1",
        snapshot: VisibilityState | None = None,
        rule: Rule = Rule.EXPIRED,
        delete: bool = False,
    ) -> list[SavedFile]:
        """Archive all rows of the topic's generation; with ``delete``, delete them from the store, like a run."""
        run = self.begin(run_id, snapshot)
        saved = []
        for table in (self.store.message, self.store.payload):
            keys = keys_of(topic, table)
            if keys:
                saved.append(run.save(topic.id, topic.generation, table, rule, keys))
                if delete:
                    table.delete(saved[-1].keys)
        return saved

    def sweep(self, topic: Topic, **options: Any) -> list[SavedFile]:
        """Archive and delete all rows of the topic's generation."""
        return self.archive(topic, delete=True, **options)

    def files(self, topic: Topic) -> list[ArchivedFile]:
        return archived.find_topic(self.folder, topic.id)

    def restore(
        self,
        source: Topic,
        target: Topic | None = None,
        *,
        snapshot: VisibilityState | None = None,
        dry_run: bool = False,
        **selection: Any,
    ) -> RestoreResult:
        request = Request(source.id, target.id if target else None, Selection(**selection), dry_run)
        files = self.files(source)
        now_ms = self.clock.now_ms()
        transactions = TransactionView(snapshot, now_ms, HOUR)
        return restore(self.store, self.state, transactions, files, request, now_ms, lambda _: None)
