"""The blocking client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import httpx2

from tms_core.client.consume.consuming import FAILED, IDLE, ReadPlan
from tms_core.client.consume.iterators import Consumption, Messages
from tms_core.client.contexts import TransactionContext
from tms_core.client.producer import Instance, Producer, ThreadLock
from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Topic, topic_id
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.endpoint import Endpoint, Options, Token, Transactions, service_at
from tms_core.client.protocol.http import BlockingWire, Pause
from tms_core.client.protocol.messages import Start
from tms_core.client.protocol.values import Retry
from tms_core.client.protocol.wire import run
from tms_core.client.publish.background import BackgroundThread
from tms_core.client.publish.buffer import OnDelivery, PublishFigures
from tms_core.client.topics import Topics
from tms_core.client.transactions.partitions import Key, without_key
from tms_core.client.transactions.transaction import publish, publish_in
from tms_core.client.work import GroupWork, Worker, WorkOptions, reading
from tms_core.messaging.model import RollbackRange
from tms_core.transaction.model import Transaction

#: The default addresses of ``tms serve``.
DEFAULT_URL = "http://127.0.0.1:11015"
DEFAULT_TRANSACTIONS = "127.0.0.1:15165"


class Client(Topics):
    """A client of a messaging server and its transaction service.

    Threads may share a client, which has one connection pool. An iterator over messages, or a transaction, belongs to
    the thread that created it.

    Args:
        url: the URL of the server, or the URLs of several servers of the same topics; the client switches to the next
            server if a server does not respond or is unavailable.
        token: the bearer token, or a function that returns the token and is called for each request.
        token_file: a file with the token, which is read for each request.
        transactions: ``HOST:PORT`` of the transaction service, or of several services of the same transactions. The
            client connects with the first transaction, and switches to the next service after a failure.
        options: timeouts, limits, retries, the buffer, TLS and hooks.
        transport: a transport of the HTTP library in place of the network (:mod:`tms_core.client.testing`).
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
        transport: httpx2.BaseTransport | None = None,
        pause: Pause = threading.Event.wait,
    ) -> None:
        options = options or Options()
        endpoint = Endpoint(url, Token(token, token_file), options)
        self._wire = BlockingWire(endpoint, transport, pause)
        self._transactions = service_at(transactions, options.timeouts)
        self._core = Core(self._wire, self._transactions, options)
        self._background = BackgroundThread(self._core, options)

    def __repr__(self) -> str:
        return f"<Client {self._wire.endpoint}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Publish queued messages for at most ``Timeouts.close_seconds``, and close all connections.

        Raises:
            NotPublished: some messages were not published; the outcome of the last batch is unknown.
        """
        try:
            self._background.close()
        finally:
            run(self._wire.close())
            self._transactions.close()

    # --- messages ----------------------------------------------------------------------------------------------------

    @overload
    def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        transaction: None = None,
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None: ...

    @overload
    def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        transaction: Transaction,
        ttl: timedelta | int | str | None = None,
    ) -> RollbackRange: ...

    def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        transaction: Transaction | None = None,
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> RollbackRange | None:
        """Publish messages in one request; they are durable on return.

        Args:
            topic: the destination.
            messages: the payloads, in order. In a transaction, an empty list publishes its stored payloads.
            transaction: the transaction of the messages; omit it in the block of :meth:`transaction`.
            ttl: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.
            key: the key of the messages. In a topic with partitions, messages with the same key go to the same
                partition, in order; without a key, to each partition in turn. For a topic with routes, a key for each
                route; the copies are published in one transaction. Cannot be combined with ``transaction``.

        Returns:
            In a transaction, the written rows for :meth:`rollback`; otherwise None.

        Raises:
            TopicNotFound: the topic does not exist.
            BadRequest: no message, a message that is not bytes, or a request that is too large for the server.
            Unavailable: nothing was published; all attempts failed.
            Unanswered: the messages may be published. The client does not repeat the request, because that could
                publish them twice.
        """
        if transaction is None:
            run(publish(self._core, topic, messages, ttl, key))
            return None
        without_key(key)
        return run(publish_in(self._core, topic, messages, transaction, ttl))

    def poll(
        self,
        topic: Topic,
        *,
        start: Start = None,
        inclusive: bool = True,
        limit: int | None = None,
        transaction: Transaction | None = None,
    ) -> Messages:
        """Read messages in order, as a stream, with constant memory.

        Args:
            topic: the topic.
            start: the id of a message, a time with a time zone, or None for the first message.
            inclusive: whether to return the message with the id ``start``, or the messages of that millisecond.
            limit: the maximum number of messages; None: all current messages.
            transaction: the reading transaction, which sees only messages that were committed before it; None: all
                messages, including rolled back messages.

        Returns:
            An iterator. Use it in a ``with`` block, which returns its connection to the pool even after a ``break``.
            The request is sent, and its errors are raised, with the first message.

        Raises:
            BadRequest: the limit or the start is invalid.
            TopicNotFound: the topic does not exist.
            Unanswered: the response is incomplete; poll again after the last message.
        """
        return Messages(self._core, calls.poll_on(topic, start, limit, transaction, inclusive=inclusive), limit)

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
    ) -> Consumption:
        """Read messages in order until stopped: the current messages, then each new message.

        Without messages, the server responds when a message arrives. While messages are undecided, or the server does
        not respond, the client polls again with increasing pauses.

        Args:
            topic: the topic.
            start, inclusive: the start, as of :meth:`poll`.
            consumer: the name of the consumer whose position the server stores; reading continues after the stored
                position. The client stores the position when the program requests the next batch. After a crash, a
                program reads some messages again (at-least-once delivery).
            read: the messages to read. ``uncommitted``: all messages, including messages that are or may be rolled
                back. ``committed``: committed messages in the order of the topic; an undecided message blocks later
                messages. ``unordered``: committed messages as soon as they are decided; it requires a consumer, which
                becomes a consumer group with its state at the server, and ignores ``start`` and pauses. ``committed``
                and ``unordered`` need the transaction service.
            idle, failed: the pauses; their number of attempts is ignored.
            wait_seconds: the maximum time that the server waits before it sends an empty response, at most 60; None: 5.
                ``stop()`` in another thread takes effect within this time.

        Returns:
            An iterator. Use it in a ``with`` block, which stores the position at its exit. ``stop()`` stops it.

        Raises:
            TopicNotFound, BadRequest, Unauthorized, Forbidden: during the iteration; the client retries temporary
                errors.
        """
        plan = ReadPlan(topic_id(topic), start, inclusive, consumer, idle, failed, wait_seconds)
        return Consumption(reading(self._core, plan, read))

    # --- in the background -------------------------------------------------------------------------------------------

    def publish_async(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue messages for publishing in the background, in batches and in order; see ``Options.buffer``.

        A batch without a response is repeated for ``Buffer.delivery_seconds``. Therefore a message may be published
        twice, and no message is lost while the server is down for less than that. The client logs and counts
        unpublished messages, and :meth:`flush` and :meth:`close` raise an error for them.

        Args:
            topic: the destination.
            messages: the payloads, in order.
            ttl: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.
            on_delivery: called once for each message before :meth:`flush` returns, with the payload, and with None if
                the message is durable, or else the error (:class:`BufferFull`: the buffer was full). The publishing
                thread usually calls it, so it must return quickly.

        Raises:
            BadRequest: the topic's name is invalid, or a payload is not bytes; no message is queued.
            BufferFull: with ``WhenFull.RAISE``, the buffer is full; the messages before this message are queued.
            ClientClosed: the client is closed.
        """
        self._background.publish(topic, messages, ttl, on_delivery)

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all queued messages are durable.

        Args:
            timeout_seconds: the maximum wait; None: unlimited.

        Raises:
            NotPublished: some messages failed since the last call, or the timeout is over.
        """
        self._background.flush(timeout_seconds)

    @property
    def publish_figures(self) -> PublishFigures:
        """Return counts of the messages of :meth:`publish_async`."""
        return self._background.figures

    # --- transactions ------------------------------------------------------------------------------------------------

    def transaction(self, *, timeout_seconds: int | None = None, long: bool = False) -> TransactionContext:
        """Return the context of a transaction: ``with client.transaction() as tx:``.

        The transaction starts with the block. When the block exits, its messages and the writes of its participants
        become visible together, or not at all. Readers in other transactions do not see them earlier. After a request
        without a response, the client invalidates the transaction instead of aborting it; see
        :mod:`tms_core.client.transactions.transaction`.

        Args:
            timeout_seconds: the timeout of the transaction; None: the service's default (30).
            long: whether to start a long transaction (a day); after a failure, it is always invalidated.

        Raises:
            TransactionError: the context was used before; each context is for one transaction.
            Conflict: another transaction changed the same keys; this transaction is rolled back.
            NotInProgress: the transaction has timed out.
            Invalidated: the transaction was invalidated; none of its writes are or will be visible.
            OutcomeUnknown: no server responds; either the whole transaction is committed, or it never will be.
            PostCommitFailed: the transaction is committed, but a later step failed, such as storing a position.
            MessagingError: a message could not be published; the transaction is rolled back.
        """
        return TransactionContext(self._core, timeout_seconds, long=long)

    def producer(self, topic: Topic, name: str) -> Producer:
        """Return a producer by name: ``with client.producer("default:bills", "importer-7") as producer:``.

        Each publish takes effect once, even if requests are repeated. The block starts with a registration, which
        fences older instances of the producer, and invalidates their open transactions. ``producer.previous`` has the
        outcome of their last transaction.

        Args:
            topic: the topic that the producer belongs to; the producer may also publish to other topics.
            name: a name that stays the same at each start of the program; each concurrent program needs another name.

        Raises:
            BadRequest: the name is invalid.
            TopicNotFound: the topic does not exist, at the start of the block.
        """
        return Producer(Instance(self._core, topic, name, ThreadLock()))

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
    ) -> GroupWork:
        """Consume a topic as a member of a consumer group, exactly once: ``for tx, batch in client.work(…):``.

        Each batch comes with its transaction; the request for the next batch commits it. An error in the loop, or an
        exit from the loop, rolls the batch back, and the server delivers its messages again to any worker. ``stop()``
        stops the loop after the current batch. Workers may start and stop at any time. While the topic has no messages,
        the server waits, and no transaction is open.

        Args:
            topic: the topic; or a pattern of several topics: ``default:orders-*``. Each worker reads the unclaimed
                partitions of a topic, starting with its last partition.
            group: the name of the group; a new consumer starts at the first message of the topic.
            batch: the maximum number of messages in a transaction; the server sends at most about 4 MB.
            order: ``partition``: in the order of the topic, one batch at a time. ``none``: like a work queue, several
                workers share the messages.
            max_deliveries: the maximum number of deliveries of a message. The server delivers messages of a failed
                batch in smaller batches, and finally alone. After this number of deliveries, the client moves the
                message to the topic ``TOPIC-dead``, which it creates. None: unlimited.
            timeout_seconds: the timeout of a batch, from the commit of the previous batch on; None: the default of the
                transaction service (30).
            idle_seconds: the time without messages after which the loop stops, with an error if no server responds
                then; None: never.

        Returns:
            An iterable. Temporary errors (a server that is down, a transaction that timed out) are logged and retried.

        Raises:
            BadRequest: a number or the order is invalid, or the topic's name is too long for ``-dead``. With a pattern,
                also during the iteration.
            TopicNotFound, Unauthorized, Forbidden: during the iteration.
        """
        options = WorkOptions(batch, order, max_deliveries, timeout_seconds, idle_seconds)
        return GroupWork(Worker(self._core, topic, group, options))
