"""The routes of topics: responses, codes, and error messages."""

from __future__ import annotations

import json

import pytest

from tests.server.client import Client, TopicClient
from tests.support import wait_until

ROLLBACK = (
    b'{"transactionWritePointer":"1","rollbackRange":'
    b'{"startTimestamp":"1","startSequenceId":0,"endTimestamp":"1","endSequenceId":0}}'
)


@pytest.mark.parametrize("given", ["", "?olderThanSeconds=0", "?olderThanSeconds=-1", "?olderThanSeconds=soon"])
def test_ages_with_an_invalid_age_are_400_with_the_unit(topic: TopicClient, given: str) -> None:
    answer = topic.client.ask("GET", f"{topic.path}/ages{given}")
    assert (answer.status, "whole seconds" in answer.text) == (400, True)
    assert topic.client.ask("GET", f"{topic.path}/ages?olderThanSeconds=1").json == {
        "messages": 0,
        "older": 0,
        "atLeast": False,
        "holdSeconds": None,
    }


def test_topics_of_an_invalid_namespace_are_400(client: Client) -> None:
    assert client.ask("GET", "/v1/namespaces/a-b/topics").status == 400


@pytest.mark.parametrize("version", ["1.0.0", '"1.0.0"', "one"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_metrics_are_text_whatever_version_a_request_accepts(client: Client, kind: str, version: str) -> None:
    answer = client.ask("GET", "/metrics", accept=f"{kind}; version={version}")
    assert answer.status == 200
    assert "tms_messages_published_total" in answer.text


def test_metrics_count_published_and_fetched_messages(topic: TopicClient) -> None:
    def read_metrics() -> dict[str, float]:
        lines = topic.client.ask("GET", "/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    before = read_metrics()
    topic.publish("a", "b")
    assert topic.poll() == ["a", "b"]
    after = read_metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["tms_messages_published_total"] == 2
    assert grown["tms_messages_fetched_total"] == 2
    own = f'{{tms_namespace="default",topic="{topic.path.rpartition("/")[2]}"}}'
    assert grown[f"tms_topic_messages_published_total{own}"] == 2
    assert grown[f"tms_topic_messages_fetched_total{own}"] == 2
    assert grown[f"tms_topic_publish_duration_seconds_count{own}"] == 1
    assert grown["tms_cache_hits_total"] == 1
    assert grown["tms_cache_misses_total"] == 0
    assert grown["tms_publish_visible_seconds_count"] == 1
    assert grown['tms_publish_visible_seconds_bucket{le="+Inf"}'] == 1
    assert after["tms_publish_visible_seconds_sum"] >= 0
    assert grown['tms_requests_total{code="200",route="publish"}'] == 1
    assert grown['tms_request_duration_seconds_count{route="poll"}'] == 1
    assert after["tms_publish_queue_size"] == 0
    assert after["tms_cache_bytes"] > 0


def test_metrics_for_an_openmetrics_scraper_use_its_format(client: Client) -> None:
    answer = client.ask("GET", "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:11015", "10.0.0.1", "localhost.evil.example", "[::2]", ""]
)
def test_foreign_host_on_a_loopback_address_is_rejected(client: Client, host: str) -> None:
    answer = client.ask("GET", "/ping", host=host)
    assert answer.status == 400
    assert "localhost" in answer.text


def test_the_document_names_every_route_with_its_methods(client: Client) -> None:
    paths = client.ask("GET", "/openapi.json").json["paths"]
    for path, item in paths.items():
        known = {method.upper() for method in item if method != "parameters"}
        target = path.format(namespace="default", topic="unknown", name="billing")
        assert client.ask("OPTIONS", target).status == 405, path
        for method in ("GET", "PUT", "POST", "DELETE"):
            answer = client.ask(method, target)
            assert (answer.status != 405) == (method in known), (method, path)
            if method in known:
                assert str(answer.status) in item[method.lower()]["responses"], (method, path)
    assert len(paths) == 18
    assert not [path for path, item in paths.items() for call in item.values() if "security" in call]
    assert json.dumps(paths)


def test_head_of_a_route_is_405_as_in_cdap(client: Client) -> None:
    client.send("HEAD", "/ping")
    answer = client.answer(head=True)
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


def test_missing_path_is_404_and_names_the_list_of_paths(client: Client) -> None:
    answer = client.ask("GET", "/v1/namespaces/default/topics/t/nothing")
    assert (answer.status, "/openapi.json" in answer.text) == (404, True)


def test_metrics_after_a_topic_is_deleted_lose_its_series(topic: TopicClient) -> None:
    topic.publish("a")
    own = f'topic="{topic.path.rpartition("/")[2]}"'
    assert own in topic.client.ask("GET", "/metrics").text
    assert topic.client.ask("DELETE", topic.path).status == 200
    wait_until(lambda: own not in topic.client.ask("GET", "/metrics").text)
