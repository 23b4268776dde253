"""A program on Spark Connect that reads a store, counts rows, plans a sweep, and prints JSON.

It is a separate process, because a process with a classic session cannot have a session of Connect.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from janitor.report import Report
from janitor.settings import load
from janitor.spark.access import Access
from janitor.spark.session import session
from janitor.spark.source.source import register
from janitor.spark.sweep.engine import SparkSender, cutter
from janitor.spark.sweep.task import StoreEnvironment
from janitor.state.sqlite.state import SqliteState
from janitor.state.values import pack
from janitor.sweep.run import Terms
from tests.builders import DAY, LIFETIME, NOW_MS
from tests.spark.local import on_spark
from tms_core.clock import ManualClock
from tms_core.tables.leveldb.clone import clone


def main(master: str, store: Path, scratch: Path) -> None:
    with session(master) as spark:
        sys.stdout.write(json.dumps(results(spark, store, scratch)) + "\n")


def results(spark: SparkSession, store: Path, scratch: Path) -> dict[str, Any]:
    register(spark)
    options = {"leveldb": str(store), "partitions": "4"}
    rows = spark.read.format("tms").options(**options, now=str(NOW_MS)).load()
    counted = {row.rule: row["count"] for row in rows.where("topic = 'orders'").groupBy("rule").count().collect()}
    access = Access(load(None, {}, {"leveldb": str(store)}).settings)
    return {
        "connect": type(spark).__module__,
        "partitions": rows.selectExpr("spark_partition_id() AS at").distinct().count(),
        "counted": counted,
        "plan": pack(plan(spark, access, store, scratch).totals),
    }


def plan(spark: SparkSession, access: Access, store: Path, scratch: Path) -> Report:
    with clone(store, scratch) as cloned, SqliteState.in_memory() as state:
        engine = on_spark(
            *(cloned, state, None, ManualClock(NOW_MS, monotonic_ms=DAY), Terms(0, (), LIFETIME, True, 60)),
            sender=SparkSender(spark, StoreEnvironment(access)),
            cut=cutter(access, 4),
            token_hex=lambda n: "0" * n,
        )
        return engine.plan().report


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
