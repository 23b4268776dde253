"""Gaps: which ids stay empty for ever, and that nobody who was told that a message is there is ever wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW_MS, SECOND
from tms_core.clock import ManualClock
from tms_core.messaging.ids import POSITIONS, position, tail
from tms_core.rowkey import generation_prefix
from tms_core.server.ha.leadership import REACH_MS, Term
from tms_core.server.ha.sealed_ranges import FRAME_ROWS, Gaps, PositionRange, SealedRanges
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


def test_a_gap_up_to_the_end_of_time_can_be_kept() -> None:
    gaps = Gaps((PositionRange(position(1, 65_535), POSITIONS),))
    assert Gaps.parse(gaps.pack()) == gaps


# --- sealing ---------------------------------------------------------------------------------------------------------


class Site:
    """A topic whose leader has died, and its next one."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.side = MemorySide()
        self.clock = ManualClock(NOW_MS)
        self.fence = 1

    def rows(self, *at: int) -> None:
        self.store.message.put([(PREFIX + tail(one), MessageValue(None, b"m")) for one in at])

    def sealed(self, former: LeaseRecord | None = FORMER) -> Gaps:
        """As a new leader has it."""
        self.fence += 1
        return self.settled(SealedRanges(self.store.message, self.side, self.clock), Term(self.fence, former))

    def settled(self, sealed_ranges: SealedRanges, term: Term, prefix: bytes = PREFIX) -> Gaps:
        return sealed_ranges.settle(term, prefix, lambda _: None)


@pytest.fixture
def site() -> Site:
    return Site()


def test_given_rows_when_sealed_then_all_ids_behind_the_last_are_empty_up_to_those_of_the_new_leader(
    site: Site,
) -> None:
    last = position(NOW_MS - 20 * SECOND, 3)
    site.rows(last - 3, last - 2, last - 1, last)
    gaps = site.sealed()
    assert not any(gaps.hides(at) for at in range(last - 3, last + 1))
    assert gaps.hides(last + 1)
    assert gaps.hides(FREE - 1)
    assert not gaps.hides(FREE)
    assert gaps.end == FREE


def test_given_a_write_that_was_done_in_part_when_sealed_then_its_holes_are_empty_and_its_rows_are_not(
    site: Site,
) -> None:
    first = position(NOW_MS - 20 * SECOND)
    done = {first + at for at in range(FRAME_ROWS) if at % 16 in (1, 7)} | {first + FRAME_ROWS - 1}
    site.rows(*done)
    gaps = site.sealed()
    assert {at for at in range(first, first + FRAME_ROWS) if not gaps.hides(at)} == done


def test_given_rows_that_come_after_the_seal_when_others_lead_then_they_are_hidden_for_ever(site: Site) -> None:
    last = position(NOW_MS - 20 * SECOND)
    site.rows(last)
    site.sealed()
    late = last + 5
    site.rows(late)
    for former in (None, LeaseRecord("b", 2, 0, NOW_MS, SECONDS), None):
        site.clock.advance(40 * SECOND)
        assert site.sealed(former).hides(late)


@pytest.mark.parametrize("ago_ms", [-1, 0])
def test_given_an_empty_topic_when_sealed_then_only_what_the_former_leader_can_have_under_way_is_empty(
    site: Site, ago_ms: int
) -> None:
    oldest = position(FORMER.renewed_ms - REACH_MS)
    gaps = site.sealed()
    assert gaps.hides(oldest + ago_ms) is (ago_ms == 0)
    assert gaps.end == FREE


def test_given_a_former_leader_that_ended_in_good_order_when_sealed_then_nothing_is_looked_for(site: Site) -> None:
    site.rows(position(NOW_MS))
    assert site.sealed(None) == Gaps()
    assert site.store.calls["keys"] == 0
    assert site.side.get(b"g" + PREFIX) is None


def test_given_a_topic_that_was_sealed_when_asked_again_in_that_term_then_nothing_is_looked_for(site: Site) -> None:
    sealed_ranges = SealedRanges(site.store.message, site.side, site.clock)
    term = Term(2, FORMER)
    assert sealed_ranges.known(term, PREFIX) is None
    first = site.settled(sealed_ranges, term)
    calls = site.store.calls.total()
    assert sealed_ranges.known(term, PREFIX) is site.settled(sealed_ranges, term) is first
    assert site.store.calls.total() == calls
    assert sealed_ranges.known(Term(3, FORMER), PREFIX) is None
    site.settled(sealed_ranges, Term(3, FORMER))
    assert site.store.calls.total() > calls


def test_given_rows_that_are_none_of_ours_when_sealed_then_they_do_not_count(site: Site) -> None:
    at = position(NOW_MS - 20 * SECOND)
    site.rows(at)
    site.store.message.put([(PREFIX + tail(at - 1) + b"x", MessageValue(None, b"m"))])
    assert site.sealed().hides(at - 1)


@pytest.mark.parametrize(
    ("ahead_ms", "counted_ms"), [(10 * SECOND, 10 * SECOND), (300 * SECOND, 300 * SECOND), (DAY, 300 * SECOND)]
)
def test_given_a_former_leader_whose_clock_was_ahead_when_sealed_then_the_new_one_begins_behind_it_within_reason(
    site: Site, ahead_ms: int, counted_ms: int
) -> None:
    site.rows(position(NOW_MS))
    former = LeaseRecord("a", 1, 7, NOW_MS + ahead_ms - SECONDS * SECOND, SECONDS)
    end = site.sealed(former).end
    assert end == (position(NOW_MS + counted_ms + SECOND) if ahead_ms < DAY else 0)


def test_given_a_topic_whose_last_message_is_from_the_future_when_sealed_then_it_goes_on_from_there(site: Site) -> None:
    last = position(NOW_MS + DAY)
    site.rows(last)
    assert site.sealed().end == last + 1 + position(SECOND)


@pytest.mark.parametrize(("days", "late", "kept"), [(29, False, True), (31, False, False), (31, True, True)])
def test_given_old_gaps_when_sealed_again_then_those_without_rows_are_dropped_after_a_month(
    site: Site, days: int, late: bool, kept: bool
) -> None:
    last = position(NOW_MS - 20 * SECOND)
    site.rows(last)
    site.sealed()
    if late:
        site.rows(last + 5)
    site.clock.advance(days * DAY)
    site.rows(position(site.clock.now_ms() - 20 * SECOND))
    former = LeaseRecord("b", 2, 7, site.clock.now_ms() - 30 * SECOND, SECONDS)
    assert site.sealed(former).hides(last + 5) is kept


def test_given_two_topics_when_one_is_sealed_then_the_other_is_not(site: Site) -> None:
    site.rows(position(NOW_MS - 20 * SECOND))
    sealed_ranges = SealedRanges(site.store.message, site.side, site.clock)
    term = Term(2, FORMER)
    other = generation_prefix(TopicId.parse("default:t").prefix, 2)
    assert site.settled(sealed_ranges, term, other) != site.settled(sealed_ranges, term)
