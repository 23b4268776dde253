"""A socket in front of a server that adds TLS, a Kerberos login or HTTP."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Self

#: The interval at which a connection checks whether the block has ended, in seconds.
_LOOK_SECONDS = 0.05


class Front:
    """A listener on a free port that serves each connection in a thread until the block ends.

    Args:
        backend: ``HOST:PORT`` of the server.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"localhost:{self.port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in (self._listener, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def serve(self, connection: socket.socket) -> None:
        """Serve a connection until it closes, a socket fails or :meth:`ready` returns None."""
        raise NotImplementedError

    def connect(self) -> socket.socket:
        """Connect to the server."""
        host, _, port = self._backend
        return socket.create_connection((host, int(port)))

    def ready(self, *sockets: socket.socket) -> list[socket.socket] | None:
        """Return the sockets with something to read, after a short wait; None once the block has ended."""
        return None if self._over.is_set() else select.select(sockets, [], [], _LOOK_SECONDS)[0]

    def _accept(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=[connection]))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            self.serve(connection)
