"""Builders of small stores and of a janitor for them.

    orders = topic(store, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS - 60_001, NOW_MS - 60_000)
    kit = janitor(store)
    kit.engine.run_once(adopt=True)
    assert orders.times() == [NOW_MS - 60_000]

The builders work with every store. The clock stands still unless a test advances ``kit.clock``. Each snapshot has the
current time unless a test sets its age or an error.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, TypeVar

from janitor.report import Report
from janitor.rules.ranges import Lifetime
from janitor.run import plan_file as plan
from janitor.run.engine import Engine
from janitor.run.prepare import IN_PROGRESS, Deps, prepare
from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Preparation, Terms
from janitor.sweep.sweep import Threads
from tests.support import PATIENCE_SECONDS
from tms_core.clock import Clock, ManualClock
from tms_core.errors import StoreError
from tms_core.rowkey import MessageKey, PayloadKey, generation_prefix
from tms_core.tables.base import (
    CELLS,
    KEYS,
    MESSAGES,
    KeyReads,
    MessageValue,
    Projection,
    Reads,
    Store,
    TxCell,
    read_all,
)
from tms_core.topic import TopicId, encode_properties
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import TX_PER_MS, InProgress, InProgressType, Snapshot, VisibilityState
from tms_core.transaction.source.source import Loaded, SnapshotSource

NOW_MS = 1_700_000_000_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000

#: A transaction lives for an hour at most, its writes may arrive an hour late, and clocks may differ by five minutes.
LIFETIME = Lifetime(max_ms=HOUR, grace_ms=HOUR, allowance_ms=5 * MINUTE)


def pointer(begin_ms: int, number: int = 0) -> int:
    """Return a write pointer of a transaction that started at this time."""
    return begin_ms * TX_PER_MS + number


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topic:
    """A topic of a store, and the generation whose rows the methods write and read."""

    store: Store
    id: TopicId
    generation: int = 1
    _sequence: count[int] = field(default_factory=count, repr=False, compare=False)

    def describe(self, *, ttl_seconds: int, generation: int = 1, **properties: str) -> Topic:
        """Write the metadata row; a negative generation is a deleted topic."""
        return self.write_metadata(
            encode_properties({"generation": str(generation), "ttl": str(ttl_seconds), **properties})
        )

    def write_metadata(self, value: bytes) -> Topic:
        """Write these bytes as the metadata row."""
        table = self.store.metadata
        assert table.compare_and_set(self.id.prefix, table.get(self.id.prefix), value)
        return self

    def at(self, generation: int) -> Topic:
        """Return the same topic in another generation."""
        return replace(self, generation=generation)

    def plain(self, *times_ms: int, body: bytes = b"body") -> Topic:
        """Add messages published outside transactions."""
        return self._put(times_ms, MessageValue(None, body))

    def tx(self, write_pointer: int, *times_ms: int, body: bytes = b"body") -> Topic:
        """Add messages published in a transaction."""
        return self._put(times_ms, MessageValue(write_pointer, body))

    def ref(self, write_pointer: int, *times_ms: int) -> Topic:
        """Add messages that refer to the payload table."""
        return self._put(times_ms, MessageValue(write_pointer, None))

    def stored(self, write_pointer: int, *times_ms: int, body: bytes = b"stored") -> Topic:
        """Add rows of the payload table."""
        keys = [PayloadKey(self.id, self.generation, write_pointer, ms, self._next()).pack() for ms in times_ms]
        self.store.payload.put([(key, body) for key in keys])
        return self

    def times(self) -> list[int]:
        """Return the publish times of the stored messages, in key order."""
        return [key.publish_ms for key, _ in self.messages()]

    def pointers(self) -> list[int | None]:
        """Return the write pointers of the stored messages, in key order."""
        return [value.pointer for _, value in self.messages()]

    def stored_times(self) -> list[int]:
        """Return the write times of the stored payloads, in key order."""
        found = self.store.payload.read(KEYS, *self._range(), 1_000_000).items
        return [key.write_ms for raw in found if (key := PayloadKey.parse(raw)) is not None]

    def messages(self) -> list[tuple[MessageKey, MessageValue]]:
        found = self.store.message.read(MESSAGES, *self._range(), 1_000_000).items
        return [(key, value) for raw, value in found if (key := MessageKey.parse(raw)) is not None]

    def _put(self, times_ms: Iterable[int], value: MessageValue) -> Topic:
        keys = [MessageKey(self.id, self.generation, ms, self._next()).pack() for ms in times_ms]
        self.store.message.put([(key, value) for key in keys])
        return self

    def _next(self) -> int:
        return next(self._sequence) & 0xFFFF

    def _range(self) -> tuple[bytes, bytes]:
        prefix = self.id.prefix
        return generation_prefix(prefix, self.generation), generation_prefix(prefix, self.generation + 1)


def topic(store: Store, name: str, *, ttl_seconds: int, generation: int = 1) -> Topic:
    """Create a topic with a metadata row; its rows have this generation, or the last one of a deleted topic."""
    return unknown_topic(store, name, abs(generation)).describe(ttl_seconds=ttl_seconds, generation=generation)


def unknown_topic(store: Store, name: str, generation: int = 1) -> Topic:
    """Create a topic without a metadata row."""
    return Topic(store, TopicId.parse(name), generation)


# --- transactions ----------------------------------------------------------------------------------------------------


@dataclass
class Snapshots:
    """A source of transaction snapshots, which have the current values of its attributes.

    Attributes:
        age_ms: the age of a snapshot when it is read.
        write_pointer: the highest issued write pointer; None: the pointer of the snapshot's time.
        error: the error of the next reads; None: they succeed.
        reads: the number of reads.
        implausible: whether a snapshot may contradict the previous one.
    """

    clock: ManualClock
    invalid: Sequence[int] = ()
    in_progress: Sequence[int] = ()
    age_ms: int = 0
    write_pointer: int | None = None
    error: Exception | None = None
    reads: int = 0
    implausible: bool = False

    def make_possible(self, state: State) -> None:
        """Add this snapshot's invalid and open transactions to the open transactions of the previous snapshot."""
        known = IN_PROGRESS.read(state)
        if known is not None and not self.implausible:
            IN_PROGRESS.save(state, replace(known, pointers=known.pointers.union(self.invalid, self.in_progress)))

    def latest(self) -> Loaded:
        self.reads += 1
        if self.error is not None:
            raise self.error
        taken_ms = self.clock.now_ms() - self.age_ms
        newest = pointer(taken_ms) if self.write_pointer is None else self.write_pointer
        return Loaded(visibility(taken_ms, self.invalid, self.in_progress, newest), f"snapshot.{taken_ms}")


def visibility(
    taken_ms: int, invalid: Iterable[int] = (), in_progress: Iterable[int] = (), newest: int | None = None
) -> VisibilityState:
    """Return the visibility state of a snapshot taken at this time."""
    write_pointer = pointer(taken_ms) if newest is None else newest
    entries = tuple(InProgress(p, taken_ms + MINUTE, p - 1, InProgressType.SHORT) for p in in_progress)
    return VisibilityState(taken_ms, write_pointer, write_pointer, array("q", sorted(invalid)), entries)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    stream = BytesIO()
    write_snapshot(stream, snapshot)
    return stream.getvalue()


def encode_state(state: VisibilityState) -> bytes:
    """Return the bytes of a snapshot file with this state."""
    return encode_snapshot(Snapshot(state))


def save_snapshot(folder: Path, state: VisibilityState) -> None:
    """Write a snapshot file into a folder, which may not exist yet."""
    folder.mkdir(exist_ok=True)
    (folder / f"snapshot.{state.timestamp_ms}").write_bytes(encode_state(state))


# --- the janitor -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PossibleSnapshots:
    """The snapshots of a manager, each of which can follow the one before (``Snapshots.make_possible``)."""

    snapshots: Snapshots
    state: State

    def latest(self) -> Loaded:
        self.snapshots.make_possible(self.state)
        return self.snapshots.latest()


def make_deps(
    store: Reads, state: State, source: SnapshotSource | None, clock: Clock, terms: Terms, **options: Any
) -> Deps:
    """Return the dependencies of a janitor; ``options`` are fields of ``Deps`` and of ``Terms``."""
    settings = {item.name: options.pop(item.name) for item in fields(Terms) if item.name in options}
    return Deps(store, state, source, clock, replace(terms, **settings), **options)


class FileEngine(Engine):
    """An engine that writes and reads plan files, like the commands.

    Args:
        workers: the number of parts of the store to sweep concurrently.
        options: the options of :func:`make_deps`.
    """

    def __init__(self, store: Reads, state: State, source: Any, *arguments: Any, workers: int = 1, **options: Any):
        if isinstance(source, Snapshots):
            source = PossibleSnapshots(source, state)
        super().__init__(make_deps(store, state, source, *arguments, **{"division": Threads(workers), **options}))

    def preview(self, *, out: Path | None = None, **options: Any) -> Report:
        """Return the report of a plan; write it to a plan file, if ``out`` is set."""
        report, document = self.plan(**options)
        if out is not None:
            plan.save(out, document)
        return report

    def carry_out(self, path: Path, *, adopt: bool = False) -> Report:
        """Apply a plan file."""
        return self.apply(plan.read(path), adopt=adopt)


@dataclass(frozen=True)
class Kit:
    """A janitor with its store, state, clock and snapshots."""

    engine: FileEngine
    store: Store
    state: State
    clock: ManualClock
    snapshots: Snapshots
    options: dict[str, Any]

    def adopt(self) -> Kit:
        """Adopt the store, and return this kit."""
        self.engine.adopt()
        return self

    def run_after(self, ms: int, **options: Any) -> Report:
        """Advance the clock, and run once."""
        self.clock.advance(ms)
        return self.engine.run_once(**options)

    def restart(self, **changes: Any) -> Kit:
        """Return a new janitor on the same store, state, clock and snapshots; ``changes`` as of :func:`janitor`."""
        return janitor(
            **{
                "store": self.store,
                "state": self.state,
                "clock": self.clock,
                "snapshots": self.snapshots,
                **self.options,
                **changes,
            }
        )


def prepared(store: Store) -> Preparation:
    """Return the preparation of a run of a new janitor."""
    return prepare(janitor(store).engine.deps)


def janitor(
    store: Store,
    *,
    state: State | None = None,
    clock: ManualClock | None = None,
    snapshots: Any = None,
    invalid: Sequence[int] = (),
    now_ms: int = NOW_MS,
    hold_seconds: int = 3600,
    protect: tuple[str, ...] = (),
    lifetime: Lifetime = LIFETIME,
    lifetime_known: bool = True,
    snapshot_interval_seconds: int = 60,
    **options: Any,
) -> Kit:
    """Return a janitor with an empty state by default.

    Args:
        invalid: the invalid transactions of its snapshots.
        options: the options of ``FileEngine``.
    """
    clock = clock or ManualClock(now_ms, monotonic_ms=DAY)
    snapshots = snapshots or Snapshots(clock, invalid)
    state = state or SqliteState.in_memory()
    terms = Terms(hold_seconds, protect, lifetime, lifetime_known, snapshot_interval_seconds)
    settings = {"token_hex": secrets.token_hex, **options}
    engine = FileEngine(store, state, snapshots, clock, terms, **settings)
    used: dict[str, Any] = {
        "hold_seconds": hold_seconds,
        "protect": protect,
        "lifetime": lifetime,
        "lifetime_known": lifetime_known,
        "snapshot_interval_seconds": snapshot_interval_seconds,
        **options,
    }
    return Kit(engine, store, state, clock, snapshots, used)


def adopted_janitor(store: Store, **options: Any) -> Kit:
    """Return a janitor after the run that adopted the store; ``options`` as of :func:`janitor`."""
    kit = janitor(store, **options)
    kit.engine.run_once(adopt=True)
    return kit


# --- watching --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a store or a state, such as ``message.delete`` or ``state.save_boundary``."""

    name: str
    arguments: tuple[Any, ...]


#: A function that is called before or after a call; it may raise, and make calls that are not watched.
Watcher = Callable[[Call], None]

READS = (
    "metadata.rows",
    "metadata.get",
    "message.keys",
    "message.cells",
    "message.rows",
    "payload.keys",
    "payload.rows",
)
WRITES = (
    "metadata.compare_and_set",
    *(f"{table}.{name}" for table in ("message", "payload") for name in ("delete", "sync", "compact", "put")),
    "message.invert",
)
STATE_CALLS = tuple(
    f"state.{name}" for name in dir(State) if not name.startswith("_") and name not in ("clock_ms", "close")
)


def watch(store: Reads, before: Watcher | None = None, after: Watcher | None = None) -> None:
    """Call watchers around every operation of a store from now on."""
    _watch(store, ("metadata.rows", "metadata.get", "message.read", "payload.read", *WRITES), before, after)


def watch_state(state: State, before: Watcher | None = None, after: Watcher | None = None) -> None:
    """Call watchers around every operation of a state from now on, including its internal ones."""
    _watch(_Named(state), STATE_CALLS, before, after)


class ProcessKilled(BaseException):
    """The process is killed; product code does not catch this error."""


def fail_at(
    name: str, error: BaseException | type[BaseException], when: Callable[[Call], object] = lambda _: True
) -> Watcher:
    """Return a watcher that raises ``error`` at the calls of ``name`` that ``when`` selects."""

    def fail(call: Call) -> None:
        if call.name == name and when(call):
            raise error

    return fail


@contextmanager
def hold_call(store: Reads, name: str = "message.put") -> Iterator[Event]:
    """Block the first call of ``name`` until the block ends; the event is set when the call is blocked."""
    entered, released = Event(), Event()

    def wait(call: Call) -> None:
        if call.name == name and not entered.is_set():
            entered.set()
            assert released.wait(PATIENCE_SECONDS)

    watch(store, before=wait)
    try:
        yield entered
    finally:
        released.set()


def is_about(call: Call, described: Topic) -> bool:
    """Return whether a call reads or writes rows of a topic."""
    first: Any = call.arguments[0] if call.arguments else b""
    items = first if isinstance(first, list) else [first]
    return any((item.key if isinstance(item, TxCell) else item).startswith(described.id.prefix) for item in items)


class TopicFault:
    """A watcher that fails calls about rows of some topics.

    Attributes:
        is_repaired: whether all calls succeed.
        calls: all calls, including calls about other topics.
        failures: the number of failed calls.
    """

    def __init__(self, *topics: Topic, operations: Sequence[str] = ("message.delete",)) -> None:
        self.topics: Sequence[Topic] = topics
        self.operations = operations
        self.error: Exception = StoreError("a block is damaged.")
        self.is_repaired = False
        self.calls: list[Call] = []
        self.failures = 0

    def __call__(self, call: Call) -> None:
        self.calls.append(call)
        if not self.is_repaired and call.name in self.operations and any(is_about(call, each) for each in self.topics):
            self.failures += 1
            raise self.error


class _Named:
    def __init__(self, state: State) -> None:
        self.state = state


def _watch(owner: object, names: Sequence[str], before: Watcher | None, after: Watcher | None) -> None:
    watching = [True]

    def notify(watcher: Watcher | None, call: Call) -> None:
        if watcher is not None and watching[0]:
            watching[0] = False
            try:
                watcher(call)
            finally:
                watching[0] = True

    def wrap(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call_watched(*arguments: Any, **named: Any) -> Any:
            call = Call(name, arguments)
            if name.endswith(".read"):
                want, *rest = arguments
                call = Call(f"{name.removesuffix('read')}{want.call}", tuple(rest))
            notify(before, call)
            result = operation(*arguments, **named)
            notify(after, call)
            return result

        return call_watched

    for name in names:
        table, _, operation = name.partition(".")
        part = getattr(owner, table)
        # A read-only store does not have the writing operations.
        if hasattr(part, operation):
            setattr(part, operation, wrap(name, getattr(part, operation)))


# --- reading all -----------------------------------------------------------------------------------------------------

_R = TypeVar("_R")


def every(table: KeyReads, want: Projection[list[_R]]) -> list[_R]:
    """Return all rows of a table, over all pages."""
    return read_all(table, want, b"", None).items


def assert_boundary_is_true(kit: Kit, invalid: Iterable[int] = ()) -> None:
    """Check that no row up to the boundary has a pointer of an invalid transaction, by default of the snapshot's."""
    proven = kit.state.boundary()
    listed = set(invalid or kit.snapshots.invalid)
    pointers = [cell.pointer for cell in every(kit.store.message, CELLS) if cell.pointer in listed]
    assert proven is None or all(each > proven.bound for each in pointers)
