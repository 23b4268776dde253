"""Unrecognized rows, damaged snapshots, wrong clocks and missing folders."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.report import Report, SnapshotUsed
from janitor.state.sqlite.state import FILE_NAME, SqliteState
from tests.builders import DAY, HOUR, NOW_MS, Topic, janitor, pointer, topic, unknown_topic, visibility
from tms_core.errors import SnapshotError
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import KEYS, MESSAGES, MessageValue, Store
from tms_core.tables.memory import MemoryStore
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import Snapshot
from tms_core.transaction.source.source import DirectorySource

OLD = pointer(NOW_MS - 10 * DAY)
DUE_MS = NOW_MS - 2 * DAY
#: Bytes after a key's topic: generation, time and sequence id, plus the write pointer in the payload table.
MESSAGE_TAIL, PAYLOAD_TAIL = 14, 22


def store_due_rows(store: Store) -> Topic:
    """Store due messages, a due payload, and a message to invert."""
    orders = topic(store, "default:orders", ttl_seconds=86400, generation=2)
    orders.plain(DUE_MS, DUE_MS + 1).tx(OLD, NOW_MS).stored(pointer(DUE_MS), DUE_MS)
    orders.at(1).plain(NOW_MS)
    return orders


def sweep(store: Store, **options: Any) -> Report:
    kit = janitor(store, **options, invalid=[OLD])
    return kit.engine.run_once(adopt=True)


def assert_done(orders: Topic) -> None:
    assert (orders.times(), orders.pointers(), orders.stored_times()) == ([NOW_MS], [-OLD], [])
    assert orders.at(1).times() == []


def invalid_keys(key: bytes) -> list[bytes]:
    """Return invalid variants of a key: truncated anywhere, too long, without separators."""
    head = b"default:orders:"
    tail = key[len(head) :]
    cut = [key[:size] for size in range(len(key))]
    longer = [key + bytes(size) for size in range(1, 30)] + [key + b"\xff", key + key]
    broken = [b"default.orders:" + tail, b"default:orders." + tail, b":" + tail, b"::" + tail, b"default::" + tail]
    broken += [b"def\xffult:orders:" + tail, b"default:ord rs:" + tail, b"a:b:c:" + tail, b"-:orders:" + tail]
    return [stranger for stranger in (*cut, *longer, *broken, b"\x00", b"\xff", b"\xff" * 40) if stranger]


def is_known(key: bytes, tail_bytes: int) -> bool:
    """Return whether a key is recognized; independent of the tested code."""
    return re.fullmatch(rb"[a-zA-Z0-9_]+:[a-zA-Z0-9_-]+:", key[:-tail_bytes]) is not None


def test_unrecognized_rows_stay_and_other_rows_are_swept(store: Store) -> None:
    orders = store_due_rows(store)
    like_message = invalid_keys(MessageKey(orders.id, 2, DUE_MS, 0).pack())
    like_message += invalid_keys(MessageKey(orders.id, 1, 1, 1).pack())
    like_payload = invalid_keys(PayloadKey(orders.id, 2, pointer(DUE_MS), DUE_MS, 0).pack())
    # A truncated or extended key may be valid again.
    message = sorted({key for key in like_message if not is_known(key, MESSAGE_TAIL)})
    payload = sorted({key for key in like_payload if not is_known(key, PAYLOAD_TAIL)})
    assert (len(message), len(payload)) > (100, 60)
    store.message.put([(key, MessageValue(OLD, b"x")) for key in message])
    store.payload.put([(key, b"x") for key in payload])
    report = sweep(store, batch_rows=3)
    assert_done(orders)
    left = [row for row in store.message.read(MESSAGES, b"", None, 10_000).items if not is_known(row[0], MESSAGE_TAIL)]
    assert left == [(key, MessageValue(OLD, b"x")) for key in message]
    stored = store.payload.read(KEYS, b"", None, 10_000).items
    assert [key for key in stored if not is_known(key, PAYLOAD_TAIL)] == payload
    assert report.totals.kept["unrecognized"] == len(message) + len(payload)
    assert report.errors == []


@pytest.mark.parametrize("generation", [0, -1, -2, -(2**31)])
def test_rows_of_impossible_generations_stay_and_are_inverted(store: Store, generation: int) -> None:
    strange = Topic(store, store_due_rows(store).id, generation)
    key = MessageKey(strange.id, generation, DUE_MS, 0).pack()
    store.message.put([(key, MessageValue(OLD, b"x"))])
    report = sweep(store)
    assert store.message.read(MESSAGES, key, key + b"\x00", 1).items == [(key, MessageValue(-OLD, b"x"))]
    assert report.totals.kept["unrecognized"] == 1


METADATA = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    b'{"generation":"1"}',
    b'{"ttl":"60"}',
    b'{"generation":"1","ttl":"0"}',
    b'{"generation":"1","ttl":"-1"}',
    b'{"generation":"1","ttl":"99999999999"}',
    b'{"generation":"0","ttl":"60"}',
    b'{"generation":"-2147483648","ttl":"60"}',
    b'{"generation":"1.0","ttl":"60"}',
    b'{"generation":1,"ttl":60}',
    b'{"generation":" 1","ttl":"60"}',
]


@pytest.mark.parametrize("value", METADATA, ids=range(len(METADATA)))
def test_unreadable_metadata_makes_only_its_topic_unknown(store: Store, value: bytes) -> None:
    orders = store_due_rows(store)
    spoilt = unknown_topic(store, "default:aaa").write_metadata(value).plain(1).tx(OLD, 1).stored(pointer(1), 1)
    report = sweep(store)
    assert_done(orders)
    assert (spoilt.times(), spoilt.pointers(), spoilt.stored_times()) == ([1, 1], [None, -OLD], [1])
    assert [note.guard for note in report.guards] == ["metadata"]


def test_metadata_under_unrecognized_key_is_reported_and_skipped(store: Store) -> None:
    orders = store_due_rows(store)
    for key in (b"no topic", b"a:b:c:", b"\xff"):
        assert store.metadata.compare_and_set(key, None, b'{"generation":"9","ttl":"1"}')
    report = sweep(store)
    assert_done(orders)
    assert [note.guard for note in report.guards] == ["metadata"] * 3


def encoded() -> bytes:
    stream = BytesIO()
    state = visibility(NOW_MS, [OLD, OLD + 1], [pointer(NOW_MS - 2), pointer(NOW_MS - 1)])
    write_snapshot(stream, Snapshot(state, {OLD: frozenset({b"change"})}))
    return stream.getvalue()


def test_snapshot_truncated_at_any_byte_allows_ttl_deletes_only(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.1"
    for size in range(len(encoded())):
        file.write_bytes(encoded()[:size])
        orders = store_due_rows(MemoryStore())
        assert sweep_with(file, orders) is None
        assert (orders.times(), orders.pointers()) == ([NOW_MS], [OLD])
    file.write_bytes(encoded())
    orders = store_due_rows(MemoryStore())
    assert sweep_with(file, orders) is not None
    assert_done(orders)


def sweep_with(snapshot: Path, orders: Topic) -> SnapshotUsed | None:
    """Sweep with the snapshot in this file; return the snapshot used."""
    kit = janitor(orders.store)
    kit.snapshots.latest = DirectorySource(snapshot).latest  # type: ignore[method-assign]
    return kit.engine.run_once(adopt=True).snapshot


@given(content=st.binary(max_size=200))
def test_snapshot_of_random_bytes_allows_ttl_deletes_only(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "any-bytes"
    file.write_bytes(content)
    orders = store_due_rows(MemoryStore())
    sweep_with(file, orders)
    assert orders.times() == [NOW_MS]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), SnapshotError("nonsense.")])
def test_failing_snapshot_source_allows_ttl_deletes(store: Store, error: Exception) -> None:
    orders = store_due_rows(store)
    kit = janitor(store)
    kit.snapshots.error = error
    report = kit.engine.run_once(adopt=True)
    assert (report.snapshot, report.boundary) == (None, None)
    assert (orders.times(), orders.pointers()) == ([NOW_MS], [OLD])


@pytest.mark.parametrize("now_ms", [-DAY, -1, 0, 1, HOUR])
def test_clock_around_1970_expires_nothing(store: Store, now_ms: int) -> None:
    orders = topic(store, "default:orders", ttl_seconds=86400).plain(0, 1, NOW_MS, 2**63 - 1).stored(1, 0, NOW_MS)
    kit = janitor(store, now_ms=now_ms)
    kit.snapshots.write_pointer = OLD
    report = kit.engine.run_once(adopt=True)
    assert orders.times() == [0, 1, NOW_MS, 2**63 - 1]
    assert orders.stored_times() == [0, NOW_MS]
    assert report.boundary is None


#: Write pointers fit 64 bits until the year 2262.
YEAR_2300_MS = 10_413_792_000_000


@pytest.mark.parametrize("now_ms", [9_223_372_036_854, YEAR_2300_MS, 253_402_300_799_999])
def test_clock_in_a_distant_year_sweeps_without_failure(store: Store, now_ms: int) -> None:
    orders = topic(store, "default:orders", ttl_seconds=86400)
    orders.plain(NOW_MS, now_ms - DAY - 1, now_ms - DAY).stored(pointer(NOW_MS), NOW_MS, now_ms)
    kit = janitor(store, now_ms=now_ms)
    kit.snapshots.write_pointer = 2**63 - 2
    kit.engine.run_once(adopt=True)
    assert kit.run_after(HOUR).errors == []
    assert orders.times() == []
    assert orders.stored_times() == [now_ms]


@pytest.mark.parametrize("ahead_ms", [DAY, 300 * 365 * DAY])
def test_clock_far_ahead_deletes_no_row(store: Store, ahead_ms: int) -> None:
    orders = topic(store, "default:orders", ttl_seconds=86400).plain(NOW_MS)
    kit = janitor(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    kit.engine.run_once(adopt=True)
    kit.clock.step(ahead_ms)
    assert kit.engine.run_once().tripped
    assert orders.times() == [NOW_MS]


def test_deleted_state_folder_proves_nothing(store: Store, tmp_path: Path) -> None:
    orders = store_due_rows(store)
    with SqliteState(tmp_path / "state") as state:
        janitor(store, state=state).engine.run_once(adopt=True)
        (tmp_path / "state" / FILE_NAME).unlink()
    orders.plain(DUE_MS)
    with SqliteState(tmp_path / "state") as state:
        assert janitor(store, state=state).engine.run_once().tripped
    assert DUE_MS in orders.times()
