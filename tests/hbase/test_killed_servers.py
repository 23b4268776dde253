"""Sweeps during which servers or the janitor are killed: no live row is lost, and the next run completes the sweep."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from janitor.state.sqlite.state import SqliteState
from tests.hbase.server import HBaseServer, ThriftProcess, start
from tests.hbase.sweep_kit import FilledStore, run_once, shorten_timeout
from tests.hbase.tables import PatientStore, Tables
from tests.hbase.thrift_calls import CallSchedule, SleeplessClock
from tests.kit.proxy import HONEST, Proxy
from tests.support import require_or_skip

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def thrift(hbase: HBaseServer) -> Iterator[ThriftProcess]:
    """Return a Thrift server that a test may kill."""
    if hbase.folder is None:
        require_or_skip("the tests did not start the HBase of HBASE_TEST_ADDRESS and cannot add a Thrift server")
    with ThriftProcess(hbase) as process:
        yield process


@pytest.mark.parametrize("call", ["scannerGetList", "checkAndPut"])
def test_sweep_with_one_of_two_thrift_servers_killed_completes(
    hbase: HBaseServer, thrift: ThriftProcess, filled: FilledStore, namespace: str, call: str
) -> None:
    with PatientStore([thrift.address, hbase.thrift], namespace=namespace, clock=SleeplessClock()) as store:
        calls = CallSchedule(store.pool)
        calls.before(call, 5, thrift.kill)
        errors, _ = run_once(filled.kit(store))
    assert calls.all_made
    assert errors == []
    assert filled.is_swept
    thrift.start()


def test_next_run_completes_sweep_after_only_thrift_server_is_killed(
    thrift: ThriftProcess, filled: FilledStore, namespace: str
) -> None:
    with PatientStore([thrift.address], namespace=namespace, clock=SleeplessClock()) as store:
        calls, kit = CallSchedule(store.pool), filled.kit(store)
        calls.before("mutateRowsTs", 5, thrift.kill)
        errors, _ = run_once(kit)
        assert all(thrift.address in error for error in errors)
        assert any("cannot be reached" in error for error in errors)
        assert kit.state.boundary() is None
        thrift.start()
        filled.complete_sweep(kit)


def test_next_run_completes_sweep_after_thrift_server_hangs(
    thrift: ThriftProcess, filled: FilledStore, namespace: str
) -> None:
    with (
        Proxy(thrift.address) as proxy,
        PatientStore([proxy.address], namespace=namespace, clock=SleeplessClock()) as store,
    ):

        def hang() -> None:
            thrift.pause()
            # Calls that were sent before the pause have a longer time limit.
            shorten_timeout(store)
            proxy.treat(lambda _: HONEST)

        calls, kit = CallSchedule(store.pool), filled.kit(store)
        calls.before("checkAndPut", 5, hang)
        errors, _ = run_once(kit)
        thrift.resume()
    # The error names one of several calls that were in progress.
    assert any(proxy.address in error for error in errors), errors
    assert kit.state.boundary() is None
    filled.complete_sweep()


@pytest.fixture(scope="module")
def own(hbase: HBaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HBaseServer]]:
    """Return HBases of two region servers that a test may kill; the last in the list runs."""
    if hbase.folder is None:
        require_or_skip("the tests did not start the HBase of HBASE_TEST_ADDRESS and cannot kill it")
    servers = [start(tmp_path_factory.mktemp("own"), region_servers=2)]
    yield servers
    servers[-1].leave()


@pytest.fixture
def own_filled(own: list[HBaseServer]) -> Iterator[tuple[FilledStore, Proxy, str]]:
    """Return a filled store on this HBase, a proxy in front of the HBase, and the namespace."""
    with Tables(own[-1]) as tables, Proxy(own[-1].thrift) as proxy:
        namespace = tables.make()
        with PatientStore([proxy.address], namespace=namespace, buckets=4) as store:
            yield FilledStore.fill(store), proxy, namespace


def test_sweep_with_aborted_region_server_completes(
    own: list[HBaseServer], own_filled: tuple[FilledStore, Proxy, str]
) -> None:
    filled, _, namespace = own_filled
    alive = own[-1].command("servers").split().index("up")
    with PatientStore([own[-1].thrift], namespace=namespace) as store:
        calls = CallSchedule(store.pool)
        calls.before("scannerGetList", 20, lambda: own[-1].command("abort-server", alive))
        errors, report = run_once(filled.kit(store))
    assert calls.all_made
    assert own[-1].command("servers").split()[alive] == "down"
    assert report is not None
    assert errors == []
    filled.complete_sweep()


def test_next_run_completes_sweep_after_hbase_is_killed(
    own: list[HBaseServer], own_filled: tuple[FilledStore, Proxy, str]
) -> None:
    filled, proxy, namespace = own_filled
    with PatientStore([proxy.address], namespace=namespace, clock=SleeplessClock()) as store:
        calls, kit = CallSchedule(store.pool), filled.kit(store)
        calls.before("mutateRowsTs", 8, own[-1].kill)
        errors, _ = run_once(kit)
    assert calls.all_made
    assert errors
    assert all(proxy.address in error for error in errors)
    assert kit.state.boundary() is None
    folder = own[-1].folder
    assert folder is not None
    own.append(start(folder, region_servers=2))
    proxy.target = own[-1].thrift
    proxy.treat(lambda _: HONEST)
    filled.complete_sweep()


def test_runs_complete_sweep_of_repeatedly_killed_janitor(
    hbase: HBaseServer, filled: FilledStore, namespace: str, tmp_path: Path
) -> None:
    chance = random.Random(6)
    # Early enough to be reached, and late enough for the run to be in the state.
    numbers = [str(chance.randrange(40, most)) for most in (100, 140, 180, 300, 300, 300)]
    command = [sys.executable, "-m", "tests.hbase.killed_sweeps", hbase.thrift, namespace, str(tmp_path), *numbers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # The last sweeps may have so few rows left that they make fewer calls.
    results = [{"killed": "lost", "exit-0": "done"}[end] for end in done.stdout.split()]
    assert len(results) == len(numbers), done.stderr
    assert results[:3] == ["lost"] * 3, done.stderr
    with SqliteState(tmp_path) as state:
        kit = filled.kit(state=state)
        assert len(kit.engine.recover()) == results[-1:].count("lost")
        assert (state.boundary() is None) == ("done" not in results)
        filled.complete_sweep(kit)
        assert [run_.result for run_ in state.runs(10)] == ["done", *reversed(results)]
