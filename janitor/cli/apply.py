"""``janitor apply``: the application of a plan file."""

from __future__ import annotations

from pathlib import Path

import click

from janitor.cli.options import common_options, session
from janitor.cli.outcome import finish
from janitor.run import plan_file as plan
from janitor.run.log import RunLog
from tms_core.cli.help import Command


@click.command("apply", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--adopt", is_flag=True, help="Adopt the store, and delete the rows of the plan.")
@common_options
def command(file: Path, adopt: bool) -> int:
    """Carry out a plan file.

    The command deletes and inverts only rows that the plan lists and that the deletion rules still
    allow. If the store, a topic's generation or ttl, or a setting has changed since the plan, the
    command names the change and exits with code 3.

    \b
    Example:
      janitor plan  --config janitor.yaml --out plan.json
      janitor apply --config janitor.yaml plan.json
    """
    current = session()
    # Check the file before the store is opened for writing.
    plan_file = plan.read(file)
    with current.deciding() as engine:
        report = engine.apply(plan_file, adopt=adopt)
    RunLog(current.arguments()).write(report)
    return finish(current, report)
