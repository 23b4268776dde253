"""Fixtures of a folder with a small store, its snapshots and a settings file, in which tests run commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from janitor.cli.main import execute
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, encode_state, pointer, topic, visibility
from tms_core.clock import ManualClock
from tms_core.tables.leveldb.store import LevelDBStore

#: A transaction that published one message and became invalid.
INVALID = pointer(NOW_MS - 4 * HOUR)

SETTINGS = """\
storage: {leveldb: {path: data/messaging}}
transactions:
  source: directory
  directory: data/tx
  max_lifetime_seconds: 3600
  grace_seconds: 3600
janitor: {state: data/janitor}
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a command: its exit code and its two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class CommandKit:
    """A folder in which a test runs commands, with a manual clock."""

    folder: Path
    clock: ManualClock
    streams: pytest.CaptureFixture[str]

    @property
    def store(self) -> Path:
        return self.folder / "data" / "messaging"

    def run(self, line: str) -> Outcome:
        """Run a command line (without ``janitor``) unchanged."""
        self.streams.readouterr()
        code = execute(shlex.split(line), self.clock)
        return Outcome(code, *self.streams.readouterr())

    def janitor(self, line: str) -> Outcome:
        """Run a command line with the settings of the folder."""
        return self.run(f"{line} --config janitor.yaml")

    def set(self, text: str) -> None:
        """Add lines to the settings file; an existing section must be complete."""
        (self.folder / "janitor.yaml").write_text(text, encoding="utf-8")

    def set_ttl(self, name: str, seconds: int) -> None:
        """Set the TTL of a topic as CDAP does; create the topic if it does not exist."""
        with LevelDBStore(self.store) as store:
            topic(store, name, ttl_seconds=seconds)

    def snapshot(self, invalid: Iterable[int] = (INVALID,), *, age_ms: int = 1000, name: str = "") -> None:
        taken_ms = self.clock.now_ms() - age_ms
        state = encode_state(visibility(taken_ms, invalid))
        (self.folder / "data" / "tx" / (name or f"snapshot.{taken_ms}")).write_bytes(state)


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandKit:
    """Return a store with two expired messages, a live one and an invalid one, and a deleted topic with a row."""
    monkeypatch.chdir(tmp_path)
    made = CommandKit(tmp_path, ManualClock(NOW_MS, monotonic_ms=DAY), capsys)
    made.store.mkdir(parents=True)
    (tmp_path / "data" / "tx").mkdir()
    with LevelDBStore(made.store, create=True) as store:
        orders = topic(store, "default:orders", ttl_seconds=86400)
        orders.plain(NOW_MS - 3 * DAY, NOW_MS - 2 * DAY, NOW_MS - MINUTE)
        orders.tx(INVALID, NOW_MS - 3 * HOUR)
        topic(store, "default:retired", ttl_seconds=86400, generation=-1).plain(NOW_MS - HOUR)
    made.snapshot()
    made.set(SETTINGS)
    return made
