"""An application on a cluster that publishes batches while executors are killed.

An executor is a Java and its Pythons. The Python that does a chosen task kills both in the midst of it, once for each
moment; the driver lives on, so Spark gives the task to another executor. A program of its own, because a process that
has a local session can have none on a cluster.
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
from tests.spark.conftest import LITTLE
from tests.spark.copier import SETTINGS
from tms_core.client import Client
from tms_core.errors import TmsError

#: Rows in a batch, and partitions.
ROWS, PARTITIONS = 8, 2
_EXECUTORS = {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.executor.extraJavaOptions": LITTLE}


def main(master: str, url: str, transactions: str, folder: Path, moments: list[str]) -> None:
    """Publish numbers, a batch for each moment in which an executor is killed, and one more.

    Args:
        master: of the cluster.
        url, transactions: the server.
        folder: for a checkpoint as Spark would write it, and for a file of each moment, with what was killed.
        moments: when, see :class:`MortalStoring`.
    """
    builder = SparkSession.builder.master(master)
    for name, value in {**SETTINGS, **_EXECUTORS}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        (folder / "metadata").write_text('{"id": "query"}')
        (folder / "offsets").mkdir()
        publish = publish_batches(url, "default:bills", str(folder), transactions=transactions)
        for number, moment in enumerate([*moments, "never"]):
            planned = {"batchTimestampMs": time.time_ns() // 1_000_000}
            (folder / "offsets" / str(number)).write_text(json.dumps(planned))
            rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, PARTITIONS)
            with dying(moment, folder):
                publish(rows.selectExpr("cast(id as string) as payload"), number)
            (folder / f"{moment} published").touch()
    finally:
        spark.stop()


@contextmanager
def dying(moment: str, folder: Path) -> Iterator[None]:
    """Kill the executor that runs the first task of a batch."""
    own = publishing._store_rows

    def stored(rows: DataFrame, storing: Any) -> list[int]:
        mortal: Any = MortalStoring(storing, moment, folder / moment)
        return own(rows, mortal)

    publishing._store_rows = stored
    try:
        yield
    finally:
        publishing._store_rows = own


@dataclass(frozen=True)
class MortalStoring:
    """Stores a partition row by row; the first that does so for the batch's first partition dies.

    Attributes:
        storing: what does it.
        moment: when: once it has ``begun``, when a row is ``storing``, when all are ``stored``. ``late``: when a row
            is, but only Java dies then, and Python goes on when the batch is published.
        mark: the file that tells that it has died.
    """

    storing: publishing._Storing
    moment: str
    mark: Path

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        publishing._CHUNK_ROWS = 1
        context = TaskContext.get()
        if context is None or context.partitionId() != 0 or self.mark.exists():
            yield from self.storing(batches)
            return
        if self.moment == "begun":
            self.die()
        own = Client.store

        def store(*given: Any, **named: Any) -> None:
            own(*given, **named)
            if not self.mark.exists():
                self.die()
            while not self.mark.with_name("late published").exists():
                time.sleep(0.05)

        if self.moment in ("storing", "late"):
            Client.store = store
        try:
            answers = list(self.storing(batches))
        except TmsError as error:
            self.mark.with_name("late refused").write_text(error.message)
            raise
        finally:
            Client.store = own
        if self.moment == "stored":
            self.die()
        yield from answers

    def die(self) -> None:
        """Kill the executor: this worker, and Java, whose child the worker's parent is."""
        java = parent(os.getppid(), "java")
        self.mark.write_text(str(java))
        if self.moment == "late":
            # Of its parent, which ends with Java.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.kill(java, signal.SIGKILL)
        if self.moment != "late":
            os.kill(os.getpid(), signal.SIGKILL)


def parent(pid: int, name: str) -> int:
    def ask(what: str, of: int) -> str:
        command = ["ps", "-o", f"{what}=", "-p", str(of)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    found = int(ask("ppid", pid))
    assert ask("comm", found) == name
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
