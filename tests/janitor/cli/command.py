"""The command as a test types it, and the places it is pointed at."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from janitor.cli.main import execute
from janitor.logs import OURS
from tests.builders import NOW_MS, visibility
from tms_core.clock import ManualClock
from tms_core.tables.base import Store
from tms_core.tables.leveldb import LevelDBStore
from tms_core.transaction.model import Snapshot
from tms_core.transaction.snapshot import write_snapshot

#: The snapshot must be younger than twice this (rule S14).
INTERVAL_SECONDS = 1000


@dataclass(frozen=True)
class Result:
    """What a command left on a terminal."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def logged(self) -> list[dict[str, Any]]:
        """Standard error as the JSON objects that it must be in a pipe."""
        return [json.loads(line) for line in self.err.splitlines()]


@dataclass(frozen=True)
class Place:
    """A store, its snapshots and a settings file, in a folder of the test's own."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "messaging"

    @property
    def snapshots(self) -> Path:
        return self.folder / "tx.snapshot"

    @property
    def state(self) -> Path:
        return self.folder / "messaging.janitor"

    @property
    def config(self) -> Path:
        return self.folder / "janitor.yaml"

    @property
    def options(self) -> list[str]:
        return ["--leveldb", str(self.store), "--snapshots", str(self.snapshots), "--config", str(self.config)]

    def configure(self, *, transactions: dict[str, Any] | None = None, janitor: dict[str, Any] | None = None) -> None:
        """Write the settings file, with an interval in which the snapshot counts as fresh."""
        timely = {"snapshot_interval_seconds": INTERVAL_SECONDS, **(transactions or {})}
        self.config.write_text(yaml.safe_dump({"transactions": timely, "janitor": janitor or {}}), encoding="utf-8")

    def fill(self, write: Callable[[Store], object]) -> None:
        """Write rows into the store, which is made where there is none."""
        with LevelDBStore(self.store, create=True) as store:
            write(store)

    def snapshot(self, taken_ms: int = NOW_MS, invalid: Iterable[int] = (), newest: int | None = None) -> None:
        """Write a transaction snapshot."""
        self.snapshots.mkdir(exist_ok=True)
        with (self.snapshots / f"snapshot.{taken_ms}").open("wb") as stream:
            write_snapshot(stream, Snapshot(visibility(taken_ms, invalid, newest=newest)))

    def digests(self) -> dict[str, str]:
        """Every file below the store, by its content."""
        files = sorted(path for path in self.store.rglob("*") if path.is_file())
        return {str(path.relative_to(self.store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass(frozen=True)
class Janitor:
    """Runs commands on one place, at the time of its clock."""

    place: Place
    clock: ManualClock
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> Result:
        """Run a command on the place."""
        return self.bare(*arguments, *self.place.options)

    def bare(self, *arguments: str) -> Result:
        """Run a command just as it is given."""
        code = execute(arguments, self.clock)
        captured = self.capsys.readouterr()
        return Result(code, captured.out, captured.err)

    def report(self, *arguments: str) -> Any:
        """The JSON of a command that succeeds."""
        result = self(*arguments, "--format", "json")
        assert result.code == 0, result.err
        return result.json


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Put the process's logging back, which every command sets up anew."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in OURS:
            logging.getLogger(name).setLevel(logging.NOTSET)


@contextmanager
def held_elsewhere(store: Path) -> Iterator[int]:
    """Another process that has the store open; yields its id."""
    script = (
        "import sys; from tms_core.tables.leveldb import LevelDBStore\n"
        f"store = LevelDBStore({str(store)!r})\n"
        "print('held', flush=True); sys.stdin.read(); store.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
        holder.stdin.close()
