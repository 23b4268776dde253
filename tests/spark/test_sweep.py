"""A pass walked by tasks does what a pass walked by one process does, whatever becomes of the tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.archive import ParquetArchive
from janitor.compaction import DeletedRanges
from janitor.parquet import read, summarise
from janitor.report import Report
from janitor.spark.access import Access
from janitor.spark.options import Options
from janitor.spark.sweep import cutter
from janitor.spark.tasks import Errand, FollowedLease, Run, Share, StoreGround, perform, portable
from janitor.state.base import RunRecord, StoreRecord
from janitor.state.sqlite import SqliteState
from janitor.world import Terms
from tests.builders import DAY, HOUR, LIFETIME, MINUTE, NOW_MS, Desk, Snapshots, every, pointer, topic
from tests.janitor.test_differential import TERMS, FixedSource, Scene, leveldb_store, scenes
from tests.salted import SaltedStore
from tests.spark.local import LocalRig, LocalSender, local_rig
from tms_core.clock import ManualClock
from tms_core.errors import ArchiveError, LeaseLost, StoreUnavailable
from tms_core.lease import Lease
from tms_core.tables.base import Store
from tms_core.tables.leveldb import LevelDBStore

DEAD = pointer(NOW_MS - 2 * DAY)
USUAL = Terms(0, (), LIFETIME, True, 60)


def told(report: Report) -> dict[str, Any]:
    """What two reports of the same rows have in common."""
    found = report.to_json()
    left_out = ("id", "duration_seconds", "phase_seconds", "store_calls", "seeks_spared", "mode", "errors")
    topics = [{name: value for name, value in entry.items() if name != "sample_keys"} for entry in found["topics"]]
    return {**{name: value for name, value in found.items() if name not in left_out}, "topics": topics}


def rows_of(store: Store) -> tuple[Any, Any]:
    return every(store.message.rows), every(store.payload.rows)


# --- the same as one process -----------------------------------------------------------------------------------------


@given(scenes(), st.integers(1, 7), st.integers(1, 2))
def test_given_a_random_store_when_swept_by_tasks_then_rows_and_report_are_those_of_one_process(
    scene: Scene, batch_rows: int, times: int
) -> None:
    outcomes = []
    for on_tasks in (True, False):
        store, state, clock = SaltedStore(), SqliteState.in_memory(), ManualClock(scene.now_ms)
        scene.fill(store)
        state.save_store(StoreRecord("mark", store.identity(), adopted_ms=0))
        state.save_frontiers(scene.records)
        source = FixedSource(scene.snapshot) if scene.snapshot else None
        options: dict[str, Any] = {"token_hex": lambda n: "0" * n, "batch_rows": batch_rows}
        if on_tasks:
            rig = local_rig(store, terms=TERMS, snapshots=source, state=state, clock=clock, **options)
            rig.engine._source = source
            planned, report = rig.engine.plan().report, rig.engine.run_once()
        else:
            desk = Desk(store, state, source, clock, TERMS, **options)
            planned, report = desk.preview(), desk.run_once()
        ledger = sorted(
            (replace(entry, at_ms=0, run_id="") for entry in state.ledger(1000)), key=lambda entry: repr(entry)
        )
        outcomes.append((rows_of(store), told(planned), told(report), ledger, state.evidence(), state.frontiers()))
        assert not report.errors
    assert outcomes[0] == outcomes[1]


@given(scenes())
def test_given_a_random_leveldb_store_when_planned_in_pieces_then_the_plan_is_the_same(scene: Scene) -> None:
    with leveldb_store() as store:
        scene.fill(store)
        told_by = []
        for cut in (1, 5):
            state = SqliteState.in_memory()
            state.save_store(StoreRecord("mark", store.identity(), adopted_ms=0))
            state.save_frontiers(scene.records)
            source = FixedSource(scene.snapshot) if scene.snapshot else None
            rig = local_rig(store, terms=TERMS, state=state, clock=ManualClock(scene.now_ms), cut=in_pieces(cut))
            rig.engine._source = source
            rig.sender.ground = PiecesGround(store)
            told_by.append(told(rig.engine.plan().report))
        assert told_by[0] == told_by[1]
"""
"""
