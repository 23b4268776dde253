"""A pool of connections to one or more Thrift servers of HBase.

A thread borrows a connection for its exclusive use and returns it. An intact connection is reused, and a failed
connection is closed. The pool checks a connection before it lends it again, and closes it if it was idle for so long
that the server will soon close it. With several servers, the pool uses the server with the fewest connections; it
avoids a failed server for a time that doubles with each failure.

Only idempotent calls are repeated: reads, deletes, writes of the same cells. :meth:`HBasePool.run` repeats a call after
a broken connection, as in a restart or a failover. It does not repeat a call after a timeout, because the call may
still be running, and a repetition would probably time out, too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

from tms_core.clock import Clock, SystemClock
from tms_core.errors import StoreUnavailable
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.thrift import ConnectionLost, Service, ThriftConnection, ThriftTimeout
from tms_core.tables.hbase.wire.security import ThriftSecurity

T = TypeVar("T")

#: The idle time after which the pool closes a connection; HBase's Thrift servers close it after 60 s.
IDLE_MS = 45_000
#: Pauses before a broken call is repeated, in seconds: together longer than a Thrift server takes to restart.
PAUSES_SECONDS = (0.1, 0.5, 2.0, 4.0)
#: The duration of an outage, in timeouts, after which calls fail at once until the pool tries the next server: a sweep
#: would otherwise wait for each topic.
OUTAGE_TIMEOUTS = 2
#: The time in which a failed server is avoided, in milliseconds: it doubles with each failure, up to the maximum.
AVOID_MS, MAX_AVOID_MS = 500, 30_000


@dataclass(eq=False)
class _ThriftServer:
    address: str
    connections: int = 0
    failures: int = 0
    avoid_until_ms: int = 0


class _Idle(NamedTuple):
    server: _ThriftServer
    wire: ThriftConnection
    since_ms: int


class HBasePool:
    """A pool of connections to Thrift servers; threads may share it.

    Args:
        addresses: ``HOST:PORT`` of each server of the same HBase.
        connections: the largest number of open connections.
        security: the protection of the connections; None: no protection.

    Attributes:
        calls: the numbers of Thrift calls, by name.
        timeout_seconds: the timeout of calls on new connections, and of the wait for a connection.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        connections: int = 4,
        timeout_seconds: float = 30,
        service: Service = "Hbase",
        security: ThriftSecurity | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.connections = connections
        self.calls: Counter[str] = Counter()
        self._servers = [_ThriftServer(address) for address in addresses]
        self.timeout_seconds = timeout_seconds
        self._service = service
        self._security = security or ThriftSecurity()
        self._clock = clock or SystemClock()
        self._free = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._outage_since_ms: int | None = None
        self._failed_ms = 0
        self._closed = False

    @classmethod
    def configured(
        cls,
        settings: HBaseSettings,
        *,
        connections: int | None = None,
        timeout_seconds: float | None = None,
        service: Service = "Hbase",
        clock: Clock | None = None,
    ) -> Self:
        """Return a pool for the servers of ``storage.hbase``.

        Args:
            connections, timeout_seconds: override the settings.

        Raises:
            ConfigurationError: the protection of the connections cannot be used.
        """
        return cls(
            settings.thrift if service == "Hbase" else settings.thrift2 or (),
            connections=connections or settings.connections,
            timeout_seconds=timeout_seconds or settings.timeout_seconds,
            service=service,
            security=ThriftSecurity.configured(settings),
            clock=clock,
        )

    def call(self, name: str, *args: Any) -> Any:
        """Make a repeatable call and return its result.

        Raises:
            StoreError: as :meth:`ThriftConnection.call`.
        """
        return self.run(lambda connection: connection.call(name, *args))

    def run(self, work: Callable[[ThriftConnection], T]) -> T:
        """Make calls on one connection; repeat all calls on another connection if it breaks.

        Args:
            work: makes the calls; it may be called several times.

        Raises:
            StoreError: as :meth:`ThriftConnection.call`.
        """
        for pause_seconds in PAUSES_SECONDS:
            try:
                with self.connection() as connection:
                    return work(connection)
            except ConnectionLost:
                self._clock.sleep(pause_seconds)
        with self.connection() as connection:
            return work(connection)

    @contextmanager
    def connection(self) -> Iterator[ThriftConnection]:
        """Borrow a connection; it is closed if the block raises an error.

        Raises:
            StoreUnavailable: no connection became free in time, or no server can be reached.
        """
        self._reject_in_outage()
        if not self._free.acquire(timeout=self.timeout_seconds):
            raise StoreUnavailable(
                f"All {self.connections} connections to HBase have been in use for {self.timeout_seconds:g} s.",
                "Raise storage.hbase.connections.",
            )
        try:
            server, wire = self._reuse_connection() or self._open_connection()
            try:
                yield wire
            except BaseException as error:
                # Close it after any error: the next call could get a response that was not read yet.
                self._drop(server, wire, failed=isinstance(error, (ConnectionLost, ThriftTimeout)))
                raise
            else:
                self._give_back(server, wire)
            finally:
                with self._lock:
                    self.calls.update(wire.made)
                wire.made.clear()
        finally:
            self._free.release()

    def close(self) -> None:
        """Close idle connections, and others when they are returned; closing twice is not an error."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for entry in idle:
            self._drop(entry.server, entry.wire)

    def _reuse_connection(self) -> tuple[_ThriftServer, ThriftConnection] | None:
        """Return an intact idle connection; close failed connections on the way."""
        while True:
            now_ms = self._clock.monotonic_ms()
            with self._lock:
                if not self._idle:
                    return None
                entry = self._idle.pop()
            is_young = now_ms - entry.since_ms < IDLE_MS
            if is_young and now_ms >= entry.server.avoid_until_ms and entry.wire.is_reusable():
                return entry.server, entry.wire
            self._drop(entry.server, entry.wire)

    def _open_connection(self) -> tuple[_ThriftServer, ThriftConnection]:
        """Return a new connection to the server with the fewest connections, or to the next reachable server."""
        failure: StoreUnavailable | None = None
        for server in self._by_preference():
            try:
                wire = ThriftConnection(server.address, self._service, self.timeout_seconds, self._security)
            except StoreUnavailable as error:
                self._avoid(server)
                failure = error
                continue
            with self._lock:
                server.connections += 1
            return server, wire
        if failure is None:
            raise StoreUnavailable("No Thrift server of HBase is configured.", "Set storage.hbase.thrift.")
        raise failure

    def _by_preference(self) -> list[_ThriftServer]:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            return sorted(
                self._servers, key=lambda server: (max(0, server.avoid_until_ms - now_ms), server.connections)
            )

    def _avoid(self, server: _ThriftServer) -> None:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            server.failures += 1
            pause_ms = min(MAX_AVOID_MS, AVOID_MS << min(server.failures - 1, 16))
            server.avoid_until_ms = now_ms + pause_ms
            # In an outage with constant calls, failures are at most this far apart; else this is a new outage.
            max_interval_ms = MAX_AVOID_MS + self.timeout_seconds * 1000
            if self._outage_since_ms is None or now_ms - self._failed_ms > max_interval_ms:
                self._outage_since_ms = now_ms
            self._failed_ms = now_ms

    def _reject_in_outage(self) -> None:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            if self._outage_since_ms is None or any(now_ms >= server.avoid_until_ms for server in self._servers):
                return
            outage_seconds = (now_ms - self._outage_since_ms) / 1000
        if outage_seconds > OUTAGE_TIMEOUTS * self.timeout_seconds:
            addresses = ", ".join(server.address for server in self._servers)
            raise StoreUnavailable(
                f"HBase's Thrift server {addresses} has not responded for {outage_seconds:.0f} s.",
                "Check whether it runs, and the health of HBase.",
            )

    def _give_back(self, server: _ThriftServer, wire: ThriftConnection) -> None:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            server.failures = server.avoid_until_ms = 0
            self._outage_since_ms = None
            keep = not self._closed and not wire.broken
            if keep:
                self._idle.append(_Idle(server, wire, now_ms))
        if not keep:
            self._drop(server, wire)

    def _drop(self, server: _ThriftServer, wire: ThriftConnection, *, failed: bool = False) -> None:
        wire.close()
        with self._lock:
            server.connections -= 1
        if failed:
            self._avoid(server)
