"""Output streams and formats: pure JSON, complete tables, and colors on terminals only."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.app.progress import progress
from janitor.cli import render
from janitor.report import EXPECTED
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, pointer, topic
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit
from tests.support import TerminalStream, raising
from tms_core.logs.printable import duration
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId


def test_run_prints_what_it_deleted_and_no_next_command(kit: CommandKit) -> None:
    shown = re.sub(r"[\d.]+ kB", "… kB", kit.janitor("run --once --adopt").out).splitlines()
    assert [line.split() for line in shown[2:5]] == [
        ["default:orders", "1", "message", "expired", "2", "58", "B", "3", "d", "2", "d"],
        ["default:orders", "1", "message", "invert", "1", "29", "B", "3", "h", "3", "h"],
        ["default:retired", "1", "message", "old", "generation", "1", "30", "B", "1", "h", "1", "h"],
    ]
    assert shown[5:8] == [
        "rows: 2 expired, 1 of old generations deleted, 1 of invalid transactions inverted",
        "size: 88 B of rows deleted",
        "the store: … kB before, … kB after",
    ]
    assert shown[8].startswith(f"proven clean up to transaction {INVALID} (")
    assert len(shown) == 9


def test_summary_has_a_line_for_each_topic_by_size(kit: CommandKit) -> None:
    lines = kit.janitor("plan --summary").out.splitlines()
    table = lines[1 : next(at for at, line in enumerate(lines) if line.startswith("rows:"))]
    assert table[0].split() == ["topic", "bytes", "rows", "held"]
    names = [line.split()[0] for line in table[1:]]
    assert len(names) == len(set(names))
    report = kit.janitor("plan --format json").json
    totals: dict[str, int] = {}
    for entry in report["topics"]:
        name = f"{entry['tms_namespace']}:{entry['topic']}"
        totals[name] = totals.get(name, 0) + entry["bytes"]
    assert names == sorted(totals, key=lambda name: (-totals[name], name))
    freed = sum(entry["bytes"] for entry in report["topics"] if entry["rule"] != "invalid_transaction")
    assert report["deleted_bytes"] == freed > 0
    assert any(line.startswith("size: about ") and " of rows would be deleted, of " in line for line in lines)


def test_plan_run_and_history_show_the_size_on_disk(kit: CommandKit) -> None:
    with LevelDBStore(kit.store) as store:
        bulk = topic(store, "default:bulk", ttl_seconds=86400)
        bulk.plain(*range(NOW_MS - 3 * DAY, NOW_MS - 3 * DAY + 20_000), body=b"x" * 40)
    disk = sum(file.stat().st_size for file in kit.store.rglob("*") if file.is_file())
    before = kit.janitor("plan --format json").json["store_bytes"]["before"]
    assert disk == before
    assert f" of rows would be deleted, of {render.size(before)} on disk" in kit.janitor("plan").out
    shown = kit.janitor("run --once --adopt").out
    (run,) = kit.janitor("history --format json").json["runs"]
    measured = run["store_bytes"]
    assert measured["before"] == before, "the compaction of logs at an opening is not space that a run freed"
    assert measured["after"] < measured["before"] // 2
    line = f"the store: {render.size(measured['before'])} before, {render.size(measured['after'])} after"
    assert line in shown.splitlines()
    assert line in kit.janitor(f"history {run['id']}").out.splitlines()


def test_plan_with_a_file_suggests_apply(kit: CommandKit) -> None:
    assert "next: janitor apply plan.json --adopt --config janitor.yaml" in kit.janitor("plan --out plan.json").out
    kit.janitor("adopt")
    assert "next: janitor apply plan.json --config janitor.yaml" in kit.janitor("plan --out plan.json").out
    assert "next: janitor run --once --config janitor.yaml" in kit.janitor("plan").out


def test_plan_with_a_held_topic_suggests_approve(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    kit.set_ttl("default:orders", 30)
    shown = kit.janitor("plan").out
    assert "until approved" in shown
    assert "next: janitor approve default:orders --config janitor.yaml" in shown


def test_plan_of_another_time_or_ttl_suggests_no_command(kit: CommandKit) -> None:
    assert "next:" not in kit.janitor("plan --at now+1d").out
    assert "next:" not in kit.janitor("plan --what-if ttl=1h").out


def test_plan_with_what_if_ttl_equals_the_plan_after_that_change(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    supposed = kit.janitor("plan --what-if ttl=30s,topic=default:orders --format json").json
    kit.set_ttl("default:orders", 30)
    planned = kit.janitor("plan --format json").json
    for report in (planned, supposed):
        for name in ("id", "duration_seconds", "phase_seconds", "store_calls", "seeks_spared", "store_bytes"):
            del report[name]
    assert supposed == planned
    assert [item["held"] for item in planned["topics"]] == ["frontier"], "the plan shows the hold"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"),
        (59 * SECOND, "59 s"),
        (61 * SECOND, "1 min 1 s"),
        (HOUR, "1 h"),
        (2 * HOUR - SECOND, "1 h 59 min"),
        (DAY + 2 * HOUR, "1 d 2 h"),
        (13 * DAY + 2 * HOUR, "13 d"),
        (-MINUTE, "1 min"),
    ],
)
def test_duration_is_formatted(ms: int, text: str) -> None:
    assert duration(ms, rough=True) == text


@pytest.mark.parametrize(("age_ms", "shown"), [(1000, "1 s old"), (-1, "0 s old"), (-5000, "5 s newer")])
def test_plan_with_a_snapshot_of_the_same_second_does_not_call_it_older(
    kit: CommandKit, age_ms: int, shown: str
) -> None:
    kit.snapshot(age_ms=age_ms)
    assert re.search(rf", snapshot\.\d+, {shown}$", kit.janitor("plan").out.splitlines()[0])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (52_000, "52 kB"), (3_400_000, "3.4 MB"), (5 * 10**12, "5.0 TB")],
)
def test_size_is_formatted(count: int, text: str) -> None:
    assert render.size(count) == text


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_time_of_a_row_is_formatted_without_error(ms: int) -> None:
    assert render.moment(ms)
    assert duration(ms)


def test_time_is_formatted_in_utc() -> None:
    assert render.moment(NOW_MS) == "2023-11-14 22:13:20 UTC"
    assert render.moment(2**62) == f"{2**62} ms"


LINES = [
    "plan",
    "run --once",
    "run --once --adopt",
    "adopt",
    "boundary",
    "boundary --explain",
    "verify",
    "doctor",
    "config show",
    "inspect message",
    "inspect payload",
    "inspect meta",
    "inspect snapshot",
]


@pytest.mark.parametrize("line", LINES)
def test_json_output_is_one_value_and_logs_are_on_standard_error(kit: CommandKit, line: str) -> None:
    (kit.folder / "data/tx/snapshot.1699999999999").write_bytes(b"")  # causes a warning
    done = kit.janitor(f"{line} --format json --log-format json")
    assert isinstance(done.json, dict | list)
    assert all(isinstance(json.loads(log), dict) for log in done.err.splitlines())


def test_json_output_has_64_bit_ids_as_strings(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    assert kit.janitor("plan --format json").json["boundary"] == str(INVALID)
    assert kit.janitor("boundary --format json").json["boundary"] == str(INVALID)
    assert kit.janitor("verify --format json").json["boundary"] == str(INVALID)
    [row] = [row for row in kit.janitor("inspect message --format json").json["rows"] if row["pointer"]]
    assert row["pointer"] == str(-INVALID)
    figures = kit.janitor("inspect snapshot --format json").json
    assert figures["invalid"] == [str(INVALID)]
    assert figures["write_pointer"] == str(pointer(NOW_MS - SECOND))


def test_run_logs_its_start_and_its_counts(kit: CommandKit) -> None:
    log = [json.loads(line) for line in kit.janitor("run --once --adopt --log-format json").err.splitlines()]
    assert str(kit.store) in log[0]["message"]
    last = log[-1]
    assert last["level"] == "info"
    assert {name: last[name] for name in ("expired", "old_generation", "invalid_transaction", "held")} == {
        "expired": 2,
        "old_generation": 1,
        "invalid_transaction": 1,
        "held": 0,
    }


def test_run_with_a_tripped_guard_and_a_skipped_snapshot_logs_both(kit: CommandKit) -> None:
    (kit.folder / "data/tx/snapshot.1699999999999").write_bytes(b"")
    log = kit.janitor("run --once --log-format text").err
    assert "ERROR adoption: nothing is deleted, because this store is not adopted" in log
    assert "WARNING snapshot: skipped snapshot.1699999999999" in log


def test_clone_without_links_says_that_it_copied(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.janitor("run --once --adopt")  # creates tables, which a clone can link
    monkeypatch.setattr(Path, "hardlink_to", raising(PermissionError(errno.EPERM, "Operation not permitted")))
    assert "copied" in kit.janitor("plan").err


def test_clone_that_a_crash_left_is_removed_by_the_next_command(kit: CommandKit) -> None:
    stale = kit.folder / "data/janitor/leveldb-clone-abandoned"
    stale.mkdir(parents=True)
    assert kit.janitor("plan").code == 0
    assert not stale.exists()


@pytest.fixture
def terminal(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that runs a command in a color terminal of 80 columns and returns its output."""
    for name in ("NO_COLOR", "COLORTERM", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")

    def run_line(line: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream := TerminalStream())
            kit.janitor(line)
        return stream.getvalue()

    return run_line


def test_terminal_without_no_color_shows_color(terminal: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32mok" in terminal("doctor")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[\d*3\dm", terminal("doctor"))


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_plan_at_any_terminal_width_cuts_no_cell_and_no_command(
    terminal: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = re.sub(r"\x1b\[[\d;]*m", "", terminal("plan"))
    words = set(re.split(r"[\s,]+", shown))
    assert {"default:orders", "default:retired", "expired", "generation", "adopted", "message"} <= words
    assert "next: janitor run --once --adopt --config janitor.yaml\n" in shown
    assert all(len(line) <= columns for line in shown.splitlines() if line.startswith("  "))


def test_progress_on_a_terminal_is_one_line_cleared_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("janitor.app.progress.time.monotonic", lambda: now)
    stream = TerminalStream()
    with progress(stream) as observer:
        for _ in range(100):
            observer("message", TopicId("default", "orders"), 1000)
            now += 0.02
    written = stream.getvalue()
    assert "messages of default:orders, 26,000 rows read" in written, "the first half second is silent"
    assert "\n" not in written
    assert 10 <= written.count("\r") <= 17, "ten times a second at most"
    assert written.endswith("\r\x1b[K")


def test_progress_without_a_terminal_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr("janitor.app.progress.time.monotonic", lambda: next(moments))
    stream = io.StringIO()
    with progress(stream) as observer:
        for _ in range(10):
            observer("message", None, 1000)
    assert stream.getvalue() == ""


def test_progress_with_counts_shows_share_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("janitor.app.progress.time.monotonic", lambda: now)
    stream = TerminalStream()
    with progress(stream) as observer:
        observer(EXPECTED, None, 10_000)
        now = 60.0
        observer("message", None, 2_500)
        now = 61.0
        observer("message", None, 20_000)
        now = 62.0
        observer("payload", None, 1)
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines[1:-1] == [
        "messages, 2,500 rows read, 25% of due rows, about 3 min left",
        "messages, 22,500 rows read, 99% of due rows, about 0 s left",
        "payloads, 22,501 rows read",
    ]


@pytest.mark.usefixtures("kit")
def test_doctor_on_a_real_terminal_exits_0() -> None:
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 80))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[3])}
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "janitor", "doctor", "--config", "janitor.yaml"],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, terminal, 1), (os.POSIX_SPAWN_DUP2, terminal, 2)],
    )
    os.close(terminal)
    shown = b""
    with os.fdopen(main, "rb", buffering=0) as reader:
        while piece := _read(reader):
            shown += piece
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"Traceback" not in shown
    assert b"settings" in shown


def _read(reader: io.FileIO) -> bytes:
    try:
        return reader.read(4096) or b""
    except OSError:  # the other end of the terminal is closed
        return b""


LONG = 300_000
#: Less than a long name, and more than all other output of a run.
SHORT = 20_000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"default:" + b"x y" * (LONG // 3) + b":", b"{}"),
        (b"default:" + b"x" * LONG + b":", b"{}"),
        (b"default:" + b"x" * LONG + b":", b'{"generation":"1","ttl":"60"}'),
        (b"default:b:", b'{"generation":"' + b"9" * LONG + b'","ttl":"60"}'),
        (b"default:b:", b'{"generation":"1","ttl":"' + b"x " * (LONG // 2) + b'"}'),
    ],
    ids=["key", "unreadable", "topic", "generation", "ttl"],
)
@pytest.mark.parametrize("command", ["run --once --adopt", "plan"])
def test_command_on_a_long_name_writes_little(kit: CommandKit, key: bytes, value: bytes, command: str) -> None:
    with LevelDBStore(kit.store) as store:
        assert store.metadata.compare_and_set(key, None, value)
    outcome = kit.janitor(command)
    assert outcome.code == 0
    assert max(len(outcome.err), len(outcome.out)) < SHORT


def test_tables_have_no_spaces_at_the_ends_of_lines(kit: CommandKit) -> None:
    lines = [*kit.janitor("plan").out.splitlines(), *kit.janitor("doctor").out.splitlines()]
    assert [line for line in lines if line != line.rstrip()] == []


def test_plan_without_due_rows_has_no_table_size_or_next_step(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    shown = kit.janitor("plan").out.splitlines()
    assert [line.partition(" ")[0] for line in shown] == ["plan", "rows:", "proven"]


def test_kept_rows_are_counted_by_reason(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {protect: ['default:orders'], "))
    assert "kept on purpose: 2 held" in kit.janitor("plan").out


def test_brackets_in_a_path_and_a_pattern_are_shown_unchanged(kit: CommandKit) -> None:
    kit.store.rename(kit.folder / "data" / "[bold]old")
    store = "--leveldb 'data/[bold]old'"
    assert f"janitor run --once --adopt {store}" in kit.run(f"plan {store}").out
    kit.run(f"adopt {store}")
    assert "no rows of default:[a-z]* are held" in kit.run(f"approve 'default:[a-z]*' {store}").out


def test_run_with_apply_false_only_plans_and_says_so(kit: CommandKit) -> None:
    kit.janitor("adopt")
    kit.set(SETTINGS.replace("janitor: {", "janitor: {apply: false, "))
    done = kit.janitor("run --once --format json")
    assert (done.code, done.json["mode"]) == (0, "plan")
    assert "janitor.apply " in done.err
    assert kit.janitor("plan --format json").json["totals"]["expired"] == 2, "nothing was deleted"
