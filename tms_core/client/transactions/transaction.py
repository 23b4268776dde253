"""A transaction of the client from start to commit or rollback, as Tephra's ``TransactionContext`` defines it.

A commit has five steps: check for conflicts, have all participants write, publish the messages, commit, notify the
participants. If a step before the commit fails, the client rolls back all writes and aborts the transaction.

A request without a response may be executed later. If the transaction were aborted by then, the writes would count as
committed. Therefore the client invalidates the transaction instead, which also hides late writes.

After a commit without a response, the client rolls nothing back until it knows the outcome. It invalidates the
transaction, which does not affect a committed transaction, and reads the outcome from a new transaction's snapshot.
Tephra's client repeats the commit, gets "not in progress", and rolls back committed messages.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Call, Topic, topic_id
from tms_core.client.protocol.core import INTERRUPTED, UNKNOWN, Core
from tms_core.client.transactions.outbox import Outbox
from tms_core.client.transactions.participant import ClaimedBatch, Failures, GroupClaims, Participant, wait_for_result
from tms_core.client.transactions.partitions import Key, Rotation, number_for, places, read_layout, send_to_partition
from tms_core.errors import (
    ClientClosed,
    Conflict,
    Invalidated,
    NotInProgress,
    PartitionsChanged,
    PostCommitFailed,
    TmsError,
    TopicNotFound,
    TransactionError,
)
from tms_core.messaging.model import RollbackRange
from tms_core.topic import TopicId
from tms_core.transaction.model import Transaction
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import OutcomeUnknown

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class ClientTransaction:
    """One transaction of a client."""

    def __init__(self, core: Core, transaction: Transaction, timeout_seconds: int | None) -> None:
        self.transaction = transaction
        self.cancelled = False
        self._core = core
        self._service = core.service
        self._timeout_seconds = timeout_seconds
        self._outbox = Outbox(core, transaction.transaction_id)
        self._participants: list[Participant] = []
        self._undone = 0
        self._ended = False
        self._doubtful = False
        self._incomplete = False
        self._claims: dict[tuple[TopicId, str], GroupClaims] = {}
        self._process = os.getpid()
        core.transactions[self._process, transaction.transaction_id] = self

    @classmethod
    async def begin(
        cls,
        core: Core,
        timeout_seconds: int | None = None,
        *,
        long: bool = False,
        participants: Sequence[Participant] = (),
    ) -> ClientTransaction:
        """Start a transaction.

        If the start gets no response, the transaction has written nothing and times out. If the task is cancelled, the
        transaction is aborted.

        Raises:
            TransactionError: the service does not respond, or rejects the start.
        """
        service = core.service

        def start() -> Transaction:
            return service.start_long(_holder()) if long else service.start_short(timeout_seconds, _holder())

        transaction = await core.repeat(
            lambda _: core.wire.start_or_undo(start, partial(_give_up, service)), again=True
        )
        work = cls(core, transaction, timeout_seconds)
        for participant in participants:
            await work.register(participant)
        return work

    # --- while it is open --------------------------------------------------------------------------------------------

    async def register(self, participant: Participant) -> None:
        """Add a participant, and start the transaction in it."""
        with self._step():
            self._participants.append(participant)
            await wait_for_result(participant.start_tx(self.transaction))

    async def publish(
        self, topic: Topic, messages: Sequence[bytes], ttl: timedelta | int | str | None = None, key: Key | None = None
    ) -> None:
        """Publish messages with the commit."""
        with self._step():
            await self._outbox.add(topic, messages, ttl, key)

    def publish_stored(self, topic: Topic, pointers: Sequence[int], ttl: timedelta | int | str | None = None) -> None:
        """Publish with the commit payloads that were stored under write pointers of checkpoints."""
        with self._step():
            self._outbox.refer(topic, pointers, ttl)

    async def publish_now(self, core: Core, topic: TopicId, call: Call[RollbackRange]) -> RollbackRange:
        """Send a publish with one of its pointers, and include it in a rollback."""
        with self._run_request():
            published = await core.ask(call)
            self._outbox.note(topic, published)
            return published

    async def store_now(self, core: Core, call: Call[None]) -> None:
        """Send a store with one of its pointers."""
        with self._run_request():
            await core.ask(call)

    async def checkpoint(self) -> None:
        """Get another write pointer, after all participants have written their pending writes."""
        with self._step():
            # A participant writes with the old pointer until it gets the new one, so it writes before the checkpoint.
            for participant in self._participants:
                await wait_for_result(participant.commit_tx())
            self.transaction = await self._call(self._service.checkpoint, self.transaction)
            for participant in self._participants:
                await wait_for_result(participant.update_tx(self.transaction))

    async def next_batch(
        self,
        rotation: Rotation,
        group: str,
        limit: int | None,
        order: str,
        max_deliveries: int | None = None,
        most: int | None = None,
    ) -> tuple[TopicId, GroupClaims, ClaimedBatch] | None:
        """Claim the next messages of the first topic that has messages; poll at most ``most`` topics."""
        async for topic in rotation.round(most):
            claims = await self.claims(topic, group, rotation.siblings(topic))
            with self._step():
                try:
                    batch = await claims.claim(limit, order, max_deliveries)
                except TopicNotFound:
                    # Nothing was claimed, and other topics may have replaced it.
                    rotation.lose(topic)
                    continue
            rotation.learn(topic, batch)
            if batch.messages:
                return topic, claims, batch
        return None

    async def claims(self, topic: Topic, name: str, siblings: Sequence[TopicId] = ()) -> GroupClaims:
        """Return the transaction's claims in a consumer group."""
        key = (topic_id(topic), name)
        found = self._claims.get(key)
        if found is None:
            found = self._claims[key] = GroupClaims(self._core, topic, name, siblings)
            await self.register(found)
        return found

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the owner; only the owner commits or aborts a transaction."""
        return os.getpid() != self._process

    def cancel(self) -> None:
        """Mark the transaction for rollback when its block is left.

        Raises:
            NotInProgress: it is decided, or belongs to another process.
        """
        self._require_own()
        self.cancelled = True

    def require_open(self) -> None:
        """Check that the transaction accepts further work.

        Raises:
            NotInProgress: it is decided, is marked for rollback, or belongs to another process.
        """
        self._require_own()
        if self.cancelled:
            raise NotInProgress(
                f"Transaction {self.transaction.transaction_id} is to be rolled back and accepts no more work.",
                "Start another transaction.",
            )

    def _require_own(self) -> None:
        pointer = self.transaction.transaction_id
        if self.is_forked:
            raise NotInProgress(
                f"Transaction {pointer} was started by the parent process, before a fork.",
                "Start a transaction in this process, or finish the transaction before the fork.",
            )
        if self._ended:
            raise NotInProgress(f"Transaction {pointer} has ended.", "Start another transaction.")

    # --- its end -----------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit: make all writes visible, or none.

        Raises:
            TransactionError, MessagingError: no write is visible, now or later, with two exceptions:
            OutcomeUnknown: either all writes are visible, or none ever is.
            PostCommitFailed: all writes are visible.
        """
        await self._write_all()
        pointers = (self.transaction.transaction_id, self.transaction.write_pointer)
        await self._commit(lambda: self._core.wire.call_blocking(self._service.commit, *pointers))
        await self._follow()

    async def commit_and_begin(self) -> ClientTransaction | None:
        """Commit, and start a short transaction with the same call, so that both share one sync of the log.

        The timeout of the new transaction already runs during ``post_tx_commit``.

        Returns:
            The new transaction; None: the commit succeeded, and no transaction was started.

        Raises:
            TransactionError, MessagingError, OutcomeUnknown, PostCommitFailed: as :meth:`commit`; a new transaction is
                invalidated, or times out.
        """
        core, service, timeout_seconds = self._core, self._service, self._timeout_seconds
        await self._write_all()
        pointers = (self.transaction.transaction_id, self.transaction.write_pointer)
        next_transaction = await self._commit(
            lambda: core.wire.start_or_undo(
                lambda: service.commit_and_start(*pointers, timeout_seconds, _holder()),
                lambda next_transaction: None if next_transaction is None else _give_up(service, next_transaction),
            )
        )
        try:
            await self._follow()
        except BaseException:
            if next_transaction is not None:
                # A client that was closed in the meantime has aborted it already, or it times out.
                with suppress(ClientClosed):
                    await core.wire.call_blocking(_give_up, service, next_transaction)
            raise
        return None if next_transaction is None else ClientTransaction(core, next_transaction, timeout_seconds)

    async def roll_back(self) -> None:
        """Roll back the writes, then abort the transaction; invalidate it if a rollback is uncertain.

        Raises:
            Exception: the first error of a participant.
            NotInProgress: the transaction belongs to another process; nothing was done.
        """
        if self.is_forked:
            self._require_own()
        self._ended = True
        failures = Failures()
        try:
            # Roll back before the abort: an abort makes the writes visible, so they must be gone by then.
            for participant in self._participants:
                with failures:
                    await wait_for_result(participant.rollback_tx())
                    self._undone += 1
            with failures:
                await self._take_back_messages()
        finally:
            await self._end()
        failures.raise_first()

    async def release_uncounted(self) -> None:
        """Release the claims without counting deliveries, after a failure of a server or connection.

        Call it for transactions that were decided without a response. A committed transaction keeps its claims.

        Raises:
            TransactionError, MessagingError: no server responds.
        """
        uncounted = [claims for claims in self._claims.values() if not claims.counts]
        # The commit may still arrive. `_is_visible` invalidates the transaction first, so that it cannot commit after
        # its messages were delivered to another worker.
        if uncounted and not await self._is_visible():
            for claims in uncounted:
                await claims.rollback_tx()

    def _stop_counting(self, error: BaseException) -> None:
        """Do not count the claims as deliveries if a server or connection failed, not the program."""
        if isinstance(error, INTERRUPTED):
            for claims in self._claims.values():
                claims.counts = False

    async def _write_all(self) -> None:
        """Write everything that precedes the commit; roll it back if that fails."""
        self.require_open()
        try:
            await self._prepare()
        except BaseException as error:
            self._stop_counting(error)
            await self.roll_back()
            raise

    async def _prepare(self) -> None:
        if self._incomplete or self._doubtful:
            raise Invalidated("An operation in the transaction failed.", "Repeat the whole transaction.")
        if self._changes():
            await self._ask()
        for participant in self._participants:
            await wait_for_result(participant.commit_tx())
        with self._mark_doubtful():
            await self._outbox.publish()

    def _changes(self) -> list[bytes]:
        return [key for participant in self._participants for key in participant.tx_changes()]

    async def _ask(self) -> None:
        """Check that no overlapping transaction has changed the same keys.

        Raises:
            Conflict: another transaction has changed one of them.
        """
        with self._mark_doubtful():
            await self._call(self._service.can_commit, self.transaction.transaction_id, self._changes())

    async def _commit(self, commit: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Commit with a call, and return its result; None: there was no response, and the commit was successful."""
        found = None
        try:
            try:
                found = await self._core.repeat(lambda _: commit(), again=False)
            except Conflict:
                # A restarted service may have lost the registered changes; otherwise this raises the conflict again.
                await self._ask()
                found = await self._core.repeat(lambda _: commit(), again=False)
        except UNKNOWN as error:
            await self._find_out(error)
        except TmsError as error:
            self._stop_counting(error)
            await self.roll_back()
            raise
        except BaseException:
            # The wait was interrupted. An invalidation does not affect a committed transaction.
            self._ended = self._doubtful = True
            await self._end()
            raise
        self._ended = True
        return found

    async def _follow(self) -> None:
        """Notify every participant of the commit, even if one of them raises.

        Raises:
            PostCommitFailed: a participant raised.
        """
        failures = Failures()
        for participant in self._participants:
            with failures:
                await wait_for_result(participant.post_tx_commit())
        try:
            failures.raise_first()
        except Exception as error:
            pointer = self.transaction.transaction_id
            raise PostCommitFailed(
                f"Transaction {pointer} is committed, but an action after the commit failed: {error}",
                "Do not repeat the transaction.",
            ) from error

    async def _find_out(self, unanswered: TmsError) -> None:
        """Return if the transaction is committed although its commit got no response.

        Raises:
            Invalidated: it is not committed, and never will be.
            OutcomeUnknown: no server responds.
        """
        self._ended = self._doubtful = True
        self._stop_counting(unanswered)
        pointer = self.transaction.transaction_id
        try:
            committed = await self._is_visible()
        except TransactionError as error:
            raise OutcomeUnknown(
                f"The outcome of transaction {pointer} is unknown: {error.message}",
                "Read the topic to find out: the messages become visible together, or never.",
            ) from error
        except BaseException:
            await self._end()
            raise
        if committed:
            logger.info("transaction %d is committed, although the server did not respond to the commit", pointer)
            return
        # After the invalidation, no late commit is possible, so participants may undo their writes.
        failures = Failures()
        for participant in self._participants:
            with failures:
                await wait_for_result(participant.rollback_tx())
        failures.raise_first()
        raise Invalidated(
            f"The commit of transaction {pointer} got no response and was not executed.",
            "Repeat the whole transaction.",
        ) from unanswered

    async def _is_visible(self) -> bool:
        """Return whether the writes are visible; if the transaction is still in progress, invalidate it."""
        pointer = self.transaction.transaction_id
        # Invalidate first: a snapshot alone could be older than a commit that is still on its way.
        return not await self._invalidate() and pointer in await visible_now(self._core, [pointer])

    async def _end(self) -> None:
        """Abort the transaction if every write was certainly rolled back; otherwise invalidate it.

        An abort makes remaining writes visible, because the transaction is then neither in progress nor invalid.
        """
        certain = not self._doubtful and self._undone == len(self._participants) + 1
        pointer = self.transaction.transaction_id
        with _left_to_time_out(pointer):
            try:
                if certain:
                    await self._call(self._service.abort, self.transaction)
                else:
                    await self._invalidate()
            except TransactionError:
                raise
            except BaseException:
                # The wait was interrupted. An invalidation does not affect a transaction that has ended.
                with _left_to_time_out(pointer):
                    await self._invalidate()
                raise

    async def _take_back_messages(self) -> None:
        try:
            await self._outbox.roll_back()
        except TmsError as error:
            logger.warning("transaction %d is invalidated: %s", self.transaction.transaction_id, error)
        else:
            self._undone += 1

    async def _invalidate(self) -> bool:
        return await self._call(self._service.invalidate, self.transaction.transaction_id, again=True)

    async def _call(self, function: Callable[..., T], *args: object, again: bool = False) -> T:
        return await self._core.repeat(lambda _: self._core.wire.call_blocking(function, *args), again=again)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Run a step that the transaction needs: if it fails, the transaction cannot commit any longer."""
        self.require_open()
        try:
            with self._mark_doubtful():
                yield
        except BaseException:
            self._incomplete = True
            raise

    @contextmanager
    def _run_request(self) -> Iterator[None]:
        """Run a request of the program: a rejected request did nothing, so the transaction may still commit."""
        self.require_open()
        with self._mark_doubtful():
            yield

    @contextmanager
    def _mark_doubtful(self) -> Iterator[None]:
        """Mark the transaction as doubtful if a request may have been executed: no response, or an interrupted wait."""
        try:
            yield
        except BaseException as error:
            self._doubtful |= isinstance(error, UNKNOWN) or not isinstance(error, TmsError)
            self._stop_counting(error)
            raise


async def publish(
    core: Core,
    topic: Topic,
    messages: Sequence[bytes],
    ttl: timedelta | int | str | None,
    key: Key | None,
    participants: Sequence[Participant] = (),
) -> None:
    """Publish outside a transaction; the copies for a topic with routes are published in a new transaction.

    Args:
        participants: the participants of that transaction.
    """
    name, number = topic_id(topic), number_for(core, key)
    if isinstance(number, Mapping) and name not in core.layouts:
        await read_layout(core, name)
    try:
        if len(places(core, name, number)) == 1 and not isinstance(number, Mapping):
            await send_to_partition(core, name, number, lambda place: core.ask(calls.publish(place, messages, ttl)))
            return
    except PartitionsChanged:
        if len(places(core, name, number)) == 1:
            raise
    transaction = await ClientTransaction.begin(core, participants=participants)
    try:
        await transaction.publish(name, messages, ttl, key)
    except BaseException:
        await transaction.roll_back()
        raise
    await transaction.commit()


async def publish_in(
    core: Core, topic: Topic, messages: Sequence[bytes], transaction: Transaction, ttl: timedelta | int | str | None
) -> RollbackRange:
    """Publish in a transaction; a transaction of this client includes the publish in its rollback."""
    call = calls.publish_in(topic, messages, transaction.write_pointer, ttl)
    known = core.transactions.get((os.getpid(), transaction.transaction_id))
    return await (core.ask(call) if known is None else known.publish_now(core, topic_id(topic), call))


async def store_in(core: Core, topic: Topic, messages: Sequence[bytes], transaction: Transaction) -> None:
    """Store payloads in a transaction; a transaction of this client records an unknown outcome."""
    call = calls.store(topic, messages, transaction.write_pointer)
    known = core.transactions.get((os.getpid(), transaction.transaction_id))
    await (core.ask(call) if known is None else known.store_now(core, call))


async def visible_now(core: Core, pointers: Sequence[int]) -> set[int]:
    """Return the pointers whose writes are visible to a new transaction."""
    later = await core.repeat(lambda _: core.wire.call_blocking(view_of, core.service), again=True)
    return {pointer for pointer in pointers if later.is_visible(pointer)}


def view_of(service: TransactionClient) -> Transaction:
    """Return the snapshot of a new transaction, which is aborted, because reads need no open transaction."""
    view = service.start_short()
    service.abort(view)
    return view


def _holder() -> str:
    """Return the name of this process for operators."""
    return f"{os.getpid()}@{socket.gethostname()}"


def _give_up(service: TransactionClient, transaction: Transaction) -> None:
    """Abort a transaction in which nothing was done."""
    with _left_to_time_out(transaction.transaction_id):
        service.abort(transaction)


@contextmanager
def _left_to_time_out(pointer: int) -> Iterator[None]:
    """Log an error of the service instead of raising it: the transaction times out."""
    try:
        yield
    except TransactionError as error:
        logger.warning("transaction %d will time out: %s", pointer, error)
