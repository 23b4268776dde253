"""Sweeps and reads on Spark with a real HBase, compared with one process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import happybase
import pytest
from pyspark.sql import SparkSession

from janitor.archive.parquet import summarize
from janitor.rules.policy import Rule
from janitor.settings import AllSettings, load
from janitor.spark import stats
from janitor.spark.access import Access
from janitor.spark.session import translated
from janitor.spark.source.options import SourceOptions
from janitor.spark.source.source import FilteringSource, RowReader
from janitor.spark.sweep.engine import SparkSender, cutter
from janitor.spark.sweep.task import StoreEnvironment, perform
from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.state.sqlite.state import SqliteState
from janitor.stats.topic_sizes import TopicSizeCounter
from janitor.sweep.run import NO_RUN, Run, Terms
from janitor.sweep.scan import Part
from janitor.sweep.transactions import TransactionView
from tests.builders import DAY, LIFETIME, NOW_MS, FileEngine, Snapshots, every, topic
from tests.hbase.conftest import hbase, hbase_tables
from tests.hbase.server import PATIENCE_SECONDS
from tests.hbase.sweep_kit import EXPIRED, INVALID, FilledStore
from tests.hbase.tables import Tables, write_config
from tests.kit.proxy import Conduct, Fault, Proxy
from tests.spark.local import LocalSender, on_spark
from tests.spark.test_parts import fill
from tests.spark.test_sweep import figures
from tms_core.clock import ManualClock
from tms_core.errors import LeaseLost, StoreNotFound, StoreUnavailable
from tms_core.tables.base import MESSAGES, PAYLOADS, Store
from tms_core.tables.hbase import pool as hbase_pool
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide
from tms_core.tables.lease import Lease
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId

__all__ = ["hbase", "hbase_tables"]

#: Processes start slowly on a busy machine.
pytestmark = pytest.mark.timeout(900)
USUAL = Terms(0, (), LIFETIME, True, 60)


@dataclass(frozen=True)
class Cluster:
    """The tables of one test and their access by tasks."""

    tables: Tables
    namespace: str
    thrift: str

    @property
    def access(self) -> Access:
        environment = {"TMS_STORAGE__HBASE__NAMESPACE": self.namespace, "TMS_STORAGE__HBASE__BUCKETS": "4"}
        return Access(load(None, environment, {"hbase": self.thrift}).settings)

    @contextmanager
    def opened(self) -> Iterator[tuple[Store, State]]:
        settings = self.tables.server.settings(self.namespace)
        with self.tables.open(self.namespace) as store, HBaseState(settings) as state:
            yield store, state


def make_cluster(tables: Tables) -> Cluster:
    return Cluster(tables, tables.make(), tables.server.thrift)


def with_archive(settings: AllSettings, folder: Path) -> AllSettings:
    archive = settings.janitor.archive.model_copy(update={"enabled": True, "path": str(folder)})
    return settings.model_copy(update={"janitor": settings.janitor.model_copy(update={"archive": archive})})


@dataclass(frozen=True)
class FirstAttemptsFail(StoreEnvironment):
    """An environment in which the first attempt of each task fails halfway."""

    folder: str = field(default="")

    @contextmanager
    def writing(self, part: Part) -> Iterator[tuple[Store, Store, State]]:
        with super().writing(part) as (store, whole, state):
            mark = Path(self.folder) / f"share-{part.number}"
            if not mark.exists():
                mark.touch()
                delete = store.message.delete

                def delete_and_fail(keys: Any, origin: Any = None) -> None:
                    delete(keys, origin)
                    raise SystemError("the task has failed")

                store.message.delete = delete_and_fail  # type: ignore[method-assign]
            yield store, whole, state


def test_spark_sweep_of_hbase_matches_sweep_of_one_process(spark: SparkSession, hbase_tables: Tables) -> None:
    outcomes = []
    for by_tasks in (True, False):
        made, clock = make_cluster(hbase_tables), ManualClock(NOW_MS, monotonic_ms=DAY)
        with made.opened() as (store, state):
            filled = FilledStore.fill(store)
            arguments = (store, state, Snapshots(clock, [INVALID]), clock, USUAL)
            options: dict[str, Any] = {"token_hex": lambda n: "0" * n, "batch_rows": 50}
            if by_tasks:
                sender, cut = SparkSender(spark, StoreEnvironment(made.access)), cutter(made.access, None)
                engine: Any = on_spark(*arguments, sender=sender, cut=cut, **options)
            else:
                engine = FileEngine(*arguments, **options)
            planned, report = engine.plan().report, engine.run_once(adopt=True)
            assert report.errors == []
            filled.check_live_rows()
            assert filled.is_swept
            [run] = state.runs(10)
            entries = {(str(e.topic), e.table, e.rule): (e.start, e.stop, e.rows) for e in state.ledger(100)}
            rows = every(store.message, MESSAGES), every(store.payload, PAYLOADS)
            outcomes.append((rows, figures(planned), figures(report), run.result, entries, len(state.evidence())))
    assert outcomes[0] == outcomes[1]


def test_failed_tasks_on_hbase_are_retried(spark: SparkSession, hbase_tables: Tables, tmp_path: Path) -> None:
    made, clock = make_cluster(hbase_tables), ManualClock(NOW_MS, monotonic_ms=DAY)
    with made.opened() as (store, state):
        filled = FilledStore.fill(store)
        environment = FirstAttemptsFail(made.access, str(tmp_path))
        engine = on_spark(
            *(store, state, Snapshots(clock, [INVALID]), clock, USUAL),
            sender=SparkSender(spark, environment),
            cut=cutter(made.access, None),
            token_hex=lambda n: "0" * n,
            batch_rows=20,
        )
        assert engine.run_once(adopt=True).errors == []
        assert filled.is_swept
        filled.check_live_rows()
        assert len(list(tmp_path.iterdir())) == 4
        assert None in {entry.rows for entry in state.ledger(100)}, "failed attempts had written their intents"
        assert [run.result for run in state.runs(10)] == ["done"]


def test_source_on_hbase_reads_all_salts(spark: SparkSession, hbase_tables: Tables, tmp_path: Path) -> None:
    made = make_cluster(hbase_tables)
    with made.opened() as (store, _):
        FilledStore.fill(store)
        counting = SqliteState.in_memory()
        TopicSizeCounter(store, counting, ManualClock(NOW_MS), rows_per_second=100_000).step()
        living = stats.existing_generations(store)
        stored = [key for key, _ in every(store.message, MESSAGES)]
        payloads = len(every(store.payload, PAYLOADS))
    spark.dataSource.register(FilteringSource)
    config = write_config(tmp_path / "hbase.yaml", hbase_tables.server.settings(made.namespace))
    source = spark.read.format("tms").options(config=str(config), now=str(NOW_MS))
    rows = source.load().collect()
    assert sorted(bytes(row.key) for row in rows) == stored
    assert {row.salt for row in rows} == {0, 1, 2, 3}
    assert source.option("sizes", "true").load().where("salt = 2 and payload_bytes = 4").count() == sum(
        row.salt == 2 for row in rows
    )
    assert source.option("table", "payload").load().count() == payloads

    counted = stats.count(spark, {"config": str(config)}, NOW_MS, TransactionView(None, NOW_MS, DAY))
    found = {one.topic: (one.rows, one.size_bytes) for one in counted if living.get(one.topic) == one.generation}
    kept = {name: (count.messages, count.size_bytes) for name, count in counting.counts().items() if count.messages}
    assert found == kept, "the result of the background count"


def test_source_on_unreachable_hbase_raises_store_unavailable(spark: SparkSession) -> None:
    spark.dataSource.register(FilteringSource)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"), translated():
        spark.read.format("tms").options(hbase="127.0.0.1:1").load().count()


def test_tasks_on_hbase_delete_only_during_their_run(hbase_tables: Tables, tmp_path: Path) -> None:
    made, clock = make_cluster(hbase_tables), ManualClock(NOW_MS, monotonic_ms=DAY)
    with made.opened() as (store, state):
        filled = FilledStore.fill(store)
        environment = StoreEnvironment(Access(with_archive(made.access.settings, tmp_path)))
        sender = LocalSender(environment)
        lease = Lease(state, "driver", 60, clock)
        lease.acquire()
        engine = on_spark(
            *(store, state, Snapshots(clock, [INVALID]), clock, USUAL),
            sender=sender,
            cut=cutter(made.access, None),
            token_hex=lambda n: "0" * n,
            batch_rows=50,
            lease=lease,
        )
        report = engine.run_once(adopt=True)
        assert report.errors == []
        assert filled.is_swept
        archived = sum(summarize(path).rows for path in tmp_path.rglob("*.parquet"))
        assert archived == report.total(Rule.EXPIRED) + report.total(Rule.OLD_GENERATION)
        late = filled.orders.plain(EXPIRED[0])
        ended = [perform(environment, part, 1) for part in sender.sent if part.step == "message"]
        assert {type(outcome.ended) for outcome in ended} == {LeaseLost}
        assert EXPIRED[0] in late.times()
        missing = replace(sender.sent[0], salt=200, run=replace(sender.sent[0].run, record=NO_RUN))
        assert perform(environment, missing, 0).entries == {}


def test_row_reader_on_hbase_returns_each_row_once(hbase_tables: Tables) -> None:
    made = make_cluster(hbase_tables)
    with made.opened() as (store, _):
        FilledStore.fill(store)
        stored = [key for key, _ in every(store.message, MESSAGES)]
    found = RowReader(SourceOptions(made.access, "message", now_ms=NOW_MS))
    rows = [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]
    assert sorted(row["key"] for row in rows) == stored
    assert {row["rule"] for row in rows} == {"expired", "live", "old_generation", "unknown_topic"}
    with made.access.reading() as store:
        shares = cutter(made.access, None)(cast(Run, SimpleNamespace(store=store, topics={})))
    assert [share.salt for share, _ in shares] == [0, 1, 2, 3]


def test_pieces_of_skewed_hbase_table_are_even(hbase_tables: Tables) -> None:
    made = make_cluster(hbase_tables)
    names = ["default:huge", *(f"default:tiny{number}" for number in range(10))]
    with made.opened() as (store, _):
        for name in names:
            fill(store, name, 1800 if name == "default:huge" else 20, lambda: b"body")
        stored = [key for key, _ in every(store.message, MESSAGES)]
    times = (NOW_MS, NOW_MS + 1800)
    for number, patterns, (from_ms, to_ms), tasks in [
        (None, (), (None, None), 4),
        (12, (), (None, None), 4),
        (12, (), times, 12),
        (12, tuple(names), times, 12),
        (12, ("*:huge", "*:tiny*"), times, 12),
    ]:
        options = SourceOptions(made.access, "message", patterns, from_ms, to_ms, NOW_MS, number)
        found = RowReader(options)
        parts = found.partitions()
        read = [[row["key"] for batch in found.read(part) for row in batch.to_pylist()] for part in parts]
        assert len(parts) == tasks
        assert sorted(key for keys in read for key in keys) == stored
        counts = list(map(len, read))
        assert max(counts) <= 3 * statistics.median(counts), counts


def test_source_on_hbase_uses_message_ttls(hbase_tables: Tables) -> None:
    made, times = make_cluster(hbase_tables), range(NOW_MS, NOW_MS + 20)

    def read() -> dict[int, str]:
        found = RowReader(SourceOptions(made.access, "message", now_ms=NOW_MS))
        batches = [batch for part in found.partitions() for batch in found.read(part)]
        return {row["publish_ms"]: row["rule"] for batch in batches for row in batch.to_pylist()}

    with made.opened() as (store, _):
        orders = topic(store, "default:orders", ttl_seconds=3600).plain(*times)
        keys = [key for key, _ in every(store.message, MESSAGES)]
    assert orders.id == TopicId("default", "orders")
    assert read() == dict.fromkeys(times, "live"), "the table of message ttls does not exist"
    pool = HBasePool([hbase_tables.server.thrift], timeout_seconds=PATIENCE_SECONDS)
    with HBaseSide(pool, made.namespace) as side:
        Expiries(side).put((key, NOW_MS + number - 10) for number, key in enumerate(keys))
    assert read() == {ms: "expired" if ms <= NOW_MS + 10 else "live" for ms in times}


def test_task_on_hbase_with_broken_connection_names_its_salt(
    hbase_tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hbase_pool, "PAUSES_SECONDS", (0.0, 0.0))
    made = make_cluster(hbase_tables)
    with made.opened() as (store, _):
        fill(store, "default:orders", 800, lambda: b"body")
    with Proxy(hbase_tables.server.thrift) as proxy:
        access = replace(made, thrift=proxy.address).access
        found = RowReader(SourceOptions(access, "message", now_ms=NOW_MS))
        part = found.partitions()[-1]
        # After the calls that open the store, in the middle of the rows.
        proxy.treat(lambda _: Conduct(down=Fault("cut", after_bytes=4000)))
        with pytest.raises(StoreUnavailable, match="salt 3"):
            list(found.read(part))
        assert proxy.struck


def test_query_of_deleted_hbase_table_names_the_salt(spark: SparkSession, hbase_tables: Tables, tmp_path: Path) -> None:
    made = make_cluster(hbase_tables)
    with made.opened() as (store, _):
        FilledStore.fill(store)
    config = write_config(tmp_path / "hbase.yaml", hbase_tables.server.settings(made.namespace))
    spark.dataSource.register(FilteringSource)
    rows = spark.read.format("tms").options(config=str(config), now=str(NOW_MS)).load().where("salt = 1")
    assert rows.collect(), "the query is planned, and reads again below"
    host, port = hbase_tables.server.thrift.split(":")
    witness: Any = happybase.Connection(host, int(port), timeout=int(PATIENCE_SECONDS * 1000))
    with closing(witness):
        witness.delete_table(f"{made.namespace}:tms.message", disable=True)
    with pytest.raises(StoreNotFound, match="salt 1"), translated():
        rows.collect()
