"""Consumers, server and janitor in one process: holds, status, counts and release."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import cast

import pytest

from janitor.app import serve
from janitor.app.embedded import Embedded
from janitor.daemon import daemon
from janitor.state.figures import ConsumerFigures
from tests.server.client import Client, TopicClient
from tests.server.process import port_of
from tests.support import wait_until
from tms_core.clock import ManualClock, SystemClock
from tms_core.server.serving import serving
from tms_core.transaction.codec.thrift import encode_transaction
from tms_core.transaction.rpc.client import TransactionClient

SETTINGS = """
storage: {kind: leveldb, leveldb: {path: messaging}}
transactions: {directory: tx, thrift: "127.0.0.1:0"}
server: {port: 0, consumers: {floor: true, max_hold_seconds: 86400}}
janitor: {every_seconds: 1, state: state, hold_seconds: 0, http: {port: 0}}
"""


def test_consumer_with_a_lag_finds_all_its_unread_messages(tmp_path: Path) -> None:
    config = tmp_path / "tms.yaml"
    config.write_text(SETTINGS, encoding="utf-8")
    # With the system clock the messages could expire before they are read.
    clock = ManualClock(SystemClock().now_ms())
    with serving(config, {}, {}, janitor=False, clock=clock) as started, Client(port_of(started.url)) as client:
        orders = TopicClient(client, "orders").create(ttl="1")
        orders.publish("a", "b", "c")
        ids = [message["id"] for message in orders.post("poll").json]
        client.ask("PUT", f"{orders.path}/consumers/billing", json.dumps({"position": ids[0]}).encode())

    with serving(config, {}, {}) as started, Client(port_of(started.url)) as client:
        orders = TopicClient(client, "orders")
        cast(Embedded, started.companions["janitor"]).daemon.adopt()

        def shows(line: str) -> bool:
            return line in client.ask("GET", "/metrics").text.splitlines()

        labels = 'consumer="billing",tms_namespace="default",topic="orders"'
        wait_until(lambda: shows('tms_janitor_held_topics{reason="consumer"} 1.0'))
        wait_until(lambda: shows(f"tms_consumer_lag_messages{{{labels}}} 2.0"))
        # Messages of one millisecond are held together.
        assert orders.poll()[-2:] == ["b", "c"]
        [found] = client.ask("GET", f"{orders.path}/consumers").json
        assert (found["lagMessages"], found["position"], found["expired"]) == (2, ids[0], False)
        assert orders.poll(startFrom={"id": ids[0]}, inclusive=False) == ["b", "c"]
        client.ask("PUT", f"{orders.path}/consumers/billing", json.dumps({"position": ids[2]}).encode())
        assert orders.poll() == []
        wait_until(lambda: shows('tms_janitor_rows_deleted_total{rule="expired",table="message"} 3.0'))
        wait_until(lambda: shows('tms_janitor_held_topics{reason="consumer"} 0.0'))


def test_group_with_an_open_claim_is_counted_like_the_api(tmp_path: Path) -> None:
    config = tmp_path / "tms.yaml"
    config.write_text(SETTINGS, encoding="utf-8")
    with (
        serving(config, {}, {}, janitor=False) as started,
        Client(port_of(started.url)) as client,
        TransactionClient(str(started.transactions)) as transactions,
    ):
        orders = TopicClient(client, "orders").create()
        orders.publish("a", "b", "c")
        for name in ("audit", "billing"):
            client.ask("PUT", f"{orders.path}/consumers/{name}", json.dumps({"position": "0" * 40}).encode())
        claimed = transactions.start_long(), transactions.start_short()
        for tx, name in ((claimed[0], "billing"), (claimed[1], "billing"), (claimed[1], "audit")):
            wanted = {"limit": 1, "transaction": base64.b64encode(encode_transaction(tx)).decode()}
            assert len(orders.post(f"consumers/{name}/poll", wanted, **{"X-TMS-Order": "none"}).json) == 1
        transactions.can_commit(claimed[1].transaction_id, [])
        transactions.commit(claimed[1].transaction_id)

    with serving(config, {}, {}) as started, Client(port_of(started.url)) as client:
        janitor = cast(Embedded, started.companions["janitor"]).daemon
        janitor.adopt()
        found: list[ConsumerFigures] = []

        def counted() -> bool:
            janitor.refresh_status()
            found[:] = janitor.status().consumers
            return bool(found)

        wait_until(counted)
        assert [(one.consumer, one.open_claims, one.redelivered) for one in found] == [
            ("audit", 0, 0),
            ("billing", 1, 0),
        ]
        # Messages after an undecided message are not read yet.
        response = client.ask("GET", f"{orders.path}/consumers").json
        assert [one.lag_messages for one in found] == [one["lagMessages"] for one in response] == [2, 3]


def test_consumer_between_two_counts_is_shown_after_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "COUNT_SECONDS", 86_400)
    monkeypatch.setattr(daemon, "AFTER_SWEEP_SECONDS", 0)
    config = tmp_path / "tms.yaml"
    config.write_text(SETTINGS.replace("floor: true", "floor: false"), encoding="utf-8")
    with serving(config, {}, {}) as started, Client(port_of(started.url)) as client:
        janitor = cast(Embedded, started.companions["janitor"]).daemon
        janitor.adopt()
        ticks = TopicClient(client, "ticks").create(ttl="1")
        ticks.publish("a")
        wait_until(lambda: any(run.expired for run in janitor.runs(10)))
        client.ask("PUT", f"{ticks.path}/consumers/billing", json.dumps({"position": "0" * 40}).encode())
        ticks.publish("b")

        def shown() -> list[str]:
            janitor.refresh_status()
            return [one.consumer for one in janitor.status().consumers]

        wait_until(lambda: shown() == ["billing"])
