"""The CI's files: they call what there is, and nothing in them can be changed by somebody else."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each workflow in turn."""
    document: dict[str, Any] = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    return document


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_every_target_that_is_made_is_one(workflow: dict[str, Any]) -> None:
    lines = [step["run"] for step in steps(workflow) if step.get("run", "").startswith(("make ", "sudo make "))]
    named = {word for line in lines for word in line.partition("make ")[2].split() if "=" not in word}
    assert named
    assert named <= TARGETS


def test_every_action_is_pinned_by_its_commit(workflow: dict[str, Any]) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name)] == []


def test_nothing_may_be_written_but_by_the_release(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    writing = [name for name, job in workflow["jobs"].items() if "permissions" in job]
    assert writing == (["release"] if workflow["name"] == "release" else [])
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_release_notes_are_what_the_changelog_says_of_the_version(tmp_path: Path) -> None:
    def notes(version: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "-f", str(ROOT / "Makefile"), "release-notes", f"VERSION={version}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    (tmp_path / "CHANGELOG.md").write_text("# C\n\n## [0.2.0] - soon\n\n- new\n\n## [0.1.0]\n\n- old\n")
    assert notes("0.2.0").returncode == 0
    assert (tmp_path / "build/release-notes.md").read_text().split() == ["-", "new"]
    assert notes("0.1.0").returncode == 0
    assert (tmp_path / "build/release-notes.md").read_text().split() == ["-", "old"]
    missing = notes("9.9.9")
    assert missing.returncode != 0
    assert "says nothing of version 9.9.9" in missing.stderr
