"""Sweeps of stores written by CDAP, read by CDAP afterwards."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.rules.ranges import Lifetime
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Terms
from janitor.sweep.transactions import TransactionView
from tests.interop.conftest import Vector
from tests.interop.deletion_rules import empty_invalid_list, kept_rows
from tests.interop.java import Interop
from tms_core.clock import ManualClock
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.transaction.source.source import DirectorySource

NOW_MS = 1_700_000_000_000
TABLES = ("meta", "message", "payload")
LIFETIME = Lifetime(max_ms=90_000_000, grace_ms=86_400_000, allowance_ms=300_000)
#: The vectors' snapshot is 1,000 s old at their clock, which is fresh for a service that writes one every 1,000 s.
TERMS = Terms(3600, (), LIFETIME, lifetime_known=True, snapshot_interval_seconds=1000)
#: The names of files of LevelDB, in C++ or in Java.
LEVELDB_FILES = re.compile(r"\d{6}\.(sst|log)|MANIFEST-\d{6}|CURRENT|LOCK|LOG|LOG\.old")


def sweep(messaging: Path, snapshots: Path, now_ms: int = NOW_MS) -> Report:
    with LevelDBStore(messaging) as store:
        return sweep_store(store, snapshots, now_ms)


def sweep_store(store: Store, snapshots: Path, now_ms: int) -> Report:
    with SqliteState.in_memory() as state:
        source = DirectorySource(snapshots)
        engine = Engine(
            Deps(store, state, source, ManualClock(now_ms), replace(TERMS, batch_rows=500), token_hex=lambda n: "0" * n)
        )
        return engine.run_once(adopt=True)


def assert_only_leveldb_files(messaging: Path) -> None:
    assert sorted(path.name for path in messaging.iterdir()) == [f"system.tms.{name}" for name in sorted(TABLES)]
    assert [path for path in messaging.glob("*/*") if not LEVELDB_FILES.fullmatch(path.name)] == []


def test_sweep_of_cdap_store_matches_the_manifest_for_java(java: Interop, vector: Vector) -> None:
    # When
    sweep(vector.directory, vector.snapshot.parent, vector.now_ms)
    # Then
    assert_only_leveldb_files(vector.directory)
    for table in ("message", "payload"):
        kept = [row for row in vector.table(table) if row["action"] != "delete"]
        expected = {bytes.fromhex(row["key"]): row.get("value_after_sha256", row["value_sha256"]) for row in kept}
        assert java.raw(vector.directory, table) == expected
    metadata = {
        bytes.fromhex(row["key"]): hashlib.sha256(bytes.fromhex(row["value"])).hexdigest()
        for row in vector.table("meta")
    }
    assert java.raw(vector.directory, "meta") == metadata


def test_sweep_of_cdap_store_keeps_live_messages_of_every_topic(java: Interop, vector: Vector) -> None:
    before = java.run("dump", vector.directory)
    sweep(vector.directory, vector.snapshot.parent, vector.now_ms)
    after = java.run("dump", vector.directory)
    assert [line for line in after if line["kind"] == "topic"] == [line for line in before if line["kind"] == "topic"]
    gone = {bytes.fromhex(row["key"]) for row in vector.table("message") if row["action"] == "delete"}
    expected = [line for line in before if line["kind"] == "message" and _key(line) not in gone]
    read = [line for line in after if line["kind"] == "message"]
    assert [_identity(line) for line in read] == [_identity(line) for line in expected]


def test_sweep_of_cdap_store_hides_invalid_messages_from_cdap(java: Interop, sample: Vector) -> None:
    before = java.run("read-service", sample.directory, "--snapshot", sample.snapshot)
    sweep(sample.directory, sample.snapshot.parent, sample.now_ms)
    with_list = java.run("read-service", sample.directory, "--snapshot", sample.snapshot)
    assert with_list
    assert {line["topic"] for line in with_list} == {line["topic"] for line in before}
    # The inverted rows stay hidden from a reader whose invalid list has been emptied.
    emptied = sample.snapshot.with_name("emptied")
    empty_invalid_list(sample.snapshot, emptied)
    without_list = java.run("read-service", sample.directory, "--snapshot", emptied)
    assert without_list == with_list


@pytest.mark.parametrize("seed", range(1, 5))
def test_sweep_of_random_cdap_store_obeys_deletion_rules(java: Interop, tmp_path: Path, seed: int) -> None:
    # Given
    messaging = tmp_path / "messaging"
    options = ["--kill"] if seed % 2 else ["--rows", 40_000, "--payload-bytes", 1000]
    java.run("write", messaging, seed, "--now", NOW_MS, *options)
    expected = _expected_by_rules(messaging, tmp_path / "tx.snapshot", tmp_path / "copy")
    # When
    report = sweep(messaging, tmp_path / "tx.snapshot")
    # Then
    # CDAP records no positions of consumers.
    assert min(report.total(rule) for rule in set(Rule) - {Rule.PROCESSED}) > 0
    assert not report.errors
    assert_only_leveldb_files(messaging)
    for table in ("message", "payload"):
        assert java.raw(messaging, table) == expected[table]
    assert java.run("read-service", messaging)


def test_store_opened_by_cdap_between_runs_trips_no_guard(java: Interop, sample: Vector) -> None:
    with SqliteState.in_memory() as state:
        for _ in range(4):
            with LevelDBStore(sample.directory) as store:
                source, clock = DirectorySource(sample.snapshot.parent), ManualClock(sample.now_ms)
                engine = Engine(Deps(store, state, source, clock, TERMS, token_hex=secrets.token_hex))
                report = engine.run_once(adopt=state.store() is None)
            assert not report.tripped
            # CDAP's LevelDB writes the log to a table and a new MANIFEST, and may compact.
            assert java.run("read-service", sample.directory, "--snapshot", sample.snapshot)


def test_sweep_after_killed_sweep_leaves_tables_readable_by_cdap(java: Interop, sample: Vector) -> None:
    # Given a process that is killed after half of its batches, with tables under C++ names
    child = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from tests.interop.test_sweep import ManualClock, sweep
        from tms_core.tables.leveldb.store import LevelDBStore
        from janitor.sweep.executor import StoreExecutor
        apply, batches = StoreExecutor.apply, 0
        def apply_or_kill(self, finding):
            global batches
            done = apply(self, finding)
            batches += bool(done.keys)
            if batches == 4:
                finding.table.compact(b"\\x00", b"\\xff")
                os.kill(os.getpid(), signal.SIGKILL)
            return done
        StoreExecutor.apply = apply_or_kill
        sweep(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    """)
    command = [sys.executable, "-c", child, *map(str, (sample.directory, sample.snapshot.parent, sample.now_ms))]
    killed = subprocess.run(command, check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert list(sample.directory.glob("*/*.ldb"))
    # When the next sweep opens the store
    sweep(sample.directory, sample.snapshot.parent, sample.now_ms)
    # Then
    assert_only_leveldb_files(sample.directory)
    expected = {bytes.fromhex(row["key"]) for row in sample.table("message") if row["action"] != "delete"}
    assert set(java.raw(sample.directory, "message")) == expected


def _key(line: dict[str, object]) -> bytes:
    prefix = f"{line['topic']}:".encode() + int(str(line["generation"])).to_bytes(4, "big", signed=True)
    publish_ms, sequence = int(str(line["publish_ms"])), int(str(line["seq"]))
    return prefix + publish_ms.to_bytes(8, "big", signed=True) + (sequence & 0xFFFF).to_bytes(2, "big")


def _identity(line: dict[str, object]) -> tuple[object, ...]:
    """Return the fields that a reader receives; CDAP returns absolute pointers."""
    return (line["topic"], line["publish_ms"], line["seq"], line["pointer"], line["payload_sha256"])


def _expected_by_rules(messaging: Path, snapshots: Path, scratch: Path) -> dict[str, dict[bytes, str]]:
    """Return the expected rows by the rules: key to SHA-256 of the stored value."""
    shutil.copytree(messaging, scratch)
    view = TransactionView(DirectorySource(snapshots).latest().snapshot, NOW_MS, LIFETIME.undecided_ms)
    with LevelDBStore(scratch) as store:
        messages, payloads = kept_rows(store, view, NOW_MS)
    return {
        "message": {key: hashlib.sha256(_stored(value)).hexdigest() for key, value in messages.items()},
        "payload": {key: hashlib.sha256(body).hexdigest() for key, body in payloads.items()},
    }


def _stored(value: MessageValue) -> bytes:
    if value.pointer is None:
        return b"\x00" + (value.payload or b"")
    tag = b"\x02" if value.payload is None else b"\x01"
    return tag + value.pointer.to_bytes(8, "big", signed=True) + (value.payload or b"")
