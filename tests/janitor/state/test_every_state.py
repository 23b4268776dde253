"""States of every kind: saved values are returned, atomically."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janitor.state.base import State
from janitor.state.records import (
    EVERYTHING,
    ClockAnchor,
    CounterKey,
    Evidence,
    FrontierRecord,
    Note,
    OpenIdRecord,
    Pause,
    PendingJump,
    ProvenBoundary,
    RunRecord,
    StoreRecord,
    Strikes,
    TopicCount,
)
from tests.janitor.state.conftest import DurableStateKind, StateKind, undone
from tests.janitor.state.entries import entry
from tests.support import size
from tms_core.errors import StateError
from tms_core.topic import TopicId

TOPIC = TopicId("default", "orders")
ANCHOR = ClockAnchor(1_000, 10, "boot")
FRONTIER = FrontierRecord(1, 500, ANCHOR, 400)
STORE = StoreRecord("mark", "leveldb:/data", 5, 6, 7)
STRIKES = Strikes(3, 7, "StateError: broken", 7, 99)

longs = st.integers(-(2**63), 2**63 - 1)
ints = st.integers(-(2**31), 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
topics = st.builds(
    TopicId, st.from_regex(r"[a-zA-Z0-9_]{1,8}", fullmatch=True), st.from_regex(r"[a-zA-Z0-9_-]{1,8}", fullmatch=True)
)
anchors = st.builds(ClockAnchor, longs, longs, texts)
frontiers = st.builds(
    FrontierRecord,
    ints,
    longs,
    anchors,
    longs,
    st.none() | st.builds(PendingJump, ints, ints, anchors, st.booleans()),
    st.none() | st.tuples(ints, ints, st.booleans()),
    st.booleans(),
)
open_ids = st.builds(OpenIdRecord, longs, longs, st.none() | longs, st.none() | longs)
strikes = st.builds(Strikes, ints, longs, texts, st.none() | longs, st.none() | longs)
evidence = st.builds(Evidence, st.binary(max_size=20), st.none() | st.binary(max_size=20), longs, longs, longs, texts)

#: Fewer examples, because each one has a new state, and HBase needs ten or more round trips for it.
FEW = settings(max_examples=size("TMS_TEST_EXAMPLES", 60) // 4)


def test_new_state_is_empty(state: State) -> None:
    assert (state.store(), state.anchor(), state.boundary(), state.last_full_pass_ms()) == (None, None, None, None)
    assert (state.frontiers(), state.open_ids(), state.runs(10), state.evidence()) == ({}, {}, [], [])
    assert (state.pauses(), state.strikes(), state.lease(), state.created_ms()) == ([], {}, None, None)
    assert (state.ledger(10), state.ledger_generations(TOPIC), state.ledger_since_ms()) == ([], [], None)
    assert (state.intents(), state.counters(), state.counts(), state.note("any")) == ([], {}, {}, None)
    assert (state.run("any"), state.unfinished_runs()) == (None, [])


@FEW
@given(records=st.dictionaries(topics, frontiers, max_size=5), anchor=anchors, full_pass_ms=longs)
def test_save_frontiers_reads_back(
    kind: StateKind, records: dict[TopicId, FrontierRecord], anchor: ClockAnchor, full_pass_ms: int
) -> None:
    with kind.new() as state:
        state.save_frontiers(records)
        state.save_anchor(anchor)
        state.save_last_full_pass_ms(full_pass_ms)
        assert state.frontiers() == records
        assert state.anchor() == anchor
        assert state.last_full_pass_ms() == full_pass_ms


@FEW
@given(records=st.lists(open_ids, max_size=8), forgotten=st.lists(longs, max_size=3))
def test_open_ids_forgotten_are_gone(kind: StateKind, records: list[OpenIdRecord], forgotten: list[int]) -> None:
    gone = forgotten + [record.pointer for record in records[:2]]
    with kind.new() as state:
        state.save_open_ids(records)
        assert state.open_ids() == {record.pointer: record for record in records}
        state.delete_open_ids(gone)
        assert state.open_ids() == {record.pointer: record for record in records if record.pointer not in gone}


@FEW
@given(
    first=st.lists(evidence, max_size=3, unique_by=lambda e: e.start),
    second=st.lists(evidence, max_size=5, unique_by=lambda e: e.start),
    proven=st.none() | st.builds(ProvenBoundary, longs, longs, texts),
)
def test_replace_evidence_keeps_only_the_last_in_key_order(
    kind: StateKind, first: list[Evidence], second: list[Evidence], proven: ProvenBoundary | None
) -> None:
    with kind.new() as state:
        state.replace_evidence(first)
        state.replace_evidence(second)
        state.save_boundary(ProvenBoundary(1, 2, "r"))
        state.save_boundary(proven)
        assert state.evidence() == sorted(second, key=lambda e: e.start)
        assert state.boundary() == proven


@FEW
@given(mark=texts, identity=texts, times=st.tuples(*[st.none() | longs] * 3))
def test_save_store_reads_back(
    kind: StateKind, mark: str, identity: str, times: tuple[int | None, int | None, int | None]
) -> None:
    record = StoreRecord(mark, identity, *times)
    with kind.new() as state:
        state.save_store(record)
        assert state.store() == record


def test_save_store_with_another_mark_forgets_the_learned_state(state: State) -> None:
    state.save_store(STORE)
    state.save_frontiers({TOPIC: FRONTIER})
    state.save_open_ids([OpenIdRecord(1, 1)])
    state.replace_evidence([Evidence(b"", None, 1, 1, 1, "r")])
    state.save_boundary(ProvenBoundary(1, 1, "r"))
    state.save_last_full_pass_ms(1)
    state.save_strikes({TOPIC: STRIKES})
    state.save_counts({TOPIC: TopicCount(1, 2, 3, 4, 5)})
    state.save_note("shown", ["default:orders"])
    state.save_store(StoreRecord("mark", "leveldb:/elsewhere"))
    assert state.frontiers() == {TOPIC: FRONTIER}
    assert state.strikes() == {TOPIC: STRIKES}
    state.save_store(StoreRecord("another mark", "leveldb:/data"))
    assert (state.frontiers(), state.open_ids(), state.evidence()) == ({}, {}, [])
    assert (state.boundary(), state.last_full_pass_ms()) == (None, None)
    assert (state.strikes(), state.counts(), state.note("shown")) == ({}, {}, None)


@pytest.mark.parametrize(("identity", "kept"), [(STORE.identity, True), ("leveldb:/elsewhere", False)])
def test_save_store_at_the_same_place_keeps_topic_history(state: State, identity: str, kept: bool) -> None:
    state.save_store(STORE)
    for note in (Note.TOPICS, Note.TOPIC_CHANGES, Note.TOPIC_SIZES):
        state.save_note(note, [str(note)])
    state.save_store(StoreRecord("another mark", identity))
    assert [state.note(note) is not None for note in (Note.TOPICS, Note.TOPIC_CHANGES, Note.TOPIC_SIZES)] == [kept] * 3


def test_save_store_with_another_mark_keeps_runs_and_ledger(state: State) -> None:
    state.save_store(STORE)
    state.begin_run(RunRecord("r", "apply", 1))
    state.add_ledger([entry()])
    state.add_counters({CounterKey("rows"): 1.0})
    state.pause("default:*", 1)
    state.swap_lease(None, b"mine")
    state.save_created_ms(1)
    state.save_store(StoreRecord("another mark", "leveldb:/data"))
    assert (len(state.runs(1)), len(state.ledger(1)), len(state.counters())) == (1, 1, 1)
    assert (state.pauses(), state.lease(), state.created_ms()) == ([Pause("default:*", 1)], b"mine", 1)


def test_pause_repeated_keeps_its_time_and_pattern(state: State) -> None:
    state.pause("default:*", 5)
    state.pause("default:*", 9)
    state.pause(EVERYTHING, 7)
    assert sorted(state.pauses(), key=lambda pause: pause.since_ms) == [Pause("default:*", 5), Pause(EVERYTHING, 7)]
    assert not state.resume("default:orders"), "a matching pattern is not the paused pattern"
    assert state.resume("default:*")
    assert not state.resume("default:*")
    assert state.pauses() == [Pause(EVERYTHING, 7)]


@FEW
@given(
    records=st.dictionaries(topics, strikes, max_size=5),
    changed=st.dictionaries(topics, st.none() | strikes, max_size=3),
)
def test_save_strikes_changes_and_deletes_only_the_given_topics(
    kind: StateKind, records: dict[TopicId, Strikes], changed: dict[TopicId, Strikes | None]
) -> None:
    with kind.new() as state:
        state.save_strikes(records)
        state.save_strikes(changed)
        assert state.strikes() == {topic: kept for topic, kept in {**records, **changed}.items() if kept is not None}


def test_swap_lease_writes_only_with_the_current_value(state: State) -> None:
    assert not state.swap_lease(b"guess", b"mine")
    assert state.swap_lease(None, b"mine")
    assert not state.swap_lease(None, b"theirs")
    assert not state.swap_lease(b"min", b"theirs")
    assert state.swap_lease(b"mine", b"theirs")
    assert state.lease() == b"theirs"


def test_swap_lease_in_a_race_succeeds_for_one_of_two(lasting: DurableStateKind) -> None:
    won: list[tuple[int, int]] = []
    lasting.new().close()

    def race(number: int) -> None:
        with lasting.reopen() as mine:
            for turn in range(20):
                ready.wait()
                expected = str(turn).encode() if turn else None
                if mine.swap_lease(expected, str(turn + 1).encode()):
                    won.append((turn, number))

    ready = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as racers:
        list(racers.map(race, range(2)))
    assert sorted(turn for turn, _ in won) == list(range(20))


@pytest.mark.parametrize("finished", [False, True])
def test_prune_runs_keeps_runs_started_at_or_after_the_time(state: State, finished: bool) -> None:
    for started_ms in (99, 100, 101):
        state.begin_run(RunRecord(str(started_ms), "plan", started_ms))
        if finished:
            state.finish_run(RunRecord(str(started_ms), "apply", 1, 200, "done"))
    assert state.prune_runs(100) == 1
    assert [run.started_ms for run in state.runs(10)] == [101, 100]
    assert state.run("99") is None
    assert state.prune_runs(100) == 0


def test_begin_run_twice_or_finish_of_another_is_rejected(state: State) -> None:
    state.begin_run(RunRecord("one", "apply", 1))
    with pytest.raises(StateError):
        state.begin_run(RunRecord("one", "apply", 2))
    with pytest.raises(StateError, match=r"\btwo\b"):
        state.finish_run(RunRecord("two", "apply", 1, 3, "done"))


def test_transaction_that_raises_keeps_nothing(state: State) -> None:
    with undone(state):
        state.save_frontiers({TOPIC: FRONTIER})
        state.save_boundary(ProvenBoundary(1, 2, "r"))
    assert (state.frontiers(), state.boundary()) == ({}, None)
    state.save_boundary(ProvenBoundary(3, 4, "s"))
    assert state.boundary() == ProvenBoundary(3, 4, "s")


def test_inner_transaction_that_raises_keeps_the_outer_changes(state: State) -> None:
    with state.transaction():
        state.save_boundary(ProvenBoundary(1, 1, "outer"))
        with undone(state):
            state.save_boundary(ProvenBoundary(2, 2, "inner"))
            state.save_last_full_pass_ms(7)
            state.add_ledger([entry()])
        assert (state.boundary(), state.last_full_pass_ms(), state.ledger(1)) == (
            ProvenBoundary(1, 1, "outer"),
            None,
            [],
        )
        state.add_ledger([entry(at_ms=5)])
    assert (state.boundary(), state.last_full_pass_ms(), state.ledger(9)) == (
        ProvenBoundary(1, 1, "outer"),
        None,
        [entry(at_ms=5)],
    )


def test_save_open_ids_with_a_number_above_64_bits_saves_none(state: State) -> None:
    with pytest.raises(OverflowError):
        state.save_open_ids([OpenIdRecord(1, 1), OpenIdRecord(2**63, 1)])
    assert state.open_ids() == {}


def test_transaction_undone_keeps_the_changes_of_another_thread(state: State) -> None:
    other = threading.Thread(target=lambda: state.save_last_full_pass_ms(1))
    with undone(state):
        state.save_boundary(ProvenBoundary(1, 1, "r"))
        other.start()
        other.join(timeout=0.2)  # enough time for a wrong write
    other.join()
    assert (state.boundary(), state.last_full_pass_ms()) == (None, 1)


def test_closed_state_raises_a_state_error(kind: StateKind) -> None:
    state = kind.new()
    state.close()
    state.close()
    with pytest.raises(StateError, match="closed"):
        state.boundary()
