"""Write the reference of all commands from click: ``python -m tools.reference.commands``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from janitor.cli.main import cli as janitor
from tms_core.cli.main import cli as tms

FOLDER = Path(__file__).parents[2] / "docs/reference"
PROGRAMS = {"janitor": janitor, "tms": tms}

_HEAD = """\
# Options of {name}

This page shows the help of each command of `{name}`. [Commands](commands.md) has examples with their output.

`python -m tools.reference.commands` generates this page. To change it, change the commands.
"""


def page(name: str) -> str:
    """Return the page of a program."""
    parts = [f"\n## {path}\n\n```text\n{text}\n```\n" for path, text in _helps(PROGRAMS[name], name, None)]
    return _HEAD.format(name=name) + "".join(parts)


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Yield the path of a command and of all below it, each with its help."""
    # The width of the terminal must not change the page.
    context = command.make_context(name, [], parent, terminal_width=100, max_content_width=100, resilient_parsing=True)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from _helps(found, each, context)


def main() -> None:
    """Write the pages."""
    for name in PROGRAMS:
        (FOLDER / f"options-{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
