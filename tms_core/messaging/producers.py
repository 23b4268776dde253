"""Producers: of two instances of one the newer counts, and a request that is repeated is done once.

Registering an instance writes a higher generation down, waits for what older ones have under way, and gives up the
transactions that they have left open. So once it is answered, nothing of an older generation becomes visible any more.

Before the rows of a request are written, it is written down at which positions they will be. A repetition looks there:
what is there is not written again. The same write notes the transaction, so that the next instance finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast
from uuid import UUID

from tms_core.clock import HonestClock
from tms_core.consumers.positions import NAME
from tms_core.consumers.retention import announced
from tms_core.errors import BadRequest, ProducerFenced, ProducerNotFound, TmsError, TransactionEnded, Unavailable
from tms_core.messaging.in_flight import InFlight
from tms_core.messaging.producer_rows import (
    LABEL_BYTES,
    NO_INSTANCE,
    Begun,
    LastRequest,
    ProducerName,
    Registration,
    TransactionOutcome,
    begun_by,
    counting,
    last_of,
    next_generation,
    producers_of,
    registration,
    requests_by,
)
from tms_core.messaging.remembered import RememberedRows
from tms_core.messaging.topics import TopicRegistry
from tms_core.rowkey import LONG_MAX, generation_prefix
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

#: Of how many producers and topics the last request is remembered.
_KNOWN_REQUESTS = 20_000


class Sent(NamedTuple):
    """What a request says of its producer.

    Attributes:
        home: the producer's topic.
        name: its name.
        generation: as it was registered.
        sequence: the request's number, higher than that of any request before; the same when it is repeated.
        label: what it calls the transaction.
    """

    home: TopicId
    name: str
    generation: int
    sequence: int
    label: str = ""


class _Keys(NamedTuple):
    """What does not change between the requests of a producer to a topic.

    Attributes:
        producer: who it is.
        registered: the key of its registration.
        request: the key of its last request to the topic.
    """

    producer: ProducerName
    registered: bytes
    request: bytes


@lru_cache(maxsize=4096)
def _keys(home: TopicId, home_generation: int, name: str, topic: TopicId, generation: int) -> _Keys:
    """Those of a producer by its home and its name; raises ``BadRequest`` where it cannot have that name."""
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be a producer.", "Use at most 255 letters, digits, '_' and '-'.")
    producer = ProducerName(home, home_generation, name)
    return _Keys(producer, producer.key, producer.request_key(generation_prefix(topic.prefix, generation)))


@dataclass(slots=True)
class _Last:
    """A last request as it was written down, and whether its rows are there."""

    value: bytes
    request: LastRequest
    written: bool = False


class Admitted(NamedTuple):
    """A request that its producer may send.

    Attributes:
        sent: what it says.
        keys: of its producer and of its last request to the topic.
        registered: the registration by which it was admitted.
        former: the last request as it is written down; None: there is none.
        repeated: that request, if this is it once more.
        written: whether the rows of that are known to be there.
    """

    sent: Sent
    keys: _Keys
    registered: bytes | None
    former: bytes | None
    repeated: LastRequest | None = None
    written: bool = False


def _refusal(producer: ProducerName, generation: int, raw: bytes | None) -> ProducerFenced | None:
    """Why an instance does not count where its producer has this registration; or None."""
    known = None if raw is None else counting(raw)
    if known is None:
        return ProducerFenced(
            f"Producer {producer.name} of {producer.home} is not known: it was idle too long, or deleted.",
            "Register the producer again; this instance can no longer publish.",
        )
    if generation == known:
        return None
    return ProducerFenced(
        f"Producer {producer.name} of {producer.home} has generation {known} now, and {generation} is fenced.",
        "Another instance has taken over; end this one.",
    )


class Producers:
    """The producers of one store's topics; threads may share it.

    Args:
        topics: which topics there are.
        side: where producers are written down.
        clock: what time it is.
        max_lifetime_ms: how long after its begin a transaction may write.
        transactions: the manager in this process; None: transactions are managed elsewhere, and what became of one is
            for the client to find out.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        side: SideTable,
        clock: HonestClock,
        max_lifetime_ms: int,
        transactions: TransactionManager | None,
    ) -> None:
        self._topics = topics
        self._side = side
        self._clock = clock
        self._max_lifetime_ms = max_lifetime_ms
        self._transactions = transactions
        self._rows = RememberedRows(side)
        #: Last requests by their keys.
        self._last: dict[bytes, _Last] = {}
        self._in_flight = InFlight()

    # -- producers ----------------------------------------------------------------------------------------------------

    def register(self, home: TopicId, name: str, instance: UUID) -> Registration:
        """Have an instance count from now on, and no older one. Durable on return; the same instance may ask again.

        Args:
            home: the producer's topic.
            name: its name.
            instance: a number of its own, drawn at random.

        Returns:
            Its generation, and what became of the last transaction before it.

        Raises:
            BadRequest: that is no name, or no number of an instance.
            Unavailable: another one is being registered, or an older one's requests take too long; try again.
            TopicNotFound, MetadataError, StoreError: there is no such topic, or its row is damaged; the store failed.
        """
        if instance == NO_INSTANCE:
            raise BadRequest("An instance has a number other than 0.", "Draw one at random.")
        producer = self._named(home, name)
        with self._in_flight.only(producer.key):
            raw = self._side.get(producer.key)
            known = None if raw is None else registration(raw)
            if known is None or known.instance != instance:
                now_ms = self._clock.now_ms()
                former = None if known is None else known.former
                made = Registration(next_generation(known, now_ms), instance, now_ms, former, settled=False)
                self._change(producer.key, raw, made)
                known = made
            self._in_flight.wait_for_older(producer.key, name, known.generation)
            return known if known.settled else self._settle(producer, known)

    def of(self, home: TopicId) -> list[tuple[str, Registration, list[Begun]]]:
        """A topic's producers by their names, each with the transactions it has open; raises as :meth:`register`."""
        metadata = self._topics.get(home)
        return [(one.name, known, self._open(one)) for one, known in producers_of(self._side, metadata)]

    def get(self, home: TopicId, name: str) -> tuple[Registration, list[Begun]]:
        """A producer, and the transactions it has open.

        Raises:
            ProducerNotFound: there is none of that name.
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`register`.
        """
        producer = self._named(home, name)
        return self._known(producer)[1], self._open(producer)

    def delete(self, home: TopicId, name: str) -> None:
        """Forget a producer; what it has open is invalidated first, and its instance is refused from now on.

        Raises:
            ProducerNotFound, BadRequest, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`get`.
        """
        producer = self._named(home, name)
        with self._in_flight.only(producer.key):
            raw, known = self._known(producer)
            gone = known._replace(generation=known.generation + 1, instance=NO_INSTANCE, settled=False)
            self._change(producer.key, raw, gone)
            self._in_flight.wait_for_older(producer.key, name, gone.generation)
            settled = self._settle(producer, gone)
            # The row stays until the janitor comes, so that no generation is given twice.
            forgotten = settled._replace(former=None)
            self._change(producer.key, settled.pack(), forgotten, requests_by(self._side, producer))

    def roll_back(self, sent: Sent, pointer: int) -> None:
        """Mark a transaction as rolled back, before what it has published is taken back. Durable on return.

        It comes before the abort: an aborted transaction's pointer looks committed to readers.

        Raises:
            ProducerFenced: a newer instance counts.
            BadRequest, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`register`; after the last one
                the transaction must be invalidated.
        """
        producer = self._named(sent.home, sent.name)
        self._require_newest(producer, producer.key, sent.generation)
        key = producer.begun_key(pointer)
        value = self._side.get(key)
        if value is None:
            return
        begun = Begun.parse(key, value)
        if not begun.void:
            self._make([SideChange(key, value, begun._replace(void=True).pack())], [sent.name])

    def forget(self) -> None:
        """Forget what was read, because another process may have written."""
        self._rows.forget()
        self._last.clear()

    # -- what they send -----------------------------------------------------------------------------------------------

    @contextmanager
    def sending(
        self, topic: TopicMetadata, now_ms: int, batch: Sequence[tuple[Sent, int | None, int]]
    ) -> Iterator[list[Admitted | TmsError]]:
        """Let requests of producers to one topic be written; newer instances wait until the block ends.

        Args:
            topic: where to.
            now_ms: the present time.
            batch: of each what it says of its producer, its write pointer, and how many rows it has.

        Returns:
            For each what is known of its producer, or why it is refused.
        """
        self._rows.forget_old(now_ms)
        found: list[Admitted | TmsError | None] = []
        asked: list[tuple[_Keys, int]] = []
        for sent, _, _ in batch:
            try:
                home = topic if sent.home == topic.topic else self._topics.get(sent.home)
                keys = _keys(home.topic, home.generation, sent.name, topic.topic, topic.generation)
                asked.append((keys, len(found)))
                found.append(None)
            except TmsError as error:
                found.append(error)
        # Before it is looked whether they count, or a newer instance might not wait for them.
        begun = self._in_flight.begin((keys.request, keys.registered, batch[at][0].generation) for keys, at in asked)
        try:
            for (keys, at), is_begun in zip(asked, begun, strict=True):
                try:
                    found[at] = self._admit(keys, *batch[at], is_begun=is_begun)
                except TmsError as error:
                    found[at] = error
            yield cast(list[Admitted | TmsError], found)
        finally:
            self._in_flight.end(keys.request for (keys, _), is_begun in zip(asked, begun, strict=True) if is_begun)

    def announce(self, requests: Sequence[tuple[Admitted, int | None, int, int]]) -> list[TmsError | None]:
        """Write down where the rows of requests will be, and whose transactions they belong to. Durable on return.

        Then it is looked again whether their producers count: another server may lead a producer's home, and what an
        instance that it registers from now on finds written down it ends.

        Args:
            requests: each with its write pointer, the position of its first row, and how many it has.

        Returns:
            For each why it is not to be written, or None.

        Raises:
            Unavailable: another process has changed a producer meanwhile; nothing is to be written.
            StoreError: the store failed.
        """
        changes = []
        if len(self._last) >= _KNOWN_REQUESTS:
            self._last.clear()
        for admitted, pointer, first, number in requests:
            sent, key = admitted.sent, admitted.keys.request
            request = LastRequest(sent.generation, sent.sequence, first, number)
            value = request.pack()
            self._last[key] = _Last(value, request)
            changes.append(SideChange(key, admitted.former, value, *self._noted(admitted, pointer)))
        self._make(changes, [admitted.sent.name for admitted, *_ in requests])
        return [self._refusal_since(admitted) for admitted, *_ in requests]

    def wrote(self, admitted: Admitted) -> None:
        """The rows of a request that was announced are there, so a repetition need not look."""
        last = self._last.get(admitted.keys.request)
        if last is not None:
            last.written = True

    def is_void(self, producer: ProducerName, pointer: int) -> bool:
        """Whether a transaction was rolled back by its producer."""
        value = self._rows.get(key := producer.begun_key(pointer))
        return value is not None and Begun.parse(key, value).void

    def require_newest(self, sent: Sent) -> None:
        """Return if the instance counts that sends a request.

        Raises:
            ProducerFenced: it does not.
            TmsError: what it names is not there, or the store failed.
        """
        producer = self._named(sent.home, sent.name)
        self._require_newest(producer, producer.key, sent.generation)

    def is_processed(self, topic: TopicMetadata, at: int) -> bool:
        """Whether rows up to a position may be gone because all consumers have processed them (rule L7)."""
        return topic.consumed and at < announced(self._side, topic)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _named(self, home: TopicId, name: str) -> ProducerName:
        known = self._topics.get(home)
        return _keys(home, known.generation, name, home, known.generation).producer

    def _admit(self, keys: _Keys, sent: Sent, pointer: int | None, number: int, *, is_begun: bool) -> Admitted:
        """What is known of a producer that counts.

        Raises:
            Unavailable: another request of it to the topic is under way.
            ProducerFenced: a newer one counts, or none.
            TransactionEnded: its transaction was rolled back.
            BadRequest: a later request was done, or it is another one under the same number; or another server may lead
                the topic than the one that registers the producer's instances, which waits for what is under way here.
        """
        if not is_begun:
            raise Unavailable(f"A request of producer {sent.name} to this topic is under way.", "Try again.")
        if not self._side.have_one_leader(keys.registered, keys.request):
            raise BadRequest(
                f"Producer {sent.name} of {sent.home} cannot publish to this topic: they are of different slots.",
                "Register a producer at this topic, or set server.leader.slots to 1.",
            )
        if not 0 < sent.sequence <= LONG_MAX or len(sent.label.encode()) > LABEL_BYTES:
            raise BadRequest("A sequence number is at least 1, and a label has 1,000 bytes at most.", "Send others.")
        registered = self._require_newest(keys.producer, keys.registered, sent.generation)
        if pointer is not None and self.is_void(keys.producer, pointer):
            raise TransactionEnded(
                f"Transaction {pointer} was rolled back, so it writes nothing.", "Begin another one."
            )
        raw = self._rows.get(keys.request)
        if raw is None:
            return Admitted(sent, keys, registered, None)
        last = self._last.get(keys.request)
        if last is None or last.value != raw:
            last = _Last(raw, LastRequest.parse(raw))
        former = last.request
        if former.generation != sent.generation or former.sequence < sent.sequence:
            return Admitted(sent, keys, registered, raw)
        if former.sequence > sent.sequence:
            raise BadRequest(
                f"Request {sent.sequence} of producer {sent.name} comes after its request {former.sequence}.",
                "Number requests upwards, and repeat only the last one.",
            )
        if former.number != number:
            raise BadRequest(
                f"Request {sent.sequence} of producer {sent.name} was sent before with other contents.",
                "Repeat a request unchanged, or give the new request the next number.",
            )
        return Admitted(sent, keys, registered, raw, former, last.written)

    def _noted(self, admitted: Admitted, pointer: int | None) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Rows to write and to delete so that a transaction is written down."""
        producer = admitted.keys.producer
        if pointer is None or self._rows.get(key := producer.begun_key(pointer)) is not None:
            return [], []
        sent = admitted.sent
        rows = [row for row in begun_by(self._side, producer) if row[1].pointer < pointer]
        decided = [(key, begun) for key, begun in rows if self._is_decided(begun)]
        # The last one that may be committed is what the next instance goes on behind; should this one come to nothing.
        last = next((key for key, begun in reversed(decided) if not self._is_void(begun)), None)
        row = (key, Begun(pointer, sent.generation, void=False, label=sent.label).pack())
        return [row], [key for key, _ in decided if key != last]

    def _is_decided(self, begun: Begun) -> bool:
        if self._transactions is not None:
            return begun.void or not self._transactions.is_in_progress(begun.pointer)
        return begun.void or transaction_ms(begun.pointer) + self._max_lifetime_ms < self._clock.now_ms()

    def _is_void(self, begun: Begun) -> bool:
        manager = self._transactions
        return begun.void or (manager is not None and manager.status(begun.pointer) == "invalid")

    def _require_newest(self, producer: ProducerName, key: bytes, generation: int) -> bytes | None:
        """Return the registration by which an instance counts; raises ``ProducerFenced`` where it does not."""
        # What is remembered is enough to let a request pass, since it is looked at again behind its announcement.
        raw = self._rows.get(key)
        if raw is None or counting(raw) != generation:
            raw = self._rows.get(key, again=True)
            if error := _refusal(producer, generation, raw):
                raise error
        return raw

    def _refusal_since(self, admitted: Admitted) -> ProducerFenced | None:
        """Why an instance that was admitted does not count any more, by what stands in the table now; or None."""
        key = admitted.keys.registered
        if self._side.get(key) == admitted.registered:
            return None
        return _refusal(admitted.keys.producer, admitted.sent.generation, self._rows.get(key, again=True))

    def _known(self, producer: ProducerName) -> tuple[bytes, Registration]:
        raw = self._side.get(producer.key)
        known = None if raw is None else registration(raw)
        if raw is None or known is None or known.instance == NO_INSTANCE:
            raise ProducerNotFound(
                f"Topic {producer.home} has no producer {producer.name}.",
                f"See those there are: tms producer list {producer.home}",
            )
        return raw, known

    def _open(self, producer: ProducerName) -> list[Begun]:
        return [begun for _, begun in begun_by(self._side, producer) if not self._is_decided(begun)]

    def _change(self, key: bytes, raw: bytes | None, known: Registration, deletes: Sequence[bytes] = ()) -> None:
        self._make([SideChange(key, raw, known.pack(), deletes=deletes)], ["of this name"])

    def _make(self, changes: Sequence[SideChange], names: Sequence[str]) -> None:
        """Change rows, each for a producer.

        Raises:
            Unavailable: one was changed by another process.
        """
        for name, is_made in zip(names, self._rows.change(changes), strict=True):
            if not is_made:
                raise Unavailable(f"Producer {name} was changed by another server meanwhile.", "Try again.")

    def _settle(self, producer: ProducerName, known: Registration) -> Registration:
        """End what older generations have open, and write down what became of the last of it."""
        rows = [(key, begun) for key, begun in begun_by(self._side, producer) if begun.generation < known.generation]
        outcomes = [(begun, self._outcome(begun)) for _, begun in rows]
        settled = known._replace(former=last_of(outcomes, known.former), settled=True)
        self._change(producer.key, known.pack(), settled, [key for key, _ in rows])
        return settled

    def _outcome(self, begun: Begun) -> TransactionOutcome:
        manager = self._transactions
        if begun.void:
            return TransactionOutcome.ABORTED
        if manager is None:
            return TransactionOutcome.PENDING
        if manager.invalidate(manager.transaction_of(begun.pointer)) or self._is_void(begun):
            return TransactionOutcome.ABORTED
        return TransactionOutcome.COMMITTED
