"""The bounded mapping of recently used keys."""

from __future__ import annotations

from tms_core.tables.recently_used import RecentlyUsed


def filled(most: int, *keys: str) -> RecentlyUsed[str, str]:
    known: RecentlyUsed[str, str] = RecentlyUsed(most)
    known.update((key, key.upper()) for key in keys)
    return known


def test_recently_used_of_more_keys_than_fit_drops_the_oldest() -> None:
    assert dict(filled(2, "a", "b", "c")) == {"b": "B", "c": "C"}


def test_recently_used_keeps_a_key_that_was_looked_up_or_set_again() -> None:
    known = filled(3, "a", "b", "c")
    assert known.get("a") == "A"
    known["b"] = "again"
    known["d"] = "D"
    assert dict(known) == {"a": "A", "b": "again", "d": "D"}


def test_recently_used_without_a_key_gives_the_default() -> None:
    known = filled(2, "a")
    assert (known.get("b"), known.get("b", "default"), known.get("a", "default")) == (None, "default", "A")
    assert known.pop("b", None) is None
    known.clear()
    assert known.get("a") is None
