"""Messages above HBase's cell limit (`hbase.client.keyvalue.maxsize`): rejected and not written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.tables import Tables, write_config
from tests.kit.messaging import read_payloads
from tests.server.client import Client, TopicClient
from tests.server.process import Serve
from tms_core.clock import SystemClock
from tms_core.errors import TooLarge, Unavailable
from tms_core.messaging.service import MessagingService
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId

#: HBase's default, and a limit above it that a server may be configured with.
LIMIT = 10 << 20
OPEN_LIMIT = 1 << 30


@pytest.fixture
def serve(hbase_tables: Tables, hbase: HBaseServer, tmp_path: Path) -> Iterator[Callable[[int], TopicClient]]:
    running: list[Serve | Client] = []
    namespace = hbase_tables.make()

    def start(max_cell_bytes: int) -> TopicClient:
        settings = hbase.settings(namespace, buckets=4, max_cell_bytes=max_cell_bytes)
        sections = {"transactions": {"source": "none"}, "server": {"port": 0, "max_request_mb": 20, "memory": 400}}
        server = Serve(write_config(tmp_path / "tms.yaml", settings, **sections))
        client = Client(server.port)
        running[:] = [server, client]
        return TopicClient(client, "large").create()

    yield start
    for one in reversed(running):
        one.__exit__(None, None, None)
    assert "Traceback" not in (tmp_path / "tms.log").read_text()


@pytest.mark.parametrize("configured", [LIMIT, OPEN_LIMIT], ids=["configured", "discovered"])
def test_publish_above_the_cell_limit_writes_nothing(serve: Callable[[int], TopicClient], configured: int) -> None:
    topic = serve(configured)
    for _ in range(2):
        answer = topic.post("publish", {"messages": ["before", "x" * LIMIT]})
        assert answer.status == 413, answer.text
        assert "hbase.client.keyvalue.maxsize" in answer.text
    topic.publish("x" * (LIMIT - 2048))
    topic.publish("after")
    assert [len(payload) for payload in topic.poll()] == [LIMIT - 2048, 5]


@pytest.mark.parametrize("configured", [LIMIT, OPEN_LIMIT], ids=["configured", "discovered"])
def test_store_above_the_cell_limit_writes_nothing(serve: Callable[[int], TopicClient], configured: int) -> None:
    topic = serve(configured)
    pointer = time.time_ns() // 1_000_000 * 1_000_000
    answer = topic.post("store", {"transactionWritePointer": str(pointer), "messages": ["x" * LIMIT]})
    assert answer.status == 413, answer.text


def test_batch_with_a_cell_above_the_limit_fails_only_its_own_request(hbase: HBaseServer, hbase_tables: Tables) -> None:
    topic = TopicId.parse("default:large")
    wanted = hbase.settings(hbase_tables.make(), buckets=4, max_cell_bytes=OPEN_LIMIT)
    with HBaseStore(wanted) as store, MessagingService(store, SystemClock(), side=MemorySide()) as service:
        service.create_topic(topic, {})
        service.publish(topic, [b"first"])
        writer = service._queues.message(topic)
        with writer._lock:
            # The writer seems busy, so the two requests are queued for one batch.
            writer._busy = True
        answers = [service.submit_publish(topic, [payload]) for payload in (b"small", b"x" * LIMIT)]
        writer._run()
        with pytest.raises(Unavailable):
            answers[0].result(PATIENCE_SECONDS)
        with pytest.raises(TooLarge):
            answers[1].result(PATIENCE_SECONDS)
        service.publish(topic, [b"small"])
        assert read_payloads(service, topic) == [b"first", b"small"]
