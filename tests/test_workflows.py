"""The CI's files: they call what there is, and nothing in them can be changed by somebody else."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from image import publish

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
    lines = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    made = [match[1] for line in lines if (match := re.match(r" *(?:sudo )?make (.+)", line))]
    named = {word for words in made for word in words.split() if "=" not in word}
    assert named
    assert named <= TARGETS


def test_every_action_is_pinned_by_its_commit(workflow: dict[str, Any]) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name)] == []


def test_nothing_may_be_written_but_by_the_release(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    image, release = {"contents": "read", "packages": "write"}, {"contents": "write", "packages": "write"}
    own = {"image": image, "release": {**release, "id-token": "write"}}
    assert granted == (own if workflow["name"] == "release" else {})
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_what_is_published_for_each_architecture_was_made_on_a_machine_of_it() -> None:
    [release] = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS if path.stem == "release"]
    machines = release["jobs"]["image"]["strategy"]["matrix"]["include"]
    assert {each["arch"]: each["machine"].endswith("-arm") for each in machines} == {"amd64": False, "arm64": True}
    assert {each["arch"] for each in machines} == set(publish.ARCHITECTURES)
    [made] = [step["run"] for step in release["jobs"]["image"]["steps"] if "make image" in step.get("run", "")]
    assert 'tag="${GITHUB_REF_NAME#v}${archive:+-archive}-${{ matrix.arch }}"' in made
    assert publish.TAGS == ("{version}", "{version}-archive")
    assert release["jobs"]["release"]["needs"] == "image"


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
