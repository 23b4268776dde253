"""The transaction manager of several servers: it runs in the one that leads slot 0, and the others ask it.

Each server has a manager and its service. That of the leader takes over the log (:mod:`tms_core.server.ha.manager_log`)
before its term starts, as after a restart; those of the others are empty, and their services forward requests. So a
client may ask any of them, and what one was answered, the next leader knows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Self

from tms_core.clock import Clock
from tms_core.errors import FormatError, StoreError, TmsError, TransactionError
from tms_core.logs.loggers import get_logger
from tms_core.server.ha.leadership import LOOK_SECONDS, Leadership
from tms_core.server.ha.manager_log import SideStorage, Still, root_of
from tms_core.tables.side import SideTable
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.line import (
    ANSWER_YOURSELF,
    NOT_HERE,
    IdleConnections,
    ServiceUnavailable,
    SocketConnection,
    as_text,
)

#: How long one look waits for the manager to take over, in seconds; leases have to be renewed meanwhile.
_WAIT_SECONDS = 0.5

logger = get_logger(__name__)
#: How long a call may take, in seconds, and connecting.
_SECONDS, _CONNECT_SECONDS = 30.0, 5.0
#: What an answer is shorter than that is none but a refusal, in bytes.
_SHORT_BYTES = 1024


class SharedManager:
    """One server's side of it; threads may share it.

    Args:
        manager: the manager of this server; closed with this.
        storage: the storage of the manager.
        leadership: of slot 0.
        side: where the log is; stays the caller's.
        opens: makes a connection to the service of another server, from address and timeout.

    Attributes:
        manager: answers while this server leads, and knows nothing else.
    """

    def __init__(
        self,
        manager: TransactionManager,
        storage: SideStorage,
        leadership: Leadership,
        side: SideTable,
        clock: Clock,
        *,
        opens: Callable[[str, float], SocketConnection] = SocketConnection,
        on_takeover: Callable[[TransactionManager], object] = lambda _: None,
    ) -> None:
        self.manager = manager
        self._storage = storage
        self._leadership = leadership
        self._side = side
        self._opens = opens
        self._on_takeover = on_takeover
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
        """Return whether the manager has taken over, so that a term may start; False: ask again in a moment."""
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
        """Have the manager take over; returns a check whether that still counts."""
        still = self._leadership.tenure()
        self.manager.begin()
        self._on_takeover(self.manager)
        with self._lock:
            self._replace(None)
        return still

    def _found(self) -> OtherService:
        """Return the leader's service, which is looked for again from time to time."""
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
                other = OtherService(root.address, root.log, self._opens)
                self._replace(other)
            return other

    def _replace(self, other: OtherService | None) -> None:
        """Another server leads, or this one: the former may be stopped, and is not waited for any more."""
        former, self._other = self._other, other
        if former is not None:
            former.break_off()

    def _forget(self) -> None:
        with self._lock:
            other, self._other = self._other, None
        if other is not None:
            other.close()


class OtherService:
    """Passes calls on; threads may share it, and each call has a connection of its own.

    Args:
        address: ``HOST:PORT`` of the service.
        log: what tells its manager's log from that of any other store.
        opens: see :class:`SharedManager`.
    """

    def __init__(self, address: str, log: str, opens: Callable[[str, float], SocketConnection]) -> None:
        self.address = address
        self._log = log
        self._opens = opens
        self._lines = IdleConnections(self._opened)
        self._asked: set[SocketConnection] = set()
        self._is_over = False

    def ask(self, frame: bytes) -> bytes:
        """Pass a call on; returns the answer.

        Raises:
            OSError, EOFError, FormatError: it is not known whether it was done.
            ServiceUnavailable: nothing was done.
        """
        with self._lines.one() as line:
            self._asked.add(line)
            try:
                if self._is_over:
                    raise _unavailable(self.address, "another server manages them now")
                answer = line.pass_on(frame, _SECONDS)
            finally:
                self._asked.discard(line)
            if _is_refused(answer):
                raise _unavailable(self.address, "it does not manage them any more")
        return answer

    def close(self) -> None:
        """Close open transactions; closing twice is no error."""
        self._lines.close()

    def break_off(self) -> None:
        """Close all connections, and interrupt running calls."""
        self._is_over = True
        self.close()
        for line in list(self._asked):
            line.break_off()

    def _opened(self) -> SocketConnection:
        try:
            line = self._opens(self.address, _CONNECT_SECONDS)
        except OSError as error:
            raise _unavailable(self.address, str(error)) from error
        try:
            line.ask(ANSWER_YOURSELF, (wire.string(1, self._log),), _CONNECT_SECONDS)
        except (OSError, EOFError, FormatError, TransactionError) as error:
            line.close()
            raise _unavailable(self.address, str(error)) from error
        return line


def _is_refused(answer: bytes) -> bool:
    """Return whether the service has not even looked at the call."""
    if len(answer) > _SHORT_BYTES:
        return False
    found = wire.read_message(answer)
    return found.kind == MessageKind.EXCEPTION and as_text(found.fields, 1) == NOT_HERE


def _unavailable(address: str, reason: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The server at {address} that manages the transactions cannot be asked: {reason}.",
        "Try again in some seconds.",
    )
