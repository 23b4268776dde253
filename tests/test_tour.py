"""``make run``: its output is true, other commands work at the same time, and Ctrl-C stops it cleanly.

The tour runs as a process, as for a user, with shorter intervals.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import pytest

from examples import tour
from janitor.state.records import RunRecord
from janitor.status.status import HeldTopic, Status
from tests.builders import NOW_MS
from tests.test_docs import pattern
from tms_core.tables.base import CELLS
from tms_core.tables.leveldb.store import LevelDBStore

ROOT = Path(__file__).parents[1]
#: The time limit of each step, in seconds.
PATIENCE_SECONDS = 120

#: ``make run`` on a free port, with shorter intervals.
TOUR = """
import sys
from pathlib import Path
from examples import tour
tour.STEP_SECONDS = 0.2
tour.TICKS_TTL_SECONDS = 1
tour.APPROVE_AT = int(sys.argv[2])
tour.SETTINGS = tour.SETTINGS.replace("every_seconds: 3", "every_seconds: 1")
sys.exit(tour.main(Path(sys.argv[1]), any_ports=True))
"""
NEVER = 10**9


class Tour:
    """A running tour.

    Args:
        folder: the folder of the tour.
        approve_at: the step at which the tour approves held rows.
    """

    def __init__(self, folder: Path, approve_at: int) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", TOUR, str(folder), str(approve_at)],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def hear(self, expression: str) -> re.Match[str]:
        """Wait for the next line that matches an expression."""
        while not (match := re.search(expression, self._next([expression]))):
            pass
        return match

    def hear_all(self, expressions: Iterable[str]) -> None:
        """Wait for a line for each expression, in any order, because a slow machine sweeps later."""
        missing = list(expressions)
        while missing:
            line = self._next(missing)
            found = next((one for one in missing if re.search(one, line)), None)
            if found is not None:
                missing.remove(found)

    def _next(self, missing: Sequence[str]) -> str:
        try:
            line = self._lines.get(timeout=PATIENCE_SECONDS)
        except Empty:
            line = None
        assert line is not None, f"missing line: {missing}\n" + "\n".join(self.lines)
        self.lines.append(line)
        return line

    def get(self, path: str) -> tuple[int, str]:
        """Send a request to the status page, which is available after the first reported sweep."""
        [port] = re.findall(r"Status page: http://127\.0\.0\.1:(\d+)/", "\n".join(self.lines))
        connection = HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def await_health(self, level: str) -> None:
        """Wait for a level: the tour reports a run at its end, but the status is that of the last tick."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (health := json.loads(self.get("/api/status")[1])["health"])["level"] != level:
            assert time.monotonic() < end, health
            time.sleep(0.05)

    def type(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "janitor", *line.split(), "--config", str(self.folder / "tms.yaml")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )

    def type_printed(self, start: str) -> subprocess.CompletedProcess[str]:
        """Run the printed command with this start."""
        [line] = re.findall(rf"^  \.venv/bin/{start}.*$", "\n".join(self.lines), flags=re.MULTILINE)
        words = [str(Path(sys.executable).with_name("tms")), *line.split()[1:]]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        return self._process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


Start = Callable[..., Tour]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a tour; the fixture kills it after the test."""
    with ExitStack() as stack:

        def start_tour(approve_at: int = NEVER) -> Tour:
            made = Tour(tmp_path / "run", approve_at)
            stack.callback(made.kill)
            return made

        yield start_tour


def page_lines() -> list[str]:
    """Return the lines that the guide shows of ``make run``."""
    guide = (ROOT / "docs/tutorials/clean-a-store.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```text\n\$ make run\n(.*?)```", guide, flags=re.DOTALL)
    return str(shown).splitlines()


def test_run_prints_the_guide_and_leaves_a_store_for_cdap(start: Start) -> None:
    running = start(approve_at=35)
    running.hear_all(rf"^{pattern(line)}$" for line in page_lines())
    assert running.get("/healthz") == (200, "ok")
    status, page = running.get("/")
    assert status == 200
    assert "<html" in page
    running.await_health("well")
    listed = running.type_printed("tms tx list")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "in progress" in listed.stdout
    assert 'tms_janitor_rows_deleted_total{rule="old_generation",table="message"} 700.0' in running.get("/metrics")[1]
    running.send(signal.SIGINT)
    assert running.ended() == 0
    running.hear("all accepted messages are written, and the store is closed")
    files = [path.name for path in (running.folder / "messaging").rglob("*") if path.suffix in (".ldb", ".sst")]
    assert files
    assert all(name.endswith(".sst") for name in files)
    with LevelDBStore(running.folder / "messaging") as store:
        assert len(store.metadata.rows()) == 13
        assert any(cell.pointer < 0 for cell in store.message.read(CELLS, b"", None, 1_000_000).items)
    # On a slow machine, the progress of a run may be in the same line.
    assert {path.name for path in (running.folder / "janitor").iterdir()} - {"running.jsonl"} == {"state.sqlite3"}


def test_tour_deletes_held_rows_approved_from_another_terminal(start: Start) -> None:
    running = start()
    held = running.hear(r"held: ([\d,]+) rows of demo:orders; release them with: (janitor approve demo:orders .*)$")
    assert held[2].endswith("tms.yaml")
    shown = running.type("status").stdout
    assert "is held." in shown
    assert "demo:orders; " in shown
    approved = running.type("approve demo:orders")
    assert approved.stdout.splitlines()[:2] == ["approved:", "  demo:orders"]
    running.send(signal.SIGHUP)
    running.hear(r"swept: .*(3,\d\d\d) expired")
    assert "demo:orders; " not in running.type("status").stdout
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_second_tour_leaves_the_first_alone(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    running = start()
    running.hear("swept: ")
    assert tour.main(running.folder) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: another server uses ")
    assert "hint: Stop it with Ctrl-C" in error
    assert running.get("/healthz") == (200, "ok")


def test_tour_that_starts_with_another_leaves_its_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tour.lock(tmp_path / "run") as is_alone:
        assert is_alone
        assert tour.main(tmp_path / "run") == 1
    assert capsys.readouterr().err.startswith("error: another server uses ")
    assert list(tmp_path.iterdir()) == []


def test_run_without_the_sample_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tour, "SAMPLE", tmp_path / "absent.tar.xz")
    assert tour.main(tmp_path) == 1
    assert "is missing" in capsys.readouterr().err
    assert tmp_path.is_dir()


# --- the narrator ----------------------------------------------------------------------------------------------------


def status(run: str = "", *, expired: int = 0, held: int = 0) -> Status:
    waiting = [HeldTopic("demo:orders", "frontier", held, 0, None, None, "janitor approve demo:orders")]
    last = RunRecord(run, "apply", NOW_MS, NOW_MS, "done", expired=expired) if run else None
    return Status("0", "", "running", "apply", "", NOW_MS, last_run=last, held=waiting if held else ())


@pytest.mark.parametrize(
    ("statuses", "lines"),
    [
        ([status()], []),
        ([status("1", expired=2), status("1", expired=2)], ["swept: 2 expired"]),
        ([status("1", expired=2), status("2")], ["swept: 2 expired"]),
        (
            [status(held=7), status(held=8), status(), status(held=9)],
            [
                "held: 7 rows of demo:orders; release them with: janitor approve demo:orders",
                "held: 9 rows of demo:orders; release them with: janitor approve demo:orders",
            ],
        ),
    ],
)
def test_narrator_prints_each_fact_once(statuses: list[Status], lines: list[str]) -> None:
    facts: list[str] = []
    narrator = tour.Narrator(facts.append)
    for seen in statuses:
        narrator.print_news(seen, [seen.last_run] if seen.last_run else [])
    assert facts == lines
