"""``janitor sweep-now``: a sweep by the process that holds the store, without waiting for its schedule."""

from __future__ import annotations

import click

from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.cli.outcome import command_line
from tms_core.cli.help import Command
from tms_core.errors import StoreError


@click.command("sweep-now", cls=Command)
@common_options
def command() -> None:
    """Start a sweep in the process that holds the store.

    The daemon, or the janitor inside tms serve, starts its next sweep now, or after the current
    sweep. The new sweep skips no topic. The command returns at once.

    \b
    Example:
      janitor sweep-now --config janitor.yaml
    """
    current = session()
    holder = current.holder()
    if holder is None:
        hint = f"Sweep from here: {command_line(current, 'run --once')}"
        if current.place.exclusive:
            raise StoreError(f"No janitor responds in {current.state_path}, so no sweep was started.", hint)
        raise StoreError(
            "The janitor of a store in HBase has no control socket, because no single process holds the store.",
            f"Send SIGHUP to the process of the janitor. {hint}",
        )
    holder.sweep_now()
    if current.as_json:
        render.print_json({"pid": holder.process_identity.pid})
    else:
        render.console().print(
            f"process {holder.process_identity.pid} sweeps now; see: {command_line(current, 'status')}"
        )
