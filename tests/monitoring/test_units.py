"""Numbers of the preview: written as Grafana writes them, and round at an axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.monitoring.panels import ROWS
from tools.monitoring.units import ticks, written

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
