"""Metrics and status page for sweeps by CronJobs, without a daemon.

Prometheus cannot scrape a run of a few seconds, but the state has its results. This process reads the state every few
seconds, never the store, and serves the same data as a daemon. It opens the state each time, because runs may replace
it, and a missing state is not an error. It never creates a state: an empty state at a wrong path would look like a
store that was never swept.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import Event

from janitor.app.place import Place
from janitor.app.session import Session
from janitor.http.app import make_app
from janitor.http.guard import guarded
from janitor.http.server import HttpServer
from janitor.metrics import Metrics
from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from janitor.status.collect import Deployment, collect
from janitor.status.status import Status
from tms_core.cli.entry import handle_signals
from tms_core.clock import Clock
from tms_core.errors import TmsError

#: The interval at which the state is read, in seconds; much shorter than the interval of scrapes.
REFRESH_SECONDS = 5
#: The time without a refresh after which the process counts as hanging, in milliseconds.
LATE_MS = 60_000

logger = logging.getLogger(__name__)


class Exporter:
    """The views of the HTTP server (``janitor.http.app.StatusViews``) from the state alone.

    Args:
        place: the place of the state.
        deployment: the description of this janitor in the status.
        metrics: the metrics, which receive each new status.
    """

    def __init__(self, place: Place, deployment: Deployment, metrics: Metrics, clock: Clock) -> None:
        self._place = place
        self._deployment = deployment
        self._metrics = metrics
        self._clock = clock
        self._problem = "the state has not been read yet"
        self._refreshed_ms = clock.monotonic_ms()
        with SqliteState.in_memory() as nothing:
            self._status = collect(nothing, deployment, clock)

    def refresh(self) -> None:
        """Read the state; after an error, keep the last data and log the reason once."""
        problem = self._read()
        if problem and problem != self._problem:
            logger.warning("%s", problem)
        elif self._problem and not problem:
            logger.info("the state is readable: %s", self._place.state_name)
        self._problem = problem
        self._refreshed_ms = self._clock.monotonic_ms()

    def keep_fresh(self, stop: Event) -> None:
        """Read the state periodically until ``stop`` is set."""
        while not stop.wait(REFRESH_SECONDS):
            self.refresh()

    def _read(self) -> str:
        """Read the status; return the reason if that fails, else an empty string."""
        try:
            if not self._place.has_state():
                return f"there is no state in {self._place.state_name} yet; the first janitor run creates it"
            with self._place.state() as state:
                status = collect(state, self._deployment, self._clock)
        except TmsError as error:
            return str(error)
        self._metrics.update(status)
        self._status = status
        return ""

    def status(self) -> Status:
        """Return the status of the last refresh; before the first refresh, the status of a new janitor."""
        return self._status

    def past(self) -> AbstractContextManager[State | None]:
        """Yield the open state; None if it does not exist yet.

        Raises:
            StoreError: the state cannot be opened.
        """
        return self._place.state() if self._place.has_state() else nullcontext()

    def metrics(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the metrics as text, and their content type."""
        return self._metrics.render(accept)

    def alive(self) -> str:
        """Return the reason to restart this process; empty if it is healthy."""
        late_ms = self._clock.monotonic_ms() - self._refreshed_ms
        return f"the state was last read {late_ms // 1000} s ago" if late_ms > LATE_MS else ""

    def ready(self) -> str:
        """Return the reason for missing or old data; empty if the data is current."""
        return self._problem


def export(current: Session) -> None:
    """Serve the data of the state until a signal stops the process."""
    settings = current.settings.janitor
    typed = current.common.arguments(anywhere=True)
    deployment = replace(current.deployment(), schedule=settings.started_by or "external schedule", arguments=typed)
    metrics = Metrics(settings.metrics.per_topic, settings.metrics.top)
    exporter = Exporter(current.place, deployment, metrics, current.clock)
    exporter.refresh()
    app = guarded(make_app(exporter, settings.http.host, typed), settings.http.token_file)
    stop = Event()
    with handle_signals(stop.set, text=b""), HttpServer(app, settings.http.host, settings.http.port) as http:
        logger.info("metrics: %s/metrics (status page: %s/)", http.url, http.url)
        exporter.keep_fresh(stop)
