"""States of every kind, history: runs, heartbeat, ledger, announcements, counters, counts and notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janitor.state.base import State
from janitor.state.documents import after
from janitor.state.records import CounterKey, LedgerEntry, Note, RunRecord, TopicCount
from janitor.state.runs import INTENT
from tests.janitor.state.conftest import DurableStateKind, StateKind, undone
from tests.janitor.state.entries import TOPIC, entry
from tests.support import size
from tms_core.errors import StateError
from tms_core.topic import TopicId

OTHER = TopicId("default", "other")

longs = st.integers(-(2**63), 2**63 - 1)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
topics = st.sampled_from([TOPIC, OTHER, TopicId("system", "orders")])
optional = st.none() | longs
tables = st.sampled_from(["message", "payload"])
key_bytes = st.binary(max_size=9)
entries = st.builds(
    LedgerEntry,
    *(words, longs, topics, longs, tables, words, key_bytes, key_bytes),
    *(optional, optional, optional, longs, longs, longs, optional),
)
keys = st.builds(CounterKey, words, st.lists(st.tuples(words, words), max_size=3).map(tuple))
# Sums of small numbers are exact, so that the test may add in another order.
amounts = st.integers(-1000, 1000).map(lambda number: number / 4)
counts = st.builds(TopicCount, longs, longs, st.none() | longs, st.none() | longs, longs)

#: Fewer examples, because each one has a new state, and HBase needs ten or more round trips for it.
FEW = settings(max_examples=size("TMS_TEST_EXAMPLES", 60) // 4)


def times(found: list[LedgerEntry]) -> list[int]:
    return [item.at_ms for item in found]


def test_run_by_id_returns_that_run(state: State) -> None:
    state.begin_run(RunRecord("one", "apply", 1))
    state.begin_run(RunRecord("two", "apply", 2, heartbeat_ms=2))
    state.finish_run(RunRecord("one", "apply", 1, 3, "done"))
    assert state.run("one") == RunRecord("one", "apply", 1, 3, "done")
    assert state.run("two") == RunRecord("two", "apply", 2, heartbeat_ms=2)
    assert state.run("three") is None


def test_runs_before_a_time_leave_out_those_that_started_then(state: State) -> None:
    for number in range(4):
        state.begin_run(RunRecord(f"r{number}", "apply", number))
    for number in range(3):
        state.finish_run(RunRecord(f"r{number}", "apply", number, 9, "done"))
    assert [run.id for run in state.runs(9, 3)] == ["r2", "r1", "r0"]
    assert [run.id for run in state.runs(1, 2)] == ["r1"]


def test_created_time_stays_the_first(state: State) -> None:
    state.save_created_ms(5)
    state.save_created_ms(3)
    assert state.created_ms() == 5


def test_unfinished_runs_with_a_wrong_clock_come_in_the_order_of_recording(state: State) -> None:
    for number in (3, 1, 2, 0):
        state.begin_run(RunRecord(f"run-{number}", "apply", number))
    state.finish_run(RunRecord("run-2", "apply", 1, 9, "done"))
    assert [run.id for run in state.unfinished_runs()] == ["run-3", "run-1", "run-0"]


def test_runs_after_one_of_a_clock_ahead_list_the_last_recorded_first(state: State) -> None:
    for number, began_ms in enumerate((10, 9_000, 11, 12, 13)):
        state.begin_run(RunRecord(f"r{number}", "apply", began_ms))
        if number < 4:
            state.finish_run(RunRecord(f"r{number}", "apply", 1, began_ms, "done"))
    assert [run.id for run in state.runs(9)] == ["r4", "r3", "r2", "r1", "r0"]
    assert [run.id for run in state.runs(2)] == ["r4", "r3"]
    assert [run.id for run in state.runs(9, before_run="r3")] == ["r2", "r1", "r0"]
    assert [run.id for run in state.runs(9, 13)] == ["r3", "r2", "r0"]
    assert state.runs(9, before_run="unknown") == []


def test_prune_runs_with_one_of_a_clock_ahead_forgets_by_each_run_s_own_time(state: State) -> None:
    for number, began_ms in enumerate((10, 9_000, 11, 12)):
        state.begin_run(RunRecord(f"r{number}", "apply", began_ms))
        state.finish_run(RunRecord(f"r{number}", "apply", 1, began_ms, "done"))
    assert state.prune_runs(12) == 2
    assert [run.id for run in state.runs(9)] == ["r3", "r1"]
    assert state.prune_runs(10_000) == 2
    assert (state.runs(9), state.run("r1")) == ([], None)


def test_retire_times_drops_later_times_and_keeps_the_others(state: State) -> None:
    state.save_created_ms(500)
    state.save_last_full_pass_ms(500)
    state.save_note(Note.SUCCESS, {"message": 500, "payload": 100})
    state.begin_run(RunRecord("ahead", "apply", 500))
    with state.transaction():
        state.retire_times(100)
    assert (state.created_ms(), state.last_full_pass_ms()) == (100, None)
    assert (state.note(Note.SUCCESS), state.note(Note.RETIRED)) == ({"payload": 100}, "ahead")
    assert [run.id for run in state.runs(1)] == ["ahead"], "the history keeps the run"


def test_beat_changes_only_an_unfinished_run(state: State) -> None:
    state.begin_run(RunRecord("over", "apply", 1))
    state.save_heartbeat("over", 2)
    state.finish_run(RunRecord("over", "apply", 1, 3, "done"))
    state.begin_run(RunRecord("on", "apply", 4))
    for run_id in ("over", "on", "unknown"):
        state.save_heartbeat(run_id, 9)
    assert [(run.id, run.heartbeat_ms) for run in state.runs(10)] == [("on", 9), ("over", 2)]


@FEW
@given(st.lists(entries, max_size=6), st.integers(0, 7))
def test_ledger_returns_the_last_entries_first(kind: StateKind, added: list[LedgerEntry], limit: int) -> None:
    with kind.new() as state:
        state.add_ledger(added)
        assert state.ledger(limit) == added[::-1][:limit]
        for topic in (TOPIC, OTHER):
            of_topic = [item for item in added[::-1] if item.topic == topic]
            assert state.ledger(limit, topic=topic) == of_topic[:limit]
            assert state.ledger_generations(topic) == sorted({item.generation for item in of_topic})


def test_ledger_by_topic_run_or_pattern_applies_the_limit_last(state: State) -> None:
    state.add_ledger([entry(at_ms=1), entry(at_ms=2, topic=OTHER), entry(at_ms=3, run_id="next"), entry(at_ms=4)])
    assert times(state.ledger(2, topic=TOPIC)) == [4, 3]
    assert times(state.ledger(9, topic=OTHER)) == [2]
    assert times(state.ledger(2, run_id="run")) == [4, 2]
    assert times(state.ledger(1, patterns=["*:other"])) == [2]
    assert times(state.ledger(9, patterns=["nothing:*", "default:or[d]ers"])) == [4, 3, 1]
    assert times(state.ledger(9, run_id="run", patterns=["default:other"])) == [2]
    assert state.ledger(9, patterns=["DEFAULT:*"]) == []


@pytest.mark.parametrize(("key", "held"), [(b"a\xff", False), (b"b", True), (b"cz", True), (b"d", False)])
def test_ledger_by_key_includes_the_start_not_the_stop(state: State, key: bytes, held: bool) -> None:
    state.add_ledger([entry(start=b"b", stop=b"d"), entry(topic=OTHER, start=b"", stop=b"z")])
    assert state.ledger(9, topic=TOPIC, key=key) == ([entry(start=b"b", stop=b"d")] if held else [])


def test_prune_ledger_by_number_after_a_gap_keeps_as_many(state: State) -> None:
    state.add_ledger(entry(at_ms=at_ms) for at_ms in (20, 21, 1, 2, 3, 4, 22, 23))
    assert state.prune_ledger(10, keep=4) == 4
    assert times(state.ledger(9)) == [23, 22, 21, 20]


def test_ledger_since_is_the_oldest_entry_after_a_prune(state: State) -> None:
    state.add_ledger(entry(at_ms=at_ms) for at_ms in (5, 6, 7))
    assert state.ledger_since_ms() is None
    state.prune_ledger(6, keep=10)
    assert state.ledger_since_ms() == 6
    state.prune_ledger(0, keep=1)
    assert state.ledger_since_ms() == 7
    state.prune_ledger(100, keep=1)
    assert state.ledger_since_ms() is None


@pytest.mark.parametrize("lasting", ["hbase"], indirect=True)  # a file lets one process write at a time
def test_prune_ledger_overtaken_prunes_the_rest(lasting: DurableStateKind, monkeypatch: pytest.MonkeyPatch) -> None:
    with lasting.new() as state, lasting.reopen() as other:
        for at_ms in (1, 5, 9):
            state.add_ledger([entry(at_ms=at_ms)])
        keys_of = state._keys_of

        def overtaken(*args: Any) -> Any:
            monkeypatch.undo()
            other.prune_ledger(100, keep=0)
            return keys_of(*args)

        monkeypatch.setattr(state, "_keys_of", overtaken)
        state.prune_ledger(3, keep=10)
        assert (state.ledger(9), state.ledger_since_ms()) == ([], None)


@FEW
@given(st.lists(st.dictionaries(keys, amounts, max_size=3), max_size=4))
def test_counters_of_any_amounts_are_their_sums(kind: StateKind, added: list[Mapping[CounterKey, float]]) -> None:
    sums: dict[CounterKey, float] = {}
    with kind.new() as state:
        for amounts_of_a_run in added:
            state.add_counters(amounts_of_a_run)
            for key, amount in amounts_of_a_run.items():
                sums[key] = sums.get(key, 0.0) + amount
        assert state.counters() == sums


ROWS, BYTES = CounterKey("rows", (("table", "message"), ("rule", "expired"))), CounterKey("bytes")


def test_counters_show_the_last_booking_until_the_run_ends(state: State) -> None:
    state.add_counters({BYTES: 1})
    state.begin_run(RunRecord("run", "apply", 1))
    state.save_running_counters("run", {ROWS: 2, BYTES: 3})
    state.save_running_counters("run", {ROWS: 5, BYTES: 7})
    assert state.running_counters("run") == {ROWS: 5, BYTES: 7}
    assert state.counters() == {ROWS: 5, BYTES: 8}
    with state.transaction():
        state.add_counters({ROWS: 6, BYTES: 9})
        state.finish_run(RunRecord("run", "apply", 1, 2, "done"))
    assert state.running_counters("run") == {}
    assert state.counters() == {ROWS: 6, BYTES: 10}


def test_book_of_an_unknown_or_finished_run_counts_nothing(state: State) -> None:
    state.begin_run(RunRecord("over", "apply", 1))
    state.finish_run(RunRecord("over", "apply", 1, 2, "lost"))
    for run_id in ("over", "unknown"):
        state.save_running_counters(run_id, {ROWS: 5})
        assert (state.running_counters(run_id), state.counters()) == ({}, {})


def test_book_before_an_undone_finish_is_kept(state: State) -> None:
    state.begin_run(RunRecord("run", "apply", 1))
    state.save_running_counters("run", {ROWS: 5})

    with undone(state):
        state.add_counters({ROWS: 6})
        state.finish_run(RunRecord("run", "apply", 1, 2, "done"))
    assert state.counters() == {ROWS: 5}


@FEW
@given(
    known=st.dictionaries(topics, counts, max_size=3), changed=st.dictionaries(topics, st.none() | counts, max_size=3)
)
def test_save_counts_changes_and_deletes_only_the_given_topics(
    kind: StateKind, known: dict[TopicId, TopicCount], changed: dict[TopicId, TopicCount | None]
) -> None:
    with kind.new() as state:
        state.save_counts(known)
        state.save_counts(changed)
        assert state.counts() == {topic: kept for topic, kept in {**known, **changed}.items() if kept is not None}


def test_save_note_keeps_the_last_value_until_none(state: State) -> None:
    state.save_note("one", {"list": [1, "two", None]})
    state.save_note("two", 0)
    state.save_note("one", ["changed"])
    assert (state.note("one"), state.note("two"), state.note("three")) == (["changed"], 0, None)
    state.save_note("one", None)
    assert state.note("one") is None


def end_of_run(state: State) -> None:
    with state.transaction():
        state.finish_run(RunRecord("run", "apply", 1, 2, "done"))
        state.add_ledger([entry(), entry()])
        state.add_counters({CounterKey("one"): 1.0, CounterKey("two"): 1.0})
        state.save_counts({TOPIC: TopicCount(1, 1, None, None, 1)})
        state.save_note("note", 1)
        state.prune_ledger(0, 10)


def test_end_of_a_run_whose_last_step_fails_keeps_nothing(state: State) -> None:
    state.begin_run(RunRecord("run", "apply", 1))

    def failing() -> None:
        with state.transaction():
            end_of_run(state)
            state.finish_run(RunRecord("run-2", "apply", 1, 2, "done"))

    with pytest.raises(StateError, match="run-2"):
        failing()
    assert (state.ledger(9), state.counters(), state.counts(), state.note("note")) == ([], {}, {}, None)
    assert [run.id for run in state.unfinished_runs()] == ["run"]


def test_intents_are_oldest_first_until_cleared(state: State) -> None:
    first = entry(
        rows=None, oldest_ms=None, newest_ms=None, snapshot_timestamp_ms=None, start=b"\x00\xff", stop=b"\xff"
    )
    second = entry(at_ms=2, table="payload")
    state.intend(first)
    state.intend(second)
    assert state.intents() == [first, second]
    state.clear_intents()
    assert state.intents() == []
    state.clear_intents()
    state.intend(first)
    assert state.intents() == [first]


def test_clear_intents_keeps_those_of_a_run_elsewhere(state: State) -> None:
    state.begin_run(RunRecord("other", "apply", 1))
    state.begin_run(RunRecord("run", "apply", 1))
    state.intend(entry(run_id="run"))
    state.intend(entry(run_id="other"))
    state.finish_run(RunRecord("run", "apply", 1, 2, "interrupted"))
    state.clear_intents()
    assert state.intents() == [entry(run_id="other")]
    state.finish_run(RunRecord("other", "apply", 1, 3, "done"))
    state.clear_intents()
    assert state.intents() == []


def damage_intent(state: State) -> bytes:
    """Damage the only announcement; return its key."""
    [(key, _)] = state.driver.loose.scan(INTENT, after(INTENT))
    state.driver.loose.put([(key, b'["odd"]')])
    return key


def test_clear_intents_with_a_damaged_one_of_a_closed_run_deletes_it(state: State) -> None:
    state.begin_run(RunRecord("run", "apply", 1))
    state.intend(entry(run_id="run"))
    damage_intent(state)
    state.finish_run(RunRecord("run", "apply", 1, 2, "interrupted"))
    state.clear_intents()
    assert state.intents() == []


def test_damaged_intent_during_a_run_names_its_meaning_and_the_way_out(state: State) -> None:
    state.begin_run(RunRecord("run", "apply", 1))
    state.intend(entry(run_id="run"))
    key = damage_intent(state)
    for attempt in (state.intents, state.clear_intents):
        with pytest.raises(StateError) as caught:
            attempt()
        assert f"row {key.hex()} is damaged" in caught.value.message
        assert "may have deleted" in caught.value.message
        assert state.driver.loose.removal(key) in caught.value.hint


def test_intent_in_an_undone_transaction_stays(state: State) -> None:
    with undone(state):
        state.intend(entry())
    assert state.intents() == [entry()]
