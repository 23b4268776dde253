"""S9: a topic that fails repeatedly is quarantined and probed; the other topics are cleaned in every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from janitor.report import Report
from janitor.run import conclude
from janitor.run.guards import FIRST_PROBE_MS, LAST_PROBE_MS, STRIKES
from janitor.state.base import Strikes
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Run
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Call, Topic, TopicFault, is_about, janitor, pointer, topic, watch
from tests.janitor.state.entries import entry
from tms_core.errors import StoreError, WriteRefused
from tms_core.tables.base import KEYS, Store
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

TTL_SECONDS = 3600
#: A transaction after its lifetime and grace, which a full pass closes.
OLD = pointer(NOW_MS - 10 * DAY)


class QuarantineKit:
    """Three topics, one of which fails. Before each run, every topic gets due rows and a row to invert."""

    def __init__(self, store: Store, *operations: str, state: SqliteState | None = None) -> None:
        self.topics = [topic(store, f"default:{name}", ttl_seconds=TTL_SECONDS) for name in "abc"]
        self.first, self.bad, self.last = self.topics
        self.janitor = janitor(store, state=state, now_ms=NOW_MS, batch_rows=2)
        self.janitor.snapshots.invalid = [OLD]
        self.janitor.engine.run_once(adopt=True)
        self.fault = TopicFault(self.bad, operations=operations or ("message.delete",))
        watch(store, before=self.fault)

    def run(self, wait_ms: int = MINUTE, *, patient: bool = False) -> Report:
        self.janitor.clock.advance(wait_ms)
        now_ms = self.janitor.clock.now_ms()
        due_ms, invalid = now_ms - TTL_SECONDS * 1000 - 1, pointer(now_ms - HOUR // 2)
        self.janitor.snapshots.invalid = [*self.janitor.snapshots.invalid, invalid]
        for described in self.topics:
            described.plain(due_ms).tx(invalid, now_ms - MINUTE).stored(pointer(due_ms), due_ms)
        self.fault.calls.clear()
        return self.janitor.engine.run_once(incremental=patient)

    def strike_out(self) -> None:
        for _ in range(STRIKES):
            assert self.run().errors
        assert self.is_quarantined

    @property
    def strikes(self) -> dict[str, Strikes]:
        return {record.topic: strikes for record, strikes in self.janitor.state.strikes().items()}

    @property
    def is_quarantined(self) -> bool:
        """Return whether the failing topic is in quarantine."""
        probe_ms = self.strikes["b"].probe_ms if "b" in self.strikes else None
        return probe_ms is not None and self.janitor.clock.now_ms() < probe_ms

    def pop_calls_about_bad_topic(self) -> list[str]:
        """Return and reset the names of calls about the failing topic's rows."""
        found = [call.name for call in self.fault.calls if is_about(call, self.bad)]
        self.fault.calls.clear()
        return [name for name in found if name != "metadata.get"]

    def left(self) -> set[object]:
        """Return the rows of the failing topic, read without the fault."""
        self.fault.is_repaired = True
        found: set[object] = {*self.bad.messages(), *self.bad.stored_times()}
        self.fault.is_repaired = False
        return found

    def others_are_swept(self) -> bool:
        """Return whether the other topics have no due row and no row to invert."""
        cutoff_ms = self.janitor.clock.now_ms() - TTL_SECONDS * 1000
        return all(
            min(described.times(), default=cutoff_ms) >= cutoff_ms
            and min(described.stored_times(), default=cutoff_ms) >= cutoff_ms
            and not set(self.janitor.snapshots.invalid) & set(described.pointers())
            for described in (self.first, self.last)
        )


OPERATIONS = ("message.delete", "message.invert", "message.cells", "payload.keys", "payload.delete")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_failing_topic_is_quarantined_after_three_attempts(store: Store, operation: str) -> None:
    kit = QuarantineKit(store, operation)
    for strike in range(1, STRIKES + 1):
        report = kit.run()
        assert any("default:b" in error for error in report.errors)
        assert kit.strikes["b"].count == strike
        assert set(kit.strikes) == {"b"}
        assert kit.others_are_swept()
    before = kit.left()
    for _ in range(3):
        report = kit.run()
        assert report.errors == []
        assert kit.pop_calls_about_bad_topic() == [], "a quarantined topic is not read or written"
        assert any(note.guard == "quarantine" and "default:b" in note.message for note in report.guards)
        assert kit.others_are_swept()
    assert before <= kit.left()


def test_quarantined_topic_is_probed_after_an_hour_up_to_a_day(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.strike_out()
    waits = []
    for _ in range(8):
        probe_ms = kit.strikes["b"].probe_ms
        assert probe_ms is not None
        wait_ms = probe_ms - kit.janitor.clock.now_ms()
        waits.append(wait_ms)
        assert kit.run(wait_ms - 1).errors == [], "not yet"
        assert kit.pop_calls_about_bad_topic() == []
        assert kit.run(1).errors, "the probe fails, too"
        assert kit.others_are_swept()
    assert [wait_ms // HOUR for wait_ms in waits] == [1, 2, 4, 8, 16, 24, 24, 24]
    assert {wait_ms % HOUR for wait_ms in waits} == {0}


def test_repaired_topic_leaves_quarantine(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.strike_out()
    kit.fault.is_repaired = True
    assert kit.run().errors == []
    assert kit.is_quarantined, "the repair is not known yet"
    report = kit.run(FIRST_PROBE_MS)
    assert (report.errors, kit.strikes, report.held_topics()) == ([], {}, {})
    due_ms = kit.janitor.clock.now_ms() - TTL_SECONDS * 1000
    assert min(kit.bad.times()) >= due_ms
    assert min(kit.bad.stored_times(), default=due_ms) >= due_ms
    assert not set(kit.janitor.snapshots.invalid) & set(kit.bad.pointers())


def test_success_after_two_failures_resets_the_count(store: Store) -> None:
    kit = QuarantineKit(store)
    for _ in range(4):
        kit.fault.is_repaired = False
        kit.run()
        kit.run()
        assert kit.strikes["b"].count == 2
        kit.fault.is_repaired = True
        assert kit.run().errors == []
        assert kit.strikes == {}


def test_quarantined_topic_prevents_proofs_until_it_succeeds(store: Store) -> None:
    kit = QuarantineKit(store)
    assert kit.janitor.state.boundary() is not None
    kit.bad.tx(OLD - 1, kit.janitor.clock.now_ms())
    kit.janitor.snapshots.invalid = [OLD - 1, *kit.janitor.snapshots.invalid]
    kit.strike_out()
    evidence = kit.janitor.state.evidence()
    for wait_ms in (MINUTE, DAY - HOUR, 2 * MINUTE):
        kit.janitor.state.save_strikes({kit.bad.id: Strikes(9, 0, "it fails.", 0, kit.janitor.clock.now_ms() + DAY)})
        kit.run(wait_ms)
        # A new invalid id below the boundary refutes it.
        assert (kit.janitor.state.boundary(), kit.janitor.state.evidence()) == (None, evidence)
    assert (OLD - 1) in kit.bad.pointers()
    kit.fault.is_repaired = True
    report = kit.run(DAY)
    assert (report.full, kit.bad.pointers().count(OLD - 1), kit.strikes) == (True, 0, {})
    assert report.boundary is not None
    assert report.boundary >= OLD


def test_quarantined_topic_causes_one_full_pass_a_day(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.strike_out()
    full = []
    for _ in range(48):
        probe = kit.strikes["b"].probe_ms
        assert probe is not None
        if probe - kit.janitor.clock.now_ms() > 30 * MINUTE:
            full.append(kit.run(30 * MINUTE).full)
        else:
            kit.run(30 * MINUTE)
    assert len(full) > 40
    assert sum(full) <= 2


def test_failing_store_quarantines_no_topic(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.fault.topics = kit.topics
    for _ in range(2 * STRIKES):
        assert len(kit.run().errors) == 3
        assert kit.strikes == {}
    kit.fault.is_repaired = True
    assert kit.run().errors == []
    assert kit.others_are_swept()


def test_full_disk_with_one_due_topic_quarantines_no_topic(store: Store) -> None:
    """A topic without due rows does not prove that the store accepts writes."""
    quiet = topic(store, "default:quiet", ttl_seconds=30 * 86400).plain(NOW_MS)
    kit = QuarantineKit(store, "message.delete", "message.invert", "payload.delete")
    kit.fault.topics = [*kit.topics, quiet]
    for _ in range(2 * STRIKES):
        assert kit.run().errors
        assert kit.strikes == {}
    kit.fault.is_repaired = True
    assert kit.run().errors == []
    assert kit.others_are_swept()


@pytest.mark.parametrize("operation", ["message.delete", "payload.delete", "message.invert"])
def test_read_only_store_does_not_quarantine_the_only_topic(store: Store, operation: str) -> None:
    kit = QuarantineKit(store, operation)
    kit.fault.error = WriteRefused("No space left on device.", "Free some space.")
    for _ in range(STRIKES + 2):
        report = kit.run()
        assert any("default:b" in error and "No space left" in error for error in report.errors)
        assert kit.strikes == {}
    kit.fault.is_repaired = True
    assert kit.run().errors == []
    assert kit.others_are_swept()
    assert kit.bad.times() == [time for time in kit.bad.times() if time >= kit.janitor.clock.now_ms() - HOUR]


def test_read_only_store_changes_no_failure_count(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.run()
    before = kit.strikes
    assert before["b"].count == 1
    kit.fault.error = WriteRefused("Read-only file system.")
    kit.run()
    assert kit.strikes == before


def test_lost_task_does_not_excuse_unreadable_topics(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = QuarantineKit(store, "message.cells")
    kit.fault.topics = [kit.first, kit.bad]
    strikes = conclude._strikes

    def strikes_after_a_lost_task(run: Run, outcome: Outcome, *rest: Any) -> dict[TopicId, Strikes | None]:
        outcome.unsure.append(entry(topic=kit.last.id, rows=None))
        return strikes(run, outcome, *rest)

    monkeypatch.setattr(conclude, "_strikes", strikes_after_a_lost_task)
    invalid = pointer(NOW_MS - HOUR // 2)
    kit.janitor.snapshots.invalid = [OLD, invalid]
    for unreadable in (kit.first, kit.bad):
        unreadable.tx(invalid, NOW_MS - MINUTE)
    assert kit.janitor.run_after(MINUTE).errors
    assert {name: one.count for name, one in kit.strikes.items()} == {"a": 1, "b": 1}


def test_failure_counts_survive_a_restart(store: Store, tmp_path: Path) -> None:
    with SqliteState(tmp_path / "state") as state:
        kit = QuarantineKit(store, state=state)
        kit.run()
        kit.run()
    with SqliteState(tmp_path / "state") as state:
        kit.janitor = kit.janitor.restart(state=state)
        kit.run()
        assert kit.is_quarantined
        assert kit.run().errors == []


@pytest.mark.parametrize("back_ms", [2 * HOUR, 3 * DAY, 365 * DAY])
def test_quarantined_topic_is_probed_within_a_day_of_any_clock(back_ms: int) -> None:
    kit = QuarantineKit(MemoryStore())
    kit.janitor.snapshots.write_pointer = pointer(NOW_MS + DAY)
    kit.strike_out()
    kit.fault.is_repaired = True
    kit.janitor.clock.step(-back_ms)
    for _ in range(25):
        kit.run(HOUR)
    assert kit.strikes == {}


def test_plan_names_quarantined_topic_without_reading_it(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.strike_out()
    kit.fault.calls.clear()
    report = kit.janitor.engine.preview()
    assert kit.pop_calls_about_bad_topic() == []
    assert [note.guard for note in report.guards] == ["quarantine"]
    assert not report.tripped


def test_quarantined_topic_without_metadata_is_forgotten(store: Store) -> None:
    kit = QuarantineKit(store)
    kit.strike_out()
    gone = topic(store, "default:b", ttl_seconds=TTL_SECONDS).write_metadata(b"{")
    kit.run()
    assert kit.is_quarantined
    kit.run(FIRST_PROBE_MS)
    assert kit.strikes == {}, "no delete, so no failure"
    gone.describe(ttl_seconds=TTL_SECONDS)
    kit.run()
    assert kit.strikes["b"].count == 1, "the count starts again"


def test_unreadable_unknown_topic_is_quarantined(store: Store) -> None:
    kit = QuarantineKit(store, "message.cells")
    kit.bad.write_metadata(b"{")
    kit.strike_out()
    assert kit.run().errors == []
    assert kit.others_are_swept()


def test_failed_topic_keeps_its_frontier_and_holds_nothing(store: Store) -> None:
    kit = QuarantineKit(store)
    frontier = kit.janitor.state.frontiers()[kit.bad.id]
    kit.strike_out()
    kit.run(FIRST_PROBE_MS // 2)
    assert kit.janitor.state.frontiers()[kit.bad.id] == frontier
    assert kit.janitor.state.frontiers()[kit.last.id] != frontier
    kit.fault.is_repaired = True
    assert kit.run(LAST_PROBE_MS).held_topics() == {}
    assert kit.janitor.state.frontiers()[kit.bad.id].cutoff_ms == kit.janitor.clock.now_ms() - TTL_SECONDS * 1000


def damaged(store: MemoryStore, described: Topic) -> Callable[[Call], None]:
    """Return a watcher that fails every read that reaches a row of the topic."""

    def look(call: Call) -> None:
        name, _, operation = call.name.partition(".")
        if operation in ("keys", "cells"):
            keys = (store.message if name == "message" else store.payload).read(KEYS, *call.arguments).items
            if any(key.startswith(described.id.prefix) for key in keys):
                raise StoreError("a block is damaged.")

    return look


@pytest.mark.parametrize("patient", [False, True])
def test_damage_at_the_start_of_a_topic_spares_later_topics(patient: bool) -> None:
    store = MemoryStore()
    kit = QuarantineKit(store)
    kit.fault.is_repaired = True
    kit.bad.plain(1).stored(pointer(1), 1)
    watch(store, before=damaged(store, kit.bad))
    for _ in range(STRIKES):
        report = kit.run(2 * MINUTE, patient=patient)
        assert any("default:b" in error for error in report.errors)
        assert kit.others_are_swept()
    assert kit.is_quarantined
    for _ in range(3):
        report = kit.run(2 * MINUTE, patient=patient)
        assert report.errors == []
        assert kit.others_are_swept()


def test_damage_between_two_topics_spares_both_and_proves_nothing() -> None:
    store = MemoryStore()
    stray = Topic(store, topic(store, "default:bb", ttl_seconds=1).id)
    stray.write_metadata(b"{").plain(1)
    kit = QuarantineKit(store)
    proven = kit.janitor.state.boundary()
    kit.fault.is_repaired = True
    kit.janitor.clock.advance(DAY)
    watch(store, before=damaged(store, stray))
    report = kit.run()
    assert report.full
    assert report.errors
    assert kit.others_are_swept()
    assert (kit.janitor.state.boundary(), kit.strikes) == (proven, {})


def test_unreadable_store_quarantines_no_topic() -> None:
    store = MemoryStore()
    kit = QuarantineKit(store)

    def fail(call: Call) -> None:
        if call.name.endswith((".keys", ".cells")):
            raise StoreError("the disk is gone.")

    watch(store, before=fail)
    assert len(kit.run().errors) >= 3
    assert kit.strikes == {}
    assert kit.janitor.state.runs(1)[0].result == "partial"
