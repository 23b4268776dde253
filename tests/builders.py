"""Small stores and a janitor over them, told in the words of a test.

    orders = topic(store, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS - 60_001, NOW_MS - 60_000)
    kit = janitor(store)
    kit.engine.run_once(adopt=True)
    assert orders.times() == [NOW_MS - 60_000]

Everything works on any store. Time stands still unless a test moves ``kit.clock``, and the transaction manager writes a
snapshot whenever it is asked, unless a test says how old it is or that it fails.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
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
from tms_core.clock import Clock, ManualClock
from tms_core.rowkey import MessageKey, PayloadKey, generation_prefix
from tms_core.tables.base import KEYS, MESSAGES, KeyReads, MessageValue, Projection, Reads, Store, read_all
from tms_core.topic import TopicId, encode_properties
from tms_core.transaction.model import TX_PER_MS, InProgress, InProgressType, VisibilityState
from tms_core.transaction.source.source import Loaded, SnapshotSource

NOW_MS = 1_700_000_000_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000

#: A transaction may write for an hour, arrive an hour late, and clocks may differ by five minutes.
LIFETIME = Lifetime(max_ms=HOUR, grace_ms=HOUR, allowance_ms=5 * MINUTE)


def pointer(begin_ms: int, number: int = 0) -> int:
    """Return a write pointer of a transaction that started at this time."""
    return begin_ms * TX_PER_MS + number


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topic:
    """One topic of a store, and one generation of it that rows are written to and read from."""

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
        """Write the metadata row's bytes as they are."""
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
        """Publish times of the messages that are there, in key order."""
        return [key.publish_ms for key, _ in self.messages()]

    def pointers(self) -> list[int | None]:
        """Stored write pointers of the messages that are there, in key order."""
        return [value.pointer for _, value in self.messages()]

    def stored_times(self) -> list[int]:
        """Write times of the stored payloads that are there, in key order."""
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
    """Create a topic with a metadata row; rows go to its current generation (of a deleted topic: its last one)."""
    return unknown_topic(store, name, abs(generation)).describe(ttl_seconds=ttl_seconds, generation=generation)


def unknown_topic(store: Store, name: str, generation: int = 1) -> Topic:
    """Create a topic without a metadata row."""
    return Topic(store, TopicId.parse(name), generation)


# --- transactions ----------------------------------------------------------------------------------------------------


@dataclass
class Snapshots:
    """A transaction manager; change its attributes and the next snapshot shows it.

    Attributes:
        age_ms: how old the snapshot is when it is read.
        write_pointer: the highest one issued; by default that of the snapshot's own time.
        error: raised instead of answering.
        asked: how often a snapshot was read.
        implausible: whether it may say what no manager can that has said what this one did before.
    """

    clock: ManualClock
    invalid: Sequence[int] = ()
    in_progress: Sequence[int] = ()
    age_ms: int = 0
    write_pointer: int | None = None
    error: Exception | None = None
    asked: int = 0
    implausible: bool = False

    def make_possible(self, state: State) -> None:
        """Let the previous snapshot list as in progress what this one lists as invalid or in progress."""
        known = IN_PROGRESS.read(state)
        if known is not None and not self.implausible:
            IN_PROGRESS.save(state, replace(known, pointers=known.pointers.union(self.invalid, self.in_progress)))

    def latest(self) -> Loaded:
        self.asked += 1
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
    """What a janitor works with; ``options`` are of ``Deps`` and of ``Terms``."""
    settings = {item.name: options.pop(item.name) for item in fields(Terms) if item.name in options}
    return Deps(store, state, source, clock, replace(terms, **settings), **options)


class FileEngine(Engine):
    """An engine whose plans go to files and come from there, as the commands' do.

    Args:
        workers: how many parts of the store are swept at once.
        options: as of :func:`make_deps`.
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
    """A janitor and all it stands on."""

    engine: FileEngine
    store: Store
    state: State
    clock: ManualClock
    snapshots: Snapshots
    options: dict[str, Any]

    def run_after(self, ms: int, **options: Any) -> Report:
        """Let time pass, and run once."""
        self.clock.advance(ms)
        return self.engine.run_once(**options)

    def restart(self, **changes: Any) -> Kit:
        """Return another janitor on the same store, state and clocks, with other settings: see :func:`janitor`."""
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
    now_ms: int = NOW_MS,
    hold_seconds: int = 3600,
    protect: tuple[str, ...] = (),
    lifetime: Lifetime = LIFETIME,
    lifetime_known: bool = True,
    snapshot_interval_seconds: int = 60,
    **options: Any,
) -> Kit:
    """A janitor that has met nothing yet; ``options`` are those of ``FileEngine``."""
    clock = clock or ManualClock(now_ms, monotonic_ms=DAY)
    snapshots = snapshots or Snapshots(clock)
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


# --- watching --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One operation asked of a store or of a state: ``message.delete``, ``state.save_boundary``."""

    name: str
    arguments: tuple[Any, ...]


#: Told of a call before it happens, or after it; may raise, or change things: its own calls are not watched.
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
    """Tell of every operation of a store from now on."""
    _watch(store, ("metadata.rows", "metadata.get", "message.read", "payload.read", *WRITES), before, after)


def watch_state(state: State, before: Watcher | None = None, after: Watcher | None = None) -> None:
    """Call watchers around every operation of a state from now on, including its internal ones."""
    _watch(_Named(state), STATE_CALLS, before, after)


def fail_at(
    name: str, error: BaseException | type[BaseException], when: Callable[[Call], object] = lambda _: True
) -> Watcher:
    """Make an operation of a store or state fail at the calls selected by ``when``."""

    def fail(call: Call) -> None:
        if call.name == name and when(call):
            raise error

    return fail


class _Named:
    def __init__(self, state: State) -> None:
        self.state = state


def _watch(owner: object, names: Sequence[str], before: Watcher | None, after: Watcher | None) -> None:
    watching = [True]

    def tell(watcher: Watcher | None, call: Call) -> None:
        if watcher is not None and watching[0]:
            watching[0] = False
            try:
                watcher(call)
            finally:
                watching[0] = True

    def wrapped(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any, **named: Any) -> Any:
            call = Call(name, arguments)
            if name.endswith(".read"):
                want, *rest = arguments
                call = Call(f"{name.removesuffix('read')}{want.call}", tuple(rest))
            tell(before, call)
            answer = operation(*arguments, **named)
            tell(after, call)
            return answer

        return asked

    for name in names:
        table, _, operation = name.partition(".")
        part = getattr(owner, table)
        # What is for reading only has nothing that writes.
        if hasattr(part, operation):
            setattr(part, operation, wrapped(name, getattr(part, operation)))


# --- reading all -----------------------------------------------------------------------------------------------------

_R = TypeVar("_R")


def every(table: KeyReads, want: Projection[list[_R]]) -> list[_R]:
    """Return all rows of a table, over all pages."""
    return read_all(table, want, b"", None).items
