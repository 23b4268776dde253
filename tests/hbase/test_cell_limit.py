"""Messages above HBase's cell limit (`hbase.client.keyvalue.maxsize`): rejected and not written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.tables import Tables
from tests.server.client import Client, TopicClient
from tests.server.process import Serve
from tms_core.clock import SystemClock
from tms_core.errors import TooLarge, Unavailable
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.service import MessagingService
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId

#: HBase's default, which the HBase of the tests has.
LIMIT = 10 << 20
OPEN_LIMIT = 1 << 30


@pytest.fixture
def serve(hbase_tables: Tables, hbase: HBaseServer, tmp_path: Path) -> Iterator[Callable[[int], TopicClient]]:
    running: list[Serve | Client] = []
    wanted = {"thrift": [hbase.thrift], "namespace": hbase_tables.make(), "buckets": 4}

    def start(max_cell_bytes: int) -> TopicClient:
        path = tmp_path / "tms.yaml"
        storage = {"kind": "hbase", "hbase": {**wanted, "max_cell_bytes": max_cell_bytes}}
        settings = {"port": 0, "max_request_mb": 20, "memory": 400}
        path.write_text(yaml.safe_dump({"storage": storage, "transactions": {"source": "none"}, "server": settings}))
        server = Serve(path)
        client = Client(server.port)
        running[:] = [server, client]
        return TopicClient(client, "large").create()

    yield start
    for one in reversed(running):
        one.__exit__(None, None, None)
    assert "Traceback" not in (tmp_path / "tms.log").read_text()


@pytest.mark.parametrize("assumed", [LIMIT, OPEN_LIMIT], ids=["known", "found out"])
def test_publish_above_the_cell_limit_writes_nothing(serve: Callable[[int], TopicClient], assumed: int) -> None:
    topic = serve(assumed)
    for _ in range(2):
        answer = topic.post("publish", {"messages": ["before", "x" * LIMIT]})
        assert answer.status == 413, answer.text
        assert "hbase.client.keyvalue.maxsize" in answer.text
    topic.publish("x" * (LIMIT - 2048))
    topic.publish("after")
    assert [len(payload) for payload in topic.poll()] == [LIMIT - 2048, 5]


@pytest.mark.parametrize("assumed", [LIMIT, OPEN_LIMIT], ids=["known", "found out"])
def test_store_above_the_cell_limit_writes_nothing(serve: Callable[[int], TopicClient], assumed: int) -> None:
    topic = serve(assumed)
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
            # As while another batch is being written: what comes now goes into one.
            writer._busy = True
        answers = [service.submit_publish(topic, [payload]) for payload in (b"small", b"x" * LIMIT)]
        writer._run()
        with pytest.raises(Unavailable):
            answers[0].result(PATIENCE_SECONDS)
        with pytest.raises(TooLarge):
            answers[1].result(PATIENCE_SECONDS)
        service.publish(topic, [b"small"])
        found = [one.payload for page in service.fetch(topic, FetchRequest()) for one in page]
        assert found == [b"first", b"small"]
