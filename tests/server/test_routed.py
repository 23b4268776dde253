"""Routing of paths: as Starlette, except for a trailing slash."""

from __future__ import annotations

import asyncio

import pytest
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tms_core.server.rest.app import combine_routes


class ScopeRecorder:
    """An application that records the scopes of its requests."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)


def ask(app: ASGIApp, method: str, path: str) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": method, "path": path, "headers": []}

    async def send_requests() -> None:
        await app(scope, receive, send)

    asyncio.run(send_requests())
    return sent


@pytest.mark.parametrize("name", ["short", "x" * 1000])
def test_request_reaches_the_route_of_its_path(name: str) -> None:
    first, second, default = ScopeRecorder(), ScopeRecorder(), ScopeRecorder()
    routes = [Route("/{topic}/a", first, methods=["POST"], name="a"), Route("/{topic}", second, name="b")]
    paths = combine_routes(routes, default)
    ask(paths, "POST", f"/{name}/a")
    ask(paths, "GET", f"/{name}")
    ask(paths, "GET", f"/{name}/b")
    for app, route in ((first, "a"), (second, "b")):
        assert [(scope["route"].name, scope["path_params"]) for scope in app.scopes] == [(route, {"topic": name})]
    assert len(default.scopes) == 1
    assert all("route" not in scope for scope in default.scopes)


def test_path_with_a_slash_at_the_end_counts_without_it() -> None:
    app, default = ScopeRecorder(), ScopeRecorder()
    paths = combine_routes([Route("/{topic}", app, methods=["PUT"])], default)
    for _ in range(2):
        ask(paths, "PUT", "/t/")
        [start, *_] = ask(paths, "GET", "/t/")
        assert start["status"] == 405
    assert [scope["path_params"] for scope in app.scopes] == [{"topic": "t"}] * 2
    for path in ("/t//", "//", "/"):
        ask(paths, "PUT", path)
    assert len(default.scopes) == 3


def test_request_with_an_unknown_method_is_405_with_allow() -> None:
    app = ScopeRecorder()
    paths = combine_routes([Route("/{topic}", app, methods=["PUT"]), Route("/{other}", app, methods=["POST"])], app)
    for _ in range(2):
        start, *_ = ask(paths, "DELETE", "/t")
        assert (start["status"], dict(start["headers"])[b"allow"]) == (405, b"PUT")
    ask(paths, "POST", "/t")
    assert [scope["path_params"] for scope in app.scopes] == [{"other": "t"}]
