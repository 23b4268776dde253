"""Context managers of transactions: ``with client.transaction() as tx:``, and the same for ``async with``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import Self, TypeVar

from tms_core.client.consume.iterators import AsyncMessages, Messages
from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Topic
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.messages import Message, Start
from tms_core.client.protocol.wire import run, waits
from tms_core.client.transactions.participant import Participant
from tms_core.client.transactions.partitions import Key, Rotation
from tms_core.client.transactions.transaction import ClientTransaction
from tms_core.errors import NotInProgress, TransactionError
from tms_core.transaction.model import Transaction

C = TypeVar("C", bound="_Context")


class _Context:
    """The common part of both contexts; the transaction starts with the block."""

    def __init__(
        self,
        core: Core,
        timeout_seconds: int | None = None,
        *,
        long: bool = False,
        participants: Sequence[Participant] = (),
    ) -> None:
        self._core = core
        self._timeout_seconds = timeout_seconds
        self._long = long
        self._participants = participants
        self._entered = False
        self._client_transaction: ClientTransaction | None = None

    @property
    def transaction(self) -> Transaction:
        """Return the transaction for methods of the client (``transaction=tx.transaction``)."""
        return self._work.transaction

    def roll_back(self) -> None:
        """Roll back without an error when the block exits; until then, the transaction accepts no further work.

        Raises:
            NotInProgress: the transaction has ended, or belongs to the parent process of this fork.
        """
        self._work.cancel()

    def publish_stored(self, topic: Topic, pointers: Sequence[int], ttl: timedelta | int | str | None = None) -> None:
        """Publish, with the commit, payloads that other processes have stored in a topic in this transaction.

        Each process requests a checkpoint of the transaction (:meth:`TransactionClient.checkpoint`), and stores
        payloads with the checkpoint's pointer. Payloads of a process that was replaced are not published, even if the
        process is still running.

        Args:
            topic: the topic of the stored payloads.
            pointers: the write pointers of the processes whose payloads are published, in order.
            ttl: the TTL of these messages, if it is shorter than the topic's TTL.
        """
        self._work.publish_stored(topic, pointers, ttl)

    @property
    def _work(self) -> ClientTransaction:
        if self._client_transaction is None:
            raise NotInProgress("The transaction has not started.", "Start it: with client.transaction() as tx:")
        return self._client_transaction

    async def _begin(self) -> None:
        if self._entered:
            raise TransactionError(
                "A transaction can be started only once.", "Start another transaction: client.transaction()."
            )
        self._entered = True
        self._client_transaction = await ClientTransaction.begin(
            self._core, self._timeout_seconds, long=self._long, participants=self._participants
        )

    async def _end(self, error: BaseException | None) -> None:
        if self._work.is_forked and error is not None:
            # A forked process must not end the transaction, which its parent commits or rolls back.
            return
        if error is not None or self._work.cancelled:
            await self._work.roll_back()
        else:
            await self._work.commit()

    def _rotation(self, topic: Topic, consumer: str) -> Rotation:
        """Return the rotation of a consumer; the client caches it, so that reading continues at the last partition."""
        found: Rotation = self._core.rotations.setdefault((str(topic), consumer), Rotation(self._core, topic))
        return found

    def _poll(self, topic: Topic, start: Start, limit: int | None, *, inclusive: bool) -> calls.PollRequest:
        self._work.require_open()
        return calls.poll_on(topic, start, limit, self.transaction, inclusive=inclusive)


def attach(context: C, transaction: ClientTransaction) -> C:
    """Attach a running transaction to a context, and return the context."""
    context._entered, context._client_transaction = True, transaction
    return context


class AsyncTransactionContext(_Context):
    """The context of a transaction of an :class:`~tms_core.client.AsyncClient`, for one task."""

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
        """Publish messages with the commit.

        Args:
            topic: the destination.
            messages: the payloads, in order.
            ttl: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.
            key: as of :meth:`tms_core.client.Client.publish`.

        Raises:
            MessagingError: payloads above the limit could not be stored; the transaction can only be rolled back.
        """
        await self._work.publish(topic, messages, ttl, key)

    def poll(
        self, topic: Topic, *, start: Start = None, inclusive: bool = True, limit: int | None = None
    ) -> AsyncMessages:
        """Read the messages that the transaction sees, as :meth:`TransactionContext.poll`."""
        return AsyncMessages(self._core, self._poll(topic, start, limit, inclusive=inclusive), limit)

    async def consume(
        self, topic: Topic, consumer: str, *, limit: int | None = None, order: str = "partition"
    ) -> AsyncIterator[Message]:
        """Read the unread messages of a consumer, as :meth:`TransactionContext.consume`."""
        rotation = self._rotation(topic, consumer)
        remaining = limit
        while remaining is None or remaining > 0:
            found = await self._work.next_batch(rotation, consumer, remaining, order)
            if found is None:
                return
            _, claims, batch = found
            for message in batch.messages:
                claims.delivered_id = message.id
                yield message
            remaining = None if remaining is None else remaining - len(batch.messages)

    async def register(self, participant: Participant) -> None:
        """Add a participant, whose writes become visible together with the messages, or not at all."""
        await self._work.register(participant)

    async def checkpoint(self) -> None:
        """Get another write pointer for the transaction, and pass it to the participants."""
        await self._work.checkpoint()


class TransactionContext(_Context):
    """The context of a transaction of a :class:`~tms_core.client.Client`, for one thread.

    The transaction commits when the block exits, and is rolled back if the block raises.
    """

    def __enter__(self) -> Self:
        run(self._begin())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        run(self._end(error))

    def poll(self, topic: Topic, *, start: Start = None, inclusive: bool = True, limit: int | None = None) -> Messages:
        """Read messages that were committed before the transaction started, as :meth:`tms_core.client.Client.poll`."""
        return Messages(self._core, self._poll(topic, start, limit, inclusive=inclusive), limit)

    def consume(
        self, topic: Topic, consumer: str, *, limit: int | None = None, order: str = "partition"
    ) -> Iterator[Message]:
        """Read the unread messages of a consumer; they count as read only if the transaction commits.

        Each message is processed exactly once, by any number of workers, even if workers crash. Claimed messages that
        the block has not requested return to the group. After a failed transaction, the server delivers its messages
        again immediately; after a crash of a worker, when its transaction has timed out.

        Args:
            topic: the topic. If it has partitions, the transaction reads the partitions that no other transaction
                reads, starting with this client's last partition. A pattern selects several topics:
                ``default:orders-*``.
            consumer: the group; a new consumer starts at the first message of the topic.
            limit: the maximum number of messages; None: all current messages.
            order: ``partition``: in the order of the topic; the server returns no messages while another transaction
                has claims. ``none``: several transactions share the messages.

        Raises:
            ConsumerConflict: the transaction has ended, or is too old.
        """
        rotation = self._rotation(topic, consumer)
        remaining = limit
        while remaining is None or remaining > 0:
            found = run(self._work.next_batch(rotation, consumer, remaining, order))
            if found is None:
                return
            _, claims, batch = found
            for message in batch.messages:
                claims.delivered_id = message.id
                yield message
            remaining = None if remaining is None else remaining - len(batch.messages)

    publish = waits(AsyncTransactionContext.publish)
    register = waits(AsyncTransactionContext.register)
    checkpoint = waits(AsyncTransactionContext.checkpoint)
