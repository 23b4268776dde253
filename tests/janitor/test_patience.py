"""Incremental passes skip topics with few due rows: they save visits, and lose nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.report import Report
from janitor.rules.policy import Hold
from janitor.sweep.run import MIN_WINDOW_MS
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Kit, Topic, adopted_janitor, janitor, pointer, topic, watch
from tms_core.tables.base import MessageValue
from tms_core.tables.memory import MemoryStore

#: A hundredth of this TTL is one hour.
TTL_SECONDS = 360_000
WINDOW_MS = HOUR


def set_up(store: MemoryStore, *, ttl_seconds: int = TTL_SECONDS, **options: int) -> tuple[Kit, Topic]:
    """Return a janitor after a full pass, and a topic with two rows that are due one millisecond later."""
    orders = topic(store, "default:orders", ttl_seconds=ttl_seconds)
    kit = janitor(store, **options)  # type: ignore[arg-type]
    kit.engine.run_once(adopt=True)
    soon_ms = NOW_MS - ttl_seconds * 1000
    orders.plain(soon_ms).stored(pointer(soon_ms), soon_ms)
    return kit, orders


def patient(kit: Kit, wait_ms: int = 0) -> Report:
    kit.clock.advance(wait_ms)
    return kit.engine.run_once(incremental=True)


def calls_of(store: MemoryStore) -> list[str]:
    """Return a list of later store calls, without the read of all metadata and the calls at the end of a run."""
    names: list[str] = []
    ends = ("metadata.rows", "message.sync", "payload.sync")
    watch(store, before=lambda call: None if call.name in ends else names.append(call.name))
    return names


@pytest.mark.parametrize(
    ("ttl_seconds", "window_ms"), [(60, MINUTE), (5_999, MINUTE), (6_000, MINUTE), (6_001, 60_010), (TTL_SECONDS, HOUR)]
)
@pytest.mark.parametrize("late_ms", [-1, 0, 1])
def test_topic_is_visited_after_its_window(store: MemoryStore, ttl_seconds: int, window_ms: int, late_ms: int) -> None:
    kit, orders = set_up(store, ttl_seconds=ttl_seconds)
    assert not patient(kit, window_ms + late_ms).full
    visited = late_ms >= 0
    assert (orders.times() == []) is visited
    assert (orders.stored_times() == []) is visited


def test_waiting_topics_are_not_read(store: MemoryStore) -> None:
    kit, _ = set_up(store)
    for number in range(50):
        topic(store, f"default:t{number}", ttl_seconds=TTL_SECONDS).plain(NOW_MS)
    kit.engine.adopt()
    kit.engine.run_once()
    names = calls_of(store)
    report = patient(kit, WINDOW_MS - 1)
    assert names == []
    assert report.store_calls == 1, "one call for all metadata"


def test_waiting_topic_has_its_invalid_rows_inverted(store: MemoryStore) -> None:
    kit, orders = set_up(store)
    invalid = pointer(NOW_MS)
    orders.tx(invalid, NOW_MS)
    kit.snapshots.invalid = [invalid]
    names = calls_of(store)
    patient(kit, MINUTE)
    assert "message.delete" not in names
    assert set(names) <= {"message.keys", "message.cells", "message.invert"}
    assert orders.pointers() == [None, -invalid]


def test_topic_after_a_wait_has_its_frontier_at_the_current_cutoff(store: MemoryStore) -> None:
    kit, orders = set_up(store)
    before = kit.state.frontiers()[orders.id]
    for _ in range(59):
        patient(kit, MINUTE)
        assert kit.state.frontiers()[orders.id] == before, "the frontier advances later by the whole time"
    assert patient(kit, MINUTE).held_topics() == {}
    assert kit.state.frontiers()[orders.id].cutoff_ms == before.cutoff_ms + HOUR


@pytest.mark.parametrize(
    "run",
    [
        lambda kit: kit.engine.run_once(),
        lambda kit: kit.engine.run_once(patterns=("default:orders",)),
        lambda kit: kit.engine.run_once(adopt=True),
    ],
    ids=["run --once", "one topic", "--adopt"],
)
def test_pass_that_is_not_patient_visits_every_topic(store: MemoryStore, run: Callable[[Kit], Report]) -> None:
    kit, orders = set_up(store)
    kit.clock.advance(1)
    run(kit)
    assert (orders.times(), orders.stored_times()) == ([], [])


CHANGES: dict[str, Callable[[Topic], object]] = {
    "ttl shortened": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS - 2 * 3600),
    "deleted": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=-1),
    "created again": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_topic_that_changed_is_visited_by_the_next_pass(store: MemoryStore, change: str) -> None:
    kit, orders = set_up(store, hold_seconds=0)
    CHANGES[change](orders)
    patient(kit, 1)
    assert (orders.times(), orders.stored_times()) == ([], [])


@pytest.mark.parametrize("seconds_shorter", [400, 1800, 7200])
@pytest.mark.parametrize("approved", [True, False])
def test_held_jump_after_approval_or_its_hold_is_deleted(
    store: MemoryStore, approved: bool, seconds_shorter: int
) -> None:
    kit, orders = set_up(store, hold_seconds=300)
    late = orders.plain(NOW_MS - (TTL_SECONDS - seconds_shorter) * 1000 - 1)
    late.describe(ttl_seconds=TTL_SECONDS - seconds_shorter)
    assert patient(kit).held_topics() == {orders.id: Hold.FRONTIER}
    if approved:
        kit.engine.approve(("default:orders",))
    else:
        kit.clock.advance(300_000)
    patient(kit, 1)
    assert orders.times() == []
    assert patient(kit, MINUTE).held_topics() == {}


def test_topic_never_seen_is_visited_and_held(store: MemoryStore) -> None:
    kit, _ = set_up(store)
    late = topic(store, "default:late", ttl_seconds=TTL_SECONDS).plain(1)
    assert patient(kit).held_topics() == {late.id: Hold.FRONTIER}


def test_longer_ttl_moves_the_frontier_back_at_once(store: MemoryStore) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=2 * TTL_SECONDS)
    patient(kit, MINUTE)
    assert kit.state.frontiers()[orders.id].cutoff_ms == NOW_MS + MINUTE - 2 * TTL_SECONDS * 1000
    orders.describe(ttl_seconds=TTL_SECONDS)
    assert patient(kit, MINUTE).held_topics() == {orders.id: Hold.FRONTIER}, "otherwise this is not a jump"


def test_held_jump_is_counted_only_once(store: MemoryStore) -> None:
    kit, orders = set_up(store)
    orders.plain(*range(NOW_MS - HOUR, NOW_MS - HOUR + 500)).describe(ttl_seconds=60)
    report = patient(kit, MINUTE)
    assert report.held_rows() >= 500
    for _ in range(3):
        names = calls_of(store)
        assert patient(kit, MINUTE).held_rows() == 0
        assert len(names) < 10
    note = kit.state.note("overdue")
    assert sum(item["rows"] for item in note) == report.held_rows()
    orders.describe(ttl_seconds=120)
    assert patient(kit, MINUTE).held_rows() >= 500, "another jump is a new hold"


def play(gaps: list[int], ttls: tuple[int, int], *, is_patient: bool) -> tuple[list[set[tuple[int, int]]], int]:
    """Play runs; return the rows left after each one, as topic number and time, and the number of deleted rows."""
    store = MemoryStore()
    topics = [topic(store, f"default:t{number}", ttl_seconds=ttl) for number, ttl in enumerate(ttls)]
    for described in topics:
        described.plain(*range(NOW_MS - 2 * DAY, NOW_MS, 40 * MINUTE))
    kit = adopted_janitor(store, batch_rows=50)
    left: list[set[tuple[int, int]]] = []
    for gap_ms in gaps:
        kit.run_after(gap_ms, incremental=is_patient)
        left.append({(number, time_ms) for number in (0, 1) for time_ms in topics[number].times()})
    deleted = sum(value for key, value in kit.state.counters().items() if key.name == "rows_deleted_total")
    return left, int(deleted)


@given(
    gaps=st.lists(st.integers(1_000, 20 * MINUTE), min_size=4, max_size=12),
    ttls=st.tuples(st.integers(60, 2 * 86_400), st.integers(60, 2 * 86_400)),
)
def test_patient_passes_differ_by_the_allowed_lateness(gaps: list[int], ttls: tuple[int, int]) -> None:
    plain, _ = play(gaps, ttls, is_patient=False)
    late, deleted = play([*gaps, DAY], ttls, is_patient=True)
    now_ms = NOW_MS
    for gap_ms, exact, lazy in zip(gaps, plain, late, strict=False):
        now_ms += gap_ms
        assert exact <= lazy, "nothing went early"
        for number, time_ms in lazy - exact:
            late_ms = now_ms - time_ms - ttls[number] * 1000
            assert late_ms <= max(MIN_WINDOW_MS, ttls[number] * 10)
    last, total = play([*gaps, DAY], ttls, is_patient=False)
    assert (late[-1], deleted) == (last[-1], total)


def test_waiting_expired_row_with_a_longer_ttl_is_kept(store: MemoryStore) -> None:
    kit, orders = set_up(store)
    patient(kit, MINUTE)
    orders.describe(ttl_seconds=2 * TTL_SECONDS)
    patient(kit, HOUR)
    assert len(orders.times()) == len(orders.stored_times()) == 1


def test_waiting_invalid_row_is_inverted_before_a_proof(store: MemoryStore) -> None:
    ttl_seconds = 6_000
    kit, orders = set_up(store, ttl_seconds=ttl_seconds)
    # Its client may still write, so the boundary ends below it.
    invalid = pointer(NOW_MS - ttl_seconds * 1000)
    [(key, _)] = orders.messages()
    store.message.put([(key.pack(), MessageValue(invalid, b"x"))])
    kit.snapshots.invalid = [invalid]
    report = patient(kit, MIN_WINDOW_MS - 1)
    assert orders.pointers() == [invalid], "the row is due soon"
    assert report.boundary is not None
    assert report.boundary < invalid
    orders.describe(ttl_seconds=TTL_SECONDS)
    report = patient(kit, DAY)
    assert (orders.pointers(), report.boundary) == ([-invalid], invalid)
