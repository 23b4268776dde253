"""Settings of Spark for short programs with few rows."""

from __future__ import annotations

import os
import sys
from typing import Any

#: Java with one compiler, the serial collector, and no verification of Spark's thousands of classes.
JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmn200m -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
DRIVER: dict[str, Any] = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.sql.shuffle.partitions": "1",
    # The compilation of a query takes longer than its execution on a few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
EXECUTORS: dict[str, Any] = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}


def environment() -> dict[str, str]:
    """Return the environment of a program with a driver."""
    return {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
