"""A companion that another server's companion keeps from starting: it starts when that one is gone.

Of several servers on one store, each tries to run its janitor, and the store's own lease lets one of them (rule S12).
Which of the servers leads is another question: a janitor works beside any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from tms_core.errors import LeaseHeld, TmsError
from tms_core.logs.harmless import get_logger
from tms_core.server.companions import Companion

#: How often it is tried, in seconds.
RETRY_SECONDS = 10.0

logger = get_logger(__name__)


class Standby:
    """Tries to start a companion until it gets the lease it needs.

    Args:
        name: its name, for the log.
        start: starts it.
        retry_seconds: how often that is tried.
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
        """The companion's, once it runs."""
        return None if self._companion is None else self._companion.hold_seconds

    def stop(self) -> None:
        """End the companion, or the waiting for it."""
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
    """A companion that runs, or does so as soon as no other server's does.

    Raises:
        TmsError: it cannot run, and waiting does not help.
    """
    try:
        return start()
    except LeaseHeld as error:
        logger.info("the %s of this server waits: %s", name, error.message)
        return Standby(name, start)
