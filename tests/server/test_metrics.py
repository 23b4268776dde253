"""The server's metrics of topics, transactions and claims, with a limited number of series."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tests.builders import NOW_MS
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.consumers.claim_rows import all_claims
from tms_core.errors import StoreError
from tms_core.messaging.groups.claims import GroupPoll, Order
from tms_core.messaging.service import MessagingService
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.rowkey import MessageId
from tms_core.server.managing import LATE_SECONDS, MAX_SERIES, UNDECIDED, TransactionMetrics, find_undecided
from tms_core.server.metrics import BUCKETS, MAX_TOPICS, ServerMetrics
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

ORDERS = TopicId("default", "orders")


class Server:
    """A service and its transaction manager at a manual clock."""

    def __init__(self) -> None:
        self.clock, self.store, self.side = ManualClock(NOW_MS), MemoryStore(), MemorySide()
        self.manager = TransactionManager(MemoryStorage(), self.clock)
        self.service = MessagingService(self.store, self.clock, side=self.side, transactions=self.manager)
        self.service.create_topic(ORDERS)

    def samples(self) -> dict[tuple[str, ...], float]:
        collector = TransactionMetrics(self.manager, self.side, self.clock)
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in collector.collect()
            for sample in family.samples
        }


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.service.close()
    server.manager.close()


def test_late_transaction_with_messages_has_a_series_until_it_ends(server: Server) -> None:
    pointer = server.manager.start_long("import").transaction_id
    server.service.publish(ORDERS, [b"one"], pointer=pointer)
    assert server.samples() == {("tms_open_claims",): 0}
    server.clock.advance(LATE_SECONDS * 1000)
    assert server.samples()[UNDECIDED, "default", "orders"] == NOW_MS / 1000
    server.manager.invalidate(pointer)
    assert server.samples() == {("tms_open_claims",): 0}


def test_series_of_late_transactions_are_the_oldest_up_to_the_limit(server: Server) -> None:
    topics = [TopicId("default", f"t{number}") for number in range(MAX_SERIES + 5)]
    for topic in topics:
        server.service.create_topic(topic)
        for _ in range(2):
            server.service.publish(topic, [b"one"], pointer=server.manager.start_long().transaction_id)
        server.clock.advance(1)
    server.clock.advance(LATE_SECONDS * 1000)
    shown = {name[-1]: at for name, at in server.samples().items() if name[0] == UNDECIDED}
    assert list(shown) == [topic.topic for topic in topics[:MAX_SERIES]]
    assert shown["t7"] == (NOW_MS + 7) / 1000


def test_metrics_of_late_transactions_show_no_ids(server: Server) -> None:
    transactions = [server.manager.start_long(), server.manager.start_long()]
    for transaction in transactions:
        server.service.publish(ORDERS, [b"one"], pointer=transaction.transaction_id)
    server.service.consumers.put(ORDERS, "billing", MessageId(0, 0))
    server.service.groups.poll(ORDERS, "billing", GroupPoll(transactions[0], 1, order=Order.NONE))
    server.clock.advance(LATE_SECONDS * 1000)
    registry = CollectorRegistry()
    registry.register(TransactionMetrics(server.manager, server.side, server.clock))
    shown = generate_latest(registry).decode()
    assert UNDECIDED in shown
    assert not any(str(transaction.transaction_id) in shown for transaction in transactions)


def test_restart_finds_where_open_transactions_published(server: Server) -> None:
    pointer = server.manager.start_long().transaction_id
    server.clock.advance(5)
    with MessagingService(server.store, server.clock, side=MemorySide()) as before:
        before.publish(ORDERS, [b"one", b"two"], pointer=pointer)
        before.publish(ORDERS, [b"three"])
    assert not server.manager.published()
    find_undecided(server.store, MemorySide(), server.manager)
    assert server.manager.published() == {pointer: {str(ORDERS): NOW_MS + 5}}


def test_metrics_with_a_damaged_claim_still_show_late_transactions(server: Server) -> None:
    transaction = server.manager.start_long("import")
    server.service.publish(ORDERS, [b"one", b"two"], pointer=transaction.transaction_id)
    server.service.consumers.put(ORDERS, "billing", MessageId(0, 0))
    server.service.groups.poll(ORDERS, "billing", GroupPoll(transaction, 1, order=Order.NONE))
    server.clock.advance(LATE_SECONDS * 1000)
    [(key, _, _)] = all_claims(server.side)
    server.side.put([(key, b"damaged")])
    assert server.samples() == {(UNDECIDED, "default", "orders"): NOW_MS / 1000}


def test_open_claims_count_only_transactions_in_progress(server: Server) -> None:
    server.service.publish(ORDERS, [b"one", b"two"])
    server.service.consumers.put(ORDERS, "billing", MessageId(0, 0))
    first, second = server.manager.start_short(), server.manager.start_short()
    for transaction in (first, second):
        server.service.groups.poll(ORDERS, "billing", GroupPoll(transaction, 1, order=Order.NONE))
    began = first.transaction_id // 1_000_000 / 1000
    assert server.samples() == {("tms_open_claims",): 2, ("tms_oldest_open_claim_timestamp_seconds",): began}
    server.manager.invalidate(first.transaction_id)
    assert server.samples()["tms_open_claims",] == 1


def test_topics_beyond_the_limit_of_series_share_one(server: Server) -> None:
    metrics = ServerMetrics(CollectorRegistry(), server.service)
    for number in range(MAX_TOPICS + 5):
        metrics.published(TopicId("default", f"t{number}"), 3, 0.001)
    text = metrics.text("")[0].decode()
    series = [line for line in text.splitlines() if line.startswith("tms_topic_messages_published_total{")]
    assert len(series) == MAX_TOPICS + 1
    assert series[-1].endswith(" 15.0")
    assert "tms_messages_published_total 615.0" in text


def published_by_topic(metrics: ServerMetrics) -> dict[str, float]:
    return {
        sample.labels["topic"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "tms_topic_messages_published_total"
    }


def test_metrics_of_deleted_topics_are_removed_and_free_their_places(server: Server) -> None:
    metrics = ServerMetrics(CollectorRegistry(), server.service)
    topics = [TopicId("default", f"t{number}") for number in range(MAX_TOPICS + 1)]
    for topic in topics:
        server.service.create_topic(topic)
        metrics.published(topic, 3, 0.001)
    assert published_by_topic(metrics)["_other"] == 3
    server.service.delete_topic(topics[0])
    # As CDAP or another server deletes a topic.
    TopicRegistry(server.store.metadata, 1).delete(topics[1])
    metrics.drop_deleted_topics()
    metrics.published(topics[-1], 4, 0.001)
    found = published_by_topic(metrics)
    assert (len(found), found["_other"], found[topics[-1].topic]) == (MAX_TOPICS, 3, 4)
    assert not {"t0", "t1"} & found.keys()
    assert b'topic="t0"' not in metrics.text("")[0]


def test_metrics_of_topics_that_cannot_be_read_stay(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = ServerMetrics(CollectorRegistry(), server.service)
    metrics.published(ORDERS, 3, 0.001)
    row = server.store.metadata.get(ORDERS.prefix)
    assert server.store.metadata.compare_and_set(ORDERS.prefix, row, b"{")
    metrics.drop_deleted_topics()
    assert published_by_topic(metrics) == {"orders": 3}
    monkeypatch.setattr(server.store.metadata, "get", raising(StoreError("gone")))
    with pytest.raises(StoreError, match="gone"):
        metrics.drop_deleted_topics()
    assert published_by_topic(metrics) == {"orders": 3}


def test_metrics_while_the_store_hangs_take_one_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = ServerMetrics(CollectorRegistry(), server.service)
    metrics.published(ORDERS, 3, 0.001)
    server.service.delete_topic(ORDERS)
    reads, get_row = list[bytes](), server.store.metadata.get

    def get(key: bytes) -> bytes | None:
        reads.append(key)
        metrics.drop_deleted_topics()
        return get_row(key)

    monkeypatch.setattr(server.store.metadata, "get", get)
    metrics.drop_deleted_topics()
    assert (len(reads), published_by_topic(metrics)) == (1, {})


def test_requests_counted_as_plain_numbers_read_like_observed_requests(server: Server) -> None:
    metrics = ServerMetrics(CollectorRegistry(), server.service)
    expected = Histogram("x", "The same, observed one by one.", ["route"], buckets=BUCKETS)
    for turn, seconds in enumerate([0.0, 0.0005, 0.0006, 0.25, 10.0, 11.0, 0.25]):
        metrics.request("publish", 200, seconds)
        expected.labels("publish").observe(seconds)
        for reading in range(2):
            found = {
                sample.labels.get("le", sample.name.rsplit("_", 1)[-1]): sample.value
                for family in metrics.registry.collect()
                for sample in family.samples
                if sample.name.startswith("tms_request_duration_seconds_") and "created" not in sample.name
            }
            [family] = expected.collect()
            wanted = {
                sample.labels.get("le", sample.name.rsplit("_", 1)[-1]): sample.value
                for sample in family.samples
                if "created" not in sample.name
            }
            assert found == pytest.approx(wanted), reading
        counted = metrics.registry.get_sample_value("tms_requests_total", {"route": "publish", "code": "200"})
        assert counted == turn + 1
