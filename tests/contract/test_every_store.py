"""The contract of every store.

To test a new store, add an entry to ``MAKERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hbase.tables import Tables
from tms_core.tables.base import (
    CELLS,
    COLUMNS,
    KEYS,
    MESSAGES,
    PAYLOADS,
    KeyReads,
    KeyTable,
    MessageValue,
    Origin,
    PointerSet,
    Projection,
    Store,
    TxCell,
    cells_of,
)
from tms_core.tables.base import read_all as read_whole
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore

T = TypeVar("T")

MakeStore = Callable[[], Store]

MAKERS: dict[str, Callable[[Path, pytest.FixtureRequest], Store]] = {
    "memory": lambda *_: MemoryStore(),
    "leveldb": lambda folder, _: LevelDBStore(folder, create=True),
    "hbase": lambda _, request: hbase_store(request.getfixturevalue("hbase_tables")),
}

POINTER = 1_500_000_000_000_000_007
PLAIN = MessageValue(None, b"plain")
EMPTY = MessageValue(None, b"")
TX = MessageValue(POINTER, b"in a transaction")
TX_EMPTY = MessageValue(POINTER, b"")
REFERENCE = MessageValue(POINTER, None)
ROLLED_BACK = MessageValue(-POINTER, b"rolled back")


@pytest.fixture(params=sorted(MAKERS))
def make_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeStore]:
    folders = (tmp_path_factory.mktemp("store") / str(number) for number in count())
    made: list[Store] = []

    def make() -> Store:
        made.append(MAKERS[request.param](next(folders), request))
        return made[-1]

    yield make
    for store in made:
        store.close()


def hbase_store(tables: Tables) -> Store:
    return tables.store()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()


@pytest.fixture
def filled(store: Store) -> Store:
    """Store ten rows in each table, with keys b"k0" to b"k9"."""
    store.message.put([(key(number), MessageValue(None, b"%d" % number)) for number in range(10)])
    store.payload.put([(key(number), b"%d" % number) for number in range(10)])
    return store


def key(number: int) -> bytes:
    return b"k%d" % number


def read_all(table: KeyReads, want: Projection[list[T]], limit: int, stop: bytes | None = None) -> list[T]:
    """Read page after page until a page has no resume key."""
    items: list[T] = []
    resume: bytes | None = b""
    while resume is not None:
        page = table.read(want, resume, stop, limit)
        assert len(page.items) <= limit
        items += page.items
        resume = page.resume
    return items


def data_tables(store: Store) -> list[KeyTable]:
    return [store.message, store.payload]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9, 10, 11, 100])
def test_pages_of_any_size_return_each_row_once_in_order(filled: Store, limit: int) -> None:
    expected = [key(number) for number in range(10)]
    assert read_all(filled.message, KEYS, limit) == expected
    assert read_all(filled.payload, KEYS, limit) == expected
    assert [found for found, _ in read_all(filled.message, MESSAGES, limit)] == expected
    assert read_all(filled.payload, PAYLOADS, limit) == [(key(number), b"%d" % number) for number in range(10)]


@pytest.mark.parametrize(
    ("max_bytes", "pages"), [(1, [1, 1, 1, 1]), (1000, [1, 1, 1, 1]), (1500, [2, 2]), (2900, [3, 1]), (99_999, [4])]
)
def test_page_bounded_by_bytes_ends_with_the_row_that_fills_it(store: Store, max_bytes: int, pages: list[int]) -> None:
    payloads = [b"a" * 1000, b"b" * 1000, b"c" * 1000, b"d" * 3000]
    store.message.put([(key(number), MessageValue(7, payload)) for number, payload in enumerate(payloads)])
    store.payload.put([(key(number), payload) for number, payload in enumerate(payloads)])
    wanted: list[tuple[KeyReads, Projection[Any]]] = [(store.message, MESSAGES), (store.payload, PAYLOADS)]
    for table, want in wanted:
        sizes: list[int] = []
        keys: list[bytes] = []
        resume: bytes | None = b""
        while resume is not None:
            page = table.read(want.limit_bytes(max_bytes), resume, None, 9)
            keys += [found for found, _ in page.items]
            sizes += [len(page.items)] if page.items else []  # the last page may be empty
            resume = page.resume
        assert (keys, sizes) == ([key(number) for number in range(4)], pages)


def test_read_of_empty_table_has_no_row_and_no_next_page(store: Store) -> None:
    wanted: list[Projection[Any]] = [KEYS, CELLS, MESSAGES, COLUMNS]
    pages = [store.message.read(want, b"", None, 5) for want in wanted]
    pages += [store.payload.read(want, b"", None, 5) for want in (KEYS, PAYLOADS)]
    assert [(len(page.items), page.resume) for page in pages] == [(0, None)] * 6
    assert store.metadata.rows() == []


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (b"k3", b"k6", [3, 4, 5]),
        (b"k2\xff", b"k5\xff", [3, 4, 5]),
        (b"k3\x00", b"k6\x00", [4, 5, 6]),
        (b"k3", b"k3", []),
        (b"k3", b"k3\x00", [3]),
        (b"k6", b"k3", []),
        (b"", b"k0", []),
        (b"k9", None, [9]),
        (b"k9\x00", None, []),
    ],
)
def test_read_range_includes_start_and_excludes_stop(
    filled: Store, start: bytes, stop: bytes | None, expected: list[int]
) -> None:
    wanted = [key(number) for number in expected]
    for table in data_tables(filled):
        assert table.read(KEYS, start, stop, 100).items == wanted
    assert [found for found, _ in filled.message.read(MESSAGES, start, stop, 100).items] == wanted
    assert [found for found, _ in filled.payload.read(PAYLOADS, start, stop, 100).items] == wanted


def test_read_after_deleted_page_skips_no_row(filled: Store) -> None:
    for table in data_tables(filled):
        seen: list[bytes] = []
        resume: bytes | None = b""
        while resume is not None:
            page = table.read(KEYS, resume, b"k8", 3)
            table.delete(page.items)
            seen += page.items
            resume = page.resume
        assert seen == [key(number) for number in range(8)]
        assert table.read(KEYS, b"", None, 100).items == [b"k8", b"k9"]


def test_read_sees_row_inserted_after_the_page(filled: Store) -> None:
    page = filled.message.read(KEYS, b"", None, 3)
    filled.message.put([(b"k2-new", PLAIN)])
    assert page.resume is not None
    assert filled.message.read(KEYS, page.resume, None, 1).items == [b"k2-new"]


def test_delete_of_missing_keys_is_not_an_error(filled: Store) -> None:
    for table in data_tables(filled):
        table.delete([b"k1", b"nowhere", b"k1"])
        table.delete([])
        assert b"k1" not in table.read(KEYS, b"", None, 100).items
        assert len(table.read(KEYS, b"", None, 100).items) == 9


def test_read_returns_every_kind_of_message_as_written(store: Store) -> None:
    rows = [(key(number), v) for number, v in enumerate([PLAIN, EMPTY, TX, TX_EMPTY, REFERENCE, ROLLED_BACK])]
    store.message.put(rows)
    assert store.message.read(MESSAGES, b"", None, 100).items == rows


def test_columns_of_rows_equal_the_rows(store: Store) -> None:
    for kinds in ([PLAIN, EMPTY], [TX, TX_EMPTY], [PLAIN, TX, REFERENCE]):
        store.message.put([(key(number), value) for number, value in enumerate(kinds)])
        rows = store.message.read(MESSAGES, b"", key(len(kinds)), 100).items
        columns = store.message.read(COLUMNS, b"", key(len(kinds)), 100).items
        pointers = [None] * len(kinds) if columns.pointers is None else columns.pointers
        assert rows == [(key(number), value) for number, value in enumerate(kinds)]
        assert list(zip(columns.keys, map(MessageValue, pointers, columns.payloads), strict=True)) == rows


def test_joined_origin_deletes_and_inverts_rows_of_several_pages(store: Store) -> None:
    store.message.put([(key(number), TX) for number in range(6)])
    cells = read_whole(store.message, CELLS, b"", key(3))
    assert store.message.invert(cells.items, cells.origin) == [True] * 3
    pages = [store.message.read(KEYS, key(first), None, 2) for first in (0, 2)]
    keys = [found for page in pages for found in page.items]
    store.message.delete(keys, Origin.merge([page.origin for page in pages]))
    assert store.message.read(KEYS, b"", None, 9).items == [key(4), key(5)]


def test_put_replaces_an_existing_row(filled: Store) -> None:
    filled.message.put([(b"k1", TX)])
    filled.payload.put([(b"k1", b"new")])
    assert filled.message.read(MESSAGES, b"k1", b"k2", 5).items == [(b"k1", TX)]
    assert filled.payload.read(PAYLOADS, b"k1", b"k2", 5).items == [(b"k1", b"new")]


def test_read_of_cells_returns_transactional_rows_only(store: Store) -> None:
    store.message.put([(b"a", PLAIN), (b"b", TX), (b"c", REFERENCE), (b"d", EMPTY), (b"e", ROLLED_BACK)])
    cells = read_all(store.message, CELLS, 2)
    assert [(cell.key, cell.pointer) for cell in cells] == [(b"b", POINTER), (b"c", POINTER), (b"e", -POINTER)]
    assert cells[1].refers


def test_cells_of_plain_rows_are_read_in_bounded_pages(filled: Store) -> None:
    page = filled.message.read(CELLS, b"", None, 3)
    assert page.items == []
    assert page.resume is not None
    assert b"k2" < page.resume <= b"k3"


@pytest.mark.parametrize("stored", [True, False])
def test_search_for_pointers_returns_only_those_pointers(store: Store, stored: bool) -> None:
    alike = MessageValue(None, POINTER.to_bytes(8, "big"))
    others = [(b"a", PLAIN), (b"b", alike), (b"c", ROLLED_BACK), (b"d", MessageValue(POINTER + 1, b""))]
    store.message.put([*others, (b"e", TX), (b"f", REFERENCE), (b"g", TX_EMPTY)])
    pointers = PointerSet.of(frozenset({POINTER, POINTER + 2})) if stored else PointerSet(range(POINTER, POINTER + 1))
    pages = [store.message.read(cells_of(pointers), b"", None, 2)]
    while (resume := pages[-1].resume) is not None:
        pages.append(store.message.read(cells_of(pointers), resume, None, 2))
    assert [(cell.key, cell.pointer) for page in pages for cell in page.items] == [
        (at, POINTER) for at in (b"e", b"f", b"g")
    ]
    assert len(pages) > 3


@pytest.mark.parametrize("value", [TX, TX_EMPTY, REFERENCE, ROLLED_BACK])
def test_invert_changes_only_the_sign_of_a_cell(store: Store, value: MessageValue) -> None:
    store.message.put([(b"a", PLAIN), (b"b", value), (b"c", TX)])
    [cell] = store.message.read(CELLS, b"b", b"c", 10).items
    assert store.message.invert([cell]) == [True]
    assert value.pointer is not None
    inverted = MessageValue(-value.pointer, value.payload)
    assert store.message.read(MESSAGES, b"", None, 9).items == [(b"a", PLAIN), (b"b", inverted), (b"c", TX)]


def test_invert_does_not_restore_a_deleted_row(store: Store) -> None:
    store.message.put([(b"a", TX), (b"b", TX)])
    cells = store.message.read(CELLS, b"", None, 10).items
    store.message.delete([b"a"])
    assert store.message.invert(cells) == [False, True]
    assert [found for found, _ in store.message.read(MESSAGES, b"", None, 9).items] == [b"b"]


def test_invert_with_unexpected_pointer_keeps_the_row(store: Store) -> None:
    store.message.put([(b"a", ROLLED_BACK), (b"b", PLAIN), (b"c", TX)])
    wrong = [TxCell(b"a", POINTER, False), TxCell(b"b", POINTER, False), TxCell(b"c", POINTER + 1, False)]
    assert store.message.invert(wrong) == [False, False, False]
    assert store.message.read(MESSAGES, b"", None, 9).items == [(b"a", ROLLED_BACK), (b"b", PLAIN), (b"c", TX)]
    assert store.message.invert([]) == []


def test_compare_and_set_replaces_the_expected_value_only(store: Store) -> None:
    table = store.metadata
    assert not table.compare_and_set(b"ns:b:", b"old", b"new")
    assert table.get(b"ns:b:") is None
    assert table.compare_and_set(b"ns:b:", None, b"first")
    assert not table.compare_and_set(b"ns:b:", None, b"second")
    assert not table.compare_and_set(b"ns:b:", b"other", b"second")
    assert table.compare_and_set(b"ns:b:", b"first", b"")
    assert not table.compare_and_set(b"ns:b:", None, b"an empty value is a value")
    assert table.compare_and_set(b"ns:a:", None, b"x")
    assert table.rows() == [(b"ns:a:", b"x"), (b"ns:b:", b"")]
    assert table.get(b"ns:b:") == b""


def test_sync_and_compact_keep_all_rows(filled: Store) -> None:
    for table in data_tables(filled):
        table.delete([b"k4"])
        table.sync()
        table.compact(b"k0", b"k9")
        assert len(table.read(KEYS, b"", None, 100).items) == 9
        assert table.estimate_bytes(b"", None) >= 0
        assert table.estimate_bytes(b"x", b"y") == 0


def test_read_of_one_page_counts_as_one_call(filled: Store) -> None:
    filled.calls.clear()
    filled.message.read(KEYS, b"", None, 1)
    filled.message.read(KEYS, b"", None, 1000)
    filled.message.read(MESSAGES, b"", None, 1000)
    filled.message.read(CELLS, b"", None, 1000)
    filled.message.delete([b"k1", b"k2"])
    filled.message.sync()
    filled.message.invert([])
    filled.metadata.rows()
    filled.metadata.get(b"x")
    assert filled.calls == {
        "keys": 2, "rows": 1, "cells": 1, "delete": 1, "sync": 1, "invert": 1, "metadata": 1, "get": 1,
    }  # fmt: skip


def test_store_has_table_names_and_an_identity(make_store: MakeStore) -> None:
    store = make_store()
    assert (store.message.name, store.payload.name) == ("message", "payload")
    assert store.identity() == store.identity() != ""


def test_close_of_store_is_idempotent(make_store: MakeStore) -> None:
    with make_store() as store:
        store.message.put([(b"a", PLAIN)])
    store.close()


# Few keys, so that operations collide, with the bytes that break ranges.
SOME_KEYS = st.sampled_from([b"a", b"a\x00", b"a\xff", b"b", b"b\x00\x00", b"\x00", b"\xff", b"\xff\xff"])
VALUES = st.sampled_from([PLAIN, EMPTY, TX, TX_EMPTY, REFERENCE, ROLLED_BACK])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), SOME_KEYS, VALUES),
        st.tuples(st.just("delete"), SOME_KEYS, VALUES),
        st.tuples(st.just("invert"), SOME_KEYS, VALUES),
    ),
    max_size=30,
)


# The fixture is a factory: each example creates a store.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, start=SOME_KEYS, stop=st.none() | SOME_KEYS, limit=st.integers(1, 9))
def test_random_history_matches_a_dictionary(
    make_store: MakeStore, steps: list[tuple[str, bytes, MessageValue]], start: bytes, stop: bytes | None, limit: int
) -> None:
    store, model = make_store(), dict[bytes, MessageValue]()
    for what, at, value in steps:
        if what == "put":
            store.message.put([(at, value)])
            model[at] = value
        elif what == "delete":
            store.message.delete([at])
            model.pop(at, None)
        else:
            present = model.get(at, PLAIN).pointer
            assert store.message.invert([TxCell(at, POINTER, False)]) == [present == POINTER]
            if present == POINTER:
                model[at] = model[at]._replace(pointer=-POINTER)
    assert read_all(store.message, MESSAGES, limit) == sorted(model.items())
    within = sorted(at for at in model if start <= at and (stop is None or at < stop))
    assert store.message.read(KEYS, start, stop, 100).items == within
