"""What takes part in a transaction besides messages (Tephra's ``TransactionAware``)."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from contextlib import suppress
from inspect import isawaitable
from typing import Self

from tms_core.client import calls
from tms_core.client.calls import Topic, topic_id
from tms_core.client.core import Core
from tms_core.errors import ConsumerNotFound
from tms_core.rowkey import MessageId
from tms_core.transaction.model import Transaction


class Participant:
    """A participant in a transaction: an object whose writes belong to it; override what it needs.

    With an ``AsyncClient`` each method may be a coroutine. Whatever a method raises fails the transaction, except in
    :meth:`post_tx_commit`, when it is committed already and ``PostCommitFailed`` is raised.
    """

    def start_tx(self, transaction: Transaction) -> Awaitable[None] | None:
        """The transaction has begun, or this was registered with it: write with its ``write_pointer``."""

    def update_tx(self, transaction: Transaction) -> Awaitable[None] | None:
        """There was a checkpoint: write with the new ``write_pointer`` from now on."""

    def tx_changes(self) -> Collection[bytes]:
        """What was changed, as keys; of two transactions that overlap and have a key in common, one is refused."""
        return ()

    def commit_tx(self) -> Awaitable[None] | None:
        """Make durable what was written; the transaction may still fail."""

    def post_tx_commit(self) -> Awaitable[None] | None:
        """Called after the commit."""

    def rollback_tx(self) -> Awaitable[None] | None:
        """Called when the transaction failed: take back what was written.

        If this raises, the transaction is invalidated, which hides it.
        """


class StoredPosition(Participant):
    """A consumer's position, stored when the transaction is committed.

    The server keeps it beside the messages, not in the transaction. So a program that ends between the commit and this
    call finds the old position, and reads again what it had read: at least once. Two transactions of one consumer that
    overlap conflict; one that begins after another's commit and before this call does not, and reads the same again.

    Args:
        core: who stores it.
        topic: whose consumer.
        name: the consumer.

    Attributes:
        stored: where it stands before the transaction; None: it has read nothing yet.
        position: what was read in it last; None: nothing.
    """

    def __init__(self, core: Core, topic: Topic, name: str) -> None:
        self._core = core
        self._topic = topic_id(topic)
        self._name = name
        self.stored: MessageId | None = None
        self.position: MessageId | None = None

    async def load(self) -> None:
        """Ask where it stands."""
        with suppress(ConsumerNotFound):
            self.stored = await self._core.ask(calls.position(self._topic, self._name))

    def tx_changes(self) -> Collection[bytes]:
        return () if self.position is None else (f"consumer:{self._topic}:{self._name}".encode(),)

    async def post_tx_commit(self) -> None:
        if self.position is not None:
            await self._core.ask(calls.set_position(self._topic, self._name, self.position))


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
