"""The audit log: contents, sources, and limits against floods."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from janitor.http.guard import guarded
from tests.server.client import JSON, Client
from tests.server.conftest import serving
from tests.server.identities import TokenIdentities
from tests.transaction.managers import served
from tms_core.clock import SystemClock
from tms_core.errors import TruncateTimeError
from tms_core.logs.audit import MAX_FIELD_CHARACTERS, MAX_LINES_PER_MINUTE, BoundedAudit, Event, record
from tms_core.logs.loggers import configure
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import TokenRequired
from tms_core.transaction.rpc.service import Level

TOPICS = "/v1/namespaces/default/topics"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Lines:
    stream = io.StringIO()
    configure("text", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines() if '"tms.audit"' in line]


def records(lines: Lines) -> list[tuple[object, ...]]:
    return [tuple(line[name] for name in ("event", "principal", "verb", "object", "result")) for line in lines()]


def test_audit_line_is_json_in_a_text_log(lines: Lines) -> None:
    record(Event.RESET, principal="ada", address="::1", verb="resetState", result="done", object_="x" * 500)
    [line] = lines()
    assert {name: line[name] for name in ("event", "principal", "address", "verb", "result", "level")} == {
        "event": "transactions.reset", "principal": "ada", "address": "::1", "verb": "resetState", "result": "done",
        "level": "info",
    }  # fmt: skip
    assert len(line["object"]) < 210


def test_audit_line_limits_the_length_of_its_fields(lines: Lines) -> None:
    record(Event.UNAUTHORIZED, verb="\x1b a " * 10_000, result="refused", object_="b " * 10_000)
    [line] = lines()
    assert max(len(line["verb"]), len(line["object"])) == MAX_FIELD_CHARACTERS + 1


def test_bounded_audit_limits_the_lines_per_minute(lines: Lines) -> None:
    now_ms = 0
    audit = BoundedAudit(lambda: now_ms)

    def refuse(event: Event) -> None:
        audit.record(event, principal=None, address="", verb="GET", object_="/")

    for _ in range(MAX_LINES_PER_MINUTE + 7):
        refuse(Event.UNAUTHORIZED)
    refuse(Event.FORBIDDEN)
    assert len(lines()) == MAX_LINES_PER_MINUTE + 1
    now_ms = 60_000
    refuse(Event.UNAUTHORIZED)
    refuse(Event.UNAUTHORIZED)
    assert [line.get("suppressed") for line in lines()[-2:]] == ["7", None]


def test_requests_that_administer_force_or_are_rejected_are_audited(lines: Lines, tmp_path: Path) -> None:
    identities = TokenIdentities(tmp_path)
    with serving(gate=identities.gate) as server, Client(server.port) as client:

        def ask(method: str, path: str, role: str = "owner", body: bytes = b"{}", **more: str) -> int:
            known = {"authorization": f"Bearer {identities.good(role)}", "content_type": JSON}
            return client.ask(method, f"{TOPICS}{path}", body, **known, **more).status

        assert ask("PUT", "/t") == 200
        assert ask("PUT", "/t/properties", body=b'{"ttl": "0"}') == 400
        position = b'{"position": "%s"}' % (b"0" * 40)
        assert ask("PUT", "/t/consumers/c", body=position) == 200
        assert ask("PUT", "/t/consumers/c", body=position, x_tms_force="true") == 200
        assert ask("DELETE", "/t/consumers/c", x_tms_force="true") == 200
        assert ask("DELETE", "/t", role="publisher") == 403
        client.ask("GET", "/metrics")
        assert ask("DELETE", "/t") == 200
    assert records(lines) == [
        ("topic.create", "owner", "PUT", "default:t", "done"),
        ("topic.update", "owner", "PUT", "default:t", "refused"),
        ("consumer.force", "owner", "PUT", "default:t/c", "done"),
        ("consumer.force", "owner", "DELETE", "default:t/c", "done"),
        ("request.forbidden", "publisher", "DELETE", f"{TOPICS}/t", "refused"),
        ("request.unauthorized", None, "GET", "/metrics", "refused"),
        ("topic.delete", "owner", "DELETE", "default:t", "done"),
    ]
    assert {line["address"] for line in lines()} == {"127.0.0.1"}


def test_refused_requests_of_a_principal_without_permissions_are_limited(lines: Lines, tmp_path: Path) -> None:
    identities = TokenIdentities(tmp_path)
    with serving(gate=identities.gate) as server, Client(server.port) as client:
        known = {"authorization": f"Bearer {identities.good('stranger')}"}
        # The requests may start in one minute and end in the next.
        for _ in range(2 * MAX_LINES_PER_MINUTE + 1):
            assert client.ask("PUT", f"{TOPICS}/a.b", b"", **known).status == 400
    assert {line["event"] for line in lines()} == {"topic.create"}
    assert MAX_LINES_PER_MINUTE <= len(lines()) <= 2 * MAX_LINES_PER_MINUTE


def test_rollback_is_audited(lines: Lines) -> None:
    with serving() as server, Client(server.port) as client:
        server.service.create_topic(TopicId("default", "t"))
        body = b'{"transactionWritePointer": 5, "rollbackRange": {}}'
        client.ask("POST", f"{TOPICS}/t/rollback", body, content_type=JSON)
    assert [line["event"] for line in lines()] == ["messages.rollback"]


def test_administrative_calls_of_the_transaction_service_are_audited(lines: Lines) -> None:
    with (
        TransactionManager(MemoryStorage(), SystemClock()) as manager,
        served(manager) as service,
        TransactionClient(service.address) as client,
    ):
        transaction_id = client.start_short().transaction_id
        assert client.invalidate(transaction_id)
        client.truncate_invalid([transaction_id])
        assert not client.invalidate(transaction_id + 1)
        with pytest.raises(TruncateTimeError):
            client.truncate_invalid_before(client.start_short().transaction_id)
    found = records(lines)
    assert found[:3] == [
        ("transactions.invalidate", None, "invalidateTx", str(transaction_id), "done"),
        ("transactions.truncate", None, "truncateInvalidTx", str(transaction_id), "done"),
        ("transactions.invalidate", None, "invalidateTx", str(transaction_id + 1), "refused"),
    ]
    assert [one[2::2] for one in found[3:]] == [("truncateInvalidTxBefore", "refused")]
    assert {line["address"] for line in lines()} == {"127.0.0.1"}


def test_wrong_token_of_the_transaction_service_is_audited(lines: Lines, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.write_bytes(b"a wrong token")
    with (
        TransactionManager(MemoryStorage(), SystemClock()) as manager,
        served(manager, tokens={Level.CLIENT: lambda: b"the right token"}) as service,
        TransactionClient(service.address, token_file=shown) as client,
        pytest.raises(TokenRequired),
    ):
        client.start_short()
    assert records(lines) == [("request.unauthorized", None, "authenticate", "", "refused")]
    assert "a wrong token" not in str(lines())


def test_rejected_request_to_the_status_page_is_audited(lines: Lines, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("0123456789abcdef" * 2)
    TestClient(guarded(Starlette(), file)).get("/api/status", headers={"authorization": "Bearer wrong"})
    assert records(lines) == [("request.unauthorized", None, "GET", "/api/status", "refused")]


def test_page_lists_every_event() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/access.md").read_text(encoding="utf-8")
    table = page.partition("## The audit log")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z.]+)` \|", table, re.MULTILINE) == [event.value for event in Event]
