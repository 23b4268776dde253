"""A resource that takes part in a transaction (Tephra's ``TransactionAware``)."""

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
    """A participant in a transaction: an object whose writes belong to it; override the needed methods.

    With an ``AsyncClient`` each method may be a coroutine. An error in a method fails the transaction. In
    :meth:`post_tx_commit` it raises ``PostCommitFailed``, because the transaction is committed.
    """

    def start_tx(self, transaction: Transaction) -> Awaitable[None] | None:
        """Prepare for a transaction that has started, or in which this was registered: write with its
        ``write_pointer``.
        """

    def update_tx(self, transaction: Transaction) -> Awaitable[None] | None:
        """There was a checkpoint: write with the new ``write_pointer`` from now on."""

    def tx_changes(self) -> Collection[bytes]:
        """Return the changed keys; of two transactions that overlap and have a key in common, one is refused."""
        return ()

    def commit_tx(self) -> Awaitable[None] | None:
        """Make the writes durable; the transaction may still fail."""

    def post_tx_commit(self) -> Awaitable[None] | None:
        """Called after the commit."""

    def rollback_tx(self) -> Awaitable[None] | None:
        """Called when the transaction failed: undo the writes.

        If this raises, the transaction is invalidated, which hides it.
        """


class ClaimedBatch(NamedTuple):
    """A batch of claimed messages.

    Attributes:
        messages: the messages to process.
        deliveries: their number of deliveries, including this one.
        held: the transaction that must be decided first; None: there is none.
        position: without messages, the id from which the next one may come; None: that is not known yet.
        sealed: whether the topic takes no more messages.
        drained: whether it is sealed, and the group has read it all.
        behind: the partition that the group must read completely first; None: there is none.
        retry_seconds: without messages, after how long some come again that have failed; None: none wait.
    """

    messages: list[Message]
    deliveries: int
    held: int | None
    position: MessageId | None
    sealed: bool = False
    drained: bool = False
    behind: TopicId | None = None
    retry_seconds: float | None = None


class GroupClaims(Participant):
    """Claims of a transaction in a consumer group, which count once the transaction is committed.

    The server keeps the claims under the transaction's id, so nothing is to be done when it is committed. Claims are
    released before an abort, and claimed messages that the program did not get before the commit.

    Args:
        core: who claims.
        topic: whose messages.
        name: the group's.
        beside: topics in which it is registered, too, when it is.

    Attributes:
        given: the last message that was handed to the program.
        counts: whether the program's messages count as delivered when they are returned.
    """

    def __init__(self, core: Core, topic: Topic, name: str, beside: Sequence[TopicId] = ()) -> None:
        self._core = core
        self._beside = beside
        self._topic = topic_id(topic)
        self._name = name
        self._transaction: Transaction | None = None
        self._last: MessageId | None = None
        self._may_have_claimed = False
        self.given: MessageId | None = None
        self.counts = True

    def start_tx(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def update_tx(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def claim(self, limit: int | None, order: str, max_deliveries: int | None) -> ClaimedBatch:
        """Claim the next messages; a new group is registered at the first message of the topic.

        Raises:
            MessagingError: they could not be claimed; where that is not known, the transaction must be invalidated.
        """
        try:
            return await self._claim(limit, order, max_deliveries)
        except ConsumerNotFound:
            for topic in (self._topic, *self._beside):
                with suppress(ConsumerConflict, *([] if topic == self._topic else [TopicNotFound, PartitionsChanged])):
                    await self._core.ask(consumer_calls.register(topic, self._name))
            return await self._claim(limit, order, max_deliveries)

    async def _claim(self, limit: int | None, order: str, max_deliveries: int | None) -> ClaimedBatch:
        if self._transaction is None:
            raise NotInProgress("The transaction has not begun.", "Register this with one.")
        call = consumer_calls.group_poll(self._topic, self._name, limit, self._transaction, order, max_deliveries)
        messages: list[Message] = []
        try:
            reading = await self._core.open(call)
            while found := await reading.more():
                messages += found
        except BaseException as error:
            # What was refused was not done.
            self._may_have_claimed |= isinstance(error, UNKNOWN) or not isinstance(error, TmsError)
            raise
        if messages:
            self._last, self._may_have_claimed = messages[-1].id, True
        sealed, behind = reading.text(calls.SEALED), reading.text(calls.BEHIND)
        retry_ms = reading.number(consumer_calls.RETRY)
        return ClaimedBatch(
            messages,
            reading.number(consumer_calls.DELIVERIES) or 0,
            reading.number(consumer_calls.HELD),
            reading.position,
            sealed is not None,
            sealed == "drained",
            None if behind is None else topic_id(behind),
            None if retry_ms is None else retry_ms / 1000,
        )

    async def commit_tx(self) -> None:
        if self._last is not None and self.given != self._last:
            await self._give_back(self.given)

    async def rollback_tx(self) -> None:
        if self._may_have_claimed:
            # With a group that was deleted its claims are gone, too.
            with suppress(ConsumerNotFound):
                given = self.given if self.counts else None
                if given is None or given != self._last:
                    # What lies behind an id is given back as if it had never been given out.
                    await self._give_back(given or _BEFORE_ALL)
                if given is not None:
                    await self._give_back(None)

    async def _give_back(self, after: MessageId | None) -> None:
        if self._transaction is not None:
            pointer = self._transaction.transaction_id
            await self._core.ask(consumer_calls.group_rollback(self._topic, self._name, pointer, after))


class Failures:
    """What went wrong where all have their turn: the first error, but an interrupt goes before it."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        interrupt = error is not None and not isinstance(error, Exception)
        if self._first is None or (interrupt and isinstance(self._first, Exception)):
            self._first = error
        return True

    def tell(self) -> None:
        """Raise it."""
        if self._first is not None:
            raise self._first


async def done(result: Awaitable[None] | None) -> None:
    """Wait for a participant whose methods are coroutines."""
    if isawaitable(result):
        await result
