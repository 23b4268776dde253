"""S13: a store's side table records its transaction system and the state that adopted it; others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, MINUTE, NOW_MS, Kit, Topic, janitor, pointer, topic
from tms_core.tables.base import Store
from tms_core.tables.record import SystemRecord, record_transactions, recorded_state, recorded_transactions
from tms_core.tables.side import MemorySide

OUR_RECORD = SystemRecord("ours", "/srv/store.tx", pointer(NOW_MS), NOW_MS)


def expired(store: Store) -> Topic:
    """Create a topic with a due row and a live row."""
    return topic(store, "default:orders", ttl_seconds=DAY // 1000).plain(NOW_MS - 2 * DAY, NOW_MS)


def reasons(kit: Kit, *, adopt: bool = False) -> list[str]:
    report = kit.engine.run_once(adopt=adopt)
    return [note.message for note in report.guards if note.guard == "identity" and note.tripped]


@pytest.fixture
def states(tmp_path: Path) -> Iterator[list[SqliteState]]:
    """Yield two states in separate folders."""
    with SqliteState(tmp_path / "first") as first, SqliteState(tmp_path / "second") as second:
        yield [first, second]


def test_run_with_unrecorded_state_waits_for_adoption(store: Store, states: list[SqliteState], tmp_path: Path) -> None:
    orders, side = expired(store), MemorySide()
    first, moved = (janitor(store, side=side, state=state) for state in states)
    first.engine.adopt()
    [reason] = reasons(moved, adopt=True)
    assert re.search(f"{tmp_path / 'first'}.* janitor.state .* janitor adopt", reason)
    assert orders.times() == [NOW_MS - 2 * DAY, NOW_MS]
    moved.engine.adopt()
    assert reasons(moved) == []
    assert orders.times() == [NOW_MS]
    [reason] = reasons(first)
    assert str(tmp_path / "second") in reason


def test_run_with_state_older_than_the_record_is_recorded(
    store: Store, states: list[SqliteState], tmp_path: Path
) -> None:
    expired(store)
    kit = janitor(store, state=states[0]).adopt()
    side = MemorySide()
    known = kit.restart(side=side)
    known.engine.preview()
    assert recorded_state(side) is None, "a plan changes nothing"
    assert reasons(known) == []
    record = kit.state.store()
    assert record is not None
    assert recorded_state(side) == SystemRecord(record.mark, str(tmp_path / "first"))


@pytest.mark.parametrize(
    ("write_pointer", "words"),
    [
        (pointer(NOW_MS) - 1, f"at write pointer {pointer(NOW_MS) - 1}, and the store has seen {pointer(NOW_MS)}"),
        (None, ""),
    ],
)
def test_new_state_identifies_transactions_by_the_record(store: Store, write_pointer: int | None, words: str) -> None:
    orders, side = expired(store), MemorySide()
    record_transactions(side, OUR_RECORD)
    kit = janitor(store, side=side)
    kit.snapshots.write_pointer = write_pointer
    found = reasons(kit, adopt=True)
    assert [words in reason for reason in found] == ([True] if words else [])
    assert orders.times() == ([NOW_MS - 2 * DAY, NOW_MS] if words else [NOW_MS])
    kit.engine.adopt()
    assert reasons(kit) == []
    assert recorded_transactions(side) == (SystemRecord("", OUR_RECORD.place) if words else OUR_RECORD)


def test_run_with_snapshot_older_than_the_record_succeeds(store: Store) -> None:
    orders, side = expired(store), MemorySide()
    record_transactions(side, OUR_RECORD._replace(pointer=pointer(NOW_MS + MINUTE), taken_ms=NOW_MS + MINUTE))
    assert reasons(janitor(store, side=side), adopt=True) == []
    assert orders.times() == [NOW_MS]
