"""Facts about transactions in a run: usable snapshots, and open invalid pointers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.rules.ranges import Lifetime
from janitor.state.base import KnownIds, OpenIdRecord
from janitor.state.sqlite.state import SqliteState
from janitor.sweep import transactions as txstate
from janitor.sweep.transactions import (
    REMEMBER_CLOSED_MS,
    Problem,
    TransactionView,
    TxState,
    differences,
    mark_covered,
    observe,
    refresh,
    search_since_ms,
)
from tests.builders import LIFETIME, NOW_MS, pointer, visibility
from tms_core.errors import NoSnapshot, SnapshotError, UnsupportedSnapshotVersion
from tms_core.transaction.source.source import Loaded, RejectedSnapshot

INTERVAL_SECONDS = 60
ALLOWANCE_MS = LIFETIME.allowance_ms
#: The maximum lifetime plus the clock allowance.
UNDECIDED_MS = LIFETIME.max_ms + ALLOWANCE_MS
INVALID, IN_PROGRESS = pointer(NOW_MS - 500, 1), pointer(NOW_MS - 400, 2)


@dataclass
class FakeSource:
    """A source that returns a snapshot of a given age, or raises an error."""

    age_ms: int = 0
    error: Exception | None = None
    rejected: tuple[RejectedSnapshot, ...] = ()

    def latest(self) -> Loaded:
        if self.error is not None:
            raise self.error
        taken = visibility(NOW_MS - self.age_ms, [INVALID], [IN_PROGRESS], pointer(NOW_MS))
        return Loaded(taken, "snapshot.1", self.rejected)


def read(source: FakeSource | None) -> TxState:
    return refresh(source, NOW_MS, interval_seconds=INTERVAL_SECONDS, allowance_ms=ALLOWANCE_MS)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (NoSnapshot("none there"), Problem.MISSING),
        (SnapshotError("cut short"), Problem.UNREADABLE),
        (UnsupportedSnapshotVersion("version 9"), Problem.UNREADABLE),
        (PermissionError("not allowed"), Problem.UNREADABLE),
    ],
)
def test_s14_source_that_fails_gives_its_reason(error: Exception, problem: Problem) -> None:
    state = read(FakeSource(error=error))
    assert (state.problem, state.message) == (problem, str(error))
    assert (state.snapshot, state.usable, state.used) == (None, None, None)


@pytest.mark.parametrize(("age_ms", "figure"), [(120_001, "2 min old"), (-ALLOWANCE_MS - 1, "5 min ahead")])
def test_s14_snapshot_of_another_time_is_named_with_its_age(age_ms: int, figure: str) -> None:
    state = read(FakeSource(age_ms))
    assert (state.usable, state.used) == (None, None)
    assert f"snapshot.1 is {figure}" in state.message


def test_read_of_a_source_raises_unexpected_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        read(FakeSource(error=ZeroDivisionError()))


def view(age_ms: int | None = 0) -> TransactionView:
    snapshot = None if age_ms is None else visibility(NOW_MS - age_ms, [INVALID], [IN_PROGRESS])
    return TransactionView(snapshot, NOW_MS, LIFETIME.undecided_ms)


@pytest.mark.parametrize(
    ("begin_ms", "number", "undecided"),
    [
        (NOW_MS - UNDECIDED_MS - 1, 999_999, False),
        (NOW_MS - UNDECIDED_MS, 0, False),
        (NOW_MS - UNDECIDED_MS, 999_999, False),
        (NOW_MS - UNDECIDED_MS + 1, 0, True),
        (NOW_MS + 1, 0, True),
        (-1, 0, False),
    ],
)
def test_without_a_snapshot_a_transaction_is_open_its_lifetime(begin_ms: int, number: int, undecided: bool) -> None:
    assert view(None).is_undecided(pointer(begin_ms, number)) is undecided


TERM = Lifetime(max_ms=90_000, grace_ms=10_000, allowance_ms=300)
STARTED_MS = 1_000_000
#: The end of the window of a transaction that started at STARTED_MS.
END_MS = STARTED_MS + 100_000

OPEN = OpenIdRecord(10, first_seen_ms=5, scanned_ms=6)


def make_known_ids(*open_ids: OpenIdRecord, closed: Iterable[int] = ()) -> KnownIds:
    return KnownIds({record.pointer: record for record in open_ids}, array("q", closed))


def compare(ids: KnownIds, *listed: int) -> tuple[list[OpenIdRecord], list[int], list[int], list[int]]:
    """Return the known open ids, and the pointers that are new, gone, or left although they are closed."""
    observed = observe(ids, array("q", listed), NOW_MS)
    return observed.still_listed, list(observed.new), observed.unlisted_open, list(observed.unlisted_closed)


def test_compared_ids_of_every_kind_are_in_order() -> None:
    ids = make_known_ids(OPEN, OpenIdRecord(15, 5), OpenIdRecord(16, 5), closed=[20, 21, 40])
    assert compare(ids, 1, 10, 16, 20, 30) == ([OPEN, OpenIdRecord(16, 5)], [1, 30], [15], [21, 40])


ascending = st.lists(st.integers(0, 40), unique=True).map(sorted).map(lambda values: array("q", values))


@given(first=ascending, second=ascending, block=st.integers(1, 5))
def test_differences_are_those_of_the_sets(first: array[int], second: array[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(txstate, "_BLOCK", block)
        only_first, only_second = differences(first, second)
    assert list(only_first) == sorted(set(first) - set(second))
    assert list(only_second) == sorted(set(second) - set(first))


def by_sets(
    records: Mapping[int, OpenIdRecord], invalid: Iterable[int], now_ms: int, lifetime: Lifetime
) -> tuple[list[OpenIdRecord], set[int]]:
    """Return the open ids and those to forget, computed with sets."""
    listed = set(invalid)
    found = [OpenIdRecord(each, now_ms) for each in listed - records.keys()]
    for record in records.values():
        ahead = record.scanned_ms is not None and record.scanned_ms > now_ms
        now = replace(record, first_seen_ms=min(record.first_seen_ms, now_ms))
        now = replace(now, scanned_ms=None, closed_ms=None) if ahead else now
        closed = now.closed_ms is not None and now.scanned_ms is not None
        closed = closed and (now.scanned_ms or 0) >= lifetime.window_end_ms(now.pointer)
        if record.pointer in listed and not closed:
            found.append(now)
    left = [record for pointer, record in records.items() if pointer not in listed]
    gone = {r.pointer for r in left if r.closed_ms is None or r.closed_ms < now_ms - REMEMBER_CLOSED_MS}
    return sorted(found, key=lambda record: record.pointer), gone


#: A few close values, so that every comparison has both results.
pointers = st.integers(-3, 30).map(lambda begin: begin * 100_000)
soon_ms = st.integers(0, 3)
month_later_ms = soon_ms.map(lambda ms: ms + REMEMBER_CLOSED_MS)
times_ms = soon_ms | month_later_ms | st.none()


@given(
    records=st.lists(st.builds(OpenIdRecord, pointers, st.just(1), times_ms, times_ms), unique_by=lambda r: r.pointer),
    invalid=st.lists(pointers, unique=True),
    now_ms=soon_ms | month_later_ms,
    lifetime=st.builds(Lifetime, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)
def test_observe_equals_a_comparison_of_all_ids(
    records: list[OpenIdRecord], invalid: list[int], now_ms: int, lifetime: Lifetime
) -> None:
    expected, not_remembered = by_sets({record.pointer: record for record in records}, invalid, now_ms, lifetime)
    with SqliteState.in_memory() as state:
        state.save_open_ids(records)
        ids = state.known_ids(now_ms, lifetime.window_end_ms(0))
        assert all((pointer in ids) == any(r.pointer == pointer for r in records) for pointer in range(-3, 31))
        observed = observe(ids, array("q", sorted(invalid)), now_ms)
        state.delete_open_ids(observed.unlisted_open)
        state.delete_closed_ids(observed.unlisted_closed, now_ms - REMEMBER_CLOSED_MS)
        remembered = state.open_ids()
    assert sorted(observed.open_ids(), key=lambda record: record.pointer) == expected
    assert {record.pointer for record in records} - remembered.keys() == not_remembered


def test_search_since_of_several_pointers_is_the_earliest() -> None:
    searched = OpenIdRecord(pointer(STARTED_MS), NOW_MS, scanned_ms=STARTED_MS + 50_000)
    never = OpenIdRecord(pointer(STARTED_MS + 40_000), NOW_MS)
    assert search_since_ms([searched, never, searched], TERM) == STARTED_MS + 39_700
    assert search_since_ms([searched], TERM) == STARTED_MS + 49_700
    assert search_since_ms([], TERM) is None


@pytest.mark.parametrize(
    ("first_seen_ms", "lifetime", "over"),
    [
        (END_MS + 1000, TERM, True),
        (END_MS + 1001, TERM, False),
        (5, TERM._replace(allowance_ms=TERM.grace_ms + 1000), True),
        (5, TERM._replace(allowance_ms=TERM.grace_ms + 1001), False),
    ],
)
def test_covered_by_several_passes_needs_the_oldest(first_seen_ms: int, lifetime: Lifetime, over: bool) -> None:
    record = OpenIdRecord(pointer(STARTED_MS), first_seen_ms)
    [after] = mark_covered([record], END_MS + 5000, END_MS + 6000, lifetime, END_MS + 1000)
    times = (END_MS + 1000, END_MS + 6000) if over else (END_MS + 5000, None)
    assert after == OpenIdRecord(record.pointer, first_seen_ms, *times)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("late_ms", "over"), [(-1, False), (0, True), (1, True)])
def test_covered_by_a_full_pass_after_the_last_write_closes(late_ms: int, over: bool, full: bool) -> None:
    record = OpenIdRecord(pointer(STARTED_MS, 999_999), 5)
    finished_ms = END_MS + 100_000
    began_ms = END_MS + late_ms
    expected = OpenIdRecord(record.pointer, 5, began_ms, finished_ms if over and full else None)
    assert list(mark_covered([record], began_ms, finished_ms, TERM, began_ms if full else None)) == [expected]
    assert closed_for(expected, TERM) is (over and full)


def closed_for(record: OpenIdRecord, lifetime: Lifetime, now_ms: int = NOW_MS) -> bool:
    """Return whether a state with this record has it closed."""
    with SqliteState.in_memory() as state:
        state.save_open_ids([record])
        ids = state.known_ids(now_ms, lifetime.window_end_ms(0))
    assert (list(ids.open_ids.values()), list(ids.closed)) in (([record], []), ([], [record.pointer]))
    return not ids.open_ids
