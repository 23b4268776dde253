"""Errors of the server, compared in both content types, both clients and the command line."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from tests.server.client import AVRO, JSON
from tests.server.client import Client as Connection
from tests.server.process import IN_MEMORY, port_of
from tests.support import raising
from tms_core.cli.main import execute
from tms_core.client import AsyncClient, Client, MessageId, Options, Retry, TmsError
from tms_core.errors import (
    BadRequest,
    ClockJumped,
    ConsumerConflict,
    ConsumerNotFound,
    Forbidden,
    ProducerFenced,
    ProducerNotFound,
    QuotaExceeded,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    TopicExists,
    TopicNotFound,
    TransactionEnded,
    TransactionExpired,
    Unanswered,
    Unauthorized,
    Unavailable,
)
from tms_core.messaging.service import MessagingService
from tms_core.server.serving import RunningServer, serving

START = MessageId(0, 0)
MISSING, THERE = "default:missing", "default:there"
#: Without retries, so that a temporary error is an error.
ONCE = Options(retry=Retry(attempts=1))


@dataclass(frozen=True)
class Outcome:
    """An error as a caller sees it.

    Attributes:
        status: the status of the HTTP response; None: the caller does not show it.
        code: the code of the error.
        text: the message and the hint.
    """

    status: int | None
    code: str
    text: str


class Caller(Protocol):
    def ask(self, operation: str, topic: str, *arguments: str) -> Outcome: ...


class HttpCaller:
    def __init__(self, server: RunningServer, content_type: str) -> None:
        self._port, self._content_type = port_of(server.url), content_type

    def ask(self, operation: str, topic: str, *arguments: str) -> Outcome:
        is_avro = self._content_type == AVRO
        namespace, _, name = topic.partition(":")
        path = f"/v1/namespaces/{namespace}/topics/{name}"
        consumer = f"{path}/consumers/{''.join(arguments)}"
        position = json.dumps({"position": str(START)}).encode()
        method, path, body = {
            "create_topic": ("PUT", path, b"{}"),
            "topic": ("GET", path, b""),
            "update_topic": ("PUT", f"{path}/properties", b"{}"),
            "delete_topic": ("DELETE", path, b""),
            "publish": ("POST", f"{path}/publish", b"\x02\x02\x02a\0" if is_avro else b'{"messages": ["a"]}'),
            "poll": ("POST", f"{path}/poll", b"\x04\x01\x02\x02" if is_avro else b"{}"),
            "position": ("GET", consumer, b""),
            "set_position": ("PUT", consumer, position),
            "delete_position": ("DELETE", consumer, b""),
        }[operation]
        accept = "text/html, */*; q=.2" if is_avro else "application/json"
        with Connection(self._port) as connection:
            answer = connection.ask(method, path, body, content_type=self._content_type, accept=accept)
        if is_avro:
            # As read by clients of CDAP.
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            return Outcome(answer.status, answer.headers["x-tms-error"], answer.text)
        problem = answer.json
        assert answer.headers["content-type"] == "application/problem+json"
        assert (problem["status"], problem["code"]) == (answer.status, answer.headers["x-tms-error"])
        return Outcome(answer.status, problem["code"], f"{problem['detail']} {problem.get('hint', '')}".strip())


class SyncCaller:
    def __init__(self, server: RunningServer) -> None:
        self._server = server

    def ask(self, operation: str, topic: str, *arguments: str) -> Outcome:
        with pytest.raises(TmsError) as caught:
            self._ask(operation, topic, *arguments)
        return Outcome(None, caught.value.code, str(caught.value))

    def _ask(self, operation: str, topic: str, *arguments: str) -> None:
        with Client(self._server.url, transactions=self._server.transactions or "", options=ONCE) as client:
            found = getattr(client, operation)(topic, *_of_client(operation, arguments))
            list(found if operation == "poll" else [])


class AsyncCaller:
    def __init__(self, server: RunningServer) -> None:
        self._server = server

    def ask(self, operation: str, topic: str, *arguments: str) -> Outcome:
        with pytest.raises(TmsError) as caught:
            asyncio.run(self._ask(operation, topic, *arguments))
        return Outcome(None, caught.value.code, str(caught.value))

    async def _ask(self, operation: str, topic: str, *arguments: str) -> None:
        async with AsyncClient(self._server.url, transactions=self._server.transactions or "", options=ONCE) as client:
            found = getattr(client, operation)(topic, *_of_client(operation, arguments))
            if inspect.isawaitable(found):
                await found
            else:
                [_ async for _ in found]


def _of_client(operation: str, arguments: tuple[str, ...]) -> tuple[Any, ...]:
    return {"publish": ([b"a"],), "set_position": (*arguments, START)}.get(operation, arguments)


class CommandCaller:
    def __init__(self, server: RunningServer, capture: pytest.CaptureFixture[str]) -> None:
        self._server, self._capture = server, capture

    def ask(self, operation: str, topic: str, *arguments: str) -> Outcome:
        words = {
            "create_topic": ["topic", "create", topic],
            "topic": ["topic", "show", topic],
            "update_topic": ["topic", "update", topic, "--ttl", "1d"],
            "delete_topic": ["topic", "delete", topic, "--yes"],
            "publish": ["publish", topic, "-m", "a"],
            "poll": ["poll", topic],
            "position": ["consumer", "show", topic, *arguments],
            "set_position": ["consumer", "set", topic, *arguments, "--to", str(START)],
            "delete_position": ["consumer", "delete", topic, *arguments],
        }[operation]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMS_URL", self._server.url)
            patch.setenv("TMS_TRANSACTIONS__THRIFT", str(self._server.transactions))
            patch.setattr(Retry, "pause_seconds", lambda *_: 0)
            code = execute(words)
        out, error = self._capture.readouterr()
        assert (code, out) == (1, "")
        first = error.splitlines()[0]
        assert first.startswith("error: ")
        return Outcome(None, first.rpartition("[")[2].rstrip("]"), error)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # Rolled back messages are delivered again at once.
    environ = IN_MEMORY | {"TMS_SERVER__CONSUMERS__RETRY_SECONDS": "0"}
    with serving(None, environ, {}, janitor=False) as started:
        with Client(started.url) as client:
            client.create_topic(THERE)
        yield started


@pytest.fixture(params=["Avro", "JSON", "client", "async client", "command line"])
def caller(request: pytest.FixtureRequest, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> Caller:
    callers: dict[str, Caller] = {
        "Avro": HttpCaller(server, AVRO),
        "JSON": HttpCaller(server, JSON),
        "client": SyncCaller(server),
        "async client": AsyncCaller(server),
        "command line": CommandCaller(server, capsys),
    }
    return callers[request.param]


@pytest.mark.parametrize(
    "operation",
    ["topic", "update_topic", "delete_topic", "publish", "poll", "position", "set_position", "delete_position"],
)
def test_request_for_a_missing_topic_is_not_found_for_every_caller(caller: Caller, operation: str) -> None:
    outcome = caller.ask(operation, MISSING, *(["billing"] if "position" in operation else []))
    assert (outcome.status or 404, outcome.code) == (404, TopicNotFound.code)
    assert "Topic default:missing does not exist." in outcome.text


@pytest.mark.parametrize("operation", ["position", "delete_position"])
def test_request_for_a_missing_consumer_is_not_found_for_every_caller(caller: Caller, operation: str) -> None:
    outcome = caller.ask(operation, THERE, "nobody")
    assert (outcome.status or 404, outcome.code) == (404, ConsumerNotFound.code)
    assert "has no consumer nobody" in outcome.text
    assert f"tms consumer set {THERE} nobody --since now" in outcome.text


def test_topic_created_again_is_a_conflict_for_every_caller(caller: Caller) -> None:
    outcome = caller.ask("create_topic", THERE)
    assert (outcome.status or 409, outcome.code) == (409, TopicExists.code)
    assert THERE in outcome.text


@pytest.mark.parametrize("operation", ["set_position", "delete_position"])
def test_change_of_a_claimed_group_is_a_conflict(caller: Caller, server: RunningServer, operation: str) -> None:
    with Client(server.url, transactions=server.transactions or "") as client:
        client.publish(THERE, [b"a"])
        with client.transaction() as tx:
            assert list(tx.consume(THERE, "billing"))
            outcome = caller.ask(operation, THERE, "billing")
            assert (outcome.status or 409, outcome.code) == (409, ConsumerConflict.code)
            assert str(tx.transaction.transaction_id) in outcome.text
            tx.roll_back()


@pytest.mark.parametrize(
    ("error", "status", "of_client"),
    [
        (BadRequest, 400, BadRequest.code),
        (Unauthorized, 401, Unauthorized.code),
        (Forbidden, 403, Forbidden.code),
        (TopicNotFound, 404, TopicNotFound.code),
        (ConsumerNotFound, 404, TopicNotFound.code),
        (ProducerNotFound, 404, TopicNotFound.code),
        (TopicExists, 409, TransactionEnded.code),
        (ConsumerConflict, 409, TransactionEnded.code),
        (ProducerFenced, 409, ProducerFenced.code),
        (TransactionEnded, 409, TransactionEnded.code),
        (TransactionExpired, 409, TransactionEnded.code),
        (TooLarge, 413, BadRequest.code),
        (QuotaExceeded, 429, QuotaExceeded.code),
        (Unanswered, 502, "TMS-SERVER-FAILED"),
        (Unavailable, 503, Unavailable.code),
        (ClockJumped, 503, Unavailable.code),
        (StoreFull, 503, Unavailable.code),
        (StoreError, 500, "TMS-SERVER-FAILED"),
        (StoreUnavailable, 500, "TMS-SERVER-FAILED"),
    ],
)
def test_error_of_the_service_has_its_status_and_sentence_for_every_caller(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, error: type[TmsError], status: int, of_client: str
) -> None:
    monkeypatch.setattr(MessagingService, "submit_publish", raising(error("This is why.", "Do this.")))
    outcome = caller.ask("publish", THERE)
    expected = (status, error.code) if outcome.status else (None, of_client)
    assert (outcome.status, outcome.code) == expected
    assert "This is why." in outcome.text
    assert "Do this." in outcome.text
