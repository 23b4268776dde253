"""S14: a doubtful snapshot is not used. No inversion and no boundary; deletions by TTL and generation continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from janitor.rules.ranges import Lifetime
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from tests.builders import (
    DAY,
    HOUR,
    LIFETIME,
    MINUTE,
    NOW_MS,
    Kit,
    Snapshots,
    Topic,
    adopted_janitor,
    encode_state,
    janitor,
    pointer,
    topic,
    visibility,
)
from tms_core.clock import ManualClock
from tms_core.tables.base import Store
from tms_core.transaction.source.source import DirectorySource, SnapshotSource

INVALID = pointer(NOW_MS - 10 * HOUR)
INTERVAL_MS = MINUTE
ALLOWANCE_MS = LIFETIME.allowance_ms
TTL_SECONDS = 1800
#: A lifetime above the ttl: payloads are due while their transaction may still commit.
LONG = Lifetime(DAY, HOUR, ALLOWANCE_MS)


def good(taken_ms: int) -> bytes:
    return encode_state(visibility(taken_ms, [INVALID]))


def write(folder: Path, files: dict[int, bytes]) -> SnapshotSource:
    folder.mkdir()
    for taken_ms, content in files.items():
        (folder / f"snapshot.{taken_ms}").write_bytes(content)
    return DirectorySource(folder)


#: The files in the snapshot directory, by the number in their names.
UNUSABLE: dict[str, dict[int, bytes]] = {
    "no snapshot": {},
    "empty": {NOW_MS: b""},
    "truncated": {NOW_MS: good(NOW_MS)[:20]},
    "of an unknown version": {NOW_MS: b"\x0a" + good(NOW_MS)[1:]},
    "no snapshot's bytes": {NOW_MS: b"\xff" * 40},
    "stale by a moment": {NOW_MS - 2 * INTERVAL_MS - 1: good(NOW_MS - 2 * INTERVAL_MS - 1)},
    "stale by years": {1: good(1)},
    "from the future by a moment": {NOW_MS + ALLOWANCE_MS + 1: good(NOW_MS + ALLOWANCE_MS + 1)},
    "stale, under a fresh name": {NOW_MS: good(NOW_MS - DAY)},
    "newest truncated, the one before stale": {NOW_MS: good(NOW_MS)[:-30], NOW_MS - DAY: good(NOW_MS - DAY)},
}
USABLE: dict[str, dict[int, bytes]] = {
    "fresh": {NOW_MS: good(NOW_MS)},
    "just not stale": {NOW_MS - 2 * INTERVAL_MS: good(NOW_MS - 2 * INTERVAL_MS)},
    "just not from the future": {NOW_MS + ALLOWANCE_MS: good(NOW_MS + ALLOWANCE_MS)},
    "newest truncated, the one before fresh": {NOW_MS: good(NOW_MS)[:20], NOW_MS - MINUTE: good(NOW_MS - MINUTE)},
    "fresh, under an old name": {1: good(NOW_MS)},
}


def engine(kit: Kit, source: SnapshotSource | None) -> Engine:
    return Engine(
        Deps(kit.store, kit.state, source, kit.clock, kit.engine.deps.terms, token_hex=lambda size: "0" * 2 * size)
    )


def store_due_rows(store: Store) -> Topic:
    """Store a due message, one of an invalid transaction, and one of an old generation."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS, generation=2)
    orders.plain(NOW_MS - HOUR).tx(INVALID, NOW_MS)
    orders.at(1).plain(NOW_MS)
    return orders


@pytest.mark.parametrize("files", UNUSABLE)
def test_unusable_snapshot_allows_ttl_deletes_only(store: Store, tmp_path: Path, files: str) -> None:
    orders = store_due_rows(store)
    kit = janitor(store)
    report = engine(kit, write(tmp_path / "tx", UNUSABLE[files])).run_once(adopt=True)
    assert orders.pointers() == [INVALID]
    assert orders.at(1).times() == []
    assert (report.snapshot, report.boundary, kit.state.boundary(), kit.state.evidence()) == (None, None, None, [])
    assert kit.state.open_ids() == {}
    assert not report.tripped
    assert "snapshot" in [note.guard for note in report.guards]


@pytest.mark.parametrize("files", USABLE)
def test_usable_snapshot_inverts_and_proves(store: Store, tmp_path: Path, files: str) -> None:
    orders = store_due_rows(store)
    kit = janitor(store)
    report = engine(kit, write(tmp_path / "tx", USABLE[files])).run_once(adopt=True)
    assert orders.pointers() == [-INVALID]
    assert report.snapshot is not None
    assert kit.state.boundary() is not None


def test_missing_source_equals_an_unusable_snapshot(store: Store) -> None:
    orders = store_due_rows(store)
    kit = janitor(store)
    engine(kit, None).run_once(adopt=True)
    assert (orders.pointers(), kit.state.boundary()) == ([INVALID], None)


def test_truncated_newest_snapshot_is_named_in_the_report(store: Store, tmp_path: Path) -> None:
    store_due_rows(store)
    files = USABLE["newest truncated, the one before fresh"]
    report = engine(janitor(store), write(tmp_path / "tx", files)).run_once(adopt=True)
    assert report.snapshot is not None
    assert report.snapshot.source == f"snapshot.{NOW_MS - MINUTE}"
    assert [note.message for note in report.guards if f"snapshot.{NOW_MS}:" in note.message]


@pytest.mark.parametrize(("younger_ms", "kept"), [(-1, False), (0, False), (1, True)])
def test_missing_snapshot_keeps_young_payloads(store: Store, younger_ms: int, kept: bool) -> None:
    write_pointer = pointer(NOW_MS - LONG.undecided_ms + younger_ms)
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).stored(write_pointer, NOW_MS - HOUR)
    report = engine(janitor(store, lifetime=LONG), None).run_once(adopt=True)
    assert orders.stored_times() == [NOW_MS - HOUR] * kept
    assert report.totals.kept["undecided"] == kept


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"in_progress": [INVALID]}, True),
        ({"write_pointer": INVALID - 1}, True),
        ({"write_pointer": INVALID}, False),
        ({}, False),
    ],
    ids=["in progress", "after the snapshot", "last of the snapshot", "decided"],
)
def test_snapshot_decides_whose_payloads_are_kept(store: Store, fields: dict[str, Any], kept: bool) -> None:
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).stored(INVALID, NOW_MS - HOUR)
    clock = ManualClock(NOW_MS)
    adopted_janitor(store, lifetime=LONG, clock=clock, snapshots=Snapshots(clock, **fields))
    assert orders.stored_times() == [NOW_MS - HOUR] * kept


def test_fresh_snapshot_replaces_a_stale_one(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=7 * 86400)
    kit = adopted_janitor(store)
    orders.tx(INVALID, NOW_MS)
    kit.snapshots.invalid = [INVALID]
    kit.snapshots.age_ms = DAY
    kit.run_after(HOUR)
    assert orders.pointers() == [INVALID]
    kit.snapshots.age_ms = 0
    kit.run_after(HOUR)
    assert orders.pointers() == [-INVALID]
    kit.run_after(DAY)
    assert kit.state.open_ids()[INVALID].closed_ms is not None
