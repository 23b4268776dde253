"""Text as it may stand in a log or on a terminal: what clients made up, and spans of time in words.

A client calls itself what it likes. With a line end in it such a name would make up lines of a log, and with an escape
sequence it would control the terminal in which a table is read.
"""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


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
