"""A server inside a test: messages and transactions in memory, on a free port of this machine.

    with in_process() as server, server.client() as client:
        client.create_topic("default:orders")

The real server runs in a separate thread; any number of clients and threads can use it. The pytest fixture
``tms_server`` starts a server for each test that requests it; enable it in conftest.py with
``pytest_plugins = ["tms_core.client.testing"]``. Calls of the transaction service stay in this process, but use the
encoding of the real service. The server and its threads stop with the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from prometheus_client import CollectorRegistry

from tms_core.client.asynchronous import AsyncClient
from tms_core.client.protocol.endpoint import Options
from tms_core.client.sync import Client
from tms_core.clock import Clock, ManualClock, SystemClock
from tms_core.messaging.service import MessagingService
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.app import make_app
from tms_core.server.rest.context import ServerContext
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import Fields, MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc.calls import answer
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import result_of
from tms_core.web.listener import Listener, ListenerOptions

__all__ = ["InProcess", "in_process"]

#: The number of threads for polls.
_THREADS = 4
_OPTIONS = {field.name for field in fields(Options)}
_MAX_REQUEST_BYTES = 10 << 20
#: A stop waits at most a second for responses that no client reads.
_LISTENER = ListenerOptions(stop_seconds=1)


@dataclass(frozen=True)
class InProcess:
    """A server in this process.

    Attributes:
        url: the URL of the server (``Client(server.url, transactions=server.transactions())``).
        service, store: the messaging service and its store, which tests may inspect.
        manager: the transaction manager. Transactions time out only when a test calls ``manager.expire()``.
        clock: the clock of the server.
    """

    url: str
    service: MessagingService
    store: Store
    manager: TransactionManager
    clock: Clock

    def transactions(self) -> TransactionClient:
        """Return a client of the transaction service."""
        return TransactionClient("in this process", connect=lambda _, __: _Handover(self.manager))

    def client(self, **options: Any) -> Client:
        """Return a client of this server; the options are the arguments of ``Client`` and the fields of ``Options``."""
        return Client(**self._client_arguments(options))

    def async_client(self, **options: Any) -> AsyncClient:
        """Return an asynchronous client of this server, as :meth:`client`."""
        return AsyncClient(**self._client_arguments(options))

    def _client_arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a client; single fields of ``Options`` are merged into it."""
        single = {name: options.pop(name) for name in _OPTIONS & options.keys()}
        client_options = replace(options.pop("options", Options()), **single)
        return {"url": self.url, "transactions": self.transactions(), "options": client_options, **options}


@contextmanager
def in_process(*, clock: Clock | None = None, store: Store | None = None) -> Iterator[InProcess]:
    """Run a server while the block runs.

    Args:
        clock: the clock of the server; the test advances a ``ManualClock``. None: the system's clock.
        store: the store of the messages, which the caller closes; None: a store in memory.
    """
    clock, store = clock or SystemClock(), store or MemoryStore()
    with (
        TransactionManager(MemoryStorage(), clock) as manager,
        MessagingService(store, clock, side=MemorySide(), transactions=manager) as service,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="in-process") as threads,
    ):
        metrics = ServerMetrics(CollectorRegistry(), service)
        context = ServerContext(service, threads, metrics, _MAX_REQUEST_BYTES)
        listener = Listener(make_app(context), "127.0.0.1", 0, options=_LISTENER, on_stop=context.waiting.close)
        listener.start()
        try:
            yield InProcess(listener.url, service, store, manager, clock)
        finally:
            listener.stop()


class _Handover:
    """A connection to a manager in this process (:class:`tms_core.transaction.rpc.connection.RpcConnection`)."""

    def __init__(self, manager: TransactionManager) -> None:
        self._manager = manager
        self._number = 0

    def call(self, name: str, fields: tuple[bytes, ...], seconds: float) -> Fields:
        self._number += 1
        call = wire.message(MessageKind.CALL, name, self._number, *fields)
        return result_of(name, self._number, answer(self._manager, call))

    def is_reusable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no connection is open."""


try:
    import pytest
except ImportError:
    # An application without pytest can still use in_process.
    pass
else:
    __all__ += ["tms_server"]

    @pytest.fixture
    def tms_server() -> Iterator[InProcess]:
        """Yield a server in memory, with a clock that the test advances (``tms_server.clock``)."""
        with in_process(clock=ManualClock(SystemClock().now_ms())) as server:
            yield server
