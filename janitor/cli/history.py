"""``janitor history``: past runs and their reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.cli.state import explain_start_times, open_state, start_times, unknown_run
from janitor.report import Report
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
@click.option("--limit", type=click.IntRange(1), metavar="N", default=20, show_default=True, help="Runs to show.")
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
            render.print_json({**start_times(state), "runs": [_run_json(current, run) for run in runs]})
            return
        lines = explain_start_times(current, state, runs[-1].started_ms if runs else None)
        reports = [state.report(run.id, Report) if state and run.blocked_by else None for run in runs]
        rows = [_cells(current, run, report) for run, report in zip(runs, reports, strict=True)]
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
    """Return the result of a run; for an unfinished run, whether it is running or its heartbeat is overdue (S10).

    Args:
        lease_seconds: the maximum time between two heartbeats.
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


def _cells(current: Session, run: RunRecord, report: Report | None) -> list[str | Text]:
    state = _status(current, run)
    figures = [f"{getattr(run, str(rule)):,}" for rule in Rule] + [f"{run.held:,}"]
    style = {"done": "", RUNNING: "green", "blocked": "bold red", "failed": "bold red", LOST: "bold red"}
    result = render.styled(state, style.get(state, "yellow"))
    note = complete(_note(run, state, report), current.arguments())
    return [run.id, render.moment(run.started_ms), _took(run) if run.result else "", run.mode, result, *figures, note]


def _took(run: RunRecord) -> str:
    return duration(round(run.duration_seconds * 1000))


def _note(run: RunRecord, state: str, report: Report | None) -> str:
    """Return a remark on a run as one line."""
    if run.finished_ms is None:
        sign = render.moment(_last_sign_ms(run))
        return f"last heartbeat {sign}" + ("; the next run closes it" if state == LOST else "")
    stopped = [note.message for note in report.guards if note.tripped] if report else []
    errors = [*stopped, *run.errors] if not run.error else [run.error]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return "".join(errors[:1]) + more


def _show_run(current: Session, run_id: str) -> None:
    with open_state(current) as state:
        run = state.run(run_id) if state else None
        report = state.report(run_id, Report) if state else None
    if run is None:
        raise unknown_run(current, run_id)
    if current.as_json:
        render.print_json({**_run_json(current, run), "report": report})
        return
    state_word, arguments = _status(current, run), current.arguments()
    began = f"run {run.id}, {run.mode}, {state_word}; started {render.moment(run.started_ms)}"
    if report is None:
        render.console().print(began)
        render.console().print(complete(_note(run, state_word, report), arguments))
        return
    full = "full pass" if run.full else "incremental pass"
    render.console().print(f"{began}; took {_took(run)}, {full}")
    render.print_report(report, complete=lambda text: complete(text, arguments))
