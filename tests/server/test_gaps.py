"""Gaps: the ids that stay empty forever, and that no acknowledged message is in a gap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW_MS, SECOND
from tms_core.clock import ManualClock
from tms_core.messaging.ids import POSITIONS, position, tail
from tms_core.rowkey import generation_prefix
from tms_core.server.ha.leadership import REACH_MS, Term
from tms_core.server.ha.sealed_ranges import Gaps, PositionRange, SealedRanges
from tms_core.tables.base import MessageValue
from tms_core.tables.lease import LeaseRecord
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId

PREFIX = generation_prefix(TopicId.parse("default:t").prefix, 1)
SECONDS = 15
#: The former leader was last heard of a while ago.
FORMER = LeaseRecord("a", 1, 7, NOW_MS - 30 * SECOND, SECONDS)
DAY = 86_400_000
#: The first position that the next leader may give.
FREE = position(NOW_MS - 30 * SECOND + SECONDS * SECOND + SECOND)


# --- spans -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12))
def test_spans_of_any_kind_hide_exactly_their_positions_and_survive_being_kept(pairs: list[tuple[int, int]]) -> None:
    spans = [PositionRange(first, first + size) for first, size in pairs]
    gaps = Gaps.of(spans)
    hidden = {at for span in spans for at in range(*span)}
    assert {at for at in range(80) if gaps.hides(at)} == hidden
    assert gaps.end == max(hidden, default=-1) + 1
    assert all(one.stop < other.first for one, other in zip(gaps.spans, gaps.spans[1:], strict=False))
    assert Gaps.parse(gaps.pack()) == gaps


# --- sealing ---------------------------------------------------------------------------------------------------------


class Succession:
    """A topic whose leader has died, and its next one."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.side = MemorySide()
        self.clock = ManualClock(NOW_MS)
        self.fence = 1

    def rows(self, *at: int) -> None:
        self.store.message.put([(PREFIX + tail(one), MessageValue(None, b"m")) for one in at])

    def sealed(self, previous: LeaseRecord | None = FORMER) -> Gaps:
        """As a new leader has it."""
        self.fence += 1
        return self.settled(SealedRanges(self.store.message, self.side, self.clock), Term(self.fence, previous))

    def settled(self, sealed_ranges: SealedRanges, term: Term, prefix: bytes = PREFIX) -> Gaps:
        return sealed_ranges.settle(term, prefix, lambda _: None)


@pytest.fixture
def succession() -> Succession:
    return Succession()


def test_sealed_topic_is_not_looked_for_again_in_its_term(succession: Succession) -> None:
    sealed_ranges = SealedRanges(succession.store.message, succession.side, succession.clock)
    term = Term(2, FORMER)
    assert sealed_ranges.known(term, PREFIX) is None
    first = succession.settled(sealed_ranges, term)
    calls = succession.store.calls.total()
    assert sealed_ranges.known(term, PREFIX) is succession.settled(sealed_ranges, term) is first
    assert succession.store.calls.total() == calls
    assert sealed_ranges.known(Term(3, FORMER), PREFIX) is None
    succession.settled(sealed_ranges, Term(3, FORMER))
    assert succession.store.calls.total() > calls


@pytest.mark.parametrize("ago_ms", [-1, 0])
def test_seal_of_an_empty_topic_hides_writes_in_flight(succession: Succession, ago_ms: int) -> None:
    oldest = position(FORMER.renewed_ms - REACH_MS)
    gaps = succession.sealed()
    assert gaps.hides(oldest + ago_ms) is (ago_ms == 0)
    assert gaps.end == FREE


@pytest.mark.parametrize(
    ("ahead_ms", "end_ms"), [(10 * SECOND, 11 * SECOND), (300 * SECOND, 301 * SECOND), (DAY, None)]
)
def test_seal_ends_after_the_clock_of_the_former_leader_up_to_a_limit(
    succession: Succession, ahead_ms: int, end_ms: int | None
) -> None:
    succession.rows(position(NOW_MS))
    previous = LeaseRecord("a", 1, 7, NOW_MS + ahead_ms - SECONDS * SECOND, SECONDS)
    assert succession.sealed(previous).end == (0 if end_ms is None else position(NOW_MS + end_ms))


@pytest.mark.parametrize(("days", "late", "kept"), [(29, False, True), (31, False, False), (31, True, True)])
def test_seal_drops_gaps_without_rows_after_a_month(succession: Succession, days: int, late: bool, kept: bool) -> None:
    last = position(NOW_MS - 20 * SECOND)
    succession.rows(last)
    succession.sealed()
    if late:
        succession.rows(last + 5)
    succession.clock.advance(days * DAY)
    previous = LeaseRecord("b", 2, 7, succession.clock.now_ms() - 30 * SECOND, SECONDS)
    assert succession.sealed(previous).hides(last + 5) is kept


def test_seal_of_one_generation_leaves_others_unsealed(succession: Succession) -> None:
    sealed_ranges = SealedRanges(succession.store.message, succession.side, succession.clock)
    term = Term(2, FORMER)
    succession.settled(sealed_ranges, term)
    assert sealed_ranges.known(term, generation_prefix(TopicId.parse("default:t").prefix, 2)) is None


def test_seal_ends_after_a_message_from_the_future(succession: Succession) -> None:
    last = position(NOW_MS + DAY)
    succession.rows(last)
    assert succession.sealed().end == last + 1 + position(SECOND)


def test_seal_ignores_rows_that_are_not_messages(succession: Succession) -> None:
    at = position(NOW_MS - 20 * SECOND)
    succession.rows(at)
    succession.store.message.put([(PREFIX + tail(at - 1) + b"x", MessageValue(None, b"m"))])
    assert succession.sealed().hides(at - 1)


def test_seal_after_an_orderly_end_reads_no_messages(succession: Succession) -> None:
    succession.rows(position(NOW_MS))
    assert succession.sealed(None) == Gaps()
    assert succession.store.calls["keys"] == 0


def test_seal_of_a_topic_with_the_latest_id_can_be_stored(succession: Succession) -> None:
    succession.rows(POSITIONS - 1)
    gaps = succession.sealed()
    assert Gaps.parse(gaps.pack()) == gaps
