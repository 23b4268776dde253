"""The archive: contents, durability, names and expiry of its files."""

from __future__ import annotations

import ast
import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.archive import folder as archive_folder
from janitor.archive import index as archived
from janitor.archive import parquet
from janitor.archive import writer as archive
from janitor.archive.folder import NO_VALUE
from janitor.archive.writer import PAGE_ROWS, CommitState, ParquetArchive, commit_state, pick
from janitor.rules.policy import Rule
from tests.archives import Undo, keys_of
from tests.builders import DAY, HOUR, NOW_MS, SECOND, Topic, pointer, topic, visibility
from tests.support import raising
from tms_core.errors import ArchiveError, ConfigurationError
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import Page
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

ROOT = Path(__file__).parents[3]

STARTED_MS = NOW_MS - 2 * HOUR
COMMITTED, INVALID, OPEN, LATER = (pointer(STARTED_MS, number) for number in (1, 2, 3, 10**12))
SNAPSHOT = visibility(NOW_MS - SECOND, invalid=[INVALID], in_progress=[OPEN], newest=OPEN)

DAY_NAME = "day=2023-11-14"


@pytest.fixture
def orders(store: MemoryStore) -> Topic:
    return topic(store, "default:orders", ttl_seconds=60)


@pytest.fixture
def undo(store: MemoryStore, tmp_path: Path) -> Undo:
    return Undo(store, tmp_path / "archive")


def list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows as a generic Parquet reader sees them."""
    rows: list[dict[str, Any]] = ds.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist()
    return sorted(rows, key=lambda row: (row["table"], row["key"]))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (None, "none"),
        (COMMITTED, "committed"),
        (INVALID, "invalid"),
        (-INVALID, "rolled_back"),
        (-COMMITTED, "rolled_back"),
        (OPEN, "undecided"),
        (OPEN + 1, "undecided"),
        (LATER, "undecided"),
        (0, "committed"),
        (-(2**63), "rolled_back"),
        (2**63 - 1, "undecided"),
    ],
)
def test_commit_state_of_a_pointer_is_that_of_the_snapshot(stored: int | None, expected: str) -> None:
    assert commit_state(stored, SNAPSHOT, Rule.EXPIRED) == expected
    assert commit_state(stored, SNAPSHOT, Rule.OLD_GENERATION) == ("undecided" if stored == COMMITTED else expected)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(None, "none"), (COMMITTED, "undecided"), (INVALID, "undecided"), (-COMMITTED, "rolled_back"), (0, "committed")],
)
def test_commit_state_without_a_snapshot_is_undecided(stored: int | None, expected: str) -> None:
    assert {commit_state(stored, None, rule) for rule in (Rule.EXPIRED, Rule.OLD_GENERATION)} == {expected}


def test_archive_is_readable_as_hive_folders_with_every_column(undo: Undo, orders: Topic) -> None:
    at = orders.at(3)
    at.plain(NOW_MS - HOUR, body=b"plain\x00\xff").tx(COMMITTED, NOW_MS - HOUR + 1).tx(-INVALID, NOW_MS - HOUR + 2)
    at.ref(OPEN, NOW_MS - HOUR + 3).stored(OPEN, NOW_MS - HOUR - 5, body=b"")
    undo.archive(at, snapshot=SNAPSHOT, rule=Rule.OLD_GENERATION)
    same = {"namespace": "default", "topic": "orders", "day": "2023-11-14", "generation": 3, "run_id": "run-1"}
    same |= {"rule": "old_generation", "deleted_ms": NOW_MS, "snapshot_timestamp_ms": SNAPSHOT.timestamp_ms}
    times = [NOW_MS - HOUR + number for number in range(4)]
    keys = [MessageKey(orders.id, 3, ms, number).pack() for number, ms in enumerate(times)]
    stored_ms = NOW_MS - HOUR - 5
    stored_key = PayloadKey(orders.id, 3, OPEN, stored_ms, 4).pack()
    columns = (
        "table",
        "key",
        "publish_ms",
        "sequence",
        "write_ms",
        "payload_sequence",
        "write_pointer",
        "payload",
        "verdict",
    )
    assert rows_of(undo.folder) == [
        same | dict(zip(columns, row, strict=True))
        for row in (
            ("message", keys[0], times[0], 0, None, None, None, b"plain\x00\xff", "none"),
            ("message", keys[1], times[1], 1, None, None, COMMITTED, b"body", "undecided"),
            ("message", keys[2], times[2], 2, None, None, -INVALID, b"body", "rolled_back"),
            ("message", keys[3], times[3], 3, None, None, OPEN, None, "undecided"),
            ("payload", stored_key, None, None, stored_ms, 4, OPEN, b"", "undecided"),
        )
    ]


def test_archive_file_names_its_layout_and_is_packed_with_zstd(undo: Undo, orders: Topic) -> None:
    orders.plain(NOW_MS).ref(COMMITTED, NOW_MS)
    [saved] = undo.archive(orders)
    assert saved.path is not None
    with pq.ParquetFile(saved.path) as file:
        described = {name: text for name, text in file.metadata.metadata.items() if name.startswith(b"tms_janitor.")}
        assert described == {
            b"tms_janitor.layout": b"1",
            b"tms_janitor.topic": b"default:orders",
            b"tms_janitor.references": b"1",
        }
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_archive_documentation_names_every_column_and_verdict() -> None:
    page = (ROOT / "docs/reference/formats/reports.md").read_text(encoding="utf-8")
    section = page.partition("\n## Archive\n")[2].partition("\n## ")[0]
    columns = re.findall(r"^\| `(\w+)` \| (\w+) \| (yes|no) \|", section, flags=re.MULTILINE)
    assert columns == [(column.name, column.type, "yes" if column.nullable else "no") for column in parquet.COLUMNS]
    verdicts = section.partition("| verdict |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", verdicts, flags=re.MULTILINE) == [str(item) for item in CommitState]
    assert f"| `tms_janitor.layout` | {parquet.LAYOUT} " in section


def test_archive_of_many_rows_is_in_groups(undo: Undo, orders: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "GROUP_BYTES", 1000)
    orders.plain(*range(NOW_MS, NOW_MS + 300), body=b"x" * 100)
    [saved] = undo.archive(orders)
    assert saved.path is not None
    with pq.ParquetFile(saved.path) as file:
        groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    assert sum(groups) == 300
    # The size of rows is unknown before the first page.
    assert max(groups[1:]) <= 20
    assert [row["key"] for row in rows_of(undo.folder)] == saved.keys == keys_of(orders, undo.store.message)
    [file_found] = undo.files(orders)
    assert (file_found.summary.rows, file_found.summary.newest_ms) == (300, NOW_MS + 299)


def test_archive_leaves_out_a_row_that_cannot_be_read(tmp_path: Path) -> None:
    keys = [MessageKey(TopicId("default", "orders"), 1, NOW_MS, number).pack() for number in range(3)]
    LevelDBStore(tmp_path / "store", create=True).close()
    with closing(plyvel.DB(str(tmp_path / "store" / "system.tms.message"))) as database:
        for key, value in zip(keys, (b"\x00good", b"\x01short", b"\x00good"), strict=True):
            database.put(key, value)
    with LevelDBStore(tmp_path / "store") as store:
        run = Undo(store, tmp_path / "archive").begin()
        saved = run.save(TopicId("default", "orders"), 1, store.message, Rule.EXPIRED, keys)
    assert saved.keys == [keys[0], keys[2]]


def test_archive_writes_a_separate_file_for_each_batch_of_a_run(undo: Undo, orders: Topic) -> None:
    orders.plain(NOW_MS, NOW_MS + 1)
    first, second = keys_of(orders, undo.store.message)
    run = undo.begin()
    for key in (first, second):
        run.save(orders.id, 1, undo.store.message, Rule.EXPIRED, [key])
    # Another process continues the same run.
    undo.begin().save(orders.id, 1, undo.store.message, Rule.EXPIRED, [first])
    folder = f"namespace=default/topic=orders/{DAY_NAME}"
    names = [f"{folder}/janitor-run-1-{number:06d}.parquet" for number in (1, 2, 3)]
    assert [path for path in list_files(undo.folder) if path.endswith("parquet")] == names
    assert len(rows_of(undo.folder)) == 3


def test_archive_after_midnight_utc_writes_to_the_next_day(undo: Undo, orders: Topic) -> None:
    midnight_ms = round(datetime(2023, 11, 15, tzinfo=UTC).timestamp() * 1000)
    orders.plain(NOW_MS)
    keys = keys_of(orders, undo.store.message)
    run = undo.begin()
    undo.clock.step(midnight_ms - 1 - NOW_MS)
    run.save(orders.id, 1, undo.store.message, Rule.EXPIRED, keys)
    undo.clock.step(1)
    run.save(orders.id, 1, undo.store.message, Rule.EXPIRED, keys)
    assert [found.day for found in archive_folder.days(undo.folder)] == [date(2023, 11, 14), date(2023, 11, 15)]


def test_archive_of_missing_rows_writes_no_file(undo: Undo, orders: Topic) -> None:
    gone = MessageKey(orders.id, 1, NOW_MS, 0).pack()
    saved = undo.begin().save(orders.id, 1, undo.store.message, Rule.EXPIRED, [gone])
    saved.discard()
    assert (saved.path, saved.keys, undo.folder.exists()) == (None, [], False)


def test_discard_of_a_batch_removes_its_file(undo: Undo, orders: Topic) -> None:
    [saved] = undo.archive(orders.plain(NOW_MS))
    assert [row["snapshot_timestamp_ms"] for row in rows_of(undo.folder)] == [None]
    saved.discard()
    saved.discard()
    assert archived.find(undo.folder).files == []


@pytest.mark.parametrize("run_id", ["", "../../run", "a b", "x" * 101])
def test_archive_with_an_invalid_run_id_is_rejected(undo: Undo, orders: Topic, run_id: str) -> None:
    orders.plain(NOW_MS)
    with pytest.raises(ValueError, match=re.escape(repr(run_id))):
        undo.archive(orders, run_id=run_id)
    assert archived.find(undo.folder).files == []


@given(st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)), st.integers(1, 5))
def test_pick_any_keys_returns_the_common_ones_in_order(there: set[int], wanted: set[int], size: int) -> None:
    rows = sorted(number.to_bytes(2, "big") for number in there)

    def read(start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        found = [row for row in rows if start <= row and (stop is None or row < stop)]
        return Page(found[:limit], found[limit - 1] + b"\x00" if len(found) > limit else None)

    keys = sorted(number.to_bytes(2, "big") for number in wanted)
    pages = list(pick(read, lambda row: row, lambda _: size, keys))
    assert [row for page in pages for row in page] == sorted(set(rows) & set(keys))


@pytest.mark.parametrize(("every", "calls", "rows"), [(1, 15, 10_000), (1000, 12, 60)])
def test_pick_of_near_or_far_rows_costs_few_calls_and_rows(every: int, calls: int, rows: int) -> None:
    reads: list[int] = []

    def read(start: bytes, stop: bytes | None, limit: int) -> Page[list[int]]:
        assert stop == keys[-1] + b"\x00"
        first = int.from_bytes(start[:4], "big")
        reads.append(limit)
        return Page(list(range(first, first + limit)), (first + limit - 1).to_bytes(4, "big") + b"\x00")

    keys = [number.to_bytes(4, "big") for number in range(0, 10_000, every)]
    found = [row for page in pick(read, lambda row: row.to_bytes(4, "big"), lambda _: 1, keys) for row in page]
    assert [number.to_bytes(4, "big") for number in found] == keys
    assert len(reads) <= calls
    assert sum(reads) <= rows + PAGE_ROWS
    assert max(reads) <= PAGE_ROWS


LONG = "x" * 300
HOSTILE = ["007:0", "_:-", "default:Orders", "default:orders", "default:--x", "null:NaN", f"{'y' * 200}:{'x' * 200}"]


def test_archive_of_special_names_reads_back_unchanged(undo: Undo) -> None:
    for name in HOSTILE:
        undo.archive(topic(undo.store, name, ttl_seconds=60).plain(NOW_MS))
    partitioning = ds.partitioning(
        pa.schema([("namespace", pa.string()), ("topic", pa.string()), ("day", pa.string())]), flavor="hive"
    )
    table = ds.dataset(undo.folder, format="parquet", partitioning=partitioning).to_table()
    assert sorted(f"{row['namespace']}:{row['topic']}" for row in table.to_pylist()) == sorted(HOSTILE)
    found = archived.find(undo.folder)
    assert (sorted(str(file.summary.topic) for file in found.files), found.damaged) == (sorted(HOSTILE), [])
    assert sorted(str(day.topic) for day in archive_folder.days(undo.folder)) == sorted(HOSTILE)


@pytest.mark.parametrize(
    "name", [f"default:{LONG}", f"{LONG}:{LONG}", f"default:{'x' * 201}", f"default:{NO_VALUE}", f"{NO_VALUE}:t"]
)
def test_archive_of_names_too_long_for_a_folder_is_found_again(undo: Undo, name: str) -> None:
    one = topic(undo.store, name, ttl_seconds=60).plain(NOW_MS)
    other = topic(undo.store, f"{name}y", ttl_seconds=60).plain(NOW_MS)
    undo.archive(one)
    undo.archive(other)
    assert len(list(archive_folder.days(undo.folder))) == 2
    assert [file.summary.topic for file in undo.files(one)] == [one.id]
    assert [str(file.summary.topic) for file in archived.find(undo.folder, ("*y",)).files] == [f"{name}y"]
    assert {str(file.summary.topic) for file in archived.find(undo.folder).files} == {name, f"{name}y"}
    assert None not in {value for row in rows_of(undo.folder) for value in (row["namespace"], row["topic"])}


class FullDisk(io.FileIO):
    """A file on a disk with space for a few bytes."""

    room = 100

    def write(self, data: Any) -> int:
        if self.tell() + len(bytes(data)) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def fail_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, mode: str, opener: Callable[[str, int], int]) -> FullDisk:
        assert mode == "wb"
        return FullDisk(path, "wb", opener=opener)

    monkeypatch.setattr("janitor.archive.folder.open", opened, raising=False)


def name_of(handle: int) -> str:
    return Path(f"/dev/fd/{handle}").readlink().name


def fail_syncing(kind: Callable[[str], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    def fail(monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.fsync

        def synced(handle: int) -> None:
            if kind(name_of(handle)):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", synced)

    return fail


def fail_renaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", raising(OSError(errno.ENOSPC, "No space left on device")))


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "write": fail_writing,
    "sync of the file": fail_syncing(lambda name: name.endswith(".tmp")),
    "rename": fail_renaming,
    "sync of the day's folder": fail_syncing(lambda name: name.endswith(DAY_NAME)),
    "sync of a folder above": fail_syncing(lambda name: name.endswith("topic=orders")),
}


@pytest.mark.parametrize("step", FAILURES)
def test_archive_on_a_full_disk_raises_and_leaves_no_file(
    undo: Undo, orders: Topic, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.plain(*range(NOW_MS, NOW_MS + 100))
    run = undo.begin()
    keys = keys_of(orders, undo.store.message)
    with monkeypatch.context() as patch:
        FAILURES[step](patch)
        with pytest.raises(ArchiveError, match="No space left on device"):
            run.save(orders.id, 1, undo.store.message, Rule.EXPIRED, keys)
    assert not [name for name in list_files(undo.folder) if "." in name]
    # The disk has space again.
    assert run.save(orders.id, 1, undo.store.message, Rule.EXPIRED, keys).keys == keys
    assert len(rows_of(undo.folder)) == 100


def test_archive_syncs_folders_after_rename(undo: Undo, orders: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        steps.append(f"sync {name_of(handle)}")
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    orders.plain(NOW_MS)
    undo.archive(orders)
    above = ["topic=orders", "namespace=default", "archive", undo.folder.parent.name]
    written = ["sync .janitor-run-1-000001.parquet.tmp", "rename", f"sync {DAY_NAME}"]
    assert steps == [f"sync {name}" for name in above] + written


def test_archive_folder_that_is_read_only_fails(undo: Undo, orders: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.plain(NOW_MS)
    monkeypatch.setattr(Path, "mkdir", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(ArchiveError, match="Permission denied"):
        undo.archive(orders)


def test_archive_without_pyarrow_names_the_extra(undo: Undo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"\.\[archive\]"):
        ParquetArchive(undo.folder, undo.clock)


def test_list_without_pyarrow_names_the_extra(undo: Undo, orders: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    undo.archive(orders.plain(NOW_MS))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"\.\[archive\]"):
        archived.find(undo.folder)


def test_archive_modules_import_without_pyarrow() -> None:
    modules = "janitor.archive, janitor.archive.index, janitor.archive.restore, janitor.cli.archive"
    code = f"import {modules}, sys; janitor.archive.parquet.require_pyarrow(); sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_pyarrow_is_imported_by_one_module_only() -> None:
    knowing = set()
    for path in [path for package in ("janitor", "tms_core") for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "pyarrow" for name in names):
                knowing.add(path.relative_to(ROOT).as_posix())
    assert {path for path in knowing if not path.startswith("janitor/spark/")} == {"janitor/archive/parquet.py"}


KEEP_DAYS = 7


@pytest.mark.parametrize(("days_later", "left"), [(0, 1), (KEEP_DAYS, 1), (KEEP_DAYS + 1, 0)])
def test_expire_deletes_days_past_the_limit(undo: Undo, orders: Topic, days_later: int, left: int) -> None:
    orders.plain(NOW_MS).stored(COMMITTED, NOW_MS)
    undo.archive(orders)
    end_of_day_ms = round(datetime(2023, 11, 15, tzinfo=UTC).timestamp() * 1000) - 1
    removed = ParquetArchive(undo.folder, undo.clock).expire(KEEP_DAYS, end_of_day_ms + days_later * DAY)
    assert removed == 2 * (1 - left)
    assert len(list(archive_folder.days(undo.folder))) == left
    assert undo.folder.exists()
    assert bool(list_files(undo.folder)) == bool(left)


def test_expire_of_an_old_day_keeps_unrecognized_files(undo: Undo, orders: Topic, tmp_path: Path) -> None:
    orders.plain(NOW_MS)
    [saved] = undo.archive(orders)
    assert saved.path is not None
    day = saved.path.parent
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "topic=t" / DAY_NAME).mkdir(parents=True)
    kept = [
        day / "part-00000.parquet",
        day / "notes.txt",
        day / ".hidden",
        day.parent / "day=yesterday" / saved.path.name,
        undo.folder / "other" / saved.path.name,
        elsewhere / "topic=t" / DAY_NAME / saved.path.name,
        day.parents[2] / saved.path.name,
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (undo.folder / "namespace=linked").symlink_to(elsewhere)
    assert ParquetArchive(undo.folder, undo.clock).expire(1, NOW_MS + 100 * DAY) == 1
    assert [path for path in kept if not path.exists()] == []
    assert not saved.path.exists()


def test_expire_deletes_temporary_files_of_a_crash_after_two_days(undo: Undo, orders: Topic) -> None:
    orders.plain(NOW_MS)
    [saved] = undo.archive(orders)
    assert saved.path is not None
    left = saved.path.with_name(".janitor-run-0-000001.parquet.tmp")
    left.write_bytes(saved.path.read_bytes()[:100])
    assert len(rows_of(undo.folder)) == 1
    assert (len(undo.files(orders)), archived.find(undo.folder).damaged) == (1, [])
    undo_archive = ParquetArchive(undo.folder, undo.clock)
    for days, there in ((0, True), (1, True), (2, False)):
        assert undo_archive.expire(KEEP_DAYS, NOW_MS + days * DAY) == 0
        assert left.exists() == there
    assert saved.path.exists()


def test_archive_through_a_link_is_listed_and_expires(undo: Undo, orders: Topic, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    undo.folder.symlink_to(tmp_path / "disk")
    undo.archive(orders.plain(NOW_MS))
    assert len(undo.files(orders)) == len(archived.find(undo.folder).files) == 1
    assert ParquetArchive(undo.folder, undo.clock).expire(1, NOW_MS + 3 * DAY) == 1
