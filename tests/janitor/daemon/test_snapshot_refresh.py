"""A daemon's sweeps take the snapshot that was read last; how old it is they judge themselves."""

from __future__ import annotations

import logging

import pytest

from janitor.daemon.snapshot_refresh import CachedSource
from tests.builders import NOW_MS, Snapshots
from tms_core.clock import ManualClock
from tms_core.errors import NoSnapshot


def test_snapshots_that_cannot_be_read_give_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    manager = Snapshots(ManualClock(NOW_MS), error=NoSnapshot("the folder is empty"))
    source = CachedSource(manager)
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
