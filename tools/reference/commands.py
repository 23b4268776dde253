"""Write the help of all commands into their reference pages: ``python -m tools.reference.commands``.

A page has a section for each command. The generated block of a section is its help; notes and examples after the block
are written by hand and stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from janitor.cli.main import cli as janitor
from tms_core.cli.main import cli as tms

FOLDER = Path(__file__).parents[2] / "docs/reference"
PROGRAMS = {"janitor": janitor, "tms": tms}

_START, _END = "<!-- help: made by python -m tools.reference.commands -->", "<!-- /help -->"
_BLOCK = re.compile(rf"{_START}.*?{_END}\n*", re.DOTALL)
_OPTIONS = "\n\nGlobal options:\n"
#: The global options of a command that has only ``--help``.
_HELP_ONLY = re.compile(r"  -h, --help +Show this message and exit\.")


def page(name: str) -> str:
    """Return the reference page of a program with its current help.

    A new command gets a section at the bottom. Sections without a command stay unchanged.
    """
    head, *sections = re.split(r"^## ", (FOLDER / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    notes = {title: without_help(text).strip("\n") for title, _, text in (each.partition("\n") for each in sections)}
    helps = dict(_helps(PROGRAMS[name], name, None))
    for path in helps:
        notes.setdefault(path, "")
    shown: dict[str, str] = {}
    parts = [head.strip("\n")]
    for title, note in notes.items():
        block = [_block(title, helps[title], shown)] if title in helps else []
        parts.append("\n\n".join([f"## {title}", *block, *([note] if note else [])]))
    return "\n\n".join(parts) + "\n"


def without_help(text: str) -> str:
    """Return a page or a section without its generated blocks."""
    return _BLOCK.sub("", text)


def _block(path: str, text: str, shown: dict[str, str]) -> str:
    """Return the generated block of a command; it prints the same global options as an earlier block by reference."""
    body, _, options = text.partition(_OPTIONS)
    first = shown.setdefault(options, path)
    if options and first == path:
        body += _OPTIONS + options
    elif options and not _HELP_ONLY.fullmatch(options):
        body += f"\n\nGlobal options: as for {first}"
    return f"{_START}\n\n```text\n{body}\n```\n\n{_END}"


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Yield the path of a command and of all commands below it, each with its help.

    A subgroup gets no section, because its commands get theirs.
    """
    # The width of the terminal must not change the page.
    context = command.make_context(name, [], parent, terminal_width=100, max_content_width=100, resilient_parsing=True)
    if parent is None or not isinstance(command, click.Group):
        yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from _helps(found, each, context)


def main() -> None:
    """Write the pages."""
    for name in PROGRAMS:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
