"""The CI workflows: they call existing targets, and pin every action."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from image import publish

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    return document


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_every_make_target_of_the_workflows_exists(workflow: dict[str, Any]) -> None:
    lines = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    made = [match[1] for line in lines if (match := re.match(r" *(?:sudo )?make (.+)", line))]
    named = {word for words in made for word in words.split() if "=" not in word}
    assert named
    assert named <= TARGETS


def test_every_action_is_pinned_by_its_commit(workflow: dict[str, Any]) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    pinned = re.compile(r"(actions/[\w-]+|pypa/gh-action-pypi-publish)@[0-9a-f]{40}")
    assert [name for name in used if not pinned.fullmatch(name)] == []


def test_only_the_release_has_write_permission(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    image, release = {"contents": "read", "packages": "write"}, {"contents": "write", "packages": "write"}
    own = {"image": image, "index": {"id-token": "write"}, "release": {**release, "id-token": "write"}}
    assert granted == (own if workflow["name"] == "release" else {})
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_published_files_are_built_on_their_architecture() -> None:
    [release] = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS if path.stem == "release"]
    machines = release["jobs"]["image"]["strategy"]["matrix"]["include"]
    assert {each["arch"]: each["machine"].endswith("-arm") for each in machines} == {"amd64": False, "arm64": True}
    assert {each["arch"] for each in machines} == set(publish.ARCHITECTURES)
    [made] = [step["run"] for step in release["jobs"]["image"]["steps"] if "make image" in step.get("run", "")]
    assert 'tag="${GITHUB_REF_NAME#v}${archive:+-archive}-${{ matrix.arch }}"' in made
    assert publish.TAGS == ("{version}", "{version}-archive")
    assert "image" in release["jobs"]["release"]["needs"]


def test_every_python_that_the_project_names_is_tried_on_both_processors() -> None:
    [ci] = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS if path.stem == "ci"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = ci["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == ci["jobs"]["chart"]["strategy"]["matrix"]["python"] == named
    assert {machine.endswith("-arm") for machine in matrix["machine"]} == {False, True}
    assert all(one["python"] == "3.11" and one["machine"].endswith("-arm") for one in matrix["exclude"])


def test_fast_tests_exist() -> None:
    [listed] = re.findall(r"^FAST := (.*?[^\\])$", MAKEFILE, flags=re.MULTILINE | re.DOTALL)
    fast = listed.replace("\\\n", " ").split()
    assert {"tests/contract", "tests/client", "tests/tables"} <= set(fast)
    assert [path for path in fast if not (ROOT / path).exists()] == []


def test_packages_are_checked_before_they_are_published_without_a_secret() -> None:
    [release] = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in WORKFLOWS if path.stem == "release"]
    assert "packages" in release["jobs"]["release"]["needs"]
    index = release["jobs"]["index"]
    assert set(index["needs"]) == {"packages", "release"}
    assert index["steps"][-1]["with"] == {"attestations": True}
    assert "secrets." not in (ROOT / ".github/workflows/release.yaml").read_text(encoding="utf-8")
    [recipe] = re.findall(r"^packages:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert [word in recipe for word in ("hatchling build", "twine check --strict", "tools.installed")] == [True] * 3


def test_release_notes_equal_the_changelog_of_the_version(tmp_path: Path) -> None:
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
    assert "no entry for version 9.9.9" in missing.stderr
