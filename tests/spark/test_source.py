"""The data source: each row once, with columns and verdicts, however reads are divided."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, Not

from janitor.report import DataTable
from janitor.rules.policy import Row
from janitor.spark.session import translated
from janitor.spark.source import pages
from janitor.spark.source.options import SourceOptions
from janitor.spark.source.pages import RowFields
from janitor.spark.source.parts import Piece
from janitor.spark.source.selection import RowSelection
from janitor.spark.source.source import FilteringReader, FilteringSource, RowReader, TmsSource
from janitor.spark.sweep.ranged import RangedStore
from tests.builders import DAY, HOUR, NOW_MS, pointer, save_snapshot, topic, unknown_topic, visibility
from tests.janitor.rules.test_differential import LONG_MAX, Scene, leveldb_store, scenes
from tests.spark.test_columns import verdict
from tests.support import raising
from tms_core.clock import SystemClock
from tms_core.consumers.claim_rows import pack
from tms_core.consumers.claims import ConsumerGroup, GroupClaim
from tms_core.consumers.positions import Position, Positions
from tms_core.errors import ConfigurationError, StoreBusy, StoreNotFound
from tms_core.rowkey import MessageId, MessageKey, PayloadKey
from tms_core.tables.base import ALL_KEYS, CELLS, KEYS, MESSAGES, PAYLOADS, KeyRange, MessageValue, Page, Store, TxCell
from tms_core.tables.leveldb.database import StoredColumns
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.leveldb.store import LevelDBMessageReads, LevelDBStore, decode
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata

ALL = Piece(None, (ALL_KEYS,))
Filled = Callable[[Callable[[Store], None]], Path]


@pytest.fixture
def filled(place: Path) -> Filled:
    def fill(with_rows: Callable[[Store], None]) -> Path:
        with LevelDBStore(place, create=True) as store:
            with_rows(store)
        return place

    return fill


def fill_many(store: Store) -> None:
    """Fill a store with topics of similar names, several generations and many rows."""
    for name in ("a:t", "a:t1", "a:t1-x", "a:t10", "b:t1"):
        made = topic(store, name, ttl_seconds=3600, generation=2)
        made.at(1).plain(*range(NOW_MS, NOW_MS + 300))
        made.plain(*range(NOW_MS - 300, NOW_MS + 300)).stored(pointer(NOW_MS), *range(NOW_MS, NOW_MS + 200))
    body = MessageValue(None, b"x")
    store.message.put([(MessageKey(TopicId("a", "t1"), 2, -1, 0).pack(), body), (b"z", body)])
    store.payload.put([(PayloadKey(TopicId("a", "t1"), -1, 5, 5, 0).pack(), b"x")])


def fill_sample(store: Store) -> None:
    """Fill a store with rows of every kind."""
    orders = topic(store, "default:orders", ttl_seconds=3600)
    orders.plain(NOW_MS - HOUR - 1, NOW_MS - HOUR, NOW_MS).tx(7, NOW_MS, body=b"four").ref(pointer(NOW_MS), NOW_MS)
    orders.stored(pointer(NOW_MS), NOW_MS, body=b"stored").stored(pointer(NOW_MS - DAY), NOW_MS - 2 * DAY)
    topic(store, "default:retired", ttl_seconds=60, generation=-2).plain(NOW_MS)
    unknown_topic(store, "other:stranger", generation=4).plain(NOW_MS)
    store.message.put([(b"no valid key", MessageValue(None, b"x"))])
    store.metadata.compare_and_set(b"default:broken:", None, b"{}")


def reader(place: Path, **options: Any) -> RowReader:
    given = {"leveldb": str(place), "now": str(NOW_MS), **{name: str(value) for name, value in options.items()}}
    return FilteringReader(SourceOptions.parse(given, {}))


def rows_of(found: RowReader) -> list[dict[str, Any]]:
    return [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]


def rows_of_table(source: TmsSource) -> list[dict[str, Any]]:
    """Return the rows of the metadata or the claims."""
    reading = source.reader(source.schema())
    batches: list[Any] = [batch for part in reading.partitions() for batch in reading.read(part)]
    return [row for batch in batches for row in batch.to_pylist()]


def read(place: Path, **options: Any) -> list[dict[str, Any]]:
    return rows_of(reader(place, **options))


def test_source_of_messages_returns_columns_and_verdicts(filled: Filled) -> None:
    found = read(filled(fill_sample), sizes="true", payload="true")
    short = [
        (r["topic"], r["publish_ms"], r["write_pointer"], r["payload"], r["payload_bytes"], r["action"], r["rule"])
        for r in found
    ]
    assert short == [
        ("orders", NOW_MS - HOUR - 1, None, b"body", 4, "delete", "expired"),
        ("orders", NOW_MS - HOUR, None, b"body", 4, "keep", "live"),
        ("orders", NOW_MS, None, b"body", 4, "keep", "live"),
        ("orders", NOW_MS, 7, b"four", 4, "keep", "live"),
        ("orders", NOW_MS, pointer(NOW_MS), None, None, "keep", "live"),
        ("retired", NOW_MS, None, b"body", 4, "delete", "old_generation"),
        (None, None, None, b"x", 1, "keep", "unrecognized"),
        ("stranger", NOW_MS, None, b"body", 4, "keep", "unknown_topic"),
    ]
    assert {(r["namespace"], r["topic"], r["generation"]) for r in found} == {
        ("default", "orders", 1),
        ("default", "retired", 2),
        ("other", "stranger", 4),
        (None, None, None),
    }
    assert {(r["salt"], r["write_ms"], r["payload_sequence"]) for r in found} == {(None, None, None)}
    assert [r["sequence"] for r in found][:5] == [0, 1, 2, 3, 4]


def test_source_of_payloads_returns_columns_and_verdicts(filled: Filled) -> None:
    found = read(filled(fill_sample), table="payload", sizes="true", payload="true")
    assert [(r["write_pointer"], r["write_ms"], r["payload"], r["action"], r["rule"]) for r in found] == [
        (pointer(NOW_MS - DAY), NOW_MS - 2 * DAY, b"stored", "keep", "undecided"),
        (pointer(NOW_MS), NOW_MS, b"stored", "keep", "live"),
    ]
    assert {(r["publish_ms"], r["sequence"], r["payload_bytes"]) for r in found} == {(None, None, 6)}


def test_source_omits_payloads_and_sizes_by_default(filled: Filled) -> None:
    place = filled(fill_sample)
    assert {r["payload_bytes"] for r in read(place)} == {None}
    assert all("payload" not in r for table in ("message", "payload") for r in read(place, table=table))


def test_source_of_metadata_explains_unparsable_rows(filled: Filled) -> None:
    found = rows_of_table(TmsSource({"leveldb": str(filled(fill_sample)), "table": "metadata"}))
    assert [(r["topic"], r["generation"], r["ttl_seconds"], r["deleted"]) for r in found] == [
        (None, None, None, None),
        ("orders", 1, 3600, False),
        ("retired", -2, 60, True),
    ]
    assert [r["key"] for r in found] == [b"default:broken:", b"default:orders:", b"default:retired:"]
    assert "broken" in found[0]["problem"]
    assert found[1]["problem"] is None


@pytest.mark.no_cover
@settings(max_examples=25)
@given(scenes())
def test_scan_of_random_store_returns_each_key_once_in_order(scene: Scene) -> None:
    with leveldb_store() as store:
        scene.fill(store)
        for name, stored in (("message", store.message), ("payload", store.payload)):
            table: DataTable = "message" if name == "message" else "payload"
            found = [key for rows in pages.scan(stored, ALL, RowSelection(table), RowFields()) for key in rows.keys]
            assert found == sorted(scene.messages if table == "message" else scene.payloads)


@pytest.mark.parametrize("ask", [RowFields(), RowFields(sizes=True, payloads=True)])
@pytest.mark.parametrize("table", ["message", "payload"])
def test_scan_of_leveldb_and_memory_returns_the_same_rows(table: DataTable, ask: RowFields, place: Path) -> None:
    memory = MemoryStore()
    with LevelDBStore(place, create=True) as store:
        results = []
        for one in (memory, store):
            fill_sample(one)
            read_from = one.message if table == "message" else one.payload
            [rows] = pages.scan(read_from, ALL, RowSelection(table), ask)
            pointers = rows.pointers and [column.tolist() for column in rows.pointers]
            sizes = rows.sizes and [size for size, present in zip(*rows.sizes, strict=True) if present]
            results.append((rows.keys, pointers, sizes, rows.payloads))
    assert results[0] == results[1]


RAW = [
    [],
    [b""],
    [b"", b""],
    [b"\x00", b"\x00plain", b""],
    [b"\x01" + bytes(7), b"\x01" + bytes(8), b"\x02" + b"\xff" * 8, b"\x02", b"\x03" * 20, b""],
    [b"\x00" * 20, b"\xff" + bytes(range(8)), b"\x80\x01\x02", b"", b"\x03"],
]


@pytest.mark.no_cover
@settings(max_examples=100)
@given(st.sampled_from(RAW) | st.lists(st.binary(max_size=12) | st.binary(min_size=9, max_size=9), max_size=8))
def test_scan_of_random_values_matches_decode(values: list[bytes]) -> None:
    keys = [MessageKey(TopicId("a", "t"), 1, ms, 0).pack() for ms in range(len(values))]
    database: Any = Mock(fast_columns=Mock(return_value=Page(StoredColumns(keys, values), None)))
    table: Any = LevelDBMessageReads(database, Counter())
    found = []
    for rows in pages.scan(table, ALL, RowSelection("message"), RowFields(sizes=True, payloads=True)):
        assert rows.pointers is not None
        assert rows.sizes is not None
        assert rows.payloads is not None
        for stored, present, size, sized, payload in zip(*rows.pointers, *rows.sizes, rows.payloads, strict=True):
            found.append((int(stored) if present else None, int(size) if sized else None, payload))
    alone = [decode(value) or MessageValue(None, None) for value in values]
    assert found == [(one.pointer, None if one.payload is None else len(one.payload), one.payload) for one in alone]


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("table", ["message", "payload"])
def test_source_of_few_rows_returns_all(rows: int, table: str, filled: Filled) -> None:
    def fill(store: Store) -> None:
        made = topic(store, "a:t", ttl_seconds=3600)
        for ms in range(NOW_MS, NOW_MS + rows):
            made.plain(ms).stored(7, ms)

    place = filled(fill)
    for options in ({}, {"from": NOW_MS, "to": NOW_MS + 1}, {"topics": "a:*", "partitions": 9}):
        assert [row["topic"] for row in read(place, table=table, **options)] == ["t"] * rows


def test_task_with_missing_store_names_its_keys(filled: Filled) -> None:
    place = filled(fill_sample)
    found = reader(place, table="payload")
    [part] = found.partitions()
    place.rename(place.with_name("elsewhere"))
    message = "lost its store while it read payload rows of keys from the first to the last"
    with pytest.raises(StoreNotFound, match=message):
        list(found.read(part))


def test_source_shows_rows_of_protected_topic_as_held(filled: Filled, tmp_path: Path) -> None:
    place = filled(fill_sample)
    config = tmp_path / "janitor.yaml"
    config.write_text("janitor: {protect: ['default:*']}", encoding="utf-8")
    rules = {row["rule"] for row in read(place, config=config)}
    assert rules == {"held", "live", "unrecognized", "unknown_topic"}


def test_source_with_memory_store_is_rejected(tmp_path: Path) -> None:
    config = tmp_path / "janitor.yaml"
    config.write_text("storage: {kind: memory}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"storage\.kind .*memory"):
        RowReader(SourceOptions.parse({"config": str(config)}, {}))


def test_ranged_store_reads_only_its_ranges() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=3600).plain(*range(10)).tx(5, 10)
    orders.stored(5, *range(10))
    keys = store.message.read(KEYS, b"", None, 100).items
    stored = store.payload.read(KEYS, b"", None, 100).items
    part = RangedStore(store, [KeyRange(keys[2], keys[5])], [KeyRange(stored[8], None)])
    assert part.message.read(KEYS, b"", None, 100).items == keys[2:5]
    assert [key for key, _ in part.message.read(MESSAGES, keys[3], None, 100).items] == keys[3:5]
    assert not part.message.read(KEYS, keys[6], None, 100).items
    assert not part.message.read(CELLS, b"", keys[1], 100).items
    assert [key for key, _ in part.payload.read(PAYLOADS, b"", None, 100).items] == stored[8:]
    assert (part.span, part.identity()) == ((keys[2], keys[5]), store.identity())
    part.message.put([(keys[2] + b"x", MessageValue(None, b"x"))])
    assert part.message.invert([TxCell(keys[10], 5, False)]) == [True]
    part.message.delete(keys[2:3])
    part.payload.put([(stored[9] + b"x", b"x")])
    part.payload.delete(stored[8:9])
    part.message.sync()
    part.message.compact(b"", b"\xff")
    assert part.message.read(KEYS, b"", None, 100).items == [keys[2] + b"x", *keys[3:5]]
    assert part.payload.read(KEYS, b"", None, 100).items == [stored[9], stored[9] + b"x"]
    assert part.message.estimate_bytes(b"", keys[1]) == 0
    part.close()


@pytest.mark.parametrize("links", [True, False])
def test_source_uses_message_ttls(filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    place = filled(fill_many)
    side = side_path(place)
    keys = [row["key"] for row in read(place) if row["rule"] == "live"]
    with LevelDBSide(side) as table:
        Expiries(table).put([(keys[0], NOW_MS), (keys[1], NOW_MS + 1), (keys[-1], NOW_MS - 1), (b"gone", 5)])
    # A second open writes the rows from the log to a table.
    LevelDBSide(side).close()
    assert list(side.glob("*.ldb"))
    files = {path.name: path.read_bytes() for path in side.iterdir()}
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", raising(OSError(errno.EXDEV, "another file system")))
    found = {row["key"]: (row["action"], row["rule"]) for row in read(place)}
    assert [found[key] for key in (keys[0], keys[1], keys[-1])] == [
        ("delete", "expired"),
        ("keep", "live"),
        ("delete", "expired"),
    ]
    assert sum(verdict == ("delete", "expired") for verdict in found.values()) == 2
    assert {row["rule"] for row in read(place, table="payload")} == {"unrecognized", "live"}
    assert {path.name: path.read_bytes() for path in side.iterdir()} == files
    assert list((tmp_path / "messaging.janitor").iterdir()) == []


def with_groups(place: Path, folder: Path) -> dict[str, str]:
    """Create a topic with five processed messages, two of them by claims, and a topic without a group."""
    done, dead, running = pointer(NOW_MS - DAY, 0), pointer(NOW_MS - DAY, 1), pointer(NOW_MS - HOUR)
    times = [NOW_MS - 3 * HOUR + number for number in range(10)]
    with LevelDBStore(place, create=True) as store, LevelDBSide(side_path(place)) as side:
        for name, retention in (("orders", "consumed"), ("bills", "ttl")):
            found = unknown_topic(store, f"default:{name}").plain(*times, NOW_MS).stored(done, times[0])
            found.describe(ttl_seconds=86_400, retention=retention)
            metadata = TopicMetadata(found.id, 1, 86_400, {})
            Positions(side).put(metadata, Position("billing", MessageId(times[2], 2), NOW_MS, 0))
            group = ConsumerGroup.of(metadata, "billing")
            spans = [(2, 4, done, 1), (4, 6, running, 2), (6, 7, dead, 3), (7, 8, 0, 4)]
            side.put([pack(group, GroupClaim(_id(times, a), _id(times, b), who, n)) for a, b, who, n in spans])
    save_snapshot(folder, visibility(SystemClock().now_ms(), [dead], [running]))
    return {"snapshots": str(folder)}


def _id(times: list[int], at: int) -> MessageId:
    return MessageId(times[at], at)


def test_source_shows_processed_rows_of_consumed_topic(place: Path, tmp_path: Path) -> None:
    options = with_groups(place, tmp_path / "tx")
    found = [(row["topic"], row["sequence"]) for row in read(place, **options) if row["rule"] == "processed"]
    assert found == [("orders", number) for number in range(5)]
    payloads = {row["topic"]: (row["action"], row["rule"]) for row in read(place, table="payload", **options)}
    assert payloads == {"orders": ("candidate", "processed"), "bills": ("keep", "live")}
    early = {**options, "now": NOW_MS - 2 * HOUR + 3}
    assert [row["sequence"] for row in read(place, **early) if row["rule"] == "processed"] == [0, 1, 2], "hold_seconds"
    assert "processed" not in {row["rule"] for row in read(place)}, "claims are undecided without a snapshot"


def test_source_with_unreadable_claims_keeps_processed_rows(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = with_groups(place, tmp_path / "tx")
    with LevelDBSide(side_path(place)) as side:
        [*_, (key, _)] = side.rows(b"t", b"u", 100).items
        side.put([(key, b"damaged")])
    assert {row["rule"] for row in read(place, **options)} == {"live"}
    assert (
        "default:orders keeps messages that its consumers have processed, because the consumers' positions cannot be "
        "read: the claim" in caplog.text
    )


def test_source_of_claims_returns_their_states(place: Path, tmp_path: Path) -> None:
    given = {"leveldb": str(place), "table": "claims", "topics": "default:orders"}
    tms_source = TmsSource(given)
    LevelDBStore(place, create=True).close()
    assert rows_of_table(tms_source) == [], "no server has used the store"
    options = with_groups(place, tmp_path / "tx")
    known = TmsSource({**given, **options})
    for source, states in ((known, ["done", "open", "void", "void"]), (tms_source, [None] * 4)):
        rows = rows_of_table(source)
        assert [(row["state"], row["deliveries"]) for row in rows] == list(zip(states, [1, 2, 3, 4], strict=True))
    assert list(rows[0]) == source.schema().names
    assert rows[1] | {"state": "open"} == {
        "namespace": "default",
        "topic": "orders",
        "generation": 1,
        "consumer": "billing",
        "after": str(MessageId(NOW_MS - 3 * HOUR + 4, 4)),
        "last": str(MessageId(NOW_MS - 3 * HOUR + 6, 6)),
        "write_pointer": pointer(NOW_MS - HOUR),
        "deliveries": 2,
        "state": "open",
    }
    assert rows[3]["write_pointer"] is None


def test_task_with_side_table_in_use_names_its_keys(filled: Filled) -> None:
    place = filled(fill_sample)
    found = reader(place)
    [part] = found.partitions()
    with LevelDBSide(side_path(place)), pytest.raises(StoreBusy, match=" keys "):
        list(found.read(part))


@pytest.mark.no_cover
@settings(max_examples=10)
@given(scenes(), st.data())
def test_source_of_random_store_matches_decide(scene: Scene, data: st.DataObject) -> None:
    moments = st.none() | st.sampled_from([0, max(0, scene.now_ms - 1), scene.now_ms, scene.now_ms + 1, LONG_MAX])
    expires = {key: ms for key in scene.messages if (ms := data.draw(moments)) is not None}
    with TemporaryDirectory() as folder:
        place = Path(folder) / "messaging"
        with LevelDBStore(place, create=True) as store, LevelDBSide(side_path(place)) as side:
            scene.fill(store)
            Expiries(side).put(expires.items())
        options = {"leveldb": str(place), "now": str(scene.now_ms)}
        messages, payloads = (
            RowReader(SourceOptions.parse({**options, "table": t}, {})) for t in ("message", "payload")
        )
        assert {row["key"]: (row["action"], row["rule"]) for row in rows_of(messages)} == {
            key: verdict(messages.policy, Row("message", MessageKey.parse(key), value.pointer), expires.get(key))
            for key, value in scene.messages.items()
        }
        assert {row["key"]: (row["action"], row["rule"]) for row in rows_of(payloads)} == {
            key: verdict(payloads.policy, Row("payload", PayloadKey.parse(key))) for key in scene.payloads
        }


def test_small_table_is_one_partition(filled: Filled) -> None:
    assert len(reader(filled(fill_sample), partitions=50).partitions()) == 1


@pytest.mark.parametrize("table", ["message", "payload"])
@pytest.mark.parametrize("topics", ["a:t1", "a:t*", "*:t1", "a:t1,b:*", "a:none"])
def test_source_with_topics_returns_only_their_rows(topics: str, table: str, filled: Filled) -> None:
    place = filled(fill_many)
    everything = [row for row in read(place, table=table) if row["topic"] is not None]
    wanted = RowSelection("message", tuple(topics.split(",")))
    expected = [row for row in everything if wanted.wants(TopicId(row["namespace"], row["topic"]))]
    assert read(place, table=table, topics=topics) == expected


@pytest.mark.parametrize(("since", "until"), [(0, 100), (-1, 1), (0, 0), (299, 10**6), (None, 0), (0, None)])
@pytest.mark.parametrize("table", ["message", "payload"])
def test_source_between_two_times_is_half_open(
    since: int | None, until: int | None, table: str, filled: Filled
) -> None:
    place = filled(fill_many)
    bounds = {"from": since, "to": until}
    options = {name: NOW_MS + offset for name, offset in bounds.items() if offset is not None}
    column = "publish_ms" if table == "message" else "write_ms"
    expected = [
        row
        for row in read(place, table=table)
        if row[column] is not None and options.get("from", -(2**63)) <= row[column] < options.get("to", 2**63)
    ]
    assert read(place, table=table, **options) == expected


def test_scan_from_a_late_time_skips_earlier_rows(filled: Filled) -> None:
    def fill(store: Store) -> None:
        topic(store, "a:long", ttl_seconds=3600).plain(*range(NOW_MS, NOW_MS + 20_000))

    place = filled(fill)
    with LevelDBStore(place) as store:
        wanted = RowSelection("message", from_ms=NOW_MS + 19_990)
        read_rows = sum(len(rows.keys) for rows in pages.scan(store.message, ALL, wanted, RowFields()))
    assert 10 <= read_rows < 200


FILTERS: list[list[Filter]] = [
    [EqualTo(("topic",), "t1")],
    [EqualTo(("namespace",), "a"), EqualTo(("topic",), "t1")],
    [In(("topic",), ("t1", "t10", "nothing"))],
    [In(("topic",), ()), EqualTo(("topic",), "t1")],
    [EqualTo(("topic",), "t1"), EqualTo(("topic",), "t10")],
    [GreaterThanOrEqual(("publish_ms",), NOW_MS), LessThan(("publish_ms",), NOW_MS + 5)],
    [GreaterThan(("publish_ms",), NOW_MS), LessThanOrEqual(("publish_ms",), NOW_MS + 5)],
    [EqualTo(("publish_ms",), NOW_MS)],
    [In(("publish_ms",), (NOW_MS, NOW_MS + 7)), GreaterThan(("publish_ms",), -5)],
    [LessThan(("publish_ms",), 0)],
    [Not(EqualTo(("topic",), "t1"))],
    [EqualTo(("salt",), 3)],
    [EqualTo(("generation",), 1)],
]


def passes(row: dict[str, Any], one: Filter) -> bool:
    """Return whether a row passes the filter in SQL."""
    match one:
        case Not(child):
            return row["topic"] is not None and not passes(row, child)
        case EqualTo((name,), value):
            return bool(row[name] == value)
        case In((name,), values):
            return row[name] in values
        case GreaterThan((name,), value):
            return row[name] is not None and row[name] > value
        case GreaterThanOrEqual((name,), value):
            return row[name] is not None and row[name] >= value
        case LessThan((name,), value):
            return row[name] is not None and row[name] < value
        case LessThanOrEqual((name,), value):
            return row[name] is not None and row[name] <= value
    raise AssertionError(one)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_pushed_filters_lose_no_matching_row(filters: list[Filter], filled: Filled) -> None:
    place = filled(fill_many)
    found = reader(place)
    assert isinstance(found, FilteringReader)
    assert list(found.pushFilters(filters)) == filters
    expected = [row for row in read(place) if all(passes(row, one) for one in filters)]
    assert [row for row in rows_of(found) if all(passes(row, one) for one in filters)] == expected


def test_pushed_topic_filter_reads_only_that_topic(filled: Filled) -> None:
    found = reader(filled(fill_many))
    assert isinstance(found, FilteringReader)
    found.pushFilters([EqualTo(("namespace",), "b"), EqualTo(("topic",), "t1"), LessThan(("publish_ms",), NOW_MS)])
    assert len(rows_of(found)) == 300


def on_spark(spark: SparkSession, source: type[TmsSource], place: Path, **options: str) -> DataFrame:
    spark.dataSource.register(source)
    return spark.read.format("tms").options(leveldb=str(place), now=str(NOW_MS), **options).load()


def test_filters_on_spark_do_not_change_the_result(spark: SparkSession, filled: Filled) -> None:
    place = filled(fill_many)
    condition = f"topic = 't1' and publish_ms >= {NOW_MS} and publish_ms < {NOW_MS + 3} and rule <> 'unrecognized'"
    filtered = on_spark(spark, FilteringSource, place, partitions="2").where(condition)
    results = [sorted(map(tuple, filtered.collect()))]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        results.append(sorted(map(tuple, on_spark(spark, TmsSource, place).where(condition).collect())))
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    assert results[0] == results[1]
    assert len(results[0]) == 12


def test_claims_on_spark_include_their_states(spark: SparkSession, place: Path, tmp_path: Path) -> None:
    options = with_groups(place, tmp_path / "tx")
    claims = on_spark(spark, FilteringSource, place, table="claims", **options).where("topic = 'orders'")
    assert [row.state for row in claims.select("state").collect()] == ["done", "open", "void", "void"]


def test_source_in_sql_counts_rows_by_verdict(spark: SparkSession, filled: Filled) -> None:
    on_spark(spark, FilteringSource, filled(fill_sample)).createOrReplaceTempView("rows")
    counted = spark.sql("SELECT topic, action, rule, count(*) AS rows FROM rows GROUP BY ALL ORDER BY ALL").collect()
    assert [tuple(row) for row in counted if row.action == "delete"] == [
        ("orders", "delete", "expired", 1),
        ("retired", "delete", "old_generation", 1),
    ]


def test_query_of_store_in_use_raises_store_busy(spark: SparkSession, filled: Filled) -> None:
    place = filled(fill_sample)
    with LevelDBStore(place), pytest.raises(StoreBusy, match="messaging"), translated():
        on_spark(spark, TmsSource, place).count()


def test_query_of_missing_store_raises_store_not_found(spark: SparkSession, place: Path) -> None:
    with pytest.raises(StoreNotFound), translated():
        on_spark(spark, FilteringSource, place).count()


def test_query_of_deleted_store_raises_store_not_found(spark: SparkSession, filled: Filled) -> None:
    place = filled(fill_sample)
    rows = on_spark(spark, FilteringSource, place)
    assert len(rows.collect()) == 8, "the query is planned, and reads again below"
    place.rename(place.with_name("elsewhere"))
    with pytest.raises(StoreNotFound), translated():
        rows.collect()


def test_source_module_imports_no_client() -> None:
    program = "import sys, janitor.spark.source; print({'happybase', 'httpx2', 'tms_core.client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tabel": "message"}, "tabel is not an option"),
        ({"table": "messages"}, "table is messages"),
        ({"topics": "orders"}, "topics has orders"),
        ({"from": "yesterday"}, "from is yesterday"),
        ({"partitions": "0"}, "partitions is 0"),
        ({"payload": "yes"}, "payload is yes"),
    ],
)
def test_source_with_wrong_option_names_it(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SourceOptions.parse(options, {})


def test_source_options_parse_iso_times() -> None:
    found = SourceOptions.parse({"from": "2023-11-14T22:13:20", "to": "2023-11-14T23:13:20+01:00", "now": "5"}, {})
    assert (found.from_ms, found.to_ms, found.now_ms) == (NOW_MS, NOW_MS, 5)
