"""A measured figure, and its line in the report.

If possible, a figure is a ratio or a count within one run, because machines differ. The line contains the bar, so that
a reader does not need this repository.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of a benchmark.

    Args:
        id: the figure's id, such as ``P1``.
        name: the measured quantity with its unit, in a few words.
        value: the measured value.
        at_least: the lower limit; None: no lower limit.
        at_most: the upper limit; None: no upper limit.
        details: the measurements behind the value (rows, seconds, megabytes), so that a reader can verify it.
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
    """Print a figure's line immediately, so that a later crash does not lose it."""
    print(figure.line(), flush=True)
