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
from tests.janitor.http.conftest import DirectClient
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

ORDERS = {"tms_namespace": "default", "topic": "orders"}


class Outputs(NamedTuple):
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
def outputs(kit: CommandKit) -> Outputs:
    """Return the outputs for a store with held rows, a counted topic, a consumer, and a stopped last run."""
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
    return _read_outputs(kit)


def _read_outputs(kit: CommandKit) -> Outputs:
    folder = kit.folder / "data/janitor"
    terms = Terms(3600, (), LIFETIME, True, 60)
    deployment = Deployment("store", "apply", "", terms, arguments="--config janitor.yaml")
    exporter = Exporter(LevelDBPlace(kit.store, folder), deployment, Metrics("top", 10), kit.clock)
    exporter.refresh()
    web = DirectClient(exporter)
    families = text_string_to_metric_families(exporter.metrics()[0].decode())
    return Outputs(
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


def test_page_has_no_source_of_numbers_but_the_api(outputs: Outputs) -> None:
    requested = {part.split('"')[0].split("?")[0].split("`")[0] for part in outputs.page.split('ask("')[1:]}
    assert "/api/status" in requested
    assert all(path.startswith("/api/") for path in requested)


def test_json_of_the_command_and_of_the_api_has_the_same_numbers(outputs: Outputs) -> None:
    for name in ("last_run", "held", "overdue", "consumers", "topics", "snapshot", "kept"):
        assert outputs.status[name] == outputs.api[name], name
        assert outputs.status[name], name
    guards = [[(found["guard"], found["tripped"]) for found in one["guards"]] for one in (outputs.status, outputs.api)]
    assert guards[0] == guards[1] != []
    without_command = {name: value for name, value in outputs.detail.items() if name != "held"}
    assert without_command.items() <= outputs.api_detail.items()
    assert outputs.detail["held"]["rows"] == outputs.api_detail["held"]["rows"]


def test_run_has_the_same_numbers_everywhere(outputs: Outputs) -> None:
    runs = {run["id"]: run for run in outputs.api_runs}
    assert runs[outputs.api["last_run"]["id"]] == outputs.api["last_run"]
    assert {run["id"]: run["expired"] for run in outputs.history["runs"]} == {
        run["id"]: run["expired"] for run in outputs.api_runs
    }
    for rule in ("expired", "old_generation"):
        assert outputs.metric("janitor_rows_deleted_total", rule=rule) == sum(run[rule] for run in outputs.api_runs) > 0
    assert outputs.metric("janitor_rows_inverted_total") == sum(run["invalid_transaction"] for run in outputs.api_runs)
    for result in ("done", "blocked"):
        assert (
            outputs.metric("janitor_sweeps_total", result=result)
            == sum(run["result"] == result for run in outputs.api_runs)
            > 0
        )


def test_topic_has_the_same_numbers_everywhere(outputs: Outputs) -> None:
    [orders] = [found for found in outputs.api["topics"] if found["topic"] == "orders"]
    assert outputs.api_detail["figures"] == orders
    assert outputs.metric("topic_messages", **ORDERS) == orders["messages"] == 3
    assert outputs.metric("topic_bytes", **ORDERS) == orders["size_bytes"] == 70


def test_consumer_has_the_same_numbers_everywhere(outputs: Outputs) -> None:
    assert outputs.api["consumers"] == outputs.api_detail["consumers"] == outputs.detail["consumers"]
    assert (
        outputs.metric("consumer_lag_messages", consumer="billing") == outputs.api["consumers"][0]["lag_messages"] == 4
    )


def test_hold_has_the_same_numbers_everywhere(outputs: Outputs) -> None:
    [held] = outputs.api["held"]
    [orders] = [found for found in outputs.api["topics"] if found["topic"] == "orders"]
    assert outputs.api_detail["held"]["rows"] == held["rows"] == orders["overdue_rows"] > 0
    assert sum(found["rows"] for found in outputs.api["overdue"]) == held["rows"]
    assert outputs.metric("janitor_overdue_rows") == held["rows"]
    assert outputs.metric("janitor_held_topics", reason=held["reason"]) == 1


def test_guard_has_the_same_numbers_everywhere(outputs: Outputs) -> None:
    tripped = [found["guard"] for found in outputs.api["guards"] if found["tripped"]]
    assert tripped == outputs.api["last_run"]["blocked_by"] == ["clock"]
    assert outputs.metric("janitor_guard_trips_total", guard="clock") == sum(
        "clock" in run["blocked_by"] for run in outputs.api_runs
    )
