"""Participants of a transaction (Tephra's ``TransactionAware``); the claims of a consumer group are one too."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import NamedTuple, Self

from tms_core.client.protocol import calls, consumer_calls
from tms_core.client.protocol.calls import Topic, topic_id
from tms_core.client.protocol.core import UNKNOWN, Core
from tms_core.client.protocol.messages import Message
from tms_core.errors import (
    ConsumerConflict,
    ConsumerNotFound,
    NotInProgress,
    PartitionsChanged,
    TmsError,
    TopicNotFound,
)
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId
from tms_core.transaction.model import Transaction

#: The id before all messages.
_BEFORE_ALL = MessageId(0, 0)


class Participant:
    """A participant in a transaction: an object with writes that belong to the transaction; override its methods.

    With an ``AsyncClient`` each method may be a coroutine. An error in a method fails the transaction. After an error
    in :meth:`post_tx_commit`, the client raises ``PostCommitFailed``, because the transaction is committed.
    """

    def start_tx(self, transaction: Transaction) -> Awaitable[None] | None:
        """Prepare for a transaction, at its start or at the registration: write with its ``write_pointer``."""

    def update_tx(self, transaction: Transaction) -> Awaitable[None] | None:
        """Follow a checkpoint: write with the new ``write_pointer`` from now on."""

    def tx_changes(self) -> Collection[bytes]:
        """Return the changed keys; if two overlapping transactions share a key, the service rejects one of them."""
        return ()

    def commit_tx(self) -> Awaitable[None] | None:
        """Make the writes durable; the transaction may still fail."""

    def post_tx_commit(self) -> Awaitable[None] | None:
        """Run actions after the commit."""

    def rollback_tx(self) -> Awaitable[None] | None:
        """Undo the writes after a failure of the transaction.

        If this raises, the client invalidates the transaction, which hides remaining writes.
        """


class ClaimedBatch(NamedTuple):
    """A batch of claimed messages.

    Attributes:
        messages: the messages to process.
        deliveries: their number of deliveries, including this one.
        held: the transaction that must be decided first; None: no transaction blocks the group.
        position: without messages, the lowest id of the next message; None: unknown.
        sealed: whether the topic accepts no more messages.
        drained: whether the topic is sealed, and the group has read all of its messages.
        earlier_partition: the partition that the group must drain first; None: no partition.
        retry_seconds: without messages, the time until failed messages are delivered again; None: none wait.
    """

    messages: list[Message]
    deliveries: int
    held: int | None
    position: MessageId | None
    sealed: bool = False
    drained: bool = False
    earlier_partition: TopicId | None = None
    retry_seconds: float | None = None


class GroupClaims(Participant):
    """Claims of a transaction in a consumer group; they take effect with the commit.

    The server stores the claims under the transaction's id, so a commit needs no request. Before an abort, the client
    releases the claims. Before a commit, it releases claimed messages that the program has not received.

    Args:
        topic: the topic of the messages.
        name: the group.
        siblings: further topics in which a new group is registered.

    Attributes:
        delivered_id: the last message that the program has received.
        counts: whether released messages count as delivered.
    """

    def __init__(self, core: Core, topic: Topic, name: str, siblings: Sequence[TopicId] = ()) -> None:
        self._core = core
        self._siblings = siblings
        self._topic = topic_id(topic)
        self._name = name
        self._transaction: Transaction | None = None
        self._last: MessageId | None = None
        self._may_have_claimed = False
        self.delivered_id: MessageId | None = None
        self.counts = True

    def start_tx(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def update_tx(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def claim(self, limit: int | None, order: str, max_deliveries: int | None) -> ClaimedBatch:
        """Claim the next messages; register a new group at the first message of the topic.

        Raises:
            MessagingError: nothing was claimed; if the error is ``Unanswered``, invalidate the transaction.
        """
        try:
            return await self._claim(limit, order, max_deliveries)
        except ConsumerNotFound:
            for topic in (self._topic, *self._siblings):
                with suppress(ConsumerConflict, *([] if topic == self._topic else [TopicNotFound, PartitionsChanged])):
                    await self._core.ask(consumer_calls.register(topic, self._name))
            return await self._claim(limit, order, max_deliveries)

    async def _claim(self, limit: int | None, order: str, max_deliveries: int | None) -> ClaimedBatch:
        if self._transaction is None:
            raise NotInProgress("The transaction has not started.", "Register the participant with a transaction.")
        call = consumer_calls.group_poll(self._topic, self._name, limit, self._transaction, order, max_deliveries)
        messages: list[Message] = []
        try:
            reading = await self._core.open(call)
            while found := await reading.more():
                messages += found
        except BaseException as error:
            # A rejected request claimed nothing. After a lost response, the server may have claimed messages.
            self._may_have_claimed |= isinstance(error, UNKNOWN) or not isinstance(error, TmsError)
            raise
        if messages:
            self._last, self._may_have_claimed = messages[-1].id, True
        sealed, earlier = reading.text(calls.SEALED), reading.text(calls.EARLIER_PARTITION)
        retry_ms = reading.number(consumer_calls.RETRY)
        return ClaimedBatch(
            messages,
            reading.number(consumer_calls.DELIVERIES) or 0,
            reading.number(consumer_calls.HELD),
            reading.position,
            sealed is not None,
            sealed == "drained",
            None if earlier is None else topic_id(earlier),
            None if retry_ms is None else retry_ms / 1000,
        )

    async def commit_tx(self) -> None:
        if self._last is not None and self.delivered_id != self._last:
            await self._give_back(self.delivered_id)

    async def rollback_tx(self) -> None:
        if self._may_have_claimed:
            # A deleted group has no claims, and neither has a group of a deleted topic.
            with suppress(ConsumerNotFound, TopicNotFound):
                delivered_id = self.delivered_id if self.counts else None
                if delivered_id is None or delivered_id != self._last:
                    # The program has not received the messages after this id: release them without counting a delivery.
                    await self._give_back(delivered_id or _BEFORE_ALL)
                if delivered_id is not None:
                    await self._give_back(None)

    async def _give_back(self, after: MessageId | None) -> None:
        if self._transaction is not None:
            pointer = self._transaction.transaction_id
            await self._core.ask(consumer_calls.group_rollback(self._topic, self._name, pointer, after))


class Failures:
    """A collector of errors, so that every participant is called; keeps the first error, or the first interrupt."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        interrupt = error is not None and not isinstance(error, Exception)
        if self._first is None or (interrupt and isinstance(self._first, Exception)):
            self._first = error
        return True

    def raise_first(self) -> None:
        """Raise the kept error, if there was an error."""
        if self._first is not None:
            raise self._first


async def wait_for_result(result: Awaitable[None] | None) -> None:
    """Wait for the result of a participant's method, if the method is a coroutine."""
    if isawaitable(result):
        await result
