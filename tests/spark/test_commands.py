"""The command ``janitor spark`` on a store in LevelDB."""

from __future__ import annotations

import logging
import shutil
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
from pyspark.sql import SparkSession

from janitor.app.exporter import Exporter
from janitor.app.leveldb_place import LevelDBPlace
from janitor.app.session import Session
from janitor.cli import spark
from janitor.metrics import Metrics
from janitor.settings import load
from janitor.spark import session as on
from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from janitor.status.collect import Deployment as Shown
from janitor.sweep.run import Terms
from tests.builders import DAY, HOUR, LIFETIME, MINUTE, NOW_MS, every, pointer, topic
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit
from tms_core.clock import ManualClock
from tms_core.tables.base import MESSAGES, PAYLOADS, Reads
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId


@pytest.fixture
def kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spark: SparkSession
) -> Iterator[CommandKit]:
    assert array("q", [INVALID])
    assert spark.version
    monkeypatch.chdir(tmp_path)
    made = CommandKit(tmp_path, ManualClock(NOW_MS, monotonic_ms=DAY), capsys)
    made.store.mkdir(parents=True)
    (tmp_path / "data" / "tx").mkdir()
    with LevelDBStore(made.store, create=True) as store:
        orders = topic(store, "default:orders", ttl_seconds=86400)
        orders.plain(NOW_MS - 3 * DAY, NOW_MS - 2 * DAY, NOW_MS - MINUTE).tx(INVALID, NOW_MS - 3 * HOUR)
        orders.stored(pointer(NOW_MS - 3 * DAY), NOW_MS - 3 * DAY)
        topic(store, "default:retired", ttl_seconds=86400, generation=-1).plain(NOW_MS - HOUR)
    made.snapshot()
    made.set(SETTINGS)
    loggers = [logging.getLogger(name) for name in ("", "janitor", "tms_core")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield made
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


ORDERS = TopicId("default", "orders")


def exported(kit: CommandKit) -> str:
    state = kit.folder / "data" / "janitor"
    deployment = Shown("store", "apply", "", Terms(3600, (), LIFETIME, True, 60))
    exporter = Exporter(LevelDBPlace(state, state), deployment, Metrics("top", 10), kit.clock)
    exporter.refresh()
    return exporter.metrics()[0].decode()


def rows(store: Path) -> Any:
    with LevelDBStore(store) as opened:
        return every(opened.message, MESSAGES), every(opened.payload, PAYLOADS)


def test_spark_sweep_has_same_report_and_state_as_a_run(kit: CommandKit) -> None:
    twin = kit.folder / "twin"
    shutil.copytree(kit.folder / "data", twin / "data")
    (twin / "janitor.yaml").write_text(SETTINGS, encoding="utf-8")

    planned = kit.janitor("plan --format json").json
    on_spark = kit.janitor("spark sweep --dry-run --partitions 2 --format json").json
    for report in (planned, on_spark):
        for name in ("id", "duration_seconds", "phase_seconds", "store_calls", "seeks_spared"):
            del report[name]
    assert on_spark == planned

    assert kit.janitor("spark sweep").code == 3
    swept = kit.janitor("spark sweep --adopt --format json")
    single = kit.run(f"run --once --adopt --config {twin}/janitor.yaml --format json")
    assert (swept.code, single.code) == (0, 0)
    for name in ("mode", "totals", "boundary"):
        assert swept.json[name] == single.json[name]
    assert rows(kit.store) == rows(twin / "data" / "messaging")
    states = []
    for folder in (kit.folder, twin):
        with SqliteState(folder / "data" / "janitor") as state:
            runs = [run.result for run in state.runs(10) if run.mode == "apply"][:1]
            states.append((state.frontiers(), len(state.evidence()), runs, state.last_full_pass_ms(), state.intents()))
    assert states[0] == states[1]

    # The exporter of the state shows the run.
    assert kit.janitor("spark stats").code == 0
    text = exported(kit)
    assert 'tms_janitor_sweeps_total{result="done"} 1.0' in text
    assert 'tms_janitor_rows_deleted_total{rule="expired",table="message"} 2.0' in text
    assert 'tms_janitor_last_success_timestamp_seconds{table="message"} 1.7e+09' in text
    assert "tms_janitor_orphan_payload_rows 0.0" in text
    status = kit.janitor("status --format json").json
    assert status["last_run"]["id"] == swept.json["id"]
    assert status["statistics"]["counted_ms"] == NOW_MS
    assert "payloads without a message" in kit.janitor("status").out


def test_spark_sweep_with_an_archive_can_be_listed_and_restored(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: data/archive}, "))
    before = rows(kit.store)
    assert kit.janitor("spark sweep --adopt").code == 0
    listed = kit.janitor("archive list --format json").json["archived"]
    counts = [(group["topic"], group["messages"], group["payloads"]) for group in listed]
    assert counts == [("orders", 2, 1), ("retired", 1, 0)]
    frame = pandas.concat(pandas.read_parquet(path) for path in (kit.folder / "data" / "archive").rglob("*.parquet"))
    after = rows(kit.store)
    deleted = {key for one, other in zip(before, after, strict=True) for key in dict(one).keys() - dict(other)}
    assert set(frame["key"]) == deleted
    assert kit.janitor("pause default:orders").code == 0
    assert kit.janitor("archive restore default:orders").code == 0
    assert {key for key, _ in rows(kit.store)[0]} == {key for key, _ in before[0] if b"retired" not in key}


def test_spark_sweep_of_store_in_use_fails_or_skips(kit: CommandKit) -> None:
    with LevelDBStore(kit.store):
        assert kit.janitor("spark sweep --adopt").code == 4
        skipped = kit.janitor("spark sweep --adopt --skip-if-locked")
    assert (skipped.code, skipped.err.startswith("skipped:")) == (0, True)


def test_spark_sweep_waits_for_the_lease(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, lease = [], Session.lease

    def watched(
        self: Session, state: State, store: Reads, standby: Event | None = None, until: Event | None = None
    ) -> Any:
        requests.append((standby, until is not None))
        return lease(self, state, store, standby, until)

    monkeypatch.setattr(Session, "lease", watched)
    assert kit.janitor("spark sweep --adopt").code == 0
    assert requests == [(None, True)]


def test_spark_sweep_with_apply_false_only_plans(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {apply: false, "))
    before = rows(kit.store)
    planned = kit.janitor("spark sweep --adopt")
    assert (planned.code, rows(kit.store)) == (0, before)
    assert "janitor.apply is false" in planned.err
    assert planned.out.startswith("plan ")


def test_spark_sweep_loads_the_settings_once(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path | None] = []

    def load_settings(file: Path | None, *arguments: Any) -> Any:
        loaded.append(file)
        return load(file, *arguments)

    monkeypatch.setattr("janitor.app.session.load", load_settings)
    assert kit.janitor("spark sweep --dry-run").code == 0
    assert len(loaded) == 1


def test_spark_stats_are_shown_and_written(kit: CommandKit) -> None:
    shown = kit.janitor("spark stats --remember --out out")
    assert shown.code == 0
    assert "default:orders" in shown.out
    assert "/out/day=2023-11-14" in shown.out
    assert list((kit.folder / "out" / "day=2023-11-14").glob("*.parquet"))
    [orders] = kit.janitor("spark stats --topic 'default:o*' --format json").json["topics"]
    assert orders["overdue"]["expired"] == 3


def test_spark_stats_of_a_topic_keep_counts_of_other_topics(kit: CommandKit) -> None:
    with LevelDBStore(kit.store) as store:
        topic(store, "default:other", ttl_seconds=86400).plain(NOW_MS)
    assert kit.janitor("spark stats --topic 'default:o*'").code == 0
    assert kit.janitor("spark stats --topic default:orders").code == 0
    with SqliteState(kit.folder / "data" / "janitor") as state:
        counted = {str(name): count.messages for name, count in state.counts().items()}
        assert counted == {"default:orders": 4, "default:other": 1}
        assert state.note("statistics") is None, "statistics are about the whole store"


def test_stats_of_empty_store_report_it_as_empty(capsys: pytest.CaptureFixture[str]) -> None:
    spark.show_stats([], NOW_MS)
    assert "empty" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["stats", "sweep"])
def test_spark_command_with_missing_store_names_it(verb: str, kit: CommandKit) -> None:
    found = kit.run(f"spark {verb} --leveldb nothing-here")
    assert found.code in (1, 2)
    assert "nothing-here" in found.err


def test_spark_command_without_pyspark_names_the_extra(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "find_spec", lambda _: None)
    for verb in ("stats", "sweep"):
        found = kit.janitor(f"spark {verb}")
        assert found.code == 2
        assert "pip install '.[spark]'" in found.err
    assert "pyspark" in sys.modules
