"""A store with expired and live rows of every kind, janitors for it, and the expected rows after a sweep."""

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

#: The time limit of calls that get no response.
SHORT_SECONDS = 0.5

INVALID, REFERENCED, FREE = pointer(NOW_MS - DAY), pointer(NOW_MS - 2 * HOUR, 1), pointer(NOW_MS - 2 * HOUR, 2)

#: The publish times of messages, those of the invalid transaction last, and the write times of payloads.
EXPIRED = range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 300)
LIVE = range(NOW_MS - MINUTE, NOW_MS - MINUTE + 120)
LIVE_INVALID = range(NOW_MS - MINUTE + 1000, NOW_MS - MINUTE + 1080)
STORED = range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 40)


@dataclass(frozen=True)
class FilledStore:
    store: Store
    orders: Topic
    deleted: Topic
    unknown: Topic

    @classmethod
    def fill(cls, store: Store) -> FilledStore:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*EXPIRED, *LIVE).tx(INVALID, *LIVE_INVALID)
        orders.stored(REFERENCED, *STORED).ref(REFERENCED, NOW_MS - MINUTE - 1).stored(FREE, *STORED)
        deleted = topic(store, "default:retired", ttl_seconds=3600, generation=-1).plain(*LIVE)
        unknown = unknown_topic(store, "default:stranger").plain(*EXPIRED[:10])
        return cls(store, orders, deleted, unknown)

    def kit(self, store: Store | None = None, **options: Any) -> Kit:
        """Return a janitor that has never seen the store."""
        return sweep_kit(store or self.store, **options)

    @property
    def is_swept(self) -> bool:
        times = [key.publish_ms for key, _ in self.orders.messages()]
        return (
            times == [NOW_MS - MINUTE - 1, *LIVE, *LIVE_INVALID]
            and self.deleted.times() == []
            and self.orders.stored_times() == list(STORED)
            and INVALID not in self.orders.pointers()
        )

    def check_live_rows(self) -> None:
        """Check that every live row exists with its bytes, also after an incomplete run."""
        rows = self.orders.messages()
        live = [(key.publish_ms, value) for key, value in rows if key.publish_ms >= NOW_MS - HOUR]
        assert [ms for ms, _ in live] == [NOW_MS - MINUTE - 1, *LIVE, *LIVE_INVALID]
        assert [abs(value.pointer) for _, value in live if value.pointer is not None] == [
            REFERENCED,
            *[INVALID] * len(LIVE_INVALID),
        ]
        assert {value.payload for _, value in live[1:]} == {b"body"}
        assert self.unknown.times() == list(EXPIRED[:10])
        stored = map(PayloadKey.parse, self.store.payload.read(KEYS, self.orders.id.prefix, None, 10_000).items)
        assert [key.write_ms for key in stored if key is not None and key.write_pointer == REFERENCED] == list(STORED)

    def complete_sweep(self, kit: Kit | None = None) -> None:
        """Check that all live rows exist, and that one run without faults completes the sweep."""
        self.check_live_rows()
        errors, report = run_once(kit or self.kit())
        assert (errors, report is None) == ([], False)
        assert self.is_swept
        self.check_live_rows()


def sweep_kit(store: Store, **options: Any) -> Kit:
    """Return a janitor for a filled store; small batches create many calls."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    snapshots = Snapshots(clock, [INVALID])
    return janitor(store, clock=clock, snapshots=snapshots, **{"batch_rows": 20, "workers": 4, **options})


def run_once(kit: Kit) -> tuple[list[str], Report | None]:
    """Run once and return the errors and the report, which is None if the run failed.

    No run with errors proves a boundary (invariant S4).
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
    """Limit calls over later connections to ``SHORT_SECONDS``.

    Call this function only once the server no longer responds, because a response on a busy machine takes longer.
    """
    store.pool.timeout_seconds = SHORT_SECONDS
