"""Fixtures of the janitor's web application, called directly or through its server on a free loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import NamedTuple

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from janitor.http.app import StatusViews, make_app
from janitor.http.server import HttpServer

ARGUMENTS = "--config janitor.yaml"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Recorder:
    """An application that records the paths of all requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await self._app(scope, receive, send)


class DirectClient:
    def __init__(self, views: StatusViews, host: str = "127.0.0.1") -> None:
        self._app = make_app(views, host, ARGUMENTS)

    def ask(self, target: str, method: str = "GET", **headers: str) -> Answer:
        """Send a request; headers have ``_`` in place of ``-``. Exceptions of the application reach the test."""
        path, _, query = target.partition("?")
        given = {"host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self._app(scope, receive, send))
        named = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], named, b"".join(message.get("body", b"") for message in sent[1:]))


class HttpKit:
    def __init__(self, views: StatusViews, port: int = 0) -> None:
        self.recorder = Recorder(make_app(views, arguments=ARGUMENTS))
        self.server = HttpServer(self.recorder, "127.0.0.1", port)
        self.server.start()

    @property
    def url(self) -> str:
        return self.server.url

    def ask(self, path: str, method: str = "GET") -> Answer:
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., HttpKit]]:
    """Return a function that starts a server; all servers stop with the test."""
    kits: list[HttpKit] = []

    def start(views: StatusViews, port: int = 0) -> HttpKit:
        kits.append(HttpKit(views, port))
        return kits[-1]

    yield start
    for kit in kits:
        kit.server.stop()
