"""Runs of a CronJob and of Spark on HBase, in their own namespaces; prints its observations as JSON.

``python -m tests.cluster.runs FOLDER IMAGES SOCKET NAMESPACE SPARK_IMAGE``: SOCKET is that of HBase's Thrift server.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from janitor.app.hbase_place import HBasePlace
from tests.builders import HOUR, Topic, topic
from tests.chart.programs import CHART
from tests.cluster.node import ADDRESS, Node
from tests.cluster.plane import until
from tests.cluster.relay import Relay, connect_to
from tests.cluster.release import JOBS, WAITING, Release
from tms_core.clock import SystemClock
from tms_core.settings.models import HBaseSettings
from tms_core.tables.lease import Lease

#: The schedules of a CronJob that never starts a run, and that starts one every minute.
NEVER, ALWAYS = "0 0 29 2 *", "* * * * *"
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9847/metrics').read().decode())"


class CronJobRelease(Release):
    """A release whose CronJob runs fail or delete rows on HBase."""

    def __init__(self, node: Node, folder: Path, name: str, hbase: HBaseSettings) -> None:
        super().__init__(node, folder, name)
        self._place = HBasePlace(hbase, SystemClock())
        self._hbase = hbase

    @contextmanager
    def orders(self) -> Iterator[Topic]:
        """Yield the topic with expired rows."""
        with self._place.writable() as store:
            yield topic(store, "default:orders", ttl_seconds=3600)

    def fill(self) -> None:
        now_ms = SystemClock().now_ms()
        with self.orders() as orders:
            orders.plain(*range(now_ms - 2 * HOUR, now_ms - 2 * HOUR + 40), now_ms)

    def left(self) -> int:
        with self.orders() as orders:
            return len(orders.times())

    def change(self, *words: str) -> None:
        self.helm("upgrade", self.name, CHART, "--reset-then-reuse-values", *WAITING, *words)

    def install(self) -> None:
        """Install a CronJob that deletes rows and has not started a run."""
        store = f"storage.hbase.thrift={{{self._hbase.thrift[0]}}},storage.hbase.namespace={self._hbase.namespace}"
        own = ("--set", "mode=cronjob,janitor.apply=true", "--set", store, "--set", f"cronjob.schedule={NEVER}")
        self.helm("install", self.name, CHART, *own, *self.image, *WAITING)

    def fail(self) -> None:
        """Run with wrong settings, on a store that is not adopted, and with a lease of another holder."""
        self.start_job(self.name, "strange")
        self.results["not adopted"] = self.outcome("strange")
        # The exporter does not start with these settings, either.
        threads = ("--set", "extraEnv[0].name=TMS_STORAGE__HBASE__CONNECTIONS", "--set-string")
        self.helm("upgrade", self.name, CHART, "--reset-then-reuse-values", *threads, "extraEnv[0].value=perhaps")
        self.start_job(self.name, "wrong")
        self.results["wrong settings"] = self.outcome("wrong")
        self.change(*threads, "extraEnv[0].value=2", "--set", "decisions.adopt=once")
        with self._place.state() as state:
            lease = Lease(state, "another holder", 3600, SystemClock())
            lease.acquire()
            self.start_job(self.name, "second")
            # A run waits for the end of a lease that is not renewed.
            self.results["another holder"] = self.outcome("second", lease.renew)
            lease.release()
        self.results["left by those"] = self.left()

    def run(self) -> None:
        """Let the CronJob start a run, and read the run's metrics from the exporter."""
        self.change("--set", f"cronjob.schedule={ALWAYS}")
        until(lambda: bool(self.scheduled_jobs()), "a run begins", self.describe)
        self.results["run"] = self.outcome(self.scheduled_jobs()[0])
        self.change("--set", f"cronjob.schedule={NEVER}")
        self.results["left by a run"] = self.left()
        until(lambda: self.exported_sum("rows_deleted_total") == 40, "the exporter shows the run", self.describe)
        self.results["last success"] = self.exported_sum("last_success_timestamp_seconds")
        self.results["test"] = self.answers()
        # A second run would hold the lease in the next step.
        for job in self.scheduled_jobs():
            self.outcome(job)

    def scheduled_jobs(self) -> list[str]:
        """Return the runs that the CronJob started by its schedule."""
        names = [job["metadata"]["name"] for job in self.node.get(JOBS)["items"]]
        return sorted(name for name in names if re.fullmatch(rf"{self.name}-\d+", name))

    def exported_sum(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        page = self.execute(f"{self.name}-exporter", "python", "-c", METRICS).stdout
        return sum(float(value) for value in re.findall(rf"^tms_janitor_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def spark(self, image: str) -> None:
        """Sweep with an archive, in executors that are pods."""
        self.fill()
        self.provide_volume("ReadWriteMany")
        volume = "persistence.enabled=true,persistence.accessModes={ReadWriteMany},janitor.archive.enabled=true"
        conf = "spark.executor.instances=1,spark.executor.memory=512m,spark.kubernetes.executor.request.cores=100m"
        escaped = [f"spark.conf.{pair.replace('.', chr(92) + '.')}" for pair in conf.split(",")]
        where = f"spark.master=k8s://https://kubernetes.default.svc,spark.image={image}"
        own = ("--set", f"spark.enabled=true,spark.command={{sweep}},{where}", "--set", f"spark.schedule={NEVER}")
        self.change(*own, "--set", ",".join(escaped), "--set", volume)
        self.start_job(f"{self.name}-spark", "swept")
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            found[:] = self.pods("spark-role%3Dexecutor")
            return bool(found)

        until(seen, "Spark makes an executor", self.describe)
        executor = found[0]
        self.results["executor"] = {"spec": executor["spec"], "labels": executor["metadata"]["labels"]}
        self.results["executor's owner"] = executor["metadata"].get("ownerReferences", [{}])[0].get("kind")
        self.results["sweep"] = self.outcome("swept")
        self.results["left by Spark"] = self.left()
        self.results["archived"] = len(list((self.volume / "archive").rglob("*.parquet")))
        until(lambda: not self.pods("spark-role%3Dexecutor"), "the executors are gone", self.describe)


def main(folder: Path, images: Path, thrift: Path, namespace: str, spark_image: str) -> None:
    with Node(folder, images) as node:
        listener = socket.create_server((ADDRESS, 0), backlog=128)
        hbase = HBaseSettings(thrift=(f"{ADDRESS}:{listener.getsockname()[1]}",), namespace=namespace)
        with Relay(listener, lambda: connect_to(thrift)):
            runs = CronJobRelease(node, folder, "runs", hbase)
            runs.fill()
            runs.install()
            runs.fail()
            runs.run()
            runs.spark(spark_image)
            sys.stdout.write(json.dumps(runs.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
