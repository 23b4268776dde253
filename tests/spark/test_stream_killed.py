"""A stream from topic to topic with killed drivers: it copies each message once and in order.

A driver is a process with its own Spark. The test kills one driver during a commit, the most critical step; with
``TMS_TEST_DRIVERS=3``, three drivers at different steps. ``test_publish.py`` kills a driver at every call, and
``test_stream.py`` between any two batches, without processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from tests.server.process import Serve, configure
from tests.spark.copier import copy
from tests.spark.settings import environment
from tests.spark.streams import TOO_BUSY, retry_if_busy, texts
from tests.spark.test_cluster import PATIENCE_SECONDS, ROOT
from tests.support import size
from tms_core.client import Client, TransactionClient

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Processes start slowly on a busy machine.
pytestmark = pytest.mark.timeout(900)
_ATTEMPTS = 10
#: The steps and the batches at which drivers are killed.
KILLS = [("before", 1), ("commit", 2), ("after", 4)] if size("TMS_TEST_DRIVERS", 1) > 1 else [("commit", 2)]


class Driver:
    """A program that kills itself during its work; drivers start concurrently."""

    def __init__(self, server: Serve, folder: Path, step: str, batch_id: int) -> None:
        self._arguments = [server.url, server.transactions, str(folder), step, str(batch_id)]
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def work(self) -> None:
        for _ in range(_ATTEMPTS):
            output = self._process.communicate("go\n", PATIENCE_SECONDS)[1]
            if self._process.returncode == -signal.SIGKILL or TOO_BUSY not in output:
                break
            self._process = self._start()
        assert self._process.returncode == -signal.SIGKILL, output[-4000:]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.spark.copier", *self._arguments],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def test_stream_with_killed_drivers_copies_each_message_once(spark: SparkSession, tmp_path: Path) -> None:
    with (
        Serve(configure(tmp_path)) as server,
        TransactionClient(server.transactions) as service,
        Client(server.url, transactions=service) as client,
        ExitStack() as stack,
    ):
        drivers = [stack.enter_context(Driver(server, tmp_path, *kill)) for kill in KILLS]
        client.create_topic("default:orders")
        client.create_topic("default:bills")
        client.publish("default:orders", texts(*range(10)))
        with client.transaction() as rolled_back:
            written = client.publish("default:orders", [b"rolled back"] * 3, transaction=rolled_back.transaction)
            client.rollback("default:orders", written)
            rolled_back.roll_back()
        with client.transaction() as committed:
            committed.publish("default:orders", texts(*range(10, 25)))
        invalid = service.start_short()
        client.publish("default:orders", [b"invalid"] * 3, transaction=invalid)
        service.invalidate(invalid.transaction_id)
        client.publish("default:orders", texts(*range(25, 30)))
        undecided = service.start_long()
        client.publish("default:orders", texts(30, 31, 32), transaction=undecided)
        client.publish("default:orders", texts(*range(33, 40)))

        # Each driver continues with the batch during which the previous driver was killed.
        drivers.pop(0).work()
        client.publish("default:orders", texts(*range(40, 45)))
        for driver in drivers[:1]:
            driver.work()
        service.commit(undecided.transaction_id)
        for driver in drivers[1:]:
            driver.work()
        retry_if_busy(lambda: copy(spark, server.url, server.transactions, tmp_path))

        with client.transaction() as reader:
            seen = [message.payload for message in reader.poll("default:bills")]
        assert seen == texts(*range(45))
        everything = [message.payload for message in client.poll("default:bills")]
        assert len(everything) > len(seen), "the driver that was killed at its commit had published"
