"""The deletion rules at, below and above each boundary, and where two rules apply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.rules.policy import Delete, Frontier, Hold, Invert, Keep, Reason, Row, Rule, Verdict, decide
from tms_core.rowkey import LONG_MAX, Cutoff, MessageKey, PayloadKey
from tms_core.topic import INT_MAX, INT_MIN, TopicId, TopicMetadata

TOPIC = TopicId("default", "events")
NOW_MS = 1_700_000_000_000
TTL_SECONDS = 3600
#: The cutoff of the rules at NOW_MS.
DUE_MS = NOW_MS - TTL_SECONDS * 1000
POINTER = NOW_MS * 1_000_000

EXPIRED, OLD = Delete(Rule.EXPIRED), Delete(Rule.OLD_GENERATION)
LIVE, HELD, UNRECOGNIZED = Keep(Reason.LIVE), Keep(Reason.HELD), Keep(Reason.UNRECOGNIZED)
UNKNOWN, NEWER = Keep(Reason.UNKNOWN_TOPIC), Keep(Reason.NEWER_GENERATION)
UNDECIDED, REFERENCED = Keep(Reason.UNDECIDED), Keep(Reason.REFERENCED)


@dataclass(frozen=True)
class Transactions:
    invalid: frozenset[int] = frozenset()
    undecided: frozenset[int] = frozenset()

    def is_invalid(self, pointer: int) -> bool:
        return pointer in self.invalid

    def is_undecided(self, pointer: int) -> bool:
        return pointer in self.undecided


INVALID = Transactions(invalid=frozenset({POINTER}))
OPEN = Transactions(undecided=frozenset({POINTER}))


def metadata(generation: int = 1) -> TopicMetadata:
    return TopicMetadata(TOPIC, generation, TTL_SECONDS)


def message(publish_ms: int = NOW_MS, generation: int = 1, pointer: int | None = None) -> Row:
    return Row("message", MessageKey(TOPIC, generation, publish_ms, 0), pointer)


def payload(write_ms: int = NOW_MS, generation: int = 1) -> Row:
    return Row("payload", PayloadKey(TOPIC, generation, POINTER, write_ms, 0))


def held(topic: TopicMetadata, *, cutoff_ms: int = 0, generation: int = 0, hold: Hold = Hold.FRONTIER) -> Frontier:
    """Return a frontier with another cutoff and generation than the rules."""
    return replace(Frontier.open(NOW_MS, topic), cutoff=Cutoff(cutoff_ms), generation=generation, hold=hold)


def judge(
    row: Row,
    generation: int = 1,
    frontier: Frontier | None = None,
    transactions: Transactions | None = None,
    *,
    referenced: bool = False,
    expires_ms: int | None = None,
) -> Verdict:
    """Return the verdict for a row of a topic at ``generation``; nothing is held unless a frontier is given."""
    topic = metadata(generation)
    frontier = frontier or Frontier.open(NOW_MS, topic)
    return decide(row, topic, frontier, transactions or Transactions(), referenced, expires_ms)


def judge_unknown(row: Row, transactions: Transactions | None = None) -> Verdict:
    return decide(row, None, None, transactions or Transactions(), False, None)


@pytest.mark.parametrize("table", ["message", "payload"])
def test_l0_invalid_key_is_always_unrecognized(table: str) -> None:
    row = Row("message" if table == "message" else "payload", None)
    assert judge(row) == judge(row, -5, expires_ms=0) == judge_unknown(row) == UNRECOGNIZED


def test_l0_invalid_key_is_not_inverted() -> None:
    assert judge(Row("message", None, POINTER), transactions=INVALID) == UNRECOGNIZED


@pytest.mark.parametrize("generation", [0, -1, INT_MIN])
def test_l0_row_without_positive_generation_is_unrecognized(generation: int) -> None:
    for row in (message(0, generation), payload(0, generation)):
        assert judge(row) == judge(row, 5) == judge(row, -5) == judge_unknown(row) == UNRECOGNIZED


@pytest.mark.parametrize(
    ("time_ms", "verdict"), [(-(2**63), UNRECOGNIZED), (-1, UNRECOGNIZED), (0, EXPIRED), (1, EXPIRED)]
)
def test_l0_row_is_unrecognized_only_with_a_negative_time(time_ms: int, verdict: Verdict) -> None:
    assert judge(message(time_ms)) == judge(payload(time_ms)) == verdict


def test_l0_negative_time_of_an_old_generation_is_unrecognized() -> None:
    assert judge(message(-1, 1), 3) == judge(message(-1, 1), -1) == judge(payload(-1, 1), 3) == UNRECOGNIZED


@pytest.mark.parametrize("row", [message(NOW_MS, 0, POINTER), message(-1, 1, POINTER)])
def test_l0_unrecognized_numbers_with_an_invalid_pointer_are_inverted(row: Row) -> None:
    inverted = Invert(Reason.UNRECOGNIZED)
    assert judge(row, transactions=INVALID) == judge_unknown(row, INVALID) == inverted


@pytest.mark.parametrize("row", [message(0), message(0, INT_MAX), payload(0), payload(0, INT_MAX)])
def test_l1_row_of_any_age_without_metadata_is_kept(row: Row) -> None:
    assert judge_unknown(row) == UNKNOWN


def test_l1_invalid_pointer_without_metadata_is_inverted() -> None:
    assert judge_unknown(message(0, 1, POINTER), INVALID) == Invert(Reason.UNKNOWN_TOPIC)


def test_l1_row_of_a_deleted_topic_is_of_an_old_generation() -> None:
    assert judge(message(NOW_MS, 1), -1) == OLD


@pytest.mark.parametrize(
    ("data", "generation", "verdict"),
    [
        (4, 5, OLD),
        (5, 5, LIVE),
        (6, 5, NEWER),
        (4, -5, OLD),
        (5, -5, OLD),
        (6, -5, NEWER),
        (1, 1, LIVE),
        (1, -1, OLD),
        (2, -1, NEWER),
        (INT_MAX - 1, INT_MAX, OLD),
        (INT_MAX, INT_MAX, LIVE),
        (INT_MAX, -INT_MAX, OLD),
    ],
)
def test_l2_earlier_generations_alone_are_deleted(data: int, generation: int, verdict: Verdict) -> None:
    assert judge(message(NOW_MS, data), generation) == judge(payload(NOW_MS, data), generation) == verdict


@pytest.mark.parametrize("generation", [5, -5])
def test_l2_old_row_of_a_newer_generation_is_kept(generation: int) -> None:
    assert judge(message(0, 6), generation) == judge(payload(0, 6), generation) == NEWER


AROUND_DUE = [(DUE_MS - 1, EXPIRED), (DUE_MS, LIVE), (DUE_MS + 1, LIVE)]


@pytest.mark.parametrize(("time_ms", "verdict"), AROUND_DUE)
def test_l3_row_expires_only_strictly_after_its_ttl(time_ms: int, verdict: Verdict) -> None:
    assert judge(message(time_ms)) == judge(payload(time_ms)) == verdict


def test_l3_payload_expires_by_its_own_time_not_its_transactions() -> None:
    begun_long_ago = Row("payload", PayloadKey(TOPIC, 1, 1, DUE_MS, 0))
    begun_later = Row("payload", PayloadKey(TOPIC, 1, LONG_MAX, DUE_MS - 1, 0))
    assert (judge(begun_long_ago), judge(begun_later)) == (LIVE, EXPIRED)


def test_l3_row_with_a_clock_in_1970_is_live() -> None:
    topic = metadata()
    frontier = Frontier.open(TTL_SECONDS * 1000 - 1, topic)
    assert decide(message(0), topic, frontier, Transactions(), False, None) == LIVE


@pytest.mark.parametrize(
    ("pointer", "verdict"), [(-POINTER, LIVE), (-1, LIVE), (0, LIVE), (1, Invert(Reason.LIVE)), (None, LIVE)]
)
def test_l4_pointer_in_the_invalid_list_is_inverted_if_positive(pointer: int | None, verdict: Verdict) -> None:
    listed = Transactions(invalid=frozenset({-POINTER, POINTER, -1, 0, 1}))
    assert judge(message(pointer=pointer), transactions=listed) == verdict


@pytest.mark.parametrize("pointer", [POINTER - 1, POINTER + 1])
def test_l4_pointer_next_to_an_invalid_pointer_is_kept(pointer: int) -> None:
    assert judge(message(pointer=pointer), transactions=INVALID) == LIVE


def test_l4_deleted_row_with_an_invalid_pointer_is_not_inverted() -> None:
    assert judge(message(DUE_MS - 1, 1, POINTER), transactions=INVALID) == EXPIRED
    assert judge(message(NOW_MS, 1, POINTER), 2, transactions=INVALID) == OLD


def test_l4_invalid_row_that_stays_for_another_reason_is_inverted() -> None:
    topic = metadata(2)
    protected = Frontier.closed(NOW_MS, topic, Hold.PROTECTED)
    waiting = held(topic, cutoff_ms=DUE_MS - 10, generation=1)
    newer, old = message(NOW_MS, 3, POINTER), message(DUE_MS, 1, POINTER)
    assert judge(newer, 2, transactions=INVALID) == Invert(Reason.NEWER_GENERATION)
    assert judge(old, 2, waiting, INVALID) == judge(old, 2, protected, INVALID) == Invert(Reason.HELD)


def test_l4_payload_of_an_invalid_transaction_is_not_inverted() -> None:
    assert judge(payload(), transactions=INVALID) == LIVE


def test_l5_expired_payload_of_an_open_transaction_stays() -> None:
    assert judge(payload(DUE_MS - 1), transactions=OPEN) == UNDECIDED
    assert judge(payload(DUE_MS - 1), transactions=Transactions(undecided=frozenset({POINTER + 1}))) == EXPIRED


def test_l5_expired_payload_of_a_living_message_stays() -> None:
    assert judge(payload(DUE_MS - 1), referenced=True) == REFERENCED


def test_l5_expired_payload_open_and_referenced_counts_as_undecided() -> None:
    assert judge(payload(DUE_MS - 1), transactions=OPEN, referenced=True) == UNDECIDED


def test_l5_unexpired_payload_with_a_reference_is_live() -> None:
    assert judge(payload(DUE_MS), transactions=OPEN, referenced=True) == LIVE


@pytest.mark.parametrize("generation", [2, -1])
def test_l5_referenced_payload_of_an_old_generation_is_deleted(generation: int) -> None:
    assert judge(payload(DUE_MS - 1), generation, transactions=OPEN, referenced=True) == OLD
    assert judge(payload(NOW_MS), generation, transactions=OPEN, referenced=True) == OLD


def test_l5_expired_message_of_an_open_transaction_is_deleted() -> None:
    assert judge(message(DUE_MS - 1, 1, POINTER), transactions=OPEN, referenced=True) == EXPIRED


def test_l5_held_payload_that_is_needed_counts_as_held() -> None:
    frontier = held(metadata(), cutoff_ms=DUE_MS - 10, generation=1)
    assert judge(payload(DUE_MS - 10), 1, frontier, OPEN, referenced=True) == HELD


@pytest.mark.parametrize(
    ("transactions", "referenced", "verdict"), [(OPEN, False, UNDECIDED), (None, True, REFERENCED), (None, False, OLD)]
)
def test_l5_needed_payload_of_a_held_end_stays(
    transactions: Transactions | None, referenced: bool, verdict: Verdict
) -> None:
    frontier = held(metadata(2), cutoff_ms=DUE_MS, generation=1)
    assert judge(payload(DUE_MS - 1), 2, frontier, transactions, referenced=referenced) == verdict


@pytest.mark.parametrize(("expires_ms", "verdict"), [(NOW_MS - 1, EXPIRED), (NOW_MS, EXPIRED), (NOW_MS + 1, LIVE)])
def test_l6_row_with_an_expired_message_ttl_is_deleted(expires_ms: int, verdict: Verdict) -> None:
    assert judge(message(NOW_MS - 1), expires_ms=expires_ms) == verdict
    assert judge(payload(NOW_MS - 1), expires_ms=expires_ms) == verdict


def test_l6_row_with_a_longer_message_ttl_expires_by_the_topic_ttl() -> None:
    assert judge(message(DUE_MS - 1), expires_ms=LONG_MAX) == EXPIRED


def test_l6_row_with_a_message_ttl_in_a_held_topic_is_held() -> None:
    topic = metadata()
    within = held(topic, cutoff_ms=DUE_MS - 10, generation=1)
    assert judge(message(NOW_MS), 1, within, expires_ms=NOW_MS) == HELD
    assert judge(message(NOW_MS), 1, Frontier.closed(NOW_MS, topic, Hold.PAUSED), expires_ms=NOW_MS) == HELD
    assert judge(message(DUE_MS - 11), 1, within, expires_ms=NOW_MS) == EXPIRED


def test_l6_topic_waiting_for_transactions_deletes_decided_rows() -> None:
    within = replace(Frontier.open(NOW_MS, metadata()), decided_ms=NOW_MS - 10)
    assert judge(message(NOW_MS - 10), 1, within, expires_ms=NOW_MS) == HELD
    assert judge(message(NOW_MS - 11), 1, within, expires_ms=NOW_MS) == EXPIRED


def test_l6_row_kept_by_an_earlier_rule_ignores_its_message_ttl() -> None:
    assert judge(message(NOW_MS, 2), 1, expires_ms=0) == NEWER
    assert judge(message(-1), expires_ms=0) == UNRECOGNIZED
    assert decide(message(), None, None, Transactions(), False, 0) == UNKNOWN


def test_l6_needed_payload_with_a_message_ttl_is_kept() -> None:
    assert judge(payload(), transactions=OPEN, expires_ms=NOW_MS) == UNDECIDED
    assert judge(payload(), referenced=True, expires_ms=NOW_MS) == REFERENCED


PROCESSED = Delete(Rule.PROCESSED)
#: All rows before the third row of this millisecond are processed.
PROCESSED_MS = DUE_MS + 10


def done(topic: TopicMetadata, hold: Hold | None = None) -> Frontier:
    return replace(Frontier.open(NOW_MS, topic), processed=PROCESSED_MS << 16 | 2, hold=hold)


@pytest.mark.parametrize(
    ("time_ms", "sequence", "verdict"),
    [
        (PROCESSED_MS, 1, PROCESSED),
        (PROCESSED_MS, 2, LIVE),
        (PROCESSED_MS - 1, 65535, PROCESSED),
        (PROCESSED_MS + 1, 0, LIVE),
        (DUE_MS, 0, PROCESSED),
        (DUE_MS - 1, 0, EXPIRED),
    ],
)
def test_l7_message_processed_by_all_is_deleted(time_ms: int, sequence: int, verdict: Verdict) -> None:
    row = Row("message", MessageKey(TOPIC, 1, time_ms, sequence))
    assert judge(row, 1, done(metadata())) == verdict


def test_l7_payload_before_the_last_millisecond_is_deleted_if_free() -> None:
    assert judge(payload(PROCESSED_MS - 1), 1, done(metadata())) == PROCESSED
    assert judge(payload(PROCESSED_MS), 1, done(metadata())) == LIVE
    assert judge(payload(PROCESSED_MS - 1), 1, done(metadata()), referenced=True) == REFERENCED
    assert judge(payload(PROCESSED_MS - 1), 1, done(metadata()), transactions=OPEN) == UNDECIDED


@pytest.mark.parametrize("hold", list(Hold))
def test_l7_processed_row_with_any_hold_is_held(hold: Hold) -> None:
    assert judge(message(PROCESSED_MS - 1), 1, done(metadata(), hold)) == HELD
    assert judge(payload(PROCESSED_MS - 1), 1, done(metadata(), hold)) == HELD
    assert (done(metadata(), hold).processed_now, done(metadata()).processed_now) == (0, PROCESSED_MS << 16 | 2)


def test_l7_row_of_another_generation_is_not_processed() -> None:
    assert judge(message(PROCESSED_MS - 1, 3), 2, done(metadata(2))) == NEWER
    assert judge(message(PROCESSED_MS - 1, 1), 2, done(metadata(2))) == OLD


def test_open_frontier_has_the_cutoff_of_the_ttl() -> None:
    frontier = Frontier.open(NOW_MS, metadata(-3))
    assert frontier == Frontier(NOW_MS, Cutoff(DUE_MS), Cutoff(DUE_MS), -3, None)
    assert frontier.old_below == 4


def test_closed_frontier_deletes_nothing_and_has_the_due_cutoff() -> None:
    frontier = Frontier.closed(NOW_MS, metadata(3), Hold.PAUSED)
    assert frontier == Frontier(NOW_MS, Cutoff(DUE_MS), Cutoff(0), 0, Hold.PAUSED)
    assert frontier.old_below == 1


@pytest.mark.parametrize("hold", [Hold.PAUSED, Hold.PROTECTED, Hold.QUARANTINED])
def test_s8_closed_frontier_holds_due_rows_and_others_live(hold: Hold) -> None:
    frontier = Frontier.closed(NOW_MS, metadata(2), hold)
    rows = [message(0, 1), message(0, 2), message(DUE_MS - 1, 2), message(DUE_MS, 2), message(0, 3)]
    assert [judge(row, 2, frontier) for row in rows] == [HELD, HELD, HELD, LIVE, NEWER]


@pytest.mark.parametrize(
    ("time_ms", "verdict"),
    [
        (DUE_MS - 101, EXPIRED),
        (DUE_MS - 100, HELD),
        (DUE_MS - 99, HELD),
        (DUE_MS - 1, HELD),
        (DUE_MS, LIVE),
        (DUE_MS + 1, LIVE),
    ],
)
def test_s8_rows_between_cutoff_and_rules_are_held(time_ms: int, verdict: Verdict) -> None:
    frontier = held(metadata(), cutoff_ms=DUE_MS - 100, generation=1)
    assert judge(message(time_ms), 1, frontier) == judge(payload(time_ms), 1, frontier) == verdict


def test_s8_rows_between_without_a_named_hold_are_held() -> None:
    frontier = replace(held(metadata(), cutoff_ms=DUE_MS - 100, generation=1), hold=None)
    rows = [message(DUE_MS - 101), message(DUE_MS - 100), message(DUE_MS)]
    assert [judge(row, 1, frontier) for row in rows] == [EXPIRED, HELD, LIVE]


@pytest.mark.parametrize("generation", [4, -3])
def test_s8_held_generation_deletes_only_by_time(generation: int) -> None:
    frontier = held(metadata(generation), cutoff_ms=DUE_MS, generation=2)
    expected = {
        (1, 0): OLD,
        (1, NOW_MS): OLD,
        (2, DUE_MS - 1): OLD,
        (2, DUE_MS): HELD,
        (2, DUE_MS + 1): HELD,
        (3, 0): HELD,
        (3, NOW_MS): HELD,
    }
    for (data, time_ms), verdict in expected.items():
        assert judge(message(time_ms, data), generation, frontier) == verdict
        assert judge(payload(time_ms, data), generation, frontier) == verdict


def test_s8_new_generation_expires_by_time_while_the_old_is_held() -> None:
    frontier = held(metadata(3), cutoff_ms=DUE_MS - 100, generation=1)
    rows = [message(DUE_MS - 101, 3), message(DUE_MS - 100, 3), message(DUE_MS, 3)]
    assert [judge(row, 3, frontier) for row in rows] == [EXPIRED, HELD, LIVE]


def test_s8_topic_created_again_holds_only_its_last_end() -> None:
    frontier = held(metadata(3), cutoff_ms=0, generation=-1)
    assert [judge(message(NOW_MS, data), 3, frontier) for data in (1, 2, 3)] == [OLD, HELD, LIVE]


def test_s8_frontier_beyond_a_restored_topic_keeps_its_rows() -> None:
    frontier = held(metadata(2), cutoff_ms=DUE_MS, generation=5)
    assert [judge(message(NOW_MS, data), 2, frontier) for data in (1, 2, 3, 5)] == [OLD, LIVE, NEWER, NEWER]


TIMES = st.sampled_from([-1, 0, DUE_MS - 101, DUE_MS - 100, DUE_MS - 1, DUE_MS, NOW_MS])
GENERATIONS = st.sampled_from([1, 2, 3, 4, INT_MAX]) | st.sampled_from([-1, -2, -3, -INT_MAX])


@given(
    st.builds(message, TIMES, st.integers(0, 5), st.sampled_from([None, POINTER, -POINTER]))
    | st.builds(payload, TIMES, st.integers(0, 5)),
    GENERATIONS,
    st.sampled_from([0, DUE_MS - 100, DUE_MS]),
    GENERATIONS | st.just(0),
    st.sampled_from([None, *Hold]),
    st.sampled_from([Transactions(), OPEN, INVALID]),
    st.booleans(),
    st.sampled_from([None, NOW_MS, NOW_MS + 1]),
)
def test_s8_any_frontier_deletes_within_the_rules_or_names_its_reason(
    row: Row,
    generation: int,
    cutoff_ms: int,
    reached: int,
    hold: Hold | None,
    transactions: Transactions,
    referenced: bool,
    expires_ms: int | None,
) -> None:
    topic = metadata(generation)
    frontier = replace(held(topic, cutoff_ms=cutoff_ms, generation=reached), hold=hold)
    expected = judge(row, generation, None, transactions, referenced=referenced, expires_ms=expires_ms)
    verdict = judge(row, generation, frontier, transactions, referenced=referenced, expires_ms=expires_ms)
    if isinstance(expected, Delete):
        waits = {Reason.HELD, Reason.UNDECIDED, Reason.REFERENCED}
        assert verdict == expected or (not isinstance(verdict, Delete) and verdict.reason in waits)
    elif expected in (UNDECIDED, REFERENCED):
        assert verdict in (expected, HELD)
    else:
        assert verdict == expected


@pytest.mark.parametrize("generation", [2, -2])
def test_within_deletes_only_what_both_frontiers_delete(generation: int) -> None:
    topic = metadata(generation)
    opened = Frontier.open(NOW_MS, topic)
    frontiers = [
        opened,
        replace(opened, processed=NOW_MS << 16),
        replace(opened, processed=NOW_MS - 5 << 16, decided_ms=NOW_MS - 5),
        held(topic, cutoff_ms=DUE_MS - 5, generation=2),
        held(topic, cutoff_ms=DUE_MS - 10, generation=1, hold=Hold.CONSUMER),
        Frontier.closed(NOW_MS, topic, Hold.PAUSED),
    ]
    times = [DUE_MS - 11, DUE_MS - 6, DUE_MS - 1, DUE_MS, NOW_MS - 6, NOW_MS - 1, NOW_MS]
    rows = [kind(time_ms, life) for kind in (message, payload) for time_ms in times for life in (1, 2, 3)]
    for one, other in product(frontiers, repeat=2):
        for row, expires_ms in product(rows, (None, NOW_MS)):
            alone, beside, within = (
                isinstance(judge(row, generation, frontier, expires_ms=expires_ms), Delete)
                for frontier in (one, other, one.within(other))
            )
            assert within is (alone and beside)
