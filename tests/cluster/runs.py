"""Runs of a CronJob and of Spark on HBase, in their own namespaces; prints its observations as JSON.

``python -m tests.cluster.runs FOLDER IMAGES SOCKET NAMESPACE SPARK_IMAGE``: HBase's Thrift server is at the socket.
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

#: When runs begin by themselves.
NEVER, ALWAYS = "0 0 29 2 *", "* * * * *"
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9847/metrics').read().decode())"


class Runs(Release):
    """Runs that fail and runs that delete."""

    def __init__(self, node: Node, folder: Path, name: str, hbase: HBaseSettings) -> None:
        super().__init__(node, folder, name)
        self._place = HBasePlace(hbase, SystemClock())
        self._hbase = hbase

    @contextmanager
    def orders(self) -> Iterator[Topic]:
        """The topic that is cleaned."""
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
        """Runs that delete, which nothing starts yet."""
        store = f"storage.hbase.thrift={{{self._hbase.thrift[0]}}},storage.hbase.namespace={self._hbase.namespace}"
        own = ("--set", "mode=cronjob,janitor.apply=true", "--set", store, "--set", f"cronjob.schedule={NEVER}")
        self.helm("install", self.name, CHART, *own, *self.image, *WAITING)

    def fail(self) -> None:
        """Runs that a person has to look at: wrong settings, a store nobody has adopted, another holder."""
        self.begin(self.name, "strange")
        self.saw["not adopted"] = self.outcome("strange")
        # The exporter does not come up with them, either.
        threads = ("--set", "extraEnv[0].name=TMS_STORAGE__HBASE__CONNECTIONS", "--set-string")
        self.helm("upgrade", self.name, CHART, "--reset-then-reuse-values", *threads, "extraEnv[0].value=perhaps")
        self.begin(self.name, "wrong")
        self.saw["wrong settings"] = self.outcome("wrong")
        self.change(*threads, "extraEnv[0].value=2", "--set", "decisions.adopt=once")
        with self._place.state() as memory:
            lease = Lease(memory, "somebody else", 3600, SystemClock())
            lease.acquire()
            self.begin(self.name, "second")
            # One that is alive renews it; the lease of one that is not would be waited out.
            self.saw["another holder"] = self.outcome("second", lease.renew)
            lease.release()
        self.saw["left by those"] = self.left()

    def run(self) -> None:
        """A run that the CronJob begins by itself, and what the exporter shows of it."""
        self.change("--set", f"cronjob.schedule={ALWAYS}")
        until(lambda: bool(self.own_jobs()), "a run begins", self.describe)
        self.saw["run"] = self.outcome(self.own_jobs()[0])
        self.change("--set", f"cronjob.schedule={NEVER}")
        self.saw["left by a run"] = self.left()
        until(lambda: self.exported("rows_deleted_total") == 40, "the exporter shows the run", self.describe)
        self.saw["last success"] = self.exported("last_success_timestamp_seconds")
        self.saw["test"] = self.answers()
        # Where another one had begun meanwhile, what comes next would find the lease held.
        for job in self.own_jobs():
            self.outcome(job)

    def own_jobs(self) -> list[str]:
        """The runs that the CronJob began by itself."""
        names = [job["metadata"]["name"] for job in self.node.get(JOBS)["items"]]
        return sorted(name for name in names if re.fullmatch(rf"{self.name}-\d+", name))

    def exported(self, name: str) -> float:
        """The sum of a metric over its labels."""
        page = self.inside(f"{self.name}-exporter", "python", "-c", METRICS).stdout
        return sum(float(value) for value in re.findall(rf"^tms_janitor_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def spark(self, image: str) -> None:
        """A sweep with an archive, by executors in pods of their own."""
        self.fill()
        self.provide_volume("ReadWriteMany")
        volume = "persistence.enabled=true,persistence.accessModes={ReadWriteMany},janitor.archive.enabled=true"
        conf = "spark.executor.instances=1,spark.executor.memory=512m,spark.kubernetes.executor.request.cores=100m"
        escaped = [f"spark.conf.{pair.replace('.', chr(92) + '.')}" for pair in conf.split(",")]
        where = f"spark.master=k8s://https://kubernetes.default.svc,spark.image={image}"
        own = ("--set", f"spark.enabled=true,spark.command={{sweep}},{where}", "--set", f"spark.schedule={NEVER}")
        self.change(*own, "--set", ",".join(escaped), "--set", volume)
        self.begin(f"{self.name}-spark", "swept")
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            found[:] = self.pods("spark-role%3Dexecutor")
            return bool(found)

        until(seen, "Spark makes an executor", self.describe)
        executor = found[0]
        self.saw["executor"] = {"spec": executor["spec"], "labels": executor["metadata"]["labels"]}
        self.saw["executor's owner"] = executor["metadata"].get("ownerReferences", [{}])[0].get("kind")
        self.saw["sweep"] = self.outcome("swept")
        self.saw["left by Spark"] = self.left()
        self.saw["archived"] = len(list((self.volume / "archive").rglob("*.parquet")))
        until(lambda: not self.pods("spark-role%3Dexecutor"), "the executors are gone", self.describe)


def main(folder: Path, images: Path, through: Path, namespace: str, spark_image: str) -> None:
    with Node(folder, images) as node:
        listener = socket.create_server((ADDRESS, 0), backlog=128)
        hbase = HBaseSettings(thrift=(f"{ADDRESS}:{listener.getsockname()[1]}",), namespace=namespace)
        with Relay(listener, lambda: connect_to(through)):
            runs = Runs(node, folder, "runs", hbase)
            runs.fill()
            runs.install()
            runs.fail()
            runs.run()
            runs.spark(spark_image)
            sys.stdout.write(json.dumps(runs.saw))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
