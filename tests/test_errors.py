"""Errors: each says what happened and what to do next, and is caught by its family."""

from __future__ import annotations

import pickle

import pytest

from tms_core.errors import FormatError, PlanRefused, Refused, SnapshotError, TmsError, UnsupportedSnapshotVersion


def test_given_a_hint_when_an_error_is_printed_then_the_next_step_follows_what_happened() -> None:
    error = PlanRefused("The topic has moved.", "Make a new plan.")
    assert (error.message, error.hint) == ("The topic has moved.", "Make a new plan.")
    assert str(error) == "The topic has moved. Make a new plan."


def test_given_no_hint_when_an_error_is_printed_then_nothing_follows() -> None:
    assert str(TmsError("It failed.")) == "It failed."


def test_given_an_error_of_another_process_when_it_arrives_then_its_hint_came_with_it() -> None:
    error = pickle.loads(pickle.dumps(PlanRefused("It moved.", "Look again.")))  # noqa: S301
    assert str(error) == "It moved. Look again."


@pytest.mark.parametrize("family", [SnapshotError, FormatError, TmsError])
def test_given_an_error_when_raised_then_each_family_above_it_catches_it(family: type[TmsError]) -> None:
    with pytest.raises(family, match="version 9"):
        raise UnsupportedSnapshotVersion("version 9")


def test_given_a_refusal_when_a_store_fails_then_it_is_not_mistaken_for_one() -> None:
    assert not issubclass(SnapshotError, Refused)
