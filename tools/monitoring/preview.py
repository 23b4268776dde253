"""Draw the dashboard as HTML and SVG without Grafana, from the results of the panels' queries in Prometheus.

The documentation shows pictures of this page. It has the features of Grafana that the dashboard uses: grid positions,
units, thresholds, value mappings and legends. Grafana's look differs a little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any, NamedTuple

from tools.monitoring.chart import COLORS, Chart, Points
from tools.monitoring.dashboard import COLUMNS
from tools.monitoring.units import written

#: The width of a column and the height of a line in Grafana's grid, and the gap between panels, in pixels.
_COLUMN, _LINE, _GAP = 52, 38, 8
#: The margins of the grid, in pixels.
_LEFT, _TOP = 20, 52
#: The heights of a panel's title and of a legend's line, and the padding at the sides, in pixels.
_TITLE, _LEGEND, _SIDE = 32, 18, 12
#: The widths of a legend's letter and of its mark with gaps, in pixels, and the maximum number of legend lines.
_LETTER, _MARK, _MAX_LEGEND_LINES = 7, 34, 5
#: The background colors of stats with white text.
_BACKGROUNDS = {"green": "#3d9142", "orange": "#d9730d", "red": "#cf2f45"}

_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f5; --panel: #fff; --edge: #dfe0e2; --text: #24292e; --soft: #5f656e;
  --grid: #ebecee; }
@media (prefers-color-scheme: dark) { :root { --page: #111217; --panel: #181b1f; --edge: #2b2e34; --text: #d5d7dc;
  --soft: #9a9da6; --grid: #26292f; } }
body { margin: 0; position: relative; background: var(--page); color: var(--text);
  font: 12px/18px Inter, "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
h1, h2 { position: absolute; margin: 0; left: 20px; font-weight: 500; }
h1 { top: 14px; font-size: 18px; line-height: 24px; }
h2 { font-size: 15px; line-height: 32px; }
section { position: absolute; box-sizing: border-box; overflow: hidden; border: 1px solid var(--edge);
  border-radius: 3px; background: var(--panel); }
h3 { margin: 0; padding: 4px 12px; font-size: 13px; line-height: 24px; font-weight: 500; white-space: nowrap; }
.stat { color: #fff; border-color: transparent; }
.stat p { margin: 0; font-size: 38px; line-height: 88px; text-align: center; font-weight: 500; }
.none p { margin: 0; text-align: center; color: var(--soft); font-size: 14px; padding-top: 30px; }
.legend { padding: 0 12px; }
.legend span { display: inline-block; margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin: 0 6px 3px 0; }
svg { display: block; }
svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--grid); }
svg polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
svg polygon { fill-opacity: .1; }
"""


class Line(NamedTuple):
    """A line of a panel: its name in the legend, and its points."""

    name: str
    points: Points


@dataclass(frozen=True, slots=True)
class Source:
    """The data source of the panels.

    Args:
        ask: returns Prometheus' result of a range query over the span: each series has its labels as ``metric``, and
            pairs of a time and a number as ``values``.
        span: the start and the end of the range, in seconds since the epoch.
        values: the value of each of the dashboard's variables, such as ``{"$job": "janitor"}``.
    """

    ask: Callable[[str], Sequence[Mapping[str, Any]]]
    span: tuple[float, float]
    values: Mapping[str, str]

    def lines(self, panel: Mapping[str, Any]) -> list[Line]:
        """Return the results of a panel's queries, without missing numbers."""
        found = []
        for target in panel["targets"]:
            for series in self.ask(chosen(target["expr"], self.values)):
                points = [(float(time), float(number)) for time, number in series["values"]]
                name = _named(target["legendFormat"], series["metric"])
                found.append(Line(name, [point for point in points if isfinite(point[1])]))
        return [line for line in found if line.points]


def chosen(expression: str, values: Mapping[str, str]) -> str:
    """Return a panel's expression as Grafana sends it.

    Args:
        expression: the expression with the dashboard's variables.
        values: the value of each variable.
    """
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def page(document: Mapping[str, Any], source: Source, rows: Collection[str]) -> str:
    """Return rows of a dashboard as an HTML page, which follows the browser's color scheme.

    Args:
        document: the dashboard.
        source: the data source of its panels.
        rows: the titles of the rows to draw.

    Raises:
        KeyError: the unit of a panel is not supported.
        ValueError: the type of a panel is not supported.
    """
    drawn: list[str] = []
    top = _TOP
    for row, panels in _rows(document):
        if row["title"] in rows:
            drawn.append(f'<h2 style="top:{top}px">{escape(row["title"])}</h2>')
            # Skipped rows must not leave a gap.
            shift = top - row["gridPos"]["y"] * _LINE
            drawn += [_section(panel, source, shift) for panel in panels]
            top = shift + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) * _LINE
    size = f"width:{2 * _LEFT + COLUMNS * _COLUMN - _GAP}px;height:{top + _GAP}px"
    title = escape(document["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<body style="{size}"><h1>{title}</h1>{"".join(drawn)}</body></html>\n'
    )


def _rows(document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Return each row with its panels, which a folded row contains, and which follow an open row."""
    found: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
    for panel in document["panels"]:
        if panel["type"] == "row":
            found.append((panel, list(panel["panels"])))
        else:
            found[-1][1].append(panel)
    return found


def _named(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a line: the legend with label names in braces replaced by the labels' values."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), legend)


def _section(panel: Mapping[str, Any], source: Source, shift: int) -> str:
    """Return the HTML of a panel at its grid position, moved down by ``shift`` pixels."""
    place, lines = panel["gridPos"], source.lines(panel)
    width, height = place["w"] * _COLUMN - _GAP, place["h"] * _LINE - _GAP
    style = f"left:{_LEFT + place['x'] * _COLUMN}px;top:{shift + place['y'] * _LINE}px"
    style += f";width:{width}px;height:{height}px"
    if not lines:
        kind, inside = "none", "<p>No data</p>"
    elif panel["type"] == "stat":
        kind, (inside, color) = "stat", _stat(panel["fieldConfig"]["defaults"], lines[0])
        style += f";background:{color}"
    elif panel["type"] == "timeseries":
        kind, inside = "chart", _chart(panel, lines, source.span, (width, height))
    else:
        raise ValueError(f"a {panel['type']} cannot be drawn: {panel['title']}")
    return f'<section class="{kind}" style="{style}"><h3>{escape(panel["title"])}</h3>{inside}</section>'


def _stat(defaults: Mapping[str, Any], line: Line) -> tuple[str, str]:
    """Return the last value or its mapped text, and the color of its threshold."""
    _, number = line.points[-1]
    words = {value: word["text"] for mapping in defaults["mappings"] for value, word in mapping["options"].items()}
    steps = defaults["thresholds"]["steps"]
    *_, color = (step["color"] for step in steps if step["value"] is None or number >= step["value"])
    text = words.get(f"{number:g}") or written(number, defaults["unit"])
    return f"<p>{escape(text)}</p>", _BACKGROUNDS[color]


def _chart(panel: Mapping[str, Any], lines: Sequence[Line], span: tuple[float, float], shape: tuple[int, int]) -> str:
    """Return the chart of all lines, with the legend below."""
    width, height = shape
    left = width - 2, height - _TITLE - _LEGEND * _legends(lines, width - 2 * _SIDE) - _SIDE
    defaults = panel["fieldConfig"]["defaults"]
    points = [line.points for line in lines]
    chart = Chart.around(points, span, defaults["unit"], left, low=defaults.get("min"))
    names = "".join(
        f'<span><i style="background:{COLORS[at % len(COLORS)]}"></i>{escape(line.name)}</span>'
        for at, line in enumerate(lines)
    )
    return f'{chart.svg(points)}<div class="legend">{names}</div>'


def _legends(lines: Sequence[Line], width: int) -> int:
    """Return the number of lines of a chart's legend."""
    count, taken = 1, 0
    for line in lines:
        wanted = len(line.name) * _LETTER + _MARK
        if taken and taken + wanted > width:
            count, taken = count + 1, 0
        taken += wanted
    return min(_MAX_LEGEND_LINES, count)
