"""Producers: publishes are idempotent, and the newest instance of a producer fences older instances.

Each request has a number, so the client can repeat a request without a response. An instance sends one request at a
time, because the server recognizes only the last request. ``ProducerFenced`` is final.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Self, TypeVar
from uuid import uuid4

from tms_core.client.contexts import AsyncTransactionContext, TransactionContext
from tms_core.client.protocol import calls, producer_calls
from tms_core.client.protocol.calls import Call, Topic, topic_id
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.producer_calls import PreviousTransaction, RegisteredInstance, Signature
from tms_core.client.protocol.wire import run, waits
from tms_core.client.transactions.participant import Participant
from tms_core.client.transactions.partitions import Key
from tms_core.client.transactions.transaction import publish, visible_now
from tms_core.errors import NotInProgress, ProducerFenced
from tms_core.transaction.model import Transaction

T = TypeVar("T")
C = TypeVar("C", TransactionContext, AsyncTransactionContext)


class Instance:
    """An instance of a producer, for both clients.

    If the server does not manage transactions, the instance itself invalidates open transactions of older instances at
    the transaction service, and reports their outcomes to the server.

    Args:
        home: the producer's topic.
        lock: held during each request.
    """

    def __init__(self, core: Core, home: Topic, name: str, lock: AbstractAsyncContextManager[object]) -> None:
        self.core = core
        self.home = topic_id(home)
        self.name = name
        self.previous: PreviousTransaction | None = None
        self._lock = lock
        self._uuid = uuid4()
        self._generation: int | None = None
        self._sequence = 0
        self._fenced: ProducerFenced | None = None
        #: The transactions of this instance that may be open.
        self._open: set[int] = set()

    @property
    def generation(self) -> int:
        """Return the generation that the registration assigned.

        Raises:
            NotInProgress: the instance is not registered.
        """
        if self._generation is None:
            raise NotInProgress("The producer is not registered.", "Register it: with client.producer(…) as producer:")
        return self._generation

    async def register(self) -> None:
        """Register the instance, after which open transactions of older instances are invalid."""
        registered = await self._register({})
        if registered.undecided:
            # The first registration has fenced older instances, so this list is complete.
            registered = await self._register(await self._invalidate_all(registered.undecided))
        self._generation, self.previous = registered.generation, registered.previous

    async def send(self, call: Call[T], label: str) -> T:
        """Number and send a request, which may be repeated.

        Raises:
            ProducerFenced: a newer instance is registered.
        """
        async with self._lock:
            if self._fenced is not None:
                raise self._fenced
            self._sequence += 1
            # Copy atomically, because other threads start and end transactions.
            oldest = min(tuple(self._open), default=None)
            signature = Signature(str(self.home), self.name, self.generation, self._sequence, label, oldest)
            try:
                return await self.core.ask(signature.on(call))
            except ProducerFenced as error:
                self._fenced = error
                raise

    def sign_writes(self, label: str) -> Core:
        """Return a core that sends the writes of a transaction as requests of this instance, with a label."""

        async def write(call: Call[T]) -> T:
            return await self.send(call, label)

        return self.core.writing(write, self.home)

    async def roll_back(self, pointer: int) -> None:
        """Report to the server that a transaction is rolled back, before it is aborted."""
        signature = Signature(str(self.home), self.name, self.generation, None)
        await self.core.ask(signature.on(calls.rollback(self.home, pointer)))
        self.note_end(pointer)

    def note_start(self, pointer: int) -> None:
        """Record the start of a transaction."""
        self._open.add(pointer)

    def note_end(self, pointer: int) -> None:
        """Record a commit, or a rollback that was reported to the server."""
        self._open.discard(pointer)

    async def _register(self, ended: Mapping[int, str]) -> RegisteredInstance:
        return await self.core.ask(producer_calls.register(self.home, self.name, self._uuid, ended))

    async def _invalidate_all(self, pointers: Sequence[int]) -> dict[int, str]:
        """Invalidate the open ones of some transactions, and return the outcomes of all."""
        committed = await visible_now(self.core, pointers)
        uncommitted = [pointer for pointer in pointers if pointer not in committed]
        for transaction_id in await self._transactions_of(uncommitted):
            await self._invalidate(transaction_id)
        if uncommitted:
            # A transaction may have been committed between the snapshot and its invalidation.
            committed |= await visible_now(self.core, uncommitted)
        return {pointer: "committed" if pointer in committed else "aborted" for pointer in pointers}

    async def _transactions_of(self, pointers: Sequence[int]) -> set[int]:
        """Return the transaction ids of write pointers, which may be pointers of checkpoints."""
        if not pointers:
            return set()
        core = self.core
        entries = await core.repeat(lambda _: core.wire.call_blocking(core.service.in_progress), again=True)
        parents = {checkpoint: entry.write_pointer for entry in entries for checkpoint in entry.checkpoints}
        return {parents.get(pointer, pointer) for pointer in pointers}

    async def _invalidate(self, transaction_id: int) -> None:
        core = self.core
        await core.repeat(lambda _: core.wire.call_blocking(core.service.invalidate, transaction_id), again=True)


class _ProducerParticipant(Participant):
    """A participant that reports a decided transaction to the instance, and a rollback to the server.

    The report precedes the abort, because an aborted transaction looks like a committed transaction in a snapshot.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._pointer = 0

    def start_tx(self, transaction: Transaction) -> None:
        self._pointer = transaction.transaction_id
        self._instance.note_start(self._pointer)

    def post_tx_commit(self) -> None:
        self._instance.note_end(self._pointer)

    async def rollback_tx(self) -> None:
        await self._instance.roll_back(self._pointer)


class ThreadLock(AbstractAsyncContextManager[None]):
    """A lock for coroutines that run without an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class _Producer:
    """The common part of both producers."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    @property
    def generation(self) -> int:
        """Return the generation of this instance; each new instance has a higher generation."""
        return self._instance.generation

    @property
    def previous(self) -> PreviousTransaction | None:
        """Return the last transaction of the previous instances with its outcome; None: no transaction."""
        return self._instance.previous

    def _transaction(self, kind: type[C], label: str, timeout_seconds: int | None, *, long: bool) -> C:
        producer_calls.check_label(label)
        participants = [_ProducerParticipant(self._instance)]
        return kind(self._instance.sign_writes(label), timeout_seconds, long=long, participants=participants)


class AsyncProducer(_Producer):
    """A producer of an :class:`~tms_core.client.AsyncClient`; tasks of its event loop may share it."""

    async def __aenter__(self) -> Self:
        await self._instance.register()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the registration remains until another instance registers."""

    async def publish(
        self,
        messages: Sequence[bytes],
        *,
        topic: Topic | None = None,
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None:
        """Publish messages in one request, which takes effect once even if it is repeated.

        Args:
            messages: the payloads, in order.
            topic: the destination; None: the producer's topic.
            ttl: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.
            key: as of :meth:`Client.publish`.

        Raises:
            ProducerFenced: a newer instance is registered; this instance can no longer publish.
            Unanswered: no attempt got a response; the messages may be published.
            MessagingError: as :meth:`Client.publish`.
        """
        where = self._instance.home if topic is None else topic
        participants = [_ProducerParticipant(self._instance)]
        await publish(self._instance.sign_writes(""), where, messages, ttl, key, participants)

    def transaction(
        self, label: str = "", *, timeout_seconds: int | None = None, long: bool = False
    ) -> AsyncTransactionContext:
        """Return a transaction, as :meth:`Producer.transaction`: ``async with producer.transaction() as tx:``."""
        return self._transaction(AsyncTransactionContext, label, timeout_seconds, long=long)


class Producer(_Producer):
    """A producer of a :class:`~tms_core.client.Client`; threads may share it. See :meth:`Client.producer`."""

    def __enter__(self) -> Self:
        run(self._instance.register())
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the registration remains until another instance registers."""

    def transaction(
        self, label: str = "", *, timeout_seconds: int | None = None, long: bool = False
    ) -> TransactionContext:
        """Return a transaction, as :meth:`Client.transaction`; the next instance can read its outcome.

        Args:
            label: a label for the transaction, such as the name of an input file; at most 1,000 bytes.
            timeout_seconds, long: as of ``Client.transaction``.
        """
        return self._transaction(TransactionContext, label, timeout_seconds, long=long)

    publish = waits(AsyncProducer.publish)
