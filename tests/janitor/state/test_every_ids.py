"""States of every kind, invalid transactions: closed ids are stored as pointers while they count."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janitor.state import ids
from janitor.state.base import State
from janitor.state.documents import View
from janitor.state.records import KnownIds, OpenIdRecord, StoreRecord
from janitor.state.sqlite.state import SqliteState
from tests.janitor.state.conftest import DurableStateKind, StateKind
from tests.support import size
from tms_core.errors import StateBusy, StateError
from tms_core.transaction.model import TX_PER_MS, transaction_ms

#: A time after every pass below, and a window that has ended for all ids.
NOW_MS, WINDOW_MS = 100, 10
OPEN = OpenIdRecord(5, 1, 20)
CLOSED = OpenIdRecord(7, 1, 20, 21)
OTHER = OpenIdRecord(9, 1, 20, 21)


def known(state: State) -> KnownIds:
    return state.known_ids(NOW_MS, WINDOW_MS)


def both(*open_ids: OpenIdRecord, closed: list[int]) -> KnownIds:
    return KnownIds({record.pointer: record for record in open_ids}, array("q", closed))


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (OpenIdRecord(5, 1, 30, 31), both(closed=[5, 7, 9])),
        (OpenIdRecord(8, 1, 30, 31), both(OPEN, closed=[7, 8, 9])),
        (OpenIdRecord(7, 1, 30), both(OPEN, OpenIdRecord(7, 1, 30), closed=[9])),
    ],
    ids=["closed", "new and closed", "open again"],
)
def test_known_ids_after_a_save_are_the_new_ones(state: State, saved: OpenIdRecord, expected: KnownIds) -> None:
    state.save_open_ids([OTHER, OPEN, CLOSED])
    known(state)
    state.save_open_ids([saved])
    assert known(state) == expected


def test_ids_that_no_longer_count_as_closed_are_in_order(state: State) -> None:
    state.save_open_ids([OTHER, OPEN, CLOSED, OpenIdRecord(8, 1)])
    assert list(state.known_ids(NOW_MS, 10**6).open_ids) == list(state.open_ids()) == [5, 7, 8, 9]


def test_known_ids_after_another_process_are_read_again(lasting: DurableStateKind) -> None:
    with lasting.new() as state, lasting.reopen() as other:
        state.save_open_ids([OTHER, OPEN, CLOSED])
        known(state)
        other.save_open_ids([OpenIdRecord(5, 1, 30, 31)])
        assert known(state) == both(closed=[5, 7, 9])


def test_save_store_with_another_mark_forgets_closed_ids(state: State) -> None:
    state.save_open_ids([OTHER, OPEN, CLOSED])
    state.save_store(StoreRecord("mark", "leveldb:/data"))
    assert known(state) == both(OPEN, closed=[7, 9])
    state.save_store(StoreRecord("another mark", "leveldb:/data"))
    assert known(state) == both(closed=[])


def test_known_ids_read_in_an_undone_transaction_do_not_count(state: State) -> None:
    state.save_open_ids([OTHER, OPEN, CLOSED])

    def closes(pointer: int) -> None:
        with state.transaction():
            state.save_open_ids([OpenIdRecord(pointer, 1, 30, 31)])
            assert list(known(state).closed) == sorted([pointer, 7, 9])
            raise StateError("the disk is full.")

    known(state)
    for pointer in (5, 8):
        with pytest.raises(StateError, match="disk is full"):
            closes(pointer)
        assert known(state) == both(OPEN, closed=[7, 9])


def test_known_ids_by_an_earlier_clock_are_open_until_then(state: State) -> None:
    late = OpenIdRecord(11_999_999, 1, 22, 23)
    state.save_open_ids([OTHER, OPEN, CLOSED, late])
    everything, without = both(OPEN, closed=[7, 9, late.pointer]), both(OPEN, late, closed=[7, 9])
    for now_ms, window_ms, expected in ((22, 11, everything), (21, 11, without), (22, 12, without)):
        assert state.known_ids(now_ms, window_ms) == expected
    for now_ms, window_ms in ((20, 20), (20, 11), (100, 20)):
        assert state.known_ids(now_ms, window_ms) == without, "open until then"
    for now_ms, window_ms in ((19, 11), (20, 21)):
        assert state.known_ids(now_ms, window_ms) == both(OPEN, CLOSED, OTHER, late, closed=[])
    assert state.known_ids(22, 11) == everything


class Model:
    """A model of a state's ids, with an object for each id."""

    def __init__(self) -> None:
        self._ids: dict[int, OpenIdRecord] = {}

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        self._ids |= {record.pointer: record for record in records}

    def delete_open_ids(self, pointers: Iterable[int]) -> None:
        for pointer in pointers:
            self._ids.pop(pointer, None)

    def delete_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        closed = {record.pointer: record.closed_ms for record in self._ids.values() if record.closed_ms is not None}
        self.delete_open_ids([pointer for pointer in pointers if closed.get(pointer, before_ms) < before_ms])

    def open_ids(self) -> dict[int, OpenIdRecord]:
        return dict(sorted(self._ids.items()))

    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        def counts(record: OpenIdRecord) -> bool:
            if record.closed_ms is None or record.scanned_ms is None:
                return False
            return transaction_ms(record.pointer) + window_ms <= record.scanned_ms <= now_ms

        opened = [record for record in self.open_ids().values() if not counts(record)]
        return both(*opened, closed=[pointer for pointer, record in self.open_ids().items() if counts(record)])

    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        found = [record for record in self.open_ids().values() if record.closed_ms is None]
        return len(found), found[:limit]


times = st.none() | st.integers(0, 40)
# Pointers of the first 40 milliseconds, some of which are inside a window.
any_pointer = st.integers(-3, 40).map(lambda at_ms: at_ms * TX_PER_MS + 1) | st.integers(1, 30)
records = st.lists(st.builds(OpenIdRecord, any_pointer, st.integers(0, 3), times, times), max_size=12)
pointers = st.lists(any_pointer, max_size=8)
changes = st.one_of(
    records.map(lambda saved: lambda state: state.save_open_ids(saved)),
    pointers.map(lambda gone: lambda state: state.delete_open_ids(gone)),
    st.tuples(pointers, st.integers(0, 40)).map(lambda gone: lambda state: state.delete_closed_ids(*gone)),
)


@settings(max_examples=size("TMS_TEST_EXAMPLES", 60) // 4)
@given(st.lists(changes, max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_known_ids_after_any_changes_are_those_of_a_plain_list(
    kind: StateKind, made: Sequence[Callable[[State | Model], None]], now_ms: int, window_ms: int
) -> None:
    model = Model()
    with patch("janitor.state.ids.BATCH_IDS", 4), kind.new() as state, patch.object(state.driver, "leaf_ids", 3):
        for change in made:
            change(state)
            change(model)
            assert state.open_ids() == model.open_ids()
            assert state.known_ids(now_ms, window_ms) == model.known_ids(now_ms, window_ms)
            assert state.lowest_open(2) == model.lowest_open(2)


class OvertakenLeaves(tuple[Any, ...]):
    """A list of leaves; before its comparison, another thread reads the leaves of another time."""

    state: SqliteState

    def __ne__(self, other: object) -> bool:
        self.state._known_closed = (), array("q", [3])
        return super().__ne__(other)


class CountingState(SqliteState):
    """A state that counts its reads of closed ids."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.readings = 0
        self.driver.connection.set_trace_callback(self._trace)

    def _trace(self, statement: str) -> None:
        self.readings += statement.startswith("SELECT") and "ids.closed." in statement


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[CountingState]:
    with CountingState(tmp_path) as opened:
        opened.save_open_ids([OTHER, OPEN, CLOSED])
        yield opened


def test_closed_ids_that_stay_are_not_read_again(watched: CountingState) -> None:
    known(watched)
    for scanned_ms in (30, 31, 32):
        with watched.transaction():
            watched.pause("default:*", scanned_ms)
            watched.save_open_ids([OpenIdRecord(5, 1, scanned_ms), OpenIdRecord(scanned_ms, 1)])
            watched.delete_open_ids([scanned_ms])
            watched.delete_closed_ids([7, 9], 21)
            before = watched.readings
            assert known(watched) == both(OpenIdRecord(5, 1, scanned_ms), closed=[7, 9])
            assert watched.readings == before
        known(watched)
        assert watched.readings == before


def test_known_ids_during_a_write_are_consistent(tmp_path: Path) -> None:
    with SqliteState(tmp_path, busy_seconds=0) as other:
        other.save_open_ids([OPEN, CLOSED])

        class InterruptedState(SqliteState):
            def _closed_pointers(self, view: View) -> array[int]:
                found = super()._closed_pointers(view)
                with suppress(StateBusy):
                    other.save_open_ids([OpenIdRecord(5, 1, 30, 31)])
                return found

        with InterruptedState(tmp_path) as state:
            assert known(state) == both(OPEN, closed=[7])


def test_threads_at_different_times_get_their_own_ids(watched: CountingState, monkeypatch: pytest.MonkeyPatch) -> None:
    before = watched.known_ids(NOW_MS, WINDOW_MS)
    leaves = ids._leaves
    monkeypatch.setattr(OvertakenLeaves, "state", watched, raising=False)
    monkeypatch.setattr(ids, "_leaves", lambda kind, view: OvertakenLeaves(leaves(kind, view)))
    assert watched.known_ids(NOW_MS, WINDOW_MS) == before
