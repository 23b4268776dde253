"""The rules of claims, for arbitrary rows."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.messaging import named
from tms_core.consumers import claims
from tms_core.consumers.claim_rows import (
    all_claims,
    claims_of,
    drained_key,
    draining_transaction,
    pack,
    pack_drained,
    release_void_claims,
)
from tms_core.consumers.claims import (
    ClaimOutcome,
    ConsumerGroup,
    GroupClaim,
    Rank,
    Segment,
    batch_limit,
    claim_outcome,
    isolated_batch_size,
    marks,
    rank,
    runs,
    view_group,
)
from tms_core.errors import FormatError
from tms_core.rowkey import MessageId
from tms_core.tables.side import MemorySide
from tms_core.transaction.model import Transaction

#: A reader whose own transaction is 90: 1 to 9 are committed, 11 to 19 in progress, 21 to 29 invalid.
READER = Transaction(
    80, 90, 91, invalids=tuple(range(21, 30)), in_progress=tuple(range(11, 20)), checkpoint_write_pointers=(91,)
)
GROUP = ConsumerGroup(named("orders"), 1, "billing")
LAST = 12


def at(number: int, part: int = 0) -> MessageId:
    """Return the id of a message; with a part, the id of one of the payloads of a row."""
    return MessageId(number, 0, part and 1, part)


def claim(first: int, last: int, pointer: int, tries: int = 1) -> GroupClaim:
    return GroupClaim(at(first), at(last), pointer, tries)


def covered(found: list[GroupClaim] | tuple[GroupClaim, ...], number: int) -> list[GroupClaim]:
    return [one for one in found if rank(one.first) < rank(at(number)) <= rank(one.last)]


@pytest.mark.parametrize(
    ("pointer", "expected"),
    [
        *((0, ClaimOutcome.VOID), (5, ClaimOutcome.DONE), (15, ClaimOutcome.OPEN), (25, ClaimOutcome.VOID)),
        *((90, ClaimOutcome.OWN), (91, ClaimOutcome.OWN), (85, ClaimOutcome.OPEN), (1000, ClaimOutcome.OPEN)),
    ],
)
def test_claim_outcome_follows_the_state_of_its_transaction(pointer: int, expected: ClaimOutcome) -> None:
    assert claim_outcome(pointer, READER) is expected


def test_claim_of_an_invalid_transaction_above_the_read_pointer_is_void() -> None:
    assert claim_outcome(7, Transaction(3, 9, 9, invalids=(7,))) is ClaimOutcome.VOID


def test_done_claims_next_to_the_base_are_merged_into_it() -> None:
    found = view_group(at(0), [claim(0, 2, 1), claim(2, 4, 2), claim(6, 8, 3)], READER)
    assert (found.base, found.merged, found.covered) == (at(4), 2, [claim(6, 8, 0, tries=0)])
    assert [(one.after, one.until) for one in found.segments] == [(at(4), at(6)), (at(8), None)]


def test_open_claim_gives_nothing_out_and_holds_the_base() -> None:
    found = view_group(at(0), [claim(0, 2, 11), claim(2, 4, 2)], READER)
    assert (found.base, found.open) == (at(0), [claim(0, 2, 11)])
    assert [(one.after, one.until) for one in found.segments] == [(at(4), None)]


def test_void_claim_is_free_and_counts_as_a_try() -> None:
    found = view_group(at(0), [claim(0, 2, 1), claim(2, 5, 21, tries=3)], READER)
    assert [(one.after, one.until, one.tries) for one in found.segments] == [(at(2), at(5), 3), (at(5), None, 0)]


def test_id_without_a_payload_ranks_after_the_payloads_of_its_row() -> None:
    assert rank(at(3)) > rank(at(3, 7)) > rank(at(3, 6)) > rank(at(2))
    found = view_group(at(0), [GroupClaim(at(0), at(3, 6), 1, 1), GroupClaim(at(3), at(4), 2, 1)], READER)
    assert found.base == at(3, 6)
    assert [(one.after, one.until) for one in found.segments] == [(at(3, 6), at(3)), (at(4), None)]


@pytest.mark.parametrize(
    ("limit", "tries", "most", "expected"),
    [
        *((500, 0, None, 500), (500, 1, None, 250), (500, 3, None, 62), (3, 9, None, 1), (2**31 - 1, 255, None, 1)),
        *((500, 0, 1, 500), (500, 4, 5, 1), (500, 3, 5, 62), (500, 9, 5, 1), (1, 1, 5, 1)),
    ],
)
def test_together_halves_after_each_delivery_to_one(limit: int, tries: int, most: int | None, expected: int) -> None:
    assert batch_limit(limit, tries, most) == expected


@pytest.mark.parametrize(
    ("tries", "size", "found", "expected"),
    [(0, 0, 500, 500), (1, 20, 20, 10), (1, 20, 5, 5), (3, 1, 1, 1), (1, 20, 21, 21), (1, 0, 20, 20), (2, 3, 3, 1)],
)
def test_share_of_a_failed_batch_is_half_and_of_several_all(tries: int, size: int, found: int, expected: int) -> None:
    assert isolated_batch_size(Segment(at(0), None, tries, size), found) == expected


def test_void_claims_that_are_claimed_in_part_keep_their_tries() -> None:
    free = [claim(0, 6, 21, tries=1), claim(4, 9, 0, tries=3)]
    assert marks(free, at(1), [claim(1, 3, 90, tries=2)]) == [claim(3, 4, 0, 1), claim(4, 9, 0, 3)]
    assert marks([], at(1), []) == []


def test_failed_claims_of_a_long_transaction_cost_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Counter[int]()

    def count_rank(message: MessageId, number: int) -> Rank:
        reads[number] += 1
        return rank(message)

    for number in (100, 1000):
        free = [claim(first, first + 1, 0, tries=2) for first in range(1, number)]
        monkeypatch.setattr(claims, "rank", partial(count_rank, number=number))
        assert [(one.tries, one.until) for one in view_group(at(1), free, READER).segments] == [
            (2, at(number)),
            (0, None),
        ]
        assert marks(free, at(1), []) == [claim(1, number, 0, tries=2)]
    # With quadratic cost, the number would be a hundred times higher.
    assert reads[1000] < 20 * reads[100]


def test_runs_of_a_range_with_holes_are_its_pieces() -> None:
    assert runs(at(1), at(9), [(at(6), at(7)), (at(2), at(4))]) == [(at(1), at(2)), (at(4), at(6)), (at(7), at(9))]
    assert runs(at(1), at(9), [(at(8), at(12))]) == [(at(1), at(8))]


def test_pack_of_a_claim_has_the_bytes_of_the_page() -> None:
    key, value = pack(GROUP, GroupClaim(MessageId(1, 2), MessageId(3, 4, 5, 6), 7, 300))
    assert key == b"tdefault:orders:\0\0\0\1cbilling\0" + MessageId(1, 2).pack() + b"\0\0\0\0\0\0\0\7"
    assert value == MessageId(3, 4, 5, 6).pack() + b"\xff" + bytes(12)


def test_pack_of_a_mark_that_waits_has_the_bytes_of_the_page() -> None:
    mark = GroupClaim(MessageId(1, 2), MessageId(3, 4, 5, 6), 0, 2, 256, 258)
    key, value = pack(GROUP, mark)
    assert value == MessageId(3, 4, 5, 6).pack() + b"\2\0\0\1\0\0\0\0\0\0\0\1\2"
    side = MemorySide()
    side.put([(key, value)])
    assert claims_of(side, GROUP) == [(key, mark)]


def test_claims_of_groups_with_a_common_prefix_stay_separate() -> None:
    side = MemorySide()
    names = ("a", "ab", "a-b")
    for number, name in enumerate(names, 1):
        side.put([pack(GROUP._replace(name=name), claim(0, number, number))])
    for number, name in enumerate(names, 1):
        assert [one.pointer for _, one in claims_of(side, GROUP._replace(name=name))] == [number]
    assert sorted(group.name for _, group, _ in all_claims(side)) == sorted(names)


def test_row_with_a_bad_length_is_rejected_or_skipped() -> None:
    side = MemorySide()
    side.put([(GROUP.prefix + bytes(28), b"short")])
    with pytest.raises(FormatError, match="5 bytes"):
        claims_of(side, GROUP)
    side.put([(b"t" + b"x" * 40, b""), (b"tdefault:orders:\0\0\0\1pname\0" + bytes(8), b"")])
    side.delete([GROUP.prefix + bytes(28)])
    assert list(all_claims(side)) == []


def test_pack_of_a_drained_partition_has_the_bytes_of_the_page() -> None:
    assert pack_drained(GROUP, 7) == (b"tdefault:orders:\0\0\0\1dbilling\0", b"\0\0\0\0\0\0\0\7")
    side = MemorySide()
    side.put([pack_drained(GROUP, 7), (drained_key(GROUP._replace(name="bill")), b"short")])
    assert (draining_transaction(side, GROUP), draining_transaction(side, GROUP._replace(name="other"))) == (7, None)
    with pytest.raises(FormatError, match="5 bytes"):
        draining_transaction(side, GROUP._replace(name="bill"))
    assert claims_of(side, GROUP) == []
    assert list(all_claims(side)) == []


def test_claims_of_groups_of_a_deleted_topic_are_freed() -> None:
    side, lives = MemorySide(), GROUP._replace(generation=2)
    for group in (GROUP, lives):
        side.put([pack_drained(group, 7), pack(group, claim(1, 2, 7))])
    kept = [pack(lives, claim(1, 2, 0, tries=0)), pack_drained(lives, 7)]
    assert release_void_claims(side, lambda pointer: pointer == 7, lambda group: group.generation == 1) == 1
    assert side.rows(b"", None, 10).items == kept


_ends = st.tuples(st.integers(0, LAST), st.integers(0, LAST)).filter(lambda ends: ends[0] < ends[1])
_pointers = st.sampled_from([0, 1, 2, 11, 12, 21, 22, 90])
_tries = st.integers(1, 9)
_claim = st.builds(lambda ends, pointer, tries: claim(ends[0], ends[1], pointer, tries), _ends, _pointers, _tries)
_claims = st.lists(_claim, max_size=6)


@given(base=st.integers(0, LAST), rows=_claims)
def test_messages_of_any_rows_are_done_claimed_or_free(base: int, rows: list[GroupClaim]) -> None:
    found = view_group(at(base), rows, READER)
    assert rank(found.base) >= rank(at(base))
    for number in range(1, LAST + 3):
        free = [one for one in found.segments if rank(one.after) < rank(at(number))]
        free = [one for one in free if one.until is None or rank(at(number)) <= rank(one.until)]
        is_done = rank(at(number)) <= rank(found.base)
        taken = [one for one in covered(rows, number) if claim_outcome(one.pointer, READER) is not ClaimOutcome.VOID]
        assert len(free) == (0 if is_done or taken else 1)
        # Messages up to the base were processed before, or are processed now.
        assert (
            not is_done
            or number <= base
            or any(claim_outcome(one.pointer, READER) is ClaimOutcome.DONE for one in taken)
        )
        # Each delivery of a free message counts.
        tries = [one.tries for one in covered(rows, number) if claim_outcome(one.pointer, READER) is ClaimOutcome.VOID]
        assert not free or free[0].tries == max(tries, default=0)


@given(base=st.integers(0, LAST), rows=_claims, taken=_ends)
def test_marks_of_any_rows_stay_and_do_not_overlap(base: int, rows: list[GroupClaim], taken: tuple[int, int]) -> None:
    free = [one for one in rows if claim_outcome(one.pointer, READER) is ClaimOutcome.VOID]
    anew = claim(*taken, 90)
    found = marks(free, at(base), [anew])
    for number in range(1, LAST + 1):
        left = [one.tries for one in covered(found, number)]
        expected = [max(one.tries for one in covered(free, number))] if covered(free, number) else []
        assert left == ([] if number <= base or covered([anew], number) else expected)
    assert len({pack(GROUP, one)[0] for one in found}) == len(found)


@given(rows=_claims)
def test_any_claims_are_read_back_as_written(rows: list[GroupClaim]) -> None:
    side = MemorySide()
    side.put([pack(GROUP, one) for one in rows])
    by_key = {pack(GROUP, one)[0]: one for one in rows}
    assert dict(claims_of(side, GROUP)) == by_key
