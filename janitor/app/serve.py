"""The daemon's process: everything that has to be opened, in order, and closed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Event
from typing import NamedTuple

from janitor.canary import Canary
from janitor.cli.context import Session
from janitor.cli.signals import ending
from janitor.control.audience import Audience
from janitor.control.server import ControlServer
from janitor.count import Census
from janitor.daemon import Daemon, Job, Watched
from janitor.feedback import Feedback
from janitor.http.app import make_app
from janitor.http.server import HttpServer
from janitor.inquiry import Inquiry
from janitor.lag import LagCount
from janitor.metrics import Metrics
from janitor.observe import Observer
from janitor.refresh import Refreshed
from janitor.schedule import Schedule, cron, every
from janitor.settings import config_digest
from janitor.state.base import State
from tms_core.consumers import Positions
from tms_core.errors import LeaseHeld, StoreError
from tms_core.side import Expiries, SideTable
from tms_core.tables.base import Store
from tms_core.tables.read_only import read_only

#: How often the background count goes on where it was, and the canary is looked after, in seconds.
COUNT_SECONDS, CANARY_SECONDS = 60, 10

#: Something that lives as long as the daemon, beside it; given the store, the daemon and the status page's address.
Companion = Callable[[Store, Daemon, str], AbstractContextManager[object]]

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A daemon that may begin, and what it works with.

    Attributes:
        url: the status page's address.
    """

    daemon: Daemon
    store: Store
    url: str


def serve(
    current: Session,
    *,
    adopt: bool = False,
    patterns: tuple[str, ...] = (),
    standby: bool = False,
    companion: Companion | None = None,
) -> int:
    """Run the daemon until a signal ends it; returns an exit code.

    Args:
        adopt: accept a store met for the first time.
        patterns: topics to sweep; none for all.
        standby: wait while another janitor has the lease of a store that several can have open.
        companion: started when all is up, ended before anything is closed.

    Raises:
        StoreBusy: another process has the store or its lease.
        TmsError: something could not be opened.
    """
    stop = Event()
    with ExitStack() as stack:
        try:
            with ending(stop.set):
                begun = opened(current, adopt=adopt, patterns=patterns, stop=stop, standby=standby)
                daemon, store, url = stack.enter_context(begun)
        except LeaseHeld:
            if not stop.is_set():
                raise
            logger.info("the janitor has stopped on standby")
            return 0
        stack.enter_context(ending(daemon.halt, hangup=daemon.sweep_now))
        stack.enter_context(companion(store, daemon, url) if companion else nullcontext())
        daemon.run()
    logger.info("the janitor has stopped; the store is closed")
    return 0


class _Held(NamedTuple):
    """What the daemon is at work on; ``side`` has messages with a ttl of their own, and consumers."""

    store: Store
    state: State
    side: SideTable | None


@contextmanager
def opened(
    current: Session,
    *,
    adopt: bool = False,
    patterns: tuple[str, ...] = (),
    stop: Event | None = None,
    standby: bool = False,
) -> Iterator[Opened]:
    """Everything a daemon needs, open while the block runs, its doors too; it works when told to.

    Args:
        stop: ends the daemon, also before it has begun.
        standby: as of :func:`serve`.

    Raises:
        StoreBusy: another process has the store or its lease.
        TmsError: something could not be opened.
    """
    stop = stop or Event()
    with ExitStack() as stack:
        feedback = stack.enter_context(current.feedback())
        store = stack.enter_context(current.held_store())
        state = stack.enter_context(current.place.memory())
        held = _Held(store, state, stack.enter_context(current.side()))
        watched = Watched(current.clock)
        audience = Audience(watched)
        daemon = _assemble(current, held, stack, stop, standby, adopt, patterns, watched, audience, feedback)
        yield Opened(daemon, store, _open_doors(current, daemon, audience, held, stack))


def _assemble(
    current: Session,
    held: _Held,
    stack: ExitStack,
    stop: Event,
    standby: bool,
    adopt: bool,
    patterns: tuple[str, ...],
    watched: Watched,
    audience: Audience,
    feedback: Feedback | None,
) -> Daemon:
    settings, clock = current.settings, current.clock
    store, state, side = held
    wanted = settings.janitor
    lease = stack.enter_context(current.lease(state, store, stop if standby else None))
    read = current.source()
    source = Refreshed(read) if read is not None else None
    engine = current.engine(
        # What only plans gets no object that could write (rule S5).
        store if wanted.apply else read_only(store),
        state,
        source=source,
        observer=audience,
        lease=lease,
        halted=stop.is_set,
        archive=current.archive(),
        feedback=feedback,
        **current.beside(store, side),
    )
    for run_id in engine.recover():
        logger.warning(
            "run %s was never finished; it is closed as lost, its ledger says what it may have taken", run_id
        )

    def failed(name: str, error: BaseException) -> None:
        daemon.failed(name, error)

    schedule = Schedule(clock, failed)
    trigger = cron(wanted.cron) if wanted.cron else every(wanted.every_seconds or 60)
    census = Census(read_only(store), state, clock, rows_per_second=wanted.stats_rows_per_second, halted=stop.is_set)
    jobs = [Job("count", COUNT_SECONDS, census.step)]
    if side is not None:
        lags = LagCount(
            read_only(store),
            Positions(side),
            Expiries(side),
            current.floor(store, side),
            state,
            clock,
            census.pacer,
            halted=stop.is_set,
        )
        jobs.append(Job("lag", COUNT_SECONDS, lags.step))
    if wanted.apply:
        allowance_ms = wanted.clock_allowance_seconds * 1000
        canary = Canary(store, state, clock, enabled=wanted.canary.enabled, allowance_ms=allowance_ms, lease=lease)
        jobs.append(Job("canary", CANARY_SECONDS, canary.tick))
    daemon = Daemon(
        engine,
        watched,
        source,
        schedule,
        trigger,
        state,
        current.site(),
        Metrics(wanted.metrics.per_topic, wanted.metrics.top, current.registry),
        clock,
        lease=lease,
        adopt=adopt,
        patterns=patterns,
        snapshot_seconds=max(1, settings.transactions.snapshot_interval_seconds // 2),
        jobs=jobs,
        stop=stop,
    )
    return daemon


def _open_doors(current: Session, daemon: Daemon, audience: Audience, held: _Held, stack: ExitStack) -> str:
    """Let others look and ask: HTTP and the control socket; returns the status page's address."""
    wanted = current.settings.janitor.http
    http = HttpServer(make_app(daemon, wanted.host, current.arguments()), wanted.host, wanted.port)
    http.start()
    stack.callback(http.stop)
    logger.info("status page: %s/ (metrics: %s/metrics)", http.url, http.url)

    if current.place.exclusive:
        _answer(current, daemon, audience, held, stack)
    return f"{http.url}/"


def _answer(current: Session, daemon: Daemon, audience: Audience, held: _Held, stack: ExitStack) -> None:
    """Answer the commands that cannot open the store because this process has it."""
    store, state, side = held
    strangers = daemon.engine.strangers

    def reader(observer: Observer, halted: Callable[[], bool]) -> Inquiry:
        # What only looks gets no object that could write (rule S5).
        return current.inquiry(
            read_only(store),
            state,
            halted=halted,
            observer=observer,
            strangers=strangers,
            **current.beside(store, side),
        )

    control = ControlServer(
        current.state_path,
        daemon,
        reader,
        daemon,
        store=store.identity(),
        settings=config_digest(current.settings),
        audience=audience,
    )
    try:
        control.start()
        stack.callback(control.stop)
    except StoreError as error:
        # It cleans all the same; only nobody can ask it anything while it does.
        logger.warning("commands cannot reach this janitor: %s", error)
