"""The bounded mapping of the keys that were set last."""

from __future__ import annotations

from tms_core.tables.recently_set import RecentlySet


def filled(most: int, *keys: str) -> RecentlySet[str, str]:
    known: RecentlySet[str, str] = RecentlySet(most)
    known.update((key, key.upper()) for key in keys)
    return known


def test_recently_set_of_more_keys_than_fit_drops_the_oldest() -> None:
    assert dict(filled(2, "a", "b", "c")) == {"b": "B", "c": "C"}


def test_recently_set_keeps_a_key_that_was_set_again() -> None:
    known = filled(3, "a", "b", "c")
    known["a"] = "again"
    known["d"] = "D"
    assert dict(known) == {"a": "again", "c": "C", "d": "D"}


def test_recently_set_counts_no_lookup() -> None:
    known = filled(2, "a", "b")
    assert (known.get("a"), known["a"], known.get("c", "default")) == ("A", "A", "default")
    known["c"] = "C"
    assert dict(known) == {"b": "B", "c": "C"}
