"""A server that starts with a wrong clock: its probe fails, and it publishes after the clock is corrected."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

from janitor.app.embedded import Embedded
from tests.builders import DAY
from tests.server.client import Client, TopicClient
from tests.server.process import port_of
from tms_core.clock import ManualClock, SystemClock
from tms_core.server.serving import serving

SETTINGS = """
storage: {kind: leveldb, leveldb: {path: messaging}}
transactions: {source: none}
server: {port: 0}
janitor: {state: state, http: {port: 0}}
"""


@pytest.mark.parametrize("started_ms", [None, DAY], ids=["30 days slow", "in 1970"])
def test_server_with_a_slow_clock_publishes_after_its_correction(tmp_path: Path, started_ms: int | None) -> None:
    config = tmp_path / "tms.yaml"
    config.write_text(SETTINGS, encoding="utf-8")
    right_ms = SystemClock().now_ms()
    with serving(config, {}, {}, janitor=False) as started, Client(port_of(started.url)) as client:
        TopicClient(client, "orders").create().publish("a")
    clock = ManualClock(right_ms - 30 * DAY if started_ms is None else started_ms, monotonic_ms=DAY)
    with serving(config, {}, {}, clock=clock) as started, Client(port_of(started.url)) as client:
        page = urlsplit(cast(Embedded, started.companions["janitor"]).url).port
        orders = TopicClient(client, "orders")

        def attempt() -> tuple[int, int, str]:
            with Client(page or 0) as prober:
                ready = prober.ask("GET", "/readyz")
            return orders.post("publish", {"messages": ["a"]}).status, ready.status, ready.text

        if started_ms is None:
            assert attempt()[:2] == (200, 200)
        # The clock is still wrong after half of the correction.
        clock.step((right_ms - clock.now_ms()) // 2)
        published, ready, message = attempt()
        assert (published, ready) == (503, 503)
        assert "nothing can be published: The clock is" in message
        clock.step(right_ms + DAY - clock.now_ms())
        assert attempt()[:2] == (200, 200)
