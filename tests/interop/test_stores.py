"""Stores written by CDAP's classes for tests: deterministic, complete and realistic."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.interop.java import Interop
from tms_core.tables.leveldb.library import plyvel

NOW_MS = 1_700_000_000_000
TABLES = ("meta", "message", "payload")


def test_dump_returns_every_written_live_message(java: Interop, tmp_path: Path) -> None:
    directory = tmp_path / "messaging"
    written = _generations(java.run("write", directory, 1, "--now", NOW_MS))
    entries: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in java.run("dump", directory):
        if line["kind"] == "topic" and line["generation"] > 0:
            entries[line["topic"], line["generation"]] = []
        elif line["kind"] == "message":
            entries[line["topic"], line["generation"]].append(line)
    assert entries
    for name, lines in entries.items():
        inline = [line["payload_sha256"] for line in lines if line["payloads"] is None]
        assert len(inline) == written[name]["messages"]
        assert _checksum(inline) == written[name]["messages_checksum"]
        assert len(lines) - len(inline) == written[name]["references"]


def test_raw_read_returns_rows_of_all_generations(java: Interop, tmp_path: Path) -> None:
    directory = tmp_path / "messaging"
    written = _generations(java.run("write", directory, 2, "--now", NOW_MS)).values()
    assert len(java.raw(directory, "message")) == sum(line["messages"] + line["references"] for line in written)
    payloads = java.raw(directory, "payload").values()
    assert len(payloads) == sum(line["payloads"] for line in written)
    assert int(_checksum(payloads), 16) == sum(int(line["payloads_checksum"], 16) for line in written) % 2**64


def test_writer_with_equal_seed_is_deterministic(java: Interop, tmp_path: Path) -> None:
    first, again, other = (tmp_path / name / "messaging" for name in ("first", "again", "other"))
    for directory, seed in ((first, 3), (again, 3), (other, 4)):
        java.run("write", directory, seed, "--now", NOW_MS)
    assert [java.raw(first, table) for table in TABLES] == [java.raw(again, table) for table in TABLES]
    assert java.raw(first, "message") != java.raw(other, "message")
    [snapshot] = (first.parent / "tx.snapshot").iterdir()
    assert snapshot.read_bytes() == (again.parent / "tx.snapshot" / snapshot.name).read_bytes()
    [decoded] = java.run("snapshot", snapshot)
    assert decoded["invalid"]
    assert {tx["type"] for tx in decoded["inProgress"]} == {"LONG", "CHECKPOINT"}


def test_store_of_killed_writer_has_all_rows(java: Interop, tmp_path: Path) -> None:
    killed, closed = tmp_path / "killed" / "messaging", tmp_path / "closed" / "messaging"
    java.run("write", killed, 5, "--now", NOW_MS, "--kill")
    java.run("write", closed, 5, "--now", NOW_MS)
    # After a crash, the log of the Java library still has its zero padding.
    assert (killed / "system.tms.message" / "000003.log").stat().st_size % 2**20 == 0
    assert [java.raw(killed, table) for table in TABLES] == [java.raw(closed, table) for table in TABLES]


def test_large_cdap_store_is_unreadable_by_plyvel(java: Interop, tmp_path: Path) -> None:
    java.run("write", tmp_path / "messaging", 7, "--now", NOW_MS, "--rows", 40_000, "--payload-bytes", 1000)
    database = plyvel.DB(str(tmp_path / "messaging" / "system.tms.message"))
    with closing(database), pytest.raises(plyvel.IOError, match=r"\.sst: Invalid argument"):
        list(database)


def test_cdap_prune_deletes_half_of_a_filled_store(java: Interop, tmp_path: Path) -> None:
    java.run("fill", tmp_path, "--now", NOW_MS, "--rows", 8_000, "--topics", 2)
    [result] = java.run("prune", tmp_path, "--now", NOW_MS)
    assert (result["message_rows"], result["messages_deleted"]) == (8_000, 4_000)
    assert len(java.raw(tmp_path, "message")) == 4_000


def test_snapshot_as_json_round_trips(java: Interop, tmp_path: Path) -> None:
    pointer = NOW_MS * 1_000_000
    checkpoint = {"visibilityUpperBound": pointer, "expiration": NOW_MS + 30_000, "checkpointWritePointers": []}
    snapshot = {
        "timestamp": NOW_MS,
        "readPointer": pointer + 1,
        "writePointer": pointer + 4,
        "invalid": [pointer - 2, pointer - 1],
        "inProgress": [
            {**checkpoint, "writePointer": pointer + 3, "type": "SHORT", "checkpointWritePointers": [pointer + 4]},
            {**checkpoint, "writePointer": pointer + 4, "type": "CHECKPOINT"},
        ],
        "committing": {str(pointer + 3): ["00ff", "6b31"]},
        "committed": {str(pointer + 1): []},
    }
    assert java.run("write-snapshot", tmp_path / "snapshot", stdin=json.dumps(snapshot)) == [{"version": 4}]
    assert java.run("snapshot", tmp_path / "snapshot") == [snapshot]


def _generations(lines: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(line["topic"], line["generation"]): line for line in lines if line["kind"] == "generation"}


def _checksum(hashes: Iterable[str]) -> str:
    """Return the sum of the first 8 bytes of each SHA-256, as the writer computes it."""
    return f"{sum(int(sha256[:16], 16) for sha256 in hashes) % 2**64:016x}"
