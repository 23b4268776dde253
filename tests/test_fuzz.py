"""``make fuzz``: rounds with new seeds until the time is over or a round fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import explore
from tests.support import seeds

ROOT = Path(__file__).parents[1]

RANDOM = """
from hypothesis import given, strategies

@given(strategies.integers(0, 2**64))
def test_prints_its_examples(example):
    print(example)
"""


def test_explore_until_time_is_over_runs_new_seeds() -> None:
    played: list[int] = []

    def passes(seed: int) -> int:
        played.append(seed)
        return 0

    assert explore(10, passes, iter([7, 8, 9]).__next__, iter([0.0, 4.0, 9.0, 12.0]).__next__) == 0
    assert played == [7, 8, 9]


def test_explore_when_a_round_fails_says_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore(10, lambda seed: seed % 2, iter([8, 9, 10]).__next__, lambda: 0.0) == 1
    assert "TMS_TEST_FIRST_SEED=9 make test" in capsys.readouterr().out


def test_seeds_without_settings_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMS_TEST_FIRST_SEED", raising=False)
    monkeypatch.delenv("TMS_TEST_SEEDS", raising=False)
    assert seeds(50) == range(50)
    monkeypatch.setenv("TMS_TEST_FIRST_SEED", "1000")
    assert seeds(50) == range(1000, 1050)


@pytest.mark.parametrize(("fuzz", "same"), [({}, True), ({"TMS_TEST_FUZZ": "1"}, False)])
def test_hypothesis_examples_change_only_when_fuzzing(fuzz: dict[str, str], same: bool, tmp_path: Path) -> None:
    program = tmp_path / "test_random.py"
    program.write_text(RANDOM, encoding="utf-8")
    without = {name: value for name, value in os.environ.items() if name not in {"CI", "TMS_TEST_FUZZ"}}

    def examples() -> str:
        quiet = ["-q", "-s", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
        command = [sys.executable, "-m", "pytest", *quiet, "-p", "tests.conftest", str(program)]
        ended = subprocess.run(command, env=without | fuzz, cwd=ROOT, capture_output=True, text=True, check=True)
        return "\n".join(line for line in ended.stdout.splitlines() if line.strip(".").isdigit())

    first = examples()
    assert first
    assert (examples() == first) is same
