"""Values of runs, topics, consumers, holds and guards are equal in JSON, API, metrics and page."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from janitor.app.exporter import Exporter
from janitor.app.leveldb_place import LevelDBPlace
from janitor.metrics import Metrics
from janitor.state.base import TopicCount
from janitor.state.figures import CONSUMERS, ConsumerFigures
from janitor.state.sqlite.state import SqliteState
from janitor.status.collect import Deployment
from janitor.sweep.run import Terms
from tests.builders import HOUR, LIFETIME, MINUTE, NOW_MS, topic
from tests.janitor.cli.conftest import CommandKit
from tests.janitor.http.conftest import Direct
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

ORDERS = {"tms_namespace": "default", "topic": "orders"}


class Shown(NamedTuple):
    status: Any
    api: Any
    detail: Any
    api_detail: Any
    history: Any
    api_runs: Any
    page: str
    metrics: dict[str, list[tuple[dict[str, str], float]]]

    def metric(self, name: str, **labels: str) -> float:
        found = self.metrics[f"tms_{name}"]
        return sum(value for given, value in found if labels.items() <= given.items())


@pytest.fixture
def shown(kit: CommandKit) -> Shown:
    """A store with a finished run, rows that are held, a counted topic and a consumer; the last run was stopped."""
    assert kit.janitor("run --once --adopt").code == 0
    with LevelDBStore(kit.store) as store:
        topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS - 2 * HOUR)
    assert kit.janitor("run --once").code == 0
    state_folder = kit.folder / "data/janitor"
    with SqliteState(state_folder) as state:
        state.save_counts({TopicId("default", "orders"): TopicCount(3, 70, NOW_MS - HOUR, NOW_MS - MINUTE, NOW_MS)})
        lag = ConsumerFigures(
            tms_namespace="default",
            topic="orders",
            generation=1,
            consumer="billing",
            position_ms=NOW_MS - HOUR,
            updated_ms=NOW_MS,
            lag_messages=4,
            oldest_unread_ms=NOW_MS - MINUTE,
            expired=False,
            counted_ms=NOW_MS,
        )
        CONSUMERS.save(state, [lag])
    kit.clock.step(30 * 24 * HOUR)
    assert kit.janitor("run --once").code != 0, "the clock has jumped"
    return _look(kit)


def _look(kit: CommandKit) -> Shown:
    folder = kit.folder / "data/janitor"
    terms = Terms(3600, (), LIFETIME, True, 60)
    deployment = Deployment("store", "apply", "", terms, arguments="--config janitor.yaml")
    exporter = Exporter(LevelDBPlace(kit.store, folder), deployment, Metrics("top", 10), kit.clock)
    exporter.refresh()
    web = Direct(exporter)
    families = text_string_to_metric_families(exporter.metrics()[0].decode())
    return Shown(
        status=kit.janitor("status --format json").json,
        api=json.loads(web.ask("/api/status").body),
        detail=kit.janitor("topic default:orders --format json").json,
        api_detail=json.loads(web.ask("/api/topics/default:orders").body),
        history=kit.janitor("history --format json").json,
        api_runs=json.loads(web.ask("/api/runs").body)["runs"],
        page=web.ask("/").body.decode(),
        metrics={
            sample.name: [(other.labels, other.value) for other in family.samples if other.name == sample.name]
            for family in families
            for sample in family.samples
        },
    )


def test_page_has_no_source_of_numbers_but_the_api(shown: Shown) -> None:
    requested = {part.split('"')[0].split("?")[0].split("`")[0] for part in shown.page.split('ask("')[1:]}
    assert "/api/status" in requested
    assert all(path.startswith("/api/") for path in requested)


def test_json_of_the_command_and_of_the_api_has_the_same_numbers(shown: Shown) -> None:
    for name in ("last_run", "held", "overdue", "consumers", "topics", "snapshot", "kept"):
        assert shown.status[name] == shown.api[name], name
        assert shown.status[name], name
    guards = [[(found["guard"], found["tripped"]) for found in one["guards"]] for one in (shown.status, shown.api)]
    assert guards[0] == guards[1] != []
    without_command = {name: value for name, value in shown.detail.items() if name != "held"}
    assert without_command.items() <= shown.api_detail.items()
    assert shown.detail["held"]["rows"] == shown.api_detail["held"]["rows"]


def test_run_has_the_same_numbers_everywhere(shown: Shown) -> None:
    runs = {run["id"]: run for run in shown.api_runs}
    assert runs[shown.api["last_run"]["id"]] == shown.api["last_run"]
    assert {run["id"]: run["expired"] for run in shown.history["runs"]} == {
        run["id"]: run["expired"] for run in shown.api_runs
    }
    for rule in ("expired", "old_generation"):
        assert shown.metric("janitor_rows_deleted_total", rule=rule) == sum(run[rule] for run in shown.api_runs) > 0
    assert shown.metric("janitor_rows_inverted_total") == sum(run["invalid_transaction"] for run in shown.api_runs)
    for result in ("done", "blocked"):
        assert (
            shown.metric("janitor_sweeps_total", result=result)
            == sum(run["result"] == result for run in shown.api_runs)
            > 0
        )


def test_topic_has_the_same_numbers_everywhere(shown: Shown) -> None:
    [orders] = [found for found in shown.api["topics"] if found["topic"] == "orders"]
    assert shown.api_detail["figures"] == orders
    assert shown.metric("topic_messages", **ORDERS) == orders["messages"] == 3
    assert shown.metric("topic_bytes", **ORDERS) == orders["size_bytes"] == 70


def test_consumer_has_the_same_numbers_everywhere(shown: Shown) -> None:
    assert shown.api["consumers"] == shown.api_detail["consumers"] == shown.detail["consumers"]
    assert shown.metric("consumer_lag_messages", consumer="billing") == shown.api["consumers"][0]["lag_messages"] == 4


def test_hold_has_the_same_numbers_everywhere(shown: Shown) -> None:
    [held] = shown.api["held"]
    [orders] = [found for found in shown.api["topics"] if found["topic"] == "orders"]
    assert shown.api_detail["held"]["rows"] == held["rows"] == orders["overdue_rows"] > 0
    assert sum(found["rows"] for found in shown.api["overdue"]) == held["rows"]
    assert shown.metric("janitor_overdue_rows") == held["rows"]
    assert shown.metric("janitor_held_topics", reason=held["reason"]) == 1


def test_guard_has_the_same_numbers_everywhere(shown: Shown) -> None:
    tripped = [found["guard"] for found in shown.api["guards"] if found["tripped"]]
    assert tripped == shown.api["last_run"]["blocked_by"] == ["clock"]
    assert shown.metric("janitor_guard_trips_total", guard="clock") == sum(
        "clock" in run["blocked_by"] for run in shown.api_runs
    )
