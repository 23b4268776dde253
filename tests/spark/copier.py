"""An application that copies a topic through a stream, and may be killed.

A program of its own, because all of it has to be gone at once: Python, Java, and what they have not written yet. It
starts Spark, which takes longest, before it is told to begin.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from janitor.spark.session import translated
from janitor.spark.source.source import register
from janitor.spark.stream.publish import publish_batches
from tests.spark.conftest import LITTLE
from tms_core.transaction.rpc.client import TransactionClient

BatchFunction = Callable[[DataFrame, int], None]

#: Messages in a batch.
MOST = 7
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": LITTLE,
    "spark.log.level": "OFF",
}


def main(url: str, transactions: str, folder: Path, moment: str, at: int) -> None:
    """Wait for a line, then copy until it dies.

    Args:
        url, transactions: the server.
        folder: for what Spark keeps.
        moment: when to die: ``before`` the batch is published, at its ``commit``, or ``after`` it.
        at: in which batch.
    """
    builder = SparkSession.builder.master("local[1]").config("spark.local.dir", str(folder / "local"))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    sys.stdin.readline()
    copy(spark, url, transactions, folder, lambda publish: dying(publish, moment, at))


def copy(
    spark: SparkSession,
    url: str,
    transactions: str,
    folder: Path,
    changed: Callable[[BatchFunction], BatchFunction] = lambda publish: publish,
) -> None:
    register(spark)
    options = {"url": url, "topic": "default:orders", "transactions": transactions}
    stream = spark.readStream.format("tms").options(**options, maxMessagesPerBatch=str(MOST), partitions="2").load()
    checkpoint = str(folder / "checkpoint")
    publish = publish_batches(url, "default:bills", checkpoint, transactions=transactions)
    writer = stream.writeStream.foreachBatch(changed(publish)).option("checkpointLocation", checkpoint)
    with translated():
        writer.trigger(availableNow=True).start().awaitTermination()


def dying(publish: BatchFunction, moment: str, at: int) -> BatchFunction:
    """Return a publish function that kills this program in one batch."""

    def die_or_publish(batch: DataFrame, batch_id: int) -> None:
        if batch_id == at and moment == "before":
            die()
        if batch_id == at and moment == "commit":
            TransactionClient.commit = die  # type: ignore[method-assign, assignment]
        publish(batch, batch_id)
        if batch_id == at and moment == "after":
            die()

    return die_or_publish


def die(*_: object) -> None:
    """Kill Java and this process, like a power failure."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
