"""``janitor doctor``: is everything in place for a run?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import click

from janitor import guards
from janitor.cli import render
from janitor.cli.context import Session, session
from janitor.cli.options import common_options
from janitor.state.sqlite import SqliteState
from tms_core.errors import TmsError
from tms_core.tables.leveldb_clone import clone

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
#: Below this share of the disk a compaction may fail.
_FREE_SHARE = 0.05


class Finding(NamedTuple):
    """One thing looked at: what, how it is, and in a sentence why or what to do."""

    check: str
    status: Literal["ok", "warn", "fail"]
    message: str


@click.command("doctor")
@common_options
def command() -> int:
    """Check settings, store, rights, state, snapshots and clocks; exit code 1 when something is broken.

    \b
    Example:
      janitor doctor --config janitor.yaml
    """
    current = session()
    findings = list(examine(current))
    if current.as_json:
        render.print_json([finding._asdict() for finding in findings])
    else:
        table = render.grid(["check", "", ""])
        for finding in findings:
            table.add_row(finding.check, f"[{_STYLES[finding.status]}]{finding.status}[/]", finding.message)
        render.console().print(table)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def examine(current: Session) -> Iterator[Finding]:
    """Look at everything a run needs, one after the other."""
    sources = sorted(set(current.loaded.origins.values()))
    yield Finding("settings", "ok", f"from {', '.join(sources)}" if sources else "all defaults")
    for name, check in (
        ("store", _store),
        ("state", _state),
        ("snapshots", _snapshots),
        ("clock", _clock),
        ("lifetime", _lifetime),
        ("disk", _disk),
    ):
        yield _guarded(name, check, current)


def _guarded(name: str, check: Callable[[Session], Finding], current: Session) -> Finding:
    try:
        return check(current)
    except TmsError as error:
        return Finding(name, "fail", str(error))


def _store(current: Session) -> Finding:
    with clone(current.store_path, current.state_path) as store:
        topics = len(store.metadata.rows())
        copied = "" if store.linked else "; plans copy its files, since they cannot be linked into the state folder"
    if not os.access(current.store_path, os.W_OK):
        return Finding("store", "fail", f"{current.store_path} cannot be written; run as its owner")
    return Finding("store", "warn" if copied else "ok", f"{current.store_path}, {topics} topics{copied}")


def _state(current: Session) -> Finding:
    with SqliteState(current.state_path) as state:
        record = state.store()
        last = next(iter(state.runs(1)), None)
    if record is None or record.adopted_ms is None:
        return Finding(
            "state", "warn", f"{current.state_path}: not adopted yet; look at janitor plan, then janitor adopt"
        )
    ran = f", last run {last.result or 'unfinished'} at {render.moment(last.started_ms)}" if last else ", never run"
    return Finding("state", "ok", f"{current.state_path}, adopted {render.moment(record.adopted_ms)}{ran}")


def _snapshots(current: Session) -> Finding:
    with current.reading() as engine:
        state = engine.transactions()
    if state.problem is not None:
        return Finding("snapshots", "warn", f"{state.message}; nothing is inverted without one")
    return Finding(
        "snapshots", "ok", f"{state.name}" + (f", {len(state.rejected)} passed over" if state.rejected else "")
    )


def _clock(current: Session) -> Finding:
    now = guards.read_clocks(current.clock)
    with SqliteState(current.state_path) as state:
        note = guards.check_clock(state.anchor(), now, current.terms().lifetime.allowance_ms)
    if note is None:
        return Finding("clock", "ok", render.moment(now.wall_ms))
    return Finding("clock", "fail" if note.tripped else "warn", note.message)


def _lifetime(current: Session) -> Finding:
    terms = current.terms()
    if terms.lifetime_known:
        return Finding("lifetime", "ok", f"transactions write for at most {render.duration(terms.lifetime.max_ms)}")
    return Finding(
        "lifetime", "warn", "transactions.max_lifetime_seconds is not set: 90000 is assumed, and no boundary is claimed"
    )


def _disk(current: Session) -> Finding:
    path = Path(current.store_path)
    usage = shutil.disk_usage(path if path.exists() else path.parent)
    text = f"{render.size(usage.free)} of {render.size(usage.total)} free"
    return Finding("disk", "ok" if usage.free > usage.total * _FREE_SHARE else "warn", text)
