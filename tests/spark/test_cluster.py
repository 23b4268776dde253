"""A client over Spark Connect, and a driver on a cluster with two executors, which are killed.

The test kills one executor while it stores; with ``TMS_TEST_EXECUTORS=4``, four executors at different steps.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.builders import HOUR, NOW_MS, topic
from tests.server.process import Serve, configure
from tests.spark.killed_executors import ROWS
from tests.spark.settings import DRIVER, JAVA_OPTIONS, environment
from tests.spark.streams import texts
from tests.support import require_or_skip, size, wait_until
from tms_core.client import Client
from tms_core.rowkey import MessageKey
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.store import LevelDBStore

#: Processes start slowly on a busy machine.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
#: The time limit for the start of Spark, or for a small job, in seconds.
PATIENCE_SECONDS = 240
#: The steps at which executors are killed, one in each batch.
STEPS = ["started", "storing", "stored", "late"] if size("TMS_TEST_EXECUTORS", 1) > 1 else ["storing"]


def spark_home() -> Path:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None or shutil.which("java") is None:
        require_or_skip("java is missing; install it: apt-get install openjdk-17-jdk-headless")
    return Path(spec.origin).parent


@dataclass(frozen=True)
class Daemon:
    log: Path
    process: subprocess.Popen[bytes]

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            text = self.log.read_text("utf-8", "replace")
            if found := re.findall(pattern, text):
                return str(found[0])
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{self.log.name} does not contain {pattern!r}:\n{text[-4000:]}")
            time.sleep(0.2)


@contextmanager
def daemon(folder: Path, name: str, *arguments: str) -> Iterator[Daemon]:
    log = folder / f"{name}.log"
    options = {"SPARK_DAEMON_MEMORY": "512m", "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS}
    options["SPARK_WORKER_DIR"] = str(folder / name)
    command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=folder, env=environment() | options)
    try:
        yield Daemon(log, process)
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a master whose worker can run two executors."""
    own = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as stack:
        head = stack.enter_context(daemon(tmp_path, "master", "master.Master", *own))
        address = head.wait_for(r"Starting Spark master at (spark://\S+)")
        capacity = ("--cores", "2", "--memory", "1200m")
        stack.enter_context(daemon(tmp_path, "worker", "worker.Worker", *own, *capacity, address))
        head.wait_for(r"Registering worker")
        yield address


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a Connect server on two cores."""
    conf = {
        **DRIVER,
        "spark.master": "local[2]",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
    }
    given = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    main = "org.apache.spark.sql.connect.service.SparkConnectServer"
    with daemon(tmp_path, "connect", "SparkSubmit", "--class", main, *given, "spark-internal") as server:
        port = server.wait_for(r"Spark Connect server started at:? \S*:(\d+)")
        yield f"sc://127.0.0.1:{port}"


def test_spark_connect_reads_and_plans(connect: str, place: Path, tmp_path: Path) -> None:
    with LevelDBStore(place, create=True) as store:
        made = topic(store, "default:orders", ttl_seconds=3600)
        bodies = random.Random(7)
        times = [*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 9000), *range(NOW_MS, NOW_MS + 1000)]
        keys = [MessageKey(made.id, 1, ms, 0).pack() for ms in times]
        store.message.put([(key, MessageValue(None, bodies.randbytes(40))) for key in keys])
    output = subprocess.run(
        [sys.executable, "-m", "tests.spark.connect_program", connect, str(place), str(tmp_path / "scratch")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert output.returncode == 0, output.stderr[-4000:]
    found = json.loads(output.stdout.splitlines()[-1])
    assert "connect" in found["connect"]
    assert found["partitions"] > 1
    assert found["counted"] == {"expired": 9000, "live": 1000}
    assert found["plan"]["expired"] == 9000


def test_killed_executors_publish_each_row_once(master: str, tmp_path: Path) -> None:
    with Serve(configure(tmp_path)) as server, Client(server.url, transactions=server.transactions) as client:
        client.create_topic("default:bills")
        arguments = [master, server.url, server.transactions, str(tmp_path), *STEPS]
        published = subprocess.run(
            [sys.executable, "-m", "tests.spark.killed_executors", *arguments],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert published.returncode == 0, published.stderr[-4000:]
        for step in STEPS:
            assert not Path("/proc", (tmp_path / step).read_text()).exists(), "the executor still runs"
        if "late" in STEPS:
            wait_until((tmp_path / "late rejected").exists)
        rows = texts(*range(ROWS * (len(STEPS) + 1)))
        with client.transaction() as reader:
            assert [message.payload for message in reader.poll("default:bills")] == rows
        assert [message.payload for message in client.poll("default:bills")] == rows
