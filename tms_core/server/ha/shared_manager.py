"""The transaction manager that several servers share: it runs in the leader of slot 0.

Each server has a manager and a transaction service. Before a term starts, the leader's manager takes over the log
(:mod:`tms_core.server.ha.manager_log`), as after a restart, so it knows all earlier responses. The managers of other
servers are empty, and their services forward calls to the leader. Therefore a client may connect to any server.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Self

from tms_core.clock import Clock
from tms_core.errors import FormatError, StoreError, TmsError, TransactionError
from tms_core.logs.loggers import get_logger
from tms_core.server.ha.leadership import CHECK_SECONDS, Leadership
from tms_core.server.ha.manager_log import LeaseCheck, SideStorage, read_root
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

#: The maximum wait for the takeover of the manager in seconds; short, because the same thread renews the leases.
_WAIT_SECONDS = 0.5

logger = get_logger(__name__)
#: The timeouts of a call and of a connection, in seconds.
_SECONDS, _CONNECT_SECONDS = 30.0, 5.0
#: The maximum size of a rejection in bytes; longer responses are not parsed.
_REJECTION_BYTES = 1024


class SharedManager:
    """The manager of this server, and the connection to the leader's manager; threads may share it.

    Args:
        manager: the manager of this server; :meth:`close` closes it.
        storage: the storage of the manager.
        leadership: the leadership of slot 0.
        side: the table of the log; the caller closes it.
        opens: opens a connection to the service of another server, from address and timeout (seconds).
        on_takeover: called with the manager after a takeover.

    Attributes:
        manager: the manager of this server, which serves calls only while this server leads.
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
        self._takeover: Future[LeaseCheck] | None = None
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
        """Set the address of this server's service for other servers."""
        self._storage.address = address

    def ready(self) -> bool:
        """Return whether the manager has taken over, so that a term may start; False: call again later."""
        if self._closed:
            return False
        if self._takeover is None:
            self._takeover = self._thread.submit(self._take_over)
        wait([self._takeover], _WAIT_SECONDS)
        if not self._takeover.done():
            return False
        takeover, self._takeover = self._takeover, None
        try:
            has_lease = takeover.result()
        except (TmsError, OSError) as error:
            logger.error("the transaction manager of this server does not start: %s", error)
            return False
        # If another server has led since the start of the takeover, the manager's state lacks its decisions.
        return has_lease()

    @property
    def log_name(self) -> str:
        """See :class:`~tms_core.transaction.rpc.service.ManagerOfSeveral`."""
        return self._storage.name if self._leadership.leads else ""

    def forward_call(self, frame: bytes) -> bytes:
        """Forward a call to the leader's manager; see :class:`~tms_core.transaction.rpc.service.ManagerOfSeveral`."""
        other = self._find_service()
        try:
            return other.ask(frame)
        except ServiceUnavailable:
            # Not for a broken connection, because a client with invalid calls must not close the connections of others.
            self._forget()
            raise

    def close(self) -> None:
        """Save a final snapshot if this server leads; a second call does nothing."""
        self._closed = True
        self._thread.shutdown()
        self._forget()
        try:
            self.manager.close()
        except (TmsError, OSError) as error:
            logger.warning("the transaction manager could not save a final snapshot; its log is complete: %s", error)

    def _take_over(self) -> LeaseCheck:
        """Take over the log; return a function that returns whether the takeover is still valid."""
        has_lease = self._leadership.lease_check()
        self.manager.begin()
        self._on_takeover(self.manager)
        with self._lock:
            self._replace(None)
        return has_lease

    def _find_service(self) -> OtherService:
        """Return the service of the leader, cached for ``CHECK_SECONDS``."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._other is not None and now_ms - self._looked_ms < CHECK_SECONDS * 1000:
                return self._other
            try:
                root = read_root(self._side)
            except (StoreError, FormatError) as error:
                raise ServiceUnavailable(error.message, error.hint) from error
            if root is None or root.address == self._storage.address:
                raise ServiceUnavailable(
                    "No server is managing transactions at the moment.", "Try again in a few seconds."
                )
            self._looked_ms = now_ms
            other = self._other
            if other is None or other.address != root.address:
                other = OtherService(root.address, root.log, self._opens)
                self._replace(other)
            return other

    def _replace(self, other: OtherService | None) -> None:
        """Replace the leader's service, and interrupt calls to the former leader, which may be suspended."""
        previous, self._other = self._other, other
        if previous is not None:
            previous.break_off()

    def _forget(self) -> None:
        with self._lock:
            other, self._other = self._other, None
        if other is not None:
            other.close()


class OtherService:
    """A client that forwards calls to another server; threads may share it, and each call uses a separate connection.

    Args:
        address: ``HOST:PORT`` of the service.
        log: the identity of its manager's log.
        opens: see :class:`SharedManager`.
    """

    def __init__(self, address: str, log: str, opens: Callable[[str, float], SocketConnection]) -> None:
        self.address = address
        self._log = log
        self._opens = opens
        self._lines = IdleConnections(self._open_connection)
        self._busy_lines: set[SocketConnection] = set()
        self._is_over = False

    def ask(self, frame: bytes) -> bytes:
        """Forward a call, and return the response.

        Raises:
            OSError, EOFError, FormatError: the outcome is unknown.
            ServiceUnavailable: nothing was done.
        """
        with self._lines.borrow() as line:
            self._busy_lines.add(line)
            try:
                if self._is_over:
                    raise _unavailable(self.address, "another server has taken over")
                answer = line.forward_call(frame, _SECONDS)
            finally:
                self._busy_lines.discard(line)
            if _is_refused(answer):
                raise _unavailable(self.address, "it is no longer the leader")
        return answer

    def close(self) -> None:
        """Close idle connections; a second call does nothing."""
        self._lines.close()

    def break_off(self) -> None:
        """Close all connections, and interrupt running calls."""
        self._is_over = True
        self.close()
        for line in list(self._busy_lines):
            line.break_off()

    def _open_connection(self) -> SocketConnection:
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
    """Return whether the service rejected the call because its manager does not lead."""
    if len(answer) > _REJECTION_BYTES:
        return False
    found = wire.read_message(answer)
    return found.kind == MessageKind.EXCEPTION and as_text(found.fields, 1) == NOT_HERE


def _unavailable(address: str, reason: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The server at {address} that manages the transactions is not available: {reason}.",
        "Try again in a few seconds.",
    )
