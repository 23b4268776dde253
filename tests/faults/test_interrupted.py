"""A run stopped at any call keeps its completed work, and the next run continues from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from janitor.report import Report
from janitor.run import engine
from janitor.state.records import OpenIdRecord
from tests.builders import (
    DAY,
    HOUR,
    MINUTE,
    NOW_MS,
    Call,
    Kit,
    Topic,
    adopted_janitor,
    assert_boundary_is_true,
    pointer,
    topic,
    watch,
)
from tms_core.tables import compaction
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore

TTL_SECONDS = 86400
#: A transaction too young for a proof by the first run; its client can no longer write.
OLD = pointer(NOW_MS - DAY - HOUR // 2)
OLD_MS = NOW_MS - DAY + 10 * MINUTE
DUE_MS = [NOW_MS - 2 * DAY + number for number in range(5)]
#: Upper limit of store calls of each sweep below.
CALLS = 300


def set_up(store: Store) -> tuple[Kit, list[Topic]]:
    """Return two topics, adopted empty, with rows of every fate; a full pass is due."""
    topics = [topic(store, name, ttl_seconds=TTL_SECONDS, generation=2) for name in ("default:a", "default:b")]
    kit = adopted_janitor(store, now_ms=NOW_MS - DAY, batch_rows=2)
    kit.clock.advance(DAY)
    for described in topics:
        described.plain(*DUE_MS, NOW_MS).tx(OLD, OLD_MS).at(1).plain(1)
        described.stored(pointer(DUE_MS[0]), *DUE_MS, NOW_MS)
        described.stored(pointer(NOW_MS - DAY - HOUR), NOW_MS - DAY - HOUR)
    store.message.put([(b"default:a:cut", MessageValue(None, b"?"))])
    kit.snapshots.invalid = [OLD]
    return kit, topics


def is_done(described: Topic) -> bool:
    return (described.times(), described.pointers(), described.stored_times(), described.at(1).times()) == (
        [OLD_MS, NOW_MS],
        [-OLD, None],
        [NOW_MS],
        [],
    )


class StopAtCall:
    """A watcher that requests a stop before the k-th store call, and counts writes before and after it."""

    def __init__(self, store: Store, at_call: int) -> None:
        self.at_call = at_call
        self.calls = 0
        self.at = ""
        self.rows = Counter[str]()
        self.after: list[str] = []
        self.unsynced: set[str] = set()
        watch(store, before=self)

    def __call__(self, call: Call) -> None:
        self.calls += 1
        if self.calls == self.at_call:
            self.at = call.name
        table, _, operation = call.name.partition(".")
        if operation in ("delete", "invert"):
            self.rows[operation] += len(call.arguments[0])
            self.after += [call.name] if self.at else []
        if operation == "delete":
            self.unsynced.add(table)
        elif operation == "sync":
            self.unsynced.discard(table)

    def is_reached(self) -> bool:
        return bool(self.at)


@pytest.mark.no_cover
def test_stop_at_any_store_call_keeps_completed_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "WORTHWHILE_ROWS", 1)
    stopped_in = set()
    for at_call in range(1, CALLS):
        kit, topics = set_up(MemoryStore())
        frontiers, proven, open_ids = kit.state.frontiers(), kit.state.boundary(), kit.state.open_ids()
        stop = StopAtCall(kit.store, at_call)
        report = kit.restart(is_stopping=stop.is_reached).engine.run_once()
        if not stop.at:
            break
        run = kit.state.runs(1)[0]
        assert_boundary_is_true(kit)

        # At most the current batch was written after the request.
        has_started = stop.at == "metadata.get" or stop.at.endswith((".delete", ".invert"))
        assert len(stop.after) == has_started, f"at call {at_call}, {stop.at}"
        # All writes are counted, durable and in the ledger.
        assert report.totals.expired + report.totals.old_generation == stop.rows["delete"]
        assert report.totals.invalid_transaction == stop.rows["invert"]
        assert sum(entry.rows or 0 for entry in kit.state.ledger(100)) == stop.rows.total()
        assert stop.unsynced == set()
        assert (kit.state.unfinished_runs(), kit.state.intents()) == ([], [])
        counted = sum(value for key, value in kit.state.counters().items() if key.name == "rows_deleted_total")
        assert counted == stop.rows["delete"]
        # No frontier has passed the completed work.
        if run.result == "interrupted":
            stopped_in.add(stop.at)
            assert kit.state.report(run.id, Report) == report
            if "sync" not in stop.at and "compact" not in stop.at:
                assert (kit.state.frontiers(), kit.state.boundary()) == (frontiers, proven)
                # The run has seen the snapshot's ids; none counts as searched.
                seen = [record for pointer, record in kit.state.open_ids().items() if pointer not in open_ids]
                assert [(record.scanned_ms, record.closed_ms) for record in seen] == [(None, None)] * len(seen)
                assert open_ids.items() <= kit.state.open_ids().items()

        # The next run completes the work.
        report = kit.run_after(MINUTE)
        assert (report.errors, report.held_topics()) == ([], {})
        assert all(map(is_done, topics))
        assert_boundary_is_true(kit)
        assert kit.state.boundary() is not None
    assert at_call > 60
    assert stopped_in >= {"message.keys", "message.cells", "message.delete", "message.invert", "payload.delete"}
    assert "message.compact" in stopped_in


def test_stop_of_a_leveldb_run_keeps_completed_work(tmp_path_factory: pytest.TempPathFactory) -> None:
    for at_call in range(3, 80, 9):
        folder = tmp_path_factory.mktemp("interrupted")
        with LevelDBStore(folder, create=True) as store:
            kit, topics = set_up(store)
            kit.restart(is_stopping=StopAtCall(store, at_call).is_reached).engine.run_once()
            left = [described.messages() for described in topics]
        with LevelDBStore(folder) as store:
            topics = [Topic(store, described.id, 2) for described in topics]
            assert [described.messages() for described in topics] == left
            kit.restart(store=store).engine.run_once()
            assert all(map(is_done, topics))


def test_stop_before_the_start_reads_no_row() -> None:
    kit, _ = set_up(MemoryStore())
    names: list[str] = []
    watch(kit.store, before=lambda call: names.append(call.name))
    report = kit.restart(is_stopping=lambda: True).engine.run_once()
    assert names == ["metadata.rows"]
    assert report.totals.expired == 0
    assert kit.state.runs(1)[0].result == "interrupted"


def test_stop_in_a_long_invalid_list_is_resumed_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BATCH_IDS", 10)
    kit, _ = set_up(MemoryStore())
    kit.snapshots.invalid = [pointer(NOW_MS - DAY - number) for number in range(100)]
    is_saving, save = [False], kit.state.save_open_ids
    read = [0]

    def save_and_stop(records: Iterable[OpenIdRecord]) -> None:
        is_saving[0] = True

        def counted() -> Iterator[OpenIdRecord]:
            for record in records:
                read[0] += 1
                yield record

        save(counted())

    monkeypatch.setattr(kit.state, "save_open_ids", save_and_stop)
    assert kit.restart(is_stopping=lambda: is_saving[0]).engine.run_once().guards[-1].guard == "interrupted"
    assert read[0] < 10
    assert not kit.state.open_ids()
    monkeypatch.undo()
    kit.restart(is_stopping=lambda: False).engine.run_once()
    assert len(kit.state.open_ids()) == 100
