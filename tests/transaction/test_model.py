"""Visibility: the results of Tephra's classes, and the rules behind them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transaction.vectors import load, names, state_of, transaction_of
from tms_core.transaction.model import (
    NO_TX_IN_PROGRESS,
    InProgress,
    InProgressType,
    Transaction,
    VisibilityLevel,
    VisibilityState,
    ascending,
)

MATRIX = load("visibility.json")
LONGS = st.integers(-(2**63), 2**63 - 1)


def state(read: int, invalid: list[int], in_progress: list[InProgress]) -> VisibilityState:
    return VisibilityState(0, read, 1000, array("q", invalid), tuple(in_progress))


def short(pointer: int, *, bound: int = 0, checkpoints: tuple[int, ...] = ()) -> InProgress:
    return InProgress(pointer, 5, bound, InProgressType.SHORT, checkpoints)


def test_the_matrix_has_the_three_hundred_answers() -> None:
    assert sum(len(expected["isVisible"]) for expected in MATRIX) == 300


@pytest.mark.parametrize("expected", MATRIX)
def test_visibility_of_each_version_is_tephras(expected: dict[str, Any]) -> None:
    transaction = transaction_of(expected)
    answers = {version: transaction.is_visible(int(version)) for version in expected["isVisible"]}
    assert answers == expected["isVisible"]


@pytest.mark.parametrize("expected", MATRIX)
def test_bounds_of_a_transaction_equal_those_of_tephra(expected: dict[str, Any]) -> None:
    transaction = transaction_of(expected)
    assert transaction.visibility_upper_bound() == expected["visibilityUpperBound"]
    assert transaction.prune_upper_bound() == expected["pruneUpperBound"]


def test_version_is_classified_by_each_list_separately() -> None:
    transaction = Transaction(100, 200, 250, (90, 110), (95, 150), checkpoint_write_pointers=(220, 250))
    versions = (90, 95, 110, 150, 200, 220, 250, 96)
    assert [v for v in versions if transaction.is_in_progress(v)] == [95, 150]
    assert [v for v in versions if transaction.is_excluded(v)] == [90, 95, 110, 150]
    assert [v for v in versions if transaction.is_checkpoint(v)] == [220, 250]
    assert [v for v in versions if transaction.is_current_write(v)] == [200, 220, 250]


def test_excluded_current_write_below_the_read_pointer_is_visible() -> None:
    level = VisibilityLevel.SNAPSHOT_EXCLUDE_CURRENT
    assert Transaction(200, 150, 150, visibility_level=level).is_visible(150)
    assert not Transaction(149, 150, 150, visibility_level=level).is_visible(150)


def test_bound_of_a_transaction_without_others_lies_before_itself() -> None:
    bounds = [Transaction(read_pointer, 200, 200).visibility_upper_bound() for read_pointer in (100, 200)]
    assert bounds == [100, 199]


def test_entries_in_any_order_have_the_bound_of_the_lowest() -> None:
    transaction = state(100, [], [short(90, bound=2), short(80, bound=1)])
    assert [entry.write_pointer for entry in transaction.in_progress] == [80, 90]
    assert transaction.visibility_upper_bound() == 1


@pytest.mark.parametrize("name", names("snapshots"))
def test_numbers_derived_from_a_snapshot_are_tephras(name: str) -> None:
    expected = load(f"snapshots/{name}.json")
    derived = expected["derived"]
    transaction = state_of(expected)
    dummy = transaction.dummy_transaction()
    assert transaction.visibility_upper_bound() == derived["snapshotVisibilityUpperBound"]
    assert transaction.prune_upper_bound() == derived["pruneUpperBound"]
    assert dummy.visibility_upper_bound() == derived["dummyTxVisibilityUpperBound"]
    assert dummy.first_short_in_progress == derived["dummyTxFirstShortInProgress"]
    assert list(dummy.in_progress) == [entry["writePointer"] for entry in expected["inProgress"]]
    assert list(dummy.invalids) == expected["invalid"]


@pytest.mark.parametrize(
    ("invalid", "in_progress", "bound"),
    [
        ([10, 30], [80, 90], 30),
        ([10, 95], [80, 90], 79),
        ([10], [], 10),
        ([], [60], 59),
        ([], [], 99),
        ([NO_TX_IN_PROGRESS], [], NO_TX_IN_PROGRESS - 1),
    ],
)
def test_prune_bound_is_the_last_invalid_id_below_all_in_progress(
    invalid: list[int], in_progress: list[int], bound: int
) -> None:
    assert state(100, invalid, [short(pointer) for pointer in in_progress]).prune_upper_bound() == bound


def test_invalid_ids_unsorted_and_repeated_count_once() -> None:
    transaction = state(100, [9, 5, 7, 1, 3, 5], [])
    assert list(transaction.invalid) == [1, 3, 5, 7, 9]
    assert [pointer for pointer in range(11) if transaction.is_invalid(pointer)] == [1, 3, 5, 7, 9]


def test_pointer_is_undecided_while_its_transaction_may_commit() -> None:
    transaction = state(900, [70], [short(80, checkpoints=(85, 86)), short(90)])
    undecided = [pointer for pointer in (70, 79, 80, 81, 85, 86, 90, 999, 1000) if transaction.is_undecided(pointer)]
    assert undecided == [80, 85, 86, 90]
    assert transaction.is_undecided(1001)


def test_checkpoints_without_an_entry_are_not_visible() -> None:
    transaction = state(900, [], [short(80, checkpoints=(85,))]).dummy_transaction()
    assert transaction.in_progress == (80, 85)
    assert not transaction.is_visible(85)
    assert transaction.is_visible(84)


@pytest.mark.parametrize(
    ("kind", "expiration_ms", "is_long"),
    [
        (InProgressType.LONG, 5, True),
        (InProgressType.SHORT, -1, False),
        (InProgressType.CHECKPOINT, 5, False),
        (None, -1, True),
        (None, 0, False),
    ],
)
def test_entry_without_a_type_is_long_with_a_negative_expiration(
    kind: InProgressType | None, expiration_ms: int, is_long: bool
) -> None:
    assert InProgress(80, expiration_ms, 0, kind).is_long is is_long


@given(st.lists(LONGS | st.integers(0, 9)))
def test_ascending_sorts_any_ids_without_duplicates(ids: list[int]) -> None:
    assert list(ascending(ids)) == sorted(set(ids))
    assert list(ascending(array("q", ids))) == sorted(set(ids))


def test_ascending_merges_runs_of_many_ids() -> None:
    ids = array("q", range(200_000, 0, -1)) + array("q", range(70_000))
    assert ascending(ids) == array("q", range(200_001))
