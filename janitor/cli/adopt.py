"""``janitor adopt``: first contact."""

from __future__ import annotations

import click

from janitor.cli import render
from janitor.cli.context import session
from janitor.cli.once import is_done, once_for_option, remember
from janitor.cli.options import common_options


@click.command("adopt")
@once_for_option
@common_options
def command(once_for: str | None) -> None:
    """Accept this store as it is now.

    And with it its transaction system and this machine's clock. From then on runs delete what is
    due. Nothing is deleted by this command itself. Needed once for a store, and again when it was
    copied, restored or given other snapshots.

    \b
    Example:
      janitor plan  --leveldb data/messaging --snapshots data/tx.snapshot
      janitor adopt --leveldb data/messaging --snapshots data/tx.snapshot
    """
    current = session()
    if is_done(current, "adopt", once_for):
        return
    with current.reading() as engine:
        topics = engine.adopt()
    remember(current, "adopt", once_for)
    if current.as_json:
        render.print_json({"adopted": [str(topic) for topic in topics]})
    else:
        render.console().print(f"adopted, with {len(topics)} topics\nnext: janitor run --once {current.arguments()}")
