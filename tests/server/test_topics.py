"""The routes of topics: what they answer, with which codes, and what they name in a sentence."""

from __future__ import annotations

import json

import pytest

from tests.server.client import Client, TopicClient
from tests.support import wait_until

ROLLBACK = (
    b'{"transactionWritePointer":"1","rollbackRange":'
    b'{"startTimestamp":"1","startSequenceId":0,"endTimestamp":"1","endSequenceId":0}}'
)
TOPICS = "/v1/namespaces/default/topics"


def test_given_a_new_topic_when_looked_at_then_all_its_properties_are_there_and_it_is_listed(client: Client) -> None:
    made = client.ask("PUT", f"{TOPICS}/made", b'{"ttl":"60","owner":"me"}')
    assert (made.status, made.body) == (200, b"")
    seen = client.ask("GET", f"{TOPICS}/made")
    assert (seen.status, seen.headers["content-type"]) == (200, "application/json")
    assert seen.json == {"generation": "1", "ttl": "60", "owner": "me"}
    listed = client.ask("GET", TOPICS)
    assert (listed.status, listed.headers["content-type"]) == (200, "application/json")
    assert "made" in listed.json
    assert client.ask("GET", "/v1/namespaces/other/topics").json == []


def test_given_no_body_when_created_then_the_default_ttl_counts(client: Client) -> None:
    assert client.ask("PUT", f"{TOPICS}/plain").status == 200
    assert client.ask("GET", f"{TOPICS}/plain").json == {"generation": "1", "ttl": "604800"}


@pytest.mark.parametrize("given", ["", "?olderThanSeconds=0", "?olderThanSeconds=-1", "?olderThanSeconds=soon"])
def test_given_an_age_that_is_none_then_400_with_what_to_give(topic: TopicClient, given: str) -> None:
    answer = topic.client.ask("GET", f"{topic.path}/ages{given}")
    assert (answer.status, "whole seconds" in answer.text) == (400, True)
    assert topic.client.ask("GET", f"{topic.path}/ages?olderThanSeconds=1").json == {
        "messages": 0,
        "older": 0,
        "atLeast": False,
        "holdSeconds": None,
    }


def test_given_a_topic_when_its_properties_are_put_then_they_replace_the_old_ones(topic: TopicClient) -> None:
    path = f"{topic.path}/properties"
    assert topic.client.ask("PUT", path, b'{"ttl":60,"owner":"me"}').status == 200
    assert topic.client.ask("GET", topic.path).json == {"generation": "1", "ttl": "60", "owner": "me"}
    assert topic.client.ask("PUT", path, b"{}").status == 200
    assert topic.client.ask("GET", topic.path).json == {"generation": "1", "ttl": "604800"}


def test_given_a_topic_when_deleted_and_made_again_then_it_is_empty_and_of_the_next_generation(
    topic: TopicClient,
) -> None:
    topic.publish("old")
    assert topic.client.ask("DELETE", topic.path).status == 200
    assert topic.client.ask("GET", topic.path).status == 404
    topic.create(ttl="5")
    assert topic.client.ask("GET", topic.path).json == {"generation": "2", "ttl": "5"}
    assert topic.poll() == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "nobody/consumers", b""),
        ("POST", "nobody/store", b'{"messages":["a"],"transactionWritePointer":"5"}'),
        ("POST", "nobody/rollback", ROLLBACK),
    ],
)
def test_given_no_such_topic_then_404_with_a_sentence(client: Client, method: str, path: str, body: bytes) -> None:
    answer = client.ask(method, f"{TOPICS}/{path}", body, content_type="application/json")
    assert answer.status == 404
    assert "There is no topic default:nobody." in answer.text


@pytest.mark.parametrize("body", [b'{"ttl":"0"}', b'{"ttl":""}', b'{"ttl":1.5}', b'{"ttl":2147483648}', b"[]", b"x"])
@pytest.mark.parametrize("path", ["new", "there/properties"])
def test_given_bad_properties_then_400(client: Client, path: str, body: bytes) -> None:
    client.ask("PUT", f"{TOPICS}/there")
    assert client.ask("PUT", f"{TOPICS}/{path}", body).status == 400
    assert client.ask("GET", f"{TOPICS}/new").status == 404


@pytest.mark.parametrize("path", ["a.b", "a%20b", "%C3%A4", "a:b"])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_given_a_name_that_is_none_then_400(client: Client, method: str, path: str) -> None:
    answer = client.ask(method, f"{TOPICS}/{path}")
    assert answer.status == 400
    assert "is not a topic" in answer.text


def test_given_a_namespace_that_is_none_then_400(client: Client) -> None:
    assert client.ask("GET", "/v1/namespaces/a-b/topics").status == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", TOPICS),
        ("POST", f"{TOPICS}/t"),
        ("GET", f"{TOPICS}/t/publish"),
        ("PUT", f"{TOPICS}/t/poll"),
        ("DELETE", f"{TOPICS}/t/store"),
        ("GET", f"{TOPICS}/t/rollback"),
        ("POST", f"{TOPICS}/t/properties"),
        ("DELETE", "/ping"),
    ],
)
def test_given_a_method_that_a_route_does_not_know_then_405_and_which_it_knows(
    client: Client, method: str, path: str
) -> None:
    answer = client.ask(method, path)
    assert answer.status == 405
    assert answer.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/v1", f"{TOPICS}//", f"{TOPICS}/t/nothing", "/v2/namespaces/default/topics"])
def test_given_a_path_that_is_none_then_404_and_where_they_are_listed(client: Client, path: str) -> None:
    answer = client.ask("GET", path)
    assert answer.status == 404
    assert "/openapi.json" in answer.text


def test_the_server_answers_a_ping(client: Client) -> None:
    assert client.ask("GET", "/ping").text == "OK."


def test_given_work_when_metrics_are_asked_for_then_they_tell_of_it(topic: TopicClient) -> None:
    def figures() -> dict[str, float]:
        lines = topic.client.ask("GET", "/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    before = figures()
    topic.publish("a", "b")
    assert topic.poll() == ["a", "b"]
    after = figures()
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


def test_metrics_after_a_topic_is_deleted_lose_its_series(topic: TopicClient) -> None:
    topic.publish("a")
    own = f'topic="{topic.path.rpartition("/")[2]}"'
    assert own in topic.client.ask("GET", "/metrics").text
    assert topic.client.ask("DELETE", topic.path).status == 200
    wait_until(lambda: own not in topic.client.ask("GET", "/metrics").text)


def test_given_a_scraper_that_wants_openmetrics_then_it_gets_that(client: Client) -> None:
    answer = client.ask("GET", "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("host", ["localhost", "localhost:11015", "127.0.0.1:1", "[::1]:11015", "LOCALHOST"])
def test_given_a_loopback_name_then_it_is_answered(client: Client, host: str) -> None:
    assert client.ask("GET", "/ping", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:11015", "10.0.0.1", "localhost.evil.example", "[::2]", ""]
)
def test_given_a_strangers_name_on_a_loopback_address_then_it_is_refused(client: Client, host: str) -> None:
    answer = client.ask("GET", "/ping", host=host)
    assert answer.status == 400
    assert "localhost only" in answer.text


def test_the_document_names_every_route_with_its_methods(client: Client) -> None:
    paths = client.ask("GET", "/openapi.json").json["paths"]
    for path, item in paths.items():
        known = {method.upper() for method in item if method != "parameters"}
        asked = path.format(namespace="default", topic="unknown", name="billing")
        assert client.ask("OPTIONS", asked).status == 405, path
        for method in ("GET", "PUT", "POST", "DELETE"):
            answer = client.ask(method, asked)
            assert (answer.status != 405) == (method in known), (method, path)
            if method in known:
                assert str(answer.status) in item[method.lower()]["responses"], (method, path)
    assert len(paths) == 18
    assert json.dumps(paths)


@pytest.mark.parametrize("path", ["/ping", "/metrics", "/v1/namespaces/default/topics"])
def test_given_head_when_asked_then_405_as_in_cdap(client: Client, path: str) -> None:
    client.send("HEAD", path)
    answer = client.answer(head=True)
    assert (answer.status, answer.headers["allow"]) == (405, "GET")
    assert client.ask("GET", path).status == 200
