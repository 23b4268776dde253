"""Tables on the HBase of a test run, created in parallel and reused, because the creation of three takes a second."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.builders import HOUR, topic
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tms_core.clock import Clock, SystemClock
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import KEYS
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import HBaseRows
from tms_core.tables.hbase.schema import TableSpec, create_tables, table_name, table_specs
from tms_core.tables.hbase.store import HBaseStore

#: For the tables of a developer: the number of salts, as in CDAP, and the messages of a topic and of one put.
FILLED_BUCKETS, TOPIC_ROWS, PUT_ROWS = 16, 50_000, 5_000


class Tables:
    """Tables for the tests of one process, each set in its own namespace."""

    def __init__(self, server: HBaseServer) -> None:
        self.server = server
        self._shared: dict[int, str] = {}
        self._open = ExitStack()
        self._admin = HBasePool(
            [server.require_thrift2()], connections=3, timeout_seconds=PATIENCE_SECONDS, service="HbaseAdmin"
        )
        self._open.callback(self._admin.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def make(self, *, buckets: int = 4, cuts: Sequence[bytes] | None = None, messages: str | None = None) -> str:
        """Create three empty tables and return their namespace.

        Args:
            buckets: the number of salts of the message table and the payload table.
            cuts: the start keys of their regions, except the first, and allow splits; None: the regions of CDAP.
            messages: a snapshot to clone as message table, with the same number of buckets; None: an empty table.
        """
        namespace = f"test_{secrets.token_hex(6)}"
        meta, *salted = table_specs(namespace, buckets, "NONE")
        if cuts is not None:
            salted = [_cut(spec, cuts) for spec in salted]
        create_tables(self._admin, [meta])
        if messages is not None:
            message, *salted = salted
            self.server.command("clone", message.full_name, messages)
        with ThreadPoolExecutor() as threads:
            for made in [threads.submit(create_tables, self._admin, [spec]) for spec in salted]:
                made.result()
        return namespace

    def shared(self, *, buckets: int = 4) -> str:
        """Return the namespace of reused tables, without the rows of earlier tests."""
        if buckets not in self._shared:
            self._shared[buckets] = self.make(buckets=buckets)
        with self.open(self._shared[buckets], buckets=buckets) as store:
            empty(store, self._shared[buckets])
        return self._shared[buckets]

    def store(self, *, buckets: int = 4) -> HBaseStore:
        """Return an empty store on :meth:`shared` tables; a store returned earlier becomes empty too."""
        return self._open.enter_context(self.open(self.shared(buckets=buckets), buckets=buckets))

    def open(self, namespace: str, *, buckets: int = 4) -> HBaseStore:
        return PatientStore([self.server.thrift], namespace=namespace, buckets=buckets)


def fill_tables(server: HBaseServer, namespace: str, rows: int, now_ms: int | None = None) -> int:
    """Create CDAP's tables, fill them with messages of the last two hours, and return their number.

    The ttl is one hour, so half of the messages are expired.
    """
    assert server.thrift2 is not None
    now_ms = SystemClock().now_ms() if now_ms is None else now_ms
    with closing(HBasePool([server.thrift2], timeout_seconds=PATIENCE_SECONDS, service="HbaseAdmin")) as admin:
        create_tables(admin, table_specs(namespace, FILLED_BUCKETS, "NONE"))
    topics = -(-rows // TOPIC_ROWS)
    each = rows // topics
    with PatientStore([server.thrift], namespace=namespace, buckets=FILLED_BUCKETS) as store:
        for number in range(topics):
            filled = topic(store, f"default:t{number:04}", ttl_seconds=3600)
            step = 2 * HOUR / each
            for first in range(0, each, PUT_ROWS):
                filled.plain(*(now_ms - int(at * step) for at in range(first, min(each, first + PUT_ROWS))))
    return topics * each


@dataclass(frozen=True)
class CutSpec(TableSpec):
    cuts: tuple[bytes, ...] = ()

    @property
    def split_keys(self) -> list[bytes]:
        return list(self.cuts)


class PatientStore(HBaseStore):
    """A store for tests that put a key again right after its deletion.

    HBase hides a cell that is put in the millisecond of a delete marker. Unlike keys of messages, keys of tests return,
    so each put waits for the next millisecond.
    """

    def __init__(
        self,
        thrift: Sequence[str],
        *,
        namespace: str,
        buckets: int = 4,
        connections: int = 4,
        clock: Clock | None = None,
    ) -> None:
        wanted = HBaseSettings(
            thrift=tuple(thrift),
            namespace=namespace,
            buckets=buckets,
            connections=connections,
            timeout_seconds=PATIENCE_SECONDS,
        )
        super().__init__(wanted, clock)
        for table in (self.message, self.payload):
            vars(table)["put"] = _put_after_tick(table.put)


def write_config(path: Path, settings: HBaseSettings, **sections: Any) -> Path:
    """Write a settings file with a store in HBase."""
    storage = {"kind": "hbase", "hbase": settings.model_dump(mode="json", exclude_unset=True)}
    path.write_text(json.dumps({"storage": storage, **sections}), encoding="utf-8")
    return path


def empty(store: HBaseStore, namespace: str) -> None:
    for part in store.parts():
        for table in (part.message, part.payload):
            while keys := table.read(KEYS, b"", None, 10_000).items:
                table.delete(keys)
    metadata = HBaseRows(store.pool, table_name(namespace, "metadata"), SystemClock())
    metadata.delete([key for key, _ in store.metadata.rows()], None)
    store.calls.clear()
    _wait_for_next_ms()


def _cut(spec: TableSpec, cuts: Sequence[bytes]) -> TableSpec:
    attributes = {name: value for name, value in spec.attributes.items() if name != "SPLIT_POLICY"}
    return CutSpec(spec.namespace, spec.name, spec.compression, attributes, spec.buckets, tuple(cuts))


def _put_after_tick(put: Callable[[Any], None]) -> Callable[[Any], None]:
    def wait_and_put(rows: Any) -> None:
        _wait_for_next_ms()
        put(rows)

    return wait_and_put


def _wait_for_next_ms() -> None:
    now_ms = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == now_ms:
        pass
