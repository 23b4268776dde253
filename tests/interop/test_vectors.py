"""Stores written by CDAP: CDAP reads and prunes them as their manifests state."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest

from tests.interop.conftest import Vector
from tests.interop.java import Interop


@pytest.mark.parametrize("table", ["meta", "message", "payload"])
def test_raw_rows_match_the_manifest(java: Interop, vector: Vector, table: str) -> None:
    expected = {bytes.fromhex(row["key"]): _value_hash(row) for row in vector.table(table)}
    assert java.raw(vector.directory, table) == expected


def test_dump_returns_every_entry_of_a_live_topic(java: Interop, vector: Vector) -> None:
    lines = java.run("dump", vector.directory)
    topics = [(line["topic"], line["generation"]) for line in lines if line["kind"] == "topic"]
    assert len(topics) == len(vector.table("meta"))
    entries = [line for line in lines if line["kind"] == "message"]
    got = [(e["generation"], e["publish_ms"], e["seq"], e["pointer"], _kind(e)) for e in entries]
    prefixes = tuple(_data_prefix(topic, generation) for topic, generation in topics if generation > 0)
    # CDAP parses a key from its end, so an unrecognized key within a topic seems to be of another generation.
    expected = [
        (row["generation"], row["time"], row["seq"], _pointer_read(row), row["kind"])
        for row in vector.table("message")
        if bytes.fromhex(row["key"]).startswith(prefixes)
    ]
    assert sorted(got) == sorted(expected)
    named = Counter((entry["topic"], entry["generation"]) for entry in entries)
    for name in (name for name in topics if name[1] > 0):
        # Of the unrecognized rows, CDAP parses the topic only if the time is negative.
        rows = [row for row in vector.table("message") if (row["topic"], row["generation"]) == name]
        assert named[name] == sum(row["reason"] != "unrecognized" or row["time"] < 0 for row in rows)


def test_dump_returns_references_with_their_payloads(java: Interop, vector: Vector) -> None:
    references = [line for line in java.run("dump", vector.directory) if line.get("payloads") is not None]
    assert references
    for reference in references:
        assert [(row["write_ms"], row["seq"], row["sha256"]) for row in reference["payloads"]] == [
            (row["time"], row["seq"], row["value_sha256"])
            for row in vector.table("payload")
            if (row["topic"], row["generation"]) == (reference["topic"], reference["generation"])
            and row["pointer"] == reference["pointer"]
        ]


def test_cdap_prune_deletes_exactly_the_marked_rows(java: Interop, sample: Vector) -> None:
    [result] = java.run("prune", sample.directory, "--now", sample.now_ms)
    for table in ("message", "payload"):
        rows = sample.table(table)
        # The first row of default:orders is unrecognized and stops CDAP's scan, which the marks do not consider.
        gone = {bytes.fromhex(row["key"]) for row in rows if row["cdap_prunes"] and row["topic"] != "default:orders"}
        assert java.raw(sample.directory, table).keys() == {bytes.fromhex(row["key"]) for row in rows} - gone
        assert result[f"{table}s_deleted"] == len(gone)


def test_cdap_read_with_snapshot_hides_invalid_and_undecided_rows(java: Interop, sample: Vector) -> None:
    [snapshot] = java.run("snapshot", sample.snapshot)
    lines = java.run("read-service", sample.directory, "--snapshot", sample.snapshot)
    counts = {(line["topic"], line["in_transaction"]): line["messages"] for line in lines}
    for topic in ("default:imports", "default:orders-eu", "system:audit", "system:metadata"):
        assert counts[topic, False] == sum(_consumed(sample, topic))
        assert counts[topic, True] == sum(_consumed(sample, topic, snapshot))
    assert counts["default:imports", True] < counts["default:imports", False]
    assert counts["system:metadata", True] < counts["system:metadata", False]


def _data_prefix(topic: str, generation: int) -> bytes:
    return f"{topic}:".encode() + generation.to_bytes(4, "big", signed=True)


def _value_hash(row: dict[str, Any]) -> str:
    known: str | None = row.get("value_sha256")
    return known or hashlib.sha256(bytes.fromhex(row["value"])).hexdigest()


def _pointer_read(row: dict[str, Any]) -> int:
    """Return the pointer as CDAP reads it: absolute, and −1 outside a transaction."""
    return -1 if row["pointer"] is None else abs(row["pointer"])


def _kind(entry: dict[str, Any]) -> str:
    if entry["payloads"] is not None:
        return "ref"
    return "tx" if entry["transactional"] else "nontx"


def _consumed(vector: Vector, topic: str, snapshot: dict[str, Any] | None = None) -> list[int]:
    """Return the number of messages of each row of the topic's newest generation."""
    rows = [row for row in vector.table("message") if row["topic"] == topic]
    generation = max(row["generation"] for row in rows)
    payloads = [row for row in vector.table("payload") if (row["topic"], row["generation"]) == (topic, generation)]
    stored = Counter(row["pointer"] for row in payloads)
    undecided = {tx["writePointer"] for tx in snapshot["inProgress"]} if snapshot else set()
    counts = []
    # Hex of keys of the same length has the order of the bytes.
    for row in sorted((row for row in rows if row["generation"] == generation), key=lambda row: str(row["key"])):
        pointer = row["pointer"]
        if snapshot and pointer is not None:
            if pointer < 0 or pointer in snapshot["invalid"]:
                continue
            if pointer in undecided or pointer > snapshot["readPointer"]:
                break
        counts.append(stored[pointer] if row["kind"] == "ref" else 1)
    return counts
