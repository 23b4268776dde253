"""A program that copies a topic with a stream, and kills itself at a given step of a batch.

It is a separate process, so that Python and Java end at once, without their buffered writes. It starts Spark, which
takes the most time, and then waits for a line on standard input.
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
from tests.spark.settings import DRIVER
from tms_core.transaction.rpc.client import TransactionClient

BatchFunction = Callable[[DataFrame, int], None]

BATCH_MESSAGES = 7


def main(url: str, transactions: str, folder: Path, step: str, batch_id: int) -> None:
    """Wait for a line, and copy messages until the given step.

    Args:
        url, transactions: the addresses of the server.
        folder: the folder of Spark's files and of the checkpoint.
        step: ``before`` the batch is published, at its ``commit``, or ``after`` the batch.
    """
    settings = {**DRIVER, "spark.log.level": "OFF", "spark.local.dir": str(folder / "local")}
    spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    sys.stdin.readline()
    copy(spark, url, transactions, folder, lambda publish: kill_at(publish, step, batch_id))


def copy(
    spark: SparkSession,
    url: str,
    transactions: str,
    folder: Path,
    change: Callable[[BatchFunction], BatchFunction] = lambda publish: publish,
) -> None:
    """Copy all messages of the topic, with a changed publish function."""
    register(spark)
    options = {"url": url, "topic": "default:orders", "transactions": transactions}
    options |= {"maxMessagesPerBatch": str(BATCH_MESSAGES), "partitions": "2"}
    stream = spark.readStream.format("tms").options(**options).load()
    checkpoint = str(folder / "checkpoint")
    publish = publish_batches(url, "default:bills", checkpoint, transactions=transactions)
    writer = stream.writeStream.foreachBatch(change(publish)).option("checkpointLocation", checkpoint)
    with translated():
        writer.trigger(availableNow=True).start().awaitTermination()


def kill_at(publish: BatchFunction, step: str, killed_batch_id: int) -> BatchFunction:
    """Return a publish function that kills this program in one batch."""

    def publish_or_kill(batch: DataFrame, batch_id: int) -> None:
        if batch_id == killed_batch_id and step == "before":
            kill()
        if batch_id == killed_batch_id and step == "commit":
            TransactionClient.commit = kill  # type: ignore[method-assign, assignment]
        publish(batch, batch_id)
        if batch_id == killed_batch_id and step == "after":
            kill()

    return publish_or_kill


def kill(*_: object) -> None:
    """Kill Java and this process, like a power failure."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
