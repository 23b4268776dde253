"""The chart and the image on a whole node: pods run, probes are answered, commands work in them, and they end well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chart.programs import program
from tests.cluster.engine import PACKAGES, Engine
from tests.cluster.node import enter, machine_as_it_was
from tests.cluster.plane import ROOT
from tests.cluster.test_image import engine, image
from tests.support import require_or_skip, require_tool

__all__ = ["engine", "image"]  # fixtures

#: What all of it may take, in seconds.
LIFE_SECONDS = 1500


@pytest.fixture(scope="module")
def images(engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image, and one that does nothing, in an archive."""
    engine.docker(
        "import",
        "--change",
        'ENTRYPOINT ["/bin/sleep", "infinity"]',
        ROOT / ".tools/base-image.tar",
        "localhost/pause:local",
    )
    archive = tmp_path_factory.mktemp("images") / "images.tar"
    engine.docker("save", "--output", archive, image, "localhost/pause:local")
    return archive


@pytest.fixture(scope="module")
def saw(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen of a release's life."""
    program("kubebox", "kubebox")
    program("helm")
    for tool in ("unshare", "ip", "openssl"):
        require_tool(tool, "apt-get install util-linux iproute2 openssl")
    if os.geteuid() != 0 or not (PACKAGES / "usr/bin/containerd").exists():
        require_or_skip("a node needs root and Debian's containerd: make engine")
    folder = tmp_path_factory.mktemp("node")
    command = enter([sys.executable, "-m", "tests.cluster.life", str(folder), str(images)])
    with machine_as_it_was():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIFE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_installed_release_answers_through_its_service(saw: dict[str, Any]) -> None:
    assert saw["test"] is True


def test_it_only_plans_until_it_is_switched_on_and_again_after_a_roll_back(saw: dict[str, Any]) -> None:
    assert saw["plan"] == "plan"
    modes = [saw[f"mode {when}"] for when in ("before", "after", "of the next", "rolled back")]
    assert modes == ["plan_only", "apply", "apply", "plan_only"]


def test_its_root_file_system_cannot_be_written(saw: dict[str, Any]) -> None:
    assert saw["root"] != 0


def test_a_run_with_wrong_settings_is_not_tried_again(saw: dict[str, Any]) -> None:
    assert saw["wrong settings"] == "PodFailurePolicy"
    assert saw["runs with them"] == 1
