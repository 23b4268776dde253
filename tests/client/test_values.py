"""Options of the client: printable and comparable values that reject invalid numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tms_core.client import Buffer, ConfigurationError, Limits, Retry, Timeouts, WhenFull

VALUES: list[type[Any]] = [Timeouts, Limits, Retry, Buffer]


@pytest.mark.parametrize("kind", VALUES)
def test_values_with_equal_numbers_are_equal_printable_and_frozen(kind: type[Any]) -> None:
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
    assert eval(repr(kind()).replace("<WhenFull.BLOCK: 'block'>", "WhenFull.BLOCK")) == kind()  # noqa: S307
    with pytest.raises(FrozenInstanceError):
        setattr(kind(), next(iter(kind.__dataclass_fields__)), 1)


@pytest.mark.parametrize("number", [0, -1, float("nan")])
@pytest.mark.parametrize("kind", VALUES)
def test_value_not_above_0_is_rejected_with_its_name(kind: type[Any], number: float) -> None:
    name = next(iter(kind.__dataclass_fields__))
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.{name} is {number}"):
        kind(**{name: number})


def test_every_numeric_field_has_a_unit_in_its_name() -> None:
    units = ("_seconds", "_bytes", "connections", "messages", "attempts", "factor")
    fields = [name for kind in VALUES for name in kind.__dataclass_fields__ if name not in {"when_full", "retry"}]
    assert [name for name in fields if not name.endswith(units)] == []


@given(st.integers(1, 10_000), st.randoms(use_true_random=False))
def test_retry_pause_grows_to_its_limit_with_jitter_up_to_half(failures: int, random: Random) -> None:
    retry = Retry(first_seconds=0.5, factor=2, longest_seconds=60)
    whole = min(60, 0.5 * 2 ** min(failures - 1, 60))
    assert whole / 2 <= retry.pause_seconds(failures, random) <= whole


def test_pause_that_a_server_requests_is_a_minute_at_most() -> None:
    assert [Retry().pause_seconds(1, Random(), seconds) for seconds in (7, 3600)] == [7, 60]


def test_when_full_values_are_readable_words() -> None:
    assert [choice.value for choice in WhenFull] == ["block", "drop newest", "drop oldest", "raise"]
