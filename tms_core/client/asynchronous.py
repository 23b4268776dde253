"""The client for programs with an event loop: the methods of :class:`~tms_core.client.Client` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self, overload

import httpx2

from tms_core.client.consume.consuming import FAILED, IDLE, ReadPlan
from tms_core.client.consume.iterators import AsyncConsumption, AsyncMessages
from tms_core.client.contexts import AsyncTransactionContext
from tms_core.client.producer import AsyncProducer, Instance
from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Topic, topic_id
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.endpoint import Endpoint, Options, Token, Transactions, service_at
from tms_core.client.protocol.http import AsyncPause, LoopWire, pause_in_loop
from tms_core.client.protocol.messages import Start
from tms_core.client.protocol.values import Retry
from tms_core.client.publish.background import BackgroundTask
from tms_core.client.publish.buffer import OnDelivery, PublishFigures
from tms_core.client.sync import DEFAULT_TRANSACTIONS, DEFAULT_URL
from tms_core.client.topics import AsyncTopics
from tms_core.client.transactions.partitions import Key, without_key
from tms_core.client.transactions.transaction import publish, publish_in
from tms_core.client.work import AsyncGroupWork, Worker, WorkOptions, reading
from tms_core.messaging.model import RollbackRange
from tms_core.transaction.model import Transaction


class AsyncClient(AsyncTopics):
    """A client of a messaging server and its transaction service for one event loop, whose tasks may share it.

    Threads of the client call the transaction service; they start with the first transaction and stop with the client.

    Args:
        url, token, token_file, transactions, options, transport: as of ``Client``.
        pause: a function that waits for an event, with a timeout in seconds.

    Raises:
        ConfigurationError: the URL or the address is invalid, or both a token and a token file are set.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        token: str | Callable[[], str] | None = None,
        token_file: Path | str | None = None,
        transactions: Transactions = DEFAULT_TRANSACTIONS,
        options: Options | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        pause: AsyncPause = pause_in_loop,
    ) -> None:
        options = options or Options()
        endpoint = Endpoint(url, Token(token, token_file), options)
        self._wire = LoopWire(endpoint, transport, pause)
        self._transactions = service_at(transactions, options.timeouts)
        self._core = Core(self._wire, self._transactions, options)
        self._background = BackgroundTask(self._core, options)

    def __repr__(self) -> str:
        return f"<AsyncClient {self._wire.endpoint}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Publish queued messages and close connections, as :meth:`Client.close`; call it in the loop of the client."""
        self._wire.settle()
        try:
            await self._background.close()
        finally:
            await self._wire.close()
            self._transactions.close()

    # --- messages ----------------------------------------------------------------------------------------------------

    @overload
    async def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        transaction: None = None,
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None: ...

    @overload
    async def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        transaction: Transaction,
        ttl: timedelta | int | str | None = None,
    ) -> RollbackRange: ...

    async def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        transaction: Transaction | None = None,
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> RollbackRange | None:
        """Publish messages in one request, as :meth:`Client.publish`."""
        if transaction is None:
            await publish(self._core, topic, messages, ttl, key)
            return None
        without_key(key)
        return await publish_in(self._core, topic, messages, transaction, ttl)

    def poll(
        self,
        topic: Topic,
        *,
        start: Start = None,
        inclusive: bool = True,
        limit: int | None = None,
        transaction: Transaction | None = None,
    ) -> AsyncMessages:
        """Read messages in order, as :meth:`Client.poll`: ``async for message in client.poll(…)``."""
        return AsyncMessages(self._core, calls.poll_on(topic, start, limit, transaction, inclusive=inclusive), limit)

    def consume(
        self,
        topic: Topic,
        *,
        start: Start = None,
        inclusive: bool = True,
        consumer: str | None = None,
        read: str = "uncommitted",
        idle: Retry = IDLE,
        failed: Retry = FAILED,
        wait_seconds: int | None = None,
    ) -> AsyncConsumption:
        """Read messages until stopped, as :meth:`Client.consume`: ``async for message in client.consume(…)``."""
        plan = ReadPlan(topic_id(topic), start, inclusive, consumer, idle, failed, wait_seconds)
        return AsyncConsumption(reading(self._core, plan, read))

    # --- in the background -------------------------------------------------------------------------------------------

    async def publish_async(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue messages, as :meth:`Client.publish_async`; wait only if the buffer is full. Keep the loop running."""
        self._wire.settle()
        await self._background.publish(topic, messages, ttl, on_delivery)

    async def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all queued messages are published, as :meth:`Client.flush`."""
        self._wire.settle()
        await self._background.flush(timeout_seconds)

    @property
    def publish_figures(self) -> PublishFigures:
        """Return counts of the messages of :meth:`publish_async`."""
        return self._background.figures

    # --- transactions ------------------------------------------------------------------------------------------------

    def transaction(self, *, timeout_seconds: int | None = None, long: bool = False) -> AsyncTransactionContext:
        """Return a transaction, as :meth:`Client.transaction`: ``async with client.transaction() as tx:``."""
        return AsyncTransactionContext(self._core, timeout_seconds, long=long)

    def producer(self, topic: Topic, name: str) -> AsyncProducer:
        """Return a producer, as :meth:`Client.producer`: ``async with client.producer(…) as producer:``."""
        return AsyncProducer(Instance(self._core, topic, name, asyncio.Lock()))

    def work(
        self,
        topic: Topic,
        group: str,
        *,
        batch: int = 500,
        order: str = "partition",
        max_deliveries: int | None = None,
        timeout_seconds: int | None = None,
        idle_seconds: float | None = None,
    ) -> AsyncGroupWork:
        """Work through a topic, as :meth:`Client.work`: ``async for tx, batch in client.work(…)``."""
        options = WorkOptions(batch, order, max_deliveries, timeout_seconds, idle_seconds)
        return AsyncGroupWork(Worker(self._core, topic, group, options))
