"""``janitor plan``: a dry run that does not write to the store."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from janitor.cli.options import common_options, session, topic_patterns
from janitor.cli.outcome import adoption, command_line, for_held, next_pass, require_topics, show
from janitor.report import Report
from janitor.rules.policy import Hold
from janitor.run import plan_file as plan
from janitor.run.plan_file import WhatIf
from tms_core.cli.help import Command
from tms_core.cli.typed import Moment, TimeType

if TYPE_CHECKING:
    from janitor.app.session import Session

#: The last time that fits into the key of a row.
LAST_MS = 2**63 - 1


@click.command("plan", cls=Command)
@click.option("--at", type=TimeType(), help="Plan for another time; such a plan cannot be applied.")
@click.option("--what-if", default="", metavar="POLICY", help="Plan with other ttls: ttl=3d,topic=default:*")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write a plan file for janitor apply.")
@click.option("--summary", is_flag=True, help="Print one line for each topic, largest first.")
@topic_patterns
@common_options
def command(at: Moment | None, what_if: str, out: Path | None, summary: bool, patterns: tuple[str, ...]) -> None:
    """Show the rows that a run would delete or invert. The command does not change the store.

    \b
    Examples:
      janitor plan --leveldb data/messaging --snapshots data/tx.snapshot
      janitor plan --config janitor.yaml --topic 'default:*' --out plan.json
      janitor plan --config janitor.yaml --summary
      janitor plan --config janitor.yaml --at now+7d
      janitor plan --config janitor.yaml --what-if 'ttl=3d,topic=default:*'
    """
    current = session()
    at_ms = at.at(current.clock.now_ms()) if at else None
    if at_ms is not None and not 0 <= at_ms <= LAST_MS:
        raise click.BadParameter("invalid time: use a time between 1970 and 2^63-1 ms", param_hint="--at")
    WhatIf.parse(what_if)
    with current.reading() as engine:
        report, document = engine.plan(at_ms=at_ms, patterns=patterns, digest=current.digest, what_if=what_if)
        require_topics(current, engine, report, patterns)
    if out is not None:
        plan.save(out, document)
    step = _next_step(current, report, out, at is not None or what_if != "")
    show(current, report, step, summary=summary)


def _next_step(current: Session, report: Report, out: Path | None, what_if: bool) -> str:
    """Return the command that follows this plan."""
    holds = set(report.held_topics().values())
    if what_if or not report.topics:
        return ""
    if any(note.guard == "identity" for note in report.guards):
        return command_line(current, "adopt")
    file = "" if out is None else shlex.quote(str(out))
    if Hold.FIRST_CONTACT in holds:
        return command_line(current, f"apply {file} --adopt") if out else adoption(current)
    if Hold.FRONTIER in holds or all(entry.held for entry in report.topics):
        return for_held(current, report, holds)
    return command_line(current, f"apply {file}") if out else next_pass(current)
