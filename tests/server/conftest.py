"""Fixtures of a server in this process, on a free port, with a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.kit.servers import TwoServers
from tests.server.client import Client, TopicClient
from tms_core.clock import Clock, SystemClock
from tms_core.messaging.publish.workers import EventLoopWorkers
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.server.auth.gate import Gate
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.app import make_app
from tms_core.server.rest.context import ServerContext, ThreadShares
from tms_core.server.rest.known_publish import KNOWN_HEADS
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.side import MemorySide
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.web.listener import Listener
from tms_core.web.protocol import Heads

MAX_REQUEST_BYTES = 3_000_000


@dataclass
class Serving:
    listener: Listener
    service: MessagingService
    store: Store
    metrics: ServerMetrics
    context: ServerContext

    @property
    def port(self) -> int:
        return self.listener.port


@contextmanager
def serving(
    *,
    store: Store | None = None,
    clock: Clock | None = None,
    access_log: bool = False,
    loopback: bool = True,
    cache_bytes: int = 30 << 20,
    gate: Gate | None = None,
    loop_writes: bool = False,
    transactions: TransactionManager | None = None,
    knows_heads: bool = True,
    **options: Any,
) -> Iterator[Serving]:
    """Run a server.

    Args:
        loop_writes: whether the event loop writes small batches, as in ``tms serve``.
        knows_heads: whether known heads are not parsed again, as in ``tms serve`` without an access log.
    """
    store, workers = store or MemoryStore(), EventLoopWorkers()
    service = MessagingService(
        store,
        clock or SystemClock(),
        ServiceOptions(cache_bytes=cache_bytes),
        side=MemorySide(),
        workers=workers,
        transactions=transactions,
    )
    metrics = ServerMetrics(CollectorRegistry(), service)
    with ThreadPoolExecutor(4) as threads, service:
        shares = ThreadShares(4)
        context = ServerContext(
            service,
            threads,
            metrics,
            MAX_REQUEST_BYTES,
            gate,
            thread_shares=shares,
            poll_thread_shares=shares,
            group_poll_shares=ThreadShares(4),
            **options,
        )
        app = make_app(context, loopback=loopback, access_log=access_log)
        heads: Heads | None = RecentlySet(KNOWN_HEADS) if knows_heads and not access_log else None
        listener = Listener(app, "127.0.0.1", 0, on_stop=context.waiting.close, heads=heads)
        listener.start()
        workers.alone = listener.alone if loop_writes else None
        try:
            yield Serving(listener, service, store, metrics, context)
        finally:
            listener.stop()


@pytest.fixture
def two() -> Iterator[TwoServers]:
    with closing(TwoServers()) as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving() as server:
        yield server


@pytest.fixture
def client(shared: Serving) -> Iterator[Client]:
    with Client(shared.port) as connection:
        yield connection


@pytest.fixture
def topic(client: Client, request: pytest.FixtureRequest) -> TopicClient:
    return TopicClient(client, f"t{abs(hash(request.node.nodeid))}").create()
