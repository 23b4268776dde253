"""L6: a message with its own TTL is deleted in the millisecond in which readers stop seeing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from janitor.report import EntryKey, Report
from janitor.rules.policy import Rule
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Kit, Topic, fail_at, janitor, pointer, topic, unknown_topic, watch
from tests.salted import SaltedStore
from tms_core.errors import StoreError
from tms_core.rowkey import MessageKey
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiries, MemorySide

AGE = 10 * MINUTE


@pytest.fixture(params=[MemoryStore, SaltedStore], ids=["whole", "salted"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with request.param() as opened:
        yield opened


class SeparateExpiries(Expiries):
    """Expiries in a separate side table."""

    def __init__(self) -> None:
        self.side = MemorySide()
        super().__init__(self.side)


@pytest.fixture
def expiries() -> SeparateExpiries:
    return SeparateExpiries()


def publish_with_ttl(orders: Topic, expiries: SeparateExpiries, expires_ms: int, *times_ms: int) -> None:
    before = {key for key, _ in orders.messages()}
    orders.plain(*times_ms)
    new = [key for key, _ in orders.messages() if key not in before]
    expiries.put([(key.pack(), expires_ms) for key in new])


def adopt_store(store: Store, expiries: SeparateExpiries, **options: Any) -> Kit:
    kit = janitor(store, side=expiries.side, batch_rows=3, **options)
    kit.engine.run_once(adopt=True)
    return kit


@pytest.mark.parametrize("page_rows", [1, 3, 1000])
def test_ttl_of_a_lost_message_is_forgotten(store: Store, expiries: SeparateExpiries, page_rows: int) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    times = [NOW_MS - AGE + number for number in range(40)]
    publish_with_ttl(orders, expiries, NOW_MS, *times)
    orders.plain(*(NOW_MS - AGE + 100 + number for number in range(20)))
    kept = [key for key, _ in orders.messages()]
    lost = {number for number in range(40) if number % 5 == 0 or 10 < number < 25}
    store.message.delete([kept[number].pack() for number in sorted(lost)])
    kit = janitor(store, side=expiries.side, batch_rows=page_rows).adopt()
    planned, report = kit.engine.preview(), kit.engine.run_once()
    assert planned.total(Rule.EXPIRED) == report.total(Rule.EXPIRED) == 40 - len(lost)
    assert sum(entry.rows or 0 for entry in kit.state.ledger(99)) == 40 - len(lost)
    assert len(orders.times()) == 20
    assert expiries.due(NOW_MS + DAY, 100) == []


def test_ttl_of_a_lost_message_stays_while_paused(store: Store, expiries: SeparateExpiries) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    kit = janitor(store, side=expiries.side)
    kit.engine.run_once(adopt=True)
    expiries.put([(MessageKey(orders.id, 1, NOW_MS - AGE, 0).pack(), NOW_MS)])
    kit.state.pause("default:orders", NOW_MS)
    assert [entry.rows for entry in kit.engine.run_once().topics] == []
    assert len(expiries.due(NOW_MS + DAY, 9)) == 1


@pytest.mark.parametrize("case", ["paused", "protected", "unknown", "newer"])
def test_due_message_of_a_closed_topic_stays_and_is_noted(store: Store, expiries: SeparateExpiries, case: str) -> None:
    name = "default:orders"
    orders = unknown_topic(store, name) if case == "unknown" else topic(store, name, ttl_seconds=3600)
    if case == "newer":
        orders = orders.at(2)
    publish_with_ttl(orders, expiries, NOW_MS, NOW_MS - AGE)
    kit = adopt_store(store, expiries, protect=(name,) if case == "protected" else ())
    if case == "paused":
        publish_with_ttl(orders, expiries, NOW_MS + 1, NOW_MS - AGE + 1)
        kit.state.pause(name, NOW_MS)
        kit.clock.advance(1)
    kit.engine.run_once()
    assert len(orders.times()) == 1
    assert len(expiries.due(NOW_MS + DAY, 10)) == 1


def test_due_message_in_a_range_counts_once(store: Store, expiries: SeparateExpiries) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    publish_with_ttl(orders, expiries, NOW_MS - HOUR, NOW_MS - 2 * HOUR)
    retired = topic(store, "default:retired", ttl_seconds=3600, generation=-1)
    publish_with_ttl(retired, expiries, NOW_MS - HOUR, NOW_MS - MINUTE)
    report = janitor(store, side=expiries.side).engine.run_once(adopt=True)
    assert (report.total(Rule.EXPIRED), report.total(Rule.OLD_GENERATION)) == (1, 1)
    assert expiries.due(NOW_MS + DAY, 10) == []


def test_due_message_of_an_invalid_transaction_is_not_inverted(store: Store, expiries: SeparateExpiries) -> None:
    invalid = pointer(NOW_MS - AGE)
    orders = topic(store, "default:orders", ttl_seconds=3600).tx(invalid, NOW_MS - AGE)
    expiries.put([(key.pack(), NOW_MS) for key, _ in orders.messages()])
    kit = janitor(store, side=expiries.side).adopt()
    kit.snapshots.invalid = [invalid]
    for report in (kit.engine.preview(), kit.engine.run_once()):
        assert (report.total(Rule.EXPIRED), report.total(Rule.INVALID_TRANSACTION)) == (1, 0)


def test_plan_applied_later_deletes_what_was_due_then(store: Store, expiries: SeparateExpiries, tmp_path: Path) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    times = [NOW_MS - AGE + number for number in range(5)]
    orders.plain(*times)
    publish_with_ttl(orders, expiries, NOW_MS + 10, times[0], times[4])
    publish_with_ttl(orders, expiries, NOW_MS + 20, times[2])
    kit = adopt_store(store, expiries)
    kit.clock.advance(10)
    planned = kit.engine.preview(out=tmp_path / "plan")
    kit.clock.advance(10)
    publish_with_ttl(orders, expiries, NOW_MS + 5, NOW_MS - 1)
    done = kit.engine.carry_out(tmp_path / "plan")
    assert planned.total(Rule.EXPIRED) == done.total(Rule.EXPIRED) == 2
    assert len(orders.times()) == 7
    kit.engine.run_once()
    assert orders.times() == times


@pytest.mark.parametrize("case", ["deleted", "live", "held", "invalid"])
def test_plan_of_a_due_message_with_an_old_payload_is_right(
    store: Store, expiries: SeparateExpiries, case: str
) -> None:
    begun_ms = NOW_MS - HOUR // 2
    written = pointer(begun_ms, 1)
    orders = topic(store, "default:orders", ttl_seconds=3600).stored(written, begun_ms, begun_ms + 1)
    orders.ref(written, NOW_MS - MINUTE)
    [(key, _)] = orders.messages()
    expiries.put([(key.pack(), NOW_MS + HOUR if case == "live" else NOW_MS + 40 * MINUTE)])
    kit = adopt_store(store, expiries, protect=("default:orders",) if case == "held" else ())
    kit.clock.advance(40 * MINUTE)
    kit.snapshots.invalid = [written] if case == "invalid" else []
    seen, done = kit.engine.preview(), kit.engine.run_once()
    assert rows_of(seen) == rows_of(done)
    assert seen.totals.kept == done.totals.kept
    taken = {"deleted": 3, "invalid": 3}.get(case, 0)
    assert sum(rows for key, rows in rows_of(done).items() if key.held is None) == taken
    assert len(orders.stored_times()) + len(orders.times()) == 3 - taken


def rows_of(report: Report) -> dict[EntryKey, int]:
    return {EntryKey(e.topic, e.generation, e.table, e.rule, e.held): e.rows for e in report.topics}


def test_due_message_whose_delete_failed_is_retried(store: Store, expiries: SeparateExpiries) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    publish_with_ttl(orders, expiries, NOW_MS + 1, NOW_MS - AGE, NOW_MS - AGE + 1)
    kit = adopt_store(store, expiries)
    broken = [True]
    watch(store, before=fail_at("message.delete", StoreError("the disk is full."), lambda _: broken[0]))
    [error] = kit.run_after(1).errors
    assert "default:orders" in error
    broken[0] = False
    assert kit.engine.run_once().total(Rule.EXPIRED) == 2
    assert orders.times() == []


def test_ttl_that_grows_during_a_sweep_deletes_nothing(store: Store, expiries: SeparateExpiries) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    publish_with_ttl(orders, expiries, NOW_MS + 1, NOW_MS - AGE)
    kit = adopt_store(store, expiries)
    kit.clock.advance(1)
    moved: list[Topic] = []

    def move(call: object) -> None:
        if getattr(call, "name", "") == "metadata.get" and not moved:
            moved.append(orders.describe(ttl_seconds=7200))

    watch(store, before=move)
    assert kit.engine.run_once().total(Rule.EXPIRED) == 0
    assert moved
    assert kit.engine.run_once().total(Rule.EXPIRED) == 1
    assert orders.times() == []
