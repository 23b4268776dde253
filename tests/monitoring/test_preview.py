"""The preview of the dashboard without Grafana: positions and queries of panels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.monitoring.chart import COLORS, Chart
from tools.monitoring.dashboard import dashboard
from tools.monitoring.panels import ROWS
from tools.monitoring.preview import Source, chosen, page
from tools.monitoring.units import ticks, written

BEGIN = 1_700_000_000
VALUES = {"$namespace": "apps", "$job": "janitor", "$__rate_interval": "1m"}
OPEN = {row["title"]: row for row in dashboard()["panels"] if row["type"] == "row" and not row["collapsed"]}


def series(*numbers: float | str, **labels: str) -> dict[str, Any]:
    """Return a series as Prometheus sends it: a number for each second."""
    return {"metric": labels, "values": [[BEGIN + at, str(number)] for at, number in enumerate(numbers)]}


def source(ask: Callable[[str], Sequence[Mapping[str, Any]]]) -> Source:
    return Source(ask, (BEGIN, BEGIN + 60), VALUES)


def panel_html(html: str, title: str) -> str:
    [found] = re.findall(f"<section[^>]*><h3>{re.escape(title)}</h3>.*?</section>", html)
    return str(found)


def test_page_replaces_every_variable_in_its_queries() -> None:
    queries: list[str] = []

    def ask(expression: str) -> list[dict[str, Any]]:
        queries.append(expression)
        return []

    page(dashboard(), source(ask), list(OPEN))
    assert [expression for expression in queries if "$" in expression] == []
    assert 'max(tms_janitor_paused{namespace=~"apps",job=~"janitor"})' in queries
    assert chosen("rate(x[$__rate_interval])", VALUES) == "rate(x[1m])"


def test_page_without_answers_shows_every_panel_with_no_data() -> None:
    html = page(dashboard(), source(lambda _: []), ["Health", "Topics and consumers"])
    assert html.count("<section") == html.count("<p>No data</p>") == 6 + 8
    assert re.findall("<h2[^>]*>([^<]*)<", html) == ["Health", "Topics and consumers"]


def test_page_with_omitted_rows_has_no_gap() -> None:
    alone = page(dashboard(), source(lambda _: []), ["Topics and consumers"])
    first = page(dashboard(), source(lambda _: []), ["Health"])
    assert re.findall(r"<h2 style=\"top:(\d+)px", alone) == re.findall(r"<h2 style=\"top:(\d+)px", first)


@pytest.mark.parametrize(("waiting", "color"), [("0", "#3d9142"), ("3022", "#d9730d")])
def test_page_colors_a_number_by_its_threshold(waiting: str, color: str) -> None:
    html = page(dashboard(), source(lambda _: [series(7, waiting)]), ["Health"])
    panel = panel_html(html, "Overdue rows")
    assert f"background:{color}" in panel
    assert ("<p>3.02 K</p>" in panel) == (waiting == "3022")


def test_page_shows_the_mapped_text_of_a_value() -> None:
    html = page(dashboard(), source(lambda _: [series(0, 1)]), ["Health"])
    assert "<p>yes</p>" in panel_html(html, "Paused")


def test_page_draws_each_series_with_name_color_and_unit() -> None:
    lines = [series(1, 1500, table="message", rule="<expired>"), series(0, "NaN", 0, table="payload", rule="expired")]
    panel = panel_html(page(dashboard(), source(lambda _: lines), ["Runs"]), "Rows deleted")
    for name, color in zip(("message &lt;expired&gt;", "payload expired"), COLORS, strict=False):
        assert f'<i style="background:{color}"></i>{name}</span>' in panel
        assert f'stroke="{color}"' in panel
    assert "1.5 K rows/s" in panel
    assert "nan" not in panel.lower()


def test_chart_of_a_series_with_a_gap_breaks_the_line() -> None:
    points = [(BEGIN + at, 5.0) for at in (0, 1, 2, 30, 31)]
    chart = Chart.around([points], (BEGIN, BEGIN + 60), "s", (400, 200), low=0)
    assert chart.svg([points]).count("<polyline") == 2
    # The largest and the smallest number are the ends of the axis, and the highest is near the top.
    assert (chart.marks[0], chart.marks[-1]) == (0, 5)
    assert ">22:13:30<" in chart.svg([points])


def test_page_with_data_for_an_unsupported_panel_type_raises() -> None:
    with pytest.raises(ValueError, match=r"table .*Versions"):
        page(dashboard(), source(lambda _: [series(1)]), ["Process"])


UNITS = sorted({panel.unit for row in ROWS for panel in row.panels})
NUMBERS = st.floats(-1e9, 1e9).filter(lambda number: number == 0 or abs(number) > 1e-6)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"),
        (0.0021, "s", "2.1 ms"),
        (59.94, "s", "59.9 s"),
        (-90, "s", "-1.5 mins"),
        (3600, "s", "1 hour"),
        (86_400 * 1116, "s", "1116 days"),
        (0.253, "percentunit", "25.3%"),
        (1023, "bytes", "1023 B"),
        (1024 * 1024 * 4.5, "bytes", "4.5 MiB"),
        (150_000, "Bps", "150 kB/s"),
        (1_600, "rowsps", "1.6 K rows/s"),
        (8, "ops", "8 ops/s"),
        (3_022, "short", "3.02 K"),
        (5e15, "short", "5000 Tri"),
    ],
)
def test_written_number_is_short_with_a_unit_of_its_size(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


@given(NUMBERS, NUMBERS, st.sampled_from(UNITS))
def test_ticks_of_two_numbers_are_a_few_even_marks(one: float, other: float, unit: str) -> None:
    low, high = sorted((one, other))
    marks = ticks(low, high, unit)
    step = marks[1] - marks[0]
    assert marks[0] <= low + step * 1e-6
    assert marks[-1] >= high - step * 1e-6
    assert 2 <= len(marks) <= 8
    assert [later - mark for mark, later in pairwise(marks)] == pytest.approx([step] * (len(marks) - 1), rel=1e-3)
