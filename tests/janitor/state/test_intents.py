"""Announcements of a running run: they survive the process, and a torn line does not affect others."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from janitor.state.documents import after
from janitor.state.records import CounterKey, RunRecord
from janitor.state.runs import INTENT
from janitor.state.sqlite import loose
from janitor.state.sqlite.loose import FILE_NAME, LooseFile
from janitor.state.sqlite.state import SqliteState
from tests.janitor.state.entries import entry
from tms_core.errors import StateError

FIRST = entry(rows=None, oldest_ms=None, newest_ms=None, snapshot_timestamp_ms=None, start=b"\x00\xff", stop=b"\xff")
SECOND = entry(at_ms=2, table="payload")


CHILD = """
import os, signal, sys
from pathlib import Path
from janitor.state.sqlite.state import SqliteState
from tests.janitor.state.test_intents import FIRST, SECOND

state = SqliteState(Path(sys.argv[1]))
with state.transaction():
    state.intend(FIRST)
    state.intend(SECOND)
    state.save_last_full_pass_ms(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_announcement_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SqliteState(tmp_path) as state:
            state.intend(FIRST)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_announcements_of_a_killed_process_are_kept(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], cwd=root, check=False).returncode < 0
    with SqliteState(tmp_path) as state:
        assert state.intents() == [FIRST, SECOND]
        assert state.last_full_pass_ms() is None


def test_truncated_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    with SqliteState(tmp_path) as state:
        state.intend(FIRST)
        whole = len(file.read_bytes())
        state.intend(SECOND)
        complete = file.read_bytes()
        for length in range(whole, len(complete)):
            file.write_bytes(complete[:length])
            left = [FIRST, SECOND] if length >= len(complete) - len('"]\n') else [FIRST]
            assert state.intents() == left, "a line with its checksum is complete"
            state.intend(SECOND)
            assert state.intents() == [*left, SECOND]


def test_unrecognized_lines_are_skipped(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        (tmp_path / FILE_NAME).write_bytes(b'[]\n5\n{"a": 1}\n["run", 1]\n["6e", 1]\n\xff\xfe\n')
        state.intend(SECOND)
        assert state.intents() == [SECOND]


def test_flipped_bit_costs_no_announcement_or_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, rows = LooseFile(tmp_path), [(b"a", b'["1, 2", "3"]'), (b"b", b"5")]
    file.put(rows)
    file.delete([b"b"])
    complete = (tmp_path / FILE_NAME).read_bytes()
    for bit in range(8 * len(complete)):
        changed = bytearray(complete)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE_NAME).write_bytes(changed)
        found = list(file.scan(b"", b"\xff"))
        caplog.clear()
        file.delete([])
        assert found == rows[:1] or caplog.messages, f"bit {bit} of {complete!r}"
        assert all(row in rows for row in found)


def test_lines_without_a_checksum_are_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'\n["61", "1"]\n\n["62", "2"]\n\n["61", null]\n')
    assert list(LooseFile(tmp_path).scan(b"", b"\xff")) == [(b"b", b"2")]


def test_damaged_line_stays_in_the_file_and_is_reported_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / FILE_NAME
    with SqliteState(tmp_path) as state:
        state.intend(SECOND)
        state.intend(FIRST)
        lines = file.read_bytes().splitlines(keepends=True)
        damaged = lines[3] = lines[3].replace(b'", "', b'" "', 1)
        file.write_bytes(b"".join(lines))
        assert state.intents() == [SECOND]
        state.clear_intents()
        assert f"kept 1 damaged lines of {file} (lines 4):" in caplog.text
        monkeypatch.setattr(state.driver.loose, "_max_bytes", 0)
        state.intend(FIRST)
        assert state.intents() == [FIRST]
        state.clear_intents()
        assert state.intents() == []
        assert damaged.strip() in file.read_bytes().splitlines()


def test_many_damaged_lines_are_reported_with_the_first_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'["61" "1"]\n' * 1_000)
    LooseFile(tmp_path).delete([])
    assert "1000 damaged lines" in caplog.text
    assert "(lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …):" in caplog.text


def test_removal_of_an_announcement_is_a_command_that_removes_it(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        state.intend(FIRST)
        state.intend(SECOND)
        [(key, _), _] = state.driver.loose.scan(INTENT, after(INTENT))
        subprocess.run(shlex.split(state.driver.loose.removal(key)), check=True)
        assert state.intents() == [SECOND]


def test_file_that_cannot_be_written_is_named_with_a_hint(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        (tmp_path / FILE_NAME).mkdir()
        for attempt in (lambda: state.intend(FIRST), state.intents, state.clear_intents):
            with pytest.raises(StateError) as caught:
                attempt()
            assert str(tmp_path / FILE_NAME) in caught.value.message
            assert caught.value.hint


def test_line_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with SqliteState(tmp_path) as state:
        state.intend(SECOND)
        monkeypatch.setattr("janitor.state.sqlite.loose.os.write", lambda handle, data: write(handle, data[:9]))
        with pytest.raises(StateError, match="cannot be written"):
            state.intend(FIRST)
        monkeypatch.undo()
        assert state.intents() == [SECOND]


def test_file_of_a_long_run_stays_small_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loose, "_REWRITE_BYTES", 2_000)
    with SqliteState(tmp_path) as state:
        state.begin_run(RunRecord("run", "apply", 1))
        state.intend(FIRST)
        for number in range(500):
            state.save_running_counters("run", {CounterKey("rows"): number})
            state.save_heartbeat("run", number)
        assert (tmp_path / FILE_NAME).stat().st_size < 5_000
        assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
        assert (state.intents(), state.running_counters("run")) == ([FIRST], {CounterKey("rows"): 499})
        assert [run.heartbeat_ms for run in state.unfinished_runs()] == [499]


def test_clear_intents_after_a_run_deletes_the_file(tmp_path: Path) -> None:
    with SqliteState(tmp_path) as state:
        state.begin_run(RunRecord("run", "apply", 1))
        state.save_heartbeat("run", 2)
        state.save_running_counters("run", {CounterKey("rows"): 1})
        state.intend(FIRST)
        state.finish_run(RunRecord("run", "apply", 1, 3, "done"))
        assert state.intents() == [FIRST]
        state.clear_intents()
        assert [path.name for path in tmp_path.iterdir()] == ["state.sqlite3"]
        assert state.runs(1)[0].heartbeat_ms == 2


def test_threads_during_a_rewrite_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loose, "_REWRITE_BYTES", 500)
    monkeypatch.setattr(loose, "_REWRITE_RATIO", 1)
    with SqliteState(tmp_path) as state, ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(state.intend, entry(at_ms=number)) for number in range(100)]:
            done.result()
        assert sorted(each.at_ms for each in state.intents()) == list(range(100))
