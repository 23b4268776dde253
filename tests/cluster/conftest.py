"""Fixtures of tests with a cluster or a container engine, which ``make test-cluster`` runs and ``make test`` omits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chart.programs import program
from tests.cluster.engine import SOURCE, Engine
from tests.cluster.plane import ControlPlane
from tests.hbase.conftest import hbase, hbase_tables
from tests.support import require_tool

__all__ = ["hbase", "hbase_tables"]  # fixtures

collect_ignore_glob = [] if os.environ.get("TMS_TEST_CLUSTER") else ["test_*.py"]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return a container engine for all tests, so that each image is built once."""
    with Engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """Return the project's image, built from this tree."""
    tag = "localhost/tms-janitor:test"
    engine.make("image", IMAGE=tag, SOURCE=SOURCE)
    return tag


@pytest.fixture(scope="session")
def archive_image(engine: Engine, image: str) -> str:
    """Return the project's image with Parquet, which the chart uses for an archive."""
    engine.make("image", IMAGE=f"{image}-archive", ARCHIVE="1", SOURCE=SOURCE)
    return f"{image}-archive"


@pytest.fixture(scope="session")
def spark_image(engine: Engine) -> str:
    """Return the project's image for Spark."""
    tag = "localhost/tms-janitor-spark:test"
    engine.make("image-spark", SPARK_IMAGE=tag)
    return tag


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Return a control plane for all tests."""
    program("kubebox", "kubebox")
    require_tool("openssl", "apt-get install openssl")
    with ControlPlane(tmp_path_factory.mktemp("plane")) as running:
        for name in ("apps", "monitoring"):
            running.create("/api/v1/namespaces", {"metadata": {"name": name}})
        for kind in ("PodMonitor", "PrometheusRule", "ServiceMonitor"):
            definition = _definition(f"{kind.lower()}s", kind)
            running.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        yield running


def _definition(plural: str, kind: str) -> dict[str, object]:
    """Return the definition of a kind of Prometheus's operator; the server only has to know the kind."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    group = "monitoring.coreos.com"
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
