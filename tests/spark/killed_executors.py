"""A program on a cluster that publishes batches while executors are killed.

An executor consists of a Java process and its Python workers. In each batch, the worker of the first task kills its
executor at another step; the driver survives, and Spark repeats the task in another executor. It is a separate process,
because a process with a local session cannot have a session on a cluster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from janitor.spark.stream import publish as publishing
from janitor.spark.stream.publish import publish_batches
from tests.spark.settings import DRIVER, EXECUTORS
from tms_core.client import Client
from tms_core.errors import TmsError

#: The rows of a batch, and its partitions.
ROWS, PARTITIONS = 8, 2


def main(master: str, url: str, transactions: str, folder: Path, steps: list[str]) -> None:
    """Publish one batch of numbers for each step at which an executor is killed, and one more batch.

    Args:
        master: the address of the cluster.
        url, transactions: the addresses of the server.
        folder: a folder for the checkpoint, and for a file of each step with the killed process.
        steps: the steps of :class:`KilledStoring`.
    """
    settings = {**DRIVER, **EXECUTORS, "spark.log.level": "OFF"}
    spark = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    try:
        (folder / "metadata").write_text('{"id": "query"}')
        (folder / "offsets").mkdir()
        publish = publish_batches(url, "default:bills", str(folder), transactions=transactions)
        for number, step in enumerate([*steps, "never"]):
            planned = {"batchTimestampMs": time.time_ns() // 1_000_000}
            (folder / "offsets" / str(number)).write_text(json.dumps(planned))
            rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, PARTITIONS)
            with killing_executor(step, folder):
                publish(rows.selectExpr("cast(id as string) as payload"), number)
            (folder / f"{step} published").touch()
    finally:
        spark.stop()


@contextmanager
def killing_executor(step: str, folder: Path) -> Iterator[None]:
    """Kill the executor of the first task of each batch in the block."""
    store_rows = publishing._store_rows

    def store_or_kill(rows: DataFrame, storing: Any) -> list[int]:
        killed: Any = KilledStoring(storing, step, folder / step)
        return store_rows(rows, killed)

    publishing._store_rows = store_or_kill
    try:
        yield
    finally:
        publishing._store_rows = store_rows


@dataclass(frozen=True)
class KilledStoring:
    """A task that stores a partition row by row; the first attempt for the first partition kills its executor.

    Attributes:
        storing: the task without a kill.
        step: ``started``: before the first row; ``storing``: after a row; ``stored``: after all rows; ``late``: after a
            row, but only Java is killed, and the Python worker continues once the batch is published.
        mark: the file that shows that the executor was killed.
    """

    storing: publishing._Storing
    step: str
    mark: Path

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        publishing._CHUNK_ROWS = 1
        context = TaskContext.get()
        if context is None or context.partitionId() != 0 or self.mark.exists():
            yield from self.storing(batches)
            return
        if self.step == "started":
            self.kill()
        store = Client.store

        def store_and_kill(*given: Any, **named: Any) -> None:
            store(*given, **named)
            if not self.mark.exists():
                self.kill()
            while not self.mark.with_name("late published").exists():
                time.sleep(0.05)

        if self.step in ("storing", "late"):
            Client.store = store_and_kill
        try:
            answers = list(self.storing(batches))
        except TmsError as error:
            self.mark.with_name("late rejected").write_text(error.message)
            raise
        finally:
            Client.store = store
        if self.step == "stored":
            self.kill()
        yield from answers

    def kill(self) -> None:
        """Kill the executor: this worker, and Java, which is the parent of the worker's parent."""
        java = parent(os.getppid(), "java")
        self.mark.write_text(str(java))
        if self.step == "late":
            # The worker's parent ends with Java and would end this worker.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.kill(java, signal.SIGKILL)
        if self.step != "late":
            os.kill(os.getpid(), signal.SIGKILL)


def parent(pid: int, name: str) -> int:
    """Return the parent of a process, which must have a name."""

    def read(field: str, pid: int) -> str:
        command = ["ps", "-o", f"{field}=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    found = int(read("ppid", pid))
    assert read("comm", found) == name
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
