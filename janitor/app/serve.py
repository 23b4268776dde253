"""The start of the daemon: it opens the daemon's resources in order, and closes them at the stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import NamedTuple

from starlette.types import ASGIApp

from janitor.app.backup import back_up, folders_of
from janitor.app.session import Session, handle_signals
from janitor.control.api import ControlBackend, Observers, process_identity
from janitor.control.server import ControlServer
from janitor.daemon.daemon import Daemon, DaemonPlan, Job
from janitor.daemon.schedule import Schedule
from janitor.daemon.snapshot_refresh import CachedSource
from janitor.daemon.trigger import cron, interval_trigger
from janitor.daemon.watched import RunWatcher
from janitor.http.app import make_app, make_waiting_app
from janitor.http.guard import guarded
from janitor.http.server import HttpServer, check_port
from janitor.metrics import Metrics
from janitor.report import Observer
from janitor.run.prepare import Feedback
from janitor.run.queries import Queries
from janitor.state.base import State
from janitor.stats.consumer_lag import UNINFORMED, LagCount, note_late
from janitor.stats.topic_sizes import TopicSizeCounter
from tms_core.consumers.lag import LagTables
from tms_core.errors import (
    LeaseHeld,
    NoSnapshot,
    SnapshotError,
    StateError,
    StateUnavailable,
    StoreError,
    StoreUnavailable,
)
from tms_core.tables.base import Store
from tms_core.tables.read_only import read_only
from tms_core.tables.side import Expiries, SideTable
from tms_core.transaction.model import Transaction

#: The interval of attempts of a daemon whose store does not respond, in seconds.
RETRY_SECONDS = 10.0
#: The interval of background counts, in seconds; each count reads the metadata.
COUNT_SECONDS = 60
#: The interval of requests for late transactions to the transaction manager, in seconds.
LATE_SECONDS = 10

#: The response until the janitor has started.
WAITING = "the janitor waits for its store or for the lease of another janitor; its log has the reason"

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A daemon that is ready to start, and the address of its status page."""

    daemon: Daemon
    url: str


def serve(current: Session, *, adopt: bool = False, patterns: tuple[str, ...] = (), standby: bool = False) -> int:
    """Run the daemon until a signal stops it; return an exit code.

    It waits for a store that does not respond, such as HBase during its start. If several processes can open the store,
    it responds to probes during the wait: the process is alive, but not ready.

    Args:
        adopt: whether to adopt an unknown store.
        patterns: topics to sweep; empty: all.
        standby: whether to wait while another janitor has the lease of a store that several processes can open.

    Raises:
        StoreBusy: another process has the store or its lease.
        TmsError: another resource could not be opened.
    """
    stop = Event()
    with ExitStack() as stack:
        waiting = stack.enter_context(ExitStack())
        if not current.place.exclusive:
            waiting.enter_context(_http(current, make_waiting_app(WAITING)))
        try:
            with handle_signals(stop.set):
                daemon, _ = _open_when_reachable(
                    lambda: stack.enter_context(
                        open_daemon(
                            current, adopt=adopt, patterns=patterns, stop=stop, standby=standby, waiting=waiting
                        )
                    ),
                    stop,
                )
        except (LeaseHeld, StoreUnavailable, StateError):
            if not stop.is_set():
                raise
            logger.info("the janitor stopped before its first sweep")
            return 0
        stack.enter_context(handle_signals(daemon.request_stop, hangup=daemon.sweep_now))
        daemon.run()
    logger.info("the janitor has stopped; the store is closed")
    return 0


def _open_when_reachable(begin: Callable[[], Opened], stop: Event) -> Opened:
    """Open the daemon as soon as the store responds.

    Raises:
        StoreUnavailable, StateUnavailable: the store does not respond, and ``stop`` was set.
    """
    is_logged = False
    while True:
        try:
            return begin()
        except (StoreUnavailable, StateUnavailable) as error:
            if not is_logged:
                logger.warning("%s The janitor retries every %d s.", error.message, RETRY_SECONDS)
            is_logged = True
            if stop.wait(RETRY_SECONDS):
                raise


def _http(current: Session, app: ASGIApp) -> HttpServer:
    settings = current.settings.janitor.http
    return HttpServer(guarded(app, settings.token_file), settings.host, settings.port)


class _OpenStore(NamedTuple):
    """The store, state and side table of the daemon."""

    store: Store
    state: State
    side: SideTable | None


@contextmanager
def open_daemon(
    current: Session,
    *,
    adopt: bool = False,
    patterns: tuple[str, ...] = (),
    stop: Event | None = None,
    standby: bool = False,
    waiting: ExitStack | None = None,
) -> Iterator[Opened]:
    """Yield a daemon with its servers, before its start.

    Args:
        stop: the event that stops the daemon, even before its start.
        standby: as for :func:`serve`.
        waiting: the server of probes, closed before the server of the status page opens the same address.

    Raises:
        StoreBusy: another process has the store or its lease.
        TmsError: a resource could not be opened.
    """
    stop = stop or Event()
    with ExitStack() as stack:
        feedback = stack.enter_context(current.feedback())
        store = stack.enter_context(current.hold_store())
        if current.place.exclusive:
            # Before a state is created. Without an exclusive place, the waiting server has the port already.
            check_port(current.settings.janitor.http.host, current.settings.janitor.http.port)
        state = stack.enter_context(current.place.state())
        open_store = _OpenStore(store, state, stack.enter_context(current.side()))
        watched = RunWatcher(current.clock)
        observers = Observers(watched)
        daemon = _assemble(current, open_store, stack, stop, standby, adopt, patterns, watched, observers, feedback)
        if waiting is not None:
            waiting.close()
        yield Opened(daemon, _open_servers(current, daemon, observers, open_store, stack))


def _assemble(
    current: Session,
    open_store: _OpenStore,
    stack: ExitStack,
    stop: Event,
    standby: bool,
    adopt: bool,
    patterns: tuple[str, ...],
    watched: RunWatcher,
    observers: Observers,
    feedback: Feedback | None,
) -> Daemon:
    settings, clock = current.settings, current.clock
    store, state, side = open_store
    janitor = settings.janitor
    lease = stack.enter_context(current.lease(state, store, stop if standby else None))
    read = current.source()
    source = CachedSource(read) if read is not None else None
    engine = current.engine(
        # S5: a daemon that only makes plans gets a read-only store.
        store if janitor.apply else read_only(store),
        state,
        source=source,
        observer=observers,
        lease=lease,
        is_stopping=stop.is_set,
        archive=current.archive(),
        feedback=feedback,
        side=side,
    )
    for run_id in engine.recover():
        logger.warning(
            "run %s did not finish; it is recorded as lost, and the ledger has the rows that it may have deleted",
            run_id,
        )

    def failed(name: str, error: BaseException) -> None:
        daemon.failed(name, error)

    schedule = Schedule(clock, failed)
    trigger = cron(janitor.cron) if janitor.cron else interval_trigger(janitor.every_seconds or 60)
    sizes = TopicSizeCounter(read_only(store), state, clock, is_stopping=stop.is_set)
    jobs = [Job("count", COUNT_SECONDS, sizes.step, after_sweeps=True)]
    transactions = stack.enter_context(current.transactions())
    if transactions is not None:
        jobs.append(Job("late", LATE_SECONDS, partial(note_late, state, transactions, clock)))
    if side is not None:
        lags = LagCount(
            LagTables(read_only(store), Expiries(side), engine.deps.floor),
            side,
            state,
            clock,
            sizes.pacer,
            reader=partial(_reader, source),
        )
        jobs.append(Job("lag", COUNT_SECONDS, lags.step, after_sweeps=True))
    metrics = Metrics(janitor.metrics.per_topic, janitor.metrics.top, current.registry)
    stack.callback(metrics.close)
    daemon = Daemon(
        engine,
        watched,
        source,
        schedule,
        replace(current.deployment(), arguments=current.common.arguments(anywhere=True)),
        metrics,
        DaemonPlan(
            trigger,
            adopt=adopt,
            patterns=patterns,
            snapshot_seconds=max(1, settings.transactions.snapshot_interval_seconds // 2),
            jobs=jobs,
            refusal=current.refusal,
            topic_changes=current.topic_changes,
            stop=stop,
        ),
    )
    return daemon


def _reader(source: CachedSource | None) -> Transaction:
    """Return the view of transactions in the last snapshot."""
    if source is not None:
        # The job that reads snapshots reports a missing snapshot.
        with suppress(NoSnapshot, SnapshotError, OSError):
            return source.latest().snapshot.dummy_transaction()
    return UNINFORMED


def _open_servers(
    current: Session, daemon: Daemon, observers: Observers, open_store: _OpenStore, stack: ExitStack
) -> str:
    """Open the HTTP server and the control socket; return the address of the status page."""
    page = make_app(daemon, current.settings.janitor.http.host, current.common.arguments(anywhere=True))
    http = stack.enter_context(_http(current, page))
    logger.info("status page: %s/ (metrics: %s/metrics)", http.url, http.url)

    if current.place.exclusive:
        _open_control_socket(current, daemon, observers, open_store, page, stack)
    return f"{http.url}/"


def _open_control_socket(
    current: Session, daemon: Daemon, observers: Observers, open_store: _OpenStore, page: ASGIApp, stack: ExitStack
) -> None:
    """Serve the commands of other processes, which cannot open the store that this process holds."""
    store, state, side = open_store
    unknown_row_log = daemon.engine.deps.unknown_row_log

    def reader(observer: Observer, is_stopping: Callable[[], bool]) -> Queries:
        # S5: a query gets a read-only store.
        deps = current.deps(
            read_only(store),
            state,
            is_stopping=is_stopping,
            observer=observer,
            unknown_row_log=unknown_row_log,
            side=side,
        )
        return Queries(deps)

    identity = process_identity(store.identity(), current.digest)
    backup = partial(back_up, folders_of(current.settings), store=store, side=side)
    backup_or_none = backup if current.settings.storage.kind == "leveldb" else None
    backend = ControlBackend(daemon, reader, daemon, identity, observers, page, backup_or_none)
    control = ControlServer(current.state_path, backend)
    try:
        control.start()
        stack.callback(control.stop)
    except StoreError as error:
        # The daemon works without the socket; only commands cannot reach it.
        logger.warning("commands cannot reach this janitor: %s", error)
