"""The lease: one holder at a time, a growing fence, and time by each side's own clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from janitor.state.sqlite.state import SqliteState
from tests.builders import MINUTE, NOW_MS, SECOND
from tests.kit.servers import LeaseCell
from tests.support import each_raises
from tms_core.clock import ManualClock
from tms_core.errors import LeaseHeld, LeaseLost, StoreError
from tms_core.tables.lease import WALL_ALLOWANCE_MS, Lease, LeaseRecord

SECONDS = 60


@pytest.fixture
def cell() -> LeaseCell:
    return LeaseCell()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS, monotonic_ms=MINUTE)


def lease(cell: LeaseCell, holder: str = "a") -> Lease:
    return Lease(cell, holder, SECONDS, cell.clock)


def acquire_lease(cell: LeaseCell, holder: str = "a") -> Lease:
    made = lease(cell, holder)
    made.acquire()
    return made


def test_concurrent_acquire_gives_the_lease_to_one_holder(cell: LeaseCell) -> None:
    first, second = lease(cell), lease(cell, "b")
    cell.before_swap = second.acquire
    with pytest.raises(LeaseHeld):
        first.acquire()
    assert (first.held, second.held) == (False, True)
    assert cell.record.holder == "b"


@pytest.mark.parametrize("value", [b"", b"{", b"null", b"[]", b'{"holder": "a"}', b"\xff", b'{"who": 1}'])
def test_unreadable_lease_record_can_be_acquired(cell: LeaseCell, value: bytes) -> None:
    cell.value = value
    assert acquire_lease(cell).held


def test_acquire_of_held_lease_names_holder_and_times(cell: LeaseCell) -> None:
    acquire_lease(cell)
    cell.clock.advance(7_999)
    pattern = r"\ba .* 7 s .* 60 s.* 300 s "
    with pytest.raises(LeaseHeld, match=pattern):
        lease(cell, "b").acquire()


def test_renewed_lease_cannot_be_acquired(cell: LeaseCell) -> None:
    mine, challenger = acquire_lease(cell), lease(cell, "b")
    for _ in range(10):
        cell.clock.advance(30_000)
        mine.renew_if_due()
        with pytest.raises(LeaseHeld):
            challenger.acquire()
    mine.check()


def test_release_of_lost_lease_keeps_the_new_holder(cell: LeaseCell) -> None:
    mine, other = acquire_lease(cell), lease(cell, "b")
    other.acquire(sole=True)
    mine.release()
    other.check()


def test_lease_never_acquired_is_lost_and_not_written(cell: LeaseCell) -> None:
    mine = lease(cell)
    mine.release()
    each_raises(LeaseLost, mine.check, mine.renew, match="no process")
    assert cell.value is None


def test_each_holder_gets_a_higher_fence(cell: LeaseCell) -> None:
    fences = []
    for number in range(6):
        mine = lease(cell, str(number))
        mine.acquire(sole=number % 2 == 1)
        fences.append(mine.fence)
        if number % 2 == 0 and number < 4:
            continue  # The holder dies, and the next holder knows it.
        mine.release()  # The next holder need not wait.
        assert (mine.fence, cell.record.holder) == (0, "")
    assert fences == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("watched_ms", "taken"), [(60_000, False), (60_001, True)])
def test_lease_of_dead_holder_is_acquired_after_its_duration(cell: LeaseCell, watched_ms: int, taken: bool) -> None:
    acquire_lease(cell)
    challenger = lease(cell, "b")
    with pytest.raises(LeaseHeld):
        challenger.acquire()
    cell.clock.advance(watched_ms)
    if taken:
        challenger.acquire()
    else:
        with pytest.raises(LeaseHeld):
            challenger.acquire()
    assert challenger.held is taken
    assert challenger.fence == 2 * taken


def test_acquire_waits_by_the_monotonic_clock(cell: LeaseCell) -> None:
    acquire_lease(cell)
    own = ManualClock(NOW_MS - 10 * MINUTE)
    challenger = Lease(cell, "b", SECONDS, own)
    with pytest.raises(LeaseHeld, match="0 s"):
        challenger.acquire()
    own.step(SECONDS * SECOND + WALL_ALLOWANCE_MS)
    with pytest.raises(LeaseHeld):
        challenger.acquire()
    own.step(-5 * MINUTE)
    own.advance(SECONDS * SECOND + 1)
    challenger.acquire()
    assert challenger.held


@pytest.mark.parametrize(("extra_ms", "taken"), [(0, False), (1, True)])
def test_challenger_with_clock_far_ahead_takes_over_and_fences(cell: LeaseCell, extra_ms: int, taken: bool) -> None:
    mine = acquire_lease(cell)
    far = ManualClock(NOW_MS + SECONDS * SECOND + WALL_ALLOWANCE_MS + extra_ms)
    challenger = Lease(cell, "b", SECONDS, far)
    if not taken:
        with pytest.raises(LeaseHeld):
            challenger.acquire()
        mine.check()
        return
    challenger.acquire()
    with pytest.raises(LeaseLost, match=r"\bb\b"):
        mine.check()
    assert (mine.held, mine.fence, challenger.fence) == (False, 0, 2)


def test_check_reads_each_time_and_renews_after_a_third(cell: LeaseCell) -> None:
    mine = acquire_lease(cell)
    beats = []
    for _ in range(7):
        mine.check()
        beats.append(cell.record.beat)
        cell.clock.advance(10_000)
    assert beats == [0, 0, 1, 1, 2, 2, 3]
    assert (cell.reads, cell.writes) == (1 + 7, 1 + 3)
    assert cell.record.renewed_ms == NOW_MS + 60_000


def test_lost_lease_stays_lost(cell: LeaseCell) -> None:
    for look in (Lease.check, Lease.renew):
        mine = acquire_lease(cell)
        other = lease(cell, "b")
        other.acquire(sole=True)
        for _ in range(2):
            with pytest.raises(LeaseLost, match=r"\bb\b"):
                look(mine)
        other.check()
        other.release()


def test_lease_taken_over_during_renewal_is_lost(cell: LeaseCell) -> None:
    mine, other = acquire_lease(cell), lease(cell, "b")
    cell.clock.advance(20_000)
    cell.before_swap = lambda: other.acquire(sole=True)
    with pytest.raises(LeaseLost, match=r"\bb\b"):
        mine.check()
    assert cell.record.holder == "b"


@pytest.mark.parametrize("look", [Lease.check, Lease.renew])
@pytest.mark.parametrize("times", [1, 2])
def test_renewals_with_lost_responses_adopt_the_stored_record(
    cell: LeaseCell, look: Callable[[Lease], None], times: int
) -> None:
    mine = acquire_lease(cell)
    for _ in range(times):
        cell.fails_after_writing = True
        cell.clock.advance(SECOND)
        with pytest.raises(StoreError, match="answer was lost"):
            mine.renew()
    cell.fails_after_writing = False
    assert mine.remaining_ms == SECONDS * SECOND - times * SECOND
    look(mine)
    assert (mine.held, mine.fence, cell.record.fence) == (True, 1, 1)
    cell.clock.advance(SECONDS * SECOND // 3)
    mine.check()
    assert mine.remaining_ms == SECONDS * SECOND


@pytest.mark.parametrize("look", [Lease.check, Lease.renew, Lease.confirm])
def test_leases_with_same_holder_name_differ_by_fence(cell: LeaseCell, look: Callable[[Lease], None]) -> None:
    mine, again = acquire_lease(cell), acquire_lease(cell)
    with pytest.raises(LeaseLost):
        look(mine)
    assert (mine.held, again.fence, cell.record.fence) == (False, 2, 2)
    again.check()


def test_lease_taken_over_after_lost_renewal_response_is_lost(cell: LeaseCell) -> None:
    mine, other = acquire_lease(cell), lease(cell, "b")
    cell.fails_after_writing = True
    with pytest.raises(StoreError):
        mine.renew()
    cell.fails_after_writing = False

    def taken() -> None:
        # Between the read of the holder and the next comparison.
        cell.before_swap = lambda: other.acquire(sole=True)

    cell.before_swap = taken
    with pytest.raises(LeaseLost, match=r"\bb\b"):
        mine.renew()
    assert (mine.held, mine.fence, mine.seen) == (False, 0, cell.record)
    other.check()


def test_suspended_holder_without_challenger_keeps_the_lease(cell: LeaseCell) -> None:
    mine = acquire_lease(cell)
    cell.clock.advance(24 * 60 * MINUTE)
    mine.check()
    assert (mine.held, cell.record.beat) == (True, 1)


def test_remaining_ms_follows_the_monotonic_clock(cell: LeaseCell) -> None:
    mine = lease(cell)
    assert mine.remaining_ms == 0
    mine.acquire()
    cell.clock.advance(20_000)
    cell.clock.step(10 * MINUTE)
    assert mine.remaining_ms == 40_000
    mine.renew_if_due()
    assert mine.remaining_ms == 60_000
    cell.clock.advance(60_001)
    assert mine.remaining_ms == -1
    mine.release()
    assert mine.remaining_ms == 0


def test_acquire_without_wall_clocks_waits_by_monotonic_clock(cell: LeaseCell) -> None:
    mine = acquire_lease(cell)
    far = ManualClock(NOW_MS + 24 * 60 * MINUTE)
    challenger = Lease(cell, "b", SECONDS, far, wall_clocks=False)
    for _ in range(2):
        with pytest.raises(LeaseHeld):
            challenger.acquire()
        far.advance(SECONDS * SECOND)
    far.advance(1)
    cell.clock.advance(2 * SECONDS * SECOND + 1)
    challenger.acquire()
    assert mine.remaining_ms < 0


def test_confirm_reads_once_and_detects_a_loss(cell: LeaseCell) -> None:
    mine, other = acquire_lease(cell), lease(cell, "b")
    reads = cell.reads
    mine.confirm()
    assert cell.reads == reads + 1
    other.acquire(sole=True)
    for _ in range(2):
        with pytest.raises(LeaseLost, match=r"\bb\b"):
            mine.confirm()
    assert (mine.held, mine.fence, mine.remaining_ms) == (False, 0, 0)
    other.confirm()


def test_acquire_after_lost_response_takes_its_own_record(cell: LeaseCell) -> None:
    mine = lease(cell)
    cell.fails_after_writing = True
    with pytest.raises(StoreError):
        mine.acquire()
    assert not mine.held
    cell.fails_after_writing = False
    mine.acquire()
    assert (mine.held, mine.fence) == (True, 2)


def test_lease_record_contains_the_holder_address(cell: LeaseCell) -> None:
    mine, other = lease(cell), lease(cell, "b")
    mine.address = "http://a:1"
    mine.acquire()
    assert mine.seen is None
    with pytest.raises(LeaseHeld):
        other.acquire()
    mine.renew()
    assert other.seen == LeaseRecord("a", 1, 0, NOW_MS, SECONDS, "http://a:1")
    assert cell.record.address == "http://a:1"
    mine.release()
    other.acquire()
    assert other.seen is not None
    assert other.seen.holder == ""
    assert b"address" not in (cell.value or b"")


@pytest.fixture
def states(tmp_path: Path) -> Iterator[tuple[SqliteState, SqliteState]]:
    """Return the states of two processes on one database."""
    with SqliteState(tmp_path) as first, SqliteState(tmp_path) as second:
        yield first, second


def test_lease_in_shared_sqlite_state_has_one_holder(
    states: tuple[SqliteState, SqliteState], clock: ManualClock
) -> None:
    mine, other = (Lease(state, name, SECONDS, clock) for state, name in zip(states, "ab", strict=True))
    mine.acquire()
    with pytest.raises(LeaseHeld, match=r"^a "):
        other.acquire()
    mine.release()
    other.acquire()
    with pytest.raises(LeaseLost):
        mine.renew()
    kept = states[0].lease()
    assert kept is not None
    assert json.loads(kept) == {"holder": "b", "fence": 2, "beat": 0, "renewed_ms": NOW_MS, "seconds": SECONDS}
