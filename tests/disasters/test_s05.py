"""S5: a plan has no writable object and changes no file of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders import DAY, HOUR, NOW_MS, WRITES, Call, Kit, Topic, janitor, pointer, topic, watch
from tests.support import file_digests
from tms_core.errors import StoreError
from tms_core.tables.base import Store
from tms_core.tables.leveldb.clone import clone
from tms_core.tables.leveldb.database import WritableDatabase
from tms_core.tables.leveldb.store import LevelDBStore

INVALID = pointer(NOW_MS - 10 * HOUR)


def store_due_rows(store: Store) -> Topic:
    """Store rows of all kinds that a run deletes or inverts."""
    orders = topic(store, "default:orders", ttl_seconds=3600)
    orders.plain(NOW_MS - DAY, NOW_MS).tx(INVALID, NOW_MS).stored(pointer(NOW_MS - DAY), NOW_MS - DAY)
    for table in (store.message, store.payload):
        table.compact(b"a", b"z")  # LevelDB then has tables and a log
    orders.plain(NOW_MS - DAY)
    return orders


def planner(store: Any) -> Kit:
    return janitor(store, invalid=[INVALID])


def test_plan_calls_no_write_operation(store: Store, tmp_path: Path) -> None:
    orders = store_due_rows(store)
    calls: list[str] = []
    watch(store, before=lambda call: calls.append(call.name))
    kit = planner(store)
    before = orders.messages()
    report = kit.engine.preview(out=tmp_path / "plan.json")
    assert sum(entry.rows for entry in report.topics) == 4
    assert not set(calls) & set(WRITES)
    assert orders.messages() == before


def test_plan_does_not_change_the_state_of_runs(store: Store) -> None:
    store_due_rows(store)
    kit = planner(store)
    kit.engine.adopt()
    before = (kit.state.frontiers(), kit.state.anchor(), kit.state.open_ids(), kit.state.store())
    kit.clock.advance(HOUR)
    kit.engine.preview()
    assert (kit.state.frontiers(), kit.state.anchor(), kit.state.open_ids(), kit.state.store()) == before
    assert (kit.state.boundary(), kit.state.evidence(), kit.state.runs(10)) == (None, [], [])


def test_plan_on_a_clone_changes_no_file_of_the_store(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        store_due_rows(store)
    before = file_digests(tmp_path / "messaging")
    assert {Path(name).suffix for name in before} >= {".sst", ".log"}
    with clone(tmp_path / "messaging", tmp_path / "clones") as cloned:
        report = planner(cloned).engine.preview(out=tmp_path / "plan.json")
        assert file_digests(tmp_path / "messaging") == before
    assert report.totals.expired == 3
    assert file_digests(tmp_path / "messaging") == before
    assert list((tmp_path / "clones").iterdir()) == []


def test_plan_of_a_clone_applies_to_the_store(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        store_due_rows(store)
    with clone(tmp_path / "messaging", tmp_path / "clones") as cloned:
        kit = planner(cloned)
        kit.engine.preview(out=tmp_path / "plan.json")
    with LevelDBStore(tmp_path / "messaging") as store:
        report = kit.restart(store=store).engine.carry_out(tmp_path / "plan.json", adopt=True)
        assert not report.tripped
        assert topic(store, "default:orders", ttl_seconds=3600).times() == [NOW_MS, NOW_MS]


@pytest.mark.parametrize("write", WRITES)
def test_clone_has_no_write_method(tmp_path: Path, write: str) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        store_due_rows(store)
    table, _, name = write.partition(".")
    assert hasattr(getattr(store, table), name)
    with clone(tmp_path / "messaging", tmp_path / "clones") as cloned:
        assert not hasattr(getattr(cloned, table), name)


def test_clone_contains_no_writable_object(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        store_due_rows(store)
    with clone(tmp_path / "messaging", tmp_path / "clones") as cloned:
        parts = [vars(table).values() for table in (cloned.metadata, cloned.message, cloned.payload)]
        assert not [part for values in parts for part in values if isinstance(part, WritableDatabase)]


def test_run_on_a_clone_fails_without_a_write(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        store_due_rows(store)
    before = file_digests(tmp_path / "messaging")
    with clone(tmp_path / "messaging", tmp_path / "clones") as cloned:
        kit = planner(cloned)
        with pytest.raises(StoreError, match="only reads the store"):
            kit.engine.run_once(adopt=True)
        assert kit.state.boundary() is None
        assert [entry.rows for entry in kit.state.ledger(100)] in ([], [None])
    assert file_digests(tmp_path / "messaging") == before


def test_call_watcher_records_writes(store: Store) -> None:
    seen: list[Call] = []
    watch(store, before=seen.append)
    store_due_rows(store)
    assert {call.name for call in seen} >= {"message.put", "payload.put", "metadata.compare_and_set"}
