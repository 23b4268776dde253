"""A daemon's sweeps take the snapshot that was read last; how old it is they judge themselves."""

from __future__ import annotations

import logging

import pytest

from janitor.daemon.snapshot_refresh import Refreshed
from tests.builders import MINUTE, NOW_MS, Snapshots, janitor, pointer, topic
from tms_core.clock import ManualClock
from tms_core.errors import NoSnapshot
from tms_core.tables.memory import MemoryStore


def test_given_nothing_was_read_when_asked_then_it_is_read_once_and_remembered() -> None:
    manager = Snapshots(ManualClock(NOW_MS))
    source = Refreshed(manager)
    assert source.latest() == source.latest()
    assert manager.asked == 1


def test_given_a_refresh_when_asked_then_the_newest_is_there() -> None:
    clock = ManualClock(NOW_MS)
    source = Refreshed(Snapshots(clock))
    source.latest()
    clock.advance(MINUTE)
    source.refresh()
    assert source.latest().snapshot.timestamp_ms == NOW_MS + MINUTE


def test_given_snapshots_that_cannot_be_read_for_a_while_when_swept_then_the_last_one_serves_until_it_is_stale() -> (
    None
):
    """S14: an older snapshot that is fresh enough is used, one that is not gives no inversion."""
    store, clock = MemoryStore(), ManualClock(NOW_MS)
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    doomed = pointer(NOW_MS - 2 * MINUTE)
    orders.tx(doomed, NOW_MS - MINUTE)
    manager = Snapshots(clock, invalid=[doomed])
    source = Refreshed(manager)
    source.refresh()
    rig = janitor(store, clock=clock, snapshots=source)
    manager.error = NoSnapshot("the folder is not mounted")

    source.refresh()
    assert rig.engine.run_once(adopt=True).snapshot is not None
    assert orders.pointers() == [-doomed]

    clock.advance(3 * MINUTE)
    source.refresh()
    assert [note.guard for note in rig.engine.run_once().guards] == ["snapshot"]


def test_given_snapshots_that_can_never_be_read_when_asked_then_the_reason_is_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = Snapshots(ManualClock(NOW_MS), error=NoSnapshot("the folder is empty"))
    source = Refreshed(manager)
    with pytest.raises(NoSnapshot, match="the folder is empty"):
        source.latest()
    source.refresh()
    manager.error = None
    caplog.set_level(logging.INFO)
    source.refresh()
    assert source.latest().snapshot.timestamp_ms == NOW_MS
    # Once, and not at every attempt; and that it is over.
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the transaction snapshot could not be read: the folder is empty",
        "transaction snapshots can be read again",
    ]
