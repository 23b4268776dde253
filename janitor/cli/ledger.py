"""``janitor ledger``: deleted key ranges by topic, with their rule, policy and run."""

from __future__ import annotations

from typing import Any

import click

from janitor.cli import render
from janitor.cli.options import common_options, session, topic_patterns
from janitor.cli.state import explain_start_times, open_state, start_times, unknown_run
from janitor.rules.policy import Rule
from janitor.state.base import LedgerEntry
from janitor.state.values import Pointer, pack
from tms_core.cli.help import Command
from tms_core.logs.printable import duration
from tms_core.rowkey import GENERATION_BYTES
from tms_core.transaction.model import transaction_ms

_COLUMNS = ("topic", "gen", "table", "rule", "rows", "from", "to", "policy", "snapshot", "run")

#: The parts of a key after its generation: name, bytes, whether it is signed.
_PARTS = {
    "message": (("publish_ms", 8, True), ("sequence", 2, False)),
    "payload": (("pointer", 8, True), ("write_ms", 8, True), ("sequence", 2, False)),
}


@click.command("ledger", cls=Command)
@topic_patterns
@click.option("--run", "run_id", metavar="RUN_ID", help="Only ranges that this run deleted.")
@click.option("--limit", type=click.IntRange(1), metavar="N", default=20, show_default=True, help="Entries to show.")
@common_options
def command(patterns: tuple[str, ...], run_id: str | None, limit: int) -> None:
    """Show which key ranges were deleted, and by which rule.

    The newest entry is first. The command reads the janitor's state, not the store, so it works while a
    daemon runs. The range of an entry may contain rows that the rule did not delete.

    \b
    Examples:
      janitor ledger --topic default:orders --config janitor.yaml
      janitor ledger --run 1700000000000-0a1b2c3d --limit 1000 --config janitor.yaml
    """
    current = session()
    with open_state(current) as state:
        entries = state.ledger(limit, run_id=run_id, patterns=patterns) if state else []
        if run_id is not None and not entries and not (state and (state.run(run_id) or state.ledger(1, run_id=run_id))):
            raise unknown_run(current, run_id)
        if current.as_json:
            render.print_json({**start_times(state), "entries": [_entry_json(entry) for entry in entries]})
            return
        lines = explain_start_times(current, state)
    out = render.console()
    for line in lines:
        out.print(line)
    if not entries:
        out.print("no entries")
        return
    table = render.grid(_COLUMNS, right=(1, 4))
    for entry in entries:
        table.add_row(*cells(entry))
    render.print_table(table)


def parts(entry: LedgerEntry, key: bytes) -> dict[str, int]:
    """Return the numbers in a key of an entry, by name; a short key has only the first numbers."""
    rest = key[len(entry.topic.prefix) :]
    found = {}
    for name, size, signed in (("generation", GENERATION_BYTES, True), *_PARTS[entry.table]):
        if len(rest) < size:
            break
        number = int.from_bytes(rest[:size], "big", signed=signed)
        found[name] = Pointer(number) if name == "pointer" else number
        rest = rest[size:]
    return found


def cells(entry: LedgerEntry) -> list[str]:
    """Return an entry as a row of a table."""
    rows = "unknown" if entry.rows is None else f"{entry.rows:,}"
    snapshot = "none" if entry.snapshot_timestamp_ms is None else render.moment(entry.snapshot_timestamp_ms)
    ends = [_place(entry, key) for key in (entry.start, entry.stop)]
    rule = entry.rule.replace("_", " ")
    return [
        str(entry.topic),
        str(entry.generation),
        entry.table,
        rule,
        rows,
        *ends,
        policy(entry),
        snapshot,
        entry.run_id,
    ]


def policy(entry: LedgerEntry) -> str:
    """Return the policy by which the rows of an entry were deleted, as text."""
    if entry.rule == Rule.EXPIRED:
        return f"ttl {duration(entry.ttl_seconds * 1000)}, cutoff {render.moment(entry.cutoff_ms)}"
    if entry.rule == Rule.PROCESSED:
        return "processed by all consumers"
    return f"generation {entry.metadata_generation}" if entry.rule == Rule.OLD_GENERATION else ""


def _place(entry: LedgerEntry, key: bytes) -> str:
    """Return the position of a key in its generation as text."""
    found = parts(entry, key)
    if found.get("generation") != entry.generation:
        return "the end"
    if "publish_ms" in found:
        number = f" #{found['sequence']}" if "sequence" in found else ""
        return f"{render.moment(found['publish_ms'])}{number}"
    if "pointer" in found:
        return f"transaction of {render.moment(transaction_ms(found['pointer']))}"
    return "the beginning"


def _entry_json(entry: LedgerEntry) -> dict[str, Any]:
    return {**pack(entry), "from": parts(entry, entry.start), "to": parts(entry, entry.stop)}
