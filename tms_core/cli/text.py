"""Answers as a person reads them: cells under each other, times and spans in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tms_core.logs.printable import duration, moment

__all__ = ["columns", "duration", "moment"]


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines, their cells under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
