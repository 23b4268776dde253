"""The life cycle of a release with its own store and namespaces; prints its observations as JSON.

``python -m tests.cluster.life FOLDER IMAGES``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.chart.programs import CHART
from tests.cluster.node import Node
from tests.cluster.plane import until
from tests.cluster.release import CONFIG, NAMESPACE, WAITING, Release
from tms_core.server.auth.tokens import new_token, token_line

SCRAPE = (
    "import sys, urllib.request as r; "
    "print(r.urlopen(r.Request(sys.argv[1], headers={'authorization': sys.argv[2]})).read().decode())"
)


class ReleaseLifeCycle(Release):
    """A release that is installed, upgraded, rolled back and removed, and loses its pod."""

    def janitor(self, command: str) -> Any:
        """Return the JSON output of a command in the janitor's pod."""
        return json.loads(self.execute(self.name, "janitor", command, *CONFIG.split()).stdout)

    def shows_metrics(self, header: str) -> bool:
        """Return whether the server shows its metrics to a client with this header."""
        output = self.execute(self.name, "python", "-c", SCRAPE, f"http://{self.name}-server:11015/metrics", header)
        return "tms_messages_published" in output.stdout

    def run(self) -> None:
        self.provide_volume("ReadWriteOnce")
        token = new_token()
        tokens = {"tokens": token_line("billing", token)}
        self.node.create(f"{NAMESPACE}/secrets", {"metadata": {"name": "tms-tokens"}, "stringData": tokens})
        self.helm("install", self.name, CHART, "--values", CHART / "ci/embedded-values.yaml", *self.image, *WAITING)
        self.results["test"] = self.answers()
        self.results["scraped"] = [self.shows_metrics(f"Bearer {token}"), self.shows_metrics("Bearer nobody")]
        self.results["plan"] = self.janitor("plan")["mode"]
        self.results["mode before"] = self.janitor("status")["mode"]
        self.results["root"] = self.execute(self.name, "python", "-c", "open('/opt/tms/x', 'w')").returncode

        self.helm("upgrade", self.name, CHART, "--reset-then-reuse-values", *WAITING, "--set", "janitor.apply=true")
        self.results["mode after"] = self.janitor("status")["mode"]

        [before] = self.janitors()
        self.node.kubectl("-n", "apps", "delete", "pod", before)
        until(lambda: self.janitors(ready=True) not in ([], [before]), "another pod is ready", self.describe)
        self.results["mode of the next"] = self.janitor("status")["mode"]

        self.helm("rollback", self.name, "1", *WAITING)
        self.results["mode rolled back"] = self.janitor("status")["mode"]
        self.helm("uninstall", self.name, "--wait")
        until(lambda: self.janitors() == [], "the pod is gone")

    def janitors(self, *, ready: bool = False) -> list[str]:
        """Return the names of the janitor's pods."""
        found = self.pods(f"app.kubernetes.io/instance%3D{self.name},app.kubernetes.io/component%3Djanitor")

        def is_ready(pod: dict[str, Any]) -> bool:
            return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])

        return [pod["metadata"]["name"] for pod in found if not ready or is_ready(pod)]


def main(folder: Path, images: Path) -> None:
    with Node(folder, images) as node:
        life = ReleaseLifeCycle(node, folder, "life")
        life.run()
        sys.stdout.write(json.dumps(life.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
