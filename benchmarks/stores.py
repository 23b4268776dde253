"""LevelDB stores for the benchmarks, and an engine to sweep them with."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from janitor.report import Observer, ignore_progress
from janitor.rules.ranges import Lifetime
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Terms
from janitor.sweep.sweep import Threads
from tms_core.clock import Clock
from tms_core.rowkey import MessageKey
from tms_core.tables.base import MessageValue, Reads
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId, encode_properties
from tms_core.transaction.source.source import SnapshotSource

#: The current time in all benchmark stores.
NOW_MS = 1_700_000_000_000
TTL_SECONDS = 3600
BODY = b"x" * 100
BATCH_ROWS = 4000
TERMS = Terms(
    hold_seconds=3600,
    protect=(),
    lifetime=Lifetime(max_ms=90_000_000, grace_ms=86_400_000, allowance_ms=300_000),
    lifetime_known=True,
    snapshot_interval_seconds=60,
    batch_rows=BATCH_ROWS,
)


def topic_names(count: int) -> list[TopicId]:
    return [TopicId("default", f"t{number:04d}") for number in range(count)]


def build(path: Path, topics: Iterable[TopicId], rows_each: int, newest_ms: int, step_ms: int) -> None:
    """Write a store of plain messages, ``rows_each`` a topic, ``step_ms`` apart, the last one at ``newest_ms``."""
    with LevelDBStore(path, create=True) as store:
        for topic in topics:
            properties = {"generation": "1", "ttl": str(TTL_SECONDS)}
            store.metadata.compare_and_set(topic.prefix, None, encode_properties(properties))
            rows = _rows(topic, rows_each, newest_ms, step_ms)
            while batch := list(islice(rows, 10_000)):
                store.message.put(batch)


def _rows(topic: TopicId, count: int, newest_ms: int, step_ms: int) -> Iterator[tuple[bytes, MessageValue]]:
    value = MessageValue(None, BODY)
    for number in range(count):
        yield MessageKey(topic, 1, newest_ms - (count - 1 - number) * step_ms, 0).pack(), value


def engine(
    store: Reads,
    clock: Clock,
    observer: Observer = ignore_progress,
    *,
    workers: int = 1,
    source: SnapshotSource | None = None,
) -> Engine:
    """Return an engine with an empty state."""
    deps = Deps(
        store,
        SqliteState.in_memory(),
        source,
        clock,
        TERMS,
        token_hex=secrets.token_hex,
        division=Threads(workers),
        observer=observer,
    )
    return Engine(deps)
