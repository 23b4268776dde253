"""What is left of a range of keys without others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.rules.ranges import remainder
from tms_core.tables.base import ALL_KEYS, KeyRange

EDGES = [bytes([byte]) for byte in range(6)]
intervals = st.builds(KeyRange, st.just(b"") | st.sampled_from(EDGES), st.none() | st.sampled_from(EDGES))


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ([], [(b"", None)]),
        ([(b"", None)], []),
        ([(b"b", b"c")], [(b"", b"b"), (b"c", None)]),
        ([(b"", b"b"), (b"b", None)], []),
        ([(b"c", None), (b"", b"b")], [(b"b", b"c")]),
        ([(b"b", b"b")], [(b"", None)]),
        ([(b"", b"c"), (b"a", b"b"), (b"b", b"d")], [(b"d", None)]),
    ],
)
def test_given_some_taken_from_everything_then_the_rest_is_left_in_order(
    taken: list[tuple[bytes, bytes | None]], left: list[tuple[bytes, bytes | None]]
) -> None:
    assert remainder(ALL_KEYS, [KeyRange(*each) for each in taken]) == left


def test_remainder_of_an_interval_with_touching_others_is_whole() -> None:
    whole = KeyRange(b"b", b"d")
    assert remainder(whole, [KeyRange(b"a", b"b"), KeyRange(b"d", None)]) == [whole]
    assert remainder(whole, [KeyRange(b"a", b"b\x00"), KeyRange(b"c\xff", None)]) == [KeyRange(b"b\x00", b"c\xff")]


@given(intervals, st.lists(intervals, max_size=4))
def test_remainder_of_any_intervals_is_what_was_not_taken(whole: KeyRange, taken: list[KeyRange]) -> None:
    def inside(key: bytes, interval: KeyRange) -> bool:
        return interval.start <= key and (interval.stop is None or key < interval.stop)

    left = remainder(whole, taken)
    for key in [b"", *EDGES, *(edge + b"\x00" for edge in EDGES)]:
        expected = inside(key, whole) and not any(inside(key, each) for each in taken)
        assert sum(inside(key, each) for each in left) == expected
    assert left == sorted(left, key=lambda each: each.start)
