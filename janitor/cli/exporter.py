"""``janitor exporter``: metrics and status page without a daemon (:mod:`janitor.app.exporter`)."""

from __future__ import annotations

import click

from janitor.cli.options import common_options, session
from tms_core.cli.help import Command


@click.command("exporter", cls=Command)
@common_options
def command() -> None:
    """Serve metrics and the status page without a daemon.

    Use it if CronJobs run the sweeps. It reads the state of the janitor, not the store. The daemon,
    janitor run, serves both itself and needs no exporter. SIGTERM or Ctrl-C stops it.

    \b
    Example:
      janitor exporter --config janitor.yaml
    """
    from janitor.app.exporter import export  # noqa: PLC0415 not needed for help

    export(session())
