"""The transaction manager of several servers: it runs in the one that leads slot 0, and the others ask it.

Each server has a manager and its service. That of the leader takes over the log (:mod:`tms_core.server.ha.manager_log`)
before its term begins, as after a restart; those of the others know nothing, and their services pass on what they are
asked. So a client may ask any of them, and what one was answered, the next leader knows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Self

from tms_core.clock import Clock
from tms_core.errors import FormatError, StoreError, TmsError
from tms_core.logs.harmless import get_logger
from tms_core.server.ha.leadership import LOOK_SECONDS, Leadership
from tms_core.server.ha.manager_log import SideStorage, Still, root_of
from tms_core.tables.side import SideTable
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import Recovered
from tms_core.transaction.rpc.line import ServiceUnavailable
from tms_core.transaction.rpc.passing import OtherService

#: How long one look waits for the manager to take over, in seconds; leases have to be renewed meanwhile.
_WAIT_SECONDS = 0.5

logger = get_logger(__name__)


class SharedManager:
    """One server's side of it; threads may share it.

    Args:
        side: where the log is; stays the caller's.
        leadership: of slot 0.
        clock: the clocks of this machine.
        clock_allowance_seconds: see :class:`TransactionManager`.
        token_file: of the token that the services demand; None: they demand none.
        former: reads what there was before servers shared the manager.
        begun: called when the manager has taken over.

    Attributes:
        manager: answers while this server leads, and knows nothing else.
    """

    def __init__(
        self,
        side: SideTable,
        leadership: Leadership,
        clock: Clock,
        *,
        clock_allowance_seconds: int,
        token_file: Path | None = None,
        former: Callable[[], Recovered] | None = None,
        begun: Callable[[TransactionManager], object] = lambda _: None,
    ) -> None:
        self._side = side
        self._leadership = leadership
        self._token_file = token_file
        self._begun = begun
        self._storage = SideStorage(side, leadership.tenure, former)
        self.manager = TransactionManager(self._storage, clock, clock_allowance_seconds=clock_allowance_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manager")
        self._beginning: Future[Still] | None = None
        self._closed = False
        self._clock = clock
        self._other: OtherService | None = None
        self._looked_ms = 0
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, address: str) -> None:
        """The other servers reach this one's service there."""
        self._storage.address = address

    def ready(self) -> bool:
        """Whether the manager has taken over, so that a term may begin; False: ask again in a moment."""
        if self._closed:
            return False
        if self._beginning is None:
            self._beginning = self._thread.submit(self._begin)
        wait([self._beginning], _WAIT_SECONDS)
        if not self._beginning.done():
            return False
        beginning, self._beginning = self._beginning, None
        try:
            still = beginning.result()
        except (TmsError, OSError) as error:
            logger.error("the transaction manager of this server does not begin: %s", error)
            return False
        # Or it is from before another server led, and knows nothing of what was decided there.
        return still()

    @property
    def log_name(self) -> str:
        """See :class:`~tms_core.transaction.rpc.service.ManagerOfSeveral`."""
        return self._storage.name if self._leadership.leads else ""

    def pass_on(self, frame: bytes) -> bytes:
        """Have the leader's manager answer; see :class:`~tms_core.transaction.rpc.service.ManagerOfSeveral`."""
        other = self._found()
        try:
            return other.ask(frame)
        except ServiceUnavailable:
            # Not where a line broke: a client that sends what is no call would take away the lines of all others.
            self._forget()
            raise

    def close(self) -> None:
        """Keep a last snapshot if this server leads; closing twice is no error."""
        self._closed = True
        self._thread.shutdown()
        self._forget()
        try:
            self.manager.close()
        except (TmsError, OSError) as error:
            logger.warning("the transaction manager has left no snapshot, but its log: %s", error)

    def _begin(self) -> Still:
        """Have the manager take over; returns what says whether that still counts."""
        still = self._leadership.tenure()
        self.manager.begin()
        self._begun(self.manager)
        return still

    def _found(self) -> OtherService:
        """The leader's service, which is looked for again from time to time."""
        with self._lock:
            now_ms = self._clock.running_ms()
            if self._other is not None and now_ms - self._looked_ms < LOOK_SECONDS * 1000:
                return self._other
            try:
                root = root_of(self._side)
            except (StoreError, FormatError) as error:
                raise ServiceUnavailable(error.message, error.hint) from error
            if root is None or root.address == self._storage.address:
                raise ServiceUnavailable("No server manages the transactions just now.", "Try again in some seconds.")
            self._looked_ms = now_ms
            other = self._other
            if other is None or other.address != root.address:
                if other is not None:
                    other.close()
                self._other = other = OtherService(root.address, root.log, self._token_file)
            return other

    def _forget(self) -> None:
        with self._lock:
            other, self._other = self._other, None
        if other is not None:
            other.close()
