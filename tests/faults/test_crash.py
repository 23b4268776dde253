"""A sweep killed at any write loses no live row, and the next run finishes the work.

`crashes.py` runs the killed sweeps in a separate process.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from janitor.rules.policy import Delete, Frontier, Invert, Row, decide
from janitor.sweep.transactions import TransactionView
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, encode_state, every, pointer, topic, unknown_topic, visibility
from tests.faults.crashes import TERMS, Fates, digest
from tests.support import size, unpack_archive
from tms_core.rowkey import MessageKey, PayloadKey, java_abs
from tms_core.tables.base import MESSAGES, PAYLOADS, MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore, encode
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import VisibilityState

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "vectors" / "cdap-leveldb" / "sample.tar.xz"
#: Number of tests among which the crashes of one store are divided, to run in parallel.
SHARES = 4

INVALID = [pointer(NOW_MS - 10 * DAY), pointer(NOW_MS - 9 * DAY, 7)]
OPEN = pointer(NOW_MS - HOUR)


def crash_sweeps(case: Path, batch_rows: int, choose: Callable[[int], list[int]]) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of crash points, and the results of the chosen ones."""
    command = [sys.executable, "-m", "tests.faults.crashes", str(case), str(batch_rows)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        crash_points = int(process.stdout.readline())
        output, _ = process.communicate("".join(f"{k}\n" for k in choose(crash_points)))
    assert process.returncode == 0
    return crash_points, [json.loads(line) for line in output.splitlines()]


def fill_small(store: Store) -> None:
    """Store a dozen rows of every fate."""
    dozen = range(12)
    orders = topic(store, "default:orders", ttl_seconds=86400, generation=3)
    orders.plain(*(NOW_MS - 2 * DAY + number for number in dozen), NOW_MS)
    orders.tx(INVALID[0], *(NOW_MS - 2 * DAY for _ in dozen), *(NOW_MS - HOUR for _ in dozen))
    orders.tx(OPEN, *(NOW_MS - MINUTE for _ in dozen)).tx(-OPEN, NOW_MS).tx(pointer(NOW_MS - 2), NOW_MS)
    orders.stored(pointer(NOW_MS - 2 * DAY), *(NOW_MS - 2 * DAY + number for number in dozen), NOW_MS)
    orders.stored(pointer(NOW_MS - DAY - HOUR), NOW_MS - DAY - 1).ref(pointer(NOW_MS - DAY - HOUR), NOW_MS - DAY + 1)
    for generation in (1, 2):
        orders.at(generation).plain(*(NOW_MS for _ in dozen)).stored(INVALID[1], NOW_MS, NOW_MS - 1)
    orders.at(4).tx(INVALID[1], NOW_MS)
    gone = topic(store, "default:gone", ttl_seconds=60, generation=-2)
    gone.tx(INVALID[0], *(NOW_MS - number for number in dozen)).stored(INVALID[0], NOW_MS)
    unknown_topic(store, "default:stray").tx(INVALID[1], 1, NOW_MS).plain(1).stored(INVALID[1], 1)
    store.message.put([(b"default:orders:cut", MessageValue(None, b"x")), (b"\xff", MessageValue(INVALID[0], b"x"))])


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tmp_path_factory.mktemp("small")
    state = visibility(NOW_MS, [*INVALID, OPEN])
    with LevelDBStore(case / "messaging", create=True) as store:
        fill_small(store)
        (case / "expected.json").write_text(json.dumps(compute_fates(store, state)))
        # Rows in tables and in the log, so that a compaction has work.
        store.message.compact(b"default:g", b"default:h")
    (case / "tx").mkdir()
    (case / "tx" / f"snapshot.{NOW_MS}").write_bytes(encode_state(state))
    return case


def compute_fates(store: Store, state: VisibilityState) -> dict[str, Fates]:
    """Return the fate of every row by the rules."""
    described = {key: TopicMetadata.parse(key, value) for key, value in store.metadata.rows()}
    frontiers = {key: Frontier.open(NOW_MS, found) for key, found in described.items()}
    view = TransactionView(state, NOW_MS, TERMS.lifetime.undecided_ms)
    referenced: set[tuple[bytes, int, int]] = set()
    fates: dict[str, Fates] = {"message": {}, "payload": {}}
    for raw, value in every(store.message, MESSAGES):
        key = MessageKey.parse(raw)
        prefix = key.topic.prefix if key else b""
        row = Row("message", key, value.pointer)
        verdict = decide(row, described.get(prefix), frontiers.get(prefix), view, False, None)
        if key and value.pointer is not None and value.payload is None and not isinstance(verdict, Delete):
            referenced.add((prefix, key.generation, java_abs(value.pointer)))
        after = None if isinstance(verdict, Delete) else value
        if isinstance(verdict, Invert):
            after = value._replace(pointer=-(value.pointer or 0))
        fates["message"][raw.hex()] = digest(encode(value)), after and digest(encode(after))
    for raw, body in every(store.payload, PAYLOADS):
        parsed = PayloadKey.parse(raw)
        prefix = parsed.topic.prefix if parsed else b""
        needed = parsed is not None and (prefix, parsed.generation, parsed.write_pointer) in referenced
        row = Row("payload", parsed)
        verdict = decide(row, described.get(prefix), frontiers.get(prefix), view, needed, None)
        fates["payload"][raw.hex()] = digest(body), None if isinstance(verdict, Delete) else digest(body)
    return fates


def test_small_store_has_rows_of_every_fate(small: Path) -> None:
    fates = json.loads((small / "expected.json").read_text())
    for table, kinds in (("message", {"deleted", "kept", "inverted"}), ("payload", {"deleted", "kept"})):
        found = {"deleted" if b is None else "kept" if a == b else "inverted" for a, b in fates[table].values()}
        assert found == kinds


@pytest.mark.parametrize("share", range(SHARES))
def test_crash_at_every_write_in_a_small_store_loses_no_row(small: Path, share: int) -> None:
    crash_points, outcomes = crash_sweeps(
        small, 5, lambda crash_points: list(range(1 + share, crash_points + 1, SHARES))
    )
    assert crash_points > 100
    assert [outcome for outcome in outcomes if outcome["problems"]] == []
    # The concurrent compaction changes the number of file operations, so a sweep may have fewer crash points.
    assert all(outcome["died"] for outcome in outcomes if outcome["k"] < 0.95 * crash_points)
    assert [outcome["k"] for outcome in outcomes] == list(range(1 + share, crash_points + 1, SHARES))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tmp_path_factory.mktemp("large")
    unpack_archive(SAMPLE, case)
    (case / "tx.snapshot").rename(case / "tx")
    _, *rows = map(json.loads, (case / "manifest.jsonl").read_text().splitlines())
    after = {"keep": "value_sha256", "invert": "value_after_sha256"}
    fates: dict[str, Fates] = {"message": {}, "payload": {}}
    for row in rows:
        if row["table"] in fates:
            kept = row.get(after.get(row["action"], ""))
            fates[row["table"]][row["key"]] = row["value_sha256"], kept
    (case / "expected.json").write_text(json.dumps(fates))
    return case


@pytest.mark.parametrize("share", range(SHARES))
def test_crash_at_random_writes_in_a_cdap_store_loses_no_row(large: Path, share: int) -> None:
    def chosen(crash_points: int) -> list[int]:
        wanted = min(crash_points, size("TMS_TEST_CRASHES", 30))
        return random.Random(20).sample(range(1, crash_points + 1), wanted)[share::SHARES]

    crash_points, outcomes = crash_sweeps(large, 20, chosen)
    assert crash_points > 200
    assert [outcome for outcome in outcomes if outcome["problems"]] == []
    assert [outcome["k"] for outcome in outcomes] == chosen(crash_points)


def test_crash_inspection_detects_a_lost_row(small: Path, tmp_path: Path) -> None:
    """Expect one row more than the store has."""
    fates = json.loads((small / "expected.json").read_text())
    fates["message"]["00"] = [hashlib.sha256(b"").hexdigest()] * 2
    case = tmp_path / "spoilt"
    subprocess.run(["cp", "-r", small, case], check=True)
    (case / "expected.json").write_text(json.dumps(fates))
    _, [outcome] = crash_sweeps(case, 5, lambda _: [1])
    assert "message 00 is None" in outcome["problems"][0]
