"""Outcomes: counts, merges, and JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import cast

from janitor.report import NAMED_KEYS, EntryKey, UnrecognizedKey
from janitor.rules.policy import Frontier, Hold, Reason, Rule, admit
from janitor.state import values
from janitor.state.base import ClockAnchor
from janitor.state.figures import GuardNote
from janitor.sweep.findings import Batch, Done, Due, FailedTopic, RemainingPointer, RemainingRows, unrecognized
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import TopicWork
from tests.builders import NOW_MS
from tests.janitor.state.entries import ENTRY
from tests.support import raising
from tms_core.errors import StopRequested
from tms_core.rowkey import MessageKey
from tms_core.tables.base import KeyRange
from tms_core.tables.compaction import DeletedRanges
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiry
from tms_core.topic import TopicId, TopicMetadata

ORDERS = TopicMetadata(TopicId("default", "orders"), 3, 60)
KEYS = [MessageKey(ORDERS.topic, 3, ms, 0).pack() for ms in range(1, 6)]


def make_due(keys: list[bytes], hold: Hold | None = None) -> Due:
    work = TopicWork(ORDERS, b"", Frontier.open(NOW_MS, ORDERS), admit(ORDERS, ClockAnchor(NOW_MS, 0, "")))
    return Due(work, MemoryStore().message, Batch("message", 3, Rule.EXPIRED, keys), 100 * len(keys), hold, hold)


def entry_key(held: Hold | None = None) -> EntryKey:
    return EntryKey(ORDERS.topic, 3, "message", Rule.EXPIRED, held)


def test_outcome_counts_only_deleted_rows_of_a_batch() -> None:
    outcome = Outcome()
    outcome.add(make_due(KEYS), Done(KEYS[:1], entry=ENTRY))
    assert (outcome.entries[entry_key()].rows, outcome.entries[entry_key()].bytes) == (1, 100)
    outcome.add(make_due(KEYS), Done(entry=ENTRY))
    assert outcome.entries[entry_key()].rows == 1


def test_taking_leaves_out_held_rows_and_rows_that_stay() -> None:
    outcome = Outcome()
    for finding in (make_due(KEYS, Hold.FRONTIER), RemainingRows(Reason.UNDECIDED, 2), RemainingRows(Reason.LIVE, 5)):
        outcome.add(finding)
    assert (outcome.entries[entry_key(Hold.FRONTIER)].rows, outcome.kept) == (5, {Reason.UNDECIDED: 2})
    assert (outcome.deletions, outcome.without_kept_rows().entries, outcome.without_kept_rows().kept) == ({}, {}, {})


def test_outcome_counts_all_unrecognized_keys_and_names_the_first() -> None:
    outcome = Outcome()
    outcome.add(unrecognized("message", [b"\x00\xff"]))
    outcome.add(unrecognized("payload", [bytes([number]) for number in range(30)]))
    assert outcome.kept[Reason.UNRECOGNIZED] == 31
    assert len(outcome.unrecognized) == NAMED_KEYS
    assert outcome.unrecognized[:2] == [UnrecognizedKey("message", "00ff"), UnrecognizedKey("payload", "00")]


def test_merge_of_outcomes_of_parts_counts_everything_once() -> None:
    one, other = Outcome(), Outcome()
    one.add(make_due(KEYS[3:]), Done(KEYS[3:], entry=replace(ENTRY, at_ms=9)))
    other.add(make_due(KEYS[:3]), Done(KEYS[:3], entry=replace(ENTRY, at_ms=7)))
    one.add(RemainingPointer(8))
    other.add(RemainingPointer(5))
    other.add(FailedTopic(b"a:b:", "payload", "store", "broken"))
    one.add(RemainingRows(Reason.UNKNOWN_TOPIC, 1, prefix=b"a:c:"))
    one.merge(other)
    [taken] = one.deletions.values()
    assert taken == replace(ENTRY, at_ms=7, start=KEYS[0], stop=KEYS[-1] + b"\x00", rows=5, oldest_ms=1, newest_ms=5)
    assert one.entries[entry_key()].rows == 5
    assert one.untouchable == 5
    assert (one.failed, one.errors, one.failures) == (
        {b"a:b:": FailedTopic(b"a:b:", "payload", "store", "broken")},
        ["broken"],
        Counter({("payload", "store"): 1}),
    )
    assert one.unknown == {TopicId("a", "c")}


def test_merge_into_an_empty_outcome_keeps_each_field() -> None:
    full = Outcome(
        expired=[Expiry(ORDERS.topic, 3, 1, 0, 9)],
        found=[KeyRange(KEYS[0], KEYS[1])],
        scanned=Counter(message=3),
        seeks_spared=2,
        truncated=1,
        early={(ORDERS.topic, 3): (KEYS[0], KEYS[1])},
        pointers={ORDERS.topic: {1}},
        untouchable=7,
        withheld={b"a:b:"},
        moved={b"a:c:"},
        unknown={TopicId("a", "d")},
        unsure=[ENTRY],
        archive_error="full",
        notes=[GuardNote("snapshot", tripped=False, message="old")],
        ended=StopRequested("stopping"),
    )
    full.add(make_due(KEYS), Done(KEYS, entry=ENTRY))
    full.add(unrecognized("payload", [b"\xff"]))
    full.add(FailedTopic(b"a:b:", "payload", "store", "broken"))
    # The driver adds the calls of Spark tasks, which have separate stores.
    names = {field.name for field in fields(Outcome)} - {"calls"}
    empty = Outcome()
    assert [name for name in sorted(names) if getattr(full, name) == getattr(empty, name)] == []
    merged = Outcome()
    merged.merge(full)
    assert [name for name in sorted(names) if getattr(merged, name) != getattr(full, name)] == []


def test_outcome_reads_back_from_json() -> None:
    outcome = Outcome(scanned=Counter(message=3), withheld={b"x:y:"}, pointers={ORDERS.topic: {1, 2}})
    outcome.add(unrecognized("payload", [b"\xff"]))
    outcome.add(FailedTopic(b"a:b:", "payload", "store", "broken"))
    outcome.add(make_due(KEYS), Done(KEYS, entry=ENTRY))
    assert values.unpack(Outcome, values.pack(outcome)) == outcome


def test_stop_during_a_compaction_interrupts_the_pass() -> None:
    outcome, stopped = Outcome(), StopRequested("stopping")
    outcome.compact(cast(DeletedRanges, SimpleNamespace(compact=raising(stopped))), lambda: None)
    assert outcome.interruption is stopped
