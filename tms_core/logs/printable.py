"""Text as it may stand in a log or on a terminal: what clients made up, times, commands to be typed, log lines.

A client calls itself what it likes. With a line end in it such a name would make up lines of a log, and with an escape
sequence it would control the terminal in which a table is read.

Logs are sentences for a person at a terminal, and one JSON object a line for everything else. They go to standard
error, because standard output belongs to what a command was asked for.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, TextIO

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
    ("tms", _SERVER),
)

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
LogFormat = Literal["auto", "text", "json"]

#: Loggers of ours; what libraries say is of interest from warnings on.
OURS = ("janitor", "tms_core")


def printable(text: str) -> str:
    r"""The text with everything that does not show escaped as Python writes it: a line end is ``\n``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def duration(milliseconds: int, *, rough: bool = False) -> str:
    """A span of time, back or ahead, in its two largest units: ``2 d 18 h``.

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
    """A time in UTC; the number itself where no calendar reaches."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def complete(text: str, arguments: str) -> str:
    """A text in which each command that it names has the options that lead to the same store or server.

    Args:
        arguments: options as they were typed, each with its value; of these a command gets those that it takes.
    """
    words = shlex.split(arguments)

    def completed(found: re.Match[str]) -> str:
        command = found[0]
        takes = next(options for begin, options in _LEADING if command.startswith(begin))
        missing = [(name, value) for name, value in zip(words[::2], words[1::2], strict=True) if name in takes]
        return " ".join([command, *(f"{name} {shlex.quote(value)}" for name, value in missing if name not in command)])

    return _BARE.sub(completed, text) if words else text


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines, their cells under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


class JsonFormatter(logging.Formatter):
    """One JSON object: ``time`` (UTC), ``level``, ``logger``, ``message``, the record's ``fields``, ``error``."""

    def __init__(self, arguments: str) -> None:
        super().__init__()
        self._arguments = arguments

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": complete(record.getMessage(), self._arguments),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """A sentence behind its level, and behind its time (UTC) too if it is to be."""

    def __init__(self, arguments: str, *, timed: bool) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._arguments = arguments
        self._timed = timed

    def format(self, record: logging.LogRecord) -> str:
        text = complete(super().format(record), self._arguments)
        return f"{_moment(record)} {text}" if self._timed else text


def _moment(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


def configure(kind: LogFormat, stream: TextIO, arguments: str = "") -> None:
    """Send all logs to one stream.

    Args:
        kind: ``auto`` is text on a terminal and JSON elsewhere; text elsewhere begins with the time.
        arguments: the options that commands named in the logs get (:func:`~complete`).
    """
    as_text = kind == "text" or (kind == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    text = TextFormatter(arguments, timed=not stream.isatty())
    handler.setFormatter(text if as_text else JsonFormatter(arguments))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
