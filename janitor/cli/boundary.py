"""``janitor boundary``: the prune boundary and its limits."""

from __future__ import annotations

from typing import Any

import click

from janitor.boundary import Limit
from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.cli.outcome import command_line
from janitor.run import feedback
from janitor.state.values import pack
from tms_core.cli.help import Command


@click.command("boundary", cls=Command)
@click.option("--explain", is_flag=True, help="Show what limits the boundary.")
@common_options
def command(explain: bool) -> None:
    """Show the prune boundary, up to which the store is proven clean.

    Up to this prune boundary, no row has the write pointer of an invalid transaction. With --explain,
    the command shows the transactions that limit the boundary, and the keys with the oldest search.
    On HBase these are the keys of one salt, with the region of the first key.

    \b
    Examples:
      janitor boundary --config janitor.yaml
      janitor boundary --explain --config janitor.yaml
    """
    current = session()
    with current.reading() as engine:
        proven, present = engine.boundary()
    settings = current.settings.janitor.boundary
    not_handed = feedback.reason_to_withhold(settings.participants) if settings.feedback else ""
    if current.as_json:
        render.print_json(
            {
                "boundary": None if proven is None else str(proven.bound),
                "made_ms": None if proven is None else proven.made_ms,
                "run": None if proven is None else proven.run_id,
                "obstacles": list(present.obstacles),
                "unseen": list(current.place.unseen),
                "feedback": {"on": settings.feedback, "withheld": not_handed or None},
                "limits": [_limit(limit) for limit in present.limits],
            }
        )
        return
    out = render.console()
    if proven is None:
        out.print("no boundary is published yet")
        if not explain:
            out.print(f"next: {command_line(current, 'boundary --explain')}")
    else:
        out.print(f"{proven.bound}, transactions of {render.moment(proven.bound // 10**6)}, by run {proven.run_id}")
    if explain:
        for obstacle in present.obstacles:
            out.print(f"obstacle: {obstacle}")
        for unseen in current.place.unseen:
            out.print(f"not known: {unseen}")
        if not_handed:
            out.print(f"no feedback: {not_handed}")
        for limit in present.limits:
            region = f" (they start in region {limit.region})" if limit.region else ""
            out.print(f"at most {limit.bound}: {limit.reason}{region}")


def _limit(limit: Limit) -> dict[str, Any]:
    """Return a limit as JSON values; the key is in hex, or null for a limit by a transaction."""
    return {**pack(limit), "bound": str(limit.bound), "region": limit.region or None}
