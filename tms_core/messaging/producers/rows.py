"""Producers by name: the rows that say which instance counts, what it has started, and what it sent last.

A producer belongs to a topic, its *home*. Each instance of it that is registered gets a higher *generation*, and what
an older one sends is refused from then on. All of it is in the side table (:mod:`tms_core.tables.side`):

* ``w`` + home + generation of the home + name: the producer (:class:`Registration`);
* ``t`` + home + generation of the home + ``p`` + name + 0 + write pointer: a transaction that it has started
  (:class:`Begun`). Like a claim it is true exactly if its transaction is, and what was rolled back is marked void;
* ``q`` + topic + generation + home + 0 + name: its last request to that topic
  (``LastRequest`` in :mod:`.last_request`), whose ids no other message gets; in a store of this machine
  sometimes with those of the next ones.

Here are the rows and the rules, without a clock and without waiting.
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
from tms_core.tables.base import every
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import transaction_ms

_PRODUCER, _TRANSACTIONAL, _BEGUN, _REQUEST = b"w", b"t", b"p", b"q"
_REGISTRATION = struct.Struct(">q16sqqBB")
_POINTER, _BEGUN_VALUE = struct.Struct(">q"), struct.Struct(">qB")
#: The instance of a producer that was forgotten.
NO_INSTANCE = UUID(int=0)
#: A producer that has done nothing for so long is forgotten, unless it has something open.
IDLE_MS = 7 * 86_400_000


class TransactionOutcome(Enum):
    """What became of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    PENDING = "pending"


_OUTCOMES = (None, TransactionOutcome.COMMITTED, TransactionOutcome.ABORTED, TransactionOutcome.PENDING)


class ProducerName(NamedTuple):
    """Names a producer: its home, the home's generation, and its name."""

    home: TopicId
    home_generation: int
    name: str

    @classmethod
    def of(cls, home: TopicMetadata, name: str) -> ProducerName:
        """Return a producer of a topic as it is now."""
        return cls(home.topic, home.generation, name)

    @property
    def key(self) -> bytes:
        """Of its registration."""
        return _PRODUCER + generation_prefix(self.home.prefix, self.home_generation) + self.name.encode("ascii")

    @property
    def begun(self) -> bytes:
        """Return the start of the keys of what it has started."""
        prefix = generation_prefix(self.home.prefix, self.home_generation)
        return _TRANSACTIONAL + prefix + _BEGUN + self.name.encode("ascii") + b"\0"

    def begun_key(self, pointer: int) -> bytes:
        """Of a transaction that it has started."""
        return self.begun + _POINTER.pack(pointer)

    def request_key(self, prefix: bytes) -> bytes:
        """Of its last request to the generation of a topic whose row keys start so."""
        return _REQUEST + prefix + self.home.prefix + b"\0" + self.name.encode("ascii")

    @property
    def label(self) -> str:
        """Return its name in a sentence."""
        return f"producer {self.name} of {self.home}"


class Former(NamedTuple):
    """The last transaction of the generations before that was not aborted; where all were, the last one.

    Attributes:
        label: what its producer has called it.
    """

    transaction: int
    label: str
    outcome: TransactionOutcome


class Registration(NamedTuple):
    """A producer.

    Attributes:
        generation: of the instance that counts; starts at the time in milliseconds, so that no name has one twice.
        instance: which one that is; all zeros: none, it was forgotten.
        updated_ms: when it was registered.
        former: what became of the one before; None: it has started nothing.
        settled: whether that has been found out.
    """

    generation: int
    instance: UUID
    updated_ms: int
    former: Former | None
    settled: bool

    def pack(self) -> bytes:
        """Return its value."""
        pointer, label, outcome = self.former or (0, "", None)
        numbers = (self.generation, self.instance.bytes, self.updated_ms, pointer)
        return _REGISTRATION.pack(*numbers, _OUTCOMES.index(outcome), self.settled) + label.encode()

    @classmethod
    def parse(cls, value: bytes) -> Registration:
        """Read a value.

        Raises:
            FormatError: it is none.
        """
        try:
            *numbers, number, settled = _REGISTRATION.unpack(value[: _REGISTRATION.size])
            outcome, label = _OUTCOMES[number], value[_REGISTRATION.size :].decode()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise FormatError(f"a producer's row cannot be read: {error}") from error
        generation, instance, updated_ms, pointer = numbers
        former = None if outcome is None else Former(pointer, label, outcome)
        return cls(generation, UUID(bytes=instance), updated_ms, former, bool(settled))


registration = lru_cache(maxsize=4096)(Registration.parse)


@lru_cache(maxsize=4096)
def counting(value: bytes) -> int | None:
    """Return the generation of the instance that counts, by a producer's value; None: it was forgotten."""
    known = registration(value)
    return None if known.instance == NO_INSTANCE else known.generation


class Begun(NamedTuple):
    """A transaction that a producer has started.

    Attributes:
        void: whether it was rolled back, or is invalid.
        label: what its producer calls it.
    """

    pointer: int
    generation: int
    void: bool
    label: str

    def pack(self) -> bytes:
        """Return its value."""
        return _BEGUN_VALUE.pack(self.generation, self.void) + self.label.encode()

    @classmethod
    def parse(cls, key: bytes, value: bytes) -> Begun:
        """Read a row.

        Raises:
            FormatError: it is none.
        """
        try:
            (pointer,) = _POINTER.unpack(key[-_POINTER.size :])
            generation, void = _BEGUN_VALUE.unpack(value[: _BEGUN_VALUE.size])
            return cls(pointer, generation, bool(void), value[_BEGUN_VALUE.size :].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise FormatError(f"a producer's transaction {quoted(key)} cannot be read: {error}") from error


# --- rules -----------------------------------------------------------------------------------------------------------


def next_generation(known: Registration | None, now_ms: int) -> int:
    """Return the generation of a new instance: one more, and of an unknown name the time in milliseconds.

    So a name that was forgotten starts above all that it had before: an instance a millisecond would be too many.
    """
    return now_ms if known is None else known.generation + 1


def last_of(begun: list[tuple[Begun, TransactionOutcome]], inherited: Former | None) -> Former | None:
    """What a producer is told of its former: the newest transaction that was not aborted, since it goes on behind that.

    Where there is none: the newest one. What the former was told itself comes before all that it has started.
    """
    found = [] if inherited is None else [inherited]
    for one, outcome in sorted(begun, key=lambda pair: (pair[0].generation, pair[0].pointer)):
        found.append(Former(one.pointer, one.label, outcome))
    kept = [former for former in found if former.outcome is not TransactionOutcome.ABORTED]
    return next(reversed(kept or found), None)


# --- rows ------------------------------------------------------------------------------------------------------------


def is_of_producer(key: bytes) -> bool:
    """Return whether a key of the side table is that of a producer, or of a transaction that one has started."""
    prefix = topic_prefix(key[1:]) if key[:1] == _TRANSACTIONAL else None
    return key[:1] == _PRODUCER or (prefix is not None and key[1 + len(prefix) + GENERATION_BYTES :][:1] == _BEGUN)


def begun_by(
    side: SideTable, producer: ProducerName, before: int | None = None, most: int | None = None
) -> list[tuple[bytes, Begun]]:
    """Return the transactions of a producer that are written down, each with its key, the oldest first.

    Args:
        before: those with a lower pointer; None: all.
        most: how many at most; None: all.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read.
    """
    stop = stop_key(producer.begun) if before is None else producer.begun_key(before)
    rows = every(side.rows, producer.begun, stop) if most is None else side.rows(producer.begun, stop, most).items
    return [(key, Begun.parse(key, value)) for key, value in rows]


def all_begun(side: SideTable) -> Iterator[tuple[ProducerName, Begun]]:
    """Yield the transactions of all producers that are written down; of generations that are gone, too.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read.
    """
    for key, value in _rows(side, _TRANSACTIONAL):
        producer = _beginner(key)
        if producer is not None:
            yield producer, Begun.parse(key, value)


def producers_of(side: SideTable, home: TopicMetadata) -> list[tuple[ProducerName, Registration]]:
    """Return the producers whose home a topic is, in the order of their names."""
    found = ((_producer(key), Registration.parse(value)) for key, value in _rows(side, ProducerName.of(home, "").key))
    return [(producer, one) for producer, one in found if producer is not None and one.instance != NO_INSTANCE]


def earlier_homes(side: SideTable, producer: ProducerName) -> list[ProducerName]:
    """Return the producers that a home had in earlier generations, by this name; some may not be there."""
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
    """Return the keys of a producer's last requests, of all topics."""
    return [key for key, _ in _rows(side, _REQUEST) if _requested(key) == (producer.home, producer.name)]


def topics_requested(side: SideTable, home: TopicId) -> set[bytes]:
    """Return the starts of the row keys of all topics and generations to which producers of a home have sent
    requests.
    """
    found = set()
    for key, _ in _rows(side, _REQUEST):
        if _requested(key)[0] == home and (topic := topic_prefix(key[1:])) is not None:
            found.add(key[1 : 1 + len(topic) + GENERATION_BYTES])
    return found


def first_unannounced(side: SideTable, prefix: bytes) -> int:
    """Return the first position behind all that producers have requested of a generation of a topic.

    Args:
        prefix: the start of the generation's row keys.
    """
    found = (LastRequest.parse(value) for _, value in _rows(side, _REQUEST + prefix))
    return max((request.stop for request in found), default=0)


def announced_ahead(side: SideTable, prefix: bytes) -> list[tuple[bytes, bytes]]:
    """From which row key to which the requests may be that producers of a topic have announced ahead.

    A row there that is none of theirs would be mistaken for the last of them, after the server's process is over.

    Args:
        side: where requests are.
        prefix: the start of the generation's row keys.
    """
    found = (LastRequest.parse(value) for _, value in _rows(side, _REQUEST + prefix))
    pairs = ((one.first + one.number, one.until) for one in found if one.until)
    return [(prefix + tail(first), prefix + tail(until)) for first, until in pairs]


def tidy(
    side: SideTable,
    is_invalid: Callable[[int], bool],
    is_undecided: Callable[[int], bool],
    is_gone: Callable[[TopicId, int], bool],
    idle_before_ms: int,
) -> tuple[int, int]:
    """Mark what was started in invalid transactions, and forget idle producers and those of topics that are gone.

    The marks come before an id leaves the invalid list: from then on its transaction would count as committed. So also
    a former that was not decided when its producer was registered is one that was aborted.

    Args:
        is_invalid: whether a transaction is on the invalid list.
        is_undecided: whether one may still be committed; its producer is not idle.
        is_gone: whether a topic was deleted, or has another generation than this.
        idle_before_ms: who has done nothing since is forgotten.

    Returns:
        How many transactions were marked, and how many producers were forgotten.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read or written.
    """
    # What producers have written is read before they are: of one that is registered meanwhile nothing is taken.
    marked, begun, active, opened = _tidy_begun(side, is_invalid, is_undecided, idle_before_ms)
    requested = list(_rows(side, _REQUEST))
    producers = dict(_rows(side, _PRODUCER))
    for key, value in producers.items():
        producers[key] = _former_marked(side, key, value, is_invalid)
        marked += producers[key] != value
    homes: dict[tuple[TopicId | None, str], bytes] = {
        (one.home, one.name): key for key in producers if (one := _producer(key)) is not None
    }
    requests: dict[bytes, list[bytes]] = {}
    gone: list[bytes] = []
    for key, value in requested:
        home, topic = homes.get(_requested(key)), _producer(key)
        if home is None or topic is None or is_gone(topic.home, topic.home_generation):
            gone.append(key)
        else:
            active[home] = max(active.get(home, 0), LastRequest.parse(value).first >> 16)
            requests.setdefault(home, []).append(key)
    forgotten = 0
    for key, value in producers.items():
        producer, known = _producer(key), Registration.parse(value)
        rows = [*begun.pop(key, ()), *requests.get(key, ())]
        if producer is None or is_gone(producer.home, producer.home_generation):
            # What is open is ended by the first instance in the home that is made again.
            gone += [] if key in opened else [key, *rows]
        elif max(known.updated_ms, active.get(key, 0)) >= idle_before_ms:
            continue
        elif known.instance == NO_INSTANCE:
            gone.append(key)
        else:
            # The row itself goes with a later pass: its server may be about to change it. What it knows of a former is
            # older than what is forgotten here.
            forgotten += side.exchange(
                key, value, known._replace(instance=NO_INSTANCE, former=None, settled=True).pack(), deletes=rows
            )
    side.delete([*gone, *(key for keys in begun.values() for key in keys)])
    return marked, forgotten


def mark_void(side: SideTable, is_invalid: Callable[[int], bool]) -> int:
    """Mark what was started in invalid transactions, and formers that are: see :func:`tidy`. Durable on return.

    Returns:
        How many were marked.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read or written.
    """
    marked, *_ = _tidy_begun(side, is_invalid, lambda _: False, 0)
    return marked + sum(
        _former_marked(side, key, value, is_invalid) != value for key, value in list(_rows(side, _PRODUCER))
    )


def _tidy_begun(
    side: SideTable,
    is_invalid: Callable[[int], bool],
    is_undecided: Callable[[int], bool],
    idle_before_ms: int,
) -> tuple[int, dict[bytes, list[bytes]], dict[bytes, int], set[bytes]]:
    """Mark void transactions.

    Returns:
        How many, by producer the keys of all, and when the last one started; and which producers have any open.
    """
    marked, opened = 0, set[bytes]()
    keys: dict[bytes, list[bytes]] = {}
    active: dict[bytes, int] = {}
    for key, value in _rows(side, _TRANSACTIONAL):
        producer = _beginner(key)
        if producer is None:
            continue
        begun = Begun.parse(key, value)
        if not begun.void and is_invalid(begun.pointer):
            marked += side.exchange(key, value, begun._replace(void=True).pack())
        is_open = not begun.void and is_undecided(begun.pointer)
        opened.update([producer.key] if is_open else [])
        active_ms = max(transaction_ms(begun.pointer), idle_before_ms if is_open else 0)
        active[producer.key] = max(active.get(producer.key, 0), active_ms)
        keys.setdefault(producer.key, []).append(key)
    return marked, keys, active, opened


def _former_marked(side: SideTable, key: bytes, value: bytes, is_invalid: Callable[[int], bool]) -> bytes:
    """Mark a former that is invalid; returns what the producer's row holds then."""
    while True:
        known = Registration.parse(value)
        former = known.former
        if former is None or former.outcome is not TransactionOutcome.PENDING or not is_invalid(former.transaction):
            return value
        marked = known._replace(former=former._replace(outcome=TransactionOutcome.ABORTED)).pack()
        if side.exchange(key, value, marked):
            return marked
        # A server has changed it meanwhile.
        value = side.get(key) or marked


def _rows(side: SideTable, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    return every(side.rows, prefix, stop_key(prefix))


def _producer(key: bytes) -> ProducerName | None:
    """Return the producer whose registration has this key."""
    prefix = topic_prefix(key[1:])
    home = None if prefix is None else TopicId.from_prefix(prefix)
    if home is None or prefix is None:
        return None
    rest = key[1 + len(prefix) :]
    name = rest[GENERATION_BYTES:].decode("ascii", "replace")
    return ProducerName(home, int.from_bytes(rest[:GENERATION_BYTES], "big"), name)


def _beginner(key: bytes) -> ProducerName | None:
    """Return the producer that has started the transaction with this key; None: it is another kind of row."""
    found = _producer(key[: -_POINTER.size])
    kind, name = (found.name[:1], found.name[1:-1]) if found else ("", "")
    return found._replace(name=name) if found and kind == "p" and found.name.endswith("\0") else None


def _requested(key: bytes) -> tuple[TopicId | None, str]:
    """Home and name of the producer whose last request has this key."""
    topic = topic_prefix(key[1:]) or b""
    home, zero, name = key[1 + len(topic) + GENERATION_BYTES :].partition(b"\0")
    return TopicId.from_prefix(home), name.decode("ascii", "replace") if zero else ""
