"""``with client.transaction() as tx:``, and the same for ``async with``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import Self, TypeVar

from tms_core.client.consume.iterators import AsyncMessages, Messages
from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Topic
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.messages import Message, Start
from tms_core.client.protocol.values import Limits
from tms_core.client.protocol.wire import run, waits
from tms_core.client.transactions.participant import Participant
from tms_core.client.transactions.partitions import Key, Rotation, Rotations
from tms_core.client.transactions.transaction import ClientTransaction
from tms_core.errors import NotInProgress, TransactionError
from tms_core.transaction.model import Transaction
from tms_core.transaction.rpc.client import TransactionClient

C = TypeVar("C", bound="_Context")


class _Context:
    """Options of a transaction that starts with the block."""

    def __init__(
        self,
        core: Core,
        service: TransactionClient,
        limits: Limits,
        timeout_seconds: int | None,
        rotations: Rotations,
        *,
        long: bool,
        participants: Sequence[Participant] = (),
    ) -> None:
        self._participants = participants
        self._core = core
        self._service = service
        self._limits = limits
        self._timeout_seconds = timeout_seconds
        self._rotations = rotations
        self._long = long
        self._entered = False
        self._begun: ClientTransaction | None = None

    @property
    def transaction(self) -> Transaction:
        """Return its pointers, as methods of the client take them (``transaction=tx.transaction``)."""
        return self._work.transaction

    def roll_back(self) -> None:
        """Roll it back, without an error, when the block is left; nothing else can be done in it until then.

        Raises:
            NotInProgress: it is over, or belongs to the parent process of this fork.
        """
        self._work.cancel()

    def publish_stored(self, topic: Topic, pointers: Sequence[int], ttl: timedelta | int | str | None = None) -> None:
        """Publish, when it commits, what other processes have stored in a topic as part of it.

        Each of them asks for a checkpoint of the transaction (:meth:`TransactionClient.checkpoint`) and stores with its
        pointer. So of a process that failed and was replaced nothing is published, even if it is still at work.

        Args:
            topic: where to.
            pointers: the write pointers of those whose payloads are wanted, in order.
            ttl: how long they live, where that is shorter than the topic's ttl.
        """
        self._work.publish_stored(topic, pointers, ttl)

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
        for participant in self._participants:
            await self._begun.register(participant)

    async def _end(self, error: BaseException | None) -> None:
        if self._work.is_forked and error is not None:
            # The error goes on, and the transaction is the parent's.
            return
        if error is not None or self._work.cancelled:
            await self._work.roll_back()
        else:
            await self._work.commit()

    def _rotation(self, topic: Topic, consumer: str) -> Rotation:
        """Return where the consumer goes on; the client remembers which partition it had last."""
        return self._rotations.setdefault((str(topic), consumer), Rotation(self._core, topic))

    def _poll(self, topic: Topic, start: Start, limit: int | None, *, inclusive: bool) -> calls.Ask:
        self._work.require_open()
        return calls.poll_on(topic, start, limit, self.transaction, inclusive=inclusive)


def standing_for(context: C, begun: ClientTransaction) -> C:
    """Return a context for a running transaction."""
    context._entered, context._begun = True, begun
    return context


class AsyncTransactionContext(_Context):
    """A transaction of an :class:`~tms_core.client.AsyncClient`, for one task; as :class:`TransactionContext`."""

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._end(error)

    async def publish(
        self,
        topic: Topic,
        messages: Sequence[bytes],
        *,
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None:
        """Publish messages when it commits.

        Args:
            topic: where to.
            messages: the payloads, in order.
            ttl: how long these live, where that is shorter than the topic's ttl; whole seconds.
            key: as of :meth:`tms_core.client.Client.publish`.

        Raises:
            MessagingError: payloads that are too much to keep could not be stored; it can only be rolled back then.
        """
        await self._work.publish(topic, messages, ttl, key)

    def poll(
        self, topic: Topic, *, start: Start = None, inclusive: bool = True, limit: int | None = None
    ) -> AsyncMessages:
        """As :meth:`TransactionContext.poll`."""
        return AsyncMessages(self._core, self._poll(topic, start, limit, inclusive=inclusive), limit)

    async def consume(
        self, topic: Topic, consumer: str, *, limit: int | None = None, order: str = "partition"
    ) -> AsyncIterator[Message]:
        """As :meth:`TransactionContext.consume`."""
        rotation = self._rotation(topic, consumer)
        left = limit
        while left is None or left > 0:
            found = await self._work.next_batch(rotation, consumer, left, order)
            if found is None:
                return
            _, claims, batch = found
            for message in batch.messages:
                claims.given = message.id
                yield message
            left = None if left is None else left - len(batch.messages)

    async def register(self, participant: Participant) -> None:
        """Have something else take part: its writes and the messages become visible together, or not at all."""
        await self._work.register(participant)

    async def checkpoint(self) -> None:
        """Give it another write pointer; participants are told."""
        await self._work.checkpoint()


class TransactionContext(_Context):
    """A transaction of a :class:`~tms_core.client.Client`, for one thread; see its ``transaction``.

    All or nothing of it becomes visible when the block is left; nothing, when something in the block raises.
    """

    def __enter__(self) -> Self:
        run(self._begin())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        run(self._end(error))

    def poll(self, topic: Topic, *, start: Start = None, inclusive: bool = True, limit: int | None = None) -> Messages:
        """Read the messages that it sees: committed when it started; see :meth:`tms_core.client.Client.poll`."""
        return Messages(self._core, self._poll(topic, start, limit, inclusive=inclusive), limit)

    def consume(
        self, topic: Topic, consumer: str, *, limit: int | None = None, order: str = "partition"
    ) -> Iterator[Message]:
        """Read the unread messages of a consumer; it has, exactly if the transaction is committed.

        That is exactly once, for any number of copies of a program, wherever one of them dies.
        Claimed messages that the block did not request are returned. Where the transaction fails, its messages
        come again at once; where the program dies, when the transaction has timed out.

        Args:
            topic: whose messages; of one with partitions those of each that no other transaction has messages of, first
                of the one that this client had last. A pattern stands for several topics: ``default:orders-*``.
            consumer: the group; a new consumer starts at the first message of the topic.
            limit: the most messages to read; None: all there are.
            order: ``partition``: in the order of the topic; nothing, while another transaction has some of it.
                ``none``: several transactions share the messages.

        Raises:
            ConsumerConflict: the transaction is over, or is too old.
        """
        rotation = self._rotation(topic, consumer)
        left = limit
        while left is None or left > 0:
            found = run(self._work.next_batch(rotation, consumer, left, order))
            if found is None:
                return
            _, claims, batch = found
            for message in batch.messages:
                claims.given = message.id
                yield message
            left = None if left is None else left - len(batch.messages)

    publish = waits(AsyncTransactionContext.publish)
    register = waits(AsyncTransactionContext.register)
    checkpoint = waits(AsyncTransactionContext.checkpoint)
