"""The life of a release on a node, to be run in namespaces of its own; says what it saw as JSON.

``python -m tests.cluster.life FOLDER IMAGES``
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.chart.programs import CHART, run
from tests.cluster.node import Node
from tests.cluster.plane import until
from tms_core.server.auth_tokens import new_token, token_line

USER = 65532
NAME = "life"
IMAGE = ("--set", "image.registry=localhost,image.tag=test", "--set", f"fullnameOverride={NAME}")
CONFIG = "--config /etc/tms/tms.yaml --format json"


class Life:
    """What is done, and what was seen."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self.folder = folder
        self.saw: dict[str, Any] = {}

    def helm(self, *words: object) -> str:
        done = run("helm", *words, "--namespace", "apps", kubeconfig=self.node.kubeconfig)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.pods()}"
        return done.stdout

    def pods(self) -> str:
        """What becomes of the pods, for whoever looks for a mistake."""
        events = self.node.kubectl("-n", "apps", "get", "pods,jobs,events", "-o", "wide").stdout
        return events + self.node.kubectl("-n", "apps", "logs", f"deploy/{NAME}", "--tail", "40").stdout

    def inside(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command in the janitor's pod."""
        return self.node.kubectl("-n", "apps", "exec", f"deploy/{NAME}", "--", *command.split())

    def furnish(self) -> None:
        """What a platform has before somebody installs: a volume, tokens."""
        volume = self.folder / "volume"
        volume.mkdir()
        os.chown(volume, USER, USER)
        self.node.create("/api/v1/namespaces", {"metadata": {"name": "apps"}})
        claim = {"namespace": "apps", "name": NAME}
        spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(volume)}}
        self.node.create("/api/v1/persistentvolumes", {"metadata": {"name": "v"}, "spec": {**spec, "claimRef": claim}})
        tokens = {"tokens": token_line("billing", new_token())}
        self.node.create("/api/v1/namespaces/apps/secrets", {"metadata": {"name": "tms-tokens"}, "stringData": tokens})

    def live(self) -> None:
        """Install, look, switch on, lose the pod, fall over wrong settings, and go."""
        self.furnish()
        values = ("--values", CHART / "ci/embedded-values.yaml", *IMAGE)
        waiting = ("--wait", "--timeout", "300s")
        self.helm("install", NAME, CHART, *values, *waiting)
        self.saw["test"] = "Phase:          Succeeded" in self.helm("test", NAME, "--timeout", "300s")
        self.saw["plan"] = json.loads(self.inside(f"janitor plan {CONFIG}").stdout)["mode"]
        self.saw["mode before"] = json.loads(self.inside(f"janitor status {CONFIG}").stdout)["mode"]
        self.saw["root"] = self.inside("touch /opt/tms/x").returncode

        self.helm("upgrade", NAME, CHART, "--reuse-values", *waiting, "--set", "janitor.apply=true")
        self.saw["mode after"] = json.loads(self.inside(f"janitor status {CONFIG}").stdout)["mode"]

        [before] = self.janitors()
        self.node.kubectl("-n", "apps", "delete", "pod", before)
        until(lambda: self.janitors(ready=True) not in ([], [before]), "another pod is ready", self.pods)
        self.saw["mode of the next"] = json.loads(self.inside(f"janitor status {CONFIG}").stdout)["mode"]

        self.helm("rollback", NAME, "1", *waiting)
        self.saw["mode rolled back"] = json.loads(self.inside(f"janitor status {CONFIG}").stdout)["mode"]
        self.helm("uninstall", NAME, "--wait")
        until(lambda: self.janitors() == [], "the pod is gone")
        self.fall_over()

    def janitors(self, *, ready: bool = False) -> list[str]:
        """The names of the janitor's pods."""
        selector = f"app.kubernetes.io/instance%3D{NAME},app.kubernetes.io/component%3Djanitor"
        items = self.node.get(f"/api/v1/namespaces/apps/pods?labelSelector={selector}")["items"]

        def is_ready(item: dict[str, Any]) -> bool:
            return any(each["type"] == "Ready" and each["status"] == "True" for each in item["status"]["conditions"])

        return [item["metadata"]["name"] for item in items if not ready or is_ready(item)]

    def fall_over(self) -> None:
        """A run whose settings are wrong is not tried again."""
        wrong = ("--set", "extraEnv[0].name=TMS_JANITOR__APPLY", "--set", "extraEnv[0].value=perhaps")
        self.helm("install", "falls", CHART, "--set", "mode=cronjob", *IMAGE, *wrong)
        self.node.kubectl("-n", "apps", "create", "job", "--from", f"cronjob/{NAME}", "falls")

        def failed() -> str:
            status = self.node.get("/apis/batch/v1/namespaces/apps/jobs/falls").get("status", {})
            return next((str(each["reason"]) for each in status.get("conditions", ()) if each["type"] == "Failed"), "")

        until(lambda: bool(failed()), "the run fails", self.pods)
        self.saw["wrong settings"] = failed()
        runs = self.node.get("/api/v1/namespaces/apps/pods?labelSelector=job-name%3Dfalls")["items"]
        self.saw["runs with them"] = len(runs)


def main(folder: Path, images: Path) -> None:
    """All of it."""
    with Node(folder, images) as node:
        life = Life(node, folder)
        life.live()
        sys.stdout.write(json.dumps(life.saw))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
