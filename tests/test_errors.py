"""Errors: each says what happened and what to do next, and is caught by its family."""

from __future__ import annotations

import pickle

import pytest

from tms_core.errors import (
    Conflict,
    FormatError,
    PlanRefused,
    Refused,
    SnapshotError,
    TmsError,
    UnsupportedSnapshotVersion,
)


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


def test_given_any_error_when_it_was_pickled_then_it_is_as_it_was() -> None:
    kinds: list[type[TmsError]] = [TmsError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert Conflict in kinds
    for kind in kinds:
        error = kind.__new__(kind, "It failed.")
        error.__dict__ |= {"message": "It failed.", "hint": "Look.", "transaction_id": 7, "key": "a", "client": "b"}
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            found = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301
            assert (type(found), found.args, vars(found)) == (kind, ("It failed.",), vars(error))


def test_given_a_conflict_when_it_was_pickled_then_it_says_who_and_what() -> None:
    found = pickle.loads(pickle.dumps(Conflict("It conflicts.", 7, "key", "me")))  # noqa: S301
    assert (str(found), found.transaction_id, found.key, found.client) == ("It conflicts.", 7, "key", "me")
