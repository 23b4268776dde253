"""S6: inversion is compare-and-set. It never restores a deleted row and never changes another pointer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from tests.builders import HOUR, NOW_MS, Call, Kit, Topic, janitor, pointer, topic, watch
from tests.disasters.spy import LevelDBSpy
from tms_core.rowkey import MessageKey
from tms_core.tables.base import CELLS, MessageValue, Store, TxCell
from tms_core.tables.leveldb.store import LevelDBStore

INVALID = pointer(NOW_MS - 10 * HOUR)
OTHER = INVALID + 1


def set_up(store: Store) -> tuple[Kit, Topic, list[bytes]]:
    """Return three rows of one invalid transaction and their keys."""
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400)
    orders.tx(INVALID, NOW_MS - 3, NOW_MS - 2, NOW_MS - 1)
    kit = janitor(store, invalid=[INVALID])
    return kit, orders, [key.pack() for key, _ in orders.messages()]


def call_between_read_and_inversion(store: Store, act: Callable[[], object]) -> None:
    """Call ``act`` between the read and the inversion of a row."""

    def watcher(call: Call) -> None:
        if call.name == "message.invert":
            act()

    watch(store, before=watcher)


def test_row_deleted_before_its_inversion_stays_deleted(store: Store) -> None:
    kit, orders, keys = set_up(store)
    call_between_read_and_inversion(store, lambda: store.message.delete([keys[1]]))
    report = kit.engine.run_once(adopt=True)
    assert orders.times() == [NOW_MS - 3, NOW_MS - 1]
    assert orders.pointers() == [-INVALID, -INVALID]
    assert report.totals.invalid_transaction == 2


@pytest.mark.parametrize(
    "written",
    [
        MessageValue(-INVALID, b"rolled back by its client"),
        MessageValue(OTHER, b"published again"),
        MessageValue(OTHER, None),
        MessageValue(None, b"published again, without a transaction"),
    ],
)
def test_row_changed_before_its_inversion_is_not_inverted(store: Store, written: MessageValue) -> None:
    kit, orders, keys = set_up(store)
    call_between_read_and_inversion(store, lambda: store.message.put([(keys[1], written)]))
    report = kit.engine.run_once(adopt=True)
    assert orders.messages()[1][1] == written
    assert report.totals.invalid_transaction == 2


@pytest.mark.parametrize(
    "value", [MessageValue(INVALID, b""), MessageValue(INVALID, b"\x00\xff" * 9), MessageValue(INVALID, None)]
)
def test_inversion_changes_only_the_sign_of_the_pointer(store: Store, value: MessageValue) -> None:
    kit, orders, keys = set_up(store)
    store.message.put([(keys[0], value)])
    kit.engine.run_once(adopt=True)
    assert orders.messages()[0][1] == value._replace(pointer=-INVALID)


def test_inversion_repeated_does_not_revert_rows(store: Store) -> None:
    kit, orders, _ = set_up(store)
    cells = store.message.read(CELLS, b"", None, 10).items
    kit.engine.run_once(adopt=True)
    assert store.message.invert(cells) == [False, False, False]
    kit.engine.run_once()
    assert orders.pointers() == [-INVALID] * 3


def test_run_does_not_invert_other_transactions(store: Store) -> None:
    kit, orders, _ = set_up(store)
    orders.tx(OTHER, NOW_MS).tx(INVALID - 1, NOW_MS).tx(-OTHER, NOW_MS).tx(0, NOW_MS)
    kit.snapshots.invalid = [INVALID]
    kit.engine.run_once(adopt=True)
    assert orders.pointers() == [-INVALID] * 3 + [OTHER, INVALID - 1, -OTHER, 0]


def test_leveldb_inversion_does_not_restore_deleted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = LevelDBSpy(monkeypatch)
    with LevelDBStore(tmp_path, create=True) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600).tx(INVALID, NOW_MS)
        key = MessageKey(orders.id, 1, NOW_MS, 0).pack()
        deleting = Thread(target=store.message.delete, args=([key],))

        def start_delete(read: bytes) -> None:
            assert read == key
            deleting.start()
            # With the row lock the delete waits; without the lock it is complete here.
            deleting.join(0.2)

        spy.after_get = start_delete
        store.message.invert([TxCell(key, INVALID, False)])
        deleting.join()
        assert orders.times() == []
