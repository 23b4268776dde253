"""Access to the store from a task, on any machine.

Executors get settings, never connections. On LevelDB each task opens a clone (invariant S5): only one process can open
a folder, and hard links cost little. On HBase each task opens connections.

On LevelDB, no process may hold the store while tasks clone it, and each task sees the store at its start.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from janitor.rules.policy import Frontier, Hold
from janitor.run.plan_file import WhatIf, with_supposed_ttl
from janitor.settings import AllSettings
from janitor.spark.columns import Policy
from janitor.sweep import transactions as txstate
from janitor.sweep.consumers import ProcessedRows
from janitor.sweep.run import parse_or_none
from janitor.sweep.transactions import TransactionView
from tms_core.clock import Clock, SystemClock
from tms_core.errors import ConfigurationError
from tms_core.tables.base import Reads
from tms_core.tables.leveldb.clone import clone, copy_folder
from tms_core.tables.leveldb.layout import holds_database
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.read_only import read_only
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicMetadata
from tms_core.transaction.rpc.client import source_of

# Every task imports this module, and only stores in HBase need the client.
if TYPE_CHECKING:
    from tms_core.tables.hbase.store import HBaseStore

logger = logging.getLogger(__name__)


def freeze_modules() -> None:
    """Exempt the imported modules from garbage collection, once in a process of tasks.

    PySpark collects all garbage after each task, which takes 60 ms with these modules: longer than most tasks.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@dataclass(frozen=True, slots=True)
class Access:
    """The access to a store; tasks get it serialized.

    Args:
        settings: the store and its addresses.
    """

    settings: AllSettings

    @property
    def is_leveldb(self) -> bool:
        return self.settings.storage.kind == "leveldb"

    def at(self, path: Path) -> Access:
        """Return the access to a LevelDB store in another folder, with otherwise the same settings."""
        leveldb = self.settings.storage.leveldb.model_copy(update={"path": str(path.absolute())})
        storage = self.settings.storage.model_copy(update={"leveldb": leveldb})
        return Access(self.settings.model_copy(update={"storage": storage}))

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        """Yield the store's contents, without methods that write (invariant S5).

        Raises:
            StoreBusy: another process has the LevelDB store open.
            StoreError: the store does not exist, or does not respond.
        """
        if self.is_leveldb:
            with clone(self.settings.storage.leveldb.path, self.settings.janitor.state) as cloned:
                yield cloned
        else:
            with self.hbase() as store:
                yield read_only(store)

    @contextmanager
    def salted(self) -> Iterator[Sequence[tuple[int | None, Reads]]]:
        """Yield the parts of the store by their salts, without methods that write; on LevelDB one part without a salt.

        Raises:
            StoreError: as :meth:`reading`.
        """
        if self.is_leveldb:
            with self.reading() as store:
                yield [(None, store)]
        else:
            from tms_core.tables.hbase.store import HBasePart  # noqa: PLC0415

            with self.hbase() as store:
                yield [(part.salt, read_only(part)) for part in store.parts() if isinstance(part, HBasePart)]

    @contextmanager
    def part(self, salt: int | None) -> Iterator[Reads]:
        """Yield the rows of one salt, or of a store without salts, without methods that write.

        Raises:
            StoreError: as :meth:`reading`.
        """
        if salt is None:
            with self.reading() as store:
                yield store
        else:
            with self.hbase() as store:
                yield read_only(store.part(salt))

    @contextmanager
    def side(self) -> Iterator[SideTable | None]:
        """Yield the side table; None if it does not exist.

        Open it after the store, so that it has the expiry of every message in the store.

        Raises:
            StoreBusy: another process has the LevelDB store open.
            StoreError: the side table cannot be read.
        """
        with ExitStack() as stack:
            side: SideTable
            if self.is_leveldb:
                folder = side_path(Path(self.settings.storage.leveldb.path))
                if not holds_database(folder):
                    yield None
                    return
                folder = stack.enter_context(copy_folder(folder, self.settings.janitor.state))
                side = stack.enter_context(LevelDBSide(folder))
            else:
                from tms_core.tables.hbase.pool import HBasePool  # noqa: PLC0415
                from tms_core.tables.hbase.side import HBaseSide  # noqa: PLC0415

                settings = self.settings.storage.hbase
                pool = HBasePool.configured(settings, connections=1)
                side = stack.enter_context(HBaseSide(pool, settings.namespace, create=False))
            yield side

    @contextmanager
    def expiries(self) -> Iterator[Expiries | None]:
        """Yield the expiries of messages (rule L6); None and errors as for :meth:`side`."""
        with self.side() as side:
            yield None if side is None else Expiries(side)

    def hbase(self) -> HBaseStore:
        """Return the writable store in HBase.

        Raises:
            ConfigurationError: the store is not in HBase.
            StoreError: the store does not exist, or does not respond.
        """
        if self.settings.storage.kind != "hbase":
            raise ConfigurationError(
                f"storage.kind is {self.settings.storage.kind}, but tasks of Spark can read only a store on disk.",
                "Set storage.kind: leveldb or hbase, or the option leveldb or hbase.",
            )
        from tms_core.tables.hbase.store import HBaseStore  # noqa: PLC0415

        return HBaseStore(self.settings.storage.hbase)

    def transactions(self, now_ms: int, clock: Clock | None = None) -> TransactionView:
        """Return the view of the newest usable snapshot, or a view without a snapshot (invariant S14).

        Args:
            now_ms: the time at which the rules are evaluated.
            clock: the present clock, which determines the age of a snapshot, independent of ``now_ms``.
        """
        transactions, lifetime = self.settings.transactions, self.settings.lifetime
        state = txstate.refresh(
            source_of(transactions),
            (clock or SystemClock()).now_ms(),
            interval_seconds=transactions.snapshot_interval_seconds,
            allowance_ms=lifetime.allowance_ms,
        )
        return TransactionView(state.usable, now_ms, lifetime.undecided_ms)

    def policy(self, store: Reads, now_ms: int, changes: tuple[WhatIf, ...] = ()) -> Policy:
        """Return the rules at a time, without holds except for protected topics.

        Args:
            changes: hypothetical TTLs of topics.
        """
        found = (parse_or_none(key, value) for key, value in store.metadata.rows())
        topics = [with_supposed_ttl(topic, changes) for topic in found if topic is not None]
        view = self.transactions(now_ms)
        frontiers = {topic.topic: (topic, self._frontier(topic, now_ms)) for topic in topics}
        if view.snapshot is not None and any(topic.consumed for topic in topics):
            with self.side() as side:
                if side is not None:
                    rows = ProcessedRows(side, view.snapshot, self.settings.janitor.hold_seconds)
                    frontiers = {name: (one, rows.extend(one, at)[0]) for name, (one, at) in frontiers.items()}
                    for name, why in rows.unknown.items():
                        logger.warning(
                            "%s keeps messages that its consumers have processed, because the consumers' positions "
                            "cannot be read: %s",
                            name,
                            why,
                        )
        return Policy(frontiers, view)

    def _frontier(self, topic: TopicMetadata, now_ms: int) -> Frontier:
        if topic.topic.matches(tuple(self.settings.janitor.protect)):
            return Frontier.closed(now_ms, topic, Hold.PROTECTED)
        return Frontier.open(now_ms, topic)
