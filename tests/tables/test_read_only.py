"""A read-only store: it returns the rows of the store and has no writing method (invariant S5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import NOW_MS, WRITES, pointer, topic, watch
from tests.salted import BUCKETS, SaltedStore
from tms_core.tables.base import CELLS, KEYS, MESSAGES, PAYLOADS, UNREADABLE, MessageValue, Reads, Store, TxCell
from tms_core.tables.leveldb.layout import FOLDERS
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.read_only import read_only

POINTER = pointer(NOW_MS)
ORDERS = b"default:orders:"


@pytest.fixture(params=["memory", "leveldb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else LevelDBStore(tmp_path, create=True)
    with made:
        orders = topic(made, "default:orders", ttl_seconds=60)
        orders.plain(NOW_MS, NOW_MS + 1).tx(POINTER, NOW_MS + 2).ref(POINTER, NOW_MS + 3).stored(POINTER, NOW_MS)
        yield made


READ: dict[str, Callable[[Store], object]] = {
    "message.keys": lambda store: store.message.read(KEYS, b"", None, 2),
    "message.cells": lambda store: store.message.read(CELLS, b"", None, 10),
    "message.rows": lambda store: store.message.read(MESSAGES, b"", None, 3),
    "message.estimate_bytes": lambda store: store.message.estimate_bytes(b"", None),
    "message.name": lambda store: store.message.name,
    "payload.keys": lambda store: store.payload.read(KEYS, b"", None, 2),
    "payload.rows": lambda store: store.payload.read(PAYLOADS, b"", None, 2),
    "payload.estimate_bytes": lambda store: store.payload.estimate_bytes(b"", None),
    "payload.name": lambda store: store.payload.name,
    "metadata.rows": lambda store: store.metadata.rows(),
    "metadata.get": lambda store: store.metadata.get(ORDERS),
    "identity": lambda store: store.identity(),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_read_only_store_returns_and_counts_the_same(store: Store, read: Callable[[Reads], object]) -> None:
    face = read_only(store)
    before = store.calls.copy()
    assert read(face) == read(store)
    own = store.calls - before
    # The counts of a sweep must exclude calls of other readers; in memory they do no harm.
    if isinstance(store, LevelDBStore):
        assert face.calls == own
    else:
        assert own == face.calls + face.calls


WRITE: dict[str, Callable[[Store], object]] = {
    "metadata.compare_and_set": lambda store: store.metadata.compare_and_set(b"default:new:", None, b"{}"),
    "message.delete": lambda store: store.message.delete(store.message.read(KEYS, b"", None, 1).items),
    "message.sync": lambda store: store.message.sync(),
    "message.compact": lambda store: store.message.compact(b"a", b"z"),
    "message.put": lambda store: store.message.put([(b"new", MessageValue(None, b""))]),
    "message.invert": lambda store: store.message.invert(
        [TxCell(store.message.read(CELLS, b"", None, 10).items[0].key, POINTER, True)]
    ),
    "payload.delete": lambda store: store.payload.delete(store.payload.read(KEYS, b"", None, 1).items),
    "payload.sync": lambda store: store.payload.sync(),
    "payload.compact": lambda store: store.payload.compact(b"a", b"z"),
    "payload.put": lambda store: store.payload.put([(b"new", b"")]),
}


def test_write_cases_cover_every_writing_operation() -> None:
    assert set(WRITE) == set(WRITES)


@pytest.mark.parametrize("write", WRITE.values(), ids=WRITE)
def test_read_only_store_has_no_writing_method(store: Store, write: Callable[[Any], object]) -> None:
    calls: list[str] = []
    watch(store, before=lambda call: calls.append(call.name))
    with pytest.raises(AttributeError):
        write(read_only(store))
    assert not set(calls) & set(WRITES)


def test_read_only_store_counts_unreadable_values(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS)
    damage(tmp_path)
    with LevelDBStore(tmp_path) as store:
        face = read_only(store)
        assert len(face.message.read(MESSAGES, b"", None, 10).items) == 1
        assert face.calls == {"rows": 1, UNREADABLE: 1}


def test_read_only_store_returns_disk_bytes(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path, create=True) as store:
        topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS)
        (tmp_path / "beside").write_bytes(b"x" * 10_000)
        held = sum(file.stat().st_size for folder in FOLDERS.values() for file in (tmp_path / folder).iterdir())
        assert read_only(store).disk_bytes() == store.with_own_counter().disk_bytes() == held
    assert read_only(MemoryStore()).disk_bytes() is None


def test_read_only_store_has_the_same_parts_and_counts_once() -> None:
    salted = SaltedStore()
    topic(salted, "default:orders", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 40))
    face = read_only(salted)
    parts = face.parts()
    keys = [part.message.read(KEYS, b"", None, 100).items for part in parts]
    assert [part.span for part in parts] == [part.span for part in salted.parts()]
    assert keys == [part.message.read(KEYS, b"", None, 100).items for part in salted.parts()]
    assert face.calls == {"keys": len(parts)}
    assert len(parts) == BUCKETS
    assert not any(hasattr(part, name) for part in parts for name in ("put", "delete"))
    assert not any(hasattr(part.message, name) for part in parts for name in ("put", "delete", "invert"))


def test_read_only_store_of_one_part_is_that_part() -> None:
    face = read_only(MemoryStore())
    assert list(face.parts()) == [face]


def damage(folder: Path) -> None:
    database = plyvel.DB(str(folder / FOLDERS["message"]))
    database.put(ORDERS + b"\x00\x00\x00\x01" + b"\x00" * 10, b"\x01")
    database.close()
