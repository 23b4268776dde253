"""Records of invalid transactions: kept while listed, and a month longer after they are closed."""

from __future__ import annotations

import pytest

from janitor.rules.policy import Rule
from janitor.state.records import OpenIdRecord
from janitor.sweep.steps import PAGES_PER_BATCH
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Kit, Topic, fail_at, janitor, pointer, topic, unknown_topic, watch
from tms_core.errors import StoreError
from tms_core.tables.memory import MemoryStore

#: A transaction after its lifetime and grace, and one within them.
OLD, YOUNG = pointer(NOW_MS - 10 * HOUR), pointer(NOW_MS - MINUTE)


@pytest.fixture
def orders() -> Topic:
    return topic(MemoryStore(), "default:orders", ttl_seconds=365 * 86_400)


@pytest.fixture
def kit(orders: Topic) -> Kit:
    """Return a janitor with one closed and one open transaction."""
    kit = janitor(orders.store, invalid=[OLD, YOUNG])
    kit.engine.run_once(adopt=True)
    closed, still_open = OpenIdRecord(OLD, NOW_MS, NOW_MS, NOW_MS), OpenIdRecord(YOUNG, NOW_MS, NOW_MS)
    assert kit.state.open_ids() == {OLD: closed, YOUNG: still_open}
    return kit


def test_open_id_that_left_the_list_is_forgotten_by_the_next_run(kit: Kit) -> None:
    kit.snapshots.invalid = [OLD]
    kit.run_after(MINUTE)
    assert list(kit.state.open_ids()) == [OLD]


def test_closed_id_that_left_the_list_is_forgotten_after_a_month(kit: Kit) -> None:
    kit.snapshots.invalid = []
    for elapsed_ms, full, left in (
        (30 * DAY - 2 * MINUTE, True, [OLD]),
        (30 * DAY + MINUTE, False, [OLD]),
        (31 * DAY, True, []),
    ):
        assert kit.run_after(NOW_MS + elapsed_ms - kit.clock.now_ms()).full is full
        assert list(kit.state.open_ids()) == left


def test_closed_id_that_is_listed_for_a_year_stays_closed(kit: Kit) -> None:
    known = kit.state.open_ids()[OLD]
    kit.run_after(365 * DAY)
    assert kit.state.open_ids()[OLD] == known


def test_invalid_rows_over_many_pages_are_inverted_in_few_batches(orders: Topic) -> None:
    kit = janitor(orders.store, batch_rows=4)
    for number in range(PAGES_PER_BATCH * 12):
        orders.tx(OLD if number % 8 == 0 else OLD - 1, NOW_MS - HOUR + number)
    kit.snapshots.invalid = [OLD]
    before = orders.store.calls["invert"]
    assert kit.engine.run_once(adopt=True).total(Rule.INVALID_TRANSACTION) == PAGES_PER_BATCH * 12 // 8
    assert orders.store.calls["invert"] - before == PAGES_PER_BATCH * 12 // 8 // 4


def test_failed_topic_is_skipped_for_the_rest_of_the_step() -> None:
    store = MemoryStore()
    stray = unknown_topic(store, "default:stray").tx(OLD, NOW_MS)
    later = stray.at(2).tx(OLD, NOW_MS)
    kit = janitor(store).adopt()
    kit.snapshots.invalid = [OLD]
    watch(store, before=fail_at("message.invert", StoreError("broken")))
    assert len(kit.engine.run_once().errors) == 1
    assert (stray.pointers(), later.pointers()) == ([OLD], [OLD])
