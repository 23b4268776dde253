"""CDAP's unchanged clients with ``tms serve``, over HTTP and Thrift."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.java import Interop
from tests.interop.program import Program, Refused
from tests.server.process import Serve, configure
from tms_core.client import Client
from tms_core.clock import ManualClock, SystemClock
from tms_core.messaging.service import MessagingService
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId


@pytest.fixture(scope="module")
def program(java: Interop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    config = configure(tmp_path_factory.mktemp("serve"), default_ttl_seconds=3600)
    with Serve(config) as server:
        with Program(java, server.port, server.transactions_port) as running:
            yield running
        server.end()


@pytest.fixture
def topic(program: Program, request: pytest.FixtureRequest) -> str:
    name: str = request.node.name[:200]
    program.call("create", name)
    return name


# --- topics ----------------------------------------------------------------------------------------------------------


def test_cdap_client_creates_updates_and_deletes_a_topic(program: Program) -> None:
    program.call("create", "life", properties={"ttl": 60, "owner": "me"})
    assert program.call("get", "life") == {"generation": "1", "owner": "me", "ttl": "60"}
    with pytest.raises(Refused, match="TopicAlreadyExists"):
        program.call("create", "life")
    program.call("update", "life", properties={"ttl": 120})
    assert program.call("get", "life") == {"generation": "1", "ttl": "120"}
    assert "life" in program.call("list")
    assert program.call("list", namespace="other") == []
    program.publish("life", b"old")
    program.call("delete", "life")
    for call in ("get", "delete", "fetch"):
        with pytest.raises(Refused, match="TopicNotFound"):
            program.call(call, "life")
    with pytest.raises(Refused, match="TopicNotFound"):
        program.publish("life", b"a")
    program.call("create", "life")
    assert program.call("get", "life") == {"generation": "2", "ttl": "3600"}
    assert program.fetch("life") == []


# --- messages --------------------------------------------------------------------------------------------------------


def test_cdap_client_fetches_published_bytes_in_order(program: Program, topic: str) -> None:
    messages = [b"a", b"", b"\xff\x00", b"x" * 100_000]
    assert program.publish(topic, *messages) is None
    assert program.publish(topic, b"last") is None
    assert program.fetch(topic) == [*messages, b"last"]


def test_cdap_client_fetches_all_chunks_of_a_long_response(program: Program, topic: str) -> None:
    messages = [number.to_bytes(4, "big") * 250 for number in range(2000)]
    program.publish(topic, *messages)
    assert program.fetch(topic) == messages


def test_cdap_client_fetches_by_id_time_and_limit(program: Program, topic: str) -> None:
    program.publish(topic, b"a", b"b", b"c", b"d")
    ids = program.ids(topic)
    assert program.fetch(topic, id=ids[1], inclusive=True) == [b"b", b"c", b"d"]
    assert program.fetch(topic, id=ids[1], inclusive=False) == [b"c", b"d"]
    assert program.fetch(topic, id=ids[3], inclusive=False) == []
    assert program.fetch(topic, limit=2) == [b"a", b"b"]
    assert program.fetch(topic, id=ids[1], inclusive=False, limit=1) == [b"c"]
    time_ms = int(ids[0][:16], 16)
    assert program.fetch(topic, time=time_ms) == [b"a", b"b", b"c", b"d"]
    assert program.fetch(topic, time=time_ms + 1) == []


def test_cdap_client_pages_through_all_stored_payloads(program: Program, topic: str) -> None:
    payloads = [bytes([number]) for number in range(10)]
    transaction = program.call("begin")
    program.call("store", topic, transaction=transaction, messages=[payload.hex() for payload in payloads[:6]])
    program.call("store", topic, transaction=transaction, messages=[payload.hex() for payload in payloads[6:]])
    assert program.fetch(topic) == []
    assert program.call("publish", topic, transaction=transaction) is not None
    program.call("commit", transaction=transaction)
    program.publish(topic, b"after")
    found: list[bytes] = []
    start: dict[str, object] = {}
    while page := program.call("fetch", topic, limit=3, **start):
        found += [bytes.fromhex(message["payload"]) for message in page]
        start = {"id": page[-1]["id"], "inclusive": False}
    assert found == [*payloads, b"after"]


# --- transactions ----------------------------------------------------------------------------------------------------


def test_cdap_client_reads_committed_messages_in_later_transaction(program: Program, topic: str) -> None:
    writing = program.call("begin")
    program.publish(topic, b"a", b"b", transaction=writing)
    concurrent_transaction = program.call("begin")
    assert program.fetch(topic, transaction=concurrent_transaction) == []
    assert program.fetch(topic, transaction=writing) == [b"a", b"b"]
    program.call("commit", transaction=writing)
    assert program.fetch(topic, transaction=concurrent_transaction) == []
    assert program.fetch(topic, transaction=program.call("begin")) == [b"a", b"b"]


def test_cdap_client_skips_rolled_back_publish_in_a_transaction(program: Program, topic: str) -> None:
    writing = program.call("begin")
    published = program.publish(topic, b"a", transaction=writing)
    assert program.publish(topic, b"b", transaction=writing) != published
    program.call("rollback", topic, published=published)
    program.call("commit", transaction=writing)
    assert program.fetch(topic, transaction=program.call("begin")) == [b"b"]
    assert program.fetch(topic) == [b"a", b"b"]


def test_cdap_client_skips_messages_of_invalid_transaction(program: Program, topic: str) -> None:
    failing, good = program.call("begin"), program.call("begin")
    program.publish(topic, b"bad", transaction=failing)
    program.publish(topic, b"good", transaction=good)
    program.call("commit", transaction=good)
    assert program.fetch(topic, transaction=program.call("begin")) == []
    program.call("invalidate", transaction=failing)
    assert program.fetch(topic, transaction=program.call("begin")) == [b"good"]


def test_cdap_publish_in_transaction_past_its_lifetime_fails(program: Program, topic: str) -> None:
    with pytest.raises(Refused, match="lifetime"):
        program.publish(topic, b"a", pointer=5)
    assert program.fetch(topic) == []


# --- producers -------------------------------------------------------------------------------------------------------


def test_cdap_client_rolls_back_negative_sequence_numbers(java: Interop, tmp_path: Path) -> None:
    ahead = ManualClock(SystemClock().now_ms() + 30_000, monotonic_ms=86_400_000)
    with (
        LevelDBStore(tmp_path / "messaging", create=True) as store,
        MessagingService(store, ahead, side=MemorySide()) as service,
    ):
        service.create_topic(TopicId("default", "high"))
        service.publish(TopicId("default", "high"), [b""] * 0x8000)
    with Serve(configure(tmp_path)) as server:
        with (
            Program(java, server.port, server.transactions_port) as program,
            Client(server.url, transactions=server.transactions) as client,
            client.producer("default:high", "one") as producer,
        ):
            writing = program.call("begin")
            published = program.publish("high", b"never", b"never", transaction=writing)
            program.call("rollback", "high", published=published)
            program.call("commit", transaction=writing)
            for number in range(40):
                producer.publish([b"%d" % number])
            found = program.fetch("high", transaction=program.call("begin"), limit=40_000)
            assert found[0x8000:] == [b"%d" % number for number in range(40)]
            ids = program.ids("high", limit=40_000)
            high = [at for at, id_ in enumerate(ids) if id_[16:20] >= "8000"]
            assert len(high) > 16
            assert program.ids("high", id=ids[high[-1]], inclusive=False) == ids[high[-1] + 1 :]
        server.end()
    with Program(java, str(tmp_path / "messaging")) as cdap:
        assert cdap.ids("high", limit=40_000) == ids
        assert cdap.ids("high", id=ids[high[2]], inclusive=True) == ids[high[2] :]
