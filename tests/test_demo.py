"""The demonstration: correct, repeatable, and with a final command that runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from examples import demo
from janitor.cli.main import execute
from tests.interop.conftest import unpack
from tms_core.clock import ManualClock
from tms_core.tables.base import CELLS, KEYS
from tms_core.tables.leveldb.store import LevelDBStore

#: The time of the demonstration; the sample is of 2023.
NOW_MS = 1_795_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data" / "demo"


def summary_of(store: Path) -> str:
    with LevelDBStore(store) as opened:
        messages = len(opened.message.read(KEYS, b"", None, 1_000_000).items)
        hidden = sum(cell.pointer < 0 for cell in opened.message.read(CELLS, b"", None, 1_000_000).items)
        payloads = len(opened.payload.read(KEYS, b"", None, 1_000_000).items)
    return f"{messages:,} messages, {hidden} of them hidden from transactions; {payloads:,} payloads;"


def test_demo_of_a_checkout_shows_matching_plan_sweep_and_figures(
    folder: Path, clock: ManualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(folder, clock) == 0
    shown = capsys.readouterr().out
    before, after = re.findall(r"^ +(.* payloads;) ", shown, flags=re.MULTILINE)
    assert before == summary_of(unpack("sample", tmp_path / "as it was").directory)
    assert after == summary_of(folder / "messaging")
    planned, done = re.findall(r"^rows: (.*)$", shown, flags=re.MULTILINE)
    assert planned.replace("would be ", "") == done
    assert not done.startswith("0 expired")
    assert "0 of invalid transactions" not in done
    assert shown.count("kept on purpose: ") == 2
    assert f"snapshot.{NOW_MS}, 0 s old" in shown


def test_demo_suggests_commands_that_run(folder: Path, clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(folder, clock)
    lines = re.findall(r"^  \.venv/bin/janitor (.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(lines) > 3
    assert all(execute(shlex.split(line), clock) == 0 for line in lines)
    assert not any(line.startswith("/") for line in " ".join(lines).split()), "paths as one types them here"


def test_demo_repeated_shows_the_same(folder: Path, clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        assert demo.main(folder, clock) == 0
        (folder / "left").write_text("from the last time")
        shown.append(re.sub(r"(plan|run) \d+-\w+", r"\1 …", capsys.readouterr().out))
    assert shown[0] == shown[1]


@pytest.mark.parametrize(("verb", "last_seen"), [("plan", "1. "), ("run", "2. ")])
def test_demo_stops_at_a_step_that_fails(
    folder: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    last_seen: str,
) -> None:
    monkeypatch.setattr(demo, "execute", lambda arguments, _: 5 if arguments[0] == verb else 0)
    assert demo.main(folder, clock) == 5
    assert re.findall(r"^\d\. ", capsys.readouterr().out, flags=re.MULTILINE)[-1] == last_seen


def test_demo_without_the_sample_removes_nothing(
    folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setattr(demo, "SAMPLE", folder / "absent.tar.xz")
    assert demo.main(folder, clock) == 1
    assert "is missing" in capsys.readouterr().err
    assert folder.is_dir()
