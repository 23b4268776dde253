"""``janitor adopt``: first contact."""

from __future__ import annotations

import click

from janitor.cli import render
from janitor.cli.approve import is_done, once_for_option
from janitor.cli.options import common_options, session
from janitor.cli.outcome import next_pass
from tms_core.cli.help import Command


@click.command("adopt", cls=Command)
@once_for_option
@click.option(
    "--expect-store",
    metavar="STORE",
    help="Adopt only this store: its store_id in a plan file, or its name in the status.",
)
@common_options
def command(once_for: str | None, expect_store: str | None) -> None:
    """Adopt the store in its present state.

    This also accepts the store's transaction system and this machine's clock. The command deletes
    nothing; later runs delete the rows that are due. Adopt each store once, and again after it was
    copied, restored or given other snapshots.

    \b
    Example:
      janitor plan  --leveldb data/messaging --snapshots data/tx.snapshot
      janitor adopt --leveldb data/messaging --snapshots data/tx.snapshot
    """
    current = session()
    if is_done(current, "adopt", once_for):
        return
    with current.reading(records=True) as engine:
        # Compare the name here, since it comes from the settings; only the engine knows the id of the store.
        is_name = expect_store == current.place.name
        topics = engine.adopt(once_for=once_for, store_id=None if is_name else expect_store)
    if current.as_json:
        render.print_json({"adopted": [str(topic) for topic in topics]})
    else:
        render.console().print(f"adopted, with {len(topics)} topics")
        render.print_next(next_pass(current))
