"""Guided sweeps: a driver that visits only rows found by tasks has the results of one process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.archive.writer import ParquetArchive
from janitor.run.engine import Engine
from janitor.settings import load
from janitor.spark.access import Access
from janitor.spark.sweep.engine import Cut, OpenReading, cutter
from janitor.spark.sweep.ranged import RangedReads
from janitor.spark.sweep.task import StoreEnvironment
from janitor.state.base import State, StoreRecord
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Run, Terms
from janitor.sweep.scan import Part
from tests.builders import DAY, HOUR, LIFETIME, MINUTE, NOW_MS, FileEngine, Snapshots, pointer, topic, watch
from tests.janitor.rules.test_differential import TERMS, FixedSource, Scene, scenes
from tests.spark.local import LocalSender, PiecesEnvironment, on_spark
from tests.spark.test_sweep import figures, rows_of, without_bytes
from tms_core.clock import ManualClock
from tms_core.errors import StoreBusy, StoreError, StoreUnavailable
from tms_core.rowkey import PayloadKey
from tms_core.tables.base import KeyRange, MessageValue, Reads, Store
from tms_core.tables.leveldb import clone as leveldb_clone
from tms_core.tables.leveldb.clone import copy_open_store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiries
from tms_core.topic import encode_properties

DEAD = pointer(NOW_MS - 2 * DAY)
USUAL = Terms(0, (), LIFETIME, True, 60)
WAITS = [1, 1000, MINUTE, HOUR, 8 * DAY]


def zeros(count: int) -> str:
    """Return zeros, so that run ids differ only by the start of the run."""
    return "0" * count


def cut_at(cuts: Sequence[bytes]) -> Cut:
    """Return a function that cuts both tables at the given keys."""
    edges = [b"", *sorted(set(cuts) - {b""})]
    pieces = [KeyRange(*pair) for pair in zip(edges, [*edges[1:], None], strict=True)]

    def cut(run: Run) -> list[tuple[Part, Reads]]:
        return [
            (Part(run, at, None, (one, one)), RangedReads(run.store, [one], [one])) for at, one in enumerate(pieces)
        ]

    return cut


def read_copy(store: Store, state: State, clock: ManualClock) -> OpenReading:
    """Return a function that creates tasks on a copy of a store."""

    @contextmanager
    def open_reading() -> Iterator[LocalSender]:
        copied = MemoryStore()
        for key, value in store.metadata.rows():
            copied.metadata.compare_and_set(key, None, value)
        messages, payloads = rows_of(store)
        copied.message.put(messages)
        copied.payload.put(payloads)
        yield LocalSender(PiecesEnvironment(copied, state, clock))

    return open_reading


def guided(store: Store, state: State, source: Any, clock: ManualClock, terms: Terms, **options: Any) -> Engine:
    given = {"token_hex": zeros, "sender": LocalSender(None), "open_reading": read_copy(store, state, clock)}
    return on_spark(store, state, source, clock, terms, **{"cut": cut_at([b"a:t1:"]), **given, **options})


def describe(store: Store, state: State) -> dict[str, Any]:
    return {
        "rows": rows_of(store),
        "frontiers": state.frontiers(),
        "evidence": state.evidence(),
        "claim": state.boundary(),
        "open": list(state.lowest_open(100)),
        "strikes": state.strikes(),
        "full": state.last_full_pass_ms(),
        "ledger": sorted((replace(entry, at_ms=0) for entry in state.ledger(1000)), key=repr),
        "intents": state.intents(),
        "runs": [(run.id, run.result) for run in state.runs(10)],
    }


@pytest.mark.no_cover
@given(scenes(), st.integers(1, 7), st.data())
def test_guided_sweeps_match_sweeps_of_one_process(scene: Scene, batch_rows: int, data: st.DataObject) -> None:
    keys = [*scene.messages, *scene.payloads]
    cuts = data.draw(st.lists(st.sampled_from([b"", b"a:t1:", *keys]), max_size=4))
    waits = data.draw(st.lists(st.sampled_from(WAITS), min_size=1, max_size=3))
    own = data.draw(st.lists(st.tuples(st.sampled_from([b"a:t1:", *scene.messages]), st.sampled_from(WAITS))))
    with_tasks, alone = (swept(scene, batch_rows, waits, own, cuts=cuts), swept(scene, batch_rows, waits, own))
    assert with_tasks == alone


def test_sweep_cut_inside_a_deleted_topic_matches_one_process() -> None:
    scene = Scene(HOUR)
    scene.metadata[b"a:t1:"] = encode_properties({"generation": "-1", "ttl": "1"})
    for prefix in (b"a:t:", b"a:t10:", b"a:t1-x:", b"b:t1:"):
        scene.metadata[prefix] = encode_properties({"generation": "0", "ttl": "1"})
    unreadable = ["", "7fffffff 000000000036ea97 0000"]
    scene.messages = {b"a:t:" + bytes.fromhex(key): MessageValue(None, b"x") for key in unreadable}
    due = ["7fffffffffffffff 0000000000000000 0000", "00000345f51dd607 0000000000000001 0000"]
    last = b"a:t1:" + bytes.fromhex("00000001 00000345f51dd607 000000000036ea97 0000")
    scene.payloads = dict.fromkeys([*(b"a:t1:\0\0\0\x01" + bytes.fromhex(key) for key in due), last], b"y")
    waits = [1, HOUR, 1]
    with_tasks, alone = (swept(scene, 3, waits, cuts=[last]), swept(scene, 3, waits))
    assert with_tasks == alone
    assert alone[-1]["rows"][1] == [], "the third run deletes the old generation"


def swept(
    scene: Scene,
    batch_rows: int,
    waits: Sequence[int],
    own: Sequence[tuple[bytes, int]] = (),
    *,
    cuts: Sequence[bytes] | None = None,
) -> list[Any]:
    """Return the reports and remaining rows of consecutive runs.

    Args:
        waits: the time from each run to the next one, in milliseconds.
        own: messages with a message ttl, and the time until they expire, in milliseconds.
        cuts: the keys at which the store is cut for tasks; None: one process sweeps without tasks.
    """
    store, state, clock, side = MemoryStore(), SqliteState.in_memory(), ManualClock(scene.now_ms), scene.side()
    scene.fill(store)
    state.save_store(StoreRecord("mark", store.identity(), adopted_ms=0))
    state.save_frontiers(scene.records)
    expiries = Expiries(side)
    expiries.put((key, scene.now_ms + wait_ms) for key, wait_ms in own if key in scene.messages)
    source = FixedSource(scene.snapshot) if scene.snapshot else None
    options: dict[str, Any] = {"batch_rows": batch_rows, "side": side}
    engine: Any = (
        FileEngine(store, state, source, clock, TERMS, token_hex=zeros, **options)
        if cuts is None
        else guided(store, state, source, clock, TERMS, cut=cut_at(cuts), **options)
    )
    found: list[Any] = []
    for wait_ms in waits:
        report = engine.run_once()
        assert not report.errors
        found += [without_bytes(figures(report)), expiries.due(2**62, 100), describe(store, state)]
        clock.advance(wait_ms)
    return found


def fill(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    orders.plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 200), *range(NOW_MS - MINUTE, NOW_MS - MINUTE + 90))
    orders.tx(DEAD, *range(NOW_MS - MINUTE, NOW_MS - MINUTE + 20))
    orders.stored(DEAD, *range(NOW_MS - 2 * DAY, NOW_MS - 2 * DAY + 40))
    # An unrecognized row among rows that both the driver and a task read.
    store.payload.put([(PayloadKey(orders.id, 1, DEAD, NOW_MS - 2 * DAY + 5, 0).pack() + b"!", b"")])
    kept = pointer(NOW_MS - 2 * HOUR, 1)
    orders.stored(kept, NOW_MS - 2 * HOUR).ref(kept, NOW_MS - MINUTE)
    topic(store, "default:retired", ttl_seconds=3600, generation=-1).plain(*range(NOW_MS, NOW_MS + 40))


def filled() -> MemoryStore:
    store = MemoryStore()
    fill(store)
    return store


@contextmanager
def leveldb(folder: Path, by_tasks: bool, **options: Any) -> Iterator[tuple[Any, Store, State, ManualClock]]:
    place, clock = folder / "messaging", ManualClock(NOW_MS, monotonic_ms=DAY)
    with LevelDBStore(place, create=True) as store:
        fill(store)
    access = Access(load(None, {}, {"leveldb": str(place)}).settings)

    @contextmanager
    def open_reading() -> Iterator[LocalSender]:
        with copy_open_store(place, folder / "state") as copied:
            yield LocalSender(StoreEnvironment(access.at(copied)))

    with LevelDBStore(place) as store, SqliteState.in_memory() as state:
        arguments: tuple[Any, ...] = (store, state, Snapshots(clock, [DEAD]), clock, USUAL)
        given: dict[str, Any] = {"token_hex": zeros, "batch_rows": 20, **options}
        if by_tasks:
            given |= {"sender": LocalSender(None), "cut": cutter(access, 2), "open_reading": open_reading}
        yield (on_spark if by_tasks else FileEngine)(*arguments, **given), store, state, clock


def test_run_after_guided_sweep_of_leveldb_finds_nothing_to_do(tmp_path: Path) -> None:
    outcomes = []
    for by_tasks in (True, False):
        folder = tmp_path / str(by_tasks)
        archive = ParquetArchive(folder / "archive", ManualClock(NOW_MS))
        with leveldb(folder, by_tasks, archive=archive) as (engine, store, state, clock):
            report = engine.run_once(adopt=True)
            assert not report.errors
            assert state.boundary() is not None
            assert list((folder / "archive").rglob("*.parquet"))
            outcomes.append((figures(report)["totals"], describe(store, state)))
            clock.advance(1000)
            following = FileEngine(store, state, Snapshots(clock, [DEAD]), clock, USUAL, token_hex=secrets.token_hex)
            again = following.run_once()
            assert (again.topics, again.full) == ([], False), "the state has frontiers and the time of the full pass"
        assert not list((folder / "state").glob("*")) if by_tasks else True
    assert outcomes[0] == outcomes[1]


def run_on(store: Store, **options: Any) -> tuple[Engine, State]:
    state, clock = SqliteState.in_memory(), ManualClock(NOW_MS, monotonic_ms=DAY)
    source = Snapshots(clock, [DEAD])
    return guided(store, state, source, clock, USUAL, **{"batch_rows": 20, **options}), state


def test_guided_sweep_with_unreadable_topic_proves_no_boundary() -> None:
    store = filled()
    retired = topic(store, "default:retired", ttl_seconds=3600, generation=-1)
    retired.stored(DEAD, NOW_MS)

    @contextmanager
    def open_reading() -> Iterator[LocalSender]:
        def fail(call: Any) -> None:
            if call.name == "payload.keys" and call.arguments[0].startswith(retired.id.prefix + b"\0\0\0\1"):
                raise StoreUnavailable("a block is damaged.")

        with read_copy(store, state, ManualClock(NOW_MS))() as sender:
            assert isinstance(sender, LocalSender)
            watch(sender.environment.store, fail)
            yield sender

    engine, state = run_on(store, open_reading=open_reading)
    before = len(rows_of(store)[1])
    report = engine.run_once(adopt=True)
    assert any("default:retired" in error and "a block is damaged" in error for error in report.errors)
    assert (state.boundary(), state.runs(1)[0].result) == (None, "partial")
    assert set(state.strikes()) == {retired.id}
    assert len(rows_of(store)[1]) == before - 40, "payloads of the other topic are deleted"


def test_guided_sweep_with_failed_task_records_deleted_messages() -> None:
    class FailingSender:
        def send(self, parts: Sequence[Part], keep_alive: Callable[[], None]) -> list[Outcome]:
            raise StoreUnavailable("the task for part 0 lost its store in the step invert: gone.")

    engine, state = run_on(filled(), open_reading=lambda: nullcontext(FailingSender()))
    with pytest.raises(StoreUnavailable):
        engine.run_once(adopt=True)
    assert [run.result for run in state.runs(10)] == ["failed"]
    assert {entry.rows for entry in state.ledger(10)} == {200, 40}, "the ledger has the messages deleted before"
    assert state.boundary() is None


def test_stopped_guided_sweep_is_recorded_as_interrupted() -> None:
    store, requests = filled(), []

    class StoppingSender:
        def send(self, parts: Sequence[Part], keep_alive: Callable[[], None]) -> list[Outcome]:
            requests.append(parts[0].step)
            keep_alive()
            raise AssertionError("the run has not stopped")

    engine, state = run_on(
        store, open_reading=lambda: nullcontext(StoppingSender()), is_stopping=lambda: bool(requests)
    )
    assert [note.guard for note in engine.run_once(adopt=True).guards] == ["interrupted"]
    assert (requests, state.runs(1)[0].result) == (["invert"], "interrupted")


def test_copy_of_open_store_can_be_cloned(tmp_path: Path) -> None:
    place = tmp_path / "messaging"
    access = Access(load(None, {}, {"leveldb": str(place)}).settings)
    with LevelDBStore(place, create=True) as store:
        fill(store)
        with copy_open_store(place, tmp_path / "state") as copied:
            with pytest.raises(StoreBusy), access.reading():
                pass
            before = rows_of(store)
            topic(store, "default:orders", ttl_seconds=3600).plain(NOW_MS)
            with access.at(copied).reading() as first, access.at(copied).reading() as second:
                assert rows_of(first) == rows_of(second) == before
        assert not copied.exists()
        with pytest.raises(StoreError, match="cannot be inside its store"), copy_open_store(place, place / "state"):
            pass


def test_copy_of_changing_files_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[Path] = []

    def list_changing_files(folder: Path) -> list[tuple[str, int]]:
        listed.append(folder)
        if len(listed) == 3:
            raise FileNotFoundError
        return [("moved", 1)] if len(listed) == 2 else inventory(folder)

    inventory = leveldb_clone._inventory
    monkeypatch.setattr(leveldb_clone, "_inventory", list_changing_files)
    access = Access(load(None, {}, {"leveldb": str(tmp_path / "messaging")}).settings)
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        fill(store)
        with copy_open_store(store.path, tmp_path / "state") as copied, access.at(copied).reading() as found:
            assert rows_of(found) == rows_of(store)
    assert len(listed) == 3 + 3 * 2
