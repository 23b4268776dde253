from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.support import raising
from tms_core.errors import StoreBusy, StoreError, StoreLayoutError, StoreNotFound
from tms_core.tables.base import (
    CELLS,
    COLUMNS,
    KEYS,
    MESSAGES,
    PAYLOADS,
    MessageValue,
    PointerSet,
    Projection,
    TxCell,
    cells_of,
)
from tms_core.tables.leveldb.layout import holds_database
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore, decode, encode

TABLES = ("system.tms.meta", "system.tms.message", "system.tms.payload")
OWN_FILES = re.compile(r"CURRENT|LOCK|LOG(\.old)?|MANIFEST-\d+|\d+\.(log|sst|ldb)")
READABLE_BY_JAVA = re.compile(r"CURRENT|LOCK|LOG(\.old)?|MANIFEST-\d+|\d+\.(log|sst)")
EVERYTHING = (b"", None, 1_000_000)

#: A program that writes to a new store until it is killed, and prints a line after several tables.
WRITE_UNTIL_KILLED = """
import os, sys
from itertools import count
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.store import LevelDBStore
store = LevelDBStore(sys.argv[1], create=True)
for number in count():
    value = MessageValue(None, os.urandom(2000))
    store.message.put([(b"%08d" % (100 * number + row), value) for row in range(100)])
    if number == 100:
        print("written", flush=True)
"""


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.rglob("*") if file.is_file())


def raw_rows(folder: Path) -> dict[bytes, bytes]:
    with closing(plyvel.DB(str(folder))) as database:
        return dict(database)


def sha256(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def test_plyvel_cannot_read_an_unrepaired_cdap_store(sample: Path) -> None:
    with pytest.raises(plyvel.IOError, match=r"\.sst: Invalid argument"):
        raw_rows(sample / "system.tms.message")


def test_open_of_cdap_store_returns_every_row_unchanged(vector: Any, tmp_path: Path) -> None:
    path = vector.copy_to(tmp_path / "messaging")
    with LevelDBStore(path) as store:
        messages = {key: sha256(encode(value)) for key, value in store.message.read(MESSAGES, *EVERYTHING).items}
        payloads = {key: sha256(value) for key, value in store.payload.read(PAYLOADS, *EVERYTHING).items}
        metadata = {key: value.hex() for key, value in store.metadata.rows()}
        assert store.message.read(KEYS, *EVERYTHING).items == sorted(messages)
        cells = store.message.read(CELLS, *EVERYTHING).items
        assert store.calls["unreadable"] == 0
    expected = vector.of("message")
    assert messages == {key: row["value_sha256"] for key, row in expected.items()}
    assert payloads == {key: row["value_sha256"] for key, row in vector.of("payload").items()}
    assert metadata == {key: row["value"] for key, row in vector.of("meta").items()}
    assert [(cell.key, cell.pointer, cell.refers) for cell in cells] == [
        (key, row["pointer"], row["kind"] == "ref")
        for key, row in sorted(expected.items())
        if row["kind"] in ("tx", "ref")
    ]


def test_invert_writes_the_same_bytes_as_cdap(vector: Any, tmp_path: Path) -> None:
    path = vector.copy_to(tmp_path / "messaging")
    due = {key: row for key, row in vector.of("message").items() if row["action"] == "invert"}
    with LevelDBStore(path) as store:
        cells = [cell for cell in store.message.read(CELLS, *EVERYTHING).items if cell.key in due]
        assert store.message.invert(cells) == [True] * len(due)
    after = raw_rows(path / "system.tms.message")
    assert {key: sha256(after[key]) for key in due} == {key: row["value_after_sha256"] for key, row in due.items()}
    assert {key: after[key][:9].hex() for key in due} == {key: row["value_after_prefix"] for key, row in due.items()}


def test_closed_store_contains_only_files_readable_by_java(vector: Any, tmp_path: Path) -> None:
    path = vector.copy_to(tmp_path / "messaging")
    with LevelDBStore(path) as store:
        store.message.delete(store.message.read(KEYS, *EVERYTHING).items[::2])
        store.message.compact(b"", b"\xff")
    assert sorted(entry.name for entry in path.iterdir()) == sorted(TABLES)
    assert [name for name in names(path) if not READABLE_BY_JAVA.fullmatch(name)] == []
    assert any(name.endswith(".sst") for name in names(path / "system.tms.message"))


def test_open_after_killed_writer_returns_all_rows(child: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "store"
    writer = child(WRITE_UNTIL_KILLED, path)
    assert writer.output == "written"
    writer.kill()
    assert any(name.endswith(".ldb") for name in names(path)), "the crash must leave a table with another name"
    with LevelDBStore(path) as store:
        keys = store.message.read(KEYS, *EVERYTHING).items
        assert len(keys) >= 10_100
        assert keys == [b"%08d" % number for number in range(len(keys))]
    assert [name for name in names(path) if not READABLE_BY_JAVA.fullmatch(name)] == []


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (MessageValue(None, b"hi"), "006869"),
        (MessageValue(1500000000000000007, b"hi"), "0114d1120d7b1600076869"),
        (MessageValue(-1500000000000000007, b"hi"), "01eb2eedf284e9fff96869"),
        (MessageValue(1500000000000000007, None), "0214d1120d7b160007"),
        (MessageValue(None, b""), "00"),
        (MessageValue(-(2**63), b""), "018000000000000000"),
    ],
)
def test_encode_and_decode_match_cdap(value: MessageValue, stored: str) -> None:
    assert encode(value).hex() == stored
    assert decode(bytes.fromhex(stored)) == value


def test_encode_without_pointer_and_payload_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"pointer.* payload"):
        encode(MessageValue(None, None))


UNREADABLE = [b"", b"\x01", b"\x01" + bytes(7)]


def test_unreadable_values_are_counted_and_unchanged(tmp_path: Path) -> None:
    LevelDBStore(tmp_path, create=True).close()
    folder = tmp_path / "system.tms.message"
    rows = {b"k%d" % number: value for number, value in enumerate(UNREADABLE)}
    with closing(plyvel.DB(str(folder))) as database:
        for key, value in rows.items():
            database.put(key, value)
    with LevelDBStore(tmp_path) as store:
        assert store.message.read(CELLS, *EVERYTHING).items == []
        assert store.message.read(MESSAGES, *EVERYTHING).items == []
        assert store.calls["unreadable"] == len(UNREADABLE)
        assert store.message.read(KEYS, *EVERYTHING).items == sorted(rows)
        assert not any(store.message.invert([TxCell(key, 0, False) for key in rows]))
    assert raw_rows(folder) == rows


POINTER_BYTES = (1500000000000000007).to_bytes(8, "big")
NEGATED_BYTES = (-1500000000000000007).to_bytes(8, "big", signed=True)


@pytest.mark.parametrize("tag", [2, 3, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize(
    ("behind", "pointer", "inverted"),
    [
        (POINTER_BYTES, 1500000000000000007, NEGATED_BYTES),
        (POINTER_BYTES + b"more", 1500000000000000007, NEGATED_BYTES + b"more"),
        (POINTER_BYTES[:3], 0x14D112 << 40, (-(0x14D112 << 40)).to_bytes(8, "big", signed=True)),
    ],
    ids=["complete", "trailing bytes", "truncated"],
)
def test_references_are_recognized_by_any_tag_of_cdap(
    tmp_path: Path, tag: int, behind: bytes, pointer: int, inverted: bytes
) -> None:
    LevelDBStore(tmp_path, create=True).close()
    folder = tmp_path / "system.tms.message"
    with closing(plyvel.DB(str(folder))) as database:
        database.put(b"k", bytes([tag]) + behind)
    with LevelDBStore(tmp_path) as store:
        assert store.message.read(MESSAGES, *EVERYTHING).items == [(b"k", MessageValue(pointer, None))]
        assert store.message.read(CELLS, *EVERYTHING).items == [TxCell(b"k", pointer, refers=True)]
        wanted = cells_of(PointerSet.of(frozenset({pointer})))
        assert store.message.read(wanted, *EVERYTHING).items == [TxCell(b"k", pointer, refers=True)] * (pointer > 0)
        assert store.calls["unreadable"] == 0
        assert store.message.invert([TxCell(b"k", pointer, refers=True)]) == [True]
    assert raw_rows(folder) == {b"k": bytes([tag]) + inverted}


def test_open_without_message_folders_is_empty_and_creates_none(tmp_path: Path) -> None:
    LevelDBStore(tmp_path, create=True).close()
    shutil.rmtree(tmp_path / "system.tms.message")
    shutil.rmtree(tmp_path / "system.tms.payload")
    with LevelDBStore(tmp_path) as store:
        for table in (store.message, store.payload):
            assert table.read(KEYS, *EVERYTHING).items == []
            assert table.estimate_bytes(b"", None) == 0
            table.delete([b"k"])
            table.sync()
            table.compact(b"a", b"b")
        assert store.message.invert([TxCell(b"k", 1, False)]) == [False]
        with pytest.raises(StoreError, match=r"\bmessage\b.* create=True"):
            store.message.put([(b"k", MessageValue(None, b""))])
        with pytest.raises(StoreError, match=r"\bpayload\b.* create=True"):
            store.payload.put([(b"k", b"")])
        assert store.identity().startswith("leveldb:")
    assert [entry.name for entry in tmp_path.iterdir()] == ["system.tms.meta"]


def test_open_without_metadata_is_rejected_and_creates_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreNotFound) as caught:
            LevelDBStore(path)
        assert "system.tms.meta" in str(caught.value)
        assert caught.value.hint
    (tmp_path / "system.tms.meta").mkdir()
    with pytest.raises(StoreNotFound):
        LevelDBStore(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "entry",
    [
        "default.tms.message.orders.1",
        "default.tms.payload.orders-eu.12",
        "v2.default.tms.message.orders.1",
        "v2.default.tms.message.orders.-1",
        "meta",
    ],
)
@pytest.mark.parametrize("create", [False, True])
def test_open_of_cdap_6_layout_is_rejected(tmp_path: Path, entry: str, create: bool) -> None:
    LevelDBStore(tmp_path, create=True).close()
    if entry == "meta":
        (tmp_path / entry).write_text('{"version":2}')
    else:
        (tmp_path / entry / "part.0.1500000000000").mkdir(parents=True)
    before = names(tmp_path)
    with pytest.raises(StoreLayoutError, match=re.escape(entry)):
        LevelDBStore(tmp_path, create=create)
    assert names(tmp_path) == before


@pytest.mark.parametrize("create", [False, True])
def test_open_of_a_folder_with_too_long_a_name_is_an_error_of_the_store(tmp_path: Path, create: bool) -> None:
    with pytest.raises(StoreError):
        LevelDBStore(tmp_path / ("a" * 300), create=create)
    with pytest.raises(StoreError):
        holds_database(tmp_path / ("a" * 300))


def test_open_without_current_file_removes_nothing(sample: Path) -> None:
    (sample / "system.tms.message" / "CURRENT").unlink()
    before = names(sample)
    for create in (False, True):
        with pytest.raises(StoreError, match="no CURRENT file"):
            LevelDBStore(sample, create=create)
    assert names(sample) == before


def test_open_with_create_completes_interrupted_creation(tmp_path: Path) -> None:
    (tmp_path / "system.tms.message").mkdir()
    (tmp_path / "system.tms.message" / "LOCK").touch()
    (tmp_path / "system.tms.message" / "MANIFEST-000001").write_bytes(b"torn")
    with LevelDBStore(tmp_path, create=True) as store:
        store.message.put([(b"k", MessageValue(None, b""))])
    with LevelDBStore(tmp_path) as store:
        assert store.message.read(KEYS, *EVERYTHING).items == [b"k"]


def test_open_of_store_in_use_names_the_process(sample: Path, hold: Callable[[Path], Any]) -> None:
    holder = hold(sample / "system.tms.payload")
    assert holder.output == "open"
    with pytest.raises(StoreBusy, match=rf"system\.tms\.payload .*{holder.pid} \(python") as caught:
        LevelDBStore(sample)
    assert caught.value.hint
    # The folders before the busy folder are closed, and readable by CDAP.
    assert hold(sample / "system.tms.message").output == "open"
    holder.kill()
    assert [name for name in names(sample / "system.tms.meta") if not READABLE_BY_JAVA.fullmatch(name)] == []


def test_second_open_in_one_process_keeps_the_lock(sample: Path, hold: Callable[[Path], Any]) -> None:
    with LevelDBStore(sample):
        with pytest.raises(StoreBusy, match="in this process"):
            LevelDBStore(sample)
        for table in TABLES:
            assert hold(sample / table).output.startswith("failed")
    assert hold(sample / TABLES[0]).output == "open"


def test_invert_does_not_restore_a_concurrently_deleted_row(tmp_path: Path) -> None:
    """Check S6: no delete may happen between the read and the write of an inversion."""
    read, deleted = Event(), Event()
    with LevelDBStore(tmp_path, create=True) as store:
        store.message.put([(b"k", MessageValue(7, b""))])

        def read_slowly(value: bytes | None) -> bytes | None:
            read.set()
            assert not deleted.wait(0.2), "deleted during the inversion"
            return value

        def delete() -> None:
            read.wait(10)
            store.message.delete([b"k"])
            deleted.set()

        deleting = Thread(target=delete)
        deleting.start()
        store.message._database.rewrite([(b"k", read_slowly)])  # type: ignore[attr-defined]
        deleting.join()
        assert store.message.read(KEYS, *EVERYTHING).items == []


def test_sync_after_delete_syncs_every_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record_sync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    with LevelDBStore(tmp_path, create=True) as store:
        older = tmp_path / "system.tms.message" / "000001.log"
        older.touch()
        store.message.delete([b"k"])
        monkeypatch.setattr(os, "fsync", record_sync)
        store.message.sync()
        logs = {log.name for log in older.parent.glob("*.log")}
    assert len(logs) == 2
    assert logs | {"system.tms.message"} == set(synced)


def test_copied_or_restored_folder_has_another_identity(tmp_path: Path) -> None:
    first = tmp_path / "first"
    LevelDBStore(first, create=True).close()
    with LevelDBStore(first) as store:
        identity = store.identity()
    copied = shutil.copytree(first, tmp_path / "copied")
    with LevelDBStore(copied) as store:
        assert store.identity() != identity
    with LevelDBStore(tmp_path / "copied" / ".." / "first") as store:
        assert store.identity() == identity
    (first / "system.tms.meta").rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", first / "system.tms.meta")
    with LevelDBStore(first) as store:
        assert store.identity() != identity


def three_tables(path: Path) -> list[Path]:
    """Create a store with three message tables of 200 rows each, keys ``0-…``, ``1-…`` and ``2-…``."""
    with LevelDBStore(path, create=True) as store:
        for table in (b"0", b"1", b"2"):
            store.message.put([(b"%s-%05d" % (table, row), MessageValue(7, os.urandom(60))) for row in range(200)])
            store.message.compact(table, table + b"~")
    tables = sorted((path / "system.tms.message").glob("*.sst"))
    assert len(tables) == 3
    return tables


def overwrite(table: Path, start: int, stop: int) -> None:
    size = table.stat().st_size
    with table.open("r+b") as file:
        file.seek(start % size)
        file.write(bytes((stop % size if stop else size) - start % size))


@pytest.mark.parametrize("damaged", [[0], [1], [2], [0, 1, 2]])
@pytest.mark.parametrize(
    "part", [(0, 0), (100, 200), (-300, -48), (-2500, -1500)], ids=["whole", "first block", "index", "last block"]
)
def test_read_of_damaged_tables_fails(tmp_path: Path, damaged: list[int], part: tuple[int, int]) -> None:
    """Check S3: plyvel alone would return no rows."""
    tables = three_tables(tmp_path)
    for index in damaged:
        overwrite(tables[index], *part)
    with LevelDBStore(tmp_path) as store:
        wanted: list[Projection[Any]] = [KEYS, MESSAGES, COLUMNS, CELLS, cells_of(PointerSet.of(frozenset({8})))]
        for want in wanted:
            for start, stop in [(b"", None), (b"%d" % damaged[-1], b"%d~" % damaged[-1]), (b"%d" % damaged[-1], None)]:
                with pytest.raises(StoreError, match="message") as caught:
                    store.message.read(want, start, stop, 1000)
        assert "backup" in caught.value.hint


def test_search_stops_at_first_row_after_its_range(tmp_path: Path) -> None:
    tables, wanted = three_tables(tmp_path), cells_of(PointerSet.of(frozenset({7})))
    with LevelDBStore(tmp_path) as store:
        found = store.message.read(wanted, b"0-00080", b"0~", 1000)
        assert found.gap == (b"0-00199\x00", b"1-00000")
        assert store.message.read(wanted, b"2", b"3", 1000).gap is None
    overwrite(tables[1], 5000, 7000)
    with LevelDBStore(tmp_path) as store:
        with pytest.raises(StoreError):
            store.message.read(KEYS, b"1", b"1~", 200)
        again = store.message.read(wanted, b"0-00080", b"0~", 1000)
    assert (again.items, again.rows_read, again.resume) == (found.items, 120, None)
    assert len(found.items) == found.rows_read


def test_truncated_last_write_loses_no_other_row(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        store.message.put([(b"a", MessageValue(None, b"first"))])
        store.message.put([(b"b", MessageValue(None, b"x" * 200))])
        torn = shutil.copytree(tmp_path, tmp_path.parent / "torn")
    [log] = (torn / "system.tms.message").glob("*.log")
    overwrite(log, -100, 0)
    with LevelDBStore(torn) as store:
        assert store.message.read(KEYS, *EVERYTHING).items == [b"a"]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (plyvel.IOError(b"IO error: /x/000012.ldb: No space left on device"), "Free some space"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/CURRENT"), "Free some space"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/x/CURRENT"), "Free some space"),
        (plyvel.IOError(b"IO error: /x/LOCK: Permission denied"), "Run as the user"),
        (FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), "/x"), "--leveldb"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/x/LOCK"), "mount it for writing, then repeat"),
        (plyvel.CorruptionError(b"Corruption: bad block"), "Restore the store from a backup"),
        (plyvel.IOError(b"IO error: /x/000012.ldb: Input/output error"), "Check the disk"),
    ],
)
def test_library_error_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str) -> None:
    monkeypatch.setattr(plyvel, "DB", raising(error))
    with pytest.raises(StoreError, match=hint) as caught:
        LevelDBStore(tmp_path, create=True)
    assert str(tmp_path) in caught.value.message
    assert caught.value.__cause__ is error


def test_large_store_without_compaction_has_only_leveldb_files(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        for number in range(30):
            store.message.put([(b"%d-%d" % (number, row), MessageValue(None, os.urandom(999))) for row in range(500)])
        assert [name for name in names(tmp_path) if not OWN_FILES.fullmatch(name)] == []
        assert store.message.estimate_bytes(b"", None) > 1_000_000
    assert [name for name in names(tmp_path) if not READABLE_BY_JAVA.fullmatch(name)] == []
