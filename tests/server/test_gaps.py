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
#: The lease of a former leader that has expired.
FORMER = LeaseRecord("a", 1, 7, NOW_MS - 30 * SECOND, SECONDS)
DAY = 86_400_000
#: The first position that the next leader may assign.
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


class Takeover:
    """A topic whose leader has died, and the next leaders."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.side = MemorySide()
        self.clock = ManualClock(NOW_MS)
        self.fence = 1

    def add_rows(self, *positions: int) -> None:
        self.store.message.put([(PREFIX + tail(position), MessageValue(None, b"m")) for position in positions])

    def seal(self, previous: LeaseRecord | None = FORMER) -> Gaps:
        """Seal the topic as a new leader; return its gaps."""
        self.fence += 1
        return self.settle(SealedRanges(self.store.message, self.side, self.clock), Term(self.fence, previous))

    def settle(self, sealed_ranges: SealedRanges, term: Term, prefix: bytes = PREFIX) -> Gaps:
        return sealed_ranges.settle(term, prefix, lambda _: None)


@pytest.fixture
def takeover() -> Takeover:
    return Takeover()


def test_sealed_topic_is_not_looked_for_again_in_its_term(takeover: Takeover) -> None:
    sealed_ranges = SealedRanges(takeover.store.message, takeover.side, takeover.clock)
    term = Term(2, FORMER)
    assert sealed_ranges.known(term, PREFIX) is None
    first = takeover.settle(sealed_ranges, term)
    calls = takeover.store.calls.total()
    assert sealed_ranges.known(term, PREFIX) is takeover.settle(sealed_ranges, term) is first
    assert takeover.store.calls.total() == calls
    assert sealed_ranges.known(Term(3, FORMER), PREFIX) is None
    takeover.settle(sealed_ranges, Term(3, FORMER))
    assert takeover.store.calls.total() > calls


@pytest.mark.parametrize("ago_ms", [-1, 0])
def test_seal_of_an_empty_topic_hides_writes_in_flight(takeover: Takeover, ago_ms: int) -> None:
    oldest = position(FORMER.renewed_ms - REACH_MS)
    gaps = takeover.seal()
    assert gaps.hides(oldest + ago_ms) is (ago_ms == 0)
    assert gaps.end == FREE


@pytest.mark.parametrize(
    ("ahead_ms", "end_ms"), [(10 * SECOND, 11 * SECOND), (300 * SECOND, 301 * SECOND), (DAY, None)]
)
def test_seal_ends_after_the_clock_of_the_former_leader_up_to_a_limit(
    takeover: Takeover, ahead_ms: int, end_ms: int | None
) -> None:
    takeover.add_rows(position(NOW_MS))
    previous = LeaseRecord("a", 1, 7, NOW_MS + ahead_ms - SECONDS * SECOND, SECONDS)
    assert takeover.seal(previous).end == (0 if end_ms is None else position(NOW_MS + end_ms))


@pytest.mark.parametrize(("days", "late", "kept"), [(29, False, True), (31, False, False), (31, True, True)])
def test_seal_drops_gaps_without_rows_after_a_month(takeover: Takeover, days: int, late: bool, kept: bool) -> None:
    last = position(NOW_MS - 20 * SECOND)
    takeover.add_rows(last)
    takeover.seal()
    if late:
        takeover.add_rows(last + 5)
    takeover.clock.advance(days * DAY)
    previous = LeaseRecord("b", 2, 7, takeover.clock.now_ms() - 30 * SECOND, SECONDS)
    assert takeover.seal(previous).hides(last + 5) is kept


def test_seal_of_one_generation_leaves_others_unsealed(takeover: Takeover) -> None:
    sealed_ranges = SealedRanges(takeover.store.message, takeover.side, takeover.clock)
    term = Term(2, FORMER)
    takeover.settle(sealed_ranges, term)
    assert sealed_ranges.known(term, generation_prefix(TopicId.parse("default:t").prefix, 2)) is None


def test_seal_ends_after_a_message_from_the_future(takeover: Takeover) -> None:
    last = position(NOW_MS + DAY)
    takeover.add_rows(last)
    assert takeover.seal().end == last + 1 + position(SECOND)


def test_seal_ignores_rows_that_are_not_messages(takeover: Takeover) -> None:
    at = position(NOW_MS - 20 * SECOND)
    takeover.add_rows(at)
    takeover.store.message.put([(PREFIX + tail(at - 1) + b"x", MessageValue(None, b"m"))])
    assert takeover.seal().hides(at - 1)


def test_seal_after_an_orderly_end_reads_no_messages(takeover: Takeover) -> None:
    takeover.add_rows(position(NOW_MS))
    assert takeover.seal(None) == Gaps()
    assert takeover.store.calls["keys"] == 0


def test_seal_of_a_topic_with_the_latest_id_can_be_stored(takeover: Takeover) -> None:
    takeover.add_rows(POSITIONS - 1)
    gaps = takeover.seal()
    assert Gaps.parse(gaps.pack()) == gaps
