"""Admission of producers' requests: a repeated request gets its first outcome, older instances are rejected.

Before the server writes the rows of a request, it stores their positions (an announcement, see
:mod:`~tms_core.messaging.producers.announcements`). For a repeated request it looks up these positions instead of
writing the rows twice.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

from tms_core.clock import HonestClock
from tms_core.consumers.retention import announced
from tms_core.errors import BadRequest, ProducerFenced, TransactionEnded, Unavailable, quoted
from tms_core.messaging.cached_rows import CachedRows
from tms_core.messaging.ids import ReadKeys, tail
from tms_core.messaging.model import LABEL_BYTES
from tms_core.messaging.producers.in_flight import InFlight
from tms_core.messaging.producers.last_request import LastRequest, RememberedRequest
from tms_core.messaging.producers.rows import ProducerName, StartedTransaction, newest_generation, transactions_of
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.rowkey import LONG_MAX, MESSAGE_TAIL_BYTES, generation_prefix
from tms_core.tables.base import iterate_items
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import CONSUMER_NAME, TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

#: The maximum number of cached last requests, one for each pair of producer and topic.
_KNOWN_REQUESTS = 20_000

#: The maximum number of older transactions, oldest first, that each new transaction checks for deletion.
_MAX_CHECKED = 32


class Sent(NamedTuple):
    """The producer headers of a request.

    Attributes:
        generation: the generation of the instance.
        sequence: the request's number, higher than all earlier numbers; a repeated request has the same number.
        label: the label of the transaction.
        oldest_open: the oldest transaction of the instance that may be open; 0: unknown. All earlier transactions are
            committed, or were reported as rolled back.
    """

    home: TopicId
    name: str
    generation: int
    sequence: int
    label: str = ""
    oldest_open: int = 0


class _Keys(NamedTuple):
    """The keys of a producer for its requests to a topic.

    Attributes:
        registered: the key of the producer's registration.
        request: the key of its last request to the topic.
        messages: the key prefix of the topic's messages.
    """

    producer: ProducerName
    registered: bytes
    request: bytes
    messages: bytes


@lru_cache(maxsize=4096)
def _keys(namespace: str, home: str, home_generation: int, name: str, messages: bytes) -> _Keys:
    """Return the keys of a producer for its requests to a topic.

    Args:
        namespace, home: the namespace and the name of the producer's home.
        messages: the key prefix of the topic's messages.

    Raises:
        BadRequest: the name is invalid.
    """
    if not CONSUMER_NAME.fullmatch(name):
        raise BadRequest(f"{quoted(name)} cannot be a producer.", "Use at most 255 letters, digits, '_' and '-'.")
    producer = ProducerName(TopicId(namespace, home), home_generation, name)
    return _Keys(producer, producer.key, producer.request_key(messages), messages)


class Admission(NamedTuple):
    """The state of a producer by which a request was admitted.

    Attributes:
        keys: the keys of the producer for its requests to the topic.
        sent: the producer headers of the request.
        previous: the stored last request; None: no request is stored.
        last: the cached form of ``previous``.
        repeated: the last request, if this request repeats it.
        since: the first position at which rows of an earlier attempt may exist; None: no earlier attempt is possible.
    """

    keys: _Keys
    sent: Sent
    previous: bytes | None
    last: RememberedRequest | None = None
    repeated: RememberedRequest | None = None
    since: int | None = None


#: Creates an Admission faster than its constructor, because every request of a producer needs one.
_admission = partial(tuple.__new__, Admission)


def check(sent: Sent) -> None:
    """Check the number and the label of a request.

    Raises:
        BadRequest: the number or the label is invalid.
    """
    if not 0 < sent.sequence <= LONG_MAX:
        raise BadRequest(f"{sent.sequence} is not a sequence number.", f"Number requests from 1 to {LONG_MAX}.")
    if sent.label and (size := len(sent.label.encode())) > LABEL_BYTES:
        raise BadRequest(f"A label of {size} bytes is too long.", f"Use at most {LABEL_BYTES} bytes.")


class Requests:
    """The requests of one store's producers; threads may share it.

    Args:
        max_lifetime_ms: how long after its start a transaction may write, in milliseconds.
        transactions: the manager in this process; None: another process manages transactions.

    Attributes:
        in_flight: the running requests.
        rows: the cached rows of the side table.
        last: the cached last requests, by their keys.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        side: SideTable,
        clock: HonestClock,
        max_lifetime_ms: int,
        transactions: TransactionManager | None,
        messages: ReadKeys,
    ) -> None:
        self.in_flight = InFlight()
        self._topics = topics
        self._side = side
        self._clock = clock
        self._max_lifetime_ms = max_lifetime_ms
        self._transactions = transactions
        self._messages = messages
        self.rows = CachedRows(side)
        self.last: RecentlySet[bytes, RememberedRequest] = RecentlySet(_KNOWN_REQUESTS)

    @property
    def is_alone(self) -> bool:
        """Return whether only this process writes to the side table; then an announcement may cover future requests."""
        return self._side.private

    def admit(self, topic: TopicMetadata, sent: Sent, pointer: int | None, rows: int) -> Admission:
        """Admit a request, and add it to the running requests, for which newer instances wait.

        Args:
            pointer: the write pointer of its transaction.
            rows: the number of its rows.

        Raises:
            Unavailable: another request of the producer to the topic is running.
            ProducerFenced: a newer instance is registered.
            TransactionEnded: the transaction was rolled back.
            BadRequest: a later request was written, or a different request with the same number; or another server may
                lead the home of the producer.
            TmsError: the home does not exist, or the store failed.
        """
        own, home = topic.topic, sent.home
        # Compare the names, which is faster than a comparison of topics; each request of a producer calls this.
        is_own = home.topic == own.topic and home.namespace == own.namespace
        generation = topic.generation if is_own else self._topics.get(home).generation
        keys = _keys(home.namespace, home.topic, generation, sent.name, topic.rows_prefix)
        # Before the check of the generation: a registration stores its generation and then waits for running requests.
        # In the other order it could miss this request, which would write after the registration.
        if not self.in_flight.begin(keys.request, keys.registered, sent.generation):
            raise Unavailable(f"Another request of producer {sent.name} to this topic is running.", "Try again.")
        try:
            # A registration waits only for requests on the same server, so one server must lead both topics.
            if not (self._side.private or self._side.have_one_leader(keys.registered, keys.request)):
                raise _slot_error(sent)
            check(sent)
            # An outdated cached registration may admit a request: if other servers can change it, it is read again
            # after the announcement. It must not reject a request.
            registered = self.rows[keys.registered]
            if (registered is None or newest_generation(registered) != sent.generation) and (
                error := self._refusal(keys.producer, keys.registered, sent.generation)
            ):
                raise error
            if pointer is not None and self.is_void(keys.producer, pointer):
                raise TransactionEnded(
                    f"Transaction {pointer} was rolled back, so it cannot write.", "Start another transaction."
                )
            raw = self.rows[keys.request]
            if raw is None:
                return Admission(keys, sent, None)
            last = self.last.get(keys.request)
            if last is None or last.value != raw:
                self.last[keys.request] = last = self._find_last_request(raw, keys)
            previous = last.request
            if previous.generation == sent.generation and previous.sequence >= sent.sequence:
                _check_repeated(sent, rows, previous)
                return Admission(keys, sent, raw, last, last)
            since = last.since
            if since is not None and not LastRequest.parse(raw).announces(sent.generation, sent.sequence):
                since = None
            return _admission((keys, sent, raw, last, None, since))
        except BaseException:
            self.in_flight.end([keys.request])
            raise

    def is_void(self, producer: ProducerName, pointer: int) -> bool:
        """Return whether the producer has rolled back a transaction."""
        value = self.rows[key := producer.transaction_key(pointer)]
        return value is not None and StartedTransaction.parse(key, value).void

    def require_newest(self, sent: Sent) -> None:
        """Check, without the cache, that a request comes from the newest instance.

        Raises:
            ProducerFenced: a newer instance is registered.
            TmsError: the producer's home does not exist, or the store failed.
        """
        producer = self.producer(sent.home, sent.name)
        if error := self._refusal(producer, producer.key, sent.generation):
            raise error

    def obsolete_transactions(self, producer: ProducerName, pointer: int, sent: Sent) -> list[bytes]:
        """Return the keys of a producer's older transactions that are decided and no longer needed.

        The last older transaction that may be committed stays: if the new transaction is aborted, the next instance
        continues after the older one.
        """
        rows = transactions_of(self._side, producer, before=pointer, limit=_MAX_CHECKED)
        decided = [
            (key, started) for key, started in rows if self.is_decided(started) or self._has_ended(started, sent)
        ]
        last = next((key for key, started in reversed(decided) if not self.is_aborted(started)), None)
        return [key for key, _ in decided if key != last]

    def is_processed(self, topic: TopicMetadata, at: int) -> bool:
        """Return whether all consumers have processed the row at a position, so that it may be deleted (rule L7)."""
        return topic.consumed and at < announced(self._side, topic)

    def invalidate(self) -> None:
        """Drop cached data, because another process may have written."""
        self.rows.invalidate()
        self.last.clear()

    def producer(self, home: TopicId, name: str) -> ProducerName:
        """Return the identity of a producer in the current generation of its home.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: the name is invalid, or the topic does not exist.
        """
        generation = self._topics.get(home).generation
        return _keys(home.namespace, home.topic, generation, name, generation_prefix(home.prefix, generation)).producer

    def is_decided(self, started: StartedTransaction) -> bool:
        """Return whether a transaction is committed, or can no longer be committed."""
        if self._transactions is not None:
            return started.void or not self._transactions.is_in_progress(started.pointer)
        return started.void or transaction_ms(started.pointer) + self._max_lifetime_ms < self._clock.now_ms()

    def _has_ended(self, started: StartedTransaction, sent: Sent) -> bool:
        """Return whether the instance reports a transaction as decided; False if this process manages transactions."""
        own = started.generation == sent.generation and started.pointer < sent.oldest_open
        return own and self._transactions is None

    def is_aborted(self, started: StartedTransaction) -> bool:
        """Return whether a transaction is known to be rolled back or invalid."""
        manager = self._transactions
        return started.void or (manager is not None and manager.status(started.pointer) == "invalid")

    def change(self, *changes: tuple[str, SideChange]) -> None:
        """Change rows, each together with the name of its producer for the error.

        Raises:
            Unavailable: another process has changed one of the rows.
        """
        made = self.rows.change([change for _, change in changes])
        if False in made:
            name, _ = changes[made.index(False)]
            raise Unavailable(f"Another server changed producer {name} during the request.", "Try again.")

    def is_stored(self, admission: Admission, pointer: int) -> bool:
        """Return whether a transaction of the producer is stored."""
        return self.rows[admission.keys.producer.transaction_key(pointer)] is not None

    def transaction_rows(
        self, admission: Admission, pointer: int | None
    ) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Return the rows to write and the keys to delete for a new transaction; both empty if it is stored."""
        producer, sent = admission.keys.producer, admission.sent
        if pointer is None or self.rows[key := producer.transaction_key(pointer)] is not None:
            return [], []
        if self._transactions is not None:
            self._transactions.note_written(pointer, producer.label)
        row = (key, StartedTransaction(pointer, sent.generation, void=False, label=sent.label).pack())
        return [row], self.obsolete_transactions(producer, pointer, sent)

    def recheck_fence(self, admission: Admission) -> ProducerFenced | None:
        """Return an error if an admitted instance has been fenced since its admission; None: it is the newest."""
        keys = admission.keys
        return self._refusal(keys.producer, keys.registered, admission.sent.generation)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _refusal(self, producer: ProducerName, key: bytes, generation: int) -> ProducerFenced | None:
        """Return the error of a fenced instance, according to the stored registration; None: it is the newest."""
        raw = self.rows.read(key)
        known = None if raw is None else newest_generation(raw)
        if known is None:
            return ProducerFenced(
                f"Producer {producer.name} of {producer.home} is not registered: it was idle for a week, or deleted.",
                "Register the producer again; this instance can no longer publish.",
            )
        if generation == known:
            return None
        return ProducerFenced(
            f"Generation {generation} of producer {producer.name} of {producer.home} is fenced by generation {known}.",
            "Stop this instance, because a newer instance of the producer is registered.",
        )

    def _find_last_request(self, raw: bytes, keys: _Keys) -> RememberedRequest:
        """Return the last request; if its announcement covers future requests, search for their rows."""
        announced = LastRequest.parse(raw)
        if not announced.until:
            return RememberedRequest(raw, announced)
        since = announced.first + announced.number
        found = iterate_items(self._messages, keys.messages + tail(since), keys.messages + tail(announced.until))
        tails = (key[len(keys.messages) :][:MESSAGE_TAIL_BYTES] for key in found)
        # `is_written` stays False: a failed write of a transaction may have left inverted rows, so a repeated request
        # checks the rows.
        positions = [int.from_bytes(one, "big") for one in tails]
        return RememberedRequest(raw, announced.last_written(positions), since=since)


def _check_repeated(sent: Sent, rows: int, previous: LastRequest) -> None:
    """Check that a request repeats the last request.

    Raises:
        BadRequest: a later request was written, or a different request with the same number.
    """
    if previous.sequence > sent.sequence:
        raise BadRequest(
            f"Request {sent.sequence} of producer {sent.name} is older than its last request {previous.sequence}.",
            "Number requests in increasing order, and repeat only the last request.",
        )
    if previous.number != rows:
        raise BadRequest(
            f"Request {sent.sequence} of producer {sent.name} was sent before with another number of messages.",
            "Repeat a request unchanged, or send a new request with the next number.",
        )


def _slot_error(sent: Sent) -> BadRequest:
    return BadRequest(
        f"Producer {sent.name} of {sent.home} cannot publish to this topic, which is in another slot than its home.",
        "Register a producer for the topic or partition that it publishes to, or set server.leader.slots to 1.",
    )
