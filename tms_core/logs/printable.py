"""Text for logs and terminals: names chosen by clients, times, tables, and commands to type.

A client may choose any name. A name with a line feed would forge lines of a log, and a name with an escape sequence
would control the operator's terminal.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

#: Commands as errors, guards and the log name them, without the options that led there: one that is all of a line or
#: stands behind a colon or a wide space, and those that are complete as they are.
_BARE = re.compile(
    r"""^(?:janitor|tms)\ [a-z][^\n.,;]*(?=$)
    |   (?:(?<=[:\ ]\ )(?:janitor|tms)\ [a-z][^\n]*?
        |janitor\ (?:plan|adopt|history|status)|(?<=\()tms\ serve|tms\ admin\ create-tables)
        (?=$|[.,;:)]+(?:\s|$)|\ \(|\ (?:says|shows)\b)""",
    re.MULTILINE | re.VERBOSE,
)
#: The options that lead to a store or a server, by the words with which a command begins.
_STORE, _SERVER = ("--config", "--leveldb", "--hbase"), ("--config", "--server", "--token-file", "--ca-file")
_LEADING = (
    ("janitor", (*_STORE, "--snapshots")),
    ("tms serve", _STORE),
    ("tms admin", ("--config",)),
    ("tms tx", ("--config", "--tx-server")),
    ("tms", _SERVER),
)

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def printable(text: str) -> str:
    r"""Return a text with all unprintable characters escaped as in Python: a line feed becomes ``\n``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def duration(milliseconds: int, *, rough: bool = False) -> str:
    """Return a span of time, back or ahead, in its two largest units: ``2 d 18 h``.

    Args:
        rough: without the smaller one where there are ten or more of the larger.
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
    """Return a time in UTC; the number itself where no calendar reaches."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def complete(text: str, arguments: str) -> str:
    """Return a text in which each command that it names has the options that lead to the same store or server.

    Args:
        arguments: options as they were typed, each with its value; of these a command gets those that it takes.
    """
    return _BARE.sub(lambda found: complete_command(found[0], arguments), text) if arguments else text


def complete_command(command: str, arguments: str) -> str:
    """Return a command with the options that lead to the same store or server.

    Args:
        arguments: as of :func:`complete`.
    """
    words = shlex.split(arguments)
    takes = next(options for begin, options in _LEADING if command.startswith(begin))
    missing = [(name, value) for name, value in zip(words[::2], words[1::2], strict=True) if name in takes]
    return " ".join([command, *(f"{name} {shlex.quote(value)}" for name, value in missing if name not in command)])


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
