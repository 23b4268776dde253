"""S3: "nothing matched" is a separate value, never everything and never a default position."""

from __future__ import annotations

from pathlib import Path

import pytest

from janitor import boundary
from janitor.rules.ranges import topic_stop
from tests.builders import (
    DAY,
    HOUR,
    LIFETIME,
    MINUTE,
    NOW_MS,
    Call,
    Topic,
    adopted_janitor,
    janitor,
    pointer,
    topic,
    unknown_topic,
    watch,
)
from tms_core.rowkey import stop_key
from tms_core.tables.base import Store
from tms_core.tables.compaction import DeletedRanges

INVALID = pointer(NOW_MS - 10 * MINUTE)


def store_due_and_live(store: Store) -> Topic:
    """Store a due message, a live message, and a message of an invalid transaction."""
    return (
        topic(store, "default:orders", ttl_seconds=3600).plain(NOW_MS - 2 * HOUR, NOW_MS).tx(INVALID, NOW_MS - MINUTE)
    )


def test_run_with_unmatched_pattern_changes_nothing(store: Store) -> None:
    orders = store_due_and_live(store)
    kit = janitor(store).adopt()
    kit.snapshots.invalid = [INVALID]
    before = orders.messages()
    report = kit.engine.run_once(patterns=("nowhere:*",))
    assert orders.messages() == before
    assert report.topics == []
    assert kit.state.boundary() is None
    assert kit.state.last_full_pass_ms() is None


def test_plan_with_unmatched_pattern_is_empty(store: Store, tmp_path: Path) -> None:
    orders = store_due_and_live(store)
    kit = janitor(store, invalid=[INVALID])
    before = orders.messages()
    assert kit.engine.preview(patterns=("nowhere:*",), out=tmp_path / "plan.json").topics == []
    kit.engine.carry_out(tmp_path / "plan.json", adopt=True)
    assert orders.messages() == before


def test_approve_with_unmatched_pattern_releases_no_hold(store: Store) -> None:
    kit = janitor(store).adopt()
    orders = store_due_and_live(store)
    assert kit.engine.approve(("nowhere:*",)) == []
    kit.engine.run_once()
    assert len(orders.times()) == 3


def test_apply_of_empty_plan_deletes_and_inverts_nothing(store: Store, tmp_path: Path) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600).plain(NOW_MS).tx(INVALID, NOW_MS)
    kit = janitor(store).adopt()
    kit.engine.preview(out=tmp_path / "plan.json")
    before = orders.messages()
    kit.clock.advance(DAY)
    kit.snapshots.invalid = [INVALID]
    assert kit.engine.carry_out(tmp_path / "plan.json").topics == []
    assert orders.messages() == before


def test_run_on_empty_store_is_a_complete_pass(store: Store) -> None:
    kit = janitor(store)
    report = kit.engine.run_once(adopt=True)
    assert (report.topics, report.errors, sum(report.totals.kept.values())) == ([], [], 0)
    assert kit.state.last_full_pass_ms() == NOW_MS


def test_rows_of_unknown_topics_stay_and_are_counted(store: Store) -> None:
    stray = unknown_topic(store, "default:stray").plain(1, 2, NOW_MS).stored(pointer(1), 1, 2)
    report = janitor(store).engine.run_once(adopt=True)
    assert (stray.times(), stray.stored_times()) == ([1, 2, NOW_MS], [1, 2])
    assert report.totals.kept["unknown_topic"] == 5


def test_run_without_invalid_transactions_searches_no_message(store: Store) -> None:
    store_due_and_live(store)
    kit = janitor(store)
    reads: list[str] = []
    watch(store, before=lambda call: reads.append(call.name))
    kit.engine.run_once(adopt=True)
    assert "message.cells" not in reads
    assert "message.invert" not in reads


def test_run_with_closed_transactions_only_searches_no_message(store: Store) -> None:
    closed = pointer(NOW_MS - DAY)
    orders = store_due_and_live(store).tx(closed, NOW_MS)
    kit = adopted_janitor(store, invalid=[closed])
    assert orders.pointers() == [INVALID, None, -closed]
    reads: list[str] = []
    watch(store, before=lambda call: reads.append(call.name))
    kit.engine.run_once()
    assert "message.cells" not in reads


def test_run_without_deletes_compacts_nothing(store: Store) -> None:
    topic(store, "default:orders", ttl_seconds=3600).plain(NOW_MS)
    compacted: list[Call] = []
    watch(store, before=lambda call: compacted.append(call) if call.name.endswith(".compact") else None)
    janitor(store).engine.run_once(adopt=True)
    DeletedRanges().compact(lambda: None)
    assert compacted == []


def test_boundary_without_evidence_is_none_not_zero() -> None:
    found = boundary.prove([], (), LIFETIME)
    assert found.bound is None
    assert found.obstacles


def test_prefix_without_stop_key_reads_to_the_table_end() -> None:
    assert stop_key(b"\xff\xff") is None
    with pytest.raises(ValueError, match=r"\\xff\\xff"):
        topic_stop(b"\xff\xff")
