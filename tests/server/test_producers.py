"""The routes of producers, and the headers of a producer's request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.builders import DAY, NOW_MS
from tests.server.client import JSON, Answer, Client, TopicClient
from tests.server.conftest import serving
from tms_core.clock import ManualClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage


class ProducerClient:
    """A topic ``bills`` and its producer ``importer``, over REST."""

    def __init__(self, topic: TopicClient, manager: TransactionManager) -> None:
        self.topic, self.manager = topic, manager
        self.path = f"{topic.path}/producers/importer"

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        return self.topic.client.ask(method, path, body, **{"content_type": JSON, **headers})

    def register(self, instance: object) -> Answer:
        return self.ask("POST", self.path, json.dumps({"instance": str(instance)}).encode())

    def send(self, verb: str, generation: object, sequence: object, body: object, **more: str) -> Answer:
        headers = {"x_tms_producer": "default:bills/importer", "x_tms_generation": str(generation)}
        if sequence is not None:
            headers["x_tms_sequence"] = str(sequence)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", f"{self.topic.path}/{verb}", data, **{**headers, **more})


@pytest.fixture
def producer() -> Iterator[ProducerClient]:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with (
        TransactionManager(MemoryStorage(), clock) as manager,
        serving(clock=clock, transactions=manager) as server,
        Client(server.port) as client,
    ):
        yield ProducerClient(TopicClient(client, "bills").create(), manager)


def test_register_with_transactions_elsewhere_asks_how_they_ended() -> None:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with (
        TransactionManager(MemoryStorage(), clock) as manager,
        serving(clock=clock) as server,
        Client(server.port) as client,
    ):
        producer = ProducerClient(TopicClient(client, "bills").create(), manager)
        generation, heir = producer.register(uuid4()).json["generation"], uuid4()
        one, two = str(manager.start_short().write_pointer), str(manager.start_short().write_pointer)
        for number, pointer in enumerate((one, two), 1):
            sent = {"messages": ["a"], "transactionWritePointer": pointer}
            assert producer.send("publish", generation, number, sent, x_tms_label=pointer).status == 200
        pending = {"transaction": two, "label": two, "outcome": "pending"}
        for _ in range(2):
            response = producer.register(heir).json
            assert (response["former"], response["undecided"]) == (pending, [one, two])
        wrong: list[object] = [{one: "open"}, {"one": "aborted"}, ["aborted"]]
        for ended in ({one: "aborted"}, *wrong):
            body = json.dumps({"instance": str(heir), "ended": ended}).encode()
            answer = producer.ask("POST", producer.path, body)
            assert answer.status == 400 or answer.json["undecided"] == [two]
        body = json.dumps({"instance": str(heir), "ended": {one: "committed", two: "aborted"}}).encode()
        previous = {"transaction": one, "label": one, "outcome": "committed"}
        for instance in (body, body, json.dumps({"instance": str(uuid4())}).encode()):
            response = producer.ask("POST", producer.path, instance).json
            assert (response["former"], response["undecided"]) == (previous, [])


def test_register_ends_an_announced_transaction_without_messages(producer: ProducerClient) -> None:
    generation = producer.register(uuid4()).json["generation"]
    tx = producer.manager.start_short()
    nothing = {"transactionWritePointer": str(tx.write_pointer)}
    for _ in range(2):
        assert producer.send("store", generation, 1, nothing, x_tms_label="file%201").status == 200
    started = {"transaction": str(tx.write_pointer), "label": "file 1"}
    shown = {"generation": generation, "updatedMs": str(NOW_MS), "former": None, "open": [started]}
    assert producer.ask("GET", producer.path).json == shown
    assert producer.register(uuid4()).json["former"] == {**started, "outcome": "aborted"}
    assert not producer.manager.is_in_progress(tx.write_pointer)
    assert producer.send("store", generation, 2, nothing).headers["x-tms-fenced"] == "true"
    elsewhere = TopicClient(producer.topic.client, "orders").create()
    headers = {"x_tms_producer": "default:bills/importer", "x_tms_generation": generation, "x_tms_sequence": "3"}
    refused = producer.ask("POST", f"{elsewhere.path}/store", json.dumps(nothing).encode(), **headers)
    assert (refused.status, "payload" in refused.text) == (400, True)
    assert producer.topic.post("poll").json == []


@pytest.mark.parametrize(
    "headers",
    [
        {"x_tms_generation": "1"},
        {"x_tms_sequence": "1"},
        {"x_tms_label": "a"},
        {"x_tms_oldest_open": "1"},
        {"x_tms_producer": "bills/importer", "x_tms_generation": "1", "x_tms_sequence": "1"},
        {"x_tms_producer": "default:bills", "x_tms_generation": "1", "x_tms_sequence": "1"},
        {"x_tms_producer": "default:bills/importer", "x_tms_generation": "1"},
        {"x_tms_producer": "default:bills/importer", "x_tms_generation": "-1", "x_tms_sequence": "1"},
        {"x_tms_producer": "default:bills/importer", "x_tms_generation": "1", "x_tms_sequence": "1" * 20},
        {"x_tms_producer": "default:bills/i", "x_tms_generation": "1", "x_tms_sequence": "1", "x_tms_label": "%ff"},
    ],
)
def test_wrong_headers_are_400_and_publish_nothing(producer: ProducerClient, headers: dict[str, str]) -> None:
    assert producer.ask("POST", f"{producer.topic.path}/publish", b'{"messages":["a"]}', **headers).status == 400
    assert producer.topic.post("poll").json == []
    for instance in ("", "no", uuid4().hex[:30]):
        assert producer.register(instance).status == 400
