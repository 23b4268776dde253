"""Restored archives: CDAP's reader hides rows of invalid transactions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from janitor.archive.restore import Request
from janitor.archive.writer import ParquetArchive
from janitor.state.sqlite.state import SqliteState
from tests.builders import HOUR, MINUTE, NOW_MS, Kit, janitor, pointer, visibility
from tests.interop.java import Interop
from tms_core.clock import ManualClock
from tms_core.errors import Refused
from tms_core.messaging.service import MessagingService
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import Snapshot

#: Forty years, because CDAP uses the clock of this machine. A ttl of more than the time since 1970 hides everything.
TTL_SECONDS = 40 * 365 * 86_400
ORDERS, FOUND = TopicId("default", "orders"), TopicId("default", "found")
ABORTED, COMMITTED = (pointer(NOW_MS - MINUTE, number) for number in (1, 2))


class ServedStore(NamedTuple):
    """A store in LevelDB with a server, a janitor that archives, and Tephra's snapshots."""

    java: Interop
    folder: Path
    service: MessagingService
    kit: Kit

    def create(self, topic: TopicId, ttl_seconds: int = TTL_SECONDS) -> None:
        self.service.create_topic(topic, {"ttl": str(ttl_seconds)})

    def restore(self, source: TopicId, target: TopicId) -> None:
        self.kit.engine.restore(self.folder / "archive", Request(source, target))

    def read_by_cdap(self) -> dict[bool, set[tuple[str, str]]]:
        """Return topics and payload digests that CDAP serves outside and inside a transaction."""
        self.kit.store.close()
        snapshot = self.folder / "snapshot"
        with snapshot.open("wb") as stream:
            write_snapshot(stream, Snapshot(visibility(NOW_MS + HOUR)))
        read = self.java.run("read-service", self.folder / "messaging", "--snapshot", snapshot, "--messages")
        found: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
        for line in read:
            if line["kind"] == "message":
                found[line["in_transaction"]].add((line["topic"], line["payload_sha256"]))
        return found


def record(topic: TopicId, payload: bytes) -> tuple[str, Any]:
    return str(topic), hashlib.sha256(payload).hexdigest()


@pytest.fixture
def served(java: Interop, tmp_path: Path) -> Iterator[ServedStore]:
    clock = ManualClock(NOW_MS, monotonic_ms=HOUR)
    with LevelDBStore(tmp_path / "messaging", create=True) as store, SqliteState.in_memory() as state:
        archive = ParquetArchive(tmp_path / "archive", clock)
        with MessagingService(store, clock, side=MemorySide()) as service:
            yield ServedStore(java, tmp_path, service, janitor(store, state=state, clock=clock, archive=archive))


def test_restored_messages_of_aborted_transaction_stay_hidden(served: ServedStore) -> None:
    served.create(ORDERS)
    for write_pointer, payload in ((ABORTED, b"aborted"), (COMMITTED, b"committed")):
        served.service.publish(ORDERS, [payload], pointer=write_pointer)
    served.service.delete_topic(ORDERS)
    served.create(ORDERS)
    served.kit.clock.advance(1)
    served.service.publish(ORDERS, [b"live"], pointer=COMMITTED)
    # CDAP's rollback of the deleted generation has no effect, and Tephra forgets the aborted transaction.
    served.kit.run_after(MINUTE, adopt=True)
    served.kit.state.pause(str(ORDERS), NOW_MS)
    served.restore(ORDERS, ORDERS)
    read = served.read_by_cdap()
    assert read[False] == {record(ORDERS, payload) for payload in (b"aborted", b"committed", b"live")}
    assert read[True] == {record(ORDERS, b"live")}


def test_rejected_restore_leaves_cdap_reads_unchanged(served: ServedStore) -> None:
    for topic, payload, ttl_seconds in ((ORDERS, b"A1", 60), (FOUND, b"B0", TTL_SECONDS)):
        served.create(topic, ttl_seconds)
        served.service.store(topic, [payload], pointer=COMMITTED)
        served.service.publish(topic, [], pointer=COMMITTED)
    served.kit.run_after(HOUR, adopt=True)
    with pytest.raises(Refused, match=str(COMMITTED)):
        served.restore(ORDERS, FOUND)
    read = served.read_by_cdap()
    assert read[True] == read[False] == {record(FOUND, b"B0")}
