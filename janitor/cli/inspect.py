"""``janitor inspect``: the tables and the snapshot, decoded."""

from __future__ import annotations

from typing import Any

import click

from janitor.cli import render
from janitor.cli.options import common_options, session, topic_patterns
from tms_core.cli.help import CommandGroup
from tms_core.tables.base import TableName
from tms_core.transaction.model import transaction_ms

_HIDDEN = {"key"}

row_limit = click.option(
    "--limit", type=click.IntRange(0), metavar="N", default=20, show_default=True, help="Rows to show."
)


@click.group("inspect", cls=CommandGroup)
def command() -> None:
    """Show the tables and the transaction snapshot, without changing them."""


@command.command("message")
@row_limit
@topic_patterns
@common_options
def message(limit: int, patterns: tuple[str, ...]) -> None:
    """Show decoded messages, and count all messages.

    The counts are by kind, and by the state of the transaction.

    \b
    Example:
      janitor inspect message --topic default:orders --limit 5 --config janitor.yaml
    """
    _show("message", patterns, limit)


@command.command("payload")
@row_limit
@topic_patterns
@common_options
def payload(limit: int, patterns: tuple[str, ...]) -> None:
    """Show decoded rows of the payload table, and count all rows.

    The counts are by the state of the transaction.

    \b
    Example:
      janitor inspect payload --topic default:orders --config janitor.yaml
    """
    _show("payload", patterns, limit)


@command.command("meta")
@topic_patterns
@common_options
def meta(patterns: tuple[str, ...]) -> None:
    """Show topics with generation and ttl.

    The list includes deleted topics, whose generation is negative, and unreadable rows.

    \b
    Example:
      janitor inspect meta --config janitor.yaml
    """
    _show("metadata", patterns, 0)


@command.command("snapshot")
@row_limit
@common_options
def snapshot(limit: int) -> None:
    """Show the transaction snapshot that a run would read, of any age.

    \b
    Example:
      janitor inspect snapshot --snapshots data/tx.snapshot --leveldb data/messaging
    """
    current = session()
    with current.reading() as engine:
        figures = engine.snapshot_figures(limit)
    if current.as_json:
        render.print_json(figures)
        return
    _show_snapshot(figures)


def _show_snapshot(figures: dict[str, Any]) -> None:
    out = render.console()
    lists = ("invalid", "in_progress")
    for name, value in figures.items():
        if name not in lists and value is not None:
            time_text = f" ({render.moment(value)})" if name == "timestamp_ms" else ""
            out.print(f"{name}: {value}{time_text}")
    grid = render.grid(["transaction", "state", "began", "expires", "checkpoints"])
    for pointer in figures["invalid"]:
        grid.add_row(pointer, "invalid", render.moment(transaction_ms(int(pointer))))
    for entry in figures["in_progress"]:
        expires = render.moment(entry["expires_ms"])
        checkpoints = ", ".join(entry["checkpoints"])
        state = f"in progress, {entry['type']}" if entry["type"] else "in progress"
        grid.add_row(entry["write_pointer"], state, render.moment(entry["began_ms"]), expires, checkpoints)
    if grid.row_count:
        render.print_table(grid)


def _show(table: TableName, patterns: tuple[str, ...], limit: int) -> None:
    current = session()
    with current.reading() as engine:
        found = engine.inspect(table, patterns, limit)
    if current.as_json:
        render.print_json({"table": table, **found._asdict()})
        return
    out = render.console()
    if found.rows:
        columns = [name for name in {name: None for row in found.rows for name in row} if name not in _HIDDEN]
        grid = render.grid(columns)
        for row in found.rows:
            named = row if row["topic"] else {**row, "topic": row["key"]}
            grid.add_row(*("" if (value := named.get(name)) is None else str(value) for name in columns))
        render.print_table(grid)
    out.print(", ".join(f"{count:,} {name}" for name, count in sorted(found.counts.items())) or "no rows")
    if found.min_transaction_ms is not None:
        out.print(f"oldest transaction: {render.moment(found.min_transaction_ms)}")
