"""A TCP connection whose reads and writes share one time limit, optionally over TLS."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tms_core.errors import StoreUnavailable
from tms_core.security.tls import ClientTls

_TLS_HINT = (
    "Check that it uses TLS and trusts the client's certificate (storage.hbase.tls.certificate), that "
    "storage.hbase.tls.ca_file has the authority of its certificate, and that the certificate names the host of its "
    "address or storage.hbase.tls.server_name."
)


class TimedSocket:
    """A connection for one thread.

    Args:
        address: ``HOST:PORT``.
        timeout_seconds: the timeout of connecting.
        tls: the client's TLS side; None: no TLS.

    Raises:
        OSError: no server listens, or it rejects the connection.
        StoreUnavailable: client and server do not agree on TLS.
    """

    def __init__(self, address: str, timeout_seconds: float, tls: ClientTls | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.host = host.strip("[]")
        self.address = address
        self._socket = socket.create_connection((self.host, int(port)), timeout_seconds)
        self._deadline = time.monotonic() + timeout_seconds
        self._batch: list[bytes] | None = None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                with self._tls_failures():
                    self._socket = tls.context().wrap_socket(self._socket, server_hostname=tls.server_name or self.host)
        except BaseException:
            self._socket.close()
            raise

    def allow(self, seconds: float) -> None:
        """Start the time limit of a call."""
        self._deadline = time.monotonic() + seconds

    def read(self, size: int) -> bytes:
        """Return at least one byte, and at most ``size`` bytes."""
        self._socket.settimeout(self._seconds_left())
        with self._tls_failures():
            data = self._socket.recv(size)
        if not data:
            raise EOFError("the server closed the connection")
        return data

    def write(self, data: bytes) -> None:
        if self._batch is not None:
            self._batch.append(data)
            return
        self._send(data)

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._seconds_left())
        with self._tls_failures():
            try:
                self._socket.sendall(data)
            except (ssl.SSLEOFError, ConnectionError):
                if isinstance(self._socket, ssl.SSLSocket):
                    # Read the alert that a server sends before it closes, for example about the client's certificate.
                    self._socket.recv(1)
                raise

    @contextmanager
    def batch_writes(self) -> Iterator[None]:
        """Send all writes of the block in one piece, after the block."""
        batch: list[bytes] = []
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None
        self._send(b"".join(batch))

    def flush(self) -> None:
        """Do nothing, because calls are sent at once."""

    def finish(self) -> None:
        """Read the bytes that follow the results of calls."""

    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def is_reusable(self) -> bool:
        """Return whether the server has neither closed the connection nor sent unrequested bytes."""
        if not self.is_open() or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._socket.close()

    def _seconds_left(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining

    @contextmanager
    def _tls_failures(self) -> Iterator[None]:
        try:
            yield
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
            # The server has closed the connection; handle that as without TLS.
            raise
        except ssl.SSLError as error:
            # With TLS 1.3, a server rejects the client's certificate only after the handshake, at the first read.
            text = getattr(error, "verify_message", "") or (error.reason or str(error)).replace("_", " ").lower()
            raise StoreUnavailable(
                f"HBase's Thrift server {self.address} cannot be reached over TLS: {text}.", _TLS_HINT
            ) from error
