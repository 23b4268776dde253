"""``janitor status``: what the janitor does, what waits, and whether somebody has to look at something."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from dataclasses import replace

import click
from rich.text import Text

from janitor.cli import render
from janitor.cli.context import Session, session
from janitor.cli.memory import memory
from janitor.cli.options import common_options
from janitor.http.verdict import Verdict, judge
from janitor.look import look
from janitor.picture import Picture, RunSummary
from janitor.policy import Hold
from janitor.state.base import EVERYTHING
from janitor.state.sqlite import SqliteState
from tms_core.errors import StoreError
from tms_core.lease import LeaseRecord

_STYLES = {"well": "bold green", "attention": "bold yellow", "down": "bold red"}
#: How many lines of one kind are shown before they are only counted.
_NAMED = 10
#: Columns of the words on the left.
_LEFT = 13

logger = logging.getLogger(__name__)


@click.command("status")
@common_options
def command() -> None:
    """Show what the janitor does, what waits and why.

    Asks the janitor that holds the store; where none runs, it shows what is remembered of the last
    one. Reads nothing of the store.

    \b
    Example:
      janitor status --config janitor.yaml
    """
    current = session()
    picture = _picture(current)
    verdict = judge(picture)
    if current.as_json:
        render.print_json({**picture.to_json(), "verdict": verdict.to_json()})
        return
    out = render.console()
    for line in lines(picture, verdict, current.arguments()):
        out.print(line)


def _picture(current: Session) -> Picture:
    """From the janitor that runs, or else from the memory."""
    try:
        holder = current.holder()
        if holder is not None:
            return holder.picture()
    except StoreError as error:
        logger.warning("%s", error)
    with memory(current) as state:
        if state is not None:
            picture = look(state, current.site(), current.clock)
            # On another machine, where nobody asks it: what it renews is its sign of life.
            elsewhere = not current.place.exclusive and _is_renewed(LeaseRecord.parse(state.lease()), picture.now_ms)
            return replace(picture, process="between_runs") if elsewhere else picture
    current.place.require()  # a place without a store is a mistake, and no quiet one
    with SqliteState.in_memory() as nothing:
        return look(nothing, current.site(), current.clock)


def _is_renewed(lease: LeaseRecord | None, now_ms: int) -> bool:
    """Whether somebody has the lease who goes on renewing it."""
    return lease is not None and bool(lease.holder) and now_ms - lease.renewed_ms <= lease.seconds * 1000


def lines(picture: Picture, verdict: Verdict, arguments: str = "") -> Iterator[Text]:
    """The picture in lines.

    Args:
        arguments: options to be typed after a command.
    """
    for reason in verdict.reasons:
        yield Text(reason.text, style=_STYLES[verdict.level])
    yield _line("store", picture.store)
    yield _line("mode", "only plans" if picture.mode == "plan_only" else "deletes and inverts", picture.schedule)
    if picture.started_ms is not None:
        yield _line("running", f"since {_when(picture.started_ms, picture.now_ms)}")
    else:
        holder = picture.lease_holder if picture.process != "down" else ""
        running = f"{holder} has the lease" if holder else "no daemon"
        yield _line("running", f"{running}; this is what the memory holds")
    yield from _runs(picture)
    yield from _aside(picture, arguments)
    yield from _transactions(picture)
    yield from _overdue(picture)
    yield from _statistics(picture)
    for guard in picture.guards:
        yield _line("guard", f"{guard.guard}: {guard.message}", style="bold red" if guard.tripped else "yellow")


def _statistics(picture: Picture) -> Iterator[Text]:
    found = picture.statistics
    if found is None:
        return
    yield _line(
        "counted",
        f"on Spark {_when(found.counted_ms, picture.now_ms)}",
        f"{found.rows:,} messages, {found.payload_rows:,} payload rows, {sum(found.overdue.values()):,} overdue; "
        f"{found.orphans:,} payloads of no message, {found.missing:,} missing",
    )
    if found.blocking_since_ms is not None:
        since = _when(found.blocking_since_ms, picture.now_ms)
        yield _line("blocked", f"readers of {found.blocking_topic}", f"by transaction {found.blocking}, begun {since}")


def _runs(picture: Picture) -> Iterator[Text]:
    under_way = picture.running
    if under_way is not None:
        where = f" of {under_way.topic}" if under_way.topic else ""
        yield _line("under way", f"{under_way.phase}{where}, {under_way.rows:,} rows read")
    if picture.last_run is None:
        yield _line("last run", "never")
    else:
        yield _line("last run", _when(picture.last_run.started_ms, picture.now_ms), _outcome(picture.last_run))
    if picture.next_run_ms is not None:
        yield _line("next run", _when(picture.next_run_ms, picture.now_ms))


def _outcome(run: RunSummary) -> str:
    what = f"only a plan, {run.result}" if run.mode == "plan" else run.result
    figures = f"{run.expired:,} expired, {run.old_generation:,} of old generations"
    return f"{what}: {run.error or f'{figures}, {run.invalid_transaction:,} inverted'}"


def _aside(picture: Picture, arguments: str) -> Iterator[Text]:
    """What is not done, and the commands that change that."""
    for pattern, since_ms in picture.paused[:_NAMED]:
        what, word = ("everything", "") if pattern == EVERYTHING else (pattern, f" {shlex.quote(pattern)}")
        since = f"since {_when(since_ms, picture.now_ms)}"
        yield _line("paused", what, since, f"janitor resume{word} {arguments}".rstrip(), style="yellow")
    for held in picture.held[:_NAMED]:
        until = "" if held.until_ms is None else f"until {_when(held.until_ms, picture.now_ms)}"
        waits = f"{held.rows:,} rows wait ({held.reason.replace('_', ' ')})"
        command = "" if held.reason == Hold.PAUSED else held.command  # shown with the pause
        yield _line("held", held.topic, waits, until, command, style="yellow")
    for entry in picture.quarantined[:_NAMED]:
        again = f"tried again {_when(entry.probe_ms, picture.now_ms)}"
        failed = f"failed {entry.strikes} times: {entry.error.rstrip('.')}"
        yield _line("quarantined", entry.topic, failed, again, style="yellow")
    for name, found in (("paused", picture.paused), ("held", picture.held), ("quarantined", picture.quarantined)):
        if len(found) > _NAMED:
            yield _line("", f"and {len(found) - _NAMED:,} more {name}", "all of them with --format json")


def _transactions(picture: Picture) -> Iterator[Text]:
    snapshot = picture.snapshot
    if snapshot.timestamp_ms is None:
        yield _line("snapshot", snapshot.message or "none seen yet")
    else:
        figures = f"{snapshot.invalid:,} invalid transactions, {snapshot.open:,} of them open"
        yield _line("snapshot", f"of {_when(snapshot.timestamp_ms, picture.now_ms)}", figures, snapshot.message)
    boundary = picture.boundary
    if boundary.bound is not None:
        bound = f"clean up to {boundary.bound}, transactions of {render.moment(int(boundary.bound) // 10**6)}"
        yield _line("boundary", bound, *(f"held by: {reason}" for _, reason in boundary.limits[:1]))
    else:
        yield _line("boundary", "none claimed", *boundary.obstacles[:1])


def _overdue(picture: Picture) -> Iterator[Text]:
    for item in picture.overdue:
        oldest = "" if item.oldest_ms is None else f"the oldest {render.duration(picture.now_ms - item.oldest_ms)} old"
        rows = f"{item.rows:,} rows of the {item.table} table were due in the last run and stayed"
        yield _line("overdue", rows, item.rule.replace("_", " "), oldest)


def _when(ms: int, now_ms: int) -> str:
    """A moment, and how far from now it is."""
    away = render.duration(now_ms - ms)
    return f"{render.moment(ms)} ({f'{away} ago' if ms <= now_ms else f'in {away}'})"


def _line(name: str, *parts: str, style: str = "") -> Text:
    line = Text(f"{name:<{_LEFT}}", style="bold")
    return line.append(Text("; ".join(part for part in parts if part), style=style))
