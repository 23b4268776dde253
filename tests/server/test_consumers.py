"""The routes of consumers: responses, codes, and that queries change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.builders import DAY, NOW_MS, SECOND
from tests.server.client import Answer, Client, TopicClient
from tests.server.conftest import Serving, serving
from tms_core.clock import ManualClock

START = "0" * 40


def ids_of(topic: TopicClient) -> list[str]:
    return [message["id"] for message in topic.post("poll").json]


def put(topic: TopicClient, name: str, position: str) -> Answer:
    return topic.client.ask("PUT", f"{topic.path}/consumers/{name}", json.dumps({"position": position}).encode())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS, monotonic_ms=DAY)


@pytest.fixture
def server(clock: ManualClock) -> Iterator[Serving]:
    with serving(clock=clock) as running:
        yield running


def test_position_is_shown_and_replaced_by_a_later_position(topic: TopicClient) -> None:
    topic.publish("a", "b")
    first, second = ids_of(topic)
    for id_ in (first, second, first.upper()):
        done = put(topic, "billing", id_)
        assert (done.status, done.body) == (200, b"")
        found = topic.client.ask("GET", f"{topic.path}/consumers/billing")
        assert (found.status, found.json) == (200, {"position": id_.lower()})


def test_list_of_consumers_has_lags_and_moves_nothing(server: Serving, clock: ManualClock) -> None:
    with Client(server.port) as client:
        topic = TopicClient(client, "orders").create(ttl="60")
        for text in "abc":
            topic.publish(text)
            clock.advance(SECOND)
        ids = ids_of(topic)
        put(topic, "b-read-one", ids[0])
        put(topic, "a-read-none", START)
        put(topic, "c-read-all", ids[2])
        expected = [
            {"name": "a-read-none", "position": START, "lagMessages": 3, "lagSeconds": 3.0, "expired": False},
            {"name": "b-read-one", "position": ids[0], "lagMessages": 2, "lagSeconds": 2.0, "expired": False},
            {"name": "c-read-all", "position": ids[2], "lagMessages": 0, "lagSeconds": 0.0, "expired": False},
        ]
        same = {"lagIsAtLeast": False, "updatedMs": str(clock.now_ms())}
        for _ in range(2):
            listed = client.ask("GET", f"{topic.path}/consumers")
            assert (listed.status, listed.json) == (200, [{**one, **same} for one in expected])
            assert ids_of(topic) == ids


def test_delete_of_a_consumer_removes_it_and_a_second_delete_is_404(topic: TopicClient) -> None:
    put(topic, "billing", START)
    path = f"{topic.path}/consumers/billing"
    assert [topic.client.ask("DELETE", path).status for _ in range(2)] == [200, 404]
    assert topic.client.ask("GET", f"{topic.path}/consumers").json == []


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
@pytest.mark.parametrize(("name", "status"), [("a.b", 400), ("%C3%A4", 400), ("x" * 256, 400), ("x" * 255, 404)])
def test_invalid_consumer_name_is_400(topic: TopicClient, method: str, name: str, status: int) -> None:
    answer = topic.client.ask(method, f"{topic.path}/consumers/{name}", json.dumps({"position": START}).encode())
    assert answer.status == (200 if (method, status) == ("PUT", 404) else status)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"position": null}',
        b'{"position": %s}' % (b"1" * 40),
        b'{"position": "%s"}' % (b"0" * 39),
        b'{"position": "%s"}' % (b"g" * 40),
        b'{"position": "%s"}' % (b"f" * 40),
        b'{"position": "%s", "name": "x"}' % START.encode(),
    ],
)
def test_put_of_a_bad_position_is_400_and_registers_no_consumer(topic: TopicClient, body: bytes) -> None:
    assert topic.client.ask("PUT", f"{topic.path}/consumers/billing", body).status == 400
    assert topic.client.ask("GET", f"{topic.path}/consumers").json == []
