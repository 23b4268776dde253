"""Access to the state without the store, for verbs that work while a daemon runs and without a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from janitor.app.options import Common
from janitor.app.place import Place
from janitor.cli import render
from janitor.state.base import State
from janitor.state.topic_history import TOPICS
from tms_core.clock import SystemClock
from tms_core.errors import TmsError
from tms_core.logs.printable import complete
from tms_core.settings import yaml_file

if TYPE_CHECKING:
    from janitor.app.session import Session

_DAY_MS = 86_400_000


@contextmanager
def open_state(current: Session) -> Iterator[State | None]:
    """Open the state; yield None if it does not exist, without creating it.

    Raises:
        StoreNotFound: neither the state nor the store exists: the place is probably wrong.
        StoreError: the state cannot be read.
    """
    if not current.place.has_state():
        current.place.require()
        yield None
        return
    with current.place.state() as state:
        yield state


def unknown_run(current: Session, run_id: str) -> click.UsageError:
    """Return the error of a command that names a run of which the state has no record."""
    runs = complete("list the runs: janitor history", current.arguments())
    return click.UsageError(f"unknown run {run_id}; {runs}")


def complete_topics(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the known topics with a prefix, for shell completion; empty if the state is unreadable."""
    before = context.find_root().params
    config, leveldb, hbase = (context.params.get(name) or before.get(name) for name in ("config", "leveldb", "hbase"))
    try:
        place = place_of(config, leveldb, hbase)
        with place.state() if place.has_state() else nullcontext() as state:
            known = [topic.name for topic in TOPICS.read(state)] if state else []
    except TmsError:
        return []
    return [name for name in known if name.startswith(incomplete)]


def place_of(config: Path | None, leveldb: str | None, hbase: str | None) -> Place:
    """Return the place of the state; for a LevelDB store without loading the settings, which is slow in a shell."""
    folder = None if hbase else _state_folder(config, leveldb)
    if folder is not None:
        from janitor.app.leveldb_place import LevelDBPlace  # noqa: PLC0415 a store in HBase does not need LevelDB

        return LevelDBPlace(Path(), folder)
    from janitor.app.session import Session  # noqa: PLC0415

    return Session(Common(config, leveldb, hbase), SystemClock()).place


def _state_folder(config: Path | None, leveldb: str | None) -> Path | None:
    """Return the state folder of a LevelDB store from flags, environment and file; None for other kinds of stores."""
    content = yaml_file.read(config) if config else {}

    def setting(path: str, default: str = "") -> str:
        found: Any = content
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return str(os.environ.get(f"TMS_{path.replace('.', '__')}".upper()) or found or default)

    if not leveldb and setting("storage.kind", "leveldb") != "leveldb":
        return None
    folder = (config.parent if config else Path()).absolute()
    if named := setting("janitor.state"):
        return folder / named
    store = Path(leveldb).absolute() if leveldb else folder / setting("storage.leveldb.path", "data/messaging")
    return Path(f"{store.resolve()}.janitor")


def start_times(state: State | None) -> dict[str, Any]:
    """Return the times of the creation of the state and of the adoption, as JSON values."""
    record = state.store() if state else None
    return {
        "known_since_ms": state.created_ms() if state else None,
        "adopted_ms": record.adopted_ms if record else None,
    }


def explain_start_times(current: Session, state: State | None, oldest_ms: int | None = None) -> list[str]:
    """Return sentences about the time from which on the state has records, and the reason for missing records.

    Args:
        oldest_ms: the time of the oldest shown record, which may be before the recorded creation of the state.
    """
    archive = "rows that were archived can still be listed: janitor archive list"
    archive = complete(archive, current.arguments())
    if state is None:
        return [
            f"no state at {current.place.state_name}: no janitor has run here yet, or the state was lost; {archive}"
        ]
    known = start_times(state)
    since_ms, adopted_ms = known["known_since_ms"], known["adopted_ms"]
    if since_ms is None:
        return ["this state has no record of its creation"]
    lines = []
    if oldest_ms is not None:
        since_ms = min(since_ms, oldest_ms)
    days = current.settings.janitor.history_days
    if current.clock.now_ms() - since_ms >= days * _DAY_MS:
        lines.append(f"known: the last {days} days")
    else:
        lines.append(f"known since {render.moment(since_ms)}; nothing older is in this state; {archive}")
    if adopted_ms is not None and adopted_ms < since_ms:
        lines.append(
            f"the store was adopted {render.moment(adopted_ms)}: records from before this state was created are lost"
        )
    return lines
