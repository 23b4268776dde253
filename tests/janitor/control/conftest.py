"""Fixtures of a control server in this process, with a store in memory, and of clients with any behavior."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from janitor.control import api
from janitor.control.api import ControlBackend, Observers, ReadEngine, process_identity
from janitor.control.client import Caller, RemoteEngine
from janitor.control.server import ControlServer
from janitor.inspect.rows import Audit
from janitor.report import Observer
from janitor.run.engine import Engine
from janitor.status.status import Status
from tests.builders import DAY, NOW_MS, Kit, janitor, topic
from tms_core.tables.memory import MemoryStore
from tms_core.tables.read_only import read_only

#: A fake audit; its arguments are the observer and a function that returns whether it must stop.
FakeAudit = Callable[[Observer, Callable[[], bool]], Audit]

STATUS = Status("0", "memory", "running", "apply", "every 60 s", NOW_MS)
STORE, SETTINGS = "memory:1", "digest"


@dataclass
class CountingViews:
    """Status views that count the requests to refresh and to sweep."""

    refreshed: int = 0
    swept: int = 0

    def status(self) -> Status:
        return STATUS

    def refresh_status(self) -> None:
        self.refreshed += 1

    def sweep_now(self) -> None:
        self.swept += 1


class FakeAuditEngine(Engine):
    audit: FakeAudit
    is_stopping: Callable[[], bool]
    observer: Observer

    def verify(self) -> Audit:
        return self.audit(self.observer, self.is_stopping)


@dataclass
class ControlKit:
    """A control server with its store, state and engine.

    Attributes:
        audit: the fake audit; None for a real audit.
    """

    folder: Path
    janitor: Kit
    observers: Observers
    views: CountingViews = field(default_factory=CountingViews)
    audit: FakeAudit | None = None
    server: ControlServer | None = None

    def make_reader(self, observer: Observer, is_stopping: Callable[[], bool]) -> ReadEngine:
        face = read_only(self.janitor.store)
        deps = replace(self.janitor.engine.deps, store=face, observer=observer, is_stopping=is_stopping)
        if self.audit is None:
            return Engine(deps)
        reader = FakeAuditEngine(deps)
        reader.audit, reader.is_stopping, reader.observer = self.audit, is_stopping, observer
        return reader

    def start(self, **options: Any) -> ControlServer:
        backend = ControlBackend(
            options.pop("decider", self.janitor.engine),
            self.make_reader,
            self.views,
            process_identity(STORE, SETTINGS),
            self.observers,
            options.pop("page", None),
        )
        self.server = ControlServer(self.folder, backend, **options)
        self.server.start()
        return self.server

    def remote(self, observer: Observer | None = None, **options: Any) -> RemoteEngine:
        caller = Caller(self.folder, *([observer] if observer else []), **options)
        process_identity = caller.process_identity()
        assert process_identity is not None
        return RemoteEngine(caller, process_identity)

    def connect(self) -> Client:
        return Client(self.folder)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one request; return the response."""
        with self.connect() as client:
            client.ask(method, **params)
            return client.read_response()


class Client:
    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        with api.address(folder) as address:
            self.socket.connect(address)
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        if self._response is not None:
            self._response.close()

    def send(self, raw: bytes) -> None:
        # A server may have rejected the connection before the first request.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(raw)

    def post(self, method: str, body: bytes) -> None:
        head = f"POST /control/{method} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def ask(self, method: str, **params: Any) -> None:
        self.post(method, json.dumps({"protocol": api.PROTOCOL, "params": params}).encode())

    @property
    def response(self) -> http.client.HTTPResponse:
        """Return the response, or at least its head."""
        if self._response is None:
            self._response = http.client.HTTPResponse(self.socket)
            self._response.begin()
        return self._response

    def line(self) -> bytes:
        """Return the next line; empty after the last line of the server."""
        try:
            return self.response.readline()
        except (ConnectionError, http.client.HTTPException):
            return b""

    def read_message(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line())
        return found

    def read_response(self) -> dict[str, Any]:
        """Return the next message, except for progress."""
        while "progress" in (message := self.read_message()):
            continue
        return message


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[ControlKit]:
    """Return an adopted store with two expired messages; its server is not started yet."""
    observers = Observers()
    kit = janitor(MemoryStore(), observer=observers)
    topic(kit.store, "default:orders", ttl_seconds=3600).plain(NOW_MS - DAY, NOW_MS - DAY + 1, NOW_MS)
    kit.engine.adopt()
    made = ControlKit(tmp_path, kit, observers)
    yield made
    if made.server is not None:
        made.server.stop()
