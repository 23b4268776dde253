"""The rows of producers in the side table: registrations, transactions and last requests.

A producer belongs to a topic, its *home*. Each registered instance gets a higher *generation*; requests of older
instances are rejected from then on. The side table (:mod:`tms_core.tables.side`) has these rows:

* ``w`` + home + generation of the home + name: the producer (:class:`Registration`).
* ``t`` + home + generation of the home + ``p`` + name + 0 + write pointer: a transaction of the producer
  (:class:`StartedTransaction`). Like a claim, it takes effect if the transaction is committed. A rolled back
  transaction is marked as void.
* ``q`` + topic + generation + home + 0 + name: the last request to that topic (``LastRequest`` in
  :mod:`.last_request`). Its ids are reserved. In a store on this machine it may also cover future requests.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, cast
from uuid import UUID

from tms_core.errors import FormatError, quoted
from tms_core.messaging.ids import tail
from tms_core.messaging.producers.last_request import LastRequest
from tms_core.rowkey import GENERATION_BYTES, generation_prefix, stop_key, topic_prefix
from tms_core.tables.base import iterate_items
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import transaction_ms

_PRODUCER, _TRANSACTIONAL, _TRANSACTION, _REQUEST = b"w", b"t", b"p", b"q"
_REGISTRATION = struct.Struct(">q16sqqBB")
_POINTER, _TRANSACTION_VALUE = struct.Struct(">q"), struct.Struct(">qB")
#: The instance of a producer that is deleted, or forgotten because it was idle.
NO_INSTANCE = UUID(int=0)
#: A producer without open transactions is forgotten after this time without a request, in milliseconds.
IDLE_MS = 7 * 86_400_000


class TransactionOutcome(Enum):
    """The outcome of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    PENDING = "pending"


_OUTCOMES = (None, TransactionOutcome.COMMITTED, TransactionOutcome.ABORTED, TransactionOutcome.PENDING)


class ProducerName(NamedTuple):
    """The identity of a producer: its home, the home's generation, and its name."""

    home: TopicId
    home_generation: int
    name: str

    @classmethod
    def of(cls, home: TopicMetadata, name: str) -> ProducerName:
        """Return a producer of the current generation of a topic."""
        return cls(home.topic, home.generation, name)

    @property
    def key(self) -> bytes:
        """Return the key of the registration."""
        return _PRODUCER + generation_prefix(self.home.prefix, self.home_generation) + self.name.encode("ascii")

    @property
    def transactions_prefix(self) -> bytes:
        """Return the key prefix of the producer's transactions."""
        prefix = generation_prefix(self.home.prefix, self.home_generation)
        return _TRANSACTIONAL + prefix + _TRANSACTION + self.name.encode("ascii") + b"\0"

    def transaction_key(self, pointer: int) -> bytes:
        """Return the key of a transaction of the producer."""
        return self.transactions_prefix + _POINTER.pack(pointer)

    def request_key(self, prefix: bytes) -> bytes:
        """Return the key of the last request to the topic and generation with this row key prefix."""
        return _REQUEST + prefix + self.home.prefix + b"\0" + self.name.encode("ascii")

    @property
    def label(self) -> str:
        """Return a description for messages to operators."""
        return f"producer {self.name} of {self.home}"


class LastTransaction(NamedTuple):
    """The last transaction of older instances that was not aborted; if all were aborted, the last of them."""

    transaction: int
    label: str
    outcome: TransactionOutcome


class Registration(NamedTuple):
    """The registration of a producer.

    Attributes:
        generation: the generation of the newest instance. The first generation of a name is the time in milliseconds,
            so that a name never has the same generation twice.
        instance: the newest instance; all zeros: the producer was forgotten.
        updated_ms: the time of the registration in milliseconds.
        previous: the last transaction of older instances, with its outcome; None: no transaction.
        settled: whether ``previous`` is final.
    """

    generation: int
    instance: UUID
    updated_ms: int
    previous: LastTransaction | None
    settled: bool

    def pack(self) -> bytes:
        """Return the value of its row."""
        pointer, label, outcome = self.previous or (0, "", None)
        numbers = (self.generation, self.instance.bytes, self.updated_ms, pointer)
        return _REGISTRATION.pack(*numbers, _OUTCOMES.index(outcome), self.settled) + label.encode()

    @classmethod
    def parse(cls, value: bytes) -> Registration:
        """Parse the value of a row.

        Raises:
            FormatError: the value is damaged.
        """
        try:
            *numbers, number, settled = _REGISTRATION.unpack(value[: _REGISTRATION.size])
            outcome, label = _OUTCOMES[number], value[_REGISTRATION.size :].decode()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise FormatError(f"the row of a producer cannot be read: {error}") from error
        generation, instance, updated_ms, pointer = numbers
        previous = None if outcome is None else LastTransaction(pointer, label, outcome)
        return cls(generation, UUID(bytes=instance), updated_ms, previous, bool(settled))


registration = lru_cache(maxsize=4096)(Registration.parse)


@lru_cache(maxsize=4096)
def newest_generation(value: bytes) -> int | None:
    """Return the newest generation in the value of a producer's row; None: the producer was forgotten."""
    known = registration(value)
    return None if known.instance == NO_INSTANCE else known.generation


class StartedTransaction(NamedTuple):
    """A stored transaction of a producer.

    Attributes:
        void: whether the transaction was rolled back, or is invalid.
        label: the label that the client has given it.
    """

    pointer: int
    generation: int
    void: bool
    label: str

    def pack(self) -> bytes:
        """Return the value of its row."""
        return _TRANSACTION_VALUE.pack(self.generation, self.void) + self.label.encode()

    @classmethod
    def parse(cls, key: bytes, value: bytes) -> StartedTransaction:
        """Parse a row.

        Raises:
            FormatError: the row is damaged.
        """
        try:
            (pointer,) = _POINTER.unpack(key[-_POINTER.size :])
            generation, void = _TRANSACTION_VALUE.unpack(value[: _TRANSACTION_VALUE.size])
            return cls(pointer, generation, bool(void), value[_TRANSACTION_VALUE.size :].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise FormatError(f"the transaction {quoted(key)} of a producer cannot be read: {error}") from error


# --- rules -----------------------------------------------------------------------------------------------------------


def next_generation(known: Registration | None, earlier: int, now_ms: int) -> int:
    """Return the generation of a new instance: the last generation plus 1, or for a new name the time in milliseconds.

    A forgotten name restarts above all its earlier generations, unless it had an instance in each millisecond.

    Args:
        earlier: the highest generation in old generations of the home, which may be of this millisecond; 0: none.
    """
    return max(now_ms, earlier + 1) if known is None else known.generation + 1


def last_of(
    transactions: list[tuple[StartedTransaction, TransactionOutcome]], inherited: LastTransaction | None
) -> LastTransaction | None:
    """Return the transaction after which a new instance continues: the newest not aborted one, else the newest.

    Args:
        transactions: transactions with their outcomes.
        inherited: the result of the previous registration, which is older than all these transactions.
    """
    found = [] if inherited is None else [inherited]
    for one, outcome in sorted(transactions, key=lambda pair: (pair[0].generation, pair[0].pointer)):
        found.append(LastTransaction(one.pointer, one.label, outcome))
    candidates = [previous for previous in found if previous.outcome is not TransactionOutcome.ABORTED]
    return next(reversed(candidates or found), None)


# --- rows ------------------------------------------------------------------------------------------------------------


def is_of_producer(key: bytes) -> bool:
    """Return whether a key of the side table belongs to a producer's registration or transaction."""
    prefix = topic_prefix(key[1:]) if key[:1] == _TRANSACTIONAL else None
    return key[:1] == _PRODUCER or (
        prefix is not None and key[1 + len(prefix) + GENERATION_BYTES :][:1] == _TRANSACTION
    )


def transactions_of(
    side: SideTable, producer: ProducerName, before: int | None = None, limit: int | None = None
) -> list[tuple[bytes, StartedTransaction]]:
    """Return the stored transactions of a producer with their keys, oldest first.

    Args:
        before: return only transactions with a lower pointer; None: all.
        limit: the maximum number of transactions; None: unlimited.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read.
    """
    stop = stop_key(producer.transactions_prefix) if before is None else producer.transaction_key(before)
    rows = (
        iterate_items(side.rows, producer.transactions_prefix, stop)
        if limit is None
        else side.rows(producer.transactions_prefix, stop, limit).items
    )
    return [(key, StartedTransaction.parse(key, value)) for key, value in rows]


def started_transactions(side: SideTable) -> Iterator[tuple[ProducerName, StartedTransaction]]:
    """Yield the stored transactions of all producers, including producers of old generations.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read.
    """
    for key, value in _rows(side, _TRANSACTIONAL):
        producer = _transaction_owner(key)
        if producer is not None:
            yield producer, StartedTransaction.parse(key, value)


def producers_of(side: SideTable, home: TopicMetadata) -> list[tuple[ProducerName, Registration]]:
    """Return the producers of a topic, in the order of their names."""
    found = ((_producer(key), Registration.parse(value)) for key, value in _rows(side, ProducerName.of(home, "").key))
    return [(producer, one) for producer, one in found if producer is not None and one.instance != NO_INSTANCE]


def earlier_homes(side: SideTable, producer: ProducerName) -> list[ProducerName]:
    """Return the producers of the same name in old generations of the home."""
    found: list[ProducerName] = []
    start, stop = (
        _PRODUCER + generation_prefix(producer.home.prefix, number) for number in (0, producer.home_generation)
    )
    while rows := side.rows(start, stop, 1).items:
        generation = cast(ProducerName, _producer(rows[0][0])).home_generation
        found.append(producer._replace(home_generation=generation))
        start = _PRODUCER + generation_prefix(producer.home.prefix, generation + 1)
    return found


def requests_by(side: SideTable, producer: ProducerName) -> list[bytes]:
    """Return the keys of a producer's last requests to all topics."""
    return [key for key, _ in _rows(side, _REQUEST) if _home_and_name(key) == (producer.home, producer.name)]


def topics_requested(side: SideTable, home: TopicId) -> set[bytes]:
    """Return the row key prefixes of all topics and generations to which producers of a home have sent requests."""
    found = set()
    for key, _ in _rows(side, _REQUEST):
        if _home_and_name(key)[0] == home and (topic := topic_prefix(key[1:])) is not None:
            found.add(key[1 : 1 + len(topic) + GENERATION_BYTES])
    return found


def first_unannounced(side: SideTable, prefix: bytes) -> int:
    """Return the first position after all announcements of producers in a generation of a topic.

    Args:
        prefix: the row key prefix of the generation.
    """
    found = (LastRequest.parse(value) for _, value in _rows(side, _REQUEST + prefix))
    return max((request.stop for request in found), default=0)


def announced_ahead(side: SideTable, prefix: bytes) -> list[tuple[bytes, bytes]]:
    """Return the key ranges that announcements reserve for future requests, each as start and stop.

    Do not write other rows there: after a restart, the server would treat them as rows of a producer.

    Args:
        prefix: the row key prefix of the generation.
    """
    found = (LastRequest.parse(value) for _, value in _rows(side, _REQUEST + prefix))
    pairs = ((one.first + one.number, one.until) for one in found if one.until)
    return [(prefix + tail(first), prefix + tail(until)) for first, until in pairs]


def clean_producer_rows(
    side: SideTable,
    is_invalid: Callable[[int], bool],
    is_undecided: Callable[[int], bool],
    is_deleted: Callable[[TopicId, int], bool],
    idle_before_ms: int,
) -> tuple[int, int]:
    """Mark invalid transactions of producers as void, and forget idle producers and producers of deleted topics.

    Call this before a transaction is removed from the invalid list, because it would count as committed afterwards. For
    the same reason, an invalid previous transaction that was undecided at a registration is marked as aborted.

    Args:
        is_invalid: whether a transaction is on the invalid list.
        is_undecided: whether a transaction may still be committed; its producer is not idle.
        is_deleted: whether a topic was deleted, or has another generation.
        idle_before_ms: producers without a request since this time are forgotten.

    Returns:
        The number of marked transactions, and the number of forgotten producers.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read or written.
    """
    # Read transactions and requests before registrations: a producer that is registered in between then appears without
    # rows, and loses nothing. In the other order, its rows would appear as orphans, and be deleted.
    marked, transactions, active, opened = _mark_void(side, is_invalid, is_undecided, idle_before_ms)
    requested = list(_rows(side, _REQUEST))
    producers = dict(_rows(side, _PRODUCER))
    for key, value in producers.items():
        producers[key] = _mark_previous(side, key, value, is_invalid)
        marked += producers[key] != value
    homes: dict[tuple[TopicId | None, str], bytes] = {
        (one.home, one.name): key for key in producers if (one := _producer(key)) is not None
    }
    requests: dict[bytes, list[bytes]] = {}
    obsolete: list[bytes] = []
    for key, value in requested:
        home, topic = homes.get(_home_and_name(key)), _producer(key)
        if home is None or topic is None or is_deleted(topic.home, topic.home_generation):
            obsolete.append(key)
        else:
            active[home] = max(active.get(home, 0), LastRequest.parse(value).first >> 16)
            requests.setdefault(home, []).append(key)
    forgotten = 0
    for key, value in producers.items():
        producer, known = _producer(key), Registration.parse(value)
        rows = [*transactions.pop(key, ()), *requests.get(key, ())]
        if producer is None or is_deleted(producer.home, producer.home_generation):
            # Keep open transactions: the first instance after a new creation of the topic invalidates them.
            obsolete += [] if key in opened else [key, *rows]
        elif max(known.updated_ms, active.get(key, 0)) >= idle_before_ms:
            continue
        elif known.instance == NO_INSTANCE:
            obsolete.append(key)
        else:
            # Compare-and-set, because a server may be changing the row; a later pass deletes the row. Drop `previous`
            # as well, which is older than the transactions that are forgotten here.
            forgotten += side.exchange(
                key, value, known._replace(instance=NO_INSTANCE, previous=None, settled=True).pack(), deletes=rows
            )
    side.delete([*obsolete, *(key for keys in transactions.values() for key in keys)])
    return marked, forgotten


def mark_void(side: SideTable, is_invalid: Callable[[int], bool]) -> int:
    """Mark invalid transactions of producers as void, as :func:`clean_producer_rows` does. Durable on return.

    Returns:
        The number of marked transactions.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read or written.
    """
    marked, *_ = _mark_void(side, is_invalid, lambda _: False, 0)
    return marked + sum(
        _mark_previous(side, key, value, is_invalid) != value for key, value in list(_rows(side, _PRODUCER))
    )


def _mark_void(
    side: SideTable,
    is_invalid: Callable[[int], bool],
    is_undecided: Callable[[int], bool],
    idle_before_ms: int,
) -> tuple[int, dict[bytes, list[bytes]], dict[bytes, int], set[bytes]]:
    """Mark invalid transactions as void.

    Returns:
        The number of marked transactions; for each producer the keys of its transactions, and the start of the newest
        transaction (ms); and the producers with open transactions.
    """
    marked, opened = 0, set[bytes]()
    keys: dict[bytes, list[bytes]] = {}
    active: dict[bytes, int] = {}
    for key, value in _rows(side, _TRANSACTIONAL):
        producer = _transaction_owner(key)
        if producer is None:
            continue
        started = StartedTransaction.parse(key, value)
        if not started.void and is_invalid(started.pointer):
            marked += side.exchange(key, value, started._replace(void=True).pack())
        is_open = not started.void and is_undecided(started.pointer)
        opened.update([producer.key] if is_open else [])
        active_ms = max(transaction_ms(started.pointer), idle_before_ms if is_open else 0)
        active[producer.key] = max(active.get(producer.key, 0), active_ms)
        keys.setdefault(producer.key, []).append(key)
    return marked, keys, active, opened


def _mark_previous(side: SideTable, key: bytes, value: bytes, is_invalid: Callable[[int], bool]) -> bytes:
    """Mark an invalid previous transaction as aborted, and return the new value of the registration."""
    while True:
        known = Registration.parse(value)
        previous = known.previous
        if (
            previous is None
            or previous.outcome is not TransactionOutcome.PENDING
            or not is_invalid(previous.transaction)
        ):
            return value
        marked = known._replace(previous=previous._replace(outcome=TransactionOutcome.ABORTED)).pack()
        if side.exchange(key, value, marked):
            return marked
        # A server has changed the row in between: try again with the new value.
        value = side.get(key) or marked


def _rows(side: SideTable, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    return iterate_items(side.rows, prefix, stop_key(prefix))


def _producer(key: bytes) -> ProducerName | None:
    """Return the producer of a registration's key."""
    prefix = topic_prefix(key[1:])
    home = None if prefix is None else TopicId.from_prefix(prefix)
    if home is None or prefix is None:
        return None
    rest = key[1 + len(prefix) :]
    name = rest[GENERATION_BYTES:].decode("ascii", "replace")
    return ProducerName(home, int.from_bytes(rest[:GENERATION_BYTES], "big"), name)


def _transaction_owner(key: bytes) -> ProducerName | None:
    """Return the producer of a transaction's key; None: the key is of another kind of row."""
    found = _producer(key[: -_POINTER.size])
    kind, name = (found.name[:1], found.name[1:-1]) if found else ("", "")
    return found._replace(name=name) if found and kind == "p" and found.name.endswith("\0") else None


def _home_and_name(key: bytes) -> tuple[TopicId | None, str]:
    """Return the home and the name of the producer of a last request's key."""
    topic = topic_prefix(key[1:]) or b""
    home, zero, name = key[1 + len(topic) + GENERATION_BYTES :].partition(b"\0")
    return TopicId.from_prefix(home), name.decode("ascii", "replace") if zero else ""
