"""What Spark has written into a query's checkpoint, and a batch cannot be asked: whose it is, and when it was planned.

Spark plans a batch once: it writes down where the batch ends and when that was, and reads both again after a crash. So
number and time together tell a batch from another one of the same number, which comes of a checkpoint that was put
back or copied. Both files are read by Spark, as only that knows every place in which a checkpoint may be.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import PySparkException

from tms_core.client.messages import time_at
from tms_core.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What stands for several names where Spark reads a file; in a checkpoint's it stands for itself.
_SPECIAL = re.compile(r"[\\*?\[\]{}]")


class PlannedBatch(NamedTuple):
    """A batch of a query.

    Attributes:
        number: its number.
        ms: when Spark planned it, by the driver's clock.
    """

    number: int
    ms: int

    def __str__(self) -> str:
        return f"{self.number} (planned {time_at(self.ms):%Y-%m-%d %H:%M:%S} UTC)"


def query_id(spark: SparkSession, checkpoint: str) -> str:
    """The query's id.

    Raises:
        ConfigurationError: there is no such checkpoint.
    """
    return str(_entry(spark, checkpoint, "metadata", "id"))


def planned(spark: SparkSession, checkpoint: str, batch: int) -> PlannedBatch:
    """A batch by its number; raises as :func:`query_id` does."""
    return PlannedBatch(batch, int(_entry(spark, checkpoint, f"offsets/{batch}", "batchTimestampMs")))


def _entry(spark: SparkSession, checkpoint: str, name: str, key: str) -> Any:
    """A value from the first object in a file; before it there may be a version."""
    file = f"{checkpoint.rstrip('/')}/{name}"
    try:
        lines = [str(row[0]) for row in spark.read.text(_SPECIAL.sub(r"\\\g<0>", file)).collect()]
        return json.loads(next(line for line in lines if line.startswith("{")))[key]
    except (PySparkException, StopIteration, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"checkpoint is {checkpoint}, which is not that of this query: there is no {key} in {file}.",
            "Give the very checkpointLocation of the query.",
        ) from error
