"""Line charts over time as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise

from tools.monitoring.units import ticks, written

#: The colors of the lines, which repeat after the last one.
COLORS = ("#56a64b", "#e08a00", "#5794f2", "#e0445a", "#a352cc", "#2fa7b0", "#fa6400", "#8f7fd6", "#8f9e3a", "#d966b3")
#: Pairs of a time in seconds and a number.
Points = Sequence[tuple[float, float]]

#: The margins of the chart, in pixels: left with the numbers, below with the times, above and right.
_LEFT, _BELOW, _ABOVE, _RIGHT = 78, 22, 8, 26
#: The maximum distance of joined points, as a multiple of the line's smallest distance.
_GAP = 2.5
#: The round distances between the times of the axis, in seconds, and the maximum number of distances.
_DISTANCES, _TIMES = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 86_400), 6


@dataclass(frozen=True, slots=True)
class Chart:
    """A coordinate system of times and numbers.

    Args:
        begin: the time at the left edge, in seconds since the epoch.
        end: the time at the right edge.
        unit: Grafana's name of the numbers' unit.
        marks: the numbers at the left axis, in ascending order.
        width: the width of the picture, in pixels.
        height: the height of the picture, in pixels.
    """

    begin: float
    end: float
    unit: str
    marks: Sequence[float]
    width: int
    height: int

    @classmethod
    def around(
        cls, lines: Sequence[Points], span: tuple[float, float], unit: str, shape: tuple[int, int], *, low: float | None
    ) -> Chart:
        """Return a chart that covers all points, and the number ``low``."""
        numbers = [number for line in lines for _, number in line]
        lowest, highest = min(numbers), max(numbers)
        marks = ticks(lowest if low is None else min(low, lowest), highest, unit)
        return cls(*span, unit, marks, *shape)

    def svg(self, lines: Sequence[Points]) -> str:
        """Return the chart as SVG."""
        inside = [*self._numbers(), *self._times()]
        for at, line in enumerate(lines):
            inside += self._drawn(line, COLORS[at % len(COLORS)])
        return f'<svg width="{self.width}" height="{self.height}">{"".join(inside)}</svg>'

    def _x(self, time: float) -> float:
        part = (time - self.begin) / (self.end - self.begin)
        return round(_LEFT + part * (self.width - _LEFT - _RIGHT), 1)

    def _y(self, number: float) -> float:
        part = (number - self.marks[0]) / (self.marks[-1] - self.marks[0])
        return round(self.height - _BELOW - part * (self.height - _BELOW - _ABOVE), 1)

    def _numbers(self) -> Iterator[str]:
        for mark in self.marks:
            y = self._y(mark)
            yield f'<path class="grid" d="M{_LEFT} {y}H{self.width - _RIGHT}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(written(mark, self.unit))}</text>'

    def _times(self) -> Iterator[str]:
        distance = next(every for every in _DISTANCES if every * _TIMES >= self.end - self.begin)
        shown = "%H:%M:%S" if distance % 60 else "%H:%M"
        time = -(-self.begin // distance) * distance
        while time <= self.end:
            x, text = self._x(time), datetime.fromtimestamp(time, UTC).strftime(shown)
            yield f'<path class="grid" d="M{x} {_ABOVE}V{self.height - _BELOW}"/>'
            yield f'<text x="{x}" y="{self.height - 6}" text-anchor="middle">{text}</text>'
            time += distance

    def _drawn(self, line: Points, color: str) -> Iterator[str]:
        floor = self._y(max(self.marks[0], 0.0))
        for piece in _pieces(line):
            path = " ".join(f"{self._x(time)},{self._y(number)}" for time, number in piece)
            first, last = self._x(piece[0][0]), self._x(piece[-1][0])
            yield f'<polygon points="{first},{floor} {path} {last},{floor}" fill="{color}"/>'
            yield f'<polyline points="{path}" stroke="{color}"/>'


def _pieces(line: Points) -> Iterator[Points]:
    """Yield the parts of a line without missing points."""
    usual = min((later - time for (time, _), (later, _) in pairwise(line)), default=0.0)
    begin = 0
    for at in range(1, len(line) + 1):
        if at == len(line) or line[at][0] - line[at - 1][0] > _GAP * usual:
            yield line[begin:at]
            begin = at
