"""Values of the state are read as the types that wrote them; an unknown layout is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from janitor.boundary import REFUTED, ROUND
from janitor.report import HELD, Entry
from janitor.rules.policy import Hold, Rule
from janitor.run.prepare import IN_PROGRESS
from janitor.state.figures import SNAPSHOT, STATISTICS, KeptFigures, SnapshotRead, StatisticsFigures
from janitor.state.records import Note
from janitor.state.sqlite.state import SqliteState
from janitor.state.topic_history import CHANGES, SIZES, TOPICS
from janitor.sweep.transactions import DECIDED
from tests.builders import NOW_MS, watch_state
from tms_core.errors import StateError
from tms_core.topic import TopicId

ROWS = Entry(TopicId("default", "orders"), 1, "message", Rule.EXPIRED, Hold.FRONTIER, 3, 70, NOW_MS, NOW_MS)


@pytest.fixture
def state() -> Iterator[SqliteState]:
    with SqliteState.in_memory() as made:
        yield made


def test_figures_are_read_back_as_they_were_saved(state: SqliteState) -> None:
    HELD.save(state, [ROWS])
    SNAPSHOT.save(state, SnapshotRead(NOW_MS, "snapshot.1", invalid=2))
    STATISTICS.save(state, StatisticsFigures(NOW_MS, overdue={"expired": 3}))
    assert HELD.read(state) == [ROWS]
    assert SNAPSHOT.read(state) == SnapshotRead(NOW_MS, "snapshot.1", invalid=2)
    assert STATISTICS.read(state) == StatisticsFigures(NOW_MS, overdue={"expired": 3})
    assert state.note(Note.OVERDUE)[0]["bytes"] == 70


def test_figures_that_have_not_changed_are_not_written(state: SqliteState) -> None:
    HELD.save(state, [ROWS])
    written: list[str] = []
    watch_state(state, before=lambda call: written.append(call.name))
    HELD.save(state, [ROWS])
    assert "state.save_note" not in written


@pytest.mark.parametrize("kept", [ROUND, REFUTED, DECIDED, IN_PROGRESS, TOPICS, CHANGES, SIZES])
def test_figures_of_a_pass_in_another_layout_are_an_error(state: SqliteState, kept: KeptFigures[Any]) -> None:
    state.save_note(kept.note, [["odd"]])
    with pytest.raises(StateError, match=str(kept.note)):
        kept.read(state)
