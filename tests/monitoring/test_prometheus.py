"""A real Prometheus that scrapes a real janitor: alerts fire and resolve, and every panel has data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from janitor.cli.main import execute
from janitor.state.figures import STATISTICS, StatisticsFigures
from janitor.state.sqlite.state import SqliteState
from tests.builders import HOUR, topic
from tests.monitoring.prometheus import Prometheus, until
from tests.server.client import Client
from tests.server.process import Serve, configure
from tests.support import require_tool
from tms_core import client as library
from tms_core.clock import SystemClock
from tms_core.tables.leveldb.store import LevelDBStore
from tools.monitoring.dashboard import dashboard, expressions
from tools.monitoring.preview import chosen
from tools.monitoring.rules import rules, thresholds

#: The values of the dashboard's variables.
CHOSEN = {"$namespace": ".*", "$job": "janitor", "$__rate_interval": "1m"}

#: A server that reports a transaction that readers wait for after one second instead of 30.
TMS = (
    "import sys; from tms_core.server import managing; from tms_core.cli.main import execute; "
    "managing.LATE_SECONDS = 1; sys.exit(execute(sys.argv[1:]))"
)


class MonitoringKit(NamedTuple):
    """A server with an embedded janitor, and a Prometheus that scrapes it."""

    server: Serve
    prometheus: Prometheus
    config: Path


def settings(folder: Path) -> Path:
    """Write settings with short lifetimes, so that invalid transactions are proven within seconds."""
    path = configure(folder)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document["transactions"] |= {"max_lifetime_seconds": 1, "grace_seconds": 0}
    document["janitor"] |= {"clock_allowance_seconds": 1, "hold_seconds": 3600}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with SqliteState(folder / "state") as state:
        # An earlier count on Spark, which this test does not start.
        counted_ms = SystemClock().now_ms()
        found = StatisticsFigures(counted_ms, rows=3, overdue={"expired": 1}, blocking_since_ms=counted_ms)
        STATISTICS.save(state, found)
    return path


def publish(config: Path, name: str) -> None:
    """Create a topic with two messages and a consumer that has read one, without a janitor."""
    path = f"/v1/namespaces/default/topics/{name}"
    as_json = {"content_type": "application/json", "accept": "application/json"}
    with Serve(config) as server, Client(server.port) as client:
        assert client.ask("PUT", path, b"{}").status == 200
        assert client.ask("POST", f"{path}/publish", b'{"messages": ["one", "two"]}', **as_json).status == 200
        read = client.ask("POST", f"{path}/poll", b'{"limit": 1}', **as_json)
        assert read.status == 200
        position = json.dumps({"position": read.json[0]["id"]}).encode()
        assert client.ask("PUT", f"{path}/consumers/billing", position, **as_json).status == 200
        server.end()


@contextmanager
def client_with_open_transaction(server: Serve) -> Iterator[library.Client]:
    """Yield a client that also has an open transaction with a published message and a claim."""
    assert server.transactions is not None
    with library.Client(server.url, transactions=server.transactions) as client:
        tx = client.transaction(timeout_seconds=600).__enter__()
        client.publish("default:orders", [b"undecided"], transaction=tx.transaction)
        assert [message.payload for message in tx.consume("default:orders", "billing", limit=1)] == [b"two"]
        yield client


def janitor(line: str) -> None:
    assert execute(line.split()) == 0


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[MonitoringKit]:
    config = settings(tmp_path)
    publish(config, "orders")
    janitor(f"run --once --adopt --config {config}")
    # The due rows of this topic stay, because the cutoff of a new topic is held.
    with LevelDBStore(tmp_path / "messaging") as store:
        topic(store, "default:held", ttl_seconds=60).plain(SystemClock().now_ms() - HOUR)
    quick = {**thresholds(), "pausedSeconds": 1, "forSeconds": 1, "absentSeconds": 10}
    with Serve(config, janitor=True, tms=(sys.executable, "-c", TMS)) as server:
        targets = {"janitor": [f"127.0.0.1:{server.port}"]}
        with Prometheus(tmp_path / "prometheus", targets, rules(quick, scope='job="janitor"')) as prometheus:
            yield MonitoringKit(server, prometheus, config)


@pytest.mark.timeout(900)
def test_alerts_fire_and_resolve_and_every_panel_has_data(kit: MonitoringKit) -> None:
    prometheus = kit.prometheus
    assert lint(kit.server.port) == (0, "")
    janitor(f"pause default:paused --config {kit.config}")
    until(lambda: prometheus.firing("TmsPausedTooLong"), "the alert fires")

    missing = {*expressions(dashboard()), ("sizing", sizing())}
    with client_with_open_transaction(kit.server) as client:

        def all_have_data() -> bool:
            client.publish("default:orders", [b"more"])
            assert list(client.poll("default:orders", limit=1))
            missing.difference_update([panel for panel in missing if prometheus.query(chosen(panel[1], CHOSEN))])
            return not missing

        until(all_have_data, lambda: f"these panels have data: {missing}")

    janitor(f"resume default:paused --config {kit.config}")
    until(lambda: not prometheus.firing("TmsPausedTooLong"), "the alert is resolved")

    assert not prometheus.firing("TmsJanitorDown")
    kit.server.end()
    until(lambda: prometheus.firing("TmsJanitorDown"), "the alert of a stopped server fires")


def lint(port: int) -> tuple[int, str]:
    """Check the server's metrics with promtool; return its exit code and output."""
    promtool = require_tool("promtool", "apt-get install prometheus, or make system-deps")
    with Client(port) as client:
        body = client.ask("GET", "/metrics").body
    assert b"tms_janitor_build_info" in body
    checked = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=60, check=False)
    return checked.returncode, (checked.stdout + checked.stderr).decode()


def sizing() -> str:
    """Return the expression for the speed of a worker in the page about scale."""
    guide = (Path(__file__).parents[2] / "docs/explanation/scale.md").read_text(encoding="utf-8")
    [found] = re.findall(r"`(sum\(rate\([^`]+)`", guide)
    return str(found).replace("\\|", "|")
