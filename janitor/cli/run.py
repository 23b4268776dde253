"""``janitor run``: the daemon, or one pass."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from janitor.cli.options import common_options, session, topic_patterns
from janitor.cli.outcome import finish, require_topics, show, skip
from janitor.run.log import RunLog
from janitor.state.records import Mode, Note
from tms_core.cli.help import Command
from tms_core.errors import BUSY, TmsError

if TYPE_CHECKING:
    from janitor.app.session import Session
    from janitor.run.engine import Engine

logger = logging.getLogger(__name__)


@click.command("run", cls=Command)
@click.option("--once", is_flag=True, help="Make one pass and exit, for example from cron.")
@click.option("--adopt", is_flag=True, help="Adopt the store, and delete its due rows.")
@click.option("--skip-if-locked", is_flag=True, help="Exit with 0 if another process holds the store.")
@topic_patterns
@common_options
def command(once: bool, adopt: bool, skip_if_locked: bool, patterns: tuple[str, ...]) -> int:
    """Delete expired rows, once or on a schedule.

    A run also inverts rows of invalid transactions. It changes nothing until you adopt the store;
    until then, a run with --once exits with code 3.

    The daemon serves a status page and metrics, and responds to other commands while it holds the
    store. SIGTERM or Ctrl-C stops the daemon after the current batch, and SIGHUP starts a sweep. If
    another janitor has the lease on HBase, the daemon waits, and takes over when the lease expires.
    With --once, a run waits for one lease time at most.

    \b
    Examples:
      janitor run --config janitor.yaml
      janitor run --once --adopt --leveldb data/messaging --snapshots data/tx.snapshot
      janitor run --once --config janitor.yaml --skip-if-locked
    """
    current = session()
    skips = BUSY if skip_if_locked else ()
    with ExitStack() as stack:
        try:
            if not once:
                from janitor.app.serve import serve  # noqa: PLC0415 only the daemon needs its servers

                mode: Mode = "apply" if current.settings.janitor.apply else "plan"
                with current.record_failure(mode, skips=skips):
                    return serve(current, adopt=adopt, patterns=patterns, standby=not skip_if_locked)
            if not current.settings.janitor.apply:
                return _show_plan(current, patterns)
            with current.record_failure(skips=skips):
                engine = stack.enter_context(current.writing(stack.enter_context(current.feedback()), waits=True))
        except BUSY as error:
            if not skip_if_locked:
                raise
            return skip(current, error)
        report = engine.run_once(adopt=adopt, patterns=patterns)
        after_run(engine)
        RunLog(current.arguments()).write(report)
        require_topics(current, engine, report, patterns)
    return finish(current, report)


def after_run(engine: Engine) -> None:
    """Delete old records after a run without a daemon.

    An error here does not fail the finished run.
    """
    engine.deps.state.save_note(Note.DAEMON, None)
    try:
        engine.prune_history()
    except TmsError as error:
        logger.warning("housekeeping failed: %s", error)


def _show_plan(current: Session, patterns: tuple[str, ...]) -> int:
    click.echo("janitor.apply is false, so this is only a plan; set it to true to delete", err=True)
    with current.reading() as engine:
        report = engine.plan(patterns=patterns).report
        require_topics(current, engine, report, patterns)
    show(current, report)
    return 0
