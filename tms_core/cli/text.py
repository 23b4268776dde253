"""Answers as a person reads them: cells under each other, times and spans in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from tms_core.logs.printable import duration

__all__ = ["columns", "duration", "moment"]


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines, their cells under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def moment(milliseconds: int) -> str:
    """A time in UTC; the number itself where no calendar reaches."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
