"""Entries of a ledger, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from janitor.state.records import LedgerEntry
from tms_core.topic import TopicId

TOPIC = TopicId("default", "orders")

ENTRY = LedgerEntry(
    run_id="run",
    at_ms=1_000,
    topic=TOPIC,
    generation=1,
    table="message",
    rule="expired",
    start=b"b",
    stop=b"d",
    rows=7,
    oldest_ms=1,
    newest_ms=9,
    metadata_generation=1,
    ttl_seconds=60,
    cutoff_ms=10,
    snapshot_timestamp_ms=900,
)


def entry(**changes: Any) -> LedgerEntry:
    """An entry, of which only the named fields matter to the test."""
    return replace(ENTRY, **changes)
