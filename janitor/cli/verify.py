"""``janitor verify``: the verification of the boundary against every row."""

from __future__ import annotations

import click

from janitor.cli import render
from janitor.cli.options import common_options, session
from tms_core.cli.help import Command


@click.command("verify", cls=Command)
@common_options
def command() -> int:
    """Verify the prune boundary.

    The command reads every transactional row. If a row refutes the boundary, the exit code is 1,
    the boundary is withdrawn until a run publishes another boundary, and the next run inspects
    everything.

    \b
    Example:
      janitor verify --config janitor.yaml
    """
    current = session()
    with current.reading() as engine:
        found = engine.verify()
    if current.as_json:
        render.print_json(found.to_json())
    else:
        out = render.console()
        unrecognized = f" ({found.unrecognized:,} of them with unrecognized keys)" if found.unrecognized else ""
        rows = f"{found.cells:,} transactional rows read{unrecognized}"
        out.print(f"{rows}, {found.open_cells:,} of invalid transactions not inverted")
        if found.bound is None and found.withdrawn:
            out.print(f"no boundary is published: {found.withdrawn}")
        elif found.bound is None:
            out.print("no boundary is published yet, so there is nothing to verify")
        elif found.refuted:
            out.print(f"refuted: {found.refuted:,} rows up to {found.bound} have the pointer of an invalid transaction")
            for key in found.sample_keys:
                out.print(f"  {key.hex()}")
            out.print("the boundary is withdrawn, and the next run makes a full pass; do not change the invalid list")
        else:
            out.print(f"proven: no row up to {found.bound} has the pointer of an invalid transaction")
    return 1 if found.refuted or found.withdrawn else 0
