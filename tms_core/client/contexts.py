"""``with client.transaction() as tx:``, and the same for ``async with``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import Self

from tms_core.client import calls
from tms_core.client.calls import Topic
from tms_core.client.core import Core
from tms_core.client.iterators import AsyncMessages, Messages
from tms_core.client.messages import Message, Start
from tms_core.client.participant import Participant
from tms_core.client.transaction import ClientTransaction
from tms_core.client.values import Limits
from tms_core.client.wire import run
from tms_core.errors import NotInProgress, TransactionError
from tms_core.transaction.model import Transaction
from tms_core.transaction.rpc.client import TransactionClient


class _Context:
    """What is asked for when the block begins."""

    def __init__(
        self, core: Core, service: TransactionClient, limits: Limits, timeout_seconds: int | None, *, long: bool
    ) -> None:
        self._core = core
        self._service = service
        self._limits = limits
        self._timeout_seconds = timeout_seconds
        self._long = long
        self._entered = False
        self._begun: ClientTransaction | None = None

    @property
    def transaction(self) -> Transaction:
        """Its pointers, as methods of the client take them (``transaction=tx.transaction``)."""
        return self._work.transaction

    def roll_back(self) -> None:
        """Have it rolled back, without an error, when the block ends."""
        self._work.cancelled = True

    @property
    def _work(self) -> ClientTransaction:
        if self._begun is None:
            raise NotInProgress("The transaction has not begun.", "Begin it: with client.transaction() as tx:")
        return self._begun

    async def _begin(self) -> None:
        if self._entered:
            raise TransactionError("A transaction begins once.", "Begin another one: client.transaction().")
        self._entered = True
        self._begun = await ClientTransaction.begin(
            self._core, self._service, self._limits, self._timeout_seconds, long=self._long
        )

    async def _end(self, error: BaseException | None) -> None:
        if error is not None or self._work.cancelled:
            await self._work.roll_back()
        else:
            await self._work.commit()

    def _poll(self, topic: Topic, start: Start, limit: int | None, *, inclusive: bool) -> calls.Ask:
        self._work.require_open()
        return calls.poll_on(topic, start, limit, self.transaction, inclusive=inclusive)


class TransactionContext(_Context):
    """A transaction of a :class:`~tms_core.client.Client`, for one thread; see its ``transaction``.

    All or nothing of it becomes visible when the block ends; nothing, when something in the block raises.
    """

    def __enter__(self) -> Self:
        run(self._begin())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        run(self._end(error))

    def publish(self, topic: Topic, messages: Sequence[bytes], *, ttl: timedelta | int | None = None) -> None:
        """Publish messages when it commits.

        Args:
            topic: where to.
            messages: the payloads, in order.
            ttl: how long these live, where that is shorter than the topic's ttl; whole seconds.

        Raises:
            MessagingError: payloads that are too much to keep could not be stored; it can only be rolled back then.
        """
        run(self._work.publish(topic, messages, ttl))

    def poll(self, topic: Topic, *, start: Start = None, inclusive: bool = True, limit: int | None = None) -> Messages:
        """Read what it sees: committed when it began; see :meth:`tms_core.client.Client.poll`."""
        return Messages(self._core, self._poll(topic, start, limit, inclusive=inclusive), limit)

    def consume(self, topic: Topic, consumer: str, *, limit: int | None = None) -> Iterator[Message]:
        """Read what follows a consumer's position, and move that to what was given out last once it has committed.

        That is at least once: a program that ends before the position is stored, or that runs in several copies, may
        read a message again.

        Args:
            topic: whose messages.
            consumer: whose position. Run one copy of a program with a consumer at a time.
            limit: the most messages to read; None: all there are.
        """
        position = run(self._work.consumer(topic, consumer))
        start = position.position or position.stored
        with self.poll(topic, start=start, inclusive=False, limit=limit) as messages:
            for message in messages:
                position.position = message.id
                yield message

    def register(self, participant: Participant) -> None:
        """Have something else take part: its writes and the messages become visible together, or not at all."""
        run(self._work.register(participant))

    def checkpoint(self) -> None:
        """Give it another write pointer; participants are told."""
        run(self._work.checkpoint())


class AsyncTransactionContext(_Context):
    """A transaction of an :class:`~tms_core.client.AsyncClient`, for one task; as :class:`TransactionContext`."""

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._end(error)

    async def publish(self, topic: Topic, messages: Sequence[bytes], *, ttl: timedelta | int | None = None) -> None:
        """As :meth:`TransactionContext.publish`."""
        await self._work.publish(topic, messages, ttl)

    def poll(
        self, topic: Topic, *, start: Start = None, inclusive: bool = True, limit: int | None = None
    ) -> AsyncMessages:
        """As :meth:`TransactionContext.poll`."""
        return AsyncMessages(self._core, self._poll(topic, start, limit, inclusive=inclusive), limit)

    async def consume(self, topic: Topic, consumer: str, *, limit: int | None = None) -> AsyncIterator[Message]:
        """As :meth:`TransactionContext.consume`."""
        position = await self._work.consumer(topic, consumer)
        start = position.position or position.stored
        async with self.poll(topic, start=start, inclusive=False, limit=limit) as messages:
            async for message in messages:
                position.position = message.id
                yield message

    async def register(self, participant: Participant) -> None:
        """As :meth:`TransactionContext.register`."""
        await self._work.register(participant)

    async def checkpoint(self) -> None:
        """As :meth:`TransactionContext.checkpoint`."""
        await self._work.checkpoint()
