"""Inspection of tables: counts, decoded rows, and the audit of the boundary."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.inspect import rows as inspect
from tests.builders import DAY, HOUR, NOW_MS, Call, pointer, topic, unknown_topic, visibility, watch
from tms_core.rowkey import MessageKey
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.layout import FOLDERS
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

INVALID, OPEN, COMMITTED = (pointer(NOW_MS - hours * HOUR) for hours in (3, 2, 1))
SNAPSHOT = visibility(NOW_MS, [INVALID], [OPEN])


@pytest.fixture
def store() -> MemoryStore:
    """Return a store with two topics, one without metadata, unrecognized rows, and a transaction of each kind."""
    made = MemoryStore()
    orders = topic(made, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS).tx(INVALID, NOW_MS).tx(OPEN, NOW_MS).tx(-COMMITTED, NOW_MS).ref(COMMITTED, NOW_MS)
    orders.stored(COMMITTED, NOW_MS, NOW_MS + 1).stored(OPEN, NOW_MS)
    unknown_topic(made, "default:unknown").plain(NOW_MS)
    topic(made, "default:retired", ttl_seconds=60, generation=-2)
    made.message.put([(b"unrecognized", MessageValue(None, b"?"))])
    made.payload.put([(b"unrecognized", b"?")])
    return made


def ignore_progress(rows: int) -> None:
    """Ignore the progress."""


def test_inspect_messages_counts_by_kind_and_transaction(store: MemoryStore) -> None:
    found = inspect.messages(store, SNAPSHOT, (), 100, ignore_progress)
    assert found.counts == {
        "plain": 2,
        "unrecognized": 1,
        "transactional": 3,
        "reference": 1,
        "invalid": 1,
        "undecided": 1,
        "rolled_back": 1,
        "committed": 1,
    }
    assert found.min_transaction_ms == NOW_MS - 3 * HOUR


def test_inspect_without_snapshot_counts_positive_pointers(store: MemoryStore) -> None:
    counts = inspect.messages(store, None, (), 0, ignore_progress).counts
    assert (counts["positive"], counts["rolled_back"]) == (3, 1)
    assert inspect.payloads(store, None, (), 0, ignore_progress).counts == {"positive": 3, "unrecognized": 1}


def test_inspect_messages_decodes_a_message(store: MemoryStore) -> None:
    [reference] = [
        row for row in inspect.messages(store, SNAPSHOT, (), 100, ignore_progress).rows if row["kind"] == "reference"
    ]
    assert reference == {
        "key": MessageKey(TopicId("default", "orders"), 1, NOW_MS, 4).pack().hex(),
        "topic": "default:orders",
        "generation": 1,
        "publish_ms": NOW_MS,
        "sequence": 4,
        "kind": "reference",
        "pointer": str(COMMITTED),
        "transaction": "committed",
        "payload_bytes": None,
    }


def test_row_with_numbers_cdap_never_writes_is_unrecognized() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=60).plain(-1).stored(COMMITTED, -1)
    orders.at(0).tx(INVALID, NOW_MS).stored(COMMITTED, NOW_MS)
    orders.at(-3).plain(NOW_MS)
    found = inspect.messages(store, SNAPSHOT, (), 100, ignore_progress)
    assert {(row["kind"], row["topic"]) for row in found.rows} == {("unrecognized", "default:orders")}
    assert sorted(row["generation"] for row in found.rows) == [-3, 0, 1]
    assert found.counts == {"unrecognized": 3, "invalid": 1}, "the pointers of parsed keys count (L4)"
    assert inspect.payloads(store, SNAPSHOT, (), 100, ignore_progress)[1:] == ({"unrecognized": 2}, None)


@pytest.mark.parametrize("value", [b"", b"\x01short"])
def test_inspect_messages_counts_an_unreadable_value(tmp_path: Path, value: bytes) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS)
    with closing(plyvel.DB(str(tmp_path / FOLDERS["message"]))) as database:
        database.put(MessageKey(TopicId("default", "orders"), 1, NOW_MS, 9).pack(), value)
    with LevelDBStore(tmp_path) as store:
        for _ in range(2):
            assert inspect.messages(store, None, (), 100, ignore_progress).counts == {"plain": 1, "unreadable": 1}


def test_inspect_payloads_decodes_and_counts(store: MemoryStore) -> None:
    found = inspect.payloads(store, SNAPSHOT, (), 100, ignore_progress)
    assert found.counts == {"committed": 2, "undecided": 1, "unrecognized": 1}
    assert found.min_transaction_ms == NOW_MS - 2 * HOUR
    assert [(row["write_ms"], row["payload_bytes"]) for row in found.rows if row["transaction"] == "committed"] == [
        (NOW_MS, 6),
        (NOW_MS + 1, 6),
    ]


@pytest.mark.parametrize(("limit", "shown"), [(0, 0), (2, 2), (100, 7)])
def test_inspect_messages_with_a_limit_decodes_that_many_and_counts_all(
    store: MemoryStore, limit: int, shown: int
) -> None:
    found = inspect.messages(store, SNAPSHOT, (), limit, ignore_progress)
    assert len(found.rows) == shown
    assert len(inspect.payloads(store, SNAPSHOT, (), limit, ignore_progress).rows) == min(shown, 4)
    assert sum(found.counts[kind] for kind in ("plain", "transactional", "reference", "unrecognized")) == 7


def test_inspect_with_patterns_reads_only_matching_topics(store: MemoryStore) -> None:
    topic(store, "default:orders2", ttl_seconds=60).plain(NOW_MS)
    found = inspect.messages(store, SNAPSHOT, ("default:orders",), 100, ignore_progress)
    assert {row["topic"] for row in found.rows} == {"default:orders"}
    assert inspect.messages(store, SNAPSHOT, ("*:unknown",), 100, ignore_progress).counts == {"plain": 1}, (
        "has no metadata"
    )
    for read in (inspect.messages, inspect.payloads):
        assert read(store, SNAPSHOT, ("x:*",), 100, ignore_progress) == inspect.InspectedRows([], {}, None)


def test_unrecognized_row_is_shown_by_its_key(store: MemoryStore) -> None:
    for read in (inspect.messages, inspect.payloads):
        [row] = [row for row in read(store, None, (), 100, ignore_progress).rows if row["topic"] is None]
        assert row["key"] == b"unrecognized".hex()


def test_inspect_of_any_table_writes_nothing_and_reports_each_page(store: MemoryStore) -> None:
    written: list[Call] = []
    watch(
        store, lambda call: written.append(call) if call.name.split(".")[1] not in ("keys", "cells", "rows") else None
    )
    progress: list[int] = []
    inspect.messages(store, SNAPSHOT, (), 100, progress.append)
    inspect.payloads(store, SNAPSHOT, (), 100, progress.append)
    inspect.metadata(store, ())
    inspect.audit([store.message], None, bool, progress.append)
    assert written == []
    assert progress == [7, 4, 4]


def test_inspect_of_several_pages_reads_every_row_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "PAGE_ROWS", 3)
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).tx(INVALID, *range(1, 11))
    progress: list[int] = []
    assert inspect.messages(store, SNAPSHOT, (), 5, progress.append).counts["invalid"] == 10
    assert inspect.audit([store.message], None, lambda _: True, ignore_progress).open_cells == 10
    assert max(progress) == 3
    assert sum(progress) == 10


def test_inspect_metadata_shows_living_deleted_and_unreadable_topics(store: MemoryStore) -> None:
    store.metadata.compare_and_set(b"default:odd:", None, b"\xff{")
    store.metadata.compare_and_set(b"unrecognized", None, b"{}")
    found = inspect.metadata(store, ())
    assert found.counts == {"topics": 1, "deleted": 1, "unreadable": 2}
    by_key = {bytes.fromhex(row["key"]): row for row in found.rows}
    assert by_key[b"default:retired:"]["generation"] == -2
    assert by_key[b"default:odd:"]["problem"]
    assert by_key[b"unrecognized"]["topic"] is None
    assert [row["topic"] for row in inspect.metadata(store, ("*:r*",)).rows] == ["default:retired"]


def test_snapshot_figures_have_ids_as_strings_and_limited_lists() -> None:
    state = visibility(NOW_MS, [INVALID, INVALID + 1, INVALID + 2], [OPEN])
    figures = inspect.snapshot_figures(state, "snapshot.1", 2)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["invalid_count"] == 3
    assert figures["invalid"] == [str(INVALID), str(INVALID + 1)]
    several = visibility(NOW_MS, [], [OPEN, COMMITTED])
    assert len(inspect.snapshot_figures(several, "snapshot.1", 1)["in_progress"]) == 1
    [entry] = figures["in_progress"]
    assert entry == {
        "write_pointer": str(OPEN),
        "type": "short",
        "began_ms": NOW_MS - 2 * HOUR,
        "expires_ms": NOW_MS + 60_000,
        "checkpoints": [],
    }


@pytest.mark.parametrize(
    ("bound", "refuted"), [(None, 0), (INVALID - 1, 0), (INVALID, 1), (INVALID + 1, 1)], ids=["none", "-1", "0", "+1"]
)
def test_audit_with_an_invalid_cell_refutes_the_boundary(store: MemoryStore, bound: int | None, refuted: int) -> None:
    found = inspect.audit([store.message], bound, SNAPSHOT.is_invalid, ignore_progress)
    assert (found.cells, found.open_cells, found.refuted) == (4, 1, refuted)
    assert len(found.sample_keys) == refuted
    assert found.to_json()["boundary"] == (None if bound is None else str(bound))


def test_audit_counts_rows_of_any_key_and_names_the_first() -> None:
    store = MemoryStore()
    unknown = unknown_topic(store, "default:unknown").tx(INVALID, *range(1, 3001))
    store.message.put([(b"unrecognized", MessageValue(INVALID, b"?"))])
    found = inspect.audit([store.message], INVALID, SNAPSHOT.is_invalid, ignore_progress)
    assert (found.cells, found.refuted, found.unrecognized) == (3001, 3001, 1)
    assert found.sample_keys == [MessageKey(unknown.id, 1, ms, ms - 1).pack() for ms in range(1, 11)]


@given(
    st.lists(st.sampled_from([INVALID, OPEN, COMMITTED, -INVALID, -OPEN, 1, DAY]), max_size=30),
    st.sampled_from([None, 0, 1, INVALID - 1, INVALID, OPEN, COMMITTED]),
)
def test_audit_of_any_cells_counts_by_the_definition(pointers: list[int], bound: int | None) -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=60)
    for number, write_pointer in enumerate(pointers):
        orders.tx(write_pointer, NOW_MS + number)
    known = {INVALID, OPEN}
    found = inspect.audit([store.message], bound, known.__contains__, ignore_progress)
    assert found.refuted == sum(p in known and bound is not None and p <= bound for p in pointers)
    assert found.open_cells == sum(p in known for p in pointers)
