"""Socket servers whose behavior the test defines, and proxies that add TLS, a Kerberos login or HTTP."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

#: The interval at which a connection checks whether the block has ended, in seconds.
_LOOK_SECONDS = 0.05


class SocketServer:
    """A server that handles each connection in a thread until the block ends.

    Args:
        handle: handles a connection; None: a subclass defines :meth:`serve`.
        port: the port; 0: a free port.

    Attributes:
        connections: the number of accepted connections.
        over: set when the block ends, for a handler that waits.
    """

    def __init__(self, handle: Callable[[socket.socket], object] | None = None, port: int = 0) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.over = threading.Event()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        _shut_down(self._listener)
        self._acceptor.join()
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join()

    def cut_all(self) -> None:
        """Cut all connections."""
        for connection in self._open:
            _shut_down(connection)

    def serve(self, connection: socket.socket) -> None:
        """Serve a connection until the method returns or a socket fails."""
        assert self._handle is not None
        self._handle(connection)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=[connection]))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            self.serve(connection)


class Front(SocketServer):
    """A proxy in front of another server.

    Args:
        backend: ``HOST:PORT`` of the other server.
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend.rpartition(":")

    @property
    def address(self) -> str:
        """``HOST:PORT``, with the name in the certificates."""
        return f"localhost:{self.port}"

    def connect(self) -> socket.socket:
        """Connect to the server."""
        host, _, port = self._backend
        return socket.create_connection((host, int(port)))

    def ready(self, *sockets: socket.socket) -> list[socket.socket] | None:
        """Return the sockets with something to read, after a short wait; None once the block has ended."""
        return None if self.over.is_set() else select.select(sockets, [], [], _LOOK_SECONDS)[0]


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
