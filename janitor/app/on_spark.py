"""A session whose engines make their passes on Spark; the import needs pyspark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from janitor.app.session import Session
from janitor.report import Report
from janitor.run.engine import Engine
from janitor.spark.access import Access
from janitor.spark.sweep.engine import Sender, SparkSender, cutter, spark_engine
from janitor.spark.sweep.task import StoreEnvironment
from janitor.state.base import State
from tms_core.tables.base import Reads
from tms_core.tables.leveldb.clone import copy_open_store
from tms_core.transaction.source.source import SnapshotSource


class SessionOnSpark(Session):
    """A session with the settings of another, whose engines make their passes on Spark."""

    def __init__(self, current: Session, spark: SparkSession, partitions: int | None) -> None:
        super().__init__(current.common, current.clock, loaded=current.loaded)
        self._spark = spark
        self._partitions = partitions

    def engine(self, store: Reads, state: State, *, source: SnapshotSource | None = None, **options: Any) -> Engine:
        access = Access(self.settings)
        return spark_engine(
            self.deps(store, state, source=source, **options),
            sender=SparkSender(self._spark, StoreEnvironment(access)),
            cut=cutter(access, self._partitions, state.counts),
            open_reading=self._reading_tasks if access.is_leveldb else None,
        )

    @contextmanager
    def _reading_tasks(self) -> Iterator[Sender]:
        """Yield tasks that read the current LevelDB store while this process has it open."""
        with copy_open_store(self.settings.storage.leveldb.path, self.state_path) as copied:
            yield SparkSender(self._spark, StoreEnvironment(Access(self.settings).at(copied)))

    def preview(self, patterns: tuple[str, ...]) -> Report:
        """Return the plan of a run from an engine that cannot write."""
        with self._open_clone() as engine:
            return engine.plan(patterns=patterns).report
