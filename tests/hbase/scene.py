"""A store with due rows and live rows of every kind, and the expected rows after a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from janitor.report import Report
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Kit, Snapshots, Topic, janitor, pointer, topic, unknown_topic
from tms_core.clock import ManualClock
from tms_core.errors import StoreUnavailable
from tms_core.rowkey import PayloadKey
from tms_core.tables.base import KEYS, Store
from tms_core.tables.hbase.store import HBaseStore

#: How long a call may take where nothing is answered any more.
SHORT_SECONDS = 0.5

DOOMED, KEPT, FREE = pointer(NOW_MS - DAY), pointer(NOW_MS - 2 * HOUR, 1), pointer(NOW_MS - 2 * HOUR, 2)

DUE = range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 300)
LIVE = range(NOW_MS - MINUTE, NOW_MS - MINUTE + 120)
INVALID = range(NOW_MS - MINUTE + 1000, NOW_MS - MINUTE + 1080)
STORED = range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 40)


@dataclass(frozen=True)
class Scene:
    store: Store
    orders: Topic
    retired: Topic
    stranger: Topic

    @classmethod
    def on(cls, store: Store) -> Scene:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*DUE, *LIVE).tx(DOOMED, *INVALID)
        orders.stored(KEPT, *STORED).ref(KEPT, NOW_MS - MINUTE - 1).stored(FREE, *STORED)
        retired = topic(store, "default:retired", ttl_seconds=3600, generation=-1).plain(*LIVE)
        stranger = unknown_topic(store, "default:stranger").plain(*DUE[:10])
        return cls(store, orders, retired, stranger)

    def kit(self, store: Store | None = None, **options: Any) -> Kit:
        """Return a janitor that has never seen the store."""
        return sweeper(store or self.store, **options)

    @property
    def due_is_gone(self) -> bool:
        times = [key.publish_ms for key, _ in self.orders.messages()]
        return (
            times == [NOW_MS - MINUTE - 1, *LIVE, *INVALID]
            and self.retired.times() == []
            and self.orders.stored_times() == list(STORED)
            and DOOMED not in self.orders.pointers()
        )

    def check_nothing_is_lost(self) -> None:
        """Check that every live row exists with its bytes, however far the run came."""
        rows = self.orders.messages()
        live = [(key.publish_ms, value) for key, value in rows if key.publish_ms >= NOW_MS - HOUR]
        assert [ms for ms, _ in live] == [NOW_MS - MINUTE - 1, *LIVE, *INVALID]
        assert [abs(value.pointer) for _, value in live if value.pointer is not None] == [
            KEPT,
            *[DOOMED] * len(INVALID),
        ]
        assert {value.payload for _, value in live[1:]} == {b"body"}
        assert self.stranger.times() == list(DUE[:10])
        stored = map(PayloadKey.parse, self.store.payload.read(KEYS, self.orders.id.prefix, None, 10_000).items)
        assert [key.write_ms for key in stored if key is not None and key.write_pointer == KEPT] == list(STORED)


def sweeper(store: Store, **options: Any) -> Kit:
    """Return a janitor for the store of a scene; small batches create many calls."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    snapshots = Snapshots(clock, [DOOMED])
    return janitor(store, clock=clock, snapshots=snapshots, **{"batch_rows": 20, "workers": 4, **options})


def complaints(kit: Kit) -> tuple[list[str], Report | None]:
    """Run once and return the errors and the report, which is None if the run failed.

    No run with errors makes a claim (invariant S4).
    """
    before = kit.state.boundary()
    try:
        report = kit.engine.run_once(adopt=True)
    except StoreUnavailable as error:
        assert kit.state.boundary() == before
        return [str(error)], None
    if report.errors:
        assert kit.state.boundary() == before
    return list(report.errors), report


def shorten_timeout(store: HBaseStore) -> None:
    """Let no call over a connection that is made from now on take longer than ``SHORT_SECONDS``.

    Not earlier than at the moment from which nothing is answered: on a busy machine an honest answer takes longer.
    """
    store.pool.timeout_seconds = SHORT_SECONDS


def finish(scene: Scene, kit: Kit | None = None) -> None:
    """Check that nothing is lost, and that one undisturbed run completes the sweep."""
    scene.check_nothing_is_lost()
    errors, report = complaints(kit or scene.kit())
    assert (errors, report is None) == ([], False)
    assert scene.due_is_gone
    scene.check_nothing_is_lost()
