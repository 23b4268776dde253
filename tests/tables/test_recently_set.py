"""The bounded mapping of recently set keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tms_core.tables.recently_set import RecentlySet


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def filled(most: int, *keys: str) -> RecentlySet[str, str]:
    known: RecentlySet[str, str] = RecentlySet(most)
    known.update((key, key.upper()) for key in keys)
    return known


def test_recently_set_drops_the_oldest_key_if_full() -> None:
    assert dict(filled(2, "a", "b", "c")) == {"b": "B", "c": "C"}


def test_recently_set_keeps_a_key_that_was_set_again() -> None:
    known = filled(3, "a", "b", "c")
    known["a"] = "again"
    known["d"] = "D"
    assert dict(known) == {"a": "again", "c": "C", "d": "D"}


def test_recently_set_order_ignores_lookups() -> None:
    known = filled(2, "a", "b")
    assert (known.get("a"), known["a"], known.get("c", "default")) == ("A", "A", "default")
    known["c"] = "C"
    assert dict(known) == {"b": "B", "c": "C"}


@pytest.mark.usefixtures("eager_threads")
def test_recently_set_by_several_threads_raises_nothing() -> None:
    known: RecentlySet[int, int] = RecentlySet(4)

    def set_keys(thread: int) -> None:
        for number in range(20_000):
            known[(number * 7 + thread) % 9] = thread

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(set_keys, range(4))) == [None] * 4
    assert len(known) <= 4
