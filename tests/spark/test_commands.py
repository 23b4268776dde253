"""``janitor spark`` as one types it, on a store in LevelDB."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from janitor.cli import spark as commands
from janitor.spark import session as on
from janitor.spark.stats import GenerationStats
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, every, pointer, topic
from tests.janitor.cli.conftest import INVALID, SETTINGS, Site
from tms_core.clock import ManualClock
from tms_core.tables.leveldb import LevelDBStore
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spark: SparkSession
) -> Iterator[Site]:
    """A store with something of everything, its settings, and Spark."""
    assert array("q", [INVALID])
    assert spark.version
    monkeypatch.chdir(tmp_path)
    made = Site(tmp_path, ManualClock(NOW_MS, running_ms=DAY), capsys)
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


def rows(store: Path) -> Any:
    with LevelDBStore(store) as opened:
        return every(opened.message.rows), every(opened.payload.rows)


def test_given_a_store_when_swept_on_spark_then_report_and_rows_are_those_of_a_run(desk: Site) -> None:
    twin = desk.folder / "twin"
    shutil.copytree(desk.folder / "data", twin / "data")
    (twin / "janitor.yaml").write_text(SETTINGS, encoding="utf-8")

    planned = desk.janitor("plan --format json").json
    on_spark = desk.janitor("spark sweep --dry-run --partitions 2 --format json").json
    for report in (planned, on_spark):
        for name in ("id", "duration_seconds", "phase_seconds", "store_calls", "seeks_spared"):
            del report[name]
    assert on_spark == planned

    refused = desk.janitor("spark sweep")
    assert refused.code == 3
    swept = desk.janitor("spark sweep --adopt --format json")
    assert (swept.code, swept.json["mode"]) == (0, "apply")
    assert swept.json["totals"] == planned["totals"] | {"kept": swept.json["totals"]["kept"]}
    assert desk.run(f"run --once --adopt --config {twin}/janitor.yaml").code == 0
    assert rows(desk.store) == rows(twin / "data" / "messaging")
    assert "run" in desk.janitor("spark sweep").out


def test_given_a_store_that_is_held_when_swept_then_it_says_so_or_skips(desk: Site) -> None:
    with LevelDBStore(desk.store):
        assert desk.janitor("spark sweep --adopt").code == 4
        skipped = desk.janitor("spark sweep --adopt --skip-if-locked")
    assert (skipped.code, skipped.err.startswith("skipped:")) == (0, True)


def test_given_a_janitor_that_only_plans_when_swept_then_it_only_plans(desk: Site) -> None:
    desk.set(SETTINGS.replace("janitor: {", "janitor: {apply: false, "))
    before = rows(desk.store)
    planned = desk.janitor("spark sweep --adopt")
    assert (planned.code, rows(desk.store)) == (0, before)
    assert "only a plan" in planned.err
    assert planned.out.startswith("plan ")


def test_given_a_store_when_counted_on_spark_then_it_is_shown_kept_and_written(desk: Site) -> None:
    shown = desk.janitor("spark stats --remember --out out")
    assert shown.code == 0
    assert "default:orders" in shown.out
    assert "/out/day=2023-11-14" in shown.out
    assert list((desk.folder / "out" / "day=2023-11-14").glob("*.parquet"))
    counted = desk.janitor("spark stats --topic 'default:o*' --what-if ttl=1h --format json").json
    [orders] = counted["topics"]
    [then] = counted["what_if"]["topics"]
    assert (orders["overdue"]["expired"], then["overdue"]["expired"]) == (3, 4)


def test_given_two_policies_when_shown_then_the_difference_stands_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overdue = {"expired": 3, "old_generation": 0}
    now = GenerationStats(TopicId("default", "orders"), 1, rows=9, overdue=overdue)
    commands.show([now], [replace(now, overdue={**overdue, "expired": 7})], NOW_MS)
    assert re.search(r"orders .* 3 .* 7 +\+4", capsys.readouterr().out)
    commands.show([], None, NOW_MS)
    assert "nothing lies in this store" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("spark stats --what-if ttl=soon", "is no policy"),
        ("spark stats --what-if ttl=1d --remember", "--remember"),
        ("spark stats --leveldb nothing-here", "nothing-here"),
        ("spark sweep --leveldb nothing-here", "nothing-here"),
    ],
)
def test_given_what_cannot_be_done_when_typed_then_it_says_why(line: str, message: str, desk: Site) -> None:
    found = desk.run(line)
    assert found.code in (1, 2)
    assert message in found.err


def test_given_no_pyspark_when_typed_then_the_hint_installs_it(desk: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "find_spec", lambda _: None)
    for verb in ("stats", "sweep"):
        found = desk.janitor(f"spark {verb}")
        assert found.code == 2
        assert "Install tms-janitor[spark]" in found.err
    assert "pyspark" in sys.modules
