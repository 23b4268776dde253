"""One measured figure, and the line it is reported in.

A figure is a ratio or a count of one run wherever it can be, because machines differ: the bar is part of the figure,
so that a line can be read without this repository at hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """What one benchmark found out.

    Args:
        id: the figure's id, such as ``P1``.
        name: what was measured, in a few words, with its unit.
        value: what came out.
        at_least: the smallest value that is good enough, if there is one.
        at_most: the largest value that is good enough, if there is one.
        details: what the value was made of (rows, seconds, megabytes), so that it can be checked.
    """

    id: str
    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    details: dict[str, Any] | None = None

    @property
    def bar(self) -> str:
        """Return the bar as operators write it."""
        bars = [("≥", self.at_least), ("≤", self.at_most)]
        return ", ".join(f"{sign} {limit:g}" for sign, limit in bars if limit is not None)

    @property
    def met(self) -> bool:
        """Return whether the value meets the bar."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def line(self) -> str:
        """Return the figure as one line of JSON."""
        fields = {"id": self.id, "figure": self.name, "value": self.value, "bar": self.bar, "met": self.met}
        return json.dumps(fields | (self.details or {}), ensure_ascii=False)


def report(figure: Figure) -> None:
    """Print a figure's line at once, so that a later crash does not take it along."""
    print(figure.line(), flush=True)
