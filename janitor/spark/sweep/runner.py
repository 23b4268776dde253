"""Who has tasks done: on Spark, one task for each share, while the driver shows that its run is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from janitor.spark.session import attended, translated
from janitor.spark.sweep.messages import TaskResult, TaskShare, TaskSpec
from janitor.spark.sweep.task import Ground, perform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Sender(Protocol):
    """Has tasks done somewhere."""

    def send(self, spec: TaskSpec, shares: Sequence[TaskShare], alive: Callable[[], None]) -> list[TaskResult]:
        """Have each share done; the answers come in their order.

        Args:
            alive: called now and then while one waits.

        Raises:
            Interrupted: what ``alive`` raised; the tasks were called back.
            StoreError: a task failed as often as it was tried.
        """
        ...


class SparkSender:
    """Has tasks done on Spark, one for each share.

    Args:
        spark: where; a session of the sweep's own, whose jobs are all called back when the run has to end.
        ground: what tasks stand on; goes with them.
    """

    def __init__(self, spark: SparkSession, ground: Ground) -> None:
        self._spark = spark
        self._ground = ground

    def send(self, spec: TaskSpec, shares: Sequence[TaskShare], alive: Callable[[], None]) -> list[TaskResult]:
        return attended(self._spark, partial(self._collect, spec, shares), alive)

    def _collect(self, spec: TaskSpec, shares: Sequence[TaskShare]) -> list[TaskResult]:
        ground, numbered = self._ground, list(shares)

        def work(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa  # noqa: PLC0415
            from pyspark import TaskContext  # noqa: PLC0415

            context = TaskContext.get()
            attempt = context.attemptNumber() if context is not None else 0
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    answer = perform(ground, spec, numbered[at], attempt).pack()
                    yield pa.RecordBatch.from_pydict({"at": [at], "answer": [answer]})

        with translated():
            numbers = self._spark.range(0, len(numbered), 1, len(numbered))
            asked = numbers.mapInArrow(work, "at long, answer string")
            found = {row.at: row.answer for row in asked.collect()}
        return [TaskResult.unpack(found[at]) for at in range(len(numbered))]
