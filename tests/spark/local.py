"""Tasks without Spark, which run one after the other in this process from serialized input."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

from pyspark import cloudpickle

from janitor.run.engine import Engine
from janitor.spark.sweep.engine import spark_engine
from janitor.spark.sweep.ranged import RangedStore
from janitor.spark.sweep.task import pack, perform, rows_of, unpack
from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.executor import RowArchive
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Run, Terms
from janitor.sweep.scan import Part
from janitor.sweep.transactions import TransactionView
from tests.builders import DAY, NOW_MS, make_deps
from tms_core.clock import Clock, ManualClock
from tms_core.tables.base import Reads, Store
from tms_core.tables.memory import MemoryStore

#: The serialization of tasks by Spark.
_DUMPS: Callable[[object], bytes] = cloudpickle.dumps


def _do_nothing(*_: object) -> None:
    """Do nothing before a task, and archive no rows."""


@dataclass
class MemoryEnvironment:
    store: Store
    state: State
    clock: Clock
    make_archive: Callable[[str, TransactionView, int], RowArchive | None] = _do_nothing

    @contextmanager
    def reading(self, part: Part) -> Iterator[tuple[Store, Store]]:
        yield rows_of(part, self.store.parts()[part.salt or 0]), self.store

    @contextmanager
    def writing(self, part: Part) -> Iterator[tuple[Store, Store, State]]:
        yield rows_of(part, self.store.parts()[part.salt or 0]), self.store, self.state

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> RowArchive | None:
        return self.make_archive(run_id, transactions, first)


@dataclass
class PiecesEnvironment(MemoryEnvironment):
    """An environment that reads a store in ranges of keys."""

    @contextmanager
    def reading(self, part: Part) -> Iterator[tuple[Store, Store]]:
        yield RangedStore(self.store, *([each] for each in part.within)), self.store


@dataclass
class LocalSender:
    """A sender that runs tasks immediately.

    Attributes:
        before: a function that is called with each task before it runs, and may raise an error.
        times: the number of executions of each task; the last one returns the outcome.
        sent: all tasks.
    """

    environment: Any
    before: Callable[[Part], None] = _do_nothing
    times: int = 1
    sent: list[Part] = field(default_factory=list)

    def send(self, parts: Sequence[Part], keep_alive: Callable[[], None]) -> list[Outcome]:
        keep_alive()
        return [self._perform(part) for part in parts]

    def _perform(self, part: Part) -> Outcome:
        received: Part = cloudpickle.loads(_DUMPS(part))
        self.sent.append(received)
        self.before(received)
        outcomes = [perform(self.environment, received, attempt) for attempt in range(self.times)]
        return unpack(pack(outcomes[-1]))


def salted(run: Run) -> list[tuple[Part, Reads]]:
    return [(Part(run, number, number), part) for number, part in enumerate(run.store.parts())]


def on_spark(*arguments: Any, sender: Any, cut: Any, open_reading: Any = None, **options: Any) -> Engine:
    """Return an engine that uses tasks, with the arguments and options of ``make_deps``."""
    return spark_engine(make_deps(*arguments, **options), sender=sender, cut=cut, open_reading=open_reading)


@dataclass
class LocalKit:
    engine: Engine
    store: Store
    state: State
    clock: ManualClock
    sender: LocalSender


def local_kit(store: Store, source: Any, *, terms: Terms, **options: Any) -> LocalKit:
    """Return a janitor that uses tasks on a store in memory."""
    clock = options.pop("clock", None) or ManualClock(NOW_MS, monotonic_ms=DAY)
    state = options.pop("state", None) or SqliteState.in_memory()
    sender = LocalSender(options.pop("environment", None) or MemoryEnvironment(store, state, clock))
    given = {"token_hex": secrets.token_hex, "sender": sender, "cut": salted, **options}
    engine = on_spark(store, state, source, clock, terms, **given)
    return LocalKit(engine, store, state, clock, sender)


@dataclass(frozen=True)
class EndlessEnvironment:
    """An environment in which a task runs until it is canceled; its file shows that it has started."""

    mark: str

    @contextmanager
    def reading(self, part: Part) -> Iterator[tuple[Store, Store]]:
        Path(self.mark).touch()
        while Path(self.mark).exists():
            sleep(0.05)
        yield MemoryStore(), MemoryStore()

    def writing(self, part: Part) -> AbstractContextManager[tuple[Store, Store, State]]:
        raise NotImplementedError

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> RowArchive | None:
        raise NotImplementedError

    @property
    def clock(self) -> Clock:
        raise NotImplementedError
