"""Fixtures of one Spark session for all tests of a process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import require_or_skip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Options of Java for a short-lived process: one compiler, the serial collector, and no verification of Spark's
#: thousands of classes.
LITTLE = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmn200m -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return a Spark session on two cores, with filter push-down."""
    if shutil.which("java") is None:
        require_or_skip("java is missing; install it: apt-get install openjdk-17-jdk-headless")
    from pyspark.sql import SparkSession  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        # The compilation of a query takes longer than its execution on a few rows.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.default.parallelism": "2",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder} {LITTLE}",
        "spark.driver.memory": "512m",
        "spark.task.maxFailures": "4",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.worker.reuse": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.chdir(folder)
        builder = SparkSession.builder.master("local[2,4]").appName("tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        made = builder.getOrCreate()
        made.sparkContext.setLogLevel("OFF")
        yield made
        made.stop()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "messaging"
