"""Topic, Spark, topic, end to end: whenever the driver dies, each message is in the second topic once, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.server.process import Serve, configure
from tests.spark.copier import copy
from tests.spark.streams import TOO_BUSY, persistently
from tests.spark.test_cluster import PATIENCE_SECONDS, ROOT
from tms_core.client import Client, TransactionClient

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Processes have to be started, and machines may be busy.
pytestmark = pytest.mark.timeout(900)
_ATTEMPTS = 10


def numbers(*given: int) -> list[bytes]:
    return [b"%d" % number for number in given]


def die(server: Serve, folder: Path, moment: str, at: int) -> None:
    """Run the program until it is killed."""
    for _ in range(_ATTEMPTS):
        program = subprocess.run(
            [sys.executable, "-m", "tests.spark.copier", server.url, server.transactions, str(folder), moment, str(at)],
            cwd=ROOT,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
            start_new_session=True,
        )
        if program.returncode == -signal.SIGKILL or TOO_BUSY not in program.stderr:
            break
    assert program.returncode == -signal.SIGKILL, program.stderr[-4000:]


def test_given_a_driver_that_is_killed_three_times_when_it_comes_back_then_each_message_is_copied_once_and_in_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    with (
        Serve(configure(tmp_path)) as server,
        TransactionClient(server.transactions) as service,
        Client(server.url, transactions=service) as client,
    ):
        client.create_topic("default:orders")
        client.create_topic("default:bills")
        client.publish("default:orders", numbers(*range(10)))
        with client.transaction() as rolled_back:
            written = client.publish("default:orders", [b"rolled back"] * 3, transaction=rolled_back.transaction)
            client.rollback("default:orders", written)
            rolled_back.roll_back()
        with client.transaction() as committed:
            committed.publish("default:orders", numbers(*range(10, 25)))
        invalid = service.start_short()
        client.publish("default:orders", [b"invalid"] * 3, transaction=invalid)
        service.invalidate(invalid.transaction_id)
        client.publish("default:orders", numbers(*range(25, 30)))
        undecided = service.start_long()
        client.publish("default:orders", numbers(30, 31, 32), transaction=undecided)
        client.publish("default:orders", numbers(*range(33, 40)))

        # Each time it goes on with the batch in which it died.
        die(server, tmp_path, "before", 1)
        client.publish("default:orders", numbers(*range(40, 45)))
        die(server, tmp_path, "commit", 2)
        service.commit(undecided.transaction_id)
        die(server, tmp_path, "after", 4)
        persistently(lambda: copy(spark, server.url, server.transactions, tmp_path))

        with client.transaction() as reader:
            seen = [message.payload for message in reader.poll("default:bills")]
        assert seen == numbers(*range(45))
        everything = [message.payload for message in client.poll("default:bills")]
        assert len(everything) > len(seen), "the one that died at its commit had published"
