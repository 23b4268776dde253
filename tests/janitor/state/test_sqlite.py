"""The state as a file: a damaged file is rejected, and processes wait for each other."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from janitor.state.records import OpenIdRecord, ProvenBoundary, RunRecord
from janitor.state.sqlite.state import SCHEMA_VERSION, SqliteState, copy_state
from tests.janitor.state.test_every_past import end_of_run
from tms_core.errors import StateBusy, StateError
from tms_core.topic import TopicId

TOPIC = TopicId("default", "orders")


def file_of(folder: Path) -> Path:
    return folder / "state.sqlite3"


def change(folder: Path, statement: str) -> bytes:
    """Execute a statement in the file; return the bytes of the file afterwards."""
    with closing(sqlite3.connect(file_of(folder))) as connection:
        connection.execute(statement)
    return file_of(folder).read_bytes()


def test_save_open_ids_without_change_writes_nothing(tmp_path: Path) -> None:
    records = [OpenIdRecord(pointer, 1, None, pointer % 2 or None) for pointer in range(1, 1001)]
    with SqliteState(tmp_path) as state:
        state.save_open_ids(records)
        before = file_of(tmp_path).read_bytes()
        state.save_open_ids(records)
        assert file_of(tmp_path).read_bytes() == before
        state.save_open_ids([OpenIdRecord(7, 1, 2, 7)])
        assert file_of(tmp_path).read_bytes() != before


def test_full_disk_at_the_end_of_a_run_keeps_nothing_of_it(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        state.driver.connection.execute("PRAGMA max_page_count = 40")

        def end_of_run() -> None:
            with state.transaction():
                state.save_boundary(ProvenBoundary(1, 2, "r"))
                state.save_note("large", "x" * 1_000_000)
                state.save_last_full_pass_ms(5)

        with pytest.raises(StateError, match="full"):
            end_of_run()
        assert (state.boundary(), state.last_full_pass_ms(), state.note("large")) == (None, None, None)
        state.save_boundary(ProvenBoundary(3, 4, "s"))
        assert state.boundary() == ProvenBoundary(3, 4, "s")


CHILD = """
import sys
from pathlib import Path
from janitor.state.records import *
from janitor.state.sqlite.state import SqliteState
from tms_core.topic import TopicId

def stop(statement):
    if statement == "COMMIT":
        print("inside", flush=True)
        sys.stdin.read()

topic = TopicId("default", "orders")
with SqliteState(Path(sys.argv[1])) as state:
    number = 0
    while True:
        number += 1
        with state.transaction():
            state.save_frontiers({topic: FrontierRecord(1, number, ClockAnchor(1, 1, "b"), 1)})
            if sys.argv[2] == "inside" and number == 3:
                state.save_note("large", "x" * 8_000_000)  # more than SQLite keeps in memory, so the file is changed
                state.driver.connection.set_trace_callback(stop)
            state.save_boundary(ProvenBoundary(number, 1, "r"))
        print(number, flush=True)
"""


def killed_after(folder: Path, mode: str, lines: int) -> list[str]:
    """Run the child, kill it after a number of lines, and return its output."""
    command = [sys.executable, "-c", CHILD, str(folder), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        written = [child.stdout.readline().strip() for _ in range(lines)]
        child.kill()
        written += child.stdout.read().split()
    return written


def test_kill_in_a_transaction_keeps_the_previous_commit(tmp_path: Path) -> None:
    assert killed_after(tmp_path, "inside", 3) == ["1", "2", "inside"]
    assert (tmp_path / "state.sqlite3-journal").stat().st_size > 0, "the child is killed during a write"
    with SqliteState(tmp_path) as state:
        assert state.frontiers()[TOPIC].cutoff_ms == 2
        assert state.boundary() == ProvenBoundary(2, 1, "r")
        assert state.note("large") is None


def test_kill_anywhere_leaves_whole_commits_and_loses_none(tmp_path: Path) -> None:
    for lines in (1, 2, 5, 9):
        last = int(killed_after(tmp_path, "anywhere", lines)[-1])
        with SqliteState(tmp_path) as state:
            proven = state.boundary()
            assert proven is not None
            assert state.frontiers()[TOPIC].cutoff_ms == proven.bound
            assert proven.bound >= last


def test_write_during_a_transaction_is_busy_and_reads_succeed(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as one, SqliteState(tmp_path, busy_seconds=0) as two:
        one.save_boundary(ProvenBoundary(1, 1, "r"))
        with one.transaction():
            one.save_boundary(ProvenBoundary(2, 2, "s"))
            with pytest.raises(StateBusy):
                two.save_last_full_pass_ms(1)
            assert two.boundary() == ProvenBoundary(1, 1, "r")
        two.save_last_full_pass_ms(1)
        assert two.boundary() == ProvenBoundary(2, 2, "s")


def test_transaction_during_another_is_busy_before_it_reads(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as one, SqliteState(tmp_path, busy_seconds=0) as two, one.transaction():
        entered = False
        with pytest.raises(StateBusy), two.transaction():
            entered = True
        assert not entered


def test_open_creates_folder_and_file_for_the_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    before = os.umask(0)
    try:
        SqliteState(folder).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600


def test_open_sets_synced_commits_with_a_rollback_journal(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        assert state.driver.connection.execute("PRAGMA synchronous").fetchone() == (3,)
        assert state.driver.connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize(
    "content",
    [b"this is not a database, not at all" * 100, b"SQLite format 3\x00" + b"\xff" * 4096],
    ids=["text", "header"],
)
def test_file_that_is_not_a_database_raises_with_the_lost_data(tmp_path: Path, content: bytes) -> None:
    file_of(tmp_path).write_bytes(content)
    with pytest.raises(StateError) as caught:
        SqliteState(tmp_path)
    assert str(file_of(tmp_path)) in str(caught.value)
    assert "corrupt" in str(caught.value)
    assert "until you adopt the store again" in str(caught.value)
    assert caught.value.hint
    assert file_of(tmp_path).read_bytes() == content, "a corrupt file is kept for the operator"


def test_file_with_damaged_pages_is_corrupt(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        state.save_open_ids(OpenIdRecord(pointer, 1) for pointer in range(1, 100_001))
    data = bytearray(file_of(tmp_path).read_bytes())
    # Damage only the end of the file, which has the open ids; the other tables stay readable.
    for page in range(len(data) // 8192 * 4096, len(data), 4096):
        data[page : page + 64] = b"\xff" * 64
    file_of(tmp_path).write_bytes(data)
    with SqliteState(tmp_path) as state, pytest.raises(StateError, match="corrupt"):
        state.open_ids()


def test_file_with_damaged_text_of_its_tables_is_corrupt(tmp_path: Path) -> None:
    SqliteState(tmp_path).close()
    # SQLite quotes the damaged bytes in its error, which is then not valid text.
    file_of(tmp_path).write_bytes(
        file_of(tmp_path).read_bytes().replace(b"CREATE TABLE history", b"CREATE TABL\xff history")
    )
    with pytest.raises(StateError, match="corrupt") as caught:
        SqliteState(tmp_path)
    assert "until you adopt the store again" in caught.value.hint
    (copy := tmp_path / "copy").mkdir()
    with pytest.raises(StateError, match="cannot be copied"):
        copy_state(tmp_path, copy)


def test_file_of_a_newer_layout_is_rejected_with_both_numbers(tmp_path: Path) -> None:
    SqliteState(tmp_path).close()
    change(tmp_path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StateError, match=rf"layout {SCHEMA_VERSION + 1}.* {SCHEMA_VERSION}"):
        SqliteState(tmp_path)


@pytest.mark.parametrize("layout", range(1, SCHEMA_VERSION))
def test_file_of_an_older_layout_is_rejected_and_left_alone(tmp_path: Path, layout: int) -> None:
    SqliteState(tmp_path).close()
    before = change(tmp_path, f"PRAGMA user_version = {layout}")
    with pytest.raises(StateError, match=rf"layout {layout}.* {SCHEMA_VERSION}") as caught:
        SqliteState(tmp_path)
    assert "adopt" in caught.value.hint
    assert file_of(tmp_path).read_bytes() == before


def test_open_of_another_programs_database_raises_and_writes_nothing(tmp_path: Path) -> None:
    before = change(tmp_path, "CREATE TABLE theirs (a)")
    with pytest.raises(StateError, match="a database of another program"):
        SqliteState(tmp_path)
    assert file_of(tmp_path).read_bytes() == before


def test_open_in_an_impossible_folder_raises_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match=r"janitor\.state"):
        SqliteState(tmp_path / "file" / "state")


def test_end_of_a_run_is_one_commit() -> None:
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
