"""Programs that run inside ``tms serve``, such as the embedded janitor.

The server knows no companion by name. An installed distribution names one in the entry-point group ``tms.companions``.
When all its resources are open, before the first request, the server calls it with a :class:`CompanionContext` and gets
an object that it can stop. Therefore the server works with any companion, or alone.

If several servers share a store, each tries to run its janitor, and the store's own lease admits one of them (rule
S12). The janitors of the other servers start when that one is gone. Leadership of the servers is independent: a janitor
may run next to any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

from prometheus_client import CollectorRegistry

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, LeaseHeld, TmsError
from tms_core.logs.loggers import get_logger
from tms_core.messaging.service import MessagingService
from tms_core.tables.base import Store
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.client import TransactionClient

#: The entry-point group.
GROUP = "tms.companions"
#: The interval of attempts, in seconds.
RETRY_SECONDS = 10.0

logger = get_logger(__name__)


@dataclass(frozen=True)
class CompanionContext:
    """The objects that a companion may use until it is stopped.

    Attributes:
        config: the settings file, from which a companion reads its section; None: the built-in configuration.
        environ: the environment the settings were read with.
        flags: the flags of the command line that change settings, by name (``leveldb``, ``hbase``, ``snapshots``).
        store: the store, open and writable; a LevelDB store is open in this process only.
        created: whether this start has created the store, so that it has no other owner.
        transactions: the manager of all transactions, which is also a snapshot source: the manager in this process, or
            a client if several servers share one; None: they are managed elsewhere.
        registry: the server's ``/metrics`` shows metrics registered here.
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
    """Something that was started."""

    @property
    def hold_seconds(self) -> int | None:
        """Return the hold of rows that a shorter TTL makes due, in seconds; None: it deletes nothing."""
        ...

    def run_now(self) -> None:
        """Start its scheduled work at once; for any thread."""
        ...

    def stop(self) -> None:
        """Stop the companion, and wait until it has released all resources of its host. Called once."""
        ...


#: What an entry point is: starts a companion, or raises a ``TmsError`` that says why it cannot.
Start = Callable[[CompanionContext], Companion]


def installed() -> Iterable[EntryPoint]:
    """Return the entry points there are."""
    return entry_points(group=GROUP)


def load(entry: EntryPoint) -> Start:
    """Return the function of an entry point.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    try:
        found: Start = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The companion {entry.name} ({entry.value}) cannot be loaded: {error}.",
            f"Repair its installation, or serve without it: tms serve --no-{entry.name}.",
        ) from error
    return found


def loaded() -> dict[str, Start]:
    """Return the functions of all entry points, by name; raises as :func:`load`."""
    return {entry.name: load(entry) for entry in installed()}


def check(
    starts: Mapping[str, Start], config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> None:
    """Call the attribute ``check`` of each function that has it, before a store is created.

    Raises:
        TmsError: the companion could not start.
    """
    for start in starts.values():
        if (found := getattr(start, "check", None)) is not None:
            found(config, environ, flags)


class Standby:
    """Tries to start a companion until it gets the lease it needs.

    Args:
        retry_seconds: the interval of attempts.
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
        """Return the companion's, once it runs."""
        return None if self._companion is None else self._companion.hold_seconds

    def run_now(self) -> None:
        """Start the companion's work at once; do nothing if it waits for its lease."""
        if self._companion is None:
            logger.info("the %s of this server waits for its lease, so it has nothing to do now", self._name)
        else:
            self._companion.run_now()

    def stop(self) -> None:
        """Stop the companion, or the wait for it."""
        self._stop.set()
        self._thread.join()
        if self._companion is not None:
            self._companion.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._retry_seconds):
            try:
                self._companion = self._start()
            except LeaseHeld:
                continue
            except TmsError as error:
                logger.error("the %s of this server does not start: %s", self._name, error)
            else:
                logger.info("the %s of this server has started", self._name)
            return


def started(name: str, start: Callable[[], Companion]) -> Companion:
    """Return a companion that runs, or does so as soon as no other server's does.

    Raises:
        TmsError: it cannot run, and waiting does not help.
    """
    try:
        return start()
    except LeaseHeld as error:
        logger.info("the %s of this server waits: %s", name, error.message)
        return Standby(name, start)
