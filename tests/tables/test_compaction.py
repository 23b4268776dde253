"""Compaction after deletes: which ranges are compacted together, separately or not at all."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from threading import Event, current_thread, main_thread

import pytest

from tests.support import wait_until
from tms_core.errors import StoreError
from tms_core.tables import compaction
from tms_core.tables.base import TableName
from tms_core.tables.compaction import GAP_BYTES, SLICE_BYTES, SLICE_ROWS, WORTHWHILE_ROWS, DeletedRanges, Slice
from tms_core.tables.memory import MemoryPayloadTable


class SlicedTable(MemoryPayloadTable):
    """A table that estimates the bytes between keys and records the ranges of its compactions."""

    def __init__(self, gap_bytes: int = 0) -> None:
        super().__init__(Counter())
        self.gap_bytes = gap_bytes
        self.measured: list[tuple[bytes, bytes | None]] = []
        self.compacted: list[tuple[bytes, bytes]] = []

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        self.measured.append((start, stop))
        return self.gap_bytes

    def compact(self, start: bytes, stop: bytes) -> None:
        self.compacted.append((start, stop))


class ConcurrentTable(SlicedTable):
    """A table that is compacted during the pass."""

    def __init__(self, error: StoreError | None = None) -> None:
        super().__init__(GAP_BYTES + 1)
        self.error = error
        self.reads = 0
        self.go_on = Event()

    @property
    def can_compact_concurrently(self) -> bool:
        return True

    def compact(self, start: bytes, stop: bytes) -> None:
        self.reads += 1
        if stop and current_thread() is not main_thread():
            self.go_on.wait()
            if self.error is not None:
                raise self.error
        super().compact(start, stop)


def keys(first: bytes, last: bytes, rows: int = 2) -> list[bytes]:
    return [first, *[first + b"\x01"] * (rows - 2), last]


def is_started(deleted: DeletedRanges) -> list[bool]:
    return [part.background is not None for part in deleted.slices]


def parts(deleted: DeletedRanges) -> list[tuple[bytes, bytes, int]]:
    return [(part.start, part.last, part.rows) for part in deleted.slices]


def test_consecutive_batches_form_one_slice() -> None:
    table, deleted = SlicedTable(), DeletedRanges()
    deleted.add(table, keys(b"a", b"c", 3))
    deleted.add(table, keys(b"d", b"f", 4))
    assert parts(deleted) == [(b"a", b"f", 7)]
    assert table.measured == [(b"c", b"d"), (b"a", b"d")], "the gap, and the whole slice"


@pytest.mark.parametrize(("gap_bytes", "slices"), [(GAP_BYTES - 1, 1), (GAP_BYTES, 1), (GAP_BYTES + 1, 2)])
def test_slice_ends_at_a_gap_larger_than_a_file(gap_bytes: int, slices: int) -> None:
    table, deleted = SlicedTable(gap_bytes), DeletedRanges()
    deleted.add(table, keys(b"a", b"b"))
    deleted.add(table, keys(b"y", b"z"))
    assert len(deleted.slices) == slices


@pytest.mark.parametrize(("rows", "taken"), [(SLICE_ROWS - 1, True), (SLICE_ROWS, False), (SLICE_ROWS + 1, False)])
def test_full_slice_accepts_no_more_rows(rows: int, taken: bool) -> None:
    assert Slice(SlicedTable(), b"a", b"b", rows).can_add(b"c") is taken


@pytest.mark.parametrize(("whole", "taken"), [(SLICE_BYTES - 1, True), (SLICE_BYTES, False)])
def test_slice_with_full_files_accepts_no_more_rows(whole: int, taken: bool) -> None:
    class LargeRows(SlicedTable):
        def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
            return whole if start == b"a" else 0

    assert Slice(LargeRows(), b"a", b"b", 2).can_add(b"c") is taken


def test_batches_of_alternating_parts_form_one_slice_per_part() -> None:
    one, other, deleted = SlicedTable(), SlicedTable(), DeletedRanges()
    for first, last in ((b"a", b"b"), (b"c", b"d"), (b"e", b"f")):
        deleted.add(one, keys(first, last))
        deleted.add(other, keys(first, last))
    assert [(part.table, *found) for part, found in zip(deleted.slices, parts(deleted), strict=True)] == [
        (one, b"a", b"f", 6),
        (other, b"a", b"f", 6),
    ]


def test_compact_covers_deleted_keys_and_beats_after_each_slice() -> None:
    table, deleted = SlicedTable(GAP_BYTES + 1), DeletedRanges()
    deleted.add(table, keys(b"a", b"b", WORTHWHILE_ROWS))
    deleted.add(table, keys(b"y", b"z", WORTHWHILE_ROWS))
    seen: list[int] = []
    deleted.compact(lambda: seen.append(len(table.compacted)))
    assert table.compacted == [(b"a", b"b\x00"), (b"y", b"z\x00")]
    assert seen == [1, 2]


@pytest.mark.parametrize(("rows", "compacted"), [(WORTHWHILE_ROWS - 1, 0), (WORTHWHILE_ROWS, 1)])
def test_slice_of_few_rows_is_not_compacted(rows: int, compacted: int) -> None:
    table, deleted = SlicedTable(), DeletedRanges()
    deleted.add(table, keys(b"a", b"b", rows))
    deleted.compact(lambda: None)
    assert len(table.compacted) == compacted


def test_concurrent_compaction_starts_early_and_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ALIVE_SECONDS", 0.001)
    table, deleted, beats = ConcurrentTable(), DeletedRanges(), []

    def heartbeat() -> None:
        beats.append(len(table.compacted))
        table.go_on.set()

    with closing(deleted):
        deleted.add(table, keys(b"a", b"b", WORTHWHILE_ROWS))
        deleted.add(table, keys(b"y", b"z", WORTHWHILE_ROWS))
        assert is_started(deleted) == [True, False]
        deleted.finish_table("message")
        assert is_started(deleted) == [True, False]
        deleted.finish_table("payload")
        assert is_started(deleted) == [True, True]
        deleted.compact(heartbeat)
    # One heartbeat while the table waits for the first compaction, and one at the end.
    assert beats[0] == 0
    assert table.compacted == [(b"a", b"b\x00"), (b"y", b"z\x00"), (b"", b"")]


class MeasuringTable(ConcurrentTable):
    """A table that fails if it is measured while another thread is blocked from adding a batch."""

    def __init__(self, deleted: DeletedRanges) -> None:
        super().__init__()
        self.deleted = deleted

    @property
    def can_compact_concurrently(self) -> bool:
        assert not self.deleted._lock.locked()
        return False


def test_background_slice_starts_without_holding_the_lock() -> None:
    deleted = DeletedRanges()
    table = MeasuringTable(deleted)
    deleted.add(table, keys(b"a", b"c", WORTHWHILE_ROWS))
    deleted.add(table, keys(b"d", b"f", WORTHWHILE_ROWS))
    deleted.finish_table("payload")
    assert is_started(deleted) == [False, False]


def test_failed_concurrent_compaction_raises_in_compact() -> None:
    table, deleted = ConcurrentTable(StoreError("no space")), DeletedRanges()
    table.go_on.set()
    with closing(deleted):
        deleted.add(table, keys(b"a", b"b", WORTHWHILE_ROWS))
        deleted.add(table, keys(b"y", b"z", WORTHWHILE_ROWS))
        deleted.finish_table("payload")
        wait([part.background for part in deleted.slices if part.background is not None])
        with pytest.raises(StoreError, match="no space"):
            deleted.compact(lambda: None)
    assert table.reads == 1


def test_small_slice_is_compacted_if_table_weighs_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlicedTable, "weighs_compaction", True)
    table, deleted = SlicedTable(), DeletedRanges()
    deleted.add(table, keys(b"a", b"b"))
    deleted.compact(lambda: None)
    assert table.compacted == [(b"a", b"b\x00")]


def test_close_cancels_slices_not_started() -> None:
    table, deleted = ConcurrentTable(), DeletedRanges()
    for first, last in ((b"a", b"b"), (b"y", b"z")):
        deleted.add(table, keys(first, last, WORTHWHILE_ROWS))
    deleted.finish_table("payload")
    second = deleted.slices[1].background
    assert second is not None
    with ThreadPoolExecutor(1) as thread:
        thread.submit(deleted.close)
        try:
            wait_until(second.cancelled)
        finally:
            table.go_on.set()
    assert table.compacted == [(b"a", b"b\x00")]


def test_finish_table_tolerates_concurrent_call(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted, others = DeletedRanges(), [True]

    def name(_: SlicedTable) -> TableName:
        if others and others.pop():
            deleted.finish_table("payload")
        return "payload"

    monkeypatch.setattr(SlicedTable, "name", property(name))
    one, other = SlicedTable(), SlicedTable()
    for table in (one, other):
        deleted.add(table, keys(b"a", b"b"))
    deleted.finish_table("payload")
    deleted.add(one, keys(b"c", b"d"))
    assert [part.table for part in deleted.slices] == [one, other, one]
