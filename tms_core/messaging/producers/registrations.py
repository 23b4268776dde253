"""Registrations of producers: the newest instance of a producer fences all older instances.

A registration stores a higher generation, waits for running requests of older instances, and invalidates their open
transactions. Therefore no message of an older generation becomes visible after its response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from tms_core.clock import HonestClock
from tms_core.errors import BadRequest, ProducerNotFound, TransactionEnded, Unavailable
from tms_core.messaging.cached_rows import CountedNames
from tms_core.messaging.producers.requests import Requests, Sent, check
from tms_core.messaging.producers.rows import (
    NO_INSTANCE,
    LastTransaction,
    ProducerName,
    Registration,
    StartedTransaction,
    TransactionOutcome,
    earlier_homes,
    last_of,
    next_generation,
    producers_of,
    registration,
    requests_by,
    transactions_of,
)
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager

#: The hint for a topic with too many producers.
_REUSE_NAMES = "Use the same name at each start of a program. Names without requests are deleted after a week."
#: The default of ``ended``: the client reports no outcomes.
_NO_OUTCOMES: Mapping[int, TransactionOutcome] = MappingProxyType({})


class Registered(NamedTuple):
    """The response to the registration of an instance.

    Attributes:
        previous: the last transaction of older instances, with its outcome; None: no transaction.
        undecided: transactions of older instances that may still be committed. The client must invalidate them and
            report their outcomes. Empty if the manager is in this process.
    """

    generation: int
    previous: LastTransaction | None
    undecided: Sequence[int]


class Producers:
    """The producers of one store's topics; threads may share it.

    Args:
        transactions: the manager in this process; None: another process manages transactions, and clients report their
            outcomes.
        hide_late: hides late rows of a producer's requests from all readers.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        side: SideTable,
        clock: HonestClock,
        transactions: TransactionManager | None,
        requests: Requests,
        hide_late: Callable[[ProducerName], None],
    ) -> None:
        self._topics = topics
        self._side = side
        self._clock = clock
        self._transactions = transactions
        self._requests = requests
        self._hide_late = hide_late
        self._names = CountedNames(side)

    def register(
        self,
        home: TopicId,
        name: str,
        instance: UUID,
        ended: Mapping[int, TransactionOutcome] = _NO_OUTCOMES,
        principal: str | None = None,
    ) -> Registered:
        """Register an instance, and fence all older instances. Durable on return, and idempotent for an instance.

        Args:
            instance: a random id of the instance.
            ended: the outcomes of the transactions that the first registration of this instance returned as undecided.
            principal: the requesting principal; transactions of other principals are not changed. None: clients are
                not authenticated.

        Raises:
            BadRequest: the name or the instance is invalid, or the topic has too many producers.
            Unavailable: another instance is being registered, requests of an older instance take too long, or a
                transaction of another principal is open; try again.
            TopicNotFound, MetadataError, StoreError: the topic does not exist, its row is damaged, or the store failed.
        """
        if instance == NO_INSTANCE:
            raise BadRequest("The instance id 0 is reserved.", "Use a random instance id.")
        producer = self._requests.producer(home, name)
        with self._requests.in_flight.lock(producer.key):
            raw = self._side.get(producer.key)
            known = None if raw is None else registration(raw)
            highest = 0
            if known is None:
                self._names.count_new(producer._replace(name="").key, home, "producers", _REUSE_NAMES)
                for earlier in earlier_homes(self._side, producer):
                    with self._requests.in_flight.lock(earlier.key):
                        highest = max(highest, self._fence(earlier).generation)
            if known is None or known.instance != instance:
                now_ms = self._clock.now_ms()
                previous = None if known is None else known.previous
                made = Registration(next_generation(known, highest, now_ms), instance, now_ms, previous, settled=False)
                self._change(producer.key, raw, made)
                known = made
            # In this order: the stored generation rejects new requests of older instances, the wait covers running
            # requests, and hide_late covers rows of a former leader. Only then can no open transaction of an older
            # instance get more rows.
            self._requests.in_flight.wait_for_older(producer.key, name, known.generation)
            self._hide_late(producer)
            return self._settle(producer, known, ended, principal)

    def of(self, home: TopicId) -> list[tuple[str, Registration, list[StartedTransaction]]]:
        """Return a topic's producers with their open transactions, sorted by name; raises as :meth:`register`."""
        metadata = self._topics.get(home)
        return [(one.name, known, self._open(one)) for one, known in producers_of(self._side, metadata)]

    def get(self, home: TopicId, name: str) -> tuple[Registration, list[StartedTransaction]]:
        """Return a producer, and its open transactions.

        Raises:
            ProducerNotFound: the topic has no producer of that name.
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`register`.
        """
        producer = self._requests.producer(home, name)
        return self._read_registration(producer), self._open(producer)

    def delete(self, home: TopicId, name: str, principal: str | None = None) -> None:
        """Delete a producer: fence its instance, and invalidate its open transactions.

        A repeated call completes an interrupted deletion.

        Raises:
            ProducerNotFound, BadRequest, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`get`.
        """
        producer = self._requests.producer(home, name)
        with self._requests.in_flight.lock(producer.key):
            self._read_registration(producer, deleting=True)
            fenced = self._fence(producer)
            older = self._older(producer, fenced, _NO_OUTCOMES, principal)
            # Keep the rows of undecided transactions, so that a later instance of the name invalidates them.
            decided = [key for key, _, outcome in older if outcome is not TransactionOutcome.PENDING]
            # The registration remains until the janitor deletes it, so that no generation is assigned twice.
            forgotten = fenced._replace(previous=None, settled=True)
            self._change(producer.key, fenced.pack(), forgotten, [*decided, *requests_by(self._side, producer)])

    def store_transaction(self, sent: Sent, pointer: int, principal: str | None = None) -> None:
        """Store a transaction without messages, so that a newer instance invalidates it. Durable on return.

        Call this before the commit. Otherwise claims, and data in other systems, could be committed although a newer
        instance is registered.

        Raises:
            BadRequest, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`register`.
            ProducerFenced: a newer instance is registered.
            TransactionEnded: the transaction is not in progress, or was rolled back.
        """
        check(sent)
        producer = self._requests.producer(sent.home, sent.name)
        manager = self._transactions
        # From here on, an abort invalidates the transaction: a stored transaction that is aborted counts as committed.
        is_open = manager is None or manager.begin_write(pointer, principal)
        try:
            self._requests.require_newest(sent)
            value = self._side.get(key := producer.transaction_key(pointer))
            if not is_open or (value is not None and StartedTransaction.parse(key, value).void):
                raise TransactionEnded(f"Transaction {pointer} has ended.", "Start another transaction.")
            if value is None:
                made = StartedTransaction(pointer, sent.generation, void=False, label=sent.label).pack()
                deletes = self._requests.obsolete_transactions(producer, pointer, sent)
                if manager is not None:
                    manager.note_written(pointer, producer.label)
                self._requests.change((sent.name, SideChange(key, None, made, deletes=deletes)))
            # Check again after the row is durable: an instance registered in between has not seen the row.
            self._requests.require_newest(sent)
        finally:
            if manager is not None and is_open:
                manager.end_write(pointer)

    def require_newest(self, sent: Sent) -> None:
        """Check that a request comes from the newest instance; raises as :meth:`roll_back`."""
        self._requests.require_newest(sent)

    def roll_back(self, sent: Sent, pointer: int) -> None:
        """Mark a transaction as rolled back, before its messages are rolled back. Durable on return.

        Call this before the abort, because readers treat the pointer of an aborted transaction as committed.

        Raises:
            BadRequest, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`register`; after a StoreError,
                invalidate the transaction.
            ProducerFenced: a newer instance is registered.
        """
        self._requests.require_newest(sent)
        producer = self._requests.producer(sent.home, sent.name)
        key = producer.transaction_key(pointer)
        value = self._side.get(key)
        if value is None:
            return
        started = StartedTransaction.parse(key, value)
        if not started.void:
            self._requests.change((sent.name, SideChange(key, value, started._replace(void=True).pack())))
        if self._transactions is not None:
            self._transactions.note_rolled_back(pointer, producer.label)

    def invalidate(self) -> None:
        """Drop cached data, because another process may have written."""
        self._names.invalidate()
        self._requests.invalidate()

    # -- internals ----------------------------------------------------------------------------------------------------

    def _read_registration(self, producer: ProducerName, *, deleting: bool = False) -> Registration:
        """Return a producer's registration; with ``deleting``, also if its deletion was interrupted."""
        raw = self._side.get(producer.key)
        known = None if raw is None else registration(raw)
        if known is None or (known.instance == NO_INSTANCE and not (deleting and not known.settled)):
            raise ProducerNotFound(
                f"Topic {producer.home} has no producer {producer.name}.",
                f"List the producers: tms producer list {producer.home}",
            )
        return known

    def _open(self, producer: ProducerName) -> list[StartedTransaction]:
        return [
            started for _, started in transactions_of(self._side, producer) if not self._requests.is_decided(started)
        ]

    def _change(self, key: bytes, raw: bytes | None, known: Registration, deletes: Sequence[bytes] = ()) -> None:
        self._requests.change(("of this name", SideChange(key, raw, known.pack(), deletes=deletes)))

    def _fence(self, producer: ProducerName) -> Registration:
        """Fence all instances of a producer, wait for their running requests, and hide their late rows."""
        raw = self._side.get(producer.key)
        known = Registration(0, NO_INSTANCE, 0, None, settled=True) if raw is None else registration(raw)
        if known.instance != NO_INSTANCE:
            known = known._replace(generation=known.generation + 1, instance=NO_INSTANCE, settled=False)
            self._change(producer.key, raw, known)
        self._requests.in_flight.wait_for_older(producer.key, producer.name, known.generation)
        self._hide_late(producer)
        return known

    def _settle(
        self,
        producer: ProducerName,
        known: Registration,
        ended: Mapping[int, TransactionOutcome],
        principal: str | None,
    ) -> Registered:
        """Invalidate open transactions of older generations, and store the outcome of the last transaction.

        While a transaction is undecided, no row is deleted, because the next instance needs the same rows.
        """
        if known.settled:
            return Registered(known.generation, known.previous, [])
        older, inherited = self._older(producer, known, ended, principal), known.previous
        outcomes = [(started, outcome) for _, started, outcome in older]
        if inherited is not None and inherited.outcome is TransactionOutcome.PENDING:
            unsettled = StartedTransaction(inherited.transaction, 0, void=False, label=inherited.label)
            outcomes, inherited = [(unsettled, self._outcome(unsettled, ended, principal)), *outcomes], None
        previous = last_of(outcomes, inherited)
        # A topic that was created again is a different home: open transactions of the old home are invalidated, but
        # their outcomes are not reported as `previous`.
        for earlier in earlier_homes(self._side, producer):
            rows = transactions_of(self._side, earlier)
            earlier_outcomes = [(key, started, self._outcome(started, ended, principal)) for key, started in rows]
            older += earlier_outcomes
            outcomes += [(started, outcome) for _, started, outcome in earlier_outcomes]
        undecided = [started.pointer for started, outcome in outcomes if outcome is TransactionOutcome.PENDING]
        if not undecided:
            settled = known._replace(previous=previous, settled=True)
            self._change(producer.key, known.pack(), settled, [key for key, *_ in older])
        return Registered(known.generation, previous, undecided)

    def _older(
        self,
        producer: ProducerName,
        known: Registration,
        ended: Mapping[int, TransactionOutcome],
        principal: str | None,
    ) -> list[tuple[bytes, StartedTransaction, TransactionOutcome]]:
        """Return the transactions of older generations with their outcomes; invalidate open ones if managed here."""
        rows = [
            (key, started)
            for key, started in transactions_of(self._side, producer)
            if started.generation < known.generation
        ]
        return [(key, started, self._outcome(started, ended, principal)) for key, started in rows]

    def _outcome(
        self, started: StartedTransaction, ended: Mapping[int, TransactionOutcome], principal: str | None
    ) -> TransactionOutcome:
        """Return the outcome of a transaction; first invalidate it if it is open and belongs to the principal."""
        manager = self._transactions
        if started.void:
            return TransactionOutcome.ABORTED
        if manager is None:
            return ended.get(started.pointer, TransactionOutcome.PENDING)
        if not manager.belongs_to(started.pointer, principal):
            raise Unavailable(
                f"Transaction {started.pointer} of an older instance is open and belongs to another principal.",
                f"Try again when the transaction has ended, or invalidate it: tms tx invalidate {started.pointer}",
            )
        if manager.invalidate(manager.transaction_of(started.pointer)) or self._requests.is_aborted(started):
            return TransactionOutcome.ABORTED
        return TransactionOutcome.COMMITTED
