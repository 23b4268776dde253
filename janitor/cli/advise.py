"""``janitor advise``: table settings that make sweeps cheap, beside those set now."""

from __future__ import annotations

from typing import Any

import click

from janitor.cli import render
from janitor.cli.context import session
from janitor.cli.options import common_options
from tms_core.tables.hbase_advice import Advice, TableSettings, advise, shell_lines

_NOTHING = "nothing to set: a LevelDB store has no such settings, and a sweep compacts what it has emptied by itself"
_UNKNOWN = (
    "what is not known stands in attributes that only Thrift 2 reads: set storage.hbase.thrift2, or look with describe "
    "in the HBase shell"
)


@click.command("advise")
@common_options
def command() -> None:
    """Show which table settings make sweeps cheap.

    Beside those set now, with what to type in the HBase shell. Changes nothing.

    \b
    Example:
      janitor advise --config janitor.yaml
    """
    current = session()
    tables = current.place.table_settings()
    if current.as_json:
        render.print_json({"tables": [_to_json(table) for table in tables]})
        return
    out = render.console()
    if not tables:
        out.print(_NOTHING)
        return
    for table in tables:
        _show(table)
    for setting, why in {advice.setting: advice.why for table in tables for advice in _wrong(table)}.items():
        out.print(f"{setting}: {why}")
    commands = [line for table in tables for line in shell_lines(table)]
    out.print(render.styled("in the HBase shell:" if commands else "nothing to change", "bold"))
    for line in commands:
        out.print(f"  {line}")
    if not all(table.complete for table in tables):
        out.print(_UNKNOWN)


def _show(table: TableSettings) -> None:
    shown = render.grid([table.name, "now", "advised"])
    for advice in advise(table):
        shown.add_row(advice.setting, _now(advice), _advised(advice))
    render.print_table(shown)


def _wrong(table: TableSettings) -> list[Advice]:
    return [advice for advice in advise(table) if advice.fits is False]


def _now(advice: Advice) -> str:
    return "not known" if advice.now is None else _short(advice.now) or "not set"


def _advised(advice: Advice) -> Any:
    if advice.fits:
        return render.styled("ok", "green")
    return render.styled(_short(advice.advised), "yellow" if advice.fits is None else "bold red")


def _short(value: str) -> str:
    """A value without its Java package."""
    return value.rpartition(".")[2]


def _to_json(table: TableSettings) -> dict[str, Any]:
    return {
        "table": table.name,
        "regions": len(table.starts),
        "buckets": table.buckets,
        "complete": table.complete,
        "settings": [advice._asdict() for advice in advise(table)],
        "shell": shell_lines(table),
    }
