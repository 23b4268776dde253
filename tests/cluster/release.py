"""A release of the chart on a node: actions of an operator, and their effects."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chart.programs import run
from tests.cluster.node import Node
from tests.cluster.plane import until

#: Whoever the image's processes are.
USER = 65532
CONFIG = "--config /etc/tms/tms.yaml --format json"
#: Less than a command may take, so that Helm gives up first and what the pods said is shown.
WAITING = ("--wait", "--timeout", "240s")
NAMESPACE = "/api/v1/namespaces/apps"
JOBS = "/apis/batch/v1/namespaces/apps/jobs"


class Release:
    """The steps of the release, and their observations."""

    def __init__(self, node: Node, folder: Path, name: str) -> None:
        self.node = node
        self.name = name
        self.volume = folder / "volume"
        self.image = ("--set", "image.registry=localhost,image.tag=test", "--set", f"fullnameOverride={name}")
        self.saw: dict[str, Any] = {}
        node.create("/api/v1/namespaces", {"metadata": {"name": "apps"}})

    def provide_volume(self, mode: str) -> None:
        """What a platform has before somebody installs: a volume for the release's claim."""
        self.volume.mkdir()
        os.chown(self.volume, USER, USER)
        claim = {"namespace": "apps", "name": self.name}
        spec = {"capacity": {"storage": "10Gi"}, "accessModes": [mode], "hostPath": {"path": str(self.volume)}}
        volume = {"metadata": {"name": "v"}, "spec": {**spec, "claimRef": claim}}
        self.node.create("/api/v1/persistentvolumes", volume)

    def helm(self, *words: object) -> str:
        done = run("helm", *words, "--namespace", "apps", kubeconfig=self.node.kubeconfig)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.describe()}"
        return done.stdout

    def answers(self) -> bool:
        """Whether the chart's own test succeeds."""
        return "Phase:          Succeeded" in self.helm("test", self.name, "--timeout", "240s")

    def describe(self) -> str:
        """What becomes of the pods, for whoever looks for a mistake."""
        output = self.node.kubectl("-n", "apps", "get", "pods,jobs,events", "-o", "wide").stdout
        for pod in self.pods():
            output += f"\n--- {pod['metadata']['name']}\n"
            output += self.node.kubectl("-n", "apps", "logs", pod["metadata"]["name"], "--tail", "40").stdout
        return output

    def inside(self, deployment: str, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in a deployment's pod."""
        return self.node.kubectl("-n", "apps", "exec", f"deploy/{deployment}", "--", *command)

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.node.get(f"{NAMESPACE}/pods?labelSelector={selector}")["items"]
        return found

    def begin(self, cronjob: str, job: str) -> None:
        made = self.node.kubectl("-n", "apps", "create", "job", "--from", f"cronjob/{cronjob}", job)
        assert made.returncode == 0, made.stderr

    def outcome(self, job: str, during_run: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the end of a run; return its ``type``, ``reason``, and the exit code of each of its pods.

        Args:
            during_run: called repeatedly until then.
        """
        found: list[dict[str, Any]] = []

        def ended() -> bool:
            during_run()
            conditions = self.node.get(f"{JOBS}/{job}").get("status", {}).get("conditions", ())
            found[:] = [each for each in conditions if each["type"] in ("Complete", "Failed")]
            return bool(found)

        until(ended, f"the run {job} ends", self.describe)
        statuses = [pod["status"]["containerStatuses"][0] for pod in self.pods(f"job-name%3D{job}")]
        codes = [status["state"]["terminated"]["exitCode"] for status in statuses]
        return {"type": found[0]["type"], "reason": found[0].get("reason"), "codes": codes}
