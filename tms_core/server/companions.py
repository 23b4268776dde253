"""Programs that run inside ``tms serve``, such as the embedded janitor.

An installed distribution registers a companion in the entry-point group ``tms.companions``. Before the first request,
when all its resources are open, the server calls the entry point with a :class:`CompanionContext`, and gets an object
that it can stop. Therefore the server does not depend on any companion.

If several servers share a store, each tries to start its janitor, and the janitor's lease on the store admits one of
them (invariant S12). The other janitors wait until the lease is free. This is independent of the servers' leadership:
the janitor may run in any of the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import Event, Thread
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, LeaseHeld, StateUnavailable, StoreUnavailable, TmsError
from tms_core.logs.loggers import get_logger
from tms_core.messaging.service import MessagingService
from tms_core.tables.base import Store
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.client import TransactionClient

#: The entry-point group.
GROUP = "tms.companions"
#: The interval between attempts to start a companion, in seconds, and the factor of the longest one after failures.
RETRY_SECONDS, _LONGEST = 10.0, 64

logger = get_logger(__name__)


@dataclass(frozen=True)
class CompanionContext:
    """The objects that a companion may use until it is stopped.

    Attributes:
        config: the settings file, from which a companion reads its section; None: the built-in configuration.
        environ: the environment variables of the settings.
        flags: the command-line flags that override settings, by name (``leveldb``, ``hbase``, ``snapshots``).
        store: the open, writable store; only one process can open a LevelDB store.
        created: whether this process has created the store, which therefore has no other owner.
        transactions: the manager of all transactions, which is also a snapshot source: the manager in this process, or
            a client if several servers share a manager; None: another system manages transactions.
        registry: the registry of the metrics at the server's ``/metrics``.
    """

    config: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, object]
    store: Store
    created: bool
    service: MessagingService
    transactions: TransactionManager | TransactionClient | None
    registry: CollectorRegistry
    clock: Clock


class Companion(Protocol):
    """A started companion."""

    @property
    def hold_seconds(self) -> int | None:
        """Return the hold of rows that a shorter TTL makes due, in seconds; None: the companion deletes nothing."""
        ...

    def run_now(self) -> None:
        """Start the scheduled work immediately; thread-safe."""
        ...

    def stop(self) -> None:
        """Stop the companion, and wait until it has released all resources of its host. Called once."""
        ...


#: The function of an entry point: starts a companion, or raises a ``TmsError``.
Start = Callable[[CompanionContext], Companion]


@runtime_checkable
class Checked(Protocol):
    """A function of an entry point that can check its settings before a store is created."""

    def check(self, config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> None:
        """Check whether the companion can start; raise a ``TmsError`` if it cannot."""
        ...


def find_entry_points() -> Iterable[EntryPoint]:
    """Return the entry points of the installed companions."""
    return entry_points(group=GROUP)


def load(entry: EntryPoint) -> Start:
    """Import the function of an entry point.

    Raises:
        ConfigurationError: the import failed.
    """
    try:
        found: Start = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The companion {entry.name} ({entry.value}) cannot be loaded: {error}.",
            f"Reinstall it, or start the server without it: tms serve --no-{entry.name}.",
        ) from error
    return found


def load_all() -> dict[str, Start]:
    """Return the functions of all entry points, by name; raises as :func:`load`."""
    return {entry.name: load(entry) for entry in find_entry_points()}


def check(
    starts: Mapping[str, object], config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> None:
    """Check the companions that are :class:`Checked`, before a store is created.

    Raises:
        TmsError: the companion could not start.
    """
    for start in starts.values():
        if isinstance(start, Checked):
            start.check(config, environ, flags)


class Standby:
    """A companion that waits for its lease: a thread tries to start it until the lease is free.

    The thread continues after any error, such as a store that does not respond: otherwise no companion would take over
    when the lease becomes free. It logs the same error once. After each failure it waits twice as long, because an
    attempt may take the lease and record a failed run, except while the storage is away.

    Args:
        retry_seconds: the interval between attempts.
    """

    def __init__(self, name: str, start: Callable[[], Companion], retry_seconds: float = RETRY_SECONDS) -> None:
        self._name = name
        self._start = start
        self._retry_seconds = retry_seconds
        self._companion: Companion | None = None
        self._stop = Event()
        self._thread = Thread(target=self._run, name=f"standby-{name}")
        self._thread.start()

    @property
    def hold_seconds(self) -> int | None:
        """Return the hold of the companion; None while it waits."""
        return None if self._companion is None else self._companion.hold_seconds

    def run_now(self) -> None:
        """Start the companion's scheduled work immediately; do nothing while it waits for its lease."""
        if self._companion is None:
            logger.info("the %s of this server waits for its lease, so it starts no work now", self._name)
        else:
            self._companion.run_now()

    def stop(self) -> None:
        """Stop the companion, or the wait for its lease."""
        self._stop.set()
        self._thread.join()
        if self._companion is not None:
            self._companion.stop()

    def _run(self) -> None:
        logged, seconds = "", self._retry_seconds
        while not self._stop.wait(seconds):
            try:
                self._companion = self._start()
            except LeaseHeld:
                logged, seconds = "", self._retry_seconds
            except Exception as error:
                is_away = isinstance(error, (StoreUnavailable, StateUnavailable))
                longest = self._retry_seconds * (1 if is_away else _LONGEST)
                seconds = min(2 * seconds, longest)
                if repr(error) != logged:
                    text = "the %s of this server does not start, and tries again in %d s: %s"
                    trace = None if isinstance(error, TmsError) else error
                    logger.error(text, self._name, seconds, error, exc_info=trace)
                logged = repr(error)
            else:
                logger.info("the %s of this server has started", self._name)
                return


def start_companion(name: str, start: Callable[[], Companion]) -> Companion:
    """Start a companion; if another server's companion has the lease, return a :class:`Standby`.

    Raises:
        TmsError: the companion cannot start, and waiting does not help.
    """
    try:
        return start()
    except LeaseHeld as error:
        logger.info("the %s of this server waits: %s", name, error.message)
        return Standby(name, start)
