"""Entries of a ledger, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from janitor.state.records import LedgerEntry
from tms_core.topic import TopicId

TOPIC = TopicId("default", "orders")

#: An entry about 7 rows, published from 1 to 9, with a TTL of 60 s, a cutoff of 10 and a snapshot of 900.
ENTRY = LedgerEntry("run", 1_000, TOPIC, 1, "message", "expired", b"b", b"d", 7, 1, 9, 1, 60, 10, 900)


def entry(**changes: Any) -> LedgerEntry:
    """Return an entry with other values of the given fields."""
    return replace(ENTRY, **changes)
