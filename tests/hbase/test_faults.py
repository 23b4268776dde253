"""Networks, servers and janitors that fail in the middle of a sweep: it ends, loses nothing, and says what happened.

Ending is a matter of the test's own time limit: each fault lasts for ever unless a time limit of ours ends the wait.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from janitor.quarantine import FIRST_PROBE_MS, STRIKES
from janitor.report import Report
from janitor.state.sqlite import SqliteState
from tests.builders import HOUR, NOW_MS, Rig, topic
from tests.hbase.moments import Hurried, Moments, watch_calls
from tests.hbase.proxy import HONEST, Conduct, Fault, Kind, Proxy
from tests.hbase.scene import Scene, run, sweeper
from tests.hbase.server import HBaseServer, ThriftProcess, start
from tests.hbase.tables import Tables
from tests.support import require_or_skip
from tms_core.errors import StoreUnavailable
from tms_core.tables.hbase import HBaseStore
from tms_core.tables.hbase_wire import Silence

ROOT = Path(__file__).parents[2]
#: How long a call may take where some are never answered.
SHORT_SECONDS = 0.5
KINDS: tuple[Kind, ...] = ("cut", "half-open", "blackhole")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.shared()


@pytest.fixture
def scene(hbase_tables: Tables, namespace: str) -> Iterator[Scene]:
    with hbase_tables.open(namespace) as store:
        yield Scene.on(store)


@pytest.fixture
def proxy(hbase: HBaseServer) -> Iterator[Proxy]:
    with Proxy(hbase.thrift) as opened:
        yield opened


@pytest.fixture
def through(proxy: Proxy, namespace: str) -> Iterator[HBaseStore]:
    """A store behind the proxy, with little patience."""
    with HBaseStore([proxy.address], namespace=namespace, timeout_seconds=SHORT_SECONDS, clock=Hurried()) as store:
        yield store


def complaints(rig: Rig) -> tuple[list[str], Report | None]:
    """What a run complains of, in its report or by failing as a whole, and its report."""
    try:
        report = rig.engine.run_once(adopt=True)
    except StoreUnavailable as error:
        return [str(error)], None
    return list(report.errors), report


def finish(scene: Scene, rig: Rig | None = None) -> None:
    """One more run, with no fault on its way, does all that is left."""
    scene.check_nothing_is_lost()
    report = run(rig or scene.rig())
    assert report is not None
    assert report.errors == []
    assert scene.due_is_gone
    scene.check_nothing_is_lost()


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_given_connections_that_fail_after_some_bytes_when_swept_then_nothing_is_lost(
    scene: Scene, proxy: Proxy, through: HBaseStore, kind: Kind, direction: str
) -> None:
    chance = random.Random(f"{kind} {direction}")

    def conduct(number: int) -> Conduct:
        if number >= 6:
            return HONEST
        return Conduct(**{direction: Fault(kind, chance.choice([500, 1000, 2000, 4000, 8000]))})

    proxy.treat(conduct)
    said, report = complaints(scene.rig(through))
    assert proxy.struck > 0
    # A connection that breaks is made anew; one that falls silent costs a topic its turn.
    assert bool(said) == (kind != "cut")
    assert all(proxy.address in error for error in said)
    assert report is None or bool(said) == (report.boundary is None)
    finish(scene)


@pytest.mark.parametrize("moment", ["scannerGetList", "mutateRowsTs", "checkAndPut"])
@pytest.mark.parametrize("kind", KINDS)
def test_given_a_network_that_fails_for_good_inside_a_sweep_when_swept_then_it_ends_and_says_so(
    scene: Scene, proxy: Proxy, through: HBaseStore, kind: Kind, moment: str
) -> None:
    moments = Moments(through.pool)
    moments.at(moment, 30 if moment == "scannerGetList" else 5, lambda: proxy.treat(lambda _: Conduct(up=Fault(kind))))
    rig = scene.rig(through)
    said, report = complaints(rig)
    assert moments.all_came
    print(len(said), proxy.connections, said[:3], report is None)
    assert said
    assert all(f"HBase's Thrift server {proxy.address}" in error for error in said)
    assert all("See whether" in error for error in said)
    assert rig.state.claim() is None
    finish(scene)


def test_given_slow_answers_in_small_pieces_when_swept_then_it_takes_longer_and_is_done(
    scene: Scene, proxy: Proxy, namespace: str
) -> None:
    proxy.treat(lambda _: Conduct(delay_seconds=0.001, piece_bytes=200))
    with HBaseStore([proxy.address], namespace=namespace) as store:
        said, report = complaints(scene.rig(store))
    assert report is not None
    assert (said, scene.due_is_gone) == ([], True)
    finish(scene)


def test_given_an_answer_that_comes_late_when_another_question_is_asked_then_it_gets_its_own_answer(
    scene: Scene, proxy: Proxy, through: HBaseStore
) -> None:
    orders, retired = scene.orders.id.prefix, scene.retired.id.prefix
    part = through.parts()[0].message
    connections = proxy.connections
    proxy.hold()
    with pytest.raises(Silence, match=re.escape(proxy.address)):
        part.keys(orders, None, 1)
    proxy.release()
    [key] = part.keys(retired, None, 1).items
    assert key.startswith(retired)
    assert proxy.connections > connections


def test_given_answers_that_come_late_now_and_then_when_swept_then_nothing_is_lost(
    scene: Scene, proxy: Proxy, namespace: str
) -> None:
    held: list[str] = []

    def let_go(name: str, _arguments: tuple[Any, ...]) -> None:
        # With one connection, whoever asks next does so after the answer before was given up.
        if held and held[-1] != name:
            proxy.release()

    def hold(name: str) -> Callable[[], None]:
        return lambda: (held.append(name), proxy.hold())[1]

    with HBaseStore(
        [proxy.address], namespace=namespace, timeout_seconds=SHORT_SECONDS, connections=1, clock=Hurried()
    ) as store:
        moments = Moments(store.pool)
        for name, number in (("scannerGetList", 20), ("mutateRowsTs", 4), ("checkAndPut", 7)):
            moments.at(name, number, hold(name))
        watch_calls(store.pool, before=let_go)
        said, _ = complaints(scene.rig(store, workers=1))
    assert moments.all_came
    assert len(said) >= 3
    assert all(f"{proxy.address} did not answer" in error for error in said)
    finish(scene)


def test_given_many_topics_when_nobody_answers_any_more_then_not_each_of_them_waits(
    hbase_tables: Tables, namespace: str, proxy: Proxy, through: HBaseStore
) -> None:
    with hbase_tables.open(namespace) as store:
        for number in range(60):
            topic(store, f"default:t{number}", ttl_seconds=3600).plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 8))
    moments = Moments(through.pool)
    moments.at("mutateRowsTs", 5, lambda: proxy.treat(lambda _: Conduct(up=Fault("blackhole"))))
    said, _ = complaints(sweeper(through))
    assert len(said) > 60
    assert proxy.connections < 30


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thrift(hbase: HBaseServer) -> Iterator[ThriftProcess]:
    """A Thrift server that may be killed."""
    if hbase.folder is None:
        require_or_skip("HBASE_TEST_ADDRESS names an HBase that is not ours, so no Thrift server can be added to it")
    with ThriftProcess(hbase) as process:
        yield process


@pytest.mark.parametrize("moment", ["scannerGetList", "mutateRowsTs", "checkAndPut"])
def test_given_thrift_killed_inside_a_sweep_when_there_is_another_then_that_one_does_the_rest(
    hbase: HBaseServer, thrift: ThriftProcess, scene: Scene, namespace: str, moment: str
) -> None:
    with HBaseStore([thrift.address, hbase.thrift], namespace=namespace, clock=Hurried()) as store:
        moments = Moments(store.pool)
        moments.at(moment, 5, thrift.kill)
        said, _ = complaints(scene.rig(store))
    assert moments.all_came
    assert said == []
    assert scene.due_is_gone
    thrift.start()


def test_given_the_only_thrift_killed_inside_a_sweep_when_it_is_back_then_one_more_run_does_the_rest(
    thrift: ThriftProcess, scene: Scene, namespace: str
) -> None:
    with HBaseStore([thrift.address], namespace=namespace, clock=Hurried()) as store:
        moments, rig = Moments(store.pool), scene.rig(store)
        moments.at("mutateRowsTs", 5, thrift.kill)
        said, _ = complaints(rig)
        assert all(thrift.address in error for error in said)
        assert any("cannot be reached" in error for error in said)
        assert rig.state.claim() is None
        scene.check_nothing_is_lost()
        thrift.start()
        report = run(rig)
        assert report is not None
        assert report.errors == []
        assert scene.due_is_gone
    scene.check_nothing_is_lost()


def test_given_thrift_that_hangs_inside_a_sweep_when_it_goes_on_then_one_more_run_does_the_rest(
    thrift: ThriftProcess, scene: Scene, namespace: str
) -> None:
    with HBaseStore([thrift.address], namespace=namespace, timeout_seconds=SHORT_SECONDS, clock=Hurried()) as store:
        moments, rig = Moments(store.pool), scene.rig(store)
        moments.at("checkAndPut", 5, thrift.pause)
        said, _ = complaints(rig)
        thrift.resume()
    assert any(f"{thrift.address} did not answer checkAndPut" in error for error in said)
    assert rig.state.claim() is None
    finish(scene)


@pytest.mark.timeout(240)
def test_given_hbase_killed_or_a_region_server_dead_inside_a_sweep_when_it_is_back_then_one_more_run_does_the_rest(
    hbase: HBaseServer, tmp_path: Path
) -> None:
    if hbase.folder is None:
        require_or_skip("HBASE_TEST_ADDRESS names an HBase that is not ours, and nothing may be killed there")
    with start(tmp_path / "own", region_servers=2) as own, Tables(own) as tables, Proxy(own.thrift) as proxy:
        namespace = tables.make(buckets=4)
        with tables.open(namespace) as whole, HBaseStore([proxy.address], namespace=namespace) as store:
            scene = Scene.on(whole)
            rig, moments = scene.rig(store), Moments(store.pool)
            moments.at("scannerGetList", 20, lambda: own.command("abort-server", 1))
            report = run(rig)
            assert moments.all_came
            assert report is not None
            assert report.errors == []
            assert own.command("servers") == "up down"
            assert scene.due_is_gone


# --- the janitor itself ----------------------------------------------------------------------------------------------


def test_given_a_janitor_killed_again_and_again_inside_its_sweep_when_the_next_one_runs_then_it_does_the_rest(
    hbase: HBaseServer, scene: Scene, namespace: str, tmp_path: Path
) -> None:
    chance = random.Random(6)
    moments = [*(chance.randrange(1, 200) for _ in range(3)), *(chance.randrange(200, 600) for _ in range(3))]
    command = [sys.executable, "-m", "tests.hbase.mortal", hbase.thrift, namespace, str(tmp_path), *map(str, moments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["killed"] * len(moments), done.stderr
    with SqliteState(tmp_path) as state:
        assert state.claim() is None
        rig = scene.rig(state=state)
        assert len(rig.engine.recover()) == 1
        finish(scene, rig)
        # Five were closed by the one that came next.
        assert [run_.result for run_ in state.runs(10)] == ["done", *["lost"] * len(moments)]


# --- a store that takes no writes ------------------------------------------------------------------------------------


@pytest.fixture
def read_only(hbase: HBaseServer, namespace: str) -> Iterator[Callable[[str, bool], None]]:
    """Makes a table read-only, or writable again."""

    def change(table: str, to: bool) -> None:
        hbase.command("set", f"{namespace}:{table}", "READONLY", str(to).lower())

    yield change
    for table in ("tms.message", "tms.payload"):
        change(table, False)


def test_given_a_table_that_is_read_only_when_swept_then_its_topics_fail_and_are_put_aside_and_probed_later(
    scene: Scene, read_only: Callable[[str, bool], None]
) -> None:
    aside = topic(scene.store, "default:aside", ttl_seconds=3600).plain(NOW_MS - 2 * HOUR)
    rig = scene.rig()
    read_only("tms.message", True)
    for _ in range(STRIKES):
        said, _ = complaints(rig)
        assert {error.partition(": ")[0] for error in said} == {"topic default:orders", "topic default:retired", ""}
        assert all("read only" in error for error in said)
        rig.clock.advance(60_000)
    print(aside, rig.state.strikes(), FIRST_PROBE_MS)
