"""The report: counted rows, completed deletions, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from janitor.report import (
    HISTORY_ENTRIES,
    DataTable,
    Entry,
    EntryKey,
    Report,
    SnapshotUsed,
    Totals,
    deleted_bytes,
    sort_entries,
)
from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.figures import GuardNote
from janitor.state.records import Mode, RunRecord
from janitor.state.values import Pointer, pack, unpack
from tms_core.topic import TopicId

RUN = RunRecord("1700000000000-abcd", "apply", 1_700_000_000_000)
ORDERS, RETURNS = TopicId("default", "orders"), TopicId("default", "returns")


def entry_key(
    topic: TopicId = ORDERS,
    generation: int = 1,
    table: DataTable = "message",
    rule: Rule = Rule.EXPIRED,
    held: Hold | None = None,
) -> EntryKey:
    return EntryKey(topic, generation, table, rule, held)


def rows(number: int, key: EntryKey | None = None) -> Entry:
    return replace(Entry(*(key or entry_key())), rows=number)


def report(
    *entries: Entry, mode: Mode = "apply", kept: Mapping[Reason, int] = MappingProxyType({}), **changes: Any
) -> Report:
    topics = sort_entries(entries)
    plain = Report(
        id="1700000000000-abcd",
        mode=mode,
        started_ms=1_700_000_000_000,
        effective_now_ms=1_700_000_000_001,
        snapshot=None,
        topics=topics,
        totals=Totals.of(mode, topics, kept),
        deleted_bytes=deleted_bytes(mode, topics),
        boundary=None,
        guards=[],
        errors=[],
        store_calls=7,
        duration_seconds=1.25,
        phase_seconds={},
        full=True,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("mode", "held", "done"),
    [
        ("apply", None, True),
        ("plan", None, True),
        ("plan", Hold.FIRST_CONTACT, True),
        ("apply", Hold.FIRST_CONTACT, False),
        ("plan", Hold.FRONTIER, False),
        ("plan", Hold.PAUSED, False),
        ("plan", Hold.PROTECTED, False),
        ("plan", Hold.QUARANTINED, False),
    ],
)
def test_report_counts_rows_as_done_or_held_by_hold_and_mode(mode: Mode, held: Hold | None, done: bool) -> None:
    made = report(rows(3, entry_key(held=held)), mode=mode)
    assert made.topics[0].counts_as_done(mode) is done
    assert (made.total(Rule.EXPIRED), made.held_rows()) == ((3, 0) if done else (0, 3))


def test_entry_of_several_batches_spans_their_times_and_names_the_first_keys() -> None:
    entry, other = Entry(*entry_key()), Entry(*entry_key())
    entry.add([b"b", b"c"], 100, 20, 40)
    entry.add([b"d", b"e"], 50, 10, 25)
    other.add([b"f"], 5, 15, 30)
    entry.merge(other)
    assert (entry.rows, entry.bytes, entry.oldest_ms, entry.newest_ms) == (5, 155, 10, 40)
    assert entry.sample_keys == [b"b".hex(), b"c".hex(), b"d".hex()]


def test_totals_count_held_rows_by_entries_and_all_reasons_but_live() -> None:
    kept = report(rows(5, entry_key(held=Hold.PROTECTED)), kept={Reason.REFERENCED: 1, Reason.HELD: 99}).totals.kept
    assert (kept["held"], kept["referenced"]) == (5, 1)
    assert set(Reason) - set(kept) == {Reason.LIVE}


def test_sorted_entries_are_by_topic_table_generation_and_rule() -> None:
    ordered = [
        entry_key(generation=2, rule=Rule.EXPIRED),
        entry_key(generation=2, rule=Rule.EXPIRED, held=Hold.FRONTIER),
        entry_key(generation=2, rule=Rule.INVALID_TRANSACTION),
        entry_key(generation=10),
        entry_key(generation=1, table="payload"),
        entry_key(RETURNS),
    ]
    entries = [rows(1, key) for key in ordered]
    assert report(*reversed(entries), rows(0, entry_key(RETURNS, 2))).topics == entries


def test_report_as_json_has_typed_values_and_reads_back() -> None:
    entry = Entry(*entry_key(generation=3, table="payload", rule=Rule.OLD_GENERATION, held=Hold.FIRST_CONTACT))
    entry.add([b"\x00\xff", b"b"], 120, 5, 9)
    made = report(
        entry,
        mode="plan",
        snapshot=SnapshotUsed(1_699_999_999_000, "snapshot.1699999999000"),
        boundary=Pointer(2**63 - 1),
        guards=[GuardNote("clock", True, "ahead")],
        errors=["default:orders: broken"],
        kept={Reason.UNRECOGNIZED: 2},
        duration_seconds=0.123,
        phase_seconds={"message": 0.123},
        full=False,
    )
    written = json.loads(json.dumps(pack(made)))
    assert unpack(Report, written) == made
    assert written["topics"] == [
        {
            "tms_namespace": "default",
            "topic": "orders",
            "generation": 3,
            "table": "payload",
            "rule": "old_generation",
            "rows": 2,
            "bytes": 120,
            "oldest_ms": 5,
            "newest_ms": 9,
            "sample_keys": ["00ff", "62"],
            "held": "first_contact",
        }
    ]
    assert written["mode"] == "plan"
    assert written["snapshot"] == {"timestamp_ms": 1_699_999_999_000, "source": "snapshot.1699999999000"}
    assert written["boundary"] == "9223372036854775807"
    assert written["guards"] == [{"guard": "clock", "tripped": True, "message": "ahead", "code": "TMS-GUARD-CLOCK"}]
    assert written["errors"] == ["default:orders: broken"]
    assert written["totals"]["old_generation"] == 2
    assert written["totals"]["kept"]["unrecognized"] == 2
    assert (written["duration_seconds"], written["phase_seconds"]) == (0.123, {"message": 0.123})
    assert written["full"] is False


def test_history_of_few_entries_is_the_whole_report() -> None:
    made = report(rows(1, entry_key()))
    assert made.to_history(RUN, ())[1] == made


def test_history_of_many_entries_keeps_the_largest_and_all_totals() -> None:
    made = report(*(rows(number, entry_key(generation=number)) for number in range(1, HISTORY_ENTRIES + 6)))
    run, remembered = made.to_history(RUN, ())
    assert run.expired == remembered.totals.expired
    assert [entry.rows for entry in remembered.topics] == list(range(6, HISTORY_ENTRIES + 6))
    assert (made.topics_omitted, remembered.topics_omitted) == (0, 5)
    assert remembered.totals == made.totals
