"""Networks that fail during a sweep: the sweep stops, loses no row, and reports the error.

Each fault is permanent, so a test only finishes if the time limits of the sweep work.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.builders import HOUR, NOW_MS, topic
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.sweep_kit import FilledStore, run_once, shorten_timeout, sweep_kit
from tests.hbase.tables import PatientStore, Tables
from tests.hbase.thrift_calls import CallSchedule, SleeplessClock, watch_calls
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
    filled: FilledStore, proxy: Proxy, through: HBaseStore, kind: Kind, direction: str
) -> None:
    chance = random.Random(f"{kind} {direction}")

    def conduct(number: int) -> Conduct:
        # A call with all its retries may meet these connections only, and must succeed.
        if number >= len(PAUSES_SECONDS):
            return HONEST
        fault = Fault(kind, chance.choice([500, 1000, 2000, 4000, 8000]))
        return Conduct(up=fault) if direction == "up" else Conduct(down=fault)

    if kind != "cut":
        shorten_timeout(through)
    proxy.treat(conduct)
    errors, report = run_once(filled.kit(through))
    assert proxy.struck > 0
    # A sweep replaces a broken connection; a silent connection fails the topic in this run.
    assert bool(errors) == (kind != "cut")
    assert all(is_of_network(error, proxy) for error in errors)
    assert report is None or bool(errors) == (report.boundary is None)
    filled.complete_sweep()


@pytest.mark.parametrize("call", ["scannerGetList", "mutateRowsTs", "checkAndPut"])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_network_fails_a_sweep(
    filled: FilledStore, proxy: Proxy, through: HBaseStore, kind: Kind, call: str
) -> None:
    def fail() -> None:
        shorten_timeout(through)
        proxy.treat(lambda _: Conduct(up=Fault(kind)))

    calls = CallSchedule(through.pool)
    calls.before(call, 5, fail)
    kit = filled.kit(through)
    errors, _ = run_once(kit)
    assert calls.all_made
    assert errors
    assert all(is_of_network(error, proxy) for error in errors)
    assert any("Check" in error for error in errors)
    assert kit.state.boundary() is None
    filled.complete_sweep()


def test_sweep_over_slow_connection_completes(filled: FilledStore, proxy: Proxy, namespace: str) -> None:
    proxy.treat(lambda _: Conduct(delay_seconds=0.001, piece_bytes=200))
    with PatientStore([proxy.address], namespace=namespace) as store:
        errors, report = run_once(filled.kit(store))
    assert report is not None
    assert (errors, filled.is_swept) == ([], True)
    filled.complete_sweep()


def test_late_response_is_never_returned_to_another_call(
    filled: FilledStore, proxy: Proxy, through: HBaseStore
) -> None:
    orders, retired = filled.orders.id.prefix, filled.deleted.id.prefix
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


@pytest.mark.parametrize("call", ["scannerGetList", "mutateRowsTs", "checkAndPut"])
def test_late_response_in_a_sweep_is_discarded(filled: FilledStore, proxy: Proxy, namespace: str, call: str) -> None:
    armed: list[str] = []

    def arm() -> None:
        armed.append(call)
        shorten_timeout(store)
        proxy.treat(lambda _: HONEST)

    def hold(name: str, _arguments: tuple[Any, ...]) -> None:
        if name in armed:
            proxy.hold()

    with PatientStore([proxy.address], namespace=namespace, connections=1, clock=SleeplessClock()) as store:
        calls = CallSchedule(store.pool)
        # The interrupted call is sent again, and the proxy holds this second response.
        calls.before(call, 7, arm)
        watch_calls(store.pool, before=hold)
        borrow = store.pool.connection

        @contextmanager
        def release_late_response() -> Iterator[ThriftConnection]:
            # With one connection, the next caller borrows it only after the previous call has timed out.
            if not proxy.passing.is_set():
                armed.clear()
                store.pool.timeout_seconds = PATIENCE_SECONDS
                proxy.release()
            with borrow() as connection:
                yield connection

        vars(store.pool)["connection"] = release_late_response
        kit = filled.kit(store, workers=1)
        errors, _ = run_once(kit)
    assert calls.all_made
    assert any(proxy.address in error and call in error for error in errors)
    assert kit.state.boundary() is None
    filled.complete_sweep()


def test_sweep_of_many_topics_does_not_time_out_for_each_topic(
    hbase_tables: Tables, namespace: str, proxy: Proxy, through: HBaseStore
) -> None:
    with hbase_tables.open(namespace) as store:
        for number in range(60):
            topic(store, f"default:t{number}", ttl_seconds=3600).plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 8))

    def fail() -> None:
        shorten_timeout(through)
        proxy.treat(lambda _: Conduct(up=Fault("blackhole")))

    CallSchedule(through.pool).before("mutateRowsTs", 5, fail)
    errors, _ = run_once(sweep_kit(through))
    assert len(errors) > 60
    assert proxy.connections < 60


def is_of_network(error: str, proxy: Proxy) -> bool:
    """Return whether an error names the server or reports that all connections are in use."""
    return f"HBase's Thrift server {proxy.address}" in error or "connections to HBase have been in use" in error
