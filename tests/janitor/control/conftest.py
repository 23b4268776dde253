"""A control server in this process, over a store in memory, and clients that behave as a test wants."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from janitor.control import Audience, Caller, ControlServer, RemoteEngine, wire
from janitor.control.desk import Asks
from janitor.engine import Engine
from janitor.inspect import Audit
from janitor.observe import Observer
from janitor.picture import Picture
from tests.builders import DAY, NOW_MS, Rig, janitor, topic
from tms_core.tables.memory import MemoryStore
from tms_core.tables.read_only import read_only

#: An audit as a test wants it: given the observer, and what tells it to end.
Act = Callable[[Observer, Callable[[], bool]], Audit]

PICTURE = Picture("0", "memory", "running", "apply", "every 60 s", NOW_MS)
STORE, SETTINGS = "memory:1", "digest"


@dataclass
class Views:
    """Counts how often it was nudged."""

    nudges: int = 0

    def picture(self) -> Picture:
        return PICTURE

    def nudge(self) -> None:
        self.nudges += 1


class Auditing(Engine):
    """An engine whose audits are the test's."""

    act: Act
    halted: Callable[[], bool]
    observer: Observer

    def audit(self) -> Audit:
        return self.act(self.observer, self.halted)


@dataclass
class Desk:
    """A server and what stands behind it.

    Attributes:
        act: what an audit does; None for a real one.
    """

    folder: Path
    rig: Rig
    audience: Audience
    views: Views = field(default_factory=Views)
    act: Act | None = None
    server: ControlServer | None = None

    def make_reader(self, observer: Observer, halted: Callable[[], bool]) -> Asks:
        rig = janitor(
            read_only(self.rig.store),
            state=self.rig.state,
            clock=self.rig.clock,
            snapshots=self.rig.snapshots,
            observer=observer,
            halted=halted,
        )
        if self.act is None:
            return rig.engine
        reader = Auditing(
            rig.store, rig.state, rig.snapshots, rig.clock, rig.engine.terms, token_hex=lambda size: "ab" * size
        )
        reader.act, reader.halted, reader.observer = self.act, halted, observer
        return reader

    def start(self, **options: Any) -> ControlServer:
        self.server = ControlServer(
            self.folder,
            options.pop("decider", self.rig.engine),
            self.make_reader,
            self.views,
            store=STORE,
            settings=SETTINGS,
            audience=self.audience,
            **options,
        )
        self.server.start()
        return self.server

    def remote(self, observer: Observer | None = None, **options: Any) -> RemoteEngine:
        caller = Caller(self.folder, *([observer] if observer else []), **options)
        greeting = caller.greeting()
        assert greeting is not None
        return RemoteEngine(caller, greeting)

    def connect(self) -> Client:
        return Client(self.folder)


class Client:
    """A client that says what it likes."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        with wire.address(folder) as address:
            self.socket.connect(address)
        self._lines = wire.lines(self.socket)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, raw: bytes) -> None:
        # A server may have sent us away before we had said anything.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(raw)

    def ask(self, method: str, **params: Any) -> None:
        self.say(json.dumps({"protocol": wire.PROTOCOL, "method": method, "params": params}).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None where the server has hung up."""
        return next(self._lines, None)

    def answer(self) -> dict[str, Any] | None:
        """The next message that is no progress."""
        return next((message for message in self._lines if "progress" not in message), None)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A store with two expired messages, adopted; its server is not started yet."""
    audience = Audience()
    rig = janitor(MemoryStore(), observer=audience)
    topic(rig.store, "default:orders", ttl_seconds=3600).plain(NOW_MS - DAY, NOW_MS - DAY + 1, NOW_MS)
    rig.engine.adopt()
    made = Desk(tmp_path, rig, audience)
    yield made
    if made.server is not None:
        made.server.stop()
