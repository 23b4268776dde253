"""Sweeps by tasks: the same results as one process, despite failed tasks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from janitor.archive.parquet import read, summarize
from janitor.archive.writer import ParquetArchive
from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.rules.ranges import remainder, topic_stop
from janitor.run.prepare import make_run, prepare
from janitor.spark.source.options import SourceOptions
from janitor.spark.source.parts import between
from janitor.spark.sweep.engine import SparkSender, cutter
from janitor.spark.sweep.ranged import RangedReads
from janitor.spark.sweep.task import FollowedLease, perform
from janitor.state.base import RunRecord, StoreRecord
from janitor.state.sqlite.state import SqliteState
from janitor.state.values import pack
from janitor.sweep.run import Run, Terms
from janitor.sweep.scan import STEPS, Part
from tests.builders import DAY, HOUR, LIFETIME, MINUTE, NOW_MS, FileEngine, Snapshots, every, pointer, topic, watch
from tests.janitor.rules.test_differential import TERMS, FixedSource, Scene, scenes
from tests.salted import BUCKETS, SaltedStore
from tests.spark.local import EndlessEnvironment, LocalKit, PiecesEnvironment, local_kit
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.errors import ArchiveError, LeaseLost, StateError, StopRequested, StoreError, StoreUnavailable
from tms_core.rowkey import MessageKey
from tms_core.tables.base import (
    ALL_KEYS,
    KEYS,
    MESSAGES,
    PAYLOADS,
    KeyRange,
    KeyReads,
    MessageValue,
    Reads,
    Store,
    read_all,
)
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiries, MemorySide
from tms_core.topic import TopicId

DEAD = pointer(NOW_MS - 2 * DAY)
USUAL = Terms(0, (), LIFETIME, True, 60)


def figures(report: Report) -> dict[str, Any]:
    """Return the comparable part of a report."""
    found = pack(report)
    measured = ("duration_seconds", "phase_seconds", "store_calls", "seeks_spared", "store_bytes")
    left_out = ("id", "mode", "errors", *measured)
    topics = [{name: value for name, value in entry.items() if name != "sample_keys"} for entry in found["topics"]]
    return {**{name: value for name, value in found.items() if name not in left_out}, "topics": topics}


def rows_of(store: Reads) -> tuple[Any, Any]:
    return every(store.message, MESSAGES), every(store.payload, PAYLOADS)


def adopted(scene: Scene) -> tuple[SaltedStore, SqliteState]:
    """Return a store with the rows of a scene, and the state of a janitor that has adopted the store."""
    store, state = SaltedStore(), SqliteState.in_memory()
    scene.fill(store)
    state.save_store(StoreRecord("mark", store.identity(), adopted_ms=0))
    state.save_frontiers(scene.records)
    return store, state


@pytest.mark.no_cover
@given(scenes(), st.integers(1, 7))
@settings(max_examples=settings().max_examples // 2)
def test_tasks_on_random_store_match_one_process(scene: Scene, batch_rows: int) -> None:
    outcomes = []
    for on_tasks in (True, False):
        store, state = adopted(scene)
        clock, source = ManualClock(scene.now_ms), FixedSource(scene.snapshot) if scene.snapshot else None
        options: dict[str, Any] = {"token_hex": lambda n: "0" * n, "batch_rows": batch_rows, "side": scene.side()}
        if on_tasks:
            kit = local_kit(store, source, terms=TERMS, state=state, clock=clock, **options)
            planned, report = kit.engine.plan().report, kit.engine.run_once()
        else:
            engine = FileEngine(store, state, source, clock, TERMS, **options)
            planned, report = engine.preview(), engine.run_once()
        ledger = sorted((replace(entry, at_ms=0, run_id="") for entry in state.ledger(1000)), key=repr)
        outcomes.append(
            (rows_of(store), figures(planned), figures(report), ledger, state.evidence(), state.frontiers())
        )
        assert not report.errors
    assert outcomes[0] == outcomes[1]


@pytest.mark.no_cover
@given(scenes(), st.data())
@settings(max_examples=settings().max_examples // 2)
def test_sweep_of_randomly_cut_salts_matches_one_process(scene: Scene, data: st.DataObject) -> None:
    cuts = sorted(set(data.draw(st.lists(st.sampled_from([b"a:t1:", *scene.messages, *scene.payloads]), max_size=3))))

    def cut(run: Run) -> list[tuple[Part, Reads]]:
        ranges = [within for [within] in between([ALL_KEYS], cuts)]
        found = [(salt, part, within) for salt, part in enumerate(run.store.parts()) for within in ranges]
        return [
            (Part(run, at, salt, (within, within)), RangedReads(part, [within], [within]))
            for at, (salt, part, within) in enumerate(found)
        ]

    outcomes = []
    for on_tasks in (True, False):
        store, state = adopted(scene)
        clock, source = ManualClock(scene.now_ms), FixedSource(scene.snapshot) if scene.snapshot else None
        options: dict[str, Any] = {"token_hex": lambda n: "0" * n, "batch_rows": 3, "side": scene.side()}
        if on_tasks:
            kit = local_kit(store, source, terms=TERMS, state=state, clock=clock, cut=cut, **options)
            report = kit.engine.run_once()
        else:
            report = FileEngine(store, state, source, clock, TERMS, **options).run_once()
        assert not report.errors
        covered = remainder(ALL_KEYS, [KeyRange(item.start, item.stop) for item in state.evidence()])
        outcomes.append((rows_of(store), without_bytes(figures(report)), covered, state.boundary(), state.frontiers()))
    assert outcomes[0] == outcomes[1]


def test_parts_without_rows_get_no_task_and_no_rate_share() -> None:
    store = SaltedStore()
    topic(store, "default:orders", ttl_seconds=3600).plain(NOW_MS - 2 * HOUR)
    kit = kit_on(store, rows_per_second=400)
    assert not kit.engine.run_once(adopt=True).errors
    [deleting] = kit.sender.sent
    assert (deleting.step, deleting.run.terms.rows_per_second) == ("message", 400)


@pytest.mark.no_cover
@given(scenes(), st.data())
@settings(max_examples=settings().max_examples // 2)
def test_plan_of_randomly_cut_pieces_matches_one_process(scene: Scene, data: st.DataObject) -> None:
    store = MemoryStore()
    scene.fill(store)
    cuts = data.draw(st.lists(st.sampled_from([b"", b"a:t1:", *scene.messages, *scene.payloads]), max_size=4))
    edges = [b"", *sorted(set(cuts) - {b""})]
    pieces = [KeyRange(*pair) for pair in zip(edges, [*edges[1:], None], strict=True)]

    def cut(run: Run) -> list[tuple[Part, Reads]]:
        return [
            (Part(run, at, None, (one, one)), RangedReads(run.store, [one], [one])) for at, one in enumerate(pieces)
        ]

    state, clock = SqliteState.in_memory(), ManualClock(scene.now_ms)
    state.save_store(StoreRecord("mark", store.identity(), adopted_ms=0))
    state.save_frontiers(scene.records)
    source = FixedSource(scene.snapshot) if scene.snapshot else None
    environment = PiecesEnvironment(store, state, clock)
    options: dict[str, Any] = {"batch_rows": 3, "side": scene.side()}
    kit = local_kit(store, source, terms=TERMS, state=state, clock=clock, cut=cut, environment=environment, **options)
    whole = FileEngine(store, state, source, clock, TERMS, token_hex=lambda n: "0" * n, **options)
    assert without_bytes(figures(kit.engine.plan().report)) == without_bytes(figures(whole.preview()))


def without_bytes(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without sizes and their sum: they are estimated per batch, and batches end where pieces do."""
    topics = [{name: value for name, value in entry.items() if name != "bytes"} for entry in report["topics"]]
    return {name: value for name, value in report.items() if name != "deleted_bytes"} | {"topics": topics}


def filled() -> SaltedStore:
    """Return a store with expired and live rows in each part."""
    store = SaltedStore()
    orders = topic(store, "default:orders", ttl_seconds=3600)
    orders.plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 200), *range(NOW_MS - MINUTE, NOW_MS - MINUTE + 20))
    orders.tx(DEAD, *range(NOW_MS - MINUTE, NOW_MS - MINUTE + 20))
    orders.stored(DEAD, *range(NOW_MS - 2 * DAY, NOW_MS - 2 * DAY + 40))
    topic(store, "default:retired", ttl_seconds=3600, generation=-1).plain(*range(NOW_MS, NOW_MS + 40))
    return store


def swept(store: Store) -> tuple[Any, Any]:
    """Return the rows that one process keeps."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    FileEngine(
        store, SqliteState.in_memory(), Snapshots(clock, [DEAD]), clock, USUAL, token_hex=lambda n: "0" * n
    ).run_once(adopt=True)
    return rows_of(store)


def kit_on(store: Store, **options: Any) -> LocalKit:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    return local_kit(store, Snapshots(clock, [DEAD]), terms=USUAL, clock=clock, **{"batch_rows": 20, **options})


def run_of(kit: LocalKit) -> Run:
    """Return the run of a full plan of the store."""
    return make_run(kit.engine.deps, prepare(kit.engine.deps), kind="full")


def test_duplicate_tasks_delete_once_and_are_in_the_ledger() -> None:
    kit = kit_on(filled())
    kit.sender.times = 2
    report = kit.engine.run_once(adopt=True)
    assert rows_of(kit.store) == swept(filled())
    assert not report.errors
    entries = kit.state.ledger(100)
    assert {entry.rows for entry in entries} == {None}, "the number of rows that the first attempts deleted is unknown"
    assert {(str(entry.topic), entry.table) for entry in entries} == {
        ("default:orders", "message"),
        ("default:orders", "payload"),
        ("default:retired", "message"),
    }
    assert kit.state.intents() == []
    [run] = kit.state.runs(10)
    assert run.result == "done"


def test_killed_duplicate_task_is_in_the_ledger() -> None:
    store, expiries = filled(), Expiries(MemorySide())
    early = MessageKey(TopicId("default", "orders"), 1, NOW_MS - MINUTE, 0).pack()
    expiries.put([(early, NOW_MS)])
    kit = kit_on(store, side=expiries._table)

    killing: list[bool] = []

    def kill(call: Any) -> None:
        if killing and call.name == "message.delete":
            raise KeyboardInterrupt

    def duplicate(part: Part) -> None:
        if part.step == "message" and part.number == 1:
            killing.append(True)
            with pytest.raises(KeyboardInterrupt):
                perform(kit.sender.environment, part, 1)
            killing.clear()

    watch(store, after=kill)
    kit.sender.before = duplicate
    assert not kit.engine.run_once(adopt=True).errors
    lost = [entry for entry in kit.state.ledger(100) if entry.rows is None]
    assert [(str(entry.topic), entry.table, entry.rule) for entry in lost] == [("default:orders", "message", "expired")]
    assert lost[0].start < early, "the driver knows the number of rows that it deleted itself"


def test_permanently_failed_task_fails_the_run() -> None:
    kit = kit_on(filled())

    def fail(part: Part) -> None:
        if part.step == "payload" and part.number == 2:
            raise StoreUnavailable("HBase does not answer.")

    kit.sender.before = fail
    with pytest.raises(StoreUnavailable):
        kit.engine.run_once(adopt=True)
    [run] = kit.state.runs(10)
    assert run.result == "failed"
    entries = [entry for entry in kit.state.ledger(100) if str(entry.topic) == "default:orders"]
    figures = {(entry.table, entry.rule, entry.rows) for entry in entries}
    assert figures >= {("message", "expired", 200)}, figures
    assert {rows for table, _, rows in figures if table == "payload"} == {None}
    kit.sender.before = lambda *_: None
    kit.engine.run_once()
    assert rows_of(kit.store) == swept(filled())


def test_task_with_failing_store_names_its_part() -> None:
    kit = kit_on(filled())

    store = kit.store.parts()[1]
    watch(store, raising(StoreUnavailable("HBase does not answer.", "Start it.")))
    environment = PiecesEnvironment(store, kit.state, kit.clock)
    with pytest.raises(StoreUnavailable, match=r"part 1 \(salt 7\) .*HB"):
        perform(environment, Part(run_of(kit), 1, 7), 0)


def test_task_with_changed_topic_plans_it_again() -> None:
    store = filled()
    kit = kit_on(store)
    orders = topic(store, "default:orders", ttl_seconds=3600)

    def lengthen(part: Part) -> None:
        if part.step == "message" and part.number == 3 and not part.run.patterns:
            orders.describe(ttl_seconds=86_400)

    def count_rows() -> list[int]:
        stop = topic_stop(orders.id.prefix)
        return [len(part.message.read(KEYS, orders.id.prefix, stop, 1000).items) for part in store.parts()]

    before = count_rows()
    kit.sender.before = lengthen
    assert not kit.engine.run_once(adopt=True).errors
    assert [part.number for part in kit.sender.sent if part.run.patterns] == [3]
    assert count_rows()[3] == before[3], "the rows are live by the new ttl"
    assert sum(count_rows()[:3]) < sum(before[:3]), "the rows were expired before the change"
    assert topic(store, "default:retired", ttl_seconds=1, generation=-1).times() == []


def test_constantly_changing_topic_is_left_for_the_next_run() -> None:
    store = filled()
    kit = kit_on(store)
    orders = topic(store, "default:orders", ttl_seconds=3600)
    ttls = iter(range(3600, 4000))

    def change(*_: object) -> None:
        orders.describe(ttl_seconds=next(ttls))

    kit.sender.before = change
    report = kit.engine.run_once(adopt=True)
    assert any("default:orders: its metadata" in error for error in report.errors)
    assert kit.state.runs(1)[0].result == "partial"


def test_pause_during_tasks_stops_deletes() -> None:
    kit = kit_on(filled())
    before = rows_of(kit.store)
    kit.sender.before = lambda *_: kit.state.pause("default:*", NOW_MS)
    kit.engine.run_once(adopt=True)
    assert rows_of(kit.store) == before


def test_task_without_state_fails_the_run_without_evidence() -> None:
    kit = kit_on(filled())
    closed = SqliteState.in_memory()
    closed.close()

    def forget(part: Part) -> None:
        broken = part.step == "invert" and part.number == 2
        kit.sender.environment.state = closed if broken else kit.state

    kit.sender.before = forget
    with pytest.raises((StoreError, StateError)):
        kit.engine.run_once(adopt=True)
    assert kit.sender.sent[-1].step == "invert", "the run stops after this step"
    parts = {bytes([number]) for number in range(4)}
    assert [item for item in kit.state.evidence() if item.start in parts] == [], "evidence of gaps between parts only"
    assert [run.result for run in kit.state.runs(10)] == ["failed"]


def test_task_that_loses_the_lease_stops_the_run() -> None:
    store, state, clock = filled(), SqliteState.in_memory(), ManualClock(NOW_MS, monotonic_ms=DAY)
    lease = Lease(state, "first", 60, clock)
    lease.acquire()
    kit = kit_on(store, state=state, lease=lease)

    def lose(part: Part) -> None:
        if part.number == 2:
            Lease(state, "second", 60, clock).acquire(sole=True)

    kit.sender.before = lose
    before = [len(part.message.read(KEYS, b"", None, 1000).items) for part in store.parts()]
    report = kit.engine.run_once(adopt=True)
    after = [len(part.message.read(KEYS, b"", None, 1000).items) for part in store.parts()]
    assert [note.guard for note in report.guards] == ["lease"]
    assert after[2:] == before[2:]
    assert all(rows < rows_before for rows, rows_before in zip(after[:2], before[:2], strict=True))


def test_task_of_a_finished_run_deletes_nothing() -> None:
    kit = kit_on(filled())
    kit.engine.run_once(adopt=True)
    late = topic(kit.store, "default:orders", ttl_seconds=3600).plain(NOW_MS - 3 * HOUR)
    before = rows_of(kit.store)
    for part in kit.sender.sent:
        outcome = perform(kit.sender.environment, part, 1)
        assert outcome.entries == {}
        if part.step == "message" and late.times():
            assert outcome.ended is None or isinstance(outcome.ended, LeaseLost)
    assert rows_of(kit.store) == before


def test_followed_lease_accepts_only_the_lease_of_its_run() -> None:
    state, clock = SqliteState.in_memory(), ManualClock(NOW_MS)
    lease = Lease(state, "driver", 60, clock)
    lease.acquire()
    record = RunRecord("run", "apply", NOW_MS, heartbeat_ms=NOW_MS)
    state.begin_run(record)
    held = LeaseRecord.parse(state.lease())
    assert held is not None
    run = replace(run_of(kit_on(filled())), record=record, lease=held)
    followed = FollowedLease(state, run, clock)
    followed.check()
    lease.renew()
    followed.check()
    clock.advance(40_000)
    followed.renew_if_due()
    FollowedLease(state, replace(run, lease=None), clock).check()
    with pytest.raises(LeaseLost, match="lease of this task's run"):
        FollowedLease(state, replace(run, lease=replace(held, fence=held.fence + 1)), clock).check()
    state.finish_run(RunRecord("run", "apply", 1, NOW_MS, "done"))
    with pytest.raises(LeaseLost, match="has finished"):
        followed.check()


def test_stop_request_cancels_running_tasks(spark: SparkSession, tmp_path: Path) -> None:
    kit = kit_on(filled())
    mark = tmp_path / "at-work"
    part = Part(run_of(kit), 0, 0)

    def keep_alive() -> None:
        if mark.exists():
            raise StopRequested("the run was asked to stop.")

    sender = SparkSender(spark, EndlessEnvironment(str(mark)))
    with pytest.raises(StopRequested):
        sender.send([part], keep_alive)
    assert spark.range(3).count() == 3


def test_rate_limit_is_divided_among_tasks() -> None:
    kit = kit_on(filled(), rows_per_second=400)
    started_ms = kit.clock.monotonic_ms()
    report = kit.engine.run_once(adopt=True)
    rows = sum(report.total(rule) for rule in Rule)
    shares = {step: [part.run.terms.rows_per_second for part in kit.sender.sent if part.step == step] for step in STEPS}
    assert len(shares["message"]) == BUCKETS
    for found in shares.values():
        assert found == [400 / len(found)] * len(found)
    # Tasks run one after the other here, so each task waits for its share of the rate.
    fastest = 400 / min(map(len, filter(None, shares.values())))
    assert kit.clock.monotonic_ms() - started_ms >= rows / fastest * 1000 - 100


def test_tasks_archive_every_deleted_row_once(tmp_path: Path) -> None:
    kit = kit_on(filled())
    kit.sender.environment.make_archive = ParquetArchive(tmp_path, kit.clock).begin
    before = {key for table in rows_of(kit.store) for key, _ in table}
    report = kit.engine.run_once(adopt=True)
    after = {key for table in rows_of(kit.store) for key, _ in table}
    files = sorted(tmp_path.rglob("*.parquet"))
    kept = [key for path in files for rows in read(path, ["key"]) for (key,) in rows]
    assert len(kept) == len(set(kept))
    assert set(kept) == before - after
    assert {summarize(path).run_id for path in files} == {report.id}


def test_crash_before_delete_leaves_rows_archived_and_stored(tmp_path: Path) -> None:
    kit = kit_on(filled())
    kit.sender.environment.make_archive = ParquetArchive(tmp_path, kit.clock).begin
    before = rows_of(kit.store)

    def crash(call: Any) -> None:
        if call.name == "message.delete":
            raise KeyboardInterrupt

    watch(kit.store, crash)
    with pytest.raises(KeyboardInterrupt):
        kit.engine.run_once(adopt=True)
    assert rows_of(kit.store) == before
    archived = {key for path in tmp_path.rglob("*.parquet") for rows in read(path, ["key"]) for (key,) in rows}
    assert archived


def test_tasks_with_full_archive_delete_nothing() -> None:
    class FullArchive:
        def save(self, *_: Any) -> Any:
            raise ArchiveError("the disk is full.")

    kit = kit_on(filled())
    kit.sender.environment.make_archive = lambda *_: FullArchive()
    before = {key for table in rows_of(kit.store) for key, _ in table}
    report = kit.engine.run_once(adopt=True)
    assert {key for table in rows_of(kit.store) for key, _ in table} == before
    assert any("archived" in error for error in report.errors)


def test_shares_of_leveldb_store_cover_each_key_once(place: Path) -> None:
    with LevelDBStore(place, create=True) as store:
        made = topic(store, "default:orders", ttl_seconds=3600)
        bodies = random.Random(7)
        for start in range(0, 20_000, 5000):
            made.store.message.put(
                [
                    (MessageKey(made.id, 1, NOW_MS + at, 0).pack(), MessageValue(None, bodies.randbytes(40)))
                    for at in range(start, start + 5000)
                ]
            )
        made.stored(DEAD, NOW_MS)
    options = SourceOptions.parse({"leveldb": str(place)}, {})
    with options.access.reading() as cloned:
        shares = cutter(options.access, 4)(replace(run_of(kit_on(filled())), store=cloned))
        assert len(shares) == 4
        keys = [key for _, part in shares for key in every_key(part.message)]
        assert keys == every_key(cloned.message)
        assert [key for _, part in shares for key in every_key(part.payload)] == every_key(cloned.payload)


def every_key(table: KeyReads) -> list[bytes]:
    return read_all(table, KEYS, b"", None).items
