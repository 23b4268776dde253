"""The client for programs that wait: every method returns when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import httpx2

from tms_core.client.consume.consuming import FAILED, IDLE, ReadPlan
from tms_core.client.consume.iterators import Consumption, Messages
from tms_core.client.contexts import TransactionContext, standing_for
from tms_core.client.producer import Producer
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
from tms_core.client.transactions.partitions import Key, Rotations, without_key
from tms_core.client.transactions.transaction import ClientTransaction, publish, publish_in, store_in
from tms_core.client.work import GroupWork, Worker, WorkOptions, beginning, reading
from tms_core.messaging.model import RollbackRange
from tms_core.transaction.model import Transaction

#: Where ``tms serve`` listens unless told otherwise.
DEFAULT_URL = "http://127.0.0.1:11015"
DEFAULT_TRANSACTIONS = "127.0.0.1:15165"


class Client(Topics):
    """A messaging server, and the transaction service beside it.

    Threads may share a client: it has one pool of connections, and nothing of one call is seen by another. What it
    gives out (an iterator over messages, a transaction) belongs to the thread that asked for it.

    Args:
        url: of the server; or the URLs of several servers of the same topics; the client tries the next one if one does
            not respond or is unavailable.
        token: the bearer token, or what returns it; asked for each request.
        token_file: a file that holds it instead; read for each request.
        transactions: ``HOST:PORT`` of the transaction service, used from the first transaction on; or of several
            servers that manage the same transactions, of which one that fails is left for the next.
        options: how it works: timeouts, limits, repetition, the buffer, TLS, a hook.
        transport: how requests get there, instead of the network (:mod:`tms_core.client.testing`).
        pause: how to wait: a function of an event that interrupts the pause, and seconds.

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
        self._core = Core(self._wire, options.retry, options.random, options.running, options.measure)
        self._transactions = service_at(transactions, options.timeouts)
        self._limits = options.limits
        self._rotations: Rotations = {}
        self._background = BackgroundThread(self._core, options.buffer, options.limits, options.timeouts.close_seconds)

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

    def within(self, seconds: float) -> Self:
        """This client with a time limit: ``client.within(2).publish(…)``.

        Each call returns or raises within so many seconds, all its attempts and pauses together; of a poll, the first
        piece of the answer is there by then. Calls of the transaction service have ``Timeouts.transaction_seconds``.
        Connections and all else are shared, so it need not be closed.

        Raises:
            ConfigurationError: the time is none.
        """
        found = copy(self)
        found._core = self._core.within(seconds)
        return found

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
        """Publish messages in one request; when this returns they are on disk.

        Args:
            topic: where to.
            messages: the payloads, in order. An empty list, in a transaction, publishes its stored payloads.
            transaction: whose they are; :meth:`transaction` does all that belongs to it.
            ttl: how long these live, where that is shorter than the topic's ttl; whole seconds.
            key: the key of the messages: in a topic with partitions, messages with the same key go to the same
                partition, in order. Without a key partitions have their turn. Of a topic with routes, a key for each of
                them; its copies are published in one transaction. Not together with ``transaction``.

        Returns:
            In a transaction, the rows that were written, as :meth:`rollback` takes them; else None.

        Raises:
            TopicNotFound: there is no such topic.
            BadRequest: no message, one that is not bytes, or more bytes than the server takes at once.
            Unavailable: nothing was published, even when tried again.
            Unanswered: whether it was published is not known. It is not tried again, because then it might be there
                twice.
        """
        if transaction is None:
            run(publish(self._core, beginning(self._core, self._transactions, self._limits), topic, messages, ttl, key))
            return None
        without_key(key)
        return run(publish_in(self._core, topic, messages, transaction, ttl))

    def store(self, topic: Topic, messages: Sequence[bytes], *, transaction: Transaction) -> None:
        """Put payloads where an empty :meth:`publish` in the same transaction publishes them; raises as that does."""
        run(store_in(self._core, topic, messages, transaction))

    def rollback(self, topic: Topic, published: RollbackRange | int) -> None:
        """Roll back the rows of a publish in a transaction.

        Args:
            topic: where it was published.
            published: what publishing returned; or a write pointer, to roll back all of its rows in this topic.

        Raises:
            TopicNotFound: there is no such topic.
            Unanswered: some rows may not be rolled back; the transaction has to be invalidated.
        """
        run(self._core.ask(calls.rollback(topic, published)))

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
            topic: whose.
            start: a message's id, a time with its zone, or None for the first message.
            inclusive: whether the message that has the very id ``start`` is among them, or those of that millisecond.
            limit: the most messages to read; None: all there are now.
            transaction: the reading transaction: only messages committed for it; None: everything, including rolled
                back messages.

        Returns:
            Iterate over it; a ``with`` around it returns its connection even after a break. The request is sent, and
            raises, with the first message.

        Raises:
            BadRequest: the limit or the start is none.
            TopicNotFound: there is no such topic.
            Unanswered: the answer was cut short; poll again from the last message on.
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
        """Read messages in order, forever: those that are there, then each as it comes.

        While there is nothing, the server waits and answers when a message has come. While messages are undecided, or
        the server does not respond, it retries with growing pauses.

        Args:
            topic: whose.
            start, inclusive: the start, as of :meth:`poll`.
            consumer: a name under which the position is stored. Reading continues after it, and it is stored whenever
                the program requests the next batch: a program that dies in between reads some messages again (at least
                once).
            read: the kind of messages. ``uncommitted``: everything, including messages that are or may be rolled back.
                ``committed``: committed messages in the order of the topic, which wait for an undecided one.
                ``unordered``: committed messages without waiting, so a message that is decided late comes late; it
                requires a consumer, which then is a consumer group with its state at the server, and ignores ``start``
                and pauses. The last two need the transaction service.
            idle, failed: the pauses; how many attempts they name does not count.
            wait_seconds: how long the server waits before it answers that there is nothing, 60 at most; None: 5.
                ``stop()`` called by another thread is noticed within that time.

        Returns:
            An iterator, best used in a ``with`` block, which stores the position when it is left. ``stop()`` stops it.

        Raises:
            TopicNotFound, BadRequest, Unauthorized, Forbidden: while iterating, since these do not pass by waiting.
        """
        plan = ReadPlan(topic_id(topic), start, inclusive, consumer, idle, failed, wait_seconds)
        return Consumption(reading(self._core, plan, read, self._transactions, self._limits))

    # --- some time ---------------------------------------------------------------------------------------------------

    def publish_async(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        ttl: timedelta | int | str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Hand messages over to be published some time, in batches, in order; what there is room for is the ``buffer``.

        A batch that was not answered is sent again for ``Buffer.delivery_seconds``, so a message may be there twice,
        and none is lost while the server is away for less than that. Unpublished messages are logged and counted, and
        :meth:`flush` and :meth:`close` raise.

        Args:
            topic: where to.
            messages: the payloads.
            ttl: how long these live, where that is shorter than the topic's ttl; whole seconds.
            on_delivery: called once for each message before :meth:`flush` returns, with its payload and None when it is
                on the server's disk, or else the error (:class:`BufferFull`: no room). The publishing thread usually
                calls it, so it must return quickly.

        Raises:
            BadRequest: there is no such topic's name, or a payload that is not bytes; none is taken.
            BufferFull: there is no room, and the buffer says that this is an error; those before the one that had no
                room are taken.
            ClientClosed: the client is closed.
        """
        self._background.publish(topic, messages, ttl, on_delivery)

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Return when all messages queued until now are on the server's disk.

        Args:
            timeout_seconds: how long to wait; None: as long as it takes.

        Raises:
            NotPublished: some of it could not be published, since this was last asked; or the time is over.
        """
        self._background.flush(timeout_seconds)

    @property
    def publish_figures(self) -> PublishFigures:
        """Return counts of the messages of :meth:`publish_async`."""
        return self._background.figures

    # --- transactions ------------------------------------------------------------------------------------------------

    def transaction(self, *, timeout_seconds: int | None = None, long: bool = False) -> TransactionContext:
        """Return a transaction: ``with client.transaction() as tx:``.

        Its messages become visible when the block is left, together with the writes of its participants, or not at all;
        it starts with the block. Readers that are in transactions of their own see nothing of it before. When an answer
        is missing the transaction is invalidated, never aborted; see :mod:`tms_core.client.transactions.transaction`.

        Args:
            timeout_seconds: its timeout; None: as the service says (30).
            long: whether it may take long (a day); where it fails, it is always invalidated.

        Raises:
            TransactionError: it was entered before: each context is for one transaction.
            Conflict: another transaction changed the same; this one is rolled back.
            NotInProgress: it took too long.
            Invalidated: it was invalidated; nothing of it is or will be visible.
            OutcomeUnknown: no server says whether it is committed; it is as a whole, or never will be.
            PostCommitFailed: it is committed, but a later step failed, such as storing a position.
            MessagingError: something could not be published, and it is rolled back.
        """
        return TransactionContext(
            self._core, self._transactions, self._limits, timeout_seconds, self._rotations, long=long
        )

    def producer(self, topic: Topic, name: str) -> Producer:
        """Return a producer by name: ``with client.producer("default:bills", "importer-7") as producer:``.

        Each publish takes effect once, even if requests are repeated. The block starts with a registration: the server
        rejects older instances of the same producer from then on, and their open transactions are invalidated.
        ``producer.previous`` tells what became of the last one.

        Args:
            topic: the producer's own; it publishes to others, too.
            name: the same for each start of the program; of programs that run side by side each has its own.

        Raises:
            BadRequest: that is no name.
            TopicNotFound: there is no such topic, at the start of the block.
        """
        return Producer.of(self._core, self._transactions, self._limits, self._rotations, topic, name)

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
        """Work through a topic as one of a consumer group, exactly once: ``for tx, batch in client.work(…):``.

        Each batch comes with its transaction, which is committed with the request for the next batch. An error in the
        loop, or leaving it, rolls the batch back, and its messages come again, to whichever worker is there. ``stop()``
        stops the loop after the current batch. Any number of workers may run, and come and go. While there are no
        messages, the server waits, and no transaction is open.

        Args:
            topic: whose messages; one with partitions, of which each worker takes those that are free, first the one it
                had last; or a pattern of several: ``default:orders-*``.
            group: the group's name; a new consumer starts at the first message of the topic.
            batch: the most messages in a transaction; the server gives about 4 MB at once.
            order: ``partition``: in the order of the topic, one batch at a time. ``none``: as a work queue, several
                workers share the messages.
            max_deliveries: the highest number of deliveries of a message. Messages of a batch that failed come in
                smaller batches, at last alone; one that has failed so often goes to the topic ``TOPIC-dead``, which is
                made where there is none. None: it comes forever.
            timeout_seconds: how long a batch may take, from the commit of the one before on; None: as the transaction
                service says (30).
            idle_seconds: the time without messages after which the loop stops; None: never.

        Returns:
            Iterate over it. What passes (a server away, a transaction that took too long) is logged and tried again.

        Raises:
            BadRequest: a number or the order is none, or the topic's name has no room for ``-dead``.
            TopicNotFound, Unauthorized, Forbidden: while iterating; of a pattern's topics BadRequest, too.
        """
        core, service, limits = self._core, self._transactions, self._limits
        begin = beginning(core, service, limits, timeout_seconds)

        def context(begun: ClientTransaction) -> TransactionContext:
            return standing_for(
                TransactionContext(core, service, limits, timeout_seconds, self._rotations, long=False), begun
            )

        worker = Worker(core, begin, topic, group, WorkOptions(batch, order, max_deliveries, idle_seconds))
        return GroupWork(worker, context)
