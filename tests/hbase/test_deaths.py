"""Servers and janitors killed during a sweep: nothing is lost, and the next run completes it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from janitor.state.sqlite.state import SqliteState
from tests.hbase.moments import Moments, SleeplessClock
from tests.hbase.scene import Scene, complaints, finish, shorten_timeout
from tests.hbase.server import HBaseServer, ThriftProcess, start
from tests.hbase.tables import PatientStore, Tables
from tests.kit.proxy import HONEST, Proxy
from tests.support import require_or_skip

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def thrift(hbase: HBaseServer) -> Iterator[ThriftProcess]:
    """Return a Thrift server that a test may kill."""
    if hbase.folder is None:
        require_or_skip("HBASE_TEST_ADDRESS names an HBase that is not ours, so no Thrift server can be added to it")
    with ThriftProcess(hbase) as process:
        yield process


@pytest.mark.parametrize("moment", ["scannerGetList", "checkAndPut"])
def test_sweep_with_one_of_two_thrift_servers_killed_completes(
    hbase: HBaseServer, thrift: ThriftProcess, scene: Scene, namespace: str, moment: str
) -> None:
    with PatientStore([thrift.address, hbase.thrift], namespace=namespace, clock=SleeplessClock()) as store:
        moments = Moments(store.pool)
        moments.at(moment, 5, thrift.kill)
        errors, _ = complaints(scene.kit(store))
    assert moments.all_came
    assert errors == []
    assert scene.due_is_gone
    thrift.start()


def test_next_run_completes_sweep_after_only_thrift_server_is_killed(
    thrift: ThriftProcess, scene: Scene, namespace: str
) -> None:
    with PatientStore([thrift.address], namespace=namespace, clock=SleeplessClock()) as store:
        moments, kit = Moments(store.pool), scene.kit(store)
        moments.at("mutateRowsTs", 5, thrift.kill)
        errors, _ = complaints(kit)
        assert all(thrift.address in error for error in errors)
        assert any("cannot be reached" in error for error in errors)
        assert kit.state.boundary() is None
        thrift.start()
        finish(scene, kit)


def test_next_run_completes_sweep_after_thrift_server_hangs(
    thrift: ThriftProcess, scene: Scene, namespace: str
) -> None:
    with (
        Proxy(thrift.address) as proxy,
        PatientStore([proxy.address], namespace=namespace, clock=SleeplessClock()) as store,
    ):

        def hang() -> None:
            thrift.pause()
            # Whoever was asked before has a longer time limit.
            shorten_timeout(store)
            proxy.treat(lambda _: HONEST)

        moments, kit = Moments(store.pool), scene.kit(store)
        moments.at("checkAndPut", 5, hang)
        errors, _ = complaints(kit)
        thrift.resume()
    # Several calls were under way, and any of them may be the one that is named.
    assert any(proxy.address in error for error in errors), errors
    assert kit.state.boundary() is None
    finish(scene)


@pytest.fixture(scope="module")
def own(hbase: HBaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HBaseServer]]:
    """Return HBases of two region servers that a test may kill; the last in the list runs."""
    if hbase.folder is None:
        require_or_skip("HBASE_TEST_ADDRESS names an HBase that is not ours, so nothing is killed")
    servers = [start(tmp_path_factory.mktemp("own"), region_servers=2)]
    yield servers
    servers[-1].leave()


@pytest.fixture
def own_scene(own: list[HBaseServer]) -> Iterator[tuple[Scene, Proxy, str]]:
    """Return a scene on that HBase, a proxy with a changeable target, and the namespace."""
    with Tables(own[-1]) as tables, Proxy(own[-1].thrift) as to_own:
        namespace = tables.make()
        with PatientStore([to_own.address], namespace=namespace, buckets=4) as store:
            yield Scene.on(store), to_own, namespace


def test_sweep_with_aborted_region_server_completes(
    own: list[HBaseServer], own_scene: tuple[Scene, Proxy, str]
) -> None:
    there, _, namespace = own_scene
    alive = own[-1].command("servers").split().index("up")
    with PatientStore([own[-1].thrift], namespace=namespace) as store:
        moments = Moments(store.pool)
        moments.at("scannerGetList", 20, lambda: own[-1].command("abort-server", alive))
        errors, report = complaints(there.kit(store))
    assert moments.all_came
    assert own[-1].command("servers").split()[alive] == "down"
    assert report is not None
    assert errors == []
    finish(there)


def test_next_run_completes_sweep_after_hbase_is_killed(
    own: list[HBaseServer], own_scene: tuple[Scene, Proxy, str]
) -> None:
    there, to_own, namespace = own_scene
    with PatientStore([to_own.address], namespace=namespace, clock=SleeplessClock()) as store:
        moments, kit = Moments(store.pool), there.kit(store)
        moments.at("mutateRowsTs", 8, own[-1].kill)
        errors, _ = complaints(kit)
    assert moments.all_came
    assert errors
    assert all(to_own.address in error for error in errors)
    assert kit.state.boundary() is None
    folder = own[-1].folder
    assert folder is not None
    own.append(start(folder, region_servers=2))
    to_own.target = own[-1].thrift
    to_own.treat(lambda _: HONEST)
    finish(there)


def test_runs_complete_sweep_of_repeatedly_killed_janitor(
    hbase: HBaseServer, scene: Scene, namespace: str, tmp_path: Path
) -> None:
    chance = random.Random(6)
    # Early enough to come, and late enough for the run to be known of.
    moments = [chance.randrange(40, most) for most in (100, 140, 180, 300, 300, 300)]
    command = [sys.executable, "-m", "tests.hbase.mortal", hbase.thrift, namespace, str(tmp_path), *map(str, moments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # The last ones may find so little left to do that their moment never comes.
    results = [{"killed": "lost", "exit-0": "done"}[how] for how in done.stdout.split()]
    assert len(results) == len(moments), done.stderr
    assert results[:3] == ["lost"] * 3, done.stderr
    with SqliteState(tmp_path) as state:
        kit = scene.kit(state=state)
        assert len(kit.engine.recover()) == results[-1:].count("lost")
        assert (state.boundary() is None) == ("done" not in results)
        finish(scene, kit)
        assert [run_.result for run_ in state.runs(10)] == ["done", *reversed(results)]
