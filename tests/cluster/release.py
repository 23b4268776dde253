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

#: The user id of the image's processes.
USER = 65532
CONFIG = "--config /etc/tms/tms.yaml --format json"
#: Shorter than the time limit of a command, so that Helm fails first and the test prints the logs of the pods.
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
        self.results: dict[str, Any] = {}
        node.create("/api/v1/namespaces", {"metadata": {"name": "apps"}})

    def provide_volume(self, mode: str) -> None:
        """Create a volume for the release's claim, as a platform provides it before an installation."""
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
        """Return whether the chart's test succeeds."""
        return "Phase:          Succeeded" in self.helm("test", self.name, "--timeout", "240s")

    def describe(self) -> str:
        """Return the states and logs of the pods, for the message of a failed test."""
        output = self.node.kubectl("-n", "apps", "get", "pods,jobs,events", "-o", "wide").stdout
        for pod in self.pods():
            output += f"\n--- {pod['metadata']['name']}\n"
            output += self.node.kubectl("-n", "apps", "logs", pod["metadata"]["name"], "--tail", "40").stdout
        return output

    def execute(self, deployment: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a deployment's pod."""
        return self.node.kubectl("-n", "apps", "exec", f"deploy/{deployment}", "--", *command)

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.node.get(f"{NAMESPACE}/pods?labelSelector={selector}")["items"]
        return found

    def start_job(self, cronjob: str, job: str) -> None:
        made = self.node.kubectl("-n", "apps", "create", "job", "--from", f"cronjob/{cronjob}", job)
        assert made.returncode == 0, made.stderr

    def outcome(self, job: str, during_run: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait until a run ends; return its ``type``, ``reason``, and the exit codes of its pods.

        Args:
            during_run: called repeatedly until the run ends.
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
