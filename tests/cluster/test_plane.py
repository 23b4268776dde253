"""The chart on a real API server: objects are accepted, and controllers act on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.programs import CHART, run, template
from tests.chart.schemas import FOLDER, record
from tests.cluster.plane import ControlPlane, until

EXAMPLES = sorted((CHART / "ci").glob("*.yaml"))

#: The API group and version of each kind, as the start of a path.
API_PATHS = {
    "ConfigMap": "/api/v1",
    "CronJob": "/apis/batch/v1",
    "Deployment": "/apis/apps/v1",
    "Ingress": "/apis/networking.k8s.io/v1",
    "Job": "/apis/batch/v1",
    "NetworkPolicy": "/apis/networking.k8s.io/v1",
    "PersistentVolumeClaim": "/api/v1",
    "Pod": "/api/v1",
    "PodDisruptionBudget": "/apis/policy/v1",
    "PodMonitor": "/apis/monitoring.coreos.com/v1",
    "PrometheusRule": "/apis/monitoring.coreos.com/v1",
    "Role": "/apis/rbac.authorization.k8s.io/v1",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1",
    "Service": "/api/v1",
    "ServiceAccount": "/api/v1",
    "ServiceMonitor": "/apis/monitoring.coreos.com/v1",
    "StatefulSet": "/apis/apps/v1",
}


def path_of(kind: str, namespace: str) -> str:
    plural = {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")
    return f"{API_PATHS[kind]}/namespaces/{namespace}/{plural}"


def helm(plane: ControlPlane, *words: object, program: str = "helm") -> str:
    done = run(program, *words, "--namespace", "apps", kubeconfig=plane.kubeconfig)
    assert done.returncode == 0, done.stderr
    return done.stdout


def settings(plane: ControlPlane, name: str) -> dict[str, Any]:
    config = plane.get(f"/api/v1/namespaces/apps/configmaps/{name}")
    found: dict[str, Any] = json.loads(config["data"]["tms.yaml"])
    return found


def test_recorded_schemas_match_the_server(plane: ControlPlane) -> None:
    made = record(plane.get("/openapi/v2"))
    recorded = {path.name: path.read_text() for path in FOLDER.iterdir()}
    if made != recorded:
        for name, text in made.items():
            (FOLDER / name).write_text(text)
    assert made == recorded, "the schemas were recorded again; review and commit them"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_object_of_every_example_passes_strict_validation(plane: ControlPlane, example: Path) -> None:
    made = template("--values", example)
    for document in filter(None, yaml.safe_load_all(made.stdout)):
        path = path_of(document["kind"], document["metadata"].get("namespace", "apps"))
        answer = plane.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", document)
        if document["kind"] != "Pod":  # its service account does not exist yet
            assert answer.status_code == 201, (document["kind"], answer.text)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_release_is_installed_upgraded_rolled_back_and_uninstalled(plane: ControlPlane, example: Path) -> None:
    name = f"t-{example.stem.removesuffix('-values')}"
    options = ("--values", example, "--no-hooks", "--set", f"fullnameOverride={name}")
    helm(plane, "install", name, CHART, *options)
    before = settings(plane, name)
    until(lambda: any(pod.startswith(name) for pod in plane.named("/api/v1/namespaces/apps/pods")), "pods are made")

    helm(plane, "upgrade", name, CHART, "--reset-then-reuse-values", "--no-hooks", "--set", "janitor.apply=true")
    assert settings(plane, name)["janitor"]["apply"] is True
    helm(plane, "upgrade", name, CHART, *options, "--set", "janitor.history_days=7")
    assert settings(plane, name)["janitor"] == {**before["janitor"], "history_days": 7}
    helm(plane, "rollback", name, "1", "--no-hooks")
    assert settings(plane, name) == before

    helm(plane, "uninstall", name, "--no-hooks")
    for kind in API_PATHS:
        left = [each for each in plane.named(path_of(kind, "apps")) if each.startswith(name)]
        if kind == "PersistentVolumeClaim":
            assert left == ([name] if name in ("t-embedded", "t-everything") else [])
        elif kind not in ("Pod", "Job"):  # deleted after their owners
            assert left == [], kind


def test_cronjob_creates_one_job_at_a_time(plane: ControlPlane) -> None:
    options = ("--values", CHART / "ci/cronjob-values.yaml", "--no-hooks", "--set", "fullnameOverride=every")
    helm(plane, "install", "every", CHART, *options, "--set-string", "cronjob.schedule=* * * * *")

    def jobs() -> list[dict[str, Any]]:
        items = plane.get("/apis/batch/v1/namespaces/apps/jobs")["items"]
        return [item for item in items if item["metadata"]["name"].startswith("every-")]

    until(lambda: bool(jobs()), "the CronJob makes a Job")
    [job] = jobs()
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4]
    assert job["spec"]["backoffLimit"] == 2
    until(
        lambda: bool(
            plane.get("/api/v1/namespaces/apps/pods?labelSelector=job-name%3D" + job["metadata"]["name"])["items"]
        ),
        "a pod is made",
    )
    helm(plane, "uninstall", "every", "--no-hooks")


def test_suspended_cronjob_stays_suspended_after_a_helm_4_upgrade(plane: ControlPlane) -> None:
    options = ("--values", CHART / "ci/cronjob-values.yaml", "--no-hooks", "--set", "fullnameOverride=stopped")
    helm(plane, "install", "stopped", CHART, *options, program="helm4")
    path = f"{path_of('CronJob', 'apps')}/stopped"
    # Like `kubectl patch`: Helm no longer owns the field.
    there = plane.get(path)
    there["spec"]["suspend"] = True
    assert plane.request("PUT", f"{path}?fieldManager=kubectl-patch", there).status_code == 200

    helm(plane, "upgrade", "stopped", CHART, *options, "--set", "janitor.history_days=7", program="helm4")
    assert settings(plane, "stopped")["janitor"]["history_days"] == 7
    assert plane.get(path)["spec"]["suspend"] is True
    helm(plane, "rollback", "stopped", "1", "--no-hooks", program="helm4")
    assert plane.get(path)["spec"]["suspend"] is True
    helm(plane, "uninstall", "stopped", "--no-hooks", program="helm4")


def test_decision_after_a_helm_timeout_ends_at_its_deadline(plane: ControlPlane) -> None:
    name = ("--namespace", "apps", "--set", "fullnameOverride=late")
    decided = ("--set", "decisions.adopt=a,decisions.activeDeadlineSeconds=20", "--timeout", "5s")
    # No pod runs here, as if an image or a volume were missing.
    gave_up = run("helm", "install", "late", CHART, *name, *decided, kubeconfig=plane.kubeconfig)
    assert (gave_up.returncode, "timed out" in gave_up.stderr) == (1, True), gave_up.stderr
    job = f"{path_of('Job', 'apps')}/late-adopt-0"
    mounted = plane.get(job)["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"]
    assert mounted in plane.named("/api/v1/namespaces/apps/configmaps")

    later = ("--set", "fullnameOverride=late,storage.hbase.thrift={other:9090}", "--no-hooks")
    helm(plane, "upgrade", "late", CHART, *later)
    assert mounted not in plane.named("/api/v1/namespaces/apps/configmaps")

    def reasons() -> list[str]:
        return [each["reason"] for each in plane.get(job).get("status", {}).get("conditions", ())]

    until(lambda: "DeadlineExceeded" in reasons(), "the Job is over")
    helm(plane, "uninstall", "late", "--no-hooks")
    assert plane.request("DELETE", f"{job}?propagationPolicy=Background").status_code == 200
