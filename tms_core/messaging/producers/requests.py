"""What producers send: a request that is repeated is done once, and those of an older instance are refused.

Before the rows of a request are written, it is written down at which positions they will be. A repetition looks there:
what is there is not written again. The same write notes the transaction, so that the next instance finds it.

Each of these writes are synced, as the rows are. Where only producers write to a topic they are seldom: one is for
their next requests, too (:class:`~tms_core.messaging.producers.last_request.AnnouncedAhead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple, cast

from tms_core.clock import HonestClock
from tms_core.consumers.retention import announced
from tms_core.errors import BadRequest, ProducerFenced, TmsError, TransactionEnded, Unavailable, quoted
from tms_core.messaging.ids import ReadKeys, position, tail
from tms_core.messaging.model import LABEL_BYTES
from tms_core.messaging.producers.in_flight import InFlight
from tms_core.messaging.producers.last_request import (
    AHEAD_MS,
    AnnouncedAhead,
    LastRequest,
    RememberedRequest,
    Window,
    placed,
)
from tms_core.messaging.producers.rows import Begun, ProducerName, begun_by, counting
from tms_core.messaging.remembered import RememberedRows
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.rowkey import LONG_MAX, MESSAGE_TAIL_BYTES, generation_prefix
from tms_core.tables.base import every
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import CONSUMER_NAME, TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

#: Of how many producers and topics the last request is remembered.
_KNOWN_REQUESTS = 20_000
#: How many transactions that were begun before are looked at for each new one, the oldest first.
_LOOKED_AT = 32


class Sent(NamedTuple):
    """What a request says of its producer.

    Attributes:
        generation: as it was registered.
        sequence: the request's number, higher than that of any request before; the same when it is repeated.
        label: what it calls the transaction.
        oldest_open: what the instance has started before this transaction is over: it was committed, or rolled back and
            that was told; 0: that is not said.
    """

    home: TopicId
    name: str
    generation: int
    sequence: int
    label: str = ""
    oldest_open: int = 0


class _Keys(NamedTuple):
    """What does not change between the requests of a producer to a topic.

    Attributes:
        request: the key of its last request to the topic.
        messages: the start of the keys of the topic's messages.
    """

    producer: ProducerName
    registered: bytes
    request: bytes
    messages: bytes


@lru_cache(maxsize=4096)
def _keys(home: bytes, home_generation: int, name: str, messages: bytes) -> _Keys:
    """Return those of a producer by the start of its home's row keys, and its name, for messages whose keys start so.

    Raises:
        BadRequest: it cannot have that name.
    """
    if not CONSUMER_NAME.fullmatch(name):
        raise BadRequest(f"{quoted(name)} cannot be a producer.", "Use at most 255 letters, digits, '_' and '-'.")
    producer = ProducerName(cast(TopicId, TopicId.from_prefix(home)), home_generation, name)
    return _Keys(producer, producer.key, producer.request_key(messages), messages)


class Admitted(NamedTuple):
    """A request that its producer may send.

    Attributes:
        pointer: the write pointer of its transaction; None: it has none.
        number: how many rows it has.
        keys: of its producer and of its last request to the topic.
        registered: the registration by which it was admitted.
        former: the last request as it is written down; None: there is none.
        repeated: that request, if this is it once more.
        written: whether the rows of that are known to be there.
        since: from where on it would be there if it was done before and the rows were not gone; None: it was not.
    """

    sent: Sent
    pointer: int | None
    number: int
    keys: _Keys
    registered: bytes | None
    former: bytes | None
    repeated: LastRequest | None = None
    written: bool = False
    since: int | None = None


#: One of its parts, without a call in between: there is one for each request.
_admitted = partial(tuple.__new__, Admitted)


def check(sent: Sent) -> None:
    """Check the number and the label of a request.

    Raises:
        BadRequest: one of them cannot be.
    """
    if not 0 < sent.sequence <= LONG_MAX:
        raise BadRequest(f"{sent.sequence} is no sequence number.", f"Number requests from 1 to {LONG_MAX}.")
    if sent.label and (size := len(sent.label.encode())) > LABEL_BYTES:
        raise BadRequest(f"A label of {size} bytes is too long.", f"Give one of {LABEL_BYTES} bytes at most.")


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


class Requests:
    """The requests of one store's producers; threads may share it.

    Args:
        max_lifetime_ms: how long after its start a transaction may write.
        transactions: the manager in this process; None: transactions are managed elsewhere.

    Attributes:
        in_flight: what is being written.
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
        self._rows = RememberedRows(side)
        #: Last requests by their keys.
        self._last: dict[bytes, RememberedRequest] = {}

    @contextmanager
    def sending(
        self, topic: TopicMetadata, now_ms: int, batch: Sequence[tuple[Sent, int | None, int]]
    ) -> Iterator[list[Admitted | TmsError]]:
        """Let requests of producers to one topic be written; newer instances wait until the block is left.

        Args:
            batch: of each what it says of its producer, its write pointer, and how many rows it has.

        Returns:
            For each the facts about its producer, or why it is refused.
        """
        self._rows.forget_old(now_ms)
        found: list[Admitted | TmsError] = []
        begun: list[bytes] = []
        messages = generation_prefix(topic.topic.prefix, topic.generation)
        named: TopicId | None = None
        try:
            for sent, pointer, number in batch:
                try:
                    if sent.home is not named:
                        home = topic if sent.home == topic.topic else self._topics.get(sent.home)
                        named, prefix = sent.home, home.topic.prefix
                    keys = _keys(prefix, home.generation, sent.name, messages)
                    # Before it is looked whether it counts, or a newer instance might not wait for it.
                    if not self.in_flight.begin(keys.request, keys.registered, sent.generation):
                        raise Unavailable(
                            f"A request of producer {sent.name} to this topic is under way.", "Try again."
                        )
                    begun.append(keys.request)
                    found.append(self._admit(keys, sent, pointer, number))
                except TmsError as error:
                    found.append(error)
            yield found
        finally:
            self.in_flight.end(begun)

    def announce(
        self, requests: Sequence[tuple[Admitted, int]], ahead: AnnouncedAhead | None = None
    ) -> list[TmsError | None]:
        """Write down where the rows of requests will be, and whose transactions they belong to. Durable on return.

        Then it is looked again whether their producers count: another server may lead a producer's home, and what an
        instance that it registers from now on finds written down it stops.

        Args:
            requests: each with the position of its first row.
            ahead: of the line, where these are messages; they may be announced for the next ones, too.

        Returns:
            For each why it is not to be written, or None.

        Raises:
            Unavailable: another process has changed a producer meanwhile; nothing is to be written.
            StoreError: the store failed.
        """
        changes = []
        if ahead is not None and not self._is_ahead(ahead):
            ahead = None
        if len(self._last) >= _KNOWN_REQUESTS:
            self._last.clear()
        for admitted, first in requests:
            sent, key = admitted.sent, admitted.keys.request
            request = LastRequest(sent.generation, sent.sequence, first, admitted.number)
            if ahead is not None:
                request = request._replace(until=first + position(AHEAD_MS), seat=ahead.seat(key))
            self._last[key] = last = RememberedRequest(request.pack(), request)
            if ahead is not None:
                # It may be there also where the write fails.
                ahead.windows[key] = Window(request, last)
            changes.append(SideChange(key, admitted.former, last.value, *self._noted(admitted)))
        self.change(changes, [admitted.sent.name for admitted, _ in requests])
        return [self._refusal_since(admitted) for admitted, _ in requests]

    def places(self, ahead: AnnouncedAhead, asked: Sequence[Admitted], at: int) -> list[int] | None:
        """Return where requests start that have seats, in whose order they are; None: where there is room.

        Args:
            at: the first position that is free.
        """
        if len(ahead.seats) < 2 or not self._is_ahead(ahead):
            return None
        places = []
        for admitted in asked:
            places.append(placed(ahead.seat(admitted.keys.request), admitted.sent.sequence, at))
            at = places[-1] + admitted.number
        return places

    def next(self, ahead: AnnouncedAhead, asked: Sequence[Admitted], at: int) -> list[LastRequest] | None:
        """Return where requests will be that were announced before, from a position on; None: they are to be announced.

        Args:
            asked: in the order of their seats.
        """
        found: list[LastRequest] = []
        windows = {} if ahead.stale else ahead.windows
        for admitted in asked:
            window = windows.get(admitted.keys.request)
            # Repeated, it is announced as what it is.
            if window is None or admitted.repeated is not None or admitted.former != window.last.value:
                return None
            pointer, sent = admitted.pointer, admitted.sent
            if pointer is not None and self._rows.get(admitted.keys.producer.begun_key(pointer)) is None:
                return None
            request = window.announced.next(sent.generation, sent.sequence, at, admitted.number)
            if request is None:
                return None
            found.append(request)
            at = request.first + request.number
        return found

    def follow(self, ahead: AnnouncedAhead, keys: Iterable[bytes], requests: Mapping[bytes, LastRequest]) -> None:
        """Those of the requests with these keys are about to be written; they were announced before."""
        for key in keys:
            last = ahead.windows[key].last
            last.request, last.written = requests[key], False
            self._last[key] = last

    def take_back(self, ahead: AnnouncedAhead, at: int) -> dict[bytes, bytes | None]:
        """Announce nothing but what may be written already, before others write from a position on. Durable on return.

        Returns:
            What stands at the keys then.

        Raises:
            StoreError: the store failed; nothing else may be written.
        """
        found = {key: self._rows.get(key) for key in ahead.windows}
        changes: dict[bytes, tuple[SideChange, LastRequest]] = {}
        for key, window in ahead.windows.items():
            raw = found[key]
            if raw is not None and at < window.announced.until and LastRequest.parse(raw).until:
                last = window.last.request._replace(until=0, seat=0)
                changes[key] = SideChange(key, raw, last.pack()), last
        if changes:
            made = self._rows.change([change for change, _ in changes.values()])
            for (key, (change, last)), is_made in zip(changes.items(), made, strict=True):
                # Where that is not made, it was replaced by what announces itself only.
                if is_made:
                    self._last[key] = RememberedRequest(change.value, last)
                    found[key] = change.value
        ahead.windows, ahead.stale = {}, False
        return found

    def wrote(self, requests: Iterable[Admitted]) -> None:
        """The rows of requests that were announced are there, so a repetition need not look."""
        known = self._last
        for admitted in requests:
            if (last := known.get(admitted.keys.request)) is not None:
                last.written = True

    def is_void(self, producer: ProducerName, pointer: int) -> bool:
        """Return whether a transaction was rolled back by its producer."""
        value = self._rows.get(key := producer.begun_key(pointer))
        return value is not None and Begun.parse(key, value).void

    def require_newest(self, sent: Sent, *, again: bool = False) -> None:
        """Return if the instance counts that sends a request.

        Args:
            again: look in the table, whatever is remembered.

        Raises:
            ProducerFenced: it does not.
            TmsError: what it names is not there, or the store failed.
        """
        producer = self.named(sent.home, sent.name)
        self._require_newest(producer, producer.key, sent.generation, again=again)

    def not_needed(self, producer: ProducerName, pointer: int, sent: Sent) -> list[bytes]:
        """Return the keys of what a producer has started before a transaction and is decided, but for the last one of
        these that may be committed: the next instance goes on behind that, should this one come to nothing.
        """
        rows = begun_by(self._side, producer, before=pointer, most=_LOOKED_AT)
        decided = [(key, begun) for key, begun in rows if self.is_decided(begun) or self._has_ended(begun, sent)]
        last = next((key for key, begun in reversed(decided) if not self.is_given_up(begun)), None)
        return [key for key, _ in decided if key != last]

    def is_processed(self, topic: TopicMetadata, at: int) -> bool:
        """Return whether rows up to a position may be gone because all consumers have processed them (rule L7)."""
        return topic.consumed and at < announced(self._side, topic)

    def forget(self) -> None:
        """Forget the data read, because another process may have written."""
        self._rows.forget()
        self._last.clear()

    def named(self, home: TopicId, name: str) -> ProducerName:
        """Return a producer of a topic as it is now.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: that is no name, or there is no such topic.
        """
        known = self._topics.get(home)
        prefix = known.topic.prefix
        return _keys(prefix, known.generation, name, generation_prefix(prefix, known.generation)).producer

    def is_decided(self, begun: Begun) -> bool:
        """Return whether a transaction can no longer be committed, or was."""
        if self._transactions is not None:
            return begun.void or not self._transactions.is_in_progress(begun.pointer)
        return begun.void or transaction_ms(begun.pointer) + self._max_lifetime_ms < self._clock.now_ms()

    def _has_ended(self, begun: Begun, sent: Sent) -> bool:
        """Return whether a transaction is over by what its instance says; needed only where it cannot be looked up
        here.
        """
        own = begun.generation == sent.generation and begun.pointer < sent.oldest_open
        return own and self._transactions is None

    def is_given_up(self, begun: Begun) -> bool:
        """Return whether it is known that a transaction is never committed."""
        manager = self._transactions
        return begun.void or (manager is not None and manager.status(begun.pointer) == "invalid")

    def change(self, changes: Sequence[SideChange], names: Sequence[str]) -> None:
        """Change rows, each for a producer.

        Raises:
            Unavailable: one was changed by another process.
        """
        for name, is_made in zip(names, self._rows.change(changes), strict=True):
            if not is_made:
                raise Unavailable(f"Producer {name} was changed by another server meanwhile.", "Try again.")

    # -- how ----------------------------------------------------------------------------------------------------------

    def _is_ahead(self, ahead: AnnouncedAhead) -> bool:
        """Return whether what is announced now is for the next requests, too."""
        return ahead.lasting and self._side.private

    def _admit(self, keys: _Keys, sent: Sent, pointer: int | None, number: int) -> Admitted:
        """The facts about a producer that counts.

        Raises:
            BadRequest: a later request was done, or it is another one under the same number; or another server may lead
                the topic than the one that registers the producer's instances, which waits for what is under way here.
        """
        if not (self._side.private or self._side.have_one_leader(keys.registered, keys.request)):
            raise BadRequest(
                f"Producer {sent.name} of {sent.home} cannot publish to this topic: they are of different slots.",
                "Register a producer at the topic or partition that it publishes to, or set server.leader.slots to 1.",
            )
        check(sent)
        registered = self._require_newest(keys.producer, keys.registered, sent.generation)
        if pointer is not None and self.is_void(keys.producer, pointer):
            raise TransactionEnded(
                f"Transaction {pointer} was rolled back, so it writes nothing.", "Begin another one."
            )
        raw = self._rows.get(keys.request)
        if raw is None:
            return Admitted(sent, pointer, number, keys, registered, None)
        last = self._last.get(keys.request)
        if last is None or last.value != raw:
            self._last[keys.request] = last = self._found(raw, keys)
        former = last.request
        if former.generation != sent.generation or former.sequence < sent.sequence:
            since = last.since
            if since is not None and not LastRequest.parse(raw).announces(sent.generation, sent.sequence):
                since = None
            return _admitted((sent, pointer, number, keys, registered, raw, None, False, since))
        if former.sequence > sent.sequence:
            raise BadRequest(
                f"Request {sent.sequence} of producer {sent.name} comes after its request {former.sequence}.",
                "Number requests upwards, and repeat only the last one.",
            )
        if former.number != number:
            raise BadRequest(
                f"Request {sent.sequence} of producer {sent.name} was sent before with another number of messages.",
                "Repeat a request unchanged, or give the new request the next number.",
            )
        return Admitted(sent, pointer, number, keys, registered, raw, former, last.written)

    def _noted(self, admitted: Admitted) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Rows to write and to delete so that a transaction is written down."""
        producer, pointer = admitted.keys.producer, admitted.pointer
        if pointer is None or self._rows.get(key := producer.begun_key(pointer)) is not None:
            return [], []
        sent = admitted.sent
        if self._transactions is not None:
            self._transactions.note_written(pointer, producer.label)
        row = (key, Begun(pointer, sent.generation, void=False, label=sent.label).pack())
        return [row], self.not_needed(producer, pointer, sent)

    def _found(self, raw: bytes, keys: _Keys) -> RememberedRequest:
        """Return a last request by its row, and by the rows of messages where that is for the next requests, too."""
        announced = LastRequest.parse(raw)
        if not announced.until:
            return RememberedRequest(raw, announced)
        since = announced.first + announced.number
        found = every(self._messages, keys.messages + tail(since), keys.messages + tail(announced.until))
        tails = (key[len(keys.messages) :][:MESSAGE_TAIL_BYTES] for key in found)
        # Whether they count is looked up by who repeats it: what a failed write left of a transaction is negated.
        return RememberedRequest(raw, announced.found([int.from_bytes(one, "big") for one in tails]), since=since)

    def _require_newest(
        self, producer: ProducerName, key: bytes, generation: int, *, again: bool = False
    ) -> bytes | None:
        """Return the registration by which an instance counts; raises ``ProducerFenced`` where it does not."""
        # What is remembered is enough to let a request pass, since it is looked at again behind its announcement.
        raw = None if again else self._rows.get(key)
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
