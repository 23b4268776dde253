"""Fixtures of one Spark session for all tests of a process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.settings import DRIVER, JAVA_OPTIONS
from tests.support import require_or_skip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return a Spark session on two cores, with filter push-down."""
    if shutil.which("java") is None:
        require_or_skip("java is missing; install it: apt-get install openjdk-17-jdk-headless")
    from pyspark.sql import SparkSession  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("spark")
    settings = {
        **DRIVER,
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.default.parallelism": "2",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder} {JAVA_OPTIONS}",
        "spark.task.maxFailures": "4",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.worker.reuse": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.chdir(folder)
        session = SparkSession.builder.master("local[2,4]").appName("tests").config(map=settings).getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the path of a store in LevelDB."""
    return tmp_path / "messaging"
