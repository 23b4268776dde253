"""The project: tracked files, locked packages, and documents that agree with the code."""

from __future__ import annotations

import logging.config
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import require_or_skip, require_tool

ROOT = Path(__file__).parents[1]
MEGABYTE = 1 << 20
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
RUN_LOCK = (ROOT / "requirements-run.lock").read_text(encoding="utf-8")
#: Paths of a single machine: homes, checkouts and temporary folders.
MACHINE_PATH = re.compile(rb"(?<![\w.}/-])/(?:root|home|Users|work|opt/wheels|tmp/bash_jobs)(?:/[\w.]|\b(?=[\"'\s`]))")
SKIPPING = re.compile(r"pytest\.skip\(|importorskip|mark\.skip|@unittest\.skip")


def tracked_files() -> list[Path]:
    """Return the files that git tracks, and the files that ``git add`` would add."""
    if not (ROOT / ".git").exists():
        require_or_skip("this tree is not a git checkout; clone it")
    git = require_tool("git", "apt-get install git")
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


# --- the tree --------------------------------------------------------------------------------------------------------


def test_no_tracked_file_is_larger_than_a_megabyte() -> None:
    assert [path for path in tracked_files() if path.stat().st_size > MEGABYTE] == []


#: Files that tools write: caches, logs, process ids, coverage, and files of editors and systems.
WRITTEN = [
    ".dmypy.json", ".mypy_cache/x.json", ".ruff_cache/x", ".pytest_cache/x", ".import_linter_cache/x.json",
    ".hypothesis/x", ".coverage", ".coverage.host.1", "htmlcov/index.html", "a/__pycache__/b.cpython-311.pyc",
    "build/x.whl", "dist/x.whl", "x.egg-info/PKG-INFO", "x.log", "x.pid", "x.orig", "x.rej", ".DS_Store",
    ".x.py.swp", "x.py~", ".idea/x", ".vscode/x", ".venv/x", ".venv3.13/x", "nohup.out", "core.4711",
]  # fmt: skip


def git(*arguments: str, given: str = "") -> list[str]:
    if not (ROOT / ".git").exists():
        require_or_skip("this tree is not a git checkout; clone it")
    command = [require_tool("git", "apt-get install git"), *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, input=given)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_no_tracked_file_is_written_by_a_tool() -> None:
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_gitignore_names_every_kind_of_file_that_tools_write() -> None:
    ignored = git("check-ignore", "--no-index", "--stdin", given="\n".join(WRITTEN))
    assert set(WRITTEN) - set(ignored) == set()


def test_no_tracked_file_contains_a_machine_path() -> None:
    assert [path for path in tracked_files() if path != Path(__file__) and MACHINE_PATH.search(path.read_bytes())] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'open("/%s/x")' % b"root", True),
        (b"cd /home/me", True),
        (b"(/%s/main)" % b"work", True),
        (b"x = /Users/me", True),
        (b"in `/%s`" % b"work", True),
        (b"/v1/home", False),
        (b"src/work/x", False),
        (b"a/root b", False),
        (b"${X}/%s/y" % b"work", False),
        (b"root /workers/a", False),
    ],
)
def test_pattern_finds_folders_of_machines_alone(text: bytes, found: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is found


def test_every_skip_of_a_test_goes_through_the_helper_that_fails_in_ci() -> None:
    tests = set((ROOT / "tests").rglob("*.py")) - {ROOT / "tests/support.py", Path(__file__)}
    assert [path for path in tests if SKIPPING.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(("ci", "outcome"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_require_tool_of_a_missing_tool_fails_in_ci_and_skips_elsewhere(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="apt-get install no-such-tool"):
        require_tool("no-such-tool", "apt-get install no-such-tool")


def test_no_dataclass_sets_its_pickled_state() -> None:
    """Python 3.11.3 and older replace ``__getstate__`` and ``__setstate__`` of a frozen dataclass with slots."""
    sources = [path for name in ("janitor", "tms_core") for path in (ROOT / name).rglob("*.py")]
    assert [path for path in sources if re.search("def __[gs]etstate__", path.read_text(encoding="utf-8"))] == []


# --- the lock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Makefile", "Dockerfile", "image/spark.Dockerfile"])
def test_locked_requirements_are_installed_without_resolving(name: str) -> None:
    """Without `--no-deps`, pip resolves requirements with extras again and rejects versions released after the lock."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"pip [^&\n]*--require-hashes[^&\n]*", text)
    assert installs
    assert [line for line in installs if "--no-deps" not in line] == []


def locked_requirements(lock: str = LOCK) -> dict[str, str]:
    lines = [line.removesuffix(" \\") for line in lock.splitlines() if line[:1] not in {"", " ", "#"}]
    return {canonicalize_name(Requirement(line).name): line for line in lines}


@pytest.mark.parametrize("lock", [LOCK, RUN_LOCK], ids=["all", "run"])
def test_lock_contains_no_index_url_or_path(lock: str) -> None:
    assert re.findall(r"://|\s@\s|^\s*-(?!-hash=sha256:)", lock, flags=re.MULTILINE) == []


def test_run_lock_is_a_part_of_the_lock_without_test_tools() -> None:
    pins, tested = locked_requirements(RUN_LOCK), locked_requirements()
    needed = {canonicalize_name(Requirement(each).name) for each in PYPROJECT["project"]["dependencies"]}
    assert needed | {"hatchling"} <= set(pins)
    assert {name: pin.partition(" ;")[0] for name, pin in pins.items()}.items() <= {
        name: pin.partition(" ;")[0] for name, pin in tested.items()
    }.items()
    assert not {"pyspark", "pyarrow", "pytest", "mypy", "kubernetes", "cryptography"} & set(pins)


@pytest.mark.parametrize("lock", [LOCK, RUN_LOCK], ids=["all", "run"])
def test_every_locked_requirement_has_one_version_and_its_hashes(lock: str) -> None:
    requirement = re.compile(r"[\w.-]+==[\w.!+-]+( ; [^\\]+)?( \\\n +--hash=sha256:[0-9a-f]{64})+\n?")
    _, *blocks = re.split(r"^(?=[^\s#])", lock, flags=re.MULTILINE)
    assert [block for block in blocks if not requirement.fullmatch(block)] == []


def test_lock_satisfies_the_requirements_of_the_project() -> None:
    wanted = PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["dev"]
    wanted += PYPROJECT["build-system"]["requires"]
    pins = locked_requirements()
    for requirement in map(Requirement, wanted):
        pin = Requirement(pins[canonicalize_name(requirement.name)])
        [exact] = pin.specifier
        assert requirement.specifier.contains(exact.version), requirement


# --- the documents ---------------------------------------------------------------------------------------------------


def test_newest_entry_of_the_changelog_is_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", changelog, flags=re.MULTILINE)
    assert newest
    assert newest[1] == version("tms-janitor") == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("command", sorted(PYPROJECT["project"]["scripts"]))
def test_each_console_script_says_the_version(command: str) -> None:
    script = Path(sys.executable).parent / command
    answer = subprocess.run([script, "--version"], check=True, capture_output=True, text=True)
    assert version("tms-janitor") in answer.stdout


def test_packages_are_marked_as_typed() -> None:
    files = {str(file) for package in ("tms_core", "janitor") for file in (ROOT / package).glob("py.typed")}
    assert len(files) == 2
    assert distribution("tms-janitor").metadata["Name"] == "tms-janitor"


def test_example_of_a_logging_configuration_is_valid() -> None:
    example = yaml.safe_load((ROOT / "conf/logging.yaml").read_text(encoding="utf-8"))
    logging.config.DictConfigurator(example)
    assert all(handler["stream"] == "ext://sys.stderr" for handler in example["handlers"].values())
