"""Store errors: in one topic or everywhere, transient or permanent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import (
    DAY,
    HOUR,
    MINUTE,
    NOW_MS,
    Call,
    Kit,
    Topic,
    TopicFault,
    adopted_janitor,
    fail_at,
    janitor,
    pointer,
    topic,
    watch,
    watch_state,
)
from tms_core.errors import StoreError
from tms_core.tables.base import Store
from tms_core.tables.leveldb.store import LevelDBStore

ROOT = Path(__file__).parents[2]
OLD = pointer(NOW_MS - 10 * DAY)
NAMES = ("default:a", "default:b", "default:c")
TTL_SECONDS = 86400


def fill(described: Topic) -> None:
    """Store due rows in both tables, a row to invert, and a payload that needs a reference search."""
    described.plain(*(NOW_MS - 2 * DAY + number for number in range(6)), NOW_MS).tx(OLD, NOW_MS)
    described.stored(pointer(NOW_MS - 2 * DAY), *(NOW_MS - 2 * DAY + number for number in range(6)), NOW_MS)
    described.stored(pointer(NOW_MS - DAY - HOUR), NOW_MS - DAY - HOUR)


def is_done(described: Topic) -> bool:
    return (
        described.times() == [NOW_MS, NOW_MS]
        and described.pointers() == [None, -OLD]
        and described.stored_times() == [NOW_MS]
    )


def set_up(store: Store) -> tuple[Kit, list[Topic]]:
    """Return three topics with the same rows, adopted empty a day ago; a full pass is due."""
    topics = [topic(store, name, ttl_seconds=TTL_SECONDS) for name in NAMES]
    kit = adopted_janitor(store, now_ms=NOW_MS - DAY, batch_rows=2, invalid=[OLD])
    kit.clock.advance(DAY)
    for described in topics:
        fill(described)
    return kit, topics


OPERATIONS = [
    "message.keys",
    "message.cells",
    "message.delete",
    "message.invert",
    "payload.keys",
    "payload.delete",
    "metadata.get",
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_error_in_one_topic_sweeps_others_without_a_proof(store: Store, operation: str) -> None:
    kit, [first, broken, last] = set_up(store)
    before, proven = kit.state.frontiers(), kit.state.boundary()
    fault = TopicFault(broken, operations=[operation])
    watch(store, before=fault)
    report = kit.engine.run_once()
    fault.is_repaired = True
    assert fault.failures > 0
    assert is_done(first)
    assert is_done(last)
    assert any("default:b" in message and "a block is damaged" in message for message in report.errors)
    assert kit.state.runs(1)[0].result == "partial"
    after = kit.state.frontiers()
    assert after[broken.id] == before[broken.id]
    assert after[first.id] != before[first.id]
    assert proven is not None
    assert kit.state.boundary() == proven
    assert report.boundary == proven.bound
    assert NOW_MS in broken.times()
    assert NOW_MS in broken.stored_times()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_transient_error_in_one_topic_is_retried_by_the_next_run(store: Store, operation: str) -> None:
    kit, topics = set_up(store)
    fault = TopicFault(topics[1], operations=[operation])
    watch(store, before=fault)
    try:
        kit.engine.run_once()
    except StoreError:
        assert kit.state.runs(1)[0].result == "failed"
    fault.is_repaired = True
    assert kit.run_after(MINUTE).errors == []
    assert all(map(is_done, topics))
    assert kit.state.boundary() is not None


@pytest.mark.parametrize("name", ["message.sync", "payload.sync", "metadata.rows"])
def test_error_of_the_whole_store_records_only_the_failure(store: Store, name: str) -> None:
    kit, topics = set_up(store)
    before = (kit.state.frontiers(), kit.state.boundary(), kit.state.evidence(), kit.state.last_full_pass_ms())
    failing = [True]
    watch(store, before=fail_at(name, StoreError("Input/output error."), lambda _: failing[0]))
    with pytest.raises(StoreError, match="Input/output error"):
        kit.engine.run_once()
    after = (kit.state.frontiers(), kit.state.boundary(), kit.state.evidence(), kit.state.last_full_pass_ms())
    assert after == before
    [run] = kit.state.runs(1)
    assert run.result == "failed"
    assert "Input/output error" in run.error
    failing[0] = False
    assert kit.run_after(1).errors == []
    assert all(map(is_done, topics))


SAVES = ["save_anchor", "save_store", "save_frontiers", "save_open_ids", "replace_evidence", "save_boundary"]


@pytest.mark.parametrize("name", SAVES)
def test_error_of_the_state_at_the_end_keeps_all_or_nothing(store: Store, name: str) -> None:
    kit, topics = set_up(store)
    before = (kit.state.frontiers(), kit.state.boundary(), kit.state.last_full_pass_ms(), kit.state.strikes())
    failing = [True]
    watch_state(
        kit.state, before=fail_at(f"state.{name}", StoreError("the state's disk is full."), lambda _: failing[0])
    )
    with pytest.raises(StoreError, match="disk is full"):
        kit.engine.run_once()
    failing[0] = False
    after = (kit.state.frontiers(), kit.state.boundary(), kit.state.last_full_pass_ms(), kit.state.strikes())
    assert after == before
    assert kit.run_after(MINUTE).errors == []
    assert all(map(is_done, topics))
    assert kit.state.boundary() is not None


def test_error_of_the_history_keeps_completed_work(store: Store) -> None:
    kit, topics = set_up(store)
    before = kit.state.boundary()
    failing = [True]
    watch_state(
        kit.state, before=fail_at("state.finish_run", StoreError("the state's disk is full."), lambda _: failing[0])
    )
    with pytest.raises(StoreError, match="disk is full"):
        kit.engine.run_once()
    failing[0] = False
    assert kit.state.runs(1)[0].result == ""
    assert kit.state.boundary() not in (None, before)
    assert all(map(is_done, topics))
    assert {record.at.wall_ms for record in kit.state.frontiers().values()} == {NOW_MS}


def test_error_of_a_compaction_is_reported_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.tables.compaction.WORTHWHILE_ROWS", 1)
    kit, topics = set_up(store)
    seen: list[object] = []

    def fail(call: Call) -> None:
        if call.name.endswith(".compact"):
            seen.append(kit.state.boundary())
            raise StoreError("No space left on device.")

    watch(store, before=fail)
    report = kit.engine.run_once()
    proven = kit.state.boundary()
    assert proven is not None
    # One attempt, after everything is saved, unless the store compacts concurrently.
    assert len(seen) == 1
    assert store.message.can_compact_concurrently or seen == [proven]
    assert (proven.made_ms, report.boundary) == (NOW_MS, proven.bound)
    [error] = report.errors
    assert re.search(r"compaction .*No space left on device", error)
    [run] = kit.state.runs(1)
    assert (run.result, [*run.errors]) == ("partial", report.errors)
    assert all(map(is_done, topics))
    assert {record.at.wall_ms for record in kit.state.frontiers().values()} == {NOW_MS}


def test_error_of_the_state_at_the_start_touches_no_row(store: Store) -> None:
    kit, topics = set_up(store)
    before = [described.messages() for described in topics]

    def fail(call: Call) -> None:
        if call.name in ("state.transaction", "state.begin_run"):
            raise StoreError("the state cannot be written.")

    watch_state(kit.state, before=fail)
    with pytest.raises(StoreError, match="cannot be written"):
        kit.engine.run_once()
    assert [described.messages() for described in topics] == before


#: A program that sweeps a store with a file size limit and prints the result.
SWEEP_ON_FULL_DISK = """
import json, resource, sys
from pathlib import Path
from tests.builders import NOW_MS, janitor
from tms_core.errors import StoreError
from tms_core.tables.leveldb.store import LevelDBStore
store = LevelDBStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
kit = janitor(store, batch_rows=50)
try:
    errors = kit.engine.run_once(adopt=True).errors
except StoreError as error:
    errors = [str(error)]
proven = kit.state.boundary()
try:
    store.close()
except StoreError as error:
    errors.append(str(error))
print(json.dumps({"errors": list(errors), "proven": proven is not None}))
"""


@pytest.mark.parametrize("limit_bytes", [1, 500, 4_000, 20_000])
def test_full_disk_keeps_live_rows_until_a_later_run_completes(tmp_path: Path, limit_bytes: int) -> None:
    due = [NOW_MS - 2 * DAY + number for number in range(3000)]
    live = [NOW_MS - number for number in range(300, 0, -1)]
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(*due, *live)
    command = [sys.executable, "-c", SWEEP_ON_FULL_DISK, str(tmp_path / "messaging"), str(limit_bytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["errors"]
    assert "File too large" in " ".join(report["errors"])
    assert not report["proven"]
    with LevelDBStore(tmp_path / "messaging") as store:
        orders = Topic(store, topic(store, "default:orders", ttl_seconds=TTL_SECONDS).id)
        assert set(live) <= set(orders.times()) <= set(due + live)
        janitor(store).engine.run_once(adopt=True)
        assert orders.times() == live
    assert {file.suffix for file in (tmp_path / "messaging").glob("*/*.*")} <= {".sst", ".log", ".old"}
