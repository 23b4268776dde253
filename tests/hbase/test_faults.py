"""Networks, servers and janitors that fail during a sweep: it stops, loses no row, and reports the error.

That a sweep ends is proven by the test's ending: each fault lasts for ever unless a time limit of ours ends the wait.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.builders import HOUR, NOW_MS, topic
from tests.hbase.moments import Moments, SleeplessClock, watch_calls
from tests.hbase.scene import Scene, complaints, finish, shorten_timeout, sweeper
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.tables import PatientStore, Tables
from tests.kit.proxy import HONEST, Conduct, Fault, Kind, Proxy
from tms_core.tables.base import KEYS
from tms_core.tables.hbase.pool import PAUSES_SECONDS
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import ThriftConnection, ThriftTimeout

KINDS: tuple[Kind, ...] = ("cut", "half-open", "blackhole")


@pytest.fixture
def proxy(hbase: HBaseServer) -> Iterator[Proxy]:
    with Proxy(hbase.thrift) as opened:
        yield opened


@pytest.fixture
def through(proxy: Proxy, namespace: str) -> Iterator[HBaseStore]:
    """Return a store that connects through the proxy."""
    with PatientStore([proxy.address], namespace=namespace, clock=SleeplessClock()) as store:
        yield store


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_sweep_over_broken_connections_loses_nothing(
    scene: Scene, proxy: Proxy, through: HBaseStore, kind: Kind, direction: str
) -> None:
    chance = random.Random(f"{kind} {direction}")

    def conduct(number: int) -> Conduct:
        # One call may meet them all, and must come through.
        if number >= len(PAUSES_SECONDS):
            return HONEST
        fault = Fault(kind, chance.choice([500, 1000, 2000, 4000, 8000]))
        return Conduct(up=fault) if direction == "up" else Conduct(down=fault)

    if kind != "cut":
        shorten_timeout(through)
    proxy.treat(conduct)
    errors, report = complaints(scene.kit(through))
    assert proxy.struck > 0
    # A connection that breaks is made anew; one that falls silent costs a topic its turn.
    assert bool(errors) == (kind != "cut")
    assert all(is_of_network(error, proxy) for error in errors)
    assert report is None or bool(errors) == (report.boundary is None)
    finish(scene)


@pytest.mark.parametrize("moment", ["scannerGetList", "mutateRowsTs", "checkAndPut"])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_network_fails_a_sweep(scene: Scene, proxy: Proxy, through: HBaseStore, kind: Kind, moment: str) -> None:
    def fail() -> None:
        shorten_timeout(through)
        proxy.treat(lambda _: Conduct(up=Fault(kind)))

    moments = Moments(through.pool)
    moments.at(moment, 5, fail)
    kit = scene.kit(through)
    errors, _ = complaints(kit)
    assert moments.all_came
    assert errors
    assert all(is_of_network(error, proxy) for error in errors)
    assert any("Check" in error for error in errors)
    assert kit.state.boundary() is None
    finish(scene)


def test_sweep_over_slow_connection_completes(scene: Scene, proxy: Proxy, namespace: str) -> None:
    proxy.treat(lambda _: Conduct(delay_seconds=0.001, piece_bytes=200))
    with PatientStore([proxy.address], namespace=namespace) as store:
        errors, report = complaints(scene.kit(store))
    assert report is not None
    assert (errors, scene.due_is_gone) == ([], True)
    finish(scene)


def test_late_response_is_never_returned_to_another_call(scene: Scene, proxy: Proxy, through: HBaseStore) -> None:
    orders, retired = scene.orders.id.prefix, scene.retired.id.prefix
    part = through.parts()[0].message
    shorten_timeout(through)
    proxy.treat(lambda _: HONEST)
    proxy.hold()
    with pytest.raises(ThriftTimeout, match=re.escape(proxy.address)):
        part.read(KEYS, orders, None, 1)
    connections, through.pool.timeout_seconds = proxy.connections, PATIENCE_SECONDS
    proxy.release()
    [key] = part.read(KEYS, retired, None, 1).items
    assert key.startswith(retired)
    assert proxy.connections > connections


@pytest.mark.parametrize("moment", ["scannerGetList", "mutateRowsTs", "checkAndPut"])
def test_late_response_in_a_sweep_is_discarded(scene: Scene, proxy: Proxy, namespace: str, moment: str) -> None:
    armed: list[str] = []

    def arm() -> None:
        armed.append(moment)
        shorten_timeout(store)
        proxy.treat(lambda _: HONEST)

    def hold(name: str, _arguments: tuple[Any, ...]) -> None:
        if name in armed:
            proxy.hold()

    with PatientStore([proxy.address], namespace=namespace, connections=1, clock=SleeplessClock()) as store:
        moments = Moments(store.pool)
        # The call that is cut off here is made again, and then its answer is kept back.
        moments.at(moment, 7, arm)
        watch_calls(store.pool, before=hold)
        borrow = store.pool.connection

        @contextmanager
        def let_go() -> Iterator[ThriftConnection]:
            # With one connection, whoever wants it next does so when the one before has given up.
            if not proxy.passing.is_set():
                armed.clear()
                store.pool.timeout_seconds = PATIENCE_SECONDS
                proxy.release()
            with borrow() as connection:
                yield connection

        vars(store.pool)["connection"] = let_go
        kit = scene.kit(store, workers=1)
        errors, _ = complaints(kit)
    assert moments.all_came
    assert any(proxy.address in error and moment in error for error in errors)
    assert kit.state.boundary() is None
    finish(scene)


def test_sweep_of_many_topics_does_not_time_out_for_each_topic(
    hbase_tables: Tables, namespace: str, proxy: Proxy, through: HBaseStore
) -> None:
    with hbase_tables.open(namespace) as store:
        for number in range(60):
            topic(store, f"default:t{number}", ttl_seconds=3600).plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 8))

    def fail() -> None:
        shorten_timeout(through)
        proxy.treat(lambda _: Conduct(up=Fault("blackhole")))

    moments = Moments(through.pool)
    moments.at("mutateRowsTs", 5, fail)
    errors, _ = complaints(sweeper(through))
    assert len(errors) > 60
    assert proxy.connections < 60


def is_of_network(error: str, proxy: Proxy) -> bool:
    """Return whether an error names the server or reports that all connections are in use."""
    return f"HBase's Thrift server {proxy.address}" in error or "connections to HBase have been in use" in error
