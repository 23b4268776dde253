"""The transaction manager that several servers share: it runs in the leader of slot 0.

Each server has a manager and a transaction service. Before a term starts, the leader's manager takes over the log
(:mod:`tms_core.server.ha.manager_log`), as after a restart, so it knows all earlier responses. The managers of other
servers are empty, and their services forward calls to the leader. Therefore a client may connect to any server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Self

from tms_core.clock import Clock
from tms_core.errors import FormatError, StoreError, TmsError, TransactionError
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.server.ha.leadership import CHECK_SECONDS, Leadership
from tms_core.server.ha.manager_log import LeaseCheck, SideStorage, read_root
from tms_core.tables.side import SideTable
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.connection import (
    EXECUTE_HERE,
    NOT_MANAGED_HERE,
    IdleConnections,
    ServiceUnavailable,
    SocketConnection,
    TokenUnreadable,
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
        connect: opens a connection to the service of another server, from address and timeout (seconds).
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
        connect: Callable[[str, float], SocketConnection] = SocketConnection,
        on_takeover: Callable[[TransactionManager], object] = lambda _: None,
    ) -> None:
        self.manager = manager
        self._storage = storage
        self._leadership = leadership
        self._side = side
        self._connect = connect
        self._on_takeover = on_takeover
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manager")
        self._takeover: Future[LeaseCheck] | None = None
        self._closed = False
        self._clock = clock
        self._remote: RemoteService | None = None
        self._checked_ms = 0
        self._seldom = RateLimitedLogger(logger)
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_address(self, address: str) -> None:
        """Set the address of this server's service for other servers."""
        self._storage.address = address

    def is_ready(self) -> bool:
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
        """See :class:`~tms_core.transaction.rpc.service.CallRouter`."""
        return self._storage.name if self._leadership.leads else ""

    def forward_call(self, frame: bytes) -> bytes:
        """Forward a call to the leader's manager; see :class:`~tms_core.transaction.rpc.service.CallRouter`."""
        remote = self._find_service()
        try:
            return remote.forward_call(frame)
        except TokenUnreadable as error:
            # The error may have a path of this machine, which is only for the log.
            self._seldom.log(logging.ERROR, "calls cannot be forwarded to the leader: %s", error)
            raise _unavailable(remote.address, "its token or the token of this server cannot be read") from error
        except ServiceUnavailable:
            # Not for a broken connection, because a client with invalid calls must not close the connections of others.
            self._close_remote()
            raise

    def close(self) -> None:
        """Save a final snapshot if this server leads; a second call does nothing."""
        self._closed = True
        self._thread.shutdown()
        self._close_remote()
        try:
            self.manager.close()
        except (TmsError, OSError) as error:
            logger.warning("the transaction manager could not save a final snapshot; its log is complete: %s", error)

    def _take_over(self) -> LeaseCheck:
        """Take over the log; return a function that returns whether the takeover is still valid."""
        has_lease = self._leadership.lease_check()
        self.manager.resume()
        self._on_takeover(self.manager)
        with self._lock:
            self._replace_remote(None)
        return has_lease

    def _find_service(self) -> RemoteService:
        """Return the service of the leader, cached for ``CHECK_SECONDS``."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._remote is not None and now_ms - self._checked_ms < CHECK_SECONDS * 1000:
                return self._remote
            try:
                root = read_root(self._side)
            except (StoreError, FormatError) as error:
                raise ServiceUnavailable(error.message, error.hint) from error
            if root is None or root.address == self._storage.address:
                raise ServiceUnavailable(
                    "No server is managing transactions at the moment.", "Try again in a few seconds."
                )
            self._checked_ms = now_ms
            remote = self._remote
            if remote is None or remote.address != root.address:
                remote = RemoteService(root.address, root.log, self._connect)
                self._replace_remote(remote)
            return remote

    def _replace_remote(self, remote: RemoteService | None) -> None:
        """Replace the leader's service, and interrupt calls to the former leader, which may be suspended."""
        previous, self._remote = self._remote, remote
        if previous is not None:
            previous.interrupt()

    def _close_remote(self) -> None:
        with self._lock:
            remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()


class RemoteService:
    """A client that forwards calls to another server; threads may share it, and each call uses a separate connection.

    Args:
        address: ``HOST:PORT`` of the service.
        log: the identity of its manager's log.
        connect: see :class:`SharedManager`.
    """

    def __init__(self, address: str, log: str, connect: Callable[[str, float], SocketConnection]) -> None:
        self.address = address
        self._log = log
        self._connect = connect
        self._connections = IdleConnections(self._open_connection)
        self._busy_connections: set[SocketConnection] = set()
        self._is_replaced = False

    def forward_call(self, frame: bytes) -> bytes:
        """Forward a call, and return the response.

        Raises:
            OSError, EOFError, FormatError: the outcome is unknown.
            ServiceUnavailable: nothing was done.
        """
        with self._connections.borrow() as connection:
            self._busy_connections.add(connection)
            try:
                if self._is_replaced:
                    raise _unavailable(self.address, "another server has taken over")
                response = connection.forward_call(frame, _SECONDS)
            finally:
                self._busy_connections.discard(connection)
            if _is_rejected(response):
                raise _unavailable(self.address, "it is no longer the leader")
        return response

    def close(self) -> None:
        """Close idle connections; a second call does nothing."""
        self._connections.close()

    def interrupt(self) -> None:
        """Close all connections, and interrupt running calls."""
        self._is_replaced = True
        self.close()
        for connection in list(self._busy_connections):
            connection.interrupt()

    def _open_connection(self) -> SocketConnection:
        try:
            connection = self._connect(self.address, _CONNECT_SECONDS)
        except OSError as error:
            raise _unavailable(self.address, str(error)) from error
        try:
            connection.call(EXECUTE_HERE, (wire.string(1, self._log),), _CONNECT_SECONDS)
        except (OSError, EOFError, FormatError, TransactionError) as error:
            connection.close()
            raise _unavailable(self.address, str(error)) from error
        return connection


def _is_rejected(response: bytes) -> bool:
    """Return whether the service rejected the call because its manager does not lead."""
    if len(response) > _REJECTION_BYTES:
        return False
    found = wire.read_message(response)
    return found.kind == MessageKind.EXCEPTION and as_text(found.fields, 1) == NOT_MANAGED_HERE


def _unavailable(address: str, reason: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The server at {address} that manages the transactions is not available: {reason}.",
        "Try again in a few seconds.",
    )
