"""The routes of consumer groups: responses in both content types, codes, and rejected requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.builders import DAY, NOW_MS
from tests.server.client import AVRO, JSON, Answer, Client, TopicClient, encode_for_json
from tests.server.conftest import serving
from tms_core.client.protocol.messages import MessageDecoder, encode_poll
from tms_core.clock import ManualClock
from tms_core.consumers.claims import Backoff
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.service import MessagingService
from tms_core.server.codec.avro import AvroCodec
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction

START = "0" * 40


class GroupClient:
    """A topic ``orders`` with three messages and the group ``billing``, over REST."""

    def __init__(self, topic: TopicClient, manager: TransactionManager, service: MessagingService) -> None:
        self.topic, self.manager, self.service = topic, manager, service
        self.path = f"{topic.path}/consumers/billing"
        topic.publish("a", "b", "c")
        self.ids = [message["id"] for message in topic.post("poll").json]
        assert self.put(START).status == 200

    def put(self, position: str, **headers: str) -> Answer:
        return self.topic.client.ask("PUT", self.path, json.dumps({"position": position}).encode(), **headers)

    def ask(self, path: str, body: object, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.topic.client.ask("POST", f"{self.path}/{path}", data, **{"content_type": JSON, **headers})

    def poll(self, tx: Transaction, limit: object = 2, body: dict[str, Any] | None = None, **headers: str) -> Answer:
        given = {"transaction": encode_for_json(tx)}
        return self.ask("poll", {"limit": limit, **given, **(body or {})}, **headers)

    def shown(self) -> Any:
        return self.topic.client.ask("GET", self.path).json


@contextmanager
def open_group_client() -> Iterator[GroupClient]:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with (
        TransactionManager(MemoryStorage(), clock) as manager,
        serving(clock=clock, transactions=manager) as server,
        Client(server.port) as client,
    ):
        yield GroupClient(TopicClient(client, "orders").create(), manager, server.service)


@pytest.fixture
def group() -> Iterator[GroupClient]:
    with open_group_client() as made:
        yield made


def test_json_poll_of_a_group_shows_the_claim_until_commit(group: GroupClient) -> None:
    tx = group.manager.start_short()
    answer = group.poll(tx)
    assert (answer.status, [message["payload"] for message in answer.json]) == (200, ["a", "b"])
    assert answer.headers["x-tms-deliveries"] == "1"
    claim = {"transaction": str(tx.transaction_id), "after": START, "last": group.ids[1], "deliveries": 1}
    assert group.shown() == {"position": START, "claims": [claim]}

    other = group.poll(group.manager.start_short())
    assert (other.status, other.json, other.headers["x-tms-held"]) == (200, [], str(tx.transaction_id))

    group.manager.commit(tx.transaction_id)
    assert group.shown() == {"position": group.ids[1]}
    assert [message["payload"] for message in group.poll(group.manager.start_short()).json] == ["c"]
    assert group.shown()["position"] == group.ids[1]


def test_avro_poll_of_a_group_has_the_bytes_of_a_poll(group: GroupClient) -> None:
    tx = group.manager.start_short()
    body = encode_poll(None, None, tx, inclusive=True)
    answer = group.ask("poll", body, content_type=AVRO, x_tms_order="none")
    assert (answer.status, answer.headers["content-type"]) == (200, AVRO)
    assert [message.payload for message in MessageDecoder().feed(answer.body)] == [b"a", b"b", b"c"]
    published = AvroCodec().write_published(RollbackRange(tx.transaction_id, 0, 0, 0, 0))
    assert group.ask("rollback", published, content_type=AVRO).status == 200
    assert (group.shown()["position"], "claims" in group.shown()) == (START, False)


def test_poll_while_failed_messages_wait_has_their_retry_time(
    group: GroupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group.service.groups, "_backoff", Backoff(8_000, 8_000))
    tx = group.manager.start_short()
    assert len(group.poll(tx, 1).json) == 1
    group.ask("rollback", {"transactionWritePointer": str(tx.transaction_id)})
    answer = group.poll(group.manager.start_short())
    assert (answer.json, 8_000 <= int(answer.headers["x-tms-retry-ms"]) <= 10_000) == ([], True)
    [failed] = group.shown()["failed"]
    assert NOW_MS < failed["retryMs"] <= NOW_MS + 10_000


def test_consumer_change_with_open_claims_is_409_unless_forced(group: GroupClient) -> None:
    tx = group.manager.start_short()
    group.poll(tx)
    assert group.put(START, if_none_match="*").status == 409
    assert group.put(START, x_tms_force="perhaps").status == 400
    assert group.shown()["claims"][0]["transaction"] == str(tx.transaction_id)
    assert group.put(group.ids[0], x_tms_force="true").status == 200
    assert group.manager.status(tx.transaction_id) == "invalid"
    assert group.shown() == {"position": group.ids[0]}
    assert group.topic.client.ask("DELETE", group.path).status == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        ({"limit": 0}, {}, 400, "limit of 0"),
        ({"limit": 2**31}, {}, 400, "limit"),
        ({"limit": "many"}, {}, 400, "limit"),
        ({"startFrom": {"id": START}}, {}, 400, "startFrom"),
        ({"waitSeconds": 5}, {}, 400, " wait"),
        ({"transaction": "AAAA"}, {}, 400, "transaction"),
        ({"transaction": None}, {}, 400, "transaction"),
        ({"unknown": 1}, {}, 400, "unknown"),
        ({}, {"x_tms_order": "fifo"}, 400, "X-TMS-Order"),
        ({}, {"x_tms_max_deliveries": "five"}, 400, "X-TMS-Max-Deliveries"),
        ({}, {"x_tms_max_deliveries": "0"}, 400, "X-TMS-Max-Deliveries"),
        ({}, {"x_tms_max_deliveries": "9" * 5000}, 400, "X-TMS-Max-Deliveries"),
        ({}, {"content_type": "text/plain"}, 400, "Content-Type"),
    ],
)
def test_bad_poll_of_a_group_is_4xx_and_claims_nothing(
    group: GroupClient, body: dict[str, Any], headers: dict[str, str], status: int, reason: str
) -> None:
    answer = group.poll(group.manager.start_short(), body=body, **headers)
    assert answer.status == status
    assert reason in answer.text
    assert group.shown() == {"position": START}


def test_group_rollback_is_400_if_bad_and_409_if_committed(group: GroupClient) -> None:
    for body in ({}, {"transactionWritePointer": "x"}, {"transactionWritePointer": "-1"}, b"\xff"):
        assert group.ask("rollback", body).status == 400
    tx = group.manager.start_short()
    group.poll(tx)
    group.manager.commit(tx.transaction_id)
    assert group.ask("rollback", {"transactionWritePointer": str(tx.transaction_id)}).status == 409
    assert group.poll(group.manager.start_short()).json[0]["payload"] == "c"
