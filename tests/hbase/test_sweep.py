"""Sweeps of all salts on a real HBase with several workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from janitor.rules.policy import Rule
from janitor.run.engine import Engine
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, janitor, pointer, topic, unknown_topic
from tests.hbase.tables import Tables
from tests.janitor.rules.test_differential import Scene, check, scenes
from tests.support import size
from tms_core.tables.base import KEYS
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.read_only import read_only


@pytest.fixture
def store(hbase_tables: Tables) -> HBaseStore:
    return hbase_tables.store()


@pytest.mark.parametrize("workers", [1, 4])
def test_sweep_of_all_salts_deletes_expired_and_old_rows(store: HBaseStore, workers: int) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    expired = list(range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 200))
    live = list(range(NOW_MS - MINUTE, NOW_MS - MINUTE + 100))
    orders.plain(*expired, *live)
    deleted = topic(store, "default:deleted", ttl_seconds=3600, generation=-2)
    deleted.plain(*live)
    recreated = topic(store, "default:recreated", ttl_seconds=3600, generation=3)
    recreated.at(2).plain(*live)
    recreated.plain(*live)
    unknown = unknown_topic(store, "default:unknown")
    unknown.plain(1)
    kit = janitor(store, batch_rows=50, workers=workers)

    report = kit.engine.run_once(adopt=True)

    assert orders.times() == live
    assert (deleted.times(), recreated.at(2).times(), recreated.times(), unknown.times()) == ([], [], live, [1])
    assert (report.total(Rule.EXPIRED), report.total(Rule.OLD_GENERATION)) == (200, 200)
    assert (report.errors, store.wrong_salts) == ([], 0)
    again = kit.engine.run_once()
    assert [again.total(rule) for rule in Rule] == [0] * len(Rule)


def test_sweep_of_all_salts_inverts_and_proves_boundary(store: HBaseStore) -> None:
    invalid, valid = pointer(NOW_MS - DAY), pointer(NOW_MS - DAY, 1)
    orders = topic(store, "default:orders", ttl_seconds=7 * 86_400)
    orders.tx(invalid, *range(NOW_MS - DAY, NOW_MS - DAY + 60))
    orders.tx(valid, *range(NOW_MS - HOUR, NOW_MS - HOUR + 60))
    kit = janitor(store, batch_rows=20, workers=4, invalid=[invalid])

    report = kit.engine.run_once(adopt=True)

    assert report.total(Rule.INVALID_TRANSACTION) == 60
    assert sorted(set(orders.pointers()), key=str) == sorted({-invalid, valid}, key=str)
    assert report.boundary is not None
    found = kit.engine.verify()
    assert (found.cells, found.open_cells, found.refuted) == (120, 0, 0)


def test_sweep_keeps_payloads_of_live_messages_of_any_salt(store: HBaseStore) -> None:
    orders = topic(store, "default:orders", ttl_seconds=60)
    kept, free = pointer(NOW_MS - 5 * MINUTE), pointer(NOW_MS - 6 * MINUTE)
    orders.stored(kept, *range(NOW_MS - 5 * MINUTE, NOW_MS - 5 * MINUTE + 20)).ref(kept, NOW_MS - 10 * SECOND)
    orders.stored(free, *range(NOW_MS - 6 * MINUTE, NOW_MS - 6 * MINUTE + 20))
    report = janitor(store, workers=4).engine.run_once(adopt=True)
    assert orders.stored_times() == list(range(NOW_MS - 5 * MINUTE, NOW_MS - 5 * MINUTE + 20))
    assert report.total(Rule.EXPIRED) == 20


def test_plan_makes_no_more_calls_than_the_following_run(store: HBaseStore) -> None:
    for number in range(3):
        topic(store, f"default:t{number}", ttl_seconds=3600).plain(*range(NOW_MS - DAY, NOW_MS - DAY + 1200))

    def calls_of(work: Callable[[], object]) -> int:
        before = store.pool.calls.total()
        work()
        return store.pool.calls.total() - before

    deleting = janitor(store, batch_rows=100, workers=4).engine
    planning = Engine(replace(deleting.deps, store=read_only(store)))
    planned = calls_of(planning.plan)
    assert planned <= calls_of(lambda: deleting.run_once(adopt=True))
    assert store.message.read(KEYS, b"", None, 1).items == []


@pytest.mark.timeout(600)
@settings(
    max_examples=size("TMS_TEST_HBASE_EXAMPLES", 12),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(scene=scenes())
def test_sweep_of_random_store_obeys_deletion_rules(hbase_tables: Tables, scene: Scene) -> None:
    check(scene, hbase_tables.store(), 5, workers=3, tells=False)
