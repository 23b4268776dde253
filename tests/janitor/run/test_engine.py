"""The engine: the rows that a pass reads and keeps, and its report."""

from __future__ import annotations

from pathlib import Path
from threading import Thread, current_thread, main_thread

import pytest

from janitor.rules.policy import Hold, Reason, Rule
from tests.builders import (
    DAY,
    HOUR,
    MINUTE,
    NOW_MS,
    SECOND,
    Call,
    Kit,
    Topic,
    adopted_janitor,
    fail_at,
    janitor,
    pointer,
    topic,
    watch,
    watch_state,
)
from tests.support import wait_until
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.tables.base import MESSAGES, MessageValue
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryMessageTable, MemoryStore
from tms_core.topic import TopicId

OLD = pointer(NOW_MS - 10 * HOUR)
TTL_SECONDS = 86400


def test_apply_inverts_the_pointers_of_each_topic_alone(store: MemoryStore, tmp_path: Path) -> None:
    other = pointer(NOW_MS - 9 * HOUR)
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).tx(OLD, NOW_MS)
    returns = topic(store, "default:returns", ttl_seconds=TTL_SECONDS).tx(other, NOW_MS)
    kit = janitor(store, invalid=[OLD, other]).adopt()
    kit.engine.preview(out=tmp_path / "plan.json")
    orders.tx(other, NOW_MS + 1)
    returns.tx(OLD, NOW_MS + 1)
    report = kit.engine.carry_out(tmp_path / "plan.json")
    assert (orders.pointers(), returns.pointers()) == ([-OLD, other], [-other, OLD])
    assert report.total(Rule.INVALID_TRANSACTION) == 2
    assert kit.engine.run_once().total(Rule.INVALID_TRANSACTION) == 2


@pytest.mark.parametrize(
    ("age_ms", "at_ms", "used"),
    [
        (0, NOW_MS + DAY, True),
        (0, NOW_MS - DAY, True),
        (10 * MINUTE, NOW_MS - 10 * MINUTE, True),
        (-10 * MINUTE, NOW_MS + 10 * MINUTE, True),
        (10 * MINUTE, NOW_MS + DAY, False),
        (-10 * MINUTE, NOW_MS - DAY, False),
    ],
)
def test_plan_of_another_time_uses_only_a_snapshot_of_that_time(
    store: MemoryStore, age_ms: int, at_ms: int, used: bool
) -> None:
    topic(store, "default:orders", ttl_seconds=30 * 86400).tx(OLD, NOW_MS)
    kit = janitor(store).adopt()
    kit.snapshots.invalid = [OLD]
    kit.snapshots.age_ms = age_ms
    kit.snapshots.write_pointer = pointer(NOW_MS)
    report = kit.engine.preview(at_ms=at_ms)
    assert (report.snapshot is not None) is used
    assert report.total(Rule.INVALID_TRANSACTION) == used
    assert kit.engine.preview().snapshot is None or age_ms == 0


@pytest.mark.parametrize(("later_ms", "deleted"), [(HOUR, 0), (2 * DAY, 1)])
def test_plan_of_a_later_time_holds_a_jump_while_it_lasts(store: MemoryStore, later_ms: int, deleted: int) -> None:
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400)
    orders.plain(NOW_MS - 2 * DAY)
    kit = adopted_janitor(store, hold_seconds=86400)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    report = kit.engine.preview(at_ms=NOW_MS + later_ms)
    assert (report.total(Rule.EXPIRED), report.held_rows()) == (deleted, 1 - deleted)


def test_protected_topic_is_counted_by_full_passes_only(store: MemoryStore) -> None:
    orders = topic(store, "default:orders", ttl_seconds=60).plain(*range(50)).stored(pointer(1), *range(50))
    kit = janitor(store, protect=("default:*",), batch_rows=10)
    assert kit.engine.run_once(adopt=True).held_topics() == {orders.id: Hold.PROTECTED}
    quick = kit.run_after(DAY - 1)
    assert (quick.full, quick.held_rows(), quick.store_calls < 10) == (False, 0, True)
    assert kit.run_after(1).held_rows() == 100
    assert kit.engine.preview().held_rows() == 100
    assert len(orders.times()) == len(orders.stored_times()) == 50


def test_run_after_a_plan_of_restored_rows_matches_the_plan(store: MemoryStore) -> None:
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).tx(OLD, *range(NOW_MS - HOUR, NOW_MS - HOUR + 31))
    backup = store.message.read(MESSAGES, b"", None, 100).items
    kit = janitor(store, invalid=[OLD])
    assert kit.engine.run_once(adopt=True).total(Rule.INVALID_TRANSACTION) == 31
    store.message.put(backup)
    kit.clock.advance(HOUR)
    # An incremental run does not find a payload whose pointer has another time.
    orders.stored(pointer(NOW_MS + DAY), NOW_MS - 2 * DAY)
    planned, done = kit.engine.preview(), kit.engine.run_once()
    assert planned.total(Rule.INVALID_TRANSACTION) == done.total(Rule.INVALID_TRANSACTION) == 31
    assert planned.totals.kept == done.totals.kept
    assert orders.pointers() == [-OLD] * 31
    assert not kit.run_after(HOUR).full


def test_run_after_an_empty_or_supposed_plan_is_not_full(store: MemoryStore) -> None:
    topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS)
    kit = adopted_janitor(store)
    kit.clock.advance(HOUR)
    assert not kit.engine.preview().topics
    assert kit.engine.preview(at_ms=NOW_MS + 2 * DAY).topics
    assert not kit.engine.run_once().full


def test_run_after_a_plan_made_during_a_run_is_full(store: MemoryStore) -> None:
    topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(1)
    kit = janitor(store)

    def plan_then(call: Call) -> None:
        if call.name == "message.delete":
            kit.clock.advance(1)
            kit.engine.preview()
            kit.clock.advance(1)

    watch(store, before=plan_then)
    assert kit.engine.run_once(adopt=True).full
    assert [kit.engine.run_once().full for _ in range(2)] == [True, False]


def put_unrecognized_keys(store: MemoryStore, number: int) -> None:
    """Put keys of no topic before, between and after the keys of the topics."""
    for start in (b"#", b"default:p", b"~"):
        keys = [start + number.to_bytes(4, "big") for number in range(number)]
        store.message.put([(key, MessageValue(None, b"?")) for key in keys])
        store.payload.put([(key, b"?") for key in keys])


def sweep_with_unrecognized_keys(store: MemoryStore, number: int) -> tuple[Kit, list[Topic], int]:
    """Sweep two topics with unrecognized keys around them; return the number of store calls, too."""
    topics = [topic(store, name, ttl_seconds=60) for name in ("default:orders", "default:returns")]
    for described in topics:
        described.plain(1, NOW_MS).tx(OLD, NOW_MS).stored(pointer(1), 1, NOW_MS)
    put_unrecognized_keys(store, number)
    kit = janitor(store, batch_rows=100, invalid=[OLD])
    report = kit.engine.run_once(adopt=True)
    assert report.totals.kept[Reason.UNRECOGNIZED] == 6 * number
    return kit, topics, report.store_calls


@pytest.mark.parametrize("number", [1, 99, 100, 101, 1000])
def test_sweep_of_many_keys_of_no_topic_skips_them_in_pages(number: int) -> None:
    _, _, calls = sweep_with_unrecognized_keys(MemoryStore(), 0)
    _, topics, more = sweep_with_unrecognized_keys(MemoryStore(), number)
    for described in topics:
        assert (described.times(), described.stored_times()) == ([NOW_MS, NOW_MS], [NOW_MS])
        assert described.pointers() == [None, -OLD]
    # Three steps read keys and one reads cells, at three places, in pages that grow from 1 to 100 keys.
    assert more - calls <= (3 + 1) * 3 * (number // 100 + 8)


@pytest.mark.parametrize(
    ("publish_ms", "refers", "kept"), [(-1, True, True), (-(2**63), True, True), (-1, False, False), (0, True, False)]
)
def test_payload_of_a_negative_time_is_kept(store: MemoryStore, publish_ms: int, refers: bool, kept: bool) -> None:
    start_ms = NOW_MS - 2 * DAY
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).stored(pointer(start_ms), start_ms)
    orders.ref(pointer(start_ms if refers else start_ms + 1), publish_ms)
    report = janitor(store).engine.run_once(adopt=True)
    assert orders.stored_times() == [start_ms] * kept
    assert report.totals.kept[Reason.REFERENCED] == kept
    assert orders.times() == [publish_ms] * (publish_ms < 0)


def test_renew_lease_during_a_run_does_not_block(store: MemoryStore) -> None:
    """A run acquires the lock of the state before the lock of the lease; the reverse order could deadlock."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS - HOUR)
    kit = janitor(store, clock=clock)
    lease = Lease(kit.state, "this one", 60, clock)
    lease.acquire()
    kit = kit.restart(lease=lease)
    results: list[bool] = []

    def look_after(call: Call) -> None:
        if call.name == "message.delete" and not results:
            clock.advance(50 * SECOND)
            before = kit.state.lease()
            thread = Thread(target=kit.engine.renew_lease)
            thread.start()
            thread.join(10)
            results.append(not thread.is_alive() and kit.state.lease() == before)

    watch(store, before=look_after)
    assert kit.engine.run_once(adopt=True).errors == []
    assert results == [True]
    clock.advance(50 * SECOND)
    before = kit.state.lease()
    kit.engine.renew_lease()
    assert kit.state.lease() != before


def test_run_whose_end_was_not_written_is_in_the_ledger(store: MemoryStore) -> None:
    orders = topic(store, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS - HOUR, NOW_MS)
    kit = janitor(store)
    full = [True]
    watch_state(kit.state, before=fail_at("state.finish_run", StoreError("the disk is full."), lambda _: full))
    with pytest.raises(StoreError, match="the disk is full"):
        kit.engine.run_once(adopt=True)
    assert orders.times() == [NOW_MS]
    full.clear()
    kit.engine.run_once()
    assert [run.result for run in kit.state.runs(5)] == ["done", "lost"]
    [entry] = kit.state.ledger(10, topic=TopicId("default", "orders"))
    assert (entry.rows, entry.rule) == (None, "expired")


def test_compaction_after_a_pass_starts_after_saving(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.tables.compaction.WORTHWHILE_ROWS", 1)
    topic(store, "default:orders", ttl_seconds=60).plain(1)
    kit = janitor(store)
    saved: list[bool] = []
    watch(store, lambda call: saved.append(bool(kit.state.boundary())) if call.name == "message.compact" else None)
    kit.engine.run_once(adopt=True)
    assert saved == [True]


def test_compaction_of_messages_starts_before_payloads(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.tables.compaction.WORTHWHILE_ROWS", 1)
    monkeypatch.setattr(MemoryMessageTable, "can_compact_concurrently", True)
    topic(store, "default:orders", ttl_seconds=60).plain(1).stored(pointer(1), 1)
    compacted: list[bool] = []

    def look(call: Call) -> None:
        if call.name == "message.compact":
            compacted.append(current_thread() is main_thread())
        elif call.name == "payload.delete":
            wait_until(lambda: compacted)

    watch(store, before=look)
    janitor(store).engine.run_once(adopt=True)
    assert compacted[0] is False
