"""Failed writes: the database is reopened and the write is undone before the next acknowledgment."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.builders import NOW_MS
from tests.kit.messaging import P, leveldb, named, reader
from tests.support import PATIENCE_SECONDS, each_raises, raising, wait_until
from tests.tables.conftest import Child
from tms_core.errors import StoreError, TopicNotFound, WriteRefused
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.tables.base import KEYS, MESSAGES, MessageValue, TxCell
from tms_core.tables.leveldb import handle as leveldb_handle
from tms_core.tables.leveldb.database import WritableDatabase
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

#: A program that writes to a store whose files cannot grow for a time, and prints the acknowledged and failed keys.
FULL_DISK = """
import os, resource, sys
from pathlib import Path
from tms_core.errors import StoreError
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.base import MessageValue, TxCell
from tms_core.tables.leveldb.store import LevelDBStore

store, side = LevelDBStore(sys.argv[1] + "/store", create=True), LevelDBSide(Path(sys.argv[1]) / "side")
writes = {
    "message": lambda key, value: store.message.put([(key, MessageValue(7, value))]),
    "payload": lambda key, value: store.payload.put([(key, value)]),
    "metadata": lambda key, value: store.metadata.compare_and_set(key, None, value),
    "side": lambda key, value: side.put([(key, value)]),
}
write = writes[sys.argv[2]]
done, failed = [], []

def attempt(number):
    key = b"%04d" % number
    try:
        write(key, os.urandom(1000 + 37 * number % 900))
    except StoreError:
        failed.append(key)
    else:
        done.append(key)

for number in range(50):
    attempt(number)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
for number in range(50, 100):
    attempt(number)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for number in range(100, 150):
    attempt(number)
print(b" ".join(done).decode(), b" ".join(failed).decode(), sep="|", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("table", ["message", "payload", "metadata", "side"])
def test_kill_after_full_disk_keeps_only_acknowledged_rows(
    child: Callable[..., Child], tmp_path: Path, table: str
) -> None:
    writer = child(FULL_DISK, tmp_path, table)
    done, failed = (words.encode().split() for words in writer.output.split("|"))
    writer.kill()
    assert len(failed) > 10
    assert done[-50:] == [b"%04d" % number for number in range(100, 150)], "the store recovers by itself"
    if table == "side":
        with LevelDBSide(tmp_path / "side") as side:
            found = [key for key, _ in side.rows(b"", None, 1000).items]
    else:
        with LevelDBStore(tmp_path / "store") as store:
            tables = {
                "message": lambda: store.message.read(KEYS, b"", None, 1000).items,
                "payload": lambda: store.payload.read(KEYS, b"", None, 1000).items,
                "metadata": lambda: [key for key, _ in store.metadata.rows()],
            }
            found = tables[table]()
    assert found == done


@pytest.mark.parametrize("loss", ["deleted", "replaced", "unlocked"])
def test_write_to_deleted_or_replaced_folder_is_rejected(tmp_path: Path, loss: str) -> None:
    folder = tmp_path / "database"
    with closing(WritableDatabase(folder, create=True)) as database:
        database.put([(b"a", b"1")])
        if loss == "unlocked":
            (folder / "LOCK").unlink()
        else:
            folder.rename(tmp_path / "elsewhere")
        if loss == "replaced":
            folder.mkdir()
            (folder / "LOCK").touch()
        writes: list[Callable[[], None]] = [
            lambda: database.put([(b"b", b"2")]),
            lambda: database.delete([b"a"]),
            database.sync,
        ]
        for write in writes:
            with pytest.raises(WriteRefused, match="deleted or replaced"):
                write()
        assert database.rows(b"", None, 10).items == [(b"a", b"1")]


full = raising(OSError(28, "No space left on device"))


class FaultyDisk:
    """A disk between the store and LevelDB.

    A failed write is completely in the log but not synced, so the next reading of the log finds it. This is the worst
    case.

    Attributes:
        failing: whether writes fail.
        closed_for: the error of each opening; None: openings succeed.
        opened: the number of openings.
        batches: the number of batches.
        before: called before each write.
    """

    def __init__(self) -> None:
        self.failing = False
        self.closed_for: Exception | None = None
        self.opened = self.batches = 0
        self.before: Callable[[], object] = lambda: None
        self.open = leveldb_handle._open

    def __call__(self, folder: Path, create: bool) -> Any:
        if self.closed_for is not None:
            raise self.closed_for
        self.opened += 1
        return FaultyDatabase(self, self.open(folder, create))


class FaultyDatabase:
    def __init__(self, disk: FaultyDisk, db: plyvel.DB) -> None:
        self._disk = disk
        self._db = db
        self._late: list[plyvel.WriteBatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def write_batch(self, *, sync: bool) -> Any:
        return FaultyBatch(self._disk, self._db.write_batch(sync=sync), self._late)

    def close(self) -> None:
        for batch in self._late:
            batch.write()
        self._late.clear()
        self._db.close()


class FaultyBatch:
    def __init__(self, disk: FaultyDisk, batch: plyvel.WriteBatch, late: list[plyvel.WriteBatch]) -> None:
        self._disk = disk
        self._batch = batch
        self._late = late
        self.put, self.delete = batch.put, batch.delete

    def write(self) -> None:
        self._disk.before()
        self._disk.batches += 1
        if self._disk.failing:
            self._late.append(self._batch)
            raise plyvel.IOError(b"IO error: 000005.log: Input/output error")
        self._batch.write()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    disk = FaultyDisk()
    monkeypatch.setattr(leveldb_handle, "_open", disk)
    return disk


WRITES: dict[str, Callable[[LevelDBStore], object]] = {
    "put": lambda store: store.message.put([(b"new", MessageValue(7, b"")), (b"old", MessageValue(9, b"other"))]),
    "delete": lambda store: store.message.delete([b"old", b"never"]),
    "invert": lambda store: store.message.invert([TxCell(b"old", 7, False)]),
}
OLD = [(b"old", MessageValue(7, b""))]


def rows(store: LevelDBStore) -> list[tuple[bytes, MessageValue]]:
    return list(store.message.read(MESSAGES, b"", None, 100).items)


@pytest.mark.parametrize("write", WRITES)
def test_write_after_failed_write_reopens_the_folder(tmp_path: Path, disk: FaultyDisk, write: str) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        store.message.put(OLD)
        opened, disk.failing = disk.opened, True
        with pytest.raises(StoreError, match="Input/output error"):
            WRITES[write](store)
        with pytest.raises(StoreError, match="Input/output error"):
            store.message.put([(b"too early", MessageValue(None, b""))])
        disk.failing = False
        # A failed delete or inversion is repeated, so it may take effect.
        found = {"put": OLD, "delete": [], "invert": [(b"old", MessageValue(-7, b""))]}
        assert rows(store) == found[write]
        store.message.put([(b"z", MessageValue(None, b""))])
        assert disk.opened > opened
        assert rows(store) == [*found[write], (b"z", MessageValue(None, b""))]
        opened = disk.opened
        WRITES[write](store)
        assert disk.opened == opened
        after = rows(store)
    with LevelDBStore(tmp_path) as store:
        assert rows(store) == after


def test_write_to_folder_on_another_volume_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def on_another_volume(path: Any, **options: Any) -> os.stat_result:
        mode, inode, device, *rest = stat(path, **options)
        return os.stat_result((mode, inode, device + 1, *rest))

    with closing(WritableDatabase(tmp_path, create=True)) as database:
        database.put([(b"a", b"1")])
        monkeypatch.setattr(os, "stat", on_another_volume)
        with pytest.raises(WriteRefused, match="deleted or replaced"):
            database.put([(b"b", b"2")])


def test_reopening_of_replaced_folder_keeps_the_other_database(tmp_path: Path, disk: FaultyDisk) -> None:
    folder = tmp_path / "database"
    with closing(WritableDatabase(tmp_path / "other", create=True)) as other:
        other.put([(b"a", b"other")])
    with closing(broken(folder, disk)) as database:
        folder.rename(tmp_path / "elsewhere")
        (tmp_path / "other").rename(folder)
        with pytest.raises(WriteRefused, match="deleted or replaced"):
            database.put([(b"b", b"2")])
        assert database.rows(b"", None, 9).items == [(b"a", b"1")]
    with closing(WritableDatabase(folder)) as other:
        assert other.rows(b"", None, 9).items == [(b"a", b"other")]


def test_failed_metadata_change_is_undone(tmp_path: Path, disk: FaultyDisk) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        store.metadata.compare_and_set(b"k", None, b"1")
        disk.failing = True
        with pytest.raises(StoreError):
            store.metadata.compare_and_set(b"k", b"1", b"2")
        disk.failing = False
        assert store.metadata.compare_and_set(b"l", None, b"3")
        assert store.metadata.rows() == [(b"k", b"1"), (b"l", b"3")]


def test_queued_writes_succeed_or_fail_together(tmp_path: Path, disk: FaultyDisk) -> None:
    database = WritableDatabase(tmp_path, create=True)
    entered, go_on = Event(), Event()

    def hold_write() -> None:
        entered.set()
        assert go_on.wait(PATIENCE_SECONDS)

    for failing in (False, True):
        entered.clear()
        go_on.clear()
        disk.before, before = hold_write, disk.batches
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(database.put, [(b"a", b"1")])
            assert entered.wait(PATIENCE_SECONDS)
            disk.before = lambda: None
            others = [threads.submit(database.put, [(key, b"1")]) for key in (b"b", b"c")]
            others.append(threads.submit(database.delete, [b"d"]))
            wait_until(lambda: len(database._waiting) == 3)
            # The first write is in progress, and its operations are fixed.
            disk.failing = failing
            go_on.set()
            outcomes = [future.exception(PATIENCE_SECONDS) for future in (first, *others)]
        disk.failing = False
        assert [type(error) for error in outcomes] == [WriteRefused if failing else type(None)] * 4
        # After a failure, the second write would have undone the first.
        assert disk.batches - before == 2
    assert database.rows(b"", None, 9).items == [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")]
    database.close()


def test_invalid_value_fails_all_writes_of_its_batch(tmp_path: Path) -> None:
    database = WritableDatabase(tmp_path, create=True)
    rows: list[Any] = [(b"a", None), (b"b", b"1")]
    with ThreadPoolExecutor(2) as threads:
        with database.block_writes():
            writing = [threads.submit(database.put, [row]) for row in rows]
            wait_until(lambda: len(database._waiting) == 2)
        assert [type(one.exception(PATIENCE_SECONDS)) for one in writing] == [TypeError] * 2
    database.put([(b"b", b"2")])
    assert database.rows(b"", None, 9).items == [(b"b", b"2")]
    database.close()


def test_close_after_failed_write_undoes_it_if_possible(tmp_path: Path, disk: FaultyDisk) -> None:
    broken(tmp_path / "well", disk).close()
    database = WritableDatabase(tmp_path / "well")
    assert database.rows(b"", None, 9).items == [(b"a", b"1")]
    database.close()
    database = broken(tmp_path / "ill", disk)
    disk.closed_for = plyvel.IOError(b"IO error: lock LOCK: already held by process")
    database.close()


def test_write_after_failed_compaction_succeeds(tmp_path: Path, disk: FaultyDisk) -> None:
    database = WritableDatabase(tmp_path, create=True)
    database.put([(b"a", b"1"), (b"b", b"2")])
    disk.failing = True
    with pytest.raises(StoreError):
        database.compact(b"a", b"c")
    disk.failing = False
    database.delete([b"a"])
    assert database.rows(b"", None, 9).items == [(b"b", b"2")]
    database.close()


def test_require_space_ignores_a_log_that_disappeared(tmp_path: Path) -> None:
    # The log is listed, but does not exist when its size is read.
    (tmp_path / "000003.log").symlink_to(tmp_path / "gone")
    leveldb_handle._require_space(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["000003.log"]


def test_reopening_waits_for_readers(tmp_path: Path, disk: FaultyDisk) -> None:
    database = broken(tmp_path, disk)
    with ThreadPoolExecutor(2) as threads:
        with database._handle as db, db.iterator() as found:
            writing = threads.submit(database.put, [(b"b", b"2")])
            wait_until(lambda: database._handle._closing)
            reading = threads.submit(database.get, b"b")
            assert list(found) == [(b"a", b"1")]
        writing.result(PATIENCE_SECONDS)
        assert reading.result(PATIENCE_SECONDS) in (None, b"2")
    assert database.get(b"b") == b"2"
    database.close()


def test_reopening_with_endless_reader_fails_the_write(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = broken(tmp_path, disk)
    monkeypatch.setattr(leveldb_handle, "_REOPEN_SECONDS", 0.01)
    with database._handle:
        with ThreadPoolExecutor(1) as threads:
            error = threads.submit(database.put, [(b"b", b"2")]).exception(PATIENCE_SECONDS)
        assert isinstance(error, StoreError)
        assert "compaction" in error.message
        assert database.get(b"a") == b"1"
    monkeypatch.undo()
    database.put([(b"b", b"2")])
    assert database.rows(b"", None, 9).items == [(b"a", b"1"), (b"b", b"2")]
    database.close()


def test_failed_reopening_fails_calls_until_it_succeeds(tmp_path: Path, disk: FaultyDisk) -> None:
    database = broken(tmp_path, disk)
    disk.closed_for = plyvel.IOError(b"IO error: lock LOCK: already held by process")
    each_raises(
        StoreError, lambda: database.put([(b"b", b"2")]), lambda: database.get(b"a"), database.sync, match="held by"
    )
    disk.closed_for = None
    disk.failing = True  # the undo of the failed write fails, too
    with pytest.raises(StoreError):
        database.get(b"a")
    disk.failing = False
    assert database.rows(b"", None, 9).items == [(b"a", b"1")]
    database.put([(b"b", b"2")])
    assert database.get(b"b") == b"2"
    database.close()


def test_reopening_without_disk_space_keeps_database_readable(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = broken(tmp_path, disk)

    monkeypatch.setattr(leveldb_handle, "_require_space", full)
    disk.closed_for = AssertionError("it was closed")
    with pytest.raises(StoreError, match="No space left") as caught:
        database.put([(b"b", b"2")])
    assert "continue by themselves" in caught.value.hint
    assert database.get(b"a") == b"1"
    monkeypatch.undo()
    database.put([(b"b", b"2")])
    database.close()
    assert not list(tmp_path.glob("*.dbtmp"))


def test_sync_after_failed_sync_reopens_the_folder(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = WritableDatabase(tmp_path, create=True)
    database.put([(b"a", b"1"), (b"b", b"2")])
    database.delete([b"a"])
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", raising(OSError(5, "Input/output error")))
        with pytest.raises(StoreError):
            database.sync()
    opened = disk.opened
    database.sync()
    assert disk.opened == opened + 1
    assert database.rows(b"", None, 9).items == [(b"b", b"2")]
    database.close()


def test_publish_after_full_disk_shows_only_acknowledged_messages(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = leveldb(tmp_path)
    kit.create("orders")
    kit.publish("orders", b"a", pointer=P)
    kit.put("orders", P, b"b")
    disk.failing = True
    with monkeypatch.context() as patched:
        patched.setattr(leveldb_handle, "_require_space", full)
        each_raises(
            StoreError,
            lambda: kit.publish("orders", b"not", pointer=P + 1),
            lambda: kit.publish("orders", b"not"),
            lambda: kit.publish("orders", b"not", ttl=5),
            lambda: kit.put("orders", P, b"not"),
            lambda: kit.service.rollback(named("orders"), RollbackRange(P, 0, 0, NOW_MS, 65_535)),
            lambda: kit.create("other"),
        )
        assert kit.payloads() == [b"a"]
    disk.failing = False
    kit.publish("orders", b"c")
    kit.publish("orders", b"d", ttl=5)
    kit.publish("orders", pointer=P)
    expected = [b"a", b"c", b"d", b"b"]
    assert kit.payloads() == expected
    assert kit.payloads(transaction=reader()) == expected
    assert kit.service.topics("default") == ["orders"]
    kit.close()
    again = leveldb(tmp_path)
    assert again.payloads() == expected
    again.close()


def broken(folder: Path, disk: FaultyDisk) -> WritableDatabase:
    """Return a database with one row whose last write failed."""
    folder.mkdir(exist_ok=True)
    database = WritableDatabase(folder, create=True)
    database.put([(b"a", b"1")])
    disk.failing = True
    with pytest.raises(StoreError):
        database.put([(b"a", b"0"), (b"c", b"3")])
    disk.failing = False
    return database


def test_failed_delete_keeps_no_values_for_undo(tmp_path: Path, disk: FaultyDisk) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        keys = [b"%04d" % number for number in range(50)]
        store.message.put([(key, MessageValue(7, b"v" * 20_000)) for key in keys])
        database: WritableDatabase = store.message._writable  # type: ignore[attr-defined]
        uses: list[Callable[[], object]] = [lambda: store.message.delete(keys[:25])] * 3
        uses.append(lambda: store.message.invert([TxCell(key, 7, False) for key in keys[25:]]))
        for use in uses:
            disk.failing = True
            with pytest.raises(WriteRefused):
                use()
            assert database._handle._undo == {}
            disk.failing = False
            batches = disk.batches
            store.message.sync()
            assert disk.batches == batches, "nothing is written to take it back"
            assert database._handle._undo == {}


def test_reopening_without_disk_space_for_undo_stays_readable(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def check_space(_: Path, more_bytes: int) -> None:
        reads.append(more_bytes)
        if more_bytes > 10_000:
            raise OSError(28, "No space left on device")

    database = WritableDatabase(tmp_path, create=True)
    database.put([(b"a", b"v" * 20_000), (b"live", b"1")])
    disk.failing = True
    with pytest.raises(WriteRefused):
        database.put([(b"a", b"w")])
    disk.failing = False
    monkeypatch.setattr(leveldb_handle, "_require_space", check_space)
    with pytest.raises(WriteRefused):
        database.put([(b"b", b"2")])
    assert reads == [2 * 20_001]
    assert database.get(b"live") == b"1"
    monkeypatch.undo()
    database.put([(b"b", b"2")])
    assert database.get(b"a") == b"v" * 20_000
    database.close()


def test_sync_after_deletes_syncs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = WritableDatabase(tmp_path, create=True)
    database.put([(b"a", b"1"), (b"b", b"2")])
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    database.sync()
    assert synced == [], "puts are synced"
    database.delete([b"a"])
    database.sync()
    assert len(synced) == 2, "a sync of the log and of the folder"
    database.sync()
    assert len(synced) == 2
    database.close()


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("message", ["No space left on device", "Disk quota exceeded", "Read-only file system"])
def test_disk_error_raises_write_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    database = WritableDatabase(tmp_path, create=True)
    with monkeypatch.context() as patched:
        patched.setattr(FaultyBatch, "write", raising(plyvel.IOError(f"IO error: 000005.log: {message}".encode())))
        each_raises(WriteRefused, lambda: database.delete([b"a"]), lambda: database.put([(b"a", b"1")]), match=message)
    database.put([(b"a", b"1")])
    database.close()


def test_topic_with_failed_deletion_exists_until_one_succeeds(tmp_path: Path, disk: FaultyDisk) -> None:
    topic = TopicId("default", "orders")
    with LevelDBStore(tmp_path, create=True) as store:
        registry = TopicRegistry(store.metadata, 60)
        registry.create(topic, {})
        versions = [store.metadata.version]
        disk.failing = True
        with pytest.raises(StoreError):
            registry.delete(topic)
        versions.append(store.metadata.version)
        assert registry.get(topic).generation == 1
        disk.failing = False
        registry.delete(topic)
        with pytest.raises(TopicNotFound):
            registry.get(topic)
        # The failed write, the reopening and the next write.
        versions.append(store.metadata.version)
        numbers = [version for version in versions if version is not None]
        assert [after - before for before, after in pairwise(numbers)] == [1, 2]
