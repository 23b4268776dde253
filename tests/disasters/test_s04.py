"""S4: only a complete, clean, durable pass with a snapshot older than the pass proves a boundary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from janitor.boundary import find_gap
from janitor.status import collect
from janitor.status.collect import Deployment
from janitor.status.health import judge
from janitor.status.status import Status
from tests.builders import (
    DAY,
    HOUR,
    LIFETIME,
    MINUTE,
    NOW_MS,
    Call,
    Kit,
    Topic,
    assert_boundary_is_true,
    fail_at,
    janitor,
    pointer,
    topic,
    unknown_topic,
    watch,
    watch_state,
)
from tests.disasters.spy import LevelDBSpy
from tms_core.errors import NoSnapshot, StoreError
from tms_core.rowkey import MessageKey
from tms_core.tables.base import CELLS, MESSAGES, MessageValue, Store
from tms_core.tables.lease import Lease
from tms_core.tables.leveldb.layout import FOLDERS
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore

#: A transaction after its lifetime and grace, which a pass over its rows closes.
OLD = pointer(NOW_MS - 10 * HOUR)
#: A transaction whose client may still write.
YOUNG = pointer(NOW_MS - 30 * MINUTE)


def set_up(store: Store) -> tuple[Kit, Topic]:
    """Return an adopted store with an unswept row of an old invalid transaction."""
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400).tx(OLD, NOW_MS - 9 * HOUR).plain(NOW_MS - 31 * DAY)
    kit = janitor(store, invalid=[OLD]).adopt()
    return kit, orders


def test_complete_pass_proves_the_old_transaction(store: Store) -> None:
    kit, orders = set_up(store)
    report = kit.engine.run_once()
    proven = kit.state.boundary()
    assert proven is not None
    assert proven.bound == report.boundary == OLD
    assert orders.pointers() == [-OLD]
    assert_boundary_is_true(kit)


def test_restored_rows_require_a_search_before_a_boundary(store: Store) -> None:
    kit, orders = set_up(store)
    kit.engine.run_once()
    kit.clock.advance(MINUTE)
    # Restore the row from a backup of the same table.
    orders.tx(OLD, NOW_MS - 9 * HOUR)
    kit.engine.adopt()
    assert_boundary_is_true(kit)
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])
    assert kit.run_after(MINUTE).boundary == OLD
    assert set(orders.pointers()) == {-OLD}


@pytest.mark.parametrize("call", ["message.delete", "message.invert"])
def test_run_with_error_in_one_topic_proves_nothing(store: Store, call: str) -> None:
    kit, _ = set_up(store)
    watch(store, before=fail_at(call, StoreError("the disk is full")))
    report = kit.engine.run_once()
    assert report.errors
    assert (report.boundary, kit.state.boundary(), kit.state.evidence()) == (None, None, [])


@pytest.mark.parametrize("patterns", [("default:orders",), ("default:*",), ("*",)])
def test_run_of_some_topics_proves_nothing(store: Store, patterns: tuple[str, ...]) -> None:
    kit, _ = set_up(store)
    report = kit.engine.run_once(patterns=patterns)
    assert (report.boundary, kit.state.boundary(), kit.state.evidence()) == (None, None, [])


def test_run_of_some_topics_keeps_transactions_to_search(store: Store) -> None:
    kit, _ = set_up(store)
    kit.engine.run_once(patterns=("nowhere:*",))
    assert kit.state.open_ids()[OLD].scanned_ms is None
    kit.engine.run_once()
    assert kit.state.open_ids()[OLD].closed_ms == NOW_MS


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kit: setattr(kit.snapshots, "age_ms", 121_000),
        lambda kit: setattr(kit.snapshots, "age_ms", -301_000),
        lambda kit: setattr(kit.snapshots, "error", NoSnapshot("the folder is empty.")),
    ],
    ids=["stale", "future", "missing"],
)
def test_run_without_usable_snapshot_proves_nothing(store: Store, spoil: Callable[[Kit], None]) -> None:
    kit, orders = set_up(store)
    spoil(kit)
    report = kit.engine.run_once()
    assert (report.boundary, kit.state.boundary(), kit.state.evidence()) == (None, None, [])
    assert orders.pointers() == [OLD]


def test_run_with_unknown_lifetime_inverts_without_a_proof(store: Store) -> None:
    kit, orders = set_up(store)
    unsure = kit.restart(lifetime_known=False)
    report = unsure.engine.run_once()
    assert orders.pointers() == [-OLD]
    assert (report.boundary, kit.state.boundary()) == (None, None)
    assert "max_lifetime_seconds" in " ".join(unsure.engine.boundary()[1].obstacles)


def test_apply_proves_nothing(store: Store, tmp_path: Path) -> None:
    kit, orders = set_up(store)
    kit.engine.preview(out=tmp_path / "plan.json")
    kit.engine.carry_out(tmp_path / "plan.json")
    assert orders.pointers() == [-OLD]
    assert kit.state.boundary() is None


def test_boundary_ends_below_a_client_that_may_still_write(store: Store) -> None:
    kit, orders = set_up(store)
    orders.tx(YOUNG, NOW_MS - MINUTE)
    kit.snapshots.invalid = [OLD, YOUNG]
    kit.engine.run_once()
    proven = kit.state.boundary()
    assert proven is not None
    assert proven.bound < YOUNG
    assert orders.pointers() == [-OLD, -YOUNG]


def test_client_publishing_after_the_scan_is_not_proven(store: Store) -> None:
    kit, orders = set_up(store)
    kit.snapshots.invalid = [OLD, YOUNG]
    kit.engine.run_once()
    end_ms = LIFETIME.window_end_ms(YOUNG)
    for late_ms in (MINUTE, LIFETIME.max_ms, end_ms - 1 - NOW_MS):
        kit.clock.advance(NOW_MS + late_ms - kit.clock.now_ms())
        orders.tx(YOUNG, kit.clock.now_ms())
        assert_boundary_is_true(kit)
        kit.engine.run_once()
        assert_boundary_is_true(kit)
    kit.run_after(2)
    assert kit.state.open_ids()[YOUNG].closed_ms is None, "only a full pass searches rows of any time"
    kit.run_after(DAY)
    proven = kit.state.boundary()
    assert proven is not None
    assert proven.bound == YOUNG
    assert orders.pointers() == [-OLD, -YOUNG, -YOUNG, -YOUNG]


def test_pass_over_a_window_inverts_and_keeps_the_boundary(store: Store) -> None:
    kit, orders = set_up(store)
    kit.engine.run_once()
    before = (kit.state.boundary(), kit.state.evidence())
    younger = pointer(NOW_MS - 3 * HOUR)
    kit.snapshots.invalid = [OLD, younger]
    orders.tx(younger, NOW_MS - 2 * HOUR)
    # Written by a clock behind the allowance; a search of the transaction's window misses the row.
    orders.tx(younger, NOW_MS - 4 * HOUR)
    report = kit.run_after(12 * HOUR)
    assert not report.full
    assert sorted(filter(None, orders.pointers())) == [-younger, -OLD, younger]
    assert (kit.state.boundary(), kit.state.evidence()) == before
    assert (report.boundary, kit.state.open_ids()[younger].closed_ms) == (OLD, None)
    assert_boundary_is_true(kit)
    report = kit.run_after(12 * HOUR)
    assert (report.full, report.boundary) == (True, younger)
    assert_boundary_is_true(kit)


@pytest.mark.parametrize("place", [b"", b"default:orders:", b"~"], ids=["before topics", "in a topic", "after topics"])
@pytest.mark.parametrize(("write_pointer", "ends_below"), [(OLD, OLD), (OLD - 5, OLD - 5), (OLD - 1, OLD + 1)])
def test_unrecognized_key_with_invalid_pointer_limits_boundary(
    store: Store, write_pointer: int, ends_below: int, place: bytes
) -> None:
    kit, _ = set_up(store)
    kit.snapshots.invalid = [OLD - 5, OLD]
    store.message.put([(place + b"foreign", MessageValue(write_pointer, b"?"))])
    assert kit.engine.run_once().boundary == ends_below - 1
    assert [cell.pointer for cell in store.message.read(CELLS, b"", None, 10).items if b"foreign" in cell.key] == [
        write_pointer
    ]
    assert_boundary_is_true(kit)
    assert kit.engine.verify().refuted == 0


@pytest.mark.parametrize("tag", [b"\x03", b"\xff"])
def test_pointers_under_a_tag_that_cdap_reads_are_all_inverted(tmp_path: Path, tag: bytes) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        kit, orders = set_up(store)
        orders.stored(OLD, NOW_MS - 31 * DAY)
    foreign, ours = b"foreign", MessageKey(orders.id, 1, NOW_MS - 9 * HOUR, 7).pack()
    rows = {foreign: tag + (OLD - 5).to_bytes(8, "big"), ours: tag + OLD.to_bytes(8, "big")}
    with closing(plyvel.DB(str(tmp_path / "messaging" / FOLDERS["message"]))) as database:
        for key, value in rows.items():
            database.put(key, value)
    kit.snapshots.invalid = [OLD - 5, OLD]
    with LevelDBStore(tmp_path / "messaging") as store:
        assert kit.restart(store=store).engine.run_once().boundary == OLD - 6
        assert Topic(store, orders.id).stored_times() == [NOW_MS - 31 * DAY], "a kept message refers to it"
    with closing(plyvel.DB(str(tmp_path / "messaging" / FOLDERS["message"]))) as database:
        assert database.get(foreign) == rows[foreign]
        assert database.get(ours) == tag + (-OLD).to_bytes(8, "big", signed=True)


@pytest.mark.parametrize(("ahead_ms", "full"), [(1, True), (DAY, True), (0, False), (1 - DAY, False), (-DAY, True)])
def test_full_pass_is_due_after_a_day_or_a_clock_set_back(store: Store, ahead_ms: int, full: bool) -> None:
    kit, _ = set_up(store)
    kit.engine.run_once()
    kit.state.save_last_full_pass_ms(NOW_MS + ahead_ms)
    assert kit.engine.run_once().full is full


def test_full_pass_without_a_snapshot_is_repeated_with_one(store: Store) -> None:
    kit, _ = set_up(store)
    kit.snapshots.age_ms = DAY
    assert kit.engine.run_once().full
    assert not kit.run_after(MINUTE).full, "a full run would prove nothing, too"
    kit.snapshots.age_ms = 0
    report = kit.run_after(MINUTE)
    assert (report.full, report.boundary) == (True, OLD)
    assert not kit.run_after(MINUTE).full


def test_boundary_is_withdrawn_by_a_pass_that_proves_nothing(store: Store) -> None:
    kit, _ = set_up(store)
    assert kit.engine.run_once().boundary == OLD
    kit.snapshots.invalid = [1, OLD]
    store.message.put([(b"foreign", MessageValue(1, b"?"))])
    assert kit.run_after(DAY).boundary is None
    assert kit.state.boundary() is None
    assert kit.engine.verify().refuted == 0


def test_boundary_proven_after_a_plan_is_in_the_apply_report(store: Store, tmp_path: Path) -> None:
    kit, _ = set_up(store)
    kit.engine.preview(out=tmp_path / "plan.json")
    assert kit.run_after(MINUTE).boundary == OLD
    assert kit.engine.carry_out(tmp_path / "plan.json").boundary == OLD


def test_clock_skew_beyond_grace_leaves_open_transactions_unproven(store: Store) -> None:
    topic(store, "default:orders", ttl_seconds=3600)
    report = janitor(store, lifetime=LIFETIME._replace(grace_ms=0)).engine.run_once(adopt=True)
    assert report.boundary == pointer(NOW_MS - LIFETIME.max_ms - LIFETIME.allowance_ms) - 1


def test_longer_lifetime_opens_transactions_and_lowers_the_boundary(store: Store) -> None:
    kit, orders = set_up(store)
    kit.engine.run_once()
    assert kit.state.open_ids()[OLD].closed_ms == NOW_MS
    longer = kit.restart(lifetime=LIFETIME._replace(max_ms=12 * HOUR))
    longer.clock.advance(MINUTE)
    orders.tx(OLD, NOW_MS)
    longer.engine.run_once()
    assert orders.pointers() == [-OLD, -OLD]
    assert kit.state.open_ids()[OLD].closed_ms is None
    longer.clock.advance(LIFETIME.window_end_ms(OLD) + 11 * HOUR - 1 - longer.clock.now_ms())
    kit.state.save_last_full_pass_ms(NOW_MS - DAY)
    report = longer.engine.run_once()
    assert report.full
    assert report.boundary is not None
    assert report.boundary < OLD


def test_boundary_of_a_clock_set_back_is_withdrawn_by_a_failed_pass(store: Store) -> None:
    kit, _ = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    assert kit.engine.run_once().boundary == OLD
    kit.clock.step(-HOUR)
    report = kit.engine.run_once(patterns=("default:*",))
    assert (report.tripped, report.boundary, kit.state.boundary()) == (False, None, None)


def test_boundary_after_a_clock_set_back_is_not_in_force(store: Store) -> None:
    kit, _ = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    kit.engine.run_once()
    kit.clock.step(-1)
    assert (kit.engine.preview().boundary, kit.engine.boundary()[0], kit.engine.verify().bound) == (None, None, None)


def test_boundary_after_clock_set_back_is_proven_by_a_full_pass(store: Store) -> None:
    kit, _ = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    kit.engine.run_once()
    kit.clock.step(-HOUR)
    report = kit.engine.run_once()
    proven = kit.state.boundary()
    assert proven is not None
    assert (proven.bound, proven.made_ms, report.boundary, report.full) == (OLD, NOW_MS - HOUR, OLD, True)


def test_boundary_in_force_is_still_reported_by_a_pass_without_one(store: Store) -> None:
    kit, _ = set_up(store)
    kit.engine.run_once()
    for patterns, age_ms in ((("default:orders",), 0), ((), 0), ((), 121_000)):
        kit.clock.advance(MINUTE)
        kit.snapshots.age_ms = age_ms
        assert kit.engine.run_once(patterns=patterns).boundary == OLD


def test_transaction_invalid_during_the_scan_is_not_proven(store: Store) -> None:
    kit, orders = set_up(store)
    late = OLD + 1
    orders.tx(late, NOW_MS - 9 * HOUR)

    def invalidate(call: Call) -> None:
        if call.name == "message.cells":
            kit.snapshots.invalid = [OLD, late]

    watch(store, after=invalidate)
    kit.snapshots.in_progress = [late]
    kit.engine.run_once()
    proven = kit.state.boundary()
    assert proven is not None
    assert proven.bound < late
    assert_boundary_is_true(kit)


def test_snapshot_is_read_once_and_before_the_first_row(store: Store) -> None:
    kit, _ = set_up(store)
    reads = kit.snapshots.reads
    seen: list[int] = []
    watch(store, before=lambda call: seen.append(kit.snapshots.reads) if call.name.startswith("message.") else None)
    kit.engine.run_once()
    assert set(seen) == {reads + 1}
    assert kit.snapshots.reads == reads + 1


def test_run_with_failed_sync_proves_nothing(store: Store) -> None:
    kit, _ = set_up(store)
    watch(store, before=fail_at("message.sync", StoreError("the disk is full")))
    with pytest.raises(StoreError, match="disk is full"):
        kit.engine.run_once()
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])
    assert kit.state.runs(1)[0].result == "failed"


class PowerLoss:
    """A power failure that undoes unsynced changes when the boundary is written."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pending: list[tuple[bytes, MessageValue]] = []
        watch(store, before=self.before)

    def before(self, call: Call) -> None:
        if call.name == "message.delete":
            for key in call.arguments[0]:
                self.pending += self.store.message.read(MESSAGES, key, key + b"\x00", 1).items
        if call.name == "message.sync":
            self.pending.clear()

    def strike(self) -> None:
        self.store.message.put(self.pending)


def test_power_failure_at_the_boundary_leaves_a_true_boundary(store: Store) -> None:
    kit, orders = set_up(store)
    orders.tx(OLD, NOW_MS - 31 * DAY)
    power = PowerLoss(store)
    watch_state(kit.state, before=lambda call: power.strike() if call.name == "state.save_boundary" else None)
    kit.engine.run_once()
    assert kit.state.boundary() is not None
    assert_boundary_is_true(kit)


def test_leveldb_syncs_the_batch_of_an_inversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = LevelDBSpy(monkeypatch)
    with LevelDBStore(tmp_path, create=True) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600).tx(OLD, NOW_MS)
        [cell] = store.message.read(CELLS, b"", None, 10).items
        assert store.message.invert([cell]) == [True]
        assert spy.unsynced_batches == 0
        store.message.delete([MessageKey(orders.id, 1, NOW_MS, 0).pack()])
        assert spy.unsynced_batches == 1


def test_boundary_stays_in_force_after_a_pass_without_proof(store: Store) -> None:
    kit, orders = set_up(store)
    kit.engine.run_once()
    before = kit.state.boundary()
    kit.clock.advance(HOUR)
    younger = pointer(NOW_MS + MINUTE)
    orders.tx(younger, NOW_MS + 2 * MINUTE)
    kit.snapshots.invalid = [OLD, younger]
    kit.snapshots.age_ms = 121_000
    kit.engine.run_once()
    assert kit.state.boundary() == before
    assert_boundary_is_true(kit)


def test_evidence_with_a_gap_has_no_boundary(store: Store) -> None:
    kit, _ = set_up(store)
    kit.engine.run_once()
    [whole] = kit.state.evidence()
    kit.state.replace_evidence([replace(whole, stop=b"m"), replace(whole, start=b"n")])
    _, explained = kit.engine.boundary()
    assert explained.bound is None
    assert "6d to 6e" in explained.obstacles[0]


def test_boundary_is_in_the_report_of_each_later_run(store: Store, tmp_path: Path) -> None:
    kit, _ = set_up(store)
    assert kit.engine.run_once().boundary == OLD
    kit.engine.preview(out=tmp_path / "plan.json")
    assert kit.engine.carry_out(tmp_path / "plan.json").boundary == OLD
    assert kit.engine.run_once(patterns=("default:orders",)).boundary == OLD


def test_boundary_by_a_shorter_lifetime_is_not_in_force(store: Store) -> None:
    kit, orders = set_up(store)
    assert kit.engine.run_once().boundary == OLD
    raised = kit.restart(lifetime=LIFETIME._replace(max_ms=12 * HOUR))
    orders.tx(OLD, NOW_MS - 8 * HOUR)
    assert raised.engine.boundary()[0] is None
    assert raised.engine.verify().bound is None
    assert raised.engine.preview().boundary is None
    # With the original lifetime the boundary is in force again.
    assert kit.engine.boundary()[0] is not None


def test_clock_set_back_forgets_boundary_and_evidence_of_the_future(store: Store) -> None:
    kit, _ = set_up(store)
    assert kit.engine.run_once().boundary == OLD
    kit.clock.step(-10 * MINUTE)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    watch(store, before=fail_at("message.cells", StoreError("the disk is full")))
    assert kit.engine.run_once().boundary is None
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])
    assert kit.engine.boundary()[1].bound is None


# --- topics in quarantine ---------------------------------------------------------------------------------------------


def test_run_with_paused_topic_proves_nothing_until_resumed(store: Store) -> None:
    kit, orders = set_up(store)
    other = topic(store, "default:other", ttl_seconds=86400).tx(OLD, NOW_MS - HOUR)
    kit.state.pause("default:orders", NOW_MS)
    report = kit.engine.run_once()
    assert (report.full, report.boundary, kit.state.boundary(), kit.state.evidence()) == (True, None, None, [])
    assert (orders.pointers(), other.pointers()) == ([None, OLD], [-OLD])
    assert kit.state.open_ids()[OLD].scanned_ms is None
    kit.state.resume("default:orders")
    report = kit.run_after(MINUTE)
    assert (report.full, report.boundary, orders.pointers()) == (True, OLD, [-OLD])
    assert_boundary_is_true(kit)


@pytest.mark.parametrize("name", ["message.keys", "message.cells", "message.delete", "message.invert", "payload.keys"])
def test_pause_inside_a_pass_leaves_a_true_boundary(store: Store, name: str) -> None:
    kit, orders = set_up(store)
    watch(store, before=lambda call: kit.state.pause("*", 0) if call.name == name else None)
    report = kit.engine.run_once()
    assert_boundary_is_true(kit)
    if OLD in orders.pointers():
        assert (report.boundary, kit.state.boundary(), kit.state.evidence()) == (None, None, [])


def test_pause_of_absent_topics_proves_nothing(store: Store) -> None:
    """Absent topics can have rows."""
    kit, _ = set_up(store)
    kit.state.pause("nowhere:*", 0)
    assert kit.engine.run_once().boundary is None


def test_paused_unknown_topic_is_not_inverted(store: Store) -> None:
    kit, _ = set_up(store)
    stray = unknown_topic(store, "default:stray").tx(OLD, 1)
    kit.state.pause("default:str*", 0)
    assert kit.engine.run_once().boundary is None
    assert stray.pointers() == [OLD]


def test_paused_topic_causes_one_full_pass_a_day(store: Store) -> None:
    kit, _ = set_up(store)
    kit.state.pause("default:orders", 0)
    full = []
    for _ in range(72):
        full.append(kit.engine.run_once().full)
        kit.clock.advance(HOUR)
    assert sum(full) == 3


@pytest.mark.parametrize("name", ["message.cells", "payload.keys"])
@pytest.mark.parametrize("ending", ["interrupted", "lease"])
def test_run_ended_early_proves_nothing(store: Store, ending: str, name: str) -> None:
    kit, _ = set_up(store)
    lease = Lease(kit.state, "a", 60, kit.clock)
    lease.acquire()
    reads: list[str] = []

    def end(call: Call) -> None:
        if call.name == name and not reads:
            reads.append(ending)
            if ending == "lease":
                Lease(kit.state, "b", 60, kit.clock).acquire(sole=True)
                kit.clock.advance(MINUTE)

    watch(store, before=end)
    report = kit.restart(lease=lease, is_stopping=lambda: reads == ["interrupted"]).engine.run_once()
    assert kit.state.runs(1)[0].result == "interrupted"
    assert (report.boundary, kit.state.boundary()) == (None, None)
    # Completed searches are evidence for the next run.
    assert (find_gap(kit.state.evidence()) is None) == (name == "payload.keys")
    assert kit.state.last_full_pass_ms() is None


# --- deletes of a failed run ------------------------------------------------------------------------------------------


def test_failed_sync_is_repeated_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Due rows of an invalid transaction, which are deleted instead of inverted.
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        kit, orders = set_up(store)
        orders.tx(OLD, NOW_MS - 31 * DAY)
        failing = [True]
        watch(store, before=fail_at("message.cells", RuntimeError("a bug"), lambda _: failing[0]))
        # A run deletes them and fails before the sync.
        with pytest.raises(RuntimeError, match="a bug"):
            kit.engine.run_once()
        assert orders.times() == [NOW_MS - 9 * HOUR]
        assert kit.state.boundary() is None
        failing[0] = False
        synced: list[str] = []
        monkeypatch.setattr("os.fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
        before_save: list[int] = []
        watch_state(
            kit.state,
            before=lambda call: before_save.append(len(synced)) if call.name == "state.save_boundary" else None,
        )
        # The next run in the process deletes nothing and publishes its boundary.
        kit.run_after(1)
        proven = kit.state.boundary()
        assert proven is not None
        assert proven.bound == OLD
        # The log with these deletes was synced before.
        assert any(name.endswith(".log") for name in synced[: before_save[0]])


def test_run_without_deletes_syncs_before_its_proof(store: Store) -> None:
    kit, _ = set_up(store)
    kit.engine.run_once()
    kit.clock.advance(DAY)
    calls: list[str] = []
    watch(store, before=lambda call: calls.append(call.name))
    watch_state(kit.state, before=lambda call: calls.append(call.name))
    assert kit.engine.run_once().full
    evidence = calls.index("state.replace_evidence")
    assert {"message.sync", "payload.sync"} <= set(calls[:evidence])


# --- a false boundary -------------------------------------------------------------------------------------------------


def refuted_boundary(store: Store) -> tuple[Kit, Topic]:
    """Return a janitor with a boundary that a later write made false."""
    kit, orders = set_up(store)
    kit.engine.run_once()
    kit.clock.advance(MINUTE)
    orders.tx(OLD, NOW_MS - 9 * HOUR)
    return kit, orders


def test_verify_false_boundary_withdraws_it_and_searches_again(store: Store) -> None:
    kit, orders = refuted_boundary(store)
    assert kit.engine.verify().refuted == 1
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])
    proven, present = kit.engine.boundary()
    assert proven is None
    assert "is refuted and withdrawn" in present.obstacles[0]
    report = kit.run_after(MINUTE)
    assert (report.full, report.boundary) == (True, OLD)
    assert set(orders.pointers()) == {-OLD}
    assert kit.engine.boundary()[1].obstacles == ()
    assert not kit.run_after(MINUTE).full
    assert kit.engine.verify().refuted == 0


def test_verify_false_boundary_is_reported_until_the_next_boundary(store: Store) -> None:
    kit, _ = refuted_boundary(store)
    assert judge(collect_status(kit)).level == "well"
    kit.engine.verify()
    health = judge(collect_status(kit))
    assert health.level == "attention"
    assert health.reasons[0].about == "boundary"
    assert health.reasons[0].text.startswith("The prune boundary was refuted: the boundary ")
    kit.run_after(MINUTE)
    assert judge(collect_status(kit)).level == "well"


def test_refuted_boundary_of_paused_topic_causes_one_full_run(store: Store) -> None:
    kit, orders = refuted_boundary(store)
    kit.engine.verify()
    topic(store, "default:other", ttl_seconds=60)
    kit.state.pause("default:other", NOW_MS)
    for full in (True, False):
        assert kit.run_after(MINUTE).full is full
    assert set(orders.pointers()) == {-OLD}
    assert judge(collect_status(kit)).reasons[0].about == "boundary"


def test_boundary_refuted_during_a_run_is_not_proven_by_it(store: Store) -> None:
    kit, orders = refuted_boundary(store)
    kit.clock.advance(DAY)
    second_kit = kit.restart()
    done: list[int] = []

    def verify(call: Call) -> None:
        # Restore a row from a backup after the search.
        if call.name == "payload.keys" and not done:
            orders.tx(OLD, NOW_MS - 8 * HOUR)
            done.append(second_kit.engine.verify().refuted)

    watch(store, before=verify)
    assert kit.engine.run_once().full
    assert done == [1]
    assert kit.state.boundary() is None
    assert_boundary_is_true(kit)
    assert kit.run_after(MINUTE).full
    assert kit.state.boundary() is not None
    assert_boundary_is_true(kit)


def collect_status(kit: Kit) -> Status:
    deployment = Deployment("a store", "apply", "every 60 s", kit.engine.deps.terms)
    return collect.collect(kit.state, deployment, kit.clock)
