"""The prune boundary: its limits, and that gaps and doubts prevent it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.boundary import Boundary, Limit, covered_since_ms, find_gap, in_force, prove, with_newer
from janitor.rules.ranges import Lifetime
from janitor.state.base import Evidence, ProvenBoundary
from tms_core.transaction.model import TX_PER_MS

LIFETIME = Lifetime(max_ms=90_000_000, grace_ms=86_400_000, allowance_ms=300_000)
STARTED_MS = 1_700_000_000_000
#: The newest transaction that could no longer write when the pass started.
WRITABLE = (STARTED_MS - 176_400_000) * TX_PER_MS - 1
RAISED = "; the next full pass raises the boundary"


def make_evidence(
    start: bytes = b"", stop: bytes | None = None, *, bound: int = WRITABLE - 100, started_ms: int = STARTED_MS
) -> Evidence:
    return Evidence(start, stop, STARTED_MS - 5, bound, started_ms, "run")


def test_boundary_of_one_full_pass_is_the_bound_of_its_snapshot() -> None:
    boundary = prove([make_evidence()], [], LIFETIME)
    assert (boundary.bound, boundary.obstacles) == (WRITABLE - 100, ())
    assert [limit.bound for limit in boundary.limits] == [WRITABLE - 100, WRITABLE]
    assert boundary.limits[0].reason == (
        f"snapshot {STARTED_MS - 5}, used for all keys, does not show the end of later transactions{RAISED}"
    )


@pytest.mark.parametrize(("bound", "proven"), [(WRITABLE - 1, WRITABLE - 1), (WRITABLE + 1, WRITABLE)])
def test_boundary_excludes_transactions_that_could_still_write(bound: int, proven: int) -> None:
    boundary = prove([make_evidence(bound=bound)], [], LIFETIME)
    assert boundary.bound == proven
    assert boundary.limits[-1 if bound < WRITABLE else 0].reason == (
        f"younger transactions could still write when the pass over all keys started{RAISED}"
    )


def test_boundary_with_open_ids_is_just_below_the_lowest() -> None:
    lowest = WRITABLE - 500
    boundary = prove([make_evidence()], [lowest + 7, lowest], LIFETIME)
    assert boundary.bound == lowest - 1
    writing = f"the client of invalid transaction {lowest} may still write"
    raised = "a full pass after its lifetime raises the boundary"
    assert boundary.limits[0] == Limit(lowest - 1, f"{writing}; {raised}")
    assert len(boundary.limits) == 3


def test_boundary_with_open_ids_above_all_limits_ignores_them() -> None:
    assert prove([make_evidence()], [WRITABLE + 5], LIFETIME).bound == WRITABLE - 100


def test_boundary_of_several_intervals_has_their_lowest_limit() -> None:
    old = make_evidence(b"a", b"m", started_ms=STARTED_MS - 1000)
    boundary = prove(
        [make_evidence(b"", b"a", bound=WRITABLE - 5), old, make_evidence(b"m", bound=WRITABLE - 7)], [], LIFETIME
    )
    assert boundary.bound == WRITABLE - 1000 * TX_PER_MS
    assert "from 61 to 6d" in boundary.limits[0].reason
    assert [limit.bound for limit in boundary.limits] == sorted(limit.bound for limit in boundary.limits)
    assert len(boundary.limits) == 6


def test_boundary_limits_of_neighbours_are_one_place_with_its_salt() -> None:
    old = make_evidence(b"\x02", b"\x03", started_ms=STARTED_MS - 1)
    newer = [
        make_evidence(b"", b"\x01"),
        make_evidence(b"\x01", b"\x02"),
        make_evidence(b"\x03", b"\x04"),
        make_evidence(b"\x04", None),
    ]
    limits = prove([old, *newer], [], LIFETIME).limits
    reasons = {
        limit.start: limit.reason.rpartition(", used for keys ")[2] for limit in limits if "used" in limit.reason
    }
    places = {start: reason.partition(", does")[0] for start, reason in reasons.items()}
    assert places == {b"": "from the beginning to 02", b"\x02": "from 02 to 03 (salt 2)", b"\x03": "from 03 to the end"}
    [last] = {
        limit.start
        for limit in prove([make_evidence(b"", b"\xff"), make_evidence(b"\xff", bound=7)], [], LIFETIME).limits[:1]
    }
    assert last == b"\xff"


@pytest.mark.parametrize(
    ("start", "stop", "place"),
    [
        (b"\xff", None, "from ff to the end (salt 255)"),
        (b"\xfe", b"\xff", "from fe to ff (salt 254)"),
        (b"\x10", None, "from 10 to the end"),
        (b"\x00", b"\x02", "from 00 to 02"),
        (b"ab", b"b", "from 6162 to 62"),
    ],
)
def test_limit_of_an_interval_names_the_salt_it_covers(start: bytes, stop: bytes | None, place: str) -> None:
    around = (
        [make_evidence(b"", start, bound=1), make_evidence(stop, bound=1)]
        if stop
        else [make_evidence(b"", start, bound=1)]
    )
    reasons = [limit.reason for limit in prove([make_evidence(start, stop, bound=2), *around], [], LIFETIME).limits]
    assert any(f"snapshot {STARTED_MS - 5}, used for keys {place}, does" in reason for reason in reasons)


def test_with_newer_counts_the_newer_evidence_for_each_key() -> None:
    old = [make_evidence(b"", b"c", bound=1), make_evidence(b"c", None, bound=2)]
    newer = [make_evidence(b"b", b"d", bound=3)]
    found = with_newer(old, newer)
    assert [(item.start, item.stop, item.bound) for item in found] == [(b"", b"b", 1), (b"b", b"d", 3), (b"d", None, 2)]
    assert with_newer(found, [make_evidence(bound=4)]) == [make_evidence(bound=4)]
    assert with_newer([], newer) == newer


def test_covered_since_is_the_oldest_pass_or_none_with_a_gap() -> None:
    old = make_evidence(b"c", None, started_ms=STARTED_MS - 9)
    assert covered_since_ms([make_evidence(b"", b"c"), old]) == STARTED_MS - 9
    assert covered_since_ms([make_evidence(b"", b"b"), old]) is None


@pytest.mark.parametrize(("ahead_ms", "counts"), [(0, True), (1, False)])
def test_boundary_with_evidence_ahead_of_the_clock_is_not_in_force(ahead_ms: int, counts: bool) -> None:
    made = ProvenBoundary(WRITABLE, STARTED_MS, "run")
    evidence = [make_evidence(started_ms=STARTED_MS + 10 + ahead_ms)]
    assert in_force(made, evidence, STARTED_MS + 10, LIFETIME) is counts
    assert not in_force(ProvenBoundary(WRITABLE + 1, STARTED_MS, "run"), [], STARTED_MS, LIFETIME)


@pytest.mark.parametrize(("bound", "proven"), [(-1, None), (0, None), (1, 1)])
def test_boundary_of_a_bound_below_one_is_none_with_the_reason(bound: int, proven: int | None) -> None:
    boundary = prove([make_evidence(bound=bound)], [], LIFETIME)
    assert boundary.bound == proven
    assert bool(boundary.obstacles) is (proven is None)
    if proven is None:
        [obstacle] = boundary.obstacles
        assert boundary.limits[0].reason in obstacle
        assert boundary.limits[0].bound == bound


def test_boundary_with_the_first_id_open_is_none() -> None:
    boundary = prove([make_evidence()], [1], LIFETIME)
    assert boundary.bound is None
    [obstacle] = boundary.obstacles
    assert "transaction 1 " in obstacle


def test_boundary_with_a_clock_in_1970_is_none() -> None:
    assert prove([make_evidence(bound=5, started_ms=0)], [], LIFETIME).bound is None


def test_boundary_with_a_gap_is_none_without_limits() -> None:
    boundary = prove([make_evidence(b"", b"m")], [5], LIFETIME)
    [obstacle] = boundary.obstacles
    assert "6d on" in obstacle
    assert boundary == Boundary(None, obstacles=(obstacle,))


def test_boundary_that_does_not_exist_keeps_all_obstacles() -> None:
    assert Boundary.none("one", "two") == Boundary(None, (), ("one", "two"))


@pytest.mark.parametrize(
    ("intervals", "gap"),
    [
        ([], "complete pass"),
        ([(b"", None)], None),
        ([(b"", b"m"), (b"m", None)], None),
        ([(b"m", None), (b"", b"m")], None),
        ([(b"", b"p"), (b"m", None)], None),
        ([(b"", b"z"), (b"b", b"c"), (b"z", None)], None),
        ([(b"", None), (b"m", b"n")], None),
        ([(b"a", None)], "from the beginning to 61"),
        ([(b"\x00", None)], "from the beginning to 00"),
        ([(b"", b"m"), (b"m\x00", None)], "from 6d to 6d00"),
        ([(b"", b"z"), (b"b", b"c")], "from 7a on"),
        ([(b"", b"\xff" * 30)], f"from {'ff' * 30} on"),
        ([(b"", b"")], "from  on"),
    ],
)
def test_find_gap_names_the_uncovered_keys(intervals: list[tuple[bytes, bytes | None]], gap: str | None) -> None:
    found = find_gap([make_evidence(*interval) for interval in intervals])
    assert found is None if gap is None else gap in str(found)


EDGES = st.sampled_from([bytes([byte]) for byte in range(6)])


@given(st.lists(st.tuples(st.just(b"") | EDGES, st.none() | EDGES), max_size=5))
def test_find_gap_of_any_intervals_is_exact(intervals: list[tuple[bytes, bytes | None]]) -> None:
    keys = [b"", *(bytes([byte, low]) for byte in range(7) for low in (0, 1))]
    keys += [bytes([byte]) for byte in range(7)]

    def inside(key: bytes) -> bool:
        return any(start <= key and (stop is None or key < stop) for start, stop in intervals)

    assert (find_gap([make_evidence(*interval) for interval in intervals]) is None) == all(map(inside, keys))
