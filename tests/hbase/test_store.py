"""HBase stores beyond the contract of all stores: salts, parts, timestamps and regions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import happybase
import pytest

from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tms_core.errors import StoreNotFound
from tms_core.rowkey import salt
from tms_core.tables.base import CELLS, KEYS, MESSAGES, PAYLOADS, MessageValue, Reads, TxCell
from tms_core.tables.hbase.store import HBaseStore

BUCKETS = 16
POINTER = 1_500_000_000_000_000_007
TX = MessageValue(POINTER, b"in a transaction")
HOUR_MS = 3_600_000
P, T = b"d:\x00\x00\x00p", b"d:\x00\x00\x00t"


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.shared(buckets=BUCKETS)


@pytest.fixture
def store(hbase_tables: Tables, namespace: str) -> Iterator[HBaseStore]:
    with hbase_tables.open(namespace, buckets=BUCKETS) as opened:
        yield opened


def keys(number: int, prefix: bytes = b"k") -> list[bytes]:
    return [b"%b%04d" % (prefix, one) for one in range(number)]


def wrong_salt(key: bytes) -> bytes:
    return bytes([(salt(key, BUCKETS)[0] + 1) % BUCKETS])


def all_keys(store: Reads, limit: int = 7) -> list[bytes]:
    found: list[bytes] = []
    resume: bytes | None = b""
    while resume is not None:
        page = store.message.read(KEYS, resume, None, limit)
        assert len(page.items) <= limit
        found += page.items
        resume = page.resume
    return found


def test_parts_contain_each_row_once_in_order(store: HBaseStore) -> None:
    store.message.put([(key, TX) for key in keys(200)])
    store.payload.put([(key, b"x") for key in keys(50)])
    parts = store.parts()
    assert len(parts) == BUCKETS
    in_parts = [part.message.read(KEYS, b"", None, 1000).items for part in parts]
    assert all(found == sorted(found) for found in in_parts)
    assert sorted(key for found in in_parts for key in found) == keys(200)
    assert sorted(key for part in parts for key in part.payload.read(KEYS, b"", None, 1000).items) == keys(50)
    assert all_keys(store) == keys(200)
    assert parts[0].metadata is store.metadata
    assert parts[0].calls is store.calls
    assert parts[0].identity() == store.identity()


def test_part_reads_deletes_and_inverts_only_its_own_rows(store: HBaseStore) -> None:
    store.message.put([(key, TX) for key in keys(100)])
    part, *others = store.parts()
    [first, second, *rest] = part.message.read(KEYS, b"", None, 1000).items
    [cell] = part.message.read(CELLS, first, first + b"\x00", 10).items
    assert part.message.invert([cell]) == [True]
    assert [found.message.invert([cell]) for found in others] == [[False]] * len(others)
    part.message.delete([second, others[0].message.read(KEYS, b"", None, 1).items[0]])
    assert part.message.read(KEYS, b"", None, 1000).items == [first, *rest]
    assert len(all_keys(store)) == 99
    assert part.message.read(MESSAGES, first, first + b"\x00", 1).items == [(first, TX._replace(pointer=-POINTER))]


def test_pages_of_a_part_skip_and_repeat_no_row(store: HBaseStore) -> None:
    store.message.put([(key, TX) for key in keys(300)])
    for part in store.parts():
        whole = part.message.read(KEYS, b"", None, 1000).items
        for limit in (1, 2, len(whole) - 1, len(whole), len(whole) + 1):
            assert all_keys(part, limit) == whole


def test_rows_under_wrong_salts_are_deleted(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.message.put([(key, TX) for key in keys(200)])
    stray = [(wrong_salt(b"stray"), b"stray"), (b"\x20", b"far"), (b"\xff", b"last")]
    for byte, key in stray:
        message.put(byte + key, {P: b"x"})
    with HBaseStore(hbase.settings(namespace, buckets=BUCKETS)) as janitor:
        assert set(all_keys(janitor)) == {*keys(200), b"stray", b"far", b"last"}
        before = janitor.wrong_salts
        parts = janitor.parts()
        assert len(parts) == BUCKETS + 2
        found = [part.message.read(KEYS, b"", None, 1000).items for part in parts]
        assert sorted(key for items in found for key in items) == sorted([*keys(200), b"stray", b"far", b"last"])
        assert janitor.wrong_salts - before == 3
        [warning] = [record.getMessage() for record in caplog.records if "under a wrong salt" in record.getMessage()]
        assert warning.startswith(f"{namespace}:tms.message has rows")
        for part, items in zip(parts, found, strict=True):
            part.message.delete(items)
        assert list(message.scan()) == []
        assert janitor.parts() == []


def test_delete_of_row_put_after_a_page_removes_it(store: HBaseStore, message: happybase.Table) -> None:
    store.message.put([(key, TX) for key in keys(8)])
    [(_, newest_ms)] = message.cells(salt(keys(8)[7], BUCKETS) + keys(8)[7], P, include_timestamp=True)
    assert len(store.message.read(KEYS, b"", None, 100).items) == 8
    later = keys(8)[3] + b"-later"
    message.put(salt(later, BUCKETS) + later, {P: b"x"}, timestamp=newest_ms + 3_600_000)
    store.message.delete([later])
    assert store.message.read(KEYS, b"", None, 100).items == keys(8)


def test_duplicate_key_with_future_timestamp_is_deleted(store: HBaseStore, message: happybase.Table) -> None:
    first, second = sorted([salt(b"pair", BUCKETS) + b"pair", wrong_salt(b"pair") + b"pair"])
    message.put(first, {P: b"x"}, timestamp=1_000)
    message.put(second, {P: b"x"})
    [(_, now_ms)] = message.cells(second, P, include_timestamp=True)
    message.put(second, {P: b"x"}, timestamp=now_ms + 3_600_000)
    assert store.message.read(KEYS, b"", None, 100).items == [b"pair"]
    store.message.delete([b"pair"])
    assert list(message.scan()) == []


def test_delete_in_empty_store_succeeds(hbase: HBaseServer, namespace: str, store: HBaseStore) -> None:
    assert store.parts() == []
    with HBaseStore(hbase.settings(namespace)) as janitor:
        janitor.message.delete([b"gone"])


def test_duplicate_key_is_read_once_and_deleted_under_each_salt(store: HBaseStore, message: happybase.Table) -> None:
    rows = sorted([salt(b"twice", BUCKETS) + b"twice", wrong_salt(b"twice") + b"twice"])
    payloads = [b"the one", b"the other"]
    store.message.put([(b"other", TX)])
    for row, payload in zip(rows, payloads, strict=True):
        message.put(row, {P: payload, T: POINTER.to_bytes(8, "big")})
    found = store.message.read(CELLS, b"", None, 10).items
    assert [cell.key for cell in found] == [b"other", b"twice"]
    assert store.message.invert([found[1], TxCell(b"zz", POINTER, refers=True)]) == [True, False]
    inverted = (-POINTER).to_bytes(8, "big", signed=True)
    assert [message.row(row) for row in rows] == [{P: payload, T: inverted} for payload in payloads]
    assert store.message.read(MESSAGES, b"p", None, 10).items == [(b"twice", MessageValue(-POINTER, b"the one"))]
    store.message.delete([b"twice"])
    assert [message.row(row) for row in rows] == [{}, {}]
    assert store.message.read(KEYS, b"", None, 10).items == [b"other"]


@pytest.mark.parametrize("known", [True, False], ids=["after a page", "by name"])
@pytest.mark.parametrize("ahead", [(P, T), (T,), (P,)], ids=["row", "pointer", "payload"])
def test_deleted_cells_with_future_timestamps_stay_deleted(
    hbase: HBaseServer,
    store: HBaseStore,
    message: happybase.Table,
    namespace: str,
    request: pytest.FixtureRequest,
    known: bool,
    ahead: tuple[bytes, ...],
) -> None:
    # Keys of this test only, because they cannot be put again for an hour.
    names = keys(40, request.node.name.encode())
    store.message.put([(key, TX) for key in names])
    late_ms = time.time_ns() // 1_000_000 + HOUR_MS
    value = {P: TX.payload or b"", T: POINTER.to_bytes(8, "big")}
    for key in [*names[::3], names[0] + b"witness"]:
        message.put(salt(key, BUCKETS) + key, {column: value[column] for column in ahead}, timestamp=late_ms)
    left = salt(names[0] + b"witness", BUCKETS) + names[0] + b"witness"
    message.delete(left)
    assert set(message.row(left)) == set(ahead), "a plain delete does not hide cells with future timestamps"
    message.delete(left, timestamp=late_ms)
    if known:
        assert store.message.read(KEYS, b"", None, 1000).items == names
    store.message.delete(names)
    assert list(message.scan()) == []
    assert 0 < store.ahead_ms <= HOUR_MS
    hbase.command("compact", f"{namespace}:tms.message")
    assert list(message.scan()) == []


def test_row_put_after_a_delete_is_visible(store: HBaseStore, message: happybase.Table) -> None:
    old_ms = time.time_ns() // 1_000_000 - HOUR_MS
    message.put(salt(b"again", BUCKETS) + b"again", {P: b"old"}, timestamp=old_ms)
    [part] = store.parts()
    part.message.delete(part.message.read(KEYS, b"", None, 10).items)
    message.put(salt(b"again", BUCKETS) + b"again", {P: b"new"}, timestamp=time.time_ns() // 1_000_000 + 5_000)
    assert store.message.read(MESSAGES, b"", None, 10).items == [(b"again", MessageValue(None, b"new"))]
    assert store.ahead_ms == 0


def test_inversion_does_not_restore_a_deleted_row(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str
) -> None:
    store.message.put([(key, TX) for key in keys(3)])
    cells = store.message.read(CELLS, b"", None, 10).items
    message.delete(salt(b"k0000", BUCKETS) + b"k0000")
    hbase.command("compact", f"{namespace}:tms.message")
    assert store.message.invert(cells) == [False, True, True]
    assert all_keys(store) == keys(3)[1:]


def test_rows_without_valid_cdap_cells_are_counted_as_unreadable(store: HBaseStore, message: happybase.Table) -> None:
    store.message.put([(b"good", TX)])
    message.put(b"\x01alien", {b"d:x": b"?"})
    message.put(b"\x01short", {T: b"1234567", P: b"x"})
    assert store.message.read(MESSAGES, b"", None, 10).items == [(b"good", TX)]
    assert store.calls["unreadable"] == 2
    assert [cell.key for cell in store.message.read(CELLS, b"", None, 10).items] == [b"good"]
    assert store.message.read(KEYS, b"", None, 10).items == [b"alien", b"good", b"short"]


def test_pages_of_large_rows_contain_each_row_once(store: HBaseStore) -> None:
    megabyte = bytes(1 << 20)
    for key in keys(20):
        store.payload.put([(key, megabyte)])
    pages, resume = [], b""
    while True:
        page = store.payload.read(PAYLOADS, resume, None, 1000)
        pages.append(len(page.items))
        if page.resume is None:
            break
        resume = page.resume
    assert sum(pages) == 20
    for part in store.parts():
        assert all(len(value) == len(megabyte) for _, value in part.payload.read(PAYLOADS, b"", None, 1000).items)


def test_read_during_region_split_and_merge_skips_no_row(hbase: HBaseServer, hbase_tables: Tables) -> None:
    namespace = hbase_tables.make(buckets=4)
    store = hbase_tables.open(namespace, buckets=4)
    table = f"{namespace}:tms.message"
    hbase.command("set", table, "SPLIT_POLICY", "org.apache.hadoop.hbase.regionserver.ConstantSizeRegionSplitPolicy")
    store.message.put([(key, TX) for key in keys(200)])
    found: list[bytes] = []
    resume: bytes | None = b""
    steps = [
        lambda: hbase.command("split", table, b"\x03k0100"),
        lambda: hbase.command("merge", table, b"\x01"),
        lambda: hbase.command("cycle", table),
    ]
    while resume is not None:
        page = store.message.read(KEYS, resume, None, 40)
        found += page.items
        resume = page.resume
        if steps:
            steps.pop(0)()
    assert found == keys(200)
    assert hbase.command("regions", table) == "- 01 03 036b30313030"
    assert len(store.parts()) == 4
    store.close()


def test_open_without_tables_hints_at_create_tables(hbase: HBaseServer) -> None:
    with pytest.raises(StoreNotFound, match="tms admin create-tables"):
        HBaseStore(hbase.settings("nowhere"))


def test_identity_is_cluster_and_namespace(store: HBaseStore, namespace: str) -> None:
    cluster = store.pool.call("getClusterId").decode()
    assert store.identity() == f"hbase:{cluster}:{namespace}"
    assert len(cluster) == 36
