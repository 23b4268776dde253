"""Evidence by interval: a full pass over several runs, and the boundary that it proves (invariant S4)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from threading import Semaphore
from typing import Any

import pytest

from janitor import boundary
from janitor.boundary import Refutation, find_gap
from janitor.report import Report
from janitor.run.conclude import PROGRESS_MS
from janitor.state.base import Evidence, ProvenBoundary
from janitor.state.sqlite.state import SqliteState
from tests.builders import (
    DAY,
    HOUR,
    LIFETIME,
    MINUTE,
    NOW_MS,
    STATE_CALLS,
    Call,
    Kit,
    ProcessKilled,
    Topic,
    assert_boundary_is_true,
    fail_at,
    janitor,
    pointer,
    topic,
    watch,
    watch_state,
)
from tests.salted import BUCKETS, SaltedStore
from tests.support import seeds
from tms_core.errors import StoreError
from tms_core.rowkey import salt
from tms_core.tables.base import CELLS, MessageValue, Store
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore

#: A transaction after its lifetime and grace.
OLD = pointer(NOW_MS - 10 * HOUR)
#: A transaction whose client may publish for another 90 minutes.
YOUNG = pointer(NOW_MS - 30 * MINUTE)
PARTS = [(bytes([number]), bytes([number + 1])) for number in range(BUCKETS)]
GAPS = [(b"", b"\x00"), (bytes([BUCKETS]), None)]
EVERYTHING = sorted([*PARTS, *GAPS])

#: Called with the number of a part and the name of a call of its message table, before the call.
Hook = Callable[[int, str], None]


def many_times(since_ms: int) -> list[int]:
    """Return times of enough rows for every part."""
    return [since_ms + number * number for number in range(40)]


class WatchedParts(SaltedStore):
    """A store with watched parts; :attr:`rows_read` counts the cells read in each part."""

    def __init__(self) -> None:
        super().__init__()
        self.hook: Hook = lambda *_: None
        self.rows_read: Counter[int] = Counter()

    def _part(self, number: int) -> Store:
        part = super()._part(number)
        for name in ("read", "delete", "invert"):
            setattr(part.message, name, self._watched(number, name, getattr(part.message, name)))
        return part

    def _watched(self, number: int, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def record_call(*arguments: Any) -> Any:
            called = arguments[0].part if name == "read" else name
            self.hook(number, called)
            answer = operation(*arguments)
            if called == "cells":
                self.rows_read[number] += len(answer.items)
            return answer

        return record_call


def fail_in(*numbers: int, name: str = "cells") -> Hook:
    def hook(number: int, called: str) -> None:
        if number in numbers and called == name:
            raise StoreError("the region is not served")

    return hook


def set_up(store: WatchedParts, **options: Any) -> tuple[Kit, Topic]:
    """Return a janitor that adopted a store with unswept rows of an old invalid transaction in every part."""
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400)
    orders.tx(OLD, *many_times(NOW_MS - 9 * HOUR)).plain(NOW_MS - 31 * DAY)
    kit = janitor(store, **options, invalid=[OLD]).adopt()
    return kit, orders


def spans(kit: Kit) -> list[tuple[bytes, bytes | None]]:
    return [(item.start, item.stop) for item in kit.state.evidence()]


@pytest.mark.parametrize("workers", [1, 3])
def test_complete_pass_over_parts_is_evidence_of_parts_and_gaps(workers: int) -> None:
    kit, orders = set_up(WatchedParts(), workers=workers)
    assert kit.engine.run_once().boundary == OLD
    assert spans(kit) == EVERYTHING
    assert {(item.bound, item.started_ms) for item in kit.state.evidence()} == {(OLD, NOW_MS)}
    assert set(orders.pointers()) == {-OLD}
    assert kit.state.note("round") is None
    assert kit.engine.verify().refuted == 0


def test_pass_over_a_store_without_parts_covers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """HBase has one part for each salt that rows have, so an empty table has no part."""
    store = WatchedParts()
    monkeypatch.setattr(store, "parts", list)
    kit = janitor(store, invalid=[OLD]).adopt()
    assert kit.engine.run_once().boundary == OLD
    assert spans(kit) == [(b"", None)]


@pytest.mark.parametrize("name", ["cells", "keys", "invert", "delete"])
def test_part_that_fails_is_the_only_one_searched_again(name: str) -> None:
    store = WatchedParts()
    kit, orders = set_up(store, workers=2)
    orders.plain(*many_times(NOW_MS - 32 * DAY))
    store.hook = fail_in(2, name=name)
    report = kit.engine.run_once()
    assert report.errors
    assert (report.boundary, kit.state.boundary(), kit.state.last_full_pass_ms()) == (None, None, None)
    assert spans(kit) == [*EVERYTHING[:3], *EVERYTHING[4:]]
    assert kit.state.open_ids()[OLD].closed_ms is None
    assert "02 to 03 (salt 2)" in (find_gap(kit.state.evidence()) or "")

    store.hook = fail_in()
    store.rows_read.clear()
    report = kit.run_after(HOUR)
    assert (report.full, report.errors, report.boundary) == (True, [], OLD)
    assert {number for number in range(BUCKETS) if store.rows_read[number]} == {2}
    proven, record = kit.state.boundary(), kit.state.open_ids()[OLD]
    assert proven is not None
    # The proof has the time of its oldest pass.
    assert (proven.made_ms, record.scanned_ms, record.closed_ms) == (NOW_MS, NOW_MS, NOW_MS + HOUR)
    assert kit.state.last_full_pass_ms() == NOW_MS
    assert_boundary_is_true(kit)
    assert not kit.run_after(DAY - HOUR - 1).full
    kit.clock.advance(1)
    store.rows_read.clear()
    assert kit.engine.run_once().full
    assert min(store.rows_read[number] for number in range(BUCKETS)) > 0


def test_boundary_with_a_pointer_that_stays_is_lower_in_its_part() -> None:
    store = WatchedParts()
    kit, _ = set_up(store)
    foreign = b"foreign"
    store.message.put([(foreign, MessageValue(OLD, b"?"))])
    kit.engine.run_once()
    [number] = salt(foreign, BUCKETS)
    assert [item.bound == OLD - 1 for item in kit.state.evidence()] == [
        part == number for part in range(-1, BUCKETS + 1)
    ]
    proven = kit.state.boundary()
    assert proven is not None
    assert proven.bound == OLD - 1
    [lowest, *_] = kit.engine.boundary()[1].limits
    assert lowest.reason.startswith(
        f"invalid transaction {OLD} has a row that could not be inverted, in keys from {number:02x} to "
    )


@pytest.mark.parametrize("name", ["a shorter ttl", "deleted"])
def test_topic_that_changes_after_its_part_was_searched_is_not_proven(name: str) -> None:
    store = WatchedParts()
    kit, orders = set_up(store, workers=1, hold_seconds=0)
    # Every part deletes rows, so the second part notices the change.
    orders.plain(*many_times(NOW_MS - 32 * DAY))
    ttl_seconds, generation = (3600, 1) if name == "a shorter ttl" else (30 * 86400, -1)

    def change(number: int, called: str) -> None:
        if (number, called) == (1, "keys"):
            orders.describe(ttl_seconds=ttl_seconds, generation=generation)

    store.hook = change
    assert kit.engine.run_once().errors == []
    assert OLD in orders.pointers()
    assert kit.state.boundary() is not None
    assert_boundary_is_true(kit)
    store.hook = lambda *_: None
    assert kit.run_after(DAY).boundary == OLD
    assert set(orders.pointers()) == set()


def kill_run(kit: Kit, name: str, times: int) -> None:
    """Run once; the process is killed before the n-th call of the state with this name."""
    made: list[str] = []

    def die(call: Call) -> None:
        if call.name == name:
            made.append(name)
            if len(made) == times:
                raise ProcessKilled

    watch_state(kit.state, before=die)
    with pytest.raises(ProcessKilled):
        kit.engine.run_once()
    for watched in STATE_CALLS:
        delattr(kit.state, watched.removeprefix("state."))


@pytest.mark.parametrize("recorded", range(BUCKETS + 1))
def test_run_after_a_kill_searches_only_uncovered_keys(recorded: int) -> None:
    store = WatchedParts()
    kit, orders = set_up(store, workers=1)
    kill_run(kit, "state.replace_evidence", recorded + 1)
    assert len(spans(kit)) == (recorded + 1 if recorded else 0)
    assert kit.state.boundary() is None
    again = kit.restart()
    assert len(again.engine.recover()) == 1
    again.clock.advance(MINUTE)
    done = {start for start, _ in spans(kit)}
    store.rows_read.clear()
    report = again.engine.run_once()
    assert (report.full, report.boundary) == (True, OLD)
    # Covered parts are searched only for young transactions, which this store does not have.
    assert all((store.rows_read[number] == 0) == (bytes([number]) in done) for number in range(BUCKETS))
    assert set(filter(None, orders.pointers())) == {-OLD}
    assert_boundary_is_true(again)
    assert not again.run_after(MINUTE).full


def test_run_after_a_kill_at_the_end_proves_without_a_search() -> None:
    store = WatchedParts()
    kit, _ = set_up(store)
    store.hook = lambda *_: None
    kill_run(kit, "state.save_frontiers", 2)
    assert spans(kit) == EVERYTHING
    kit.snapshots.invalid = [OLD]
    again = kit.restart()
    again.engine.recover()
    assert again.run_after(HOUR).boundary == OLD
    assert not again.run_after(MINUTE).full


def test_id_of_a_client_between_two_runs_is_not_closed() -> None:
    store = WatchedParts()
    kit, orders = set_up(store)
    kit.snapshots.invalid = [OLD, YOUNG]
    store.hook = fail_in(3)
    kit.engine.run_once()
    kit.clock.advance(LIFETIME.window_end_ms(YOUNG) - 1 - kit.clock.now_ms())
    orders.tx(YOUNG, *range(kit.clock.now_ms(), kit.clock.now_ms() + 1))
    # Written with a clock behind the allowance, so that only a full search finds them.
    orders.tx(YOUNG, *many_times(NOW_MS - 20 * HOUR))
    kit.clock.advance(HOUR)
    store.hook = fail_in()
    report = kit.engine.run_once()
    assert report.errors == []
    assert report.boundary is not None
    assert report.boundary < YOUNG
    assert kit.state.open_ids()[YOUNG].closed_ms is None
    assert_boundary_is_true(kit)
    assert kit.run_after(DAY).boundary == YOUNG
    assert set(filter(None, orders.pointers())) == {-OLD, -YOUNG}


def test_id_first_seen_in_the_second_run_is_not_closed() -> None:
    store = WatchedParts()
    kit, orders = set_up(store)
    late = OLD + 1
    orders.tx(late, *many_times(NOW_MS - 9 * HOUR))
    kit.snapshots.in_progress = [late]
    store.hook = fail_in(0)
    kit.engine.run_once()
    kit.snapshots.in_progress, kit.snapshots.invalid = [], [OLD, late]
    kit.clock.advance(MINUTE)
    store.hook = fail_in()
    assert (kit.engine.run_once().errors, kit.state.open_ids()[late].closed_ms) == ([], None)
    assert_boundary_is_true(kit)
    assert kit.run_after(DAY).boundary == late


@pytest.mark.parametrize(
    ("change", "continues"),
    [
        (lambda kit: kit.clock.advance(7 * DAY - 1), True),
        (lambda kit: kit.clock.advance(7 * DAY), False),
        (lambda kit: kit.clock.step(-1), False),
        (lambda kit: kit.engine.adopt(), False),
        (lambda kit: setattr(kit.snapshots, "age_ms", 1), False),
    ],
    ids=["week minus 1 ms", "week", "clock set back", "adopted again", "older snapshot"],
)
def test_outdated_round_is_restarted(change: Callable[[Kit], object], continues: bool) -> None:
    store = WatchedParts()
    kit, _ = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    store.hook = fail_in(2)
    kit.engine.run_once()
    change(kit)
    store.hook = fail_in()
    # Restored rows, which only a full search finds.
    Topic(store, topic(store, "default:back", ttl_seconds=30 * 86400).id).tx(
        OLD, *range(NOW_MS - 20 * HOUR, NOW_MS, HOUR)
    )
    kit.engine.run_once()
    left = {salt(cell.key, BUCKETS)[0] for cell in store.message.read(CELLS, b"", None, 1000).items if cell.pointer > 0}
    assert left == ({0, 1, 3} if continues else set())


def test_lease_lost_during_a_search_ends_the_evidence() -> None:
    store = WatchedParts()
    kit, _ = set_up(store, workers=1)
    lease = Lease(kit.state, "a", 60, kit.clock)
    lease.acquire()
    saved = Semaphore(0)
    watch_state(kit.state, after=lambda call: saved.release() if call.name == "state.replace_evidence" else None)
    taken: list[tuple[bytes, bytes | None]] = []

    def take(number: int, name: str) -> None:
        if name == "cells" and number == 2 and not taken:
            # One thread searches the parts and another saves their evidence: wait for the gaps and two parts.
            assert all(saved.acquire(timeout=60) for _ in range(3))
            Lease(kit.state, "b", 60, kit.clock).acquire(sole=True)
            taken.extend(spans(kit))

    store.hook = take
    assert [note.guard for note in kit.restart(lease=lease).engine.run_once().guards] == ["lease"]
    assert spans(kit) == taken == [*EVERYTHING[:3], EVERYTHING[-1]]
    assert kit.state.runs(1)[0].result == "interrupted"


class RandomHistory:
    """Random clients that publish as long as they may, and runs that fail or are killed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = WatchedParts()
        self.orders = topic(self.store, "default:orders", ttl_seconds=2 * 86400)
        self.kit = janitor(self.store, workers=self.chance.choice([1, 3]), batch_rows=self.chance.choice([2, 50]))
        self.kit.engine.adopt()
        self.running: list[int] = []
        self.invalid: list[int] = []
        self.proofs = 0

    def play(self, rounds: int) -> None:
        acts = [self.begin, self.publish, self.publish, self.invalidate, self.commit, self.wait, self.wait, self.run]
        for _ in range(rounds):
            self.kit.clock.advance(DAY)
            for _ in range(self.chance.randrange(1, 12)):
                self.chance.choice(acts)()
                self.check()
            while self.running:
                self.invalidate()
            self.wait()
            self.run("success")
            self.check()

    def check(self) -> None:
        assert_boundary_is_true(self.kit, self.invalid)
        self.proofs += self.kit.engine.boundary()[0] is not None

    def begin(self) -> None:
        self.running.append(pointer(self.kit.clock.now_ms(), len(self.running) + len(self.invalid)))

    def publish(self) -> None:
        """Publish until the end of a transaction's window, with a clock that may be behind the allowance."""
        now_ms = self.kit.clock.now_ms()
        may = [each for each in self.running + self.invalid if now_ms < LIFETIME.window_end_ms(each)]
        for write_pointer in may:
            late_ms = self.chance.choice([0, MINUTE, 9 * HOUR, 10 * HOUR])
            self.orders.tx(write_pointer, *(now_ms - late_ms - self.chance.randrange(9) for _ in range(4)))

    def invalidate(self) -> None:
        if self.running:
            self.invalid.append(self.running.pop(self.chance.randrange(len(self.running))))

    def commit(self) -> None:
        if self.running:
            self.running.pop()

    def wait(self) -> None:
        self.kit.clock.advance(self.chance.choice([1, MINUTE, 40 * MINUTE, HOUR, 2 * HOUR, 5 * HOUR]))

    def run(self, ending: str = "") -> None:
        snapshots, chance = self.kit.snapshots, self.chance
        snapshots.invalid, snapshots.in_progress = sorted(self.invalid), sorted(self.running)
        left, ending = [chance.randrange(120)], ending or chance.choice(["kill", "pause", "failure", "failure"])
        broken = chance.sample(range(BUCKETS), chance.randrange(1, BUCKETS))

        def hook(number: int, name: str) -> None:
            left[0] -= 1
            if ending == "failure" and number in broken and name in ("cells", "invert"):
                raise StoreError("the region is not served")
            if ending == "kill" and left[0] <= 0:
                raise ProcessKilled
            if ending == "pause" and left[0] == 0:
                self.kit.state.pause("*:*", 0)

        self.store.hook = hook
        try:
            self.kit.engine.run_once()
        except ProcessKilled:
            self.kit = self.kit.restart()
        self.store.hook = lambda *_: None
        self.kit.state.resume("*:*")
        self.kit.state.save_strikes(dict.fromkeys(self.kit.state.strikes()))
        self.kit.engine.recover()


@pytest.mark.seeded
@pytest.mark.no_cover
def test_boundary_after_any_failures_and_kills_is_true() -> None:
    proofs = 0
    for seed in seeds(60):
        history = RandomHistory(seed)
        history.play(5)
        proofs += history.proofs
    assert proofs > 0


class CallBudget:
    """A limit of a run's calls with one name; each call takes a while, and the next one kills the process."""

    def __init__(self, kit: Kit, name: str, calls: int) -> None:
        self.kit, self.name, self.calls = kit, name, calls
        self.left = calls
        watch(kit.store, before=self)

    def __call__(self, call: Call) -> None:
        if call.name != self.name:
            return
        if not self.left:
            raise ProcessKilled
        self.left -= 1
        self.kit.clock.advance(PROGRESS_MS)

    def run(self) -> Report | None:
        self.left = self.calls
        try:
            return self.kit.engine.run_once()
        except ProcessKilled:
            return None
        finally:
            self.left = 1_000_000

    def run_to_the_end(self) -> tuple[Report, int]:
        """Run until a run ends; return its report and the number of killed runs."""
        for killed in range(60):
            report = self.run()
            assert_boundary_is_true(self.kit)
            if report is not None:
                return report, killed
        raise AssertionError("the runs make no progress")


def adopted_single_part(*, topics: int = 3) -> tuple[Kit, list[Topic]]:
    """Return a janitor that adopted a store without parts, with invalid rows in every topic and unrecognized keys."""
    store = MemoryStore()
    described = [topic(store, f"default:t{number}", ttl_seconds=30 * 86400) for number in range(topics)]
    for each in described:
        each.tx(OLD, *many_times(NOW_MS - 9 * HOUR)).stored(
            pointer(NOW_MS - 9 * HOUR, 1), *many_times(NOW_MS - 9 * HOUR)
        )
    store.message.put([(b"default:t1!", MessageValue(None, b"foreign"))])
    kit = janitor(store, batch_rows=4, invalid=[OLD]).adopt()
    return kit, described


@pytest.mark.parametrize("calls", [5, 9])
def test_search_killed_repeatedly_ends_in_a_boundary(calls: int) -> None:
    kit, topics = adopted_single_part()
    report, killed = CallBudget(kit, "message.cells", calls).run_to_the_end()
    assert killed > 2
    assert report.full
    assert report.boundary == OLD
    assert {pointer for each in topics for pointer in each.pointers()} == {-OLD}
    evidence = kit.state.evidence()
    assert find_gap(evidence) is None
    assert len({item.run_id for item in evidence}) > 2
    assert kit.state.note("round") is None
    assert kit.engine.verify().refuted == 0


def test_part_searched_once_is_searched_for_later_publishes() -> None:
    kit, topics = adopted_single_part()
    kit.snapshots.invalid = [OLD, YOUNG]
    budget = CallBudget(kit, "message.cells", 14)
    assert budget.run() is None
    assert kit.state.evidence() != []
    topics[0].tx(YOUNG, kit.clock.now_ms() - MINUTE)
    budget.calls = 1000
    report = budget.run()
    assert report is not None
    assert report.boundary is not None
    assert report.boundary < YOUNG
    assert YOUNG not in topics[0].pointers()


def test_payload_search_killed_repeatedly_ends_in_a_full_run() -> None:
    kit, _ = adopted_single_part(topics=6)
    report, killed = CallBudget(kit, "payload.keys", 20).run_to_the_end()
    assert killed > 0
    assert report.full
    assert report.boundary == OLD
    assert not kit.run_after(MINUTE).full


def test_adoption_after_a_killed_payload_search_restarts_the_search() -> None:
    kit, topics = adopted_single_part(topics=6)
    assert CallBudget(kit, "payload.keys", 20).run() is None
    kit.engine.adopt()
    # A payload that only a full search finds, because its transaction is newer than its time.
    topics[0].stored(pointer(kit.clock.now_ms()), NOW_MS - 60 * DAY)
    assert kit.engine.run_once().full
    assert NOW_MS - 60 * DAY not in topics[0].stored_times()


def test_evidence_of_a_killed_run_has_synced_deletes() -> None:
    kit, _ = adopted_single_part()
    calls: list[str] = []
    watch(kit.store, before=lambda call: calls.append(call.name))
    watch_state(kit.state, before=lambda call: calls.append(call.name))
    assert CallBudget(kit, "message.cells", 9).run() is None
    saved = [number for number, name in enumerate(calls) if name == "state.replace_evidence"]
    assert saved
    assert all("message.sync" in calls[before:after] for before, after in zip([0, *saved], saved, strict=False))


def test_evidence_ends_before_a_topic_that_failed() -> None:
    kit, topics = adopted_single_part()
    failed = topics[1].id.prefix
    watch(
        kit.store,
        before=fail_at(
            "message.invert", StoreError("a block is damaged"), lambda call: call.arguments[0][0].key.startswith(failed)
        ),
    )
    assert CallBudget(kit, "message.cells", 20).run() is None
    assert all(item.stop is not None and item.stop <= topics[1].id.prefix + b"\xff" for item in kit.state.evidence())
    assert any(OLD in topic.pointers() for topic in topics[1:])


def test_refute_during_a_round_withdraws_boundary_evidence_and_round() -> None:
    with SqliteState.in_memory() as state:
        state.save_boundary(ProvenBoundary(OLD, NOW_MS, "1"))
        state.replace_evidence([Evidence(b"", None, NOW_MS, OLD, NOW_MS, "1")])
        boundary.continue_round(state, "1", NOW_MS, NOW_MS)
        boundary.save_payloads(state, "1", b"a:b:")
        boundary.refute(state, "a row was found", NOW_MS + 1)
        boundary.save_payloads(state, "1", b"a:c:")
        assert (state.boundary(), state.evidence()) == (None, [])
        assert boundary.refutation(state) == Refutation("a row was found", NOW_MS + 1)
        assert boundary.continue_round(state, "2", NOW_MS + 2, NOW_MS).payloads_from == b""
        boundary.save_searched(state, boundary.refutation(state))
        assert boundary.refutation(state) == Refutation("a row was found", NOW_MS + 1, searched=True)
