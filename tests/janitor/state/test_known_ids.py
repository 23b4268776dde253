"""A million closed ids are read once and not at every pass; which they are is in ``test_every_ids.py``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from janitor.state import ids
from janitor.state.documents import View
from janitor.state.records import KnownIds, OpenIdRecord
from janitor.state.sqlite.state import SqliteState
from tms_core.errors import StateBusy

#: Later than every pass below, and a window that has ended for all of them.
NOW_MS, WINDOW_MS = 100, 10
OPEN = OpenIdRecord(5, 1, 20)
CLOSED = OpenIdRecord(7, 1, 20, 21)
OTHER = OpenIdRecord(9, 1, 20, 21)


class Overtaken(tuple[Any, ...]):
    """A list of leaves; when it is compared, another thread has just read those of another moment."""

    state: SqliteState

    def __ne__(self, other: object) -> bool:
        self.state._known_closed = (), array("q", [3])
        return super().__ne__(other)


class Watched(SqliteState):
    """A state that tells how often it has read closed ids."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.readings = 0
        self.driver.connection.set_trace_callback(self._trace)

    def _trace(self, statement: str) -> None:
        self.readings += statement.startswith("SELECT") and "ids.closed." in statement


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path) as opened:
        opened.save_open_ids([OTHER, OPEN, CLOSED])
        yield opened


def known(state: SqliteState) -> KnownIds:
    return state.known_ids(NOW_MS, WINDOW_MS)


def both(*open_ids: OpenIdRecord, closed: list[int]) -> KnownIds:
    return KnownIds({record.pointer: record for record in open_ids}, array("q", closed))


def test_closed_ids_that_stay_are_not_read_again(state: Watched) -> None:
    known(state)
    for scanned_ms in (30, 31, 32):
        with state.transaction():
            state.pause("default:*", scanned_ms)
            state.save_open_ids([OpenIdRecord(5, 1, scanned_ms), OpenIdRecord(scanned_ms, 1)])
            state.forget_open_ids([scanned_ms])
            state.forget_closed_ids([7, 9], 21)
            before = state.readings
            assert known(state) == both(OpenIdRecord(5, 1, scanned_ms), closed=[7, 9])
            assert state.readings == before
        known(state)
        assert state.readings == before


def test_id_closed_between_two_reads_is_of_one_moment(tmp_path: Path) -> None:
    with SqliteState(tmp_path, busy_seconds=0) as other:
        other.save_open_ids([OPEN, CLOSED])

        class Interrupted(SqliteState):
            def _closed_pointers(self, view: View) -> array[int]:
                found = super()._closed_pointers(view)
                with suppress(StateBusy):
                    other.save_open_ids([OpenIdRecord(5, 1, 30, 31)])
                return found

        with Interrupted(tmp_path) as state:
            assert known(state) == both(OPEN, closed=[7])


def test_threads_of_other_moments_get_their_own_ids(state: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.known_ids(NOW_MS, WINDOW_MS)
    leaves = ids._leaves
    monkeypatch.setattr(Overtaken, "state", state, raising=False)
    monkeypatch.setattr(ids, "_leaves", lambda kind, view: Overtaken(leaves(kind, view)))
    assert state.known_ids(NOW_MS, WINDOW_MS) == before
