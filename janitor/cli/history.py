"""``janitor history``: past runs and their reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.cli.outcome import typed
from janitor.cli.state import beginning, explain_beginning, open_state
from janitor.rules.policy import Rule
from janitor.state.base import RunRecord
from janitor.state.values import pack
from tms_core.cli.help import Command
from tms_core.cli.typed import Moment, SinceType
from tms_core.logs.printable import complete, duration
from tms_core.tables.lease import WALL_ALLOWANCE_MS

if TYPE_CHECKING:
    from janitor.app.session import Session

RUNNING, LOST = "running", "lost"

_COLUMNS = ("run", "started", "took", "mode", "result", "expired", "old gen", "processed", "inverted", "held", "")
_FIGURES = (5, 6, 7, 8, 9)


@click.command("history", cls=Command)
@click.argument("run_id", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Runs to show.")
@click.option("--since", type=SinceType(), help="Only runs that started at this time or later.")
@common_options
def command(run_id: str | None, limit: int, since: Moment | None) -> None:
    """Show past runs, or the report of one run.

    The command reads the janitor's state, not the store, so it works while a daemon runs.

    \b
    Examples:
      janitor history --config janitor.yaml
      janitor history --since now-1d --limit 100 --config janitor.yaml
      janitor history 1700000000000-0a1b2c3d --config janitor.yaml
    """
    current = session()
    if run_id is not None:
        _show_run(current, run_id)
        return
    now_ms = current.clock.now_ms()
    with open_state(current) as state:
        runs = state.runs(limit) if state else []
        if since is not None:
            runs = [run for run in runs if run.started_ms >= since.at(now_ms)]
        if current.as_json:
            render.print_json({**beginning(state), "runs": [_run_json(current, run) for run in runs]})
            return
        lines = explain_beginning(current, state, runs[-1].started_ms if runs else None)
        rows = [_cells(current, run, state.report(run.id) if state and run.blocked_by else {}) for run in runs]
    out = render.console()
    for line in lines:
        out.print(line)
    if not runs:
        out.print("no runs")
        return
    table = render.grid(_COLUMNS, right=_FIGURES)
    for row in rows:
        table.add_row(*row)
    render.print_table(table)


def status(run: RunRecord, now_ms: int, lease_seconds: int) -> str:
    """Return how a run ended; of one that did not, whether it goes on or has not shown a sign of life for too long
    (S10).

    Args:
        lease_seconds: how long a run may be silent.
    """
    if run.finished_ms is not None:
        return run.result
    silent_ms = now_ms - _last_sign_ms(run)
    return RUNNING if -WALL_ALLOWANCE_MS <= silent_ms <= lease_seconds * 1000 else LOST


def _last_sign_ms(run: RunRecord) -> int:
    return run.started_ms if run.heartbeat_ms is None else run.heartbeat_ms


def _status(current: Session, run: RunRecord) -> str:
    return status(run, current.clock.now_ms(), current.settings.janitor.lease.seconds)


def _run_json(current: Session, run: RunRecord) -> dict[str, Any]:
    return {**pack(run), "status": _status(current, run)}


def _cells(current: Session, run: RunRecord, report: dict[str, Any]) -> list[str | Text]:
    state = _status(current, run)
    figures = [f"{getattr(run, str(rule)):,}" for rule in Rule] + [f"{run.held:,}"]
    took = duration(round(run.duration_seconds * 1000)) if run.result else ""
    style = {"done": "", RUNNING: "green", "blocked": "bold red", "failed": "bold red", LOST: "bold red"}
    shown = render.styled(state, style.get(state, "yellow"))
    note = complete(_note(run, state, report), current.arguments())
    return [run.id, render.moment(run.started_ms), took, run.mode, shown, *figures, note]


def _note(run: RunRecord, state: str, report: dict[str, Any]) -> str:
    """Return a remark on a run, in one line."""
    if run.finished_ms is None:
        sign = render.moment(_last_sign_ms(run))
        return f"last sign of life {sign}" + ("; the next run closes it" if state == LOST else "")
    stopped = [note["message"] for note in report.get("guards", ()) if note["tripped"]]
    errors = [*stopped, *run.errors] if not run.error else [run.error]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return "".join(errors[:1]) + more


def _show_run(current: Session, run_id: str) -> None:
    with open_state(current) as state:
        run = state.run(run_id) if state else None
        report = state.report(run_id) if state else {}
    if run is None:
        raise click.UsageError(f"unknown run {run_id}; list the runs: {typed(current, 'history')}")
    if current.as_json:
        render.print_json({**_run_json(current, run), "report": report or None})
        return
    out = render.console()
    state_word = _status(current, run)
    out.print(f"run {run.id}, {run.mode}, {state_word}; started {render.moment(run.started_ms)}")
    if not report:
        out.print(complete(_note(run, state_word, report), current.arguments()))
        return
    _print_report(run, report, current.arguments())


def _print_report(run: RunRecord, report: dict[str, Any], arguments: str) -> None:
    out = render.console()
    snapshot = report["snapshot"]
    source = f"snapshot {snapshot['source']}" if snapshot else "no transaction snapshot"
    took = duration(round(run.duration_seconds * 1000))
    full = "full pass" if run.full else "incremental pass"
    out.print(f"as of {render.moment(report['effective_now_ms'])}, {source}; took {took}, {full}")
    if report["topics"]:
        table = render.grid(["topic", "gen", "table", "rule", "rows", "bytes", "oldest", "newest", "held"], (1, 4, 5))
        for item in report["topics"]:
            table.add_row(*_entry_cells(item))
        render.print_table(table)
    if omitted := report.get("topics_omitted"):
        out.print(f"and {omitted:,} smaller entries, which were not recorded")
    out.print(", ".join(f"{getattr(run, str(rule)):,} {_words(rule)}" for rule in Rule))
    if left := render.messages(run.mode, run.messages, run.started_ms):
        out.print(f"messages: {left}")
    if run.deleted_bytes and (gained := render.gain(run.store_bytes)):
        out.print(gained)
    for line in render.kept(report["totals"]["kept"]):
        out.print(line)
    for item in report.get("held_before", {}).get("topics", ()):
        rows = f"{item['rows']:,} rows of {item['tms_namespace']}:{item['topic']}"
        why = f"{item['table']}, {_words(item['rule'])}, {_words(item['held'])}"
        out.print(f"still held, counted by an earlier run: {rows} ({why})")
    for note in report["guards"]:
        message = complete(note["message"], arguments)
        out.print(render.guard_line(note["guard"], message, tripped=note["tripped"]))
    for error in report["errors"]:
        out.print(render.styled(f"failed: {error}", "bold red"))


def _entry_cells(item: dict[str, Any]) -> list[str]:
    times = [render.moment(ms) if ms is not None else "" for ms in (item["oldest_ms"], item["newest_ms"])]
    name, held = f"{item['tms_namespace']}:{item['topic']}", _words(item["held"] or "")
    figures = [f"{item['rows']:,}", render.size(item["bytes"])]
    return [name, str(item["generation"]), item["table"], _words(item["rule"]), *figures, *times, held]


def _words(name: str) -> str:
    return name.replace("_", " ")
