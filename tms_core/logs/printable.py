"""Text for logs and terminals: names chosen by clients, times, tables, and commands to type.

A client may choose any name. A line feed in a name would forge a line of the log, and an escape sequence would control
the operator's terminal.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

#: Commands in errors, findings of guards and logs, without options for store and server: a whole line, the text after a
#: colon or two spaces, or a command without arguments.
_COMMAND = re.compile(
    r"""^(?:janitor|tms)\ [a-z][^\n.,;]*(?=$)
    |   (?:(?<=[:\ ]\ )(?:janitor|tms)\ [a-z][^\n]*?
        |janitor\ (?:plan|adopt|history|status)|(?<=\()tms\ serve|tms\ admin\ create-tables)
        (?=$|[.,;:)]+(?:\s|$)|\ \(|\ (?:says|shows)\b)""",
    re.MULTILINE | re.VERBOSE,
)
#: The options that select a store or a server, by the first words of the commands that accept them.
_STORE, _SERVER = ("--config", "--leveldb", "--hbase"), ("--config", "--server", "--token-file", "--ca-file")
_ACCEPTED_OPTIONS = (
    ("janitor", (*_STORE, "--snapshots")),
    ("tms serve", _STORE),
    ("tms admin", ("--config",)),
    ("tms tx", ("--config", "--tx-server")),
    ("tms", _SERVER),
)

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def printable(text: str) -> str:
    r"""Return a text with unprintable characters escaped as in Python: a line feed becomes ``\n``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def duration(milliseconds: int, *, rough: bool = False) -> str:
    """Return the absolute value of a duration in its two largest units: ``2 d 18 h``.

    Args:
        rough: omit the smaller unit after ten or more of the larger unit.
    """
    parts, rest = [], abs(milliseconds) // 1000
    for unit, seconds in _UNITS:
        count, rest = divmod(rest, seconds)
        if count:
            parts.append(f"{count} {unit}")
        if rough and count >= 10:
            break
    return " ".join(parts[:2]) or "0 s"


def moment(milliseconds: int) -> str:
    """Return a time in UTC, or the number of milliseconds if the calendar does not have that time."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def complete(text: str, arguments: str) -> str:
    """Return a text with options for store and server added to each command in it.

    Args:
        arguments: the typed options with their values; each command gets the options that it accepts.
    """
    return _COMMAND.sub(lambda found: complete_command(found[0], arguments), text) if arguments else text


def complete_command(command: str, arguments: str) -> str:
    """Return a command with the options for store and server that it accepts.

    Args:
        arguments: as of :func:`complete`.
    """
    words = shlex.split(arguments)
    accepted = next(options for start, options in _ACCEPTED_OPTIONS if command.startswith(start))
    missing = [(name, value) for name, value in zip(words[::2], words[1::2], strict=True) if name in accepted]
    return " ".join([command, *(f"{name} {shlex.quote(value)}" for name, value in missing if name not in command)])


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
