"""An HBase for one benchmark script: the HBase of the tests, started and stopped by the script."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import happybase

from benchmarks.stores import BODY, NOW_MS, TTL_SECONDS, topic_names
from tests import maven
from tests.hbase.server import HBaseServer, start
from tests.hbase.tables import Tables
from tms_core.rowkey import MessageKey
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import MessageValue
from tms_core.tables.hbase.store import HBaseStore
from tms_core.topic import encode_properties

BUCKETS = 16
_PUT_ROWS = 5_000


@contextmanager
def server() -> Iterator[HBaseServer]:
    """Run an HBase with one region server.

    Raises:
        SystemExit: HBase cannot run on this machine; the script reports no figure.
    """
    if reason := maven.missing():
        sys.stderr.write(f"skipped: {reason}\n")
        raise SystemExit(0)
    with tempfile.TemporaryDirectory(prefix="tms-bench-hbase-") as folder, start(Path(folder)) as running:
        yield running


@contextmanager
def filled_tables(tables: Tables, rows: int, *, topics: int, pointer: int | None = None) -> Iterator[str]:
    """Yield the namespace of new tables. Without a write pointer, all rows are expired; with a pointer, no row is."""
    namespace = tables.make(buckets=BUCKETS)
    _put_topics(tables, namespace, topics)
    value = MessageValue(pointer, BODY)
    newest_ms = NOW_MS - 1 if pointer is not None else NOW_MS - 2 * TTL_SECONDS * 1000
    with _open_store(tables, namespace) as store:
        for topic in topic_names(topics):
            keys = [MessageKey(topic, 1, newest_ms - number, 0).pack() for number in range(rows // topics)]
            for first in range(0, len(keys), _PUT_ROWS):
                store.message.put([(key, value) for key in keys[first : first + _PUT_ROWS]])
    # Flush the rows to files, as in an old store, so that HBase does not flush memory during the measurement.
    tables.server.command("compact", f"{namespace}:tms.message")
    yield namespace
    _drop(tables, namespace)


@contextmanager
def table_copies(tables: Tables, rows: int, *, topics: int) -> Iterator[Callable[[], AbstractContextManager[str]]]:
    """Yield a function that clones filled tables and returns the namespace; a clone takes a second or two."""
    with filled_tables(tables, rows, topics=topics) as source:
        snapshot = f"{source}_rows"
        tables.server.command("snapshot", f"{source}:tms.message", snapshot)

        @contextmanager
        def copy() -> Iterator[str]:
            namespace = tables.make(buckets=BUCKETS, messages=snapshot)
            _put_topics(tables, namespace, topics)
            yield namespace
            _drop(tables, namespace)

        yield copy


def _open_store(tables: Tables, namespace: str) -> HBaseStore:
    return HBaseStore(HBaseSettings(thrift=(tables.server.thrift,), namespace=namespace, buckets=BUCKETS))


def _put_topics(tables: Tables, namespace: str, topics: int) -> None:
    properties = encode_properties({"generation": "1", "ttl": str(TTL_SECONDS)})
    with _open_store(tables, namespace) as store:
        for topic in topic_names(topics):
            store.metadata.compare_and_set(topic.prefix, None, properties)


def _drop(tables: Tables, namespace: str) -> None:
    for name in ("meta", "message", "payload"):
        tables.server.command("drop", f"{namespace}:tms.{name}")


def run_by_salt(address: str, namespace: str, connections: int, work: Callable[[happybase.Table, bytes], None]) -> None:
    """Run a function for each salt, over several happybase connections concurrently."""
    host, _, port = address.rpartition(":")

    def visit(salts: Sequence[int]) -> None:
        connection = happybase.Connection(host, int(port), timeout=60_000)
        table = connection.table(f"{namespace}:tms.message".encode())
        for salt in salts:
            work(table, bytes([salt]))
        connection.close()

    with ThreadPoolExecutor(connections) as threads:
        for done in [threads.submit(visit, range(first, BUCKETS, connections)) for first in range(connections)]:
            done.result()
