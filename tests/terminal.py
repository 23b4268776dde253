"""A simulated terminal, which runs the command lines of a documentation page one after the other.

    $ janitor run --config janitor.yaml &     runs a daemon in a thread of this process
    $ janitor status --config janitor.yaml    runs a command in the current thread
    $ curl -s localhost:9847/healthz          sends a request to the daemon's actual port
    $ kill -HUP %1                            returns after the sweep
    $ kill %1                                 returns the daemon's exit code

The clock stands still, so that a page can quote the output. The simulation differs from reality in two points: signals
are calls, because only a main thread receives signals, and the port is a free port. ``tests/test_tour.py`` sends real
signals to a real process.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from http.client import HTTPConnection
from threading import Event, Semaphore, Thread
from typing import Self

import click
import pytest
from starlette.types import ASGIApp

from janitor.cli.main import execute
from janitor.daemon.daemon import Daemon
from janitor.http.server import HttpServer
from tms_core.cli import main as tms
from tms_core.clock import ManualClock

#: The time limit of background work, in seconds.
PATIENCE_SECONDS = 60
#: The address of the janitor's HTTP server in the pages.
SERVED = "localhost:9847"


class StillClock(ManualClock):
    """A clock that only the test advances; :meth:`sleep` returns immediately."""

    def sleep(self, seconds: float) -> None:
        return


@dataclass
class Signals:
    """The signal handlers of the background process; None before its start."""

    term: Callable[[], None] | None = None
    hup: Callable[[], None] | None = None


class Background:
    def __init__(self, arguments: list[str], clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code: int | None = None
        self.port = 0
        self._signals = Signals()
        self._started = Event()
        self._swept = Semaphore(0)
        self._patch(monkeypatch, clock)
        self._thread = Thread(target=self._run, args=(arguments, clock), daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE_SECONDS), f"no HTTP server was started by: janitor {shlex.join(arguments)}"
        if arguments[0] == "run":
            self._wait_for_sweep()

    def hang_up(self) -> None:
        assert self._signals.hup is not None
        self._signals.hup()
        self._wait_for_sweep()

    def terminate(self) -> int:
        assert self._signals.term is not None
        self._signals.term()
        self._thread.join(PATIENCE_SECONDS)
        assert self.code is not None, "the daemon did not stop after SIGTERM"
        return self.code

    def _run(self, arguments: list[str], clock: ManualClock) -> None:
        self.code = execute(arguments, clock)
        self._started.set()

    def _wait_for_sweep(self) -> None:
        assert self._swept.acquire(timeout=PATIENCE_SECONDS), "no sweep has finished"

    def _patch(self, monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
        background = self

        class Server(HttpServer):
            def __init__(self, app: ASGIApp, host: str, port: int) -> None:
                super().__init__(app, host, 0)

            def start(self) -> None:
                super().start()
                background.port = self.port
                background._started.set()

        class Sweeping(Daemon):
            def sweep(self) -> None:
                super().sweep()
                self.tick()
                background._swept.release()

        class Now(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.fromtimestamp(clock.now_ms() / 1000, tz)

        @contextmanager
        def collect_signals(
            ask: Callable[[], None],
            *,
            text: bytes = b"",  # noqa: ARG001 it has no terminal
            hangup: Callable[[], None] | None = None,
        ) -> Iterator[None]:
            background._signals = Signals(ask, hangup)
            yield

        monkeypatch.setattr("apscheduler.schedulers.base.datetime", Now)
        monkeypatch.setattr("janitor.app.serve.Daemon", Sweeping)
        monkeypatch.setattr("janitor.app.serve.HttpServer", Server)
        monkeypatch.setattr("janitor.app.serve.handle_signals", collect_signals)
        monkeypatch.setattr("janitor.app.exporter.HttpServer", Server)
        monkeypatch.setattr("janitor.app.exporter.handle_signals", collect_signals)


class Terminal:
    """A terminal in the current working directory.

    Args:
        clock: the clock of the commands.
        streams: the captured output.
        monkeypatch: restores the patches for a daemon in this process.
    """

    def __init__(
        self, clock: ManualClock, streams: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.clock = clock
        self._streams = streams
        self._monkeypatch = monkeypatch
        self._background: Background | None = None

    @property
    def busy(self) -> bool:
        return self._background is not None

    def type(self, line: str) -> tuple[int, str]:
        """Type a line; return its exit code and its standard output."""
        self._streams.readouterr()
        words = shlex.split(line, comments=True)
        word = words[words.index("|") + 2] if "|" in words else ""
        code = self._do(words[: words.index("|")] if word else words)
        printed = self._streams.readouterr().out
        if word:
            printed = "".join(line for line in printed.splitlines(keepends=True) if word in line)
        return code, printed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._background is not None:
            self._background.terminate()

    def _do(self, words: list[str]) -> int:
        name, *arguments = words
        if name == "janitor" and arguments[-1] == "&":
            assert self._background is None, "another daemon is already running"
            self._background = Background(arguments[:-1], self.clock, self._monkeypatch)
            return 0
        if name == "janitor":
            return execute(arguments, self.clock)
        if name == "tms":
            return tms.execute(arguments)
        if name == "kill":
            return self._kill(arguments)
        assert name == "curl", f"this terminal does not have the command {name}"
        return self._fetch(arguments[-1])

    def _kill(self, arguments: list[str]) -> int:
        assert self._background is not None, "no daemon is running"
        if arguments == ["-HUP", "%1"]:
            self._background.hang_up()
            return 0
        assert arguments == ["%1"]
        background, self._background = self._background, None
        return background.terminate()

    def _fetch(self, url: str) -> int:
        assert self._background is not None, "no daemon is running"
        host, _, path = url.removeprefix("http://").partition("/")
        assert host == SERVED
        connection = HTTPConnection("127.0.0.1", self._background.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", f"/{path}")
            click.echo(connection.getresponse().read())
        finally:
            connection.close()
        return 0


def exit_code(line: str) -> int:
    """Return the exit code in a command's comment, as in ``janitor run --once   # exit code 3``; 0 without one."""
    _, _, comment = line.partition("# exit code ")
    return int(comment or 0)
