"""Permissions: every route, role and kind of token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.builders import NOW_MS
from tests.server.client import JSON, Client
from tests.server.conftest import Serving, serving
from tests.server.identities import ROLES, Identities, JwtIdentities, TokenIdentities, gate_of
from tests.test_docs import tables
from tms_core.clock import ManualClock, SystemClock
from tms_core.messaging.service import MessagingService
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest import app
from tms_core.server.rest.app import GuardedRoute
from tms_core.server.rest.context import ServerContext
from tms_core.server.rest.openapi import openapi
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId

TOPICS = "/v1/namespaces/{namespace}/topics"
TOPIC = TOPICS + "/{topic}"
EVERYBODY, KNOWN, ANY = {"nobody", *ROLES}, {*ROLES}, {"admin", "publisher", "consumer", "owner"}
ADMIN, PUBLISH, CONSUME = {"admin", "owner"}, {"publisher", "owner"}, {"consumer", "owner"}

PAGE = Path(__file__).parents[2] / "docs/reference/rest-consumers.md"
#: The principals with access to a route, by the first column of the page's table of permissions.
NEEDS = {
    "nothing": EVERYBODY,
    "a token": KNOWN,
    "`observe`": {"observer"},
    "`admin`": ADMIN,
    "`publish`": PUBLISH,
    "`consume`": CONSUME,
    "any of the three": ANY,
}


def documented_access() -> dict[tuple[str, str], set[str]]:
    """Return the principals with access to each route, from the page's table of permissions."""
    [rows] = [rows for head, *rows in tables(PAGE.read_text(encoding="utf-8")) if head == ["needs", "routes"]]
    return {
        (method, path.replace("/topics", TOPICS, 1) if path.startswith("/topics") else path): NEEDS[needs]
        for needs, routes in rows
        for method, path in re.findall(r"([A-Z]+) `([^`]+)`", routes)
    }


ACCESS = documented_access()


@pytest.fixture(scope="module")
def routes() -> Iterator[list[GuardedRoute]]:
    with ThreadPoolExecutor(1) as threads, MessagingService(MemoryStore(), SystemClock(), side=MemorySide()) as service:
        found = app.routes(ServerContext(service, threads, ServerMetrics(CollectorRegistry(), service), 1))
        assert set(calls(found)) == set(ACCESS), f"correct the table of permissions in {PAGE.name}"
        yield found


def calls(routes: list[GuardedRoute]) -> list[tuple[str, str]]:
    return [(method, route.path) for route in routes for method in route.needs]


@pytest.fixture(scope="module", params=[TokenIdentities, JwtIdentities])
def identities(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Identities:
    made: Identities = request.param(tmp_path_factory.mktemp("identities"))
    return made


@pytest.fixture(scope="module")
def server(identities: Identities) -> Iterator[Serving]:
    with serving(gate=identities.gate) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    with Client(server.port) as connection:
        yield connection


def headers(token: str | None) -> dict[str, str]:
    return {"content_type": JSON} | ({} if token is None else {"authorization": f"Bearer {token}"})


def ask(client: Client, method: str, path: str, token: str | None, *, topic: str = "t") -> tuple[int, dict[str, str]]:
    url = path.format(namespace="default", topic=topic, name="me")
    answer = client.ask(method, url, b"" if method == "GET" else b"{}", **headers(token))
    return answer.status, answer.headers


# --- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_role_has_the_permissions_of_the_table(
    server: Serving, client: Client, identities: Identities, routes: list[GuardedRoute], role: str
) -> None:
    found = {}
    for method, path in calls(routes):
        if not server.service.topics("default"):
            server.service.create_topic(TopicId("default", "t"), {})
        status, _ = ask(client, method, path, identities.good(role))
        assert status != 401, (method, path)
        found[method, path] = status != 403
    assert found == {call: role in ACCESS[call] for call in found}


@pytest.mark.parametrize("kind", ["none", "wrong", "expired"])
@pytest.mark.parametrize("role", ROLES)
def test_request_without_a_good_token_gets_in_nowhere_but_ping(
    server: Serving, client: Client, identities: Identities, routes: list[GuardedRoute], role: str, kind: str
) -> None:
    tokens = {"none": None, "wrong": identities.wrong(role), "expired": identities.expired(role)}
    for method, path in calls(routes):
        status, got = ask(client, method, path, tokens[kind], topic="untouched")
        let_in = "nobody" in ACCESS[method, path]
        assert status == (200 if let_in else 401), (method, path)
        assert ("www-authenticate" in got) == (not let_in)
        assert let_in or got["www-authenticate"].startswith("Bearer ")
    assert "untouched" not in server.service.topics("default")


def test_path_or_method_that_does_not_exist_is_401_without_a_token(client: Client, identities: Identities) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("POST", "/ping", 405), ("PATCH", TOPIC, 405)):
        assert ask(client, method, path, None)[0] == 401
        assert ask(client, method, path, identities.good("stranger"))[0] == status


def test_every_route_is_in_the_description(routes: list[GuardedRoute]) -> None:
    described = openapi(secured=True)["paths"]
    assert set(calls(routes)) == {
        (name.upper(), path) for path, item in described.items() for name in item if name != "parameters"
    }
    for path, item in described.items():
        for name, operation in item.items():
            if name != "parameters":
                open_to_all = ACCESS[name.upper(), path] == EVERYBODY
                assert ("security" in operation) != open_to_all
                assert ({"401", "403"} <= set(operation["responses"])) != open_to_all


def test_document_of_a_server_with_tokens_requires_them(client: Client, identities: Identities) -> None:
    document = client.ask("GET", "/openapi.json", b"", **headers(identities.good("stranger"))).json
    assert document == openapi(secured=True)
    calls = [call for item in document["paths"].values() for call in item.values() if isinstance(call, dict)]
    schemes = {name for call in calls for scheme in call.get("security", []) for name in scheme}
    assert schemes == document["components"]["securitySchemes"].keys()


def test_page_lists_the_permission_of_each_route() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/rest-consumers.md").read_text(encoding="utf-8")
    table = page.partition("| needs | routes |")[2].partition("\n\n")[0]
    words = {"nothing": EVERYBODY, "a token": KNOWN, "any of the three": ANY}
    words |= {"`observe`": {"observer"}, "`admin`": ADMIN, "`publish`": PUBLISH, "`consume`": CONSUME}
    messages = {}
    for line in table.splitlines()[2:]:
        _, needs, routes, _ = line.split("|")
        for method, path in re.findall(r"([A-Z]+) `(/[^`]*)`", routes):
            inside = path.startswith("/topics")
            messages[method, f"/v1/namespaces/{{namespace}}{path}" if inside else path] = words[needs.strip()]
    assert messages == ACCESS


def test_route_without_its_permission_is_rejected_at_once(monkeypatch: pytest.MonkeyPatch, server: Serving) -> None:
    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        """Do nothing: no request reaches the endpoint."""

    with pytest.raises(TypeError, match="needs"):
        GuardedRoute("/open", endpoint, "open")  # type: ignore[call-arg]
    monkeypatch.setattr(app, "routes", lambda _: [Route("/open", endpoint)])
    with ThreadPoolExecutor(1) as threads, pytest.raises(AttributeError, match="guard"):
        app.make_app(ServerContext(server.service, threads, server.metrics, 1))


# --- hidden topics ---------------------------------------------------------------------------------------------------


def test_topic_without_permission_is_forbidden_whether_or_not_it_exists(
    server: Serving, client: Client, identities: Identities, routes: list[GuardedRoute]
) -> None:
    server.service.create_topic(TopicId("default", "there-1"), {})
    for method, path in calls(routes):
        if "{topic}" not in path:
            continue
        answers = []
        for topic in ("there-1", "absent1"):
            url = path.format(namespace="default", topic=topic, name="me")
            answer = client.ask(method, url, b"{}", **headers(identities.good("stranger")))
            answers.append((answer.status, answer.headers["content-type"], answer.text.replace(topic, "")))
        assert answers[0] == answers[1]
        assert answers[0][0] == 403
    server.service.delete_topic(TopicId("default", "there-1"))


def test_list_of_topics_shows_only_permitted_topics(tmp_path: Path) -> None:
    identities = TokenIdentities(tmp_path)
    with serving(gate=identities.gate) as server, Client(server.port) as client:
        for name in ("default:a", "other:b"):
            server.service.create_topic(TopicId.parse(name), {})

        def list_topics(role: str, namespace: str) -> object:
            return client.ask("GET", f"/v1/namespaces/{namespace}/topics", b"", **headers(identities.good(role))).json

        assert client.ask("GET", "/v1/topics", b"", **headers(identities.good("consumer"))).json == ["default:a"]
        assert list_topics("consumer", "default") == ["a"]
        assert list_topics("consumer", "other") == []
        assert list_topics("stranger", "default") == []
        assert list_topics("stranger", "other") == ["b"]


@pytest.mark.usefixtures("server")
def test_producer_of_a_topic_without_permission_cannot_be_used(client: Client, identities: Identities) -> None:
    named = {"x_tms_producer": "elsewhere:t/x", "x_tms_generation": "1", "x_tms_sequence": "1"}
    token = identities.good("publisher")
    url = TOPIC.format(namespace="default", topic="t")
    assert client.ask("POST", f"{url}/publish", b'{"messages": ["a"]}', **headers(token), **named).status == 403


# --- partitions and routes -------------------------------------------------------------------------------------------


@pytest.fixture
def orders_admin(tmp_path: Path) -> Iterator[tuple[Serving, Client, dict[str, str]]]:
    """Run a server; yield a client with permissions for ``default:orders`` and its partition 0 only."""
    token, file = new_token(), tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(token_line("ada", token))
    rules = [{"principal": "ada", "topics": ["default:orders", "default:orders-0"], "can": ["admin"]}]
    gate = gate_of(ManualClock(NOW_MS), kind="tokens", tokens_file=file, rules=rules)
    with serving(gate=gate) as server, Client(server.port) as client:
        yield server, client, headers(token)


@pytest.mark.parametrize("properties", [{"partitions": "2"}, {"routes": '{"users": 1}'}])
def test_topic_creation_without_permission_on_a_part_is_rejected(
    orders_admin: tuple[Serving, Client, dict[str, str]], properties: dict[str, str]
) -> None:
    server, client, known = orders_admin
    path = TOPIC.format(namespace="default", topic="orders")
    answer = client.ask("PUT", path, json.dumps(properties).encode(), **known)
    assert answer.status == 403
    assert answer.text.startswith("ada may not admin on default:orders-")
    assert server.service.topics("default") == []


def test_rejected_creation_does_not_tell_whether_a_part_exists(
    orders_admin: tuple[Serving, Client, dict[str, str]],
) -> None:
    server, client, known = orders_admin
    path = TOPIC.format(namespace="default", topic="orders")
    absent = client.ask("PUT", path, b'{"partitions": "2"}', **known)
    server.service.create_topic(TopicId("default", "orders-1"))
    present = client.ask("PUT", path, b'{"partitions": "2"}', **known)
    assert (absent.status, absent.body) == (present.status, present.body)


def test_topic_change_without_a_new_parts_permission(orders_admin: tuple[Serving, Client, dict[str, str]]) -> None:
    server, client, known = orders_admin
    path = TOPIC.format(namespace="default", topic="orders")
    assert client.ask("PUT", path, b'{"partitions": "1"}', **known).status == 200
    before = server.service.topic(TopicId("default", "orders"))
    answer = client.ask("PUT", f"{path}/properties", b'{"partitions": "2", "ttl": "60"}', **known)
    assert (answer.status, "default:orders-f2-0" in answer.text) == (403, True)
    assert server.service.topic(TopicId("default", "orders")) == before
    assert server.service.topics("default") == ["orders-0", "orders"]
