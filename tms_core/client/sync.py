"""The blocking client: every method returns when it has finished."""

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

    Threads may share a client; it has one pool of connections. An iterator over messages or a transaction belongs to
    the thread that created it.

    Args:
        url: the URL of the server, or the URLs of several servers of the same topics; the client switches to the next
            one if a server does not respond or is unavailable.
        token: the bearer token, or a function that returns it and is called for each request.
        token_file: a file that contains the token instead; read for each request.
        transactions: ``HOST:PORT`` of the transaction service, or of several servers of the same transactions; the
            client connects with the first transaction, and switches to the next server if one fails.
        options: timeouts, limits, retries, the buffer, TLS and hooks.
        transport: the library's transport instead of the network (:mod:`tms_core.client.testing`).
        pause: a function that waits for an event at most so many seconds.

    Raises:
        ConfigurationError: the URL or the address is invalid, or both a token and a file are given.
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
        """Publish queued messages for at most ``Timeouts.close_seconds``, then close connections.

        Raises:
            NotPublished: some messages were not published; the last batch may have arrived.
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
        """Publish messages in one request; they are on disk when this returns.

        Args:
            topic: the destination.
            messages: the payloads, in order. An empty list, in a transaction, publishes its stored payloads.
            transaction: the transaction of the messages. With :meth:`transaction`, leave it out.
            ttl: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.
            key: the key of the messages. In a topic with partitions, messages with the same key go to the same
                partition, in order; without a key, the partitions take turns. For a topic with routes, a key for each
                route; the copies are published in one transaction. Not together with ``transaction``.

        Returns:
            In a transaction, the written rows, for :meth:`rollback`; otherwise None.

        Raises:
            TopicNotFound: the topic does not exist.
            BadRequest: there is no message, a message is not bytes, or the request is too large for the server.
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
        """Read messages in order, as a stream, in constant memory.

        Args:
            topic: the topic.
            start: a message's id, a time with its zone, or None for the first message.
            inclusive: whether to return the message with the id ``start``, or the messages of that millisecond.
            limit: the most messages to read; None: all current messages.
            transaction: the reading transaction, which sees only messages committed for it; None: all messages,
                including rolled back messages.

        Returns:
            An iterator. Use it in a ``with`` block, so that its connection is returned even after a ``break``. The
            first message sends the request, and raises its errors.

        Raises:
            BadRequest: the limit or the start is invalid.
            TopicNotFound: the topic does not exist.
            Unanswered: the response was cut short; poll again after the last message.
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

        Without messages, the server waits and responds when a message arrives. While messages are undecided, or the
        server does not respond, the client polls again with growing pauses.

        Args:
            topic: the topic.
            start, inclusive: the start, as of :meth:`poll`.
            consumer: the name under which the position is stored; reading continues after a stored position. The client
                stores it when the program requests the next batch. A program that dies in between reads some messages
                again (at least once).
            read: the kind of messages. ``uncommitted``: all messages, including messages that are or may be rolled
                back. ``committed``: committed messages in the order of the topic; an undecided message blocks the
                messages after it. ``unordered``: committed messages as soon as they are decided. It requires a
                consumer, which becomes a consumer group with its state at the server, and ignores ``start`` and pauses.
                The last two need the transaction service.
            idle, failed: the pauses; their number of attempts is ignored.
            wait_seconds: how long the server waits before it sends an empty response, at most 60; None: 5. Another
                thread's ``stop()`` takes effect within this time.

        Returns:
            An iterator. Use it in a ``with`` block, which stores the position when it is left. ``stop()`` stops it.

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

        A batch without a response is sent again for ``Buffer.delivery_seconds``. Therefore a message may be published
        twice, and no message is lost if the server is down for less than that. The client logs and counts unpublished
        messages, and :meth:`flush` and :meth:`close` raise.

        Args:
            topic: the destination.
            messages: the payloads, in order.
            ttl: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.
            on_delivery: called once for each message before :meth:`flush` returns, with the payload, and with None once
                the message is on the server's disk, or else the error (:class:`BufferFull`: no room). The publishing
                thread usually calls it, so it must return quickly.

        Raises:
            BadRequest: the topic's name is invalid, or a payload is not bytes; no message is queued.
            BufferFull: a message has no room, with ``WhenFull.RAISE``; the messages before it are queued.
            ClientClosed: the client is closed.
        """
        self._background.publish(topic, messages, ttl, on_delivery)

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all messages queued until now are on the server's disk.

        Args:
            timeout_seconds: the longest wait; None: no limit.

        Raises:
            NotPublished: some messages failed since the last call, or the time is over.
        """
        self._background.flush(timeout_seconds)

    @property
    def publish_figures(self) -> PublishFigures:
        """Return counts of the messages of :meth:`publish_async`."""
        return self._background.figures

    # --- transactions ------------------------------------------------------------------------------------------------

    def transaction(self, *, timeout_seconds: int | None = None, long: bool = False) -> TransactionContext:
        """Return the context of a transaction: ``with client.transaction() as tx:``.

        The transaction starts with the block. When the block is left, its messages and the writes of its participants
        become visible together, or not at all. Readers in other transactions do not see them earlier. After a request
        without a response, the client invalidates the transaction instead of aborting it; see
        :mod:`tms_core.client.transactions.transaction`.

        Args:
            timeout_seconds: its timeout; None: the service's default (30).
            long: whether to start a long transaction (a day); after a failure, it is always invalidated.

        Raises:
            TransactionError: the context was entered before; each context is for one transaction.
            Conflict: another transaction changed the same keys; this transaction is rolled back.
            NotInProgress: the transaction has timed out.
            Invalidated: the transaction was invalidated; nothing of it is or will be visible.
            OutcomeUnknown: no server responds; either the whole transaction is committed, or it never will be.
            PostCommitFailed: the transaction is committed, but a later step failed, such as storing a position.
            MessagingError: a message could not be published; the transaction is rolled back.
        """
        return TransactionContext(self._core, timeout_seconds, long=long)

    def producer(self, topic: Topic, name: str) -> Producer:
        """Return a producer by name: ``with client.producer("default:bills", "importer-7") as producer:``.

        Each publish takes effect once, even if requests are repeated. The block starts with a registration. From then
        on, the server rejects older instances of the same producer, and their open transactions are invalidated.
        ``producer.previous`` has the outcome of their last transaction.

        Args:
            topic: the producer's own topic; it may publish to other topics, too.
            name: a name that stays the same when the program restarts; each concurrent program needs its own.

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
        """Work through a topic as a member of a consumer group, exactly once: ``for tx, batch in client.work(…):``.

        Each batch comes with its transaction; the request for the next batch commits it. An error in the loop, or
        leaving it, rolls the batch back, and the server delivers its messages again to any worker. ``stop()`` stops the
        loop after the current batch. Workers may start and stop at any time. While there are no messages, the server
        waits, and no transaction is open.

        Args:
            topic: the topic; or a pattern of several: ``default:orders-*``. Each worker reads the free partitions of a
                topic, starting with the last one it read.
            group: the group's name; a new consumer starts at the first message of the topic.
            batch: the most messages in a transaction; the server sends about 4 MB at once.
            order: ``partition``: in the order of the topic, one batch at a time. ``none``: as a work queue, several
                workers share the messages.
            max_deliveries: the highest number of deliveries of a message. The server delivers messages of a failed
                batch in smaller batches, at last alone. After this number of deliveries, the message moves to the topic
                ``TOPIC-dead``, which the client creates. None: no limit.
            timeout_seconds: the timeout of a batch, from the commit of the previous batch on; None: the default of the
                transaction service (30).
            idle_seconds: the time without messages after which the loop stops, with an error if no server responds
                then; None: never.

        Returns:
            An iterable. Temporary errors (a server that is down, a transaction that timed out) are logged and retried.

        Raises:
            BadRequest: a number or the order is invalid, or the topic's name is too long for ``-dead``.
            TopicNotFound, Unauthorized, Forbidden: during the iteration; with a pattern BadRequest, too.
        """
        options = WorkOptions(batch, order, max_deliveries, timeout_seconds, idle_seconds)
        return GroupWork(Worker(self._core, topic, group, options))
