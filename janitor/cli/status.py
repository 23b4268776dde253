"""``janitor status``: the status of the janitor, held topics and required actions."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from rich.text import Text

from janitor.app.progress import describe_share
from janitor.cli import render
from janitor.cli.history import RUNNING
from janitor.cli.history import status as run_status
from janitor.cli.options import common_options, session
from janitor.cli.state import open_state
from janitor.cli.topic import describe_claims, describe_lag
from janitor.report import MEASURED
from janitor.rules.policy import Hold
from janitor.state.base import EVERYTHING, RunRecord, State
from janitor.state.sqlite.state import SqliteState
from janitor.status.collect import collect
from janitor.status.health import Health, judge
from janitor.status.status import Running, Status
from tms_core.cli.help import Command
from tms_core.cli.outcome import DONE
from tms_core.errors import StateError, StoreError, TmsError
from tms_core.logs.printable import complete, complete_command, duration, printable
from tms_core.tables.lease import LeaseRecord

if TYPE_CHECKING:
    from janitor.app.session import Session

_STYLES = {"well": "bold green", "attention": "bold yellow", "down": "bold red"}
#: The word and the exit code of a monitoring plugin, by level.
_PLUGIN = {"well": ("OK", 0), "attention": ("WARNING", 1), "down": ("CRITICAL", 2)}
_UNKNOWN = 3
#: The maximum number of lines of one kind; further lines are only counted.
_NAMED = 10
#: The interval of --watch, in seconds.
WATCH_SECONDS = 2

logger = logging.getLogger(__name__)


@click.command("status", cls=Command)
@click.option("--check", is_flag=True, help="Print one line; exit like a monitoring plugin with 0, 1, 2 or 3.")
@click.option("--watch", is_flag=True, help=f"Update every {WATCH_SECONDS} s until Ctrl-C.")
@common_options
def command(check: bool, watch: bool) -> int:
    """Show the status of the janitor, held topics and required actions.

    The janitor that holds the store returns the status. If no janitor runs, the command shows the
    last known status. The command does not read the store.

    Exit codes with --check: 0 healthy, 1 action required, 2 not working, 3 unknown.

    \b
    Examples:
      janitor status --config janitor.yaml
      janitor status --check --config janitor.yaml
      janitor status --watch --config janitor.yaml
    """
    current = session()
    if check and watch:
        raise click.UsageError("--check and --watch exclude each other")
    if check:
        return _check(current)
    _show(current)
    with suppress(KeyboardInterrupt):
        while watch:
            current.clock.sleep(WATCH_SECONDS)
            _show(current, clear=True)
    return DONE


def _show(current: Session, *, clear: bool = False) -> None:
    """Print the whole status; on a terminal, replace the previous output if ``clear`` is true."""
    # With --watch, do not make the other process collect the status every few seconds.
    status = _status(current, fresh=not clear)
    health = judge(status)
    if current.as_json:
        render.print_json({**status.to_json(), "health": health})
        return
    if clear:
        click.clear()
    out = render.console()
    for line in lines(status, health, current.arguments()):
        out.print(line)


def _check(current: Session) -> int:
    """Print one line like a monitoring plugin; return its exit code."""
    try:
        health = judge(_status(current))
    except TmsError as error:
        word, code, text = "UNKNOWN", _UNKNOWN, error.message
        reasons = [text]
    else:
        word, code = _PLUGIN[health.level]
        reasons = [reason.text for reason in health.reasons]
    if current.as_json:
        render.print_json({"status": word, "reasons": reasons})
    else:
        render.console().print(f"JANITOR {word}: {' '.join(reasons)}")
    return code


def _status(current: Session, *, fresh: bool = True) -> Status:
    """Return the status of the running janitor, or else the status from the state.

    Args:
        fresh: whether the running janitor first collects the status again.
    """
    try:
        holder = current.holder()
        if holder is not None:
            if fresh:
                holder.refresh_status()
            return holder.status()
    except (StoreError, StateError) as error:
        logger.warning("%s", error)
    with open_state(current) as state:
        if state is not None:
            status = collect(state, current.deployment(), current.clock)
            status = replace(status, running=_find_running(current, state, status.now_ms))
            # A janitor on another machine cannot be called; its lease shows that it is alive.
            lease = LeaseRecord.parse(state.lease())
            elsewhere = not current.place.exclusive and lease is not None and lease.is_renewed(status.now_ms)
            return replace(status, process="between_runs") if elsewhere else status
    with SqliteState.in_memory() as nothing:
        return collect(nothing, current.deployment(), current.clock)


def _find_running(current: Session, state: State, now_ms: int) -> Running | None:
    """Return a running run of another process, whose progress is unknown here."""
    lease_seconds = current.settings.janitor.lease.seconds
    for run in state.unfinished_runs():
        if run_status(run, now_ms, lease_seconds) == RUNNING:
            return Running(run.id, run.started_ms, run.heartbeat_ms or run.started_ms, "", "", 0)
    return None


def lines(status: Status, health: Health, arguments: str = "") -> Iterator[Text]:
    """Yield the status as lines.

    Args:
        arguments: the options of this store for commands.
    """
    for reason in health.reasons:
        yield Text(reason.text, style=_STYLES[health.level])
    yield render.line("store", status.store)
    yield render.line("mode", "plan only" if status.mode == "plan_only" else "deletes and inverts", status.schedule)
    if status.started_ms is not None:
        yield render.line("running", f"since {render.when(status.started_ms, status.now_ms)}")
    else:
        holder = status.lease_holder if status.process != "down" else ""
        running = f"{holder} has the lease" if holder else "no daemon"
        yield render.line("running", f"{running}; shown from the saved state")
    yield from _runs(status)
    yield from _inactive_topics(status)
    yield from _transactions(status)
    yield from _overdue(status)
    yield from _consumers(status)
    for late in status.late[:_NAMED]:
        what = f"transaction {late.transaction} of {printable(late.client) or 'an unknown client'}"
        since = f"since {render.when(late.since_ms, status.now_ms)}"
        yield render.line("blocked", f"readers of {late.readers}", f"by {what}", since, style="yellow")
    for entry in status.ahead[:_NAMED]:
        newest = f"messages have future timestamps, the newest {render.when(entry.newest_ms, status.now_ms)}"
        yield render.line("ahead", entry.topic, newest)
    yield from _statistics(status)
    for guard in status.guards:
        message = render.guard_line(guard.guard, complete(guard.message, arguments), tripped=guard.tripped)
        yield render.line("guard").append(message)
    if step := _next(status, health, arguments):
        yield Text(f"next: {step}", style="bold")


def _statistics(status: Status) -> Iterator[Text]:
    found = status.statistics
    if found is None:
        return
    yield render.line(
        "counted",
        f"on Spark {render.when(found.counted_ms, status.now_ms)}",
        f"{found.rows:,} messages, {found.payload_rows:,} payload rows, {sum(found.overdue.values()):,} overdue; "
        f"{found.orphans:,} payloads without a message, {found.missing:,} missing",
    )
    if found.blocking_since_ms is not None:
        since = render.when(found.blocking_since_ms, status.now_ms)
        yield render.line(
            "blocked", f"readers of {found.blocking_topic}", f"by transaction {found.blocking}, started {since}"
        )


def _runs(status: Status) -> Iterator[Text]:
    running = status.running
    if running is not None:
        topic = f" of {running.topic}" if running.topic else ""
        started = f"run {running.id} of another process, started {render.when(running.started_ms, status.now_ms)}"
        progress = f"{running.phase}{topic}, {running.rows:,} rows read"
        if running.phase == MEASURED:
            progress += describe_share(running.done, running.expected, running.heartbeat_ms - running.started_ms)
        yield render.line("in progress", progress if running.phase else started)
    if status.last_run is None:
        yield render.line("last run", "never" if running is None else "none has finished yet")
    else:
        yield render.line("last run", render.when(status.last_run.started_ms, status.now_ms), _outcome(status.last_run))
    if status.next_run_ms is not None:
        due = status.next_run_ms <= status.now_ms
        yield render.line("next run", "now" if due else render.when(status.next_run_ms, status.now_ms))


def _outcome(run: RunRecord) -> str:
    result = run.result
    what = f"plan only, {result}" if run.mode == "plan" else result
    figures = f"{run.expired:,} expired, {run.old_generation:,} of old generations"
    figures += f", {run.processed:,} processed" if run.processed else ""
    progress = render.messages(run.mode, run.messages)
    figures += f", {run.invalid_transaction:,} inverted" + (f"; messages: {progress}" if progress else "")
    return f"{what}: {run.error or figures}"


def _next(status: Status, health: Health, arguments: str) -> str:
    """Return the command for the most severe reason with a command, or an empty string."""
    for reason in health.reasons:
        if command := _command(status, reason.about):
            return complete_command(command, arguments)
    return ""


def _command(status: Status, about: str) -> str:
    """Return the command for a section of the status, or an empty string."""
    if about == "aside":
        topics = [entry.topic for entry in status.quarantined] or [pause.pattern for pause in status.paused]
        return "janitor resume" + ("" if topics[0] == EVERYTHING else f" {shlex.quote(topics[0])}")
    if about == "held":
        return next((hold.command for hold in status.held if hold.command and hold.reason != Hold.PAUSED), "")
    if about == "late":
        return status.late[0].command
    if about == "queues":
        return f"janitor topic {status.ahead[0].topic}"
    if about == "boundary":
        return "janitor verify" if status.boundary.refuted else "janitor boundary"
    words = {"adopt": "plan", "guards": "doctor", "run": "history", "snapshot": "inspect snapshot"}
    return f"janitor {words[about]}" if about in words else ""


def _inactive_topics(status: Status) -> Iterator[Text]:
    """Return paused, held and quarantined topics."""
    for pause in status.paused[:_NAMED]:
        what = "everything" if pause.pattern == EVERYTHING else pause.pattern
        yield render.line("paused", what, f"since {render.when(pause.since_ms, status.now_ms)}", style="yellow")
    for hold in status.held[:_NAMED]:
        until = "" if hold.until_ms is None else f"until {render.when(hold.until_ms, status.now_ms)}"
        rows = f"{hold.rows:,} rows ({hold.reason.replace('_', ' ')})"
        yield render.line("held", hold.topic, rows, hold.cause, until, style="yellow")
    for entry in status.quarantined[:_NAMED]:
        retry = f"next attempt {render.when(entry.probe_ms, status.now_ms)}"
        failed = f"failed {entry.strikes} times: {entry.error.rstrip('.')}"
        yield render.line("quarantined", entry.topic, failed, retry, style="yellow")
    for name, found in (("paused", status.paused), ("held", status.held), ("quarantined", status.quarantined)):
        if len(found) > _NAMED:
            yield render.line("", f"and {len(found) - _NAMED:,} more {name}", "--format json lists all")


def _transactions(status: Status) -> Iterator[Text]:
    snapshot = status.snapshot
    if snapshot.timestamp_ms is None:
        yield render.line("snapshot", snapshot.message or "none seen yet")
    else:
        figures = f"{snapshot.invalid:,} invalid transactions, {snapshot.open:,} of them open"
        yield render.line(
            "snapshot", f"of {render.when(snapshot.timestamp_ms, status.now_ms)}", figures, snapshot.message
        )
    boundary = status.boundary
    if boundary.bound is not None:
        bound = f"clean up to {boundary.bound}, transactions of {render.moment(int(boundary.bound) // 10**6)}"
        yield render.line("boundary", bound, *(f"not higher: {reason}" for _, reason in boundary.limits[:1]))
    else:
        yield render.line("boundary", "not published yet", *boundary.obstacles[:1])


def _consumers(status: Status) -> Iterator[Text]:
    """Yield the consumers with the longest lag."""
    consumers = sorted((one for one in status.consumers if one.lag_messages), key=lambda one: -one.lag_messages)
    for one in consumers[:_NAMED]:
        lag = describe_lag(one.lag_messages, one.oldest_unread_ms, status.now_ms)
        # The count is up to minutes old: the consumer may have read all since.
        counted = f"counted {render.when(one.counted_ms, status.now_ms)}"
        claims = describe_claims(one.open_claims, one.redelivered)
        yield render.line("consumer", f"{one.consumer} of {one.tms_namespace}:{one.topic}", lag, counted, claims)
    if len(consumers) > _NAMED:
        yield render.line("", f"and {len(consumers) - _NAMED:,} more consumers with a lag", "--format json lists all")


def _overdue(status: Status) -> Iterator[Text]:
    for item in status.overdue:
        oldest = "" if item.oldest_ms is None else f"the oldest {duration(status.now_ms - item.oldest_ms)} old"
        rows = f"{item.rows:,} due rows of the {item.table} table were not deleted by the last run"
        yield render.line("overdue", rows, item.rule.replace("_", " "), oldest)
