"""The chart and the image on a Kubernetes node: pods, probes, commands and clean stops."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.engine import Engine
from tests.cluster.node import run_in_namespaces


@pytest.fixture(scope="module")
def results(engine: Engine, image: str, archive_image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the observations of the life of a release."""
    folder = tmp_path_factory.mktemp("node")
    return run_in_namespaces("tests.cluster.life", folder, engine.save(folder / "images.tar", image, archive_image))


def test_installed_release_responds_through_its_service(results: dict[str, Any]) -> None:
    assert results["test"] is True


def test_server_shows_metrics_only_to_authenticated_clients(results: dict[str, Any]) -> None:
    assert results["scraped"] == [True, False]


def test_release_only_plans_before_apply_and_after_a_rollback(results: dict[str, Any]) -> None:
    assert results["plan"] == "plan"
    modes = [results[f"mode {when}"] for when in ("before", "after", "of the next", "rolled back")]
    assert modes == ["plan_only", "apply", "apply", "plan_only"]


def test_root_file_system_of_the_pod_is_read_only(results: dict[str, Any]) -> None:
    assert results["root"] != 0
