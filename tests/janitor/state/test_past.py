"""What the file keeps of the past: one commit for the end of a run, and nobody who reads is in the way."""

from __future__ import annotations

from pathlib import Path

from janitor.state.records import RunRecord
from janitor.state.sqlite.state import SqliteState
from tests.janitor.state.entries import entry
from tests.janitor.state.test_every_past import end_of_run, times


def test_given_a_ledger_that_is_being_read_when_written_then_no_reader_is_in_the_way(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state, SqliteState(tmp_path, busy_seconds=0) as another:
        state.add_ledger(entry(at_ms=at_ms) for at_ms in range(1000))
        assert times(state.ledger(1)) == [999]
        another.add_ledger([entry(at_ms=1000)])
        assert times(state.ledger(1)) == [1000]


def test_given_the_end_of_a_run_then_all_of_it_is_one_commit() -> None:
    statements: list[str] = []
    with SqliteState.in_memory() as state:
        state.begin_run(RunRecord("run", "apply", 1))
        state.driver.connection.set_trace_callback(statements.append)
        end_of_run(state)
        state.driver.connection.set_trace_callback(None)
    assert [word for word in statements if word.split()[0] in {"BEGIN", "COMMIT", "ROLLBACK"}] == [
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]
