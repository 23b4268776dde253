"""A state file that an earlier version left: everything in it is kept, and what it lacked is there afterwards."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from janitor.state import (
    Claim,
    ClockAnchor,
    Evidence,
    FrontierRecord,
    OpenIdRecord,
    PendingJump,
    RunRecord,
    SqliteState,
    StoreRecord,
    schema,
)
from tests.janitor.state.entries import entry
from tms_core.errors import StoreError
from tms_core.topic import TopicId

LAYOUT_1 = Path(__file__).with_name("layout1.sql")
AT = ClockAnchor(1000, 10, "boot")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder with a file of layout 1."""
    with closing(sqlite3.connect(tmp_path / "state.sqlite3")) as connection:
        connection.executescript(LAYOUT_1.read_text(encoding="utf-8"))
    return tmp_path


def layout(folder: Path) -> tuple[int, list[tuple[str, str]]]:
    """The version number and every table and index with the columns it has."""
    with closing(sqlite3.connect(folder / "state.sqlite3")) as connection:
        (number,) = connection.execute("PRAGMA user_version").fetchone()
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        columns = [(name, repr(connection.execute(f"PRAGMA table_info({name})").fetchall())) for (name,) in names]
        indexes = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql > '' ORDER BY 1")
        return number, columns + indexes.fetchall()


def test_given_layout_1_when_opened_then_everything_in_it_is_kept(folder: Path) -> None:
    with SqliteState(folder) as state:
        assert state.store() == StoreRecord("00112233445566778899aabbccddeeff", "leveldb:/data/messaging:42", 5, 6, 7)
        assert state.anchor() == AT
        held = FrontierRecord(-2, 500, AT, 400, PendingJump(3, 60, ClockAnchor(900, 9, "boot")), (3, 60))
        assert state.frontiers() == {
            TopicId("default", "orders"): FrontierRecord(1, 500, AT, 400),
            TopicId("default", "bills"): held,
        }
        assert list(state.open_ids().values()) == [OpenIdRecord(1699985600000000000, 1, 2)]
        assert state.runs(9) == [
            RunRecord("3000-0a0b0c0d", "apply", 3000),
            RunRecord("1000-0a0b0c0d", "apply", 1000, 2000, "done", '{"id": "1000-0a0b0c0d"}'),
        ]
        assert state.evidence() == [Evidence(b"", None, 6, 7, 1000, "1000-0a0b0c0d")]
        assert (state.claim(), state.last_thorough_ms()) == (Claim(7, 1000, "1000-0a0b0c0d"), 1500)


def test_given_layout_1_when_opened_then_it_has_what_a_new_file_has_and_works(folder: Path, tmp_path: Path) -> None:
    with SqliteState(folder) as state:
        assert state.created_ms() is None, "nobody wrote down when it began"
        assert [run.id for run in state.unfinished_runs()] == ["3000-0a0b0c0d"]
        state.beat("3000-0a0b0c0d", 4000)
        state.begin_run(RunRecord("5000-0a0b0c0d", "apply", 5000, heartbeat_ms=5000))
        state.add_ledger([entry()])
    SqliteState(tmp_path / "new").close()
    assert layout(folder) == layout(tmp_path / "new")
    with SqliteState(folder) as state:
        assert [run.heartbeat_ms for run in state.runs(9)] == [5000, 4000, None]
        assert state.ledger(9) == [entry()]


def test_given_layout_1_when_two_processes_open_it_at_once_then_it_is_brought_up_once(folder: Path) -> None:
    ready = threading.Barrier(2, timeout=60)
    opened = []

    def open_it() -> None:
        ready.wait()
        with SqliteState(folder) as state:
            opened.append(len(state.runs(9)))

    threads = [threading.Thread(target=open_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [2, 2]


def test_given_a_step_that_fails_then_the_file_is_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "state.sqlite3").read_bytes()
    first, second = schema._STEPS
    monkeypatch.setattr(schema, "_STEPS", (first, (*second, "CREATE TABLE runs (again)")))
    with pytest.raises(StoreError, match="already exists"):
        SqliteState(folder)
    assert (folder / "state.sqlite3").read_bytes() == before
    monkeypatch.undo()
    with SqliteState(folder) as state:
        assert len(state.runs(9)) == 2
