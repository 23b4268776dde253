"""A CronJob and Spark with executor pods, on a Kubernetes node with the HBase of the tests."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.cluster.engine import Engine
from tests.cluster.node import run_in_namespaces
from tests.cluster.relay import Relay, listen_at
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tms_core.settings.models import HBaseSettings


@pytest.fixture(scope="module")
def results(
    engine: Engine,
    image: str,
    archive_image: str,
    spark_image: str,
    hbase: HBaseServer,
    hbase_tables: Tables,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Return the observations of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    images = engine.save(folder / "images.tar", image, archive_image, spark_image)
    namespace = hbase_tables.make(buckets=HBaseSettings().buckets)
    there = (hbase.address.host, hbase.address.thrift)
    with Relay(listen_at(folder / "hbase.sock"), lambda: socket.create_connection(there)):
        path = folder / "hbase.sock"
        return run_in_namespaces("tests.cluster.runs", folder / "node", images, path, namespace, spark_image)


FAILED_FOR_GOOD = {"type": "Failed", "reason": "PodFailurePolicy"}


@pytest.mark.parametrize(("why", "code"), [("not adopted", 3), ("wrong settings", 2), ("another holder", 4)])
def test_run_that_needs_an_operator_is_not_retried(results: dict[str, Any], why: str, code: int) -> None:
    assert results[why] == {**FAILED_FOR_GOOD, "codes": [code]}


def test_failed_runs_delete_nothing(results: dict[str, Any]) -> None:
    assert results["left by those"] == 41


def test_cronjob_run_deletes_expired_rows_and_completes(results: dict[str, Any]) -> None:
    assert (results["run"]["type"], results["run"]["codes"]) == ("Complete", [0])
    assert results["left by a run"] == 1


def test_exporter_shows_the_last_successful_run(results: dict[str, Any]) -> None:
    assert results["test"] is True
    assert results["last success"] > 0


def test_spark_sweep_deletes_and_archives_expired_rows(results: dict[str, Any]) -> None:
    assert (results["sweep"]["type"], results["sweep"]["codes"]) == ("Complete", [0])
    assert results["left by Spark"] == 2
    assert results["archived"] > 0


def test_executors_have_least_privileges(results: dict[str, Any]) -> None:
    spec = results["executor"]["spec"]
    [container] = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "runs"
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 65532)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any("serviceaccount" in mount["mountPath"] for mount in container["volumeMounts"])


def test_executors_have_labels_of_the_release_and_their_driver_as_owner(results: dict[str, Any]) -> None:
    labels = results["executor"]["labels"]
    assert (labels["app.kubernetes.io/instance"], labels["app.kubernetes.io/component"]) == ("runs", "executor")
    assert results["executor's owner"] == "Pod"
