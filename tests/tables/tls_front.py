"""A socket that speaks TLS in front of a server that does not, as stunnel would."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from tms_core.settings.models import TlsSettings

#: How soon a connection notices that the test is over, in seconds.
_LOOK_SECONDS = 0.05


class TlsFront:
    """Ends TLS on a port of its own and passes the bytes on.

    Args:
        backend: ``HOST:PORT`` of the server.
        tls: the certificate that is shown.
        clients: the authority whose certificates clients must show; None: they need none.

    Attributes:
        connections: how many handshakes succeeded.
    """

    def __init__(self, backend: str, tls: TlsSettings, clients: Path | None = None) -> None:
        self._backend = backend.rpartition(":")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(tls.certificate, tls.key)
        if clients is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
            self.context.load_verify_locations(clients)
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
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
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._pass_on, args=[connection]))
                self._threads[-1].start()

    def _pass_on(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, self.context.wrap_socket(connection, server_side=True) as outer:
            self.connections += 1
            host, _, port = self._backend
            with socket.create_connection((host, int(port))) as inner:
                while not self._over.is_set():
                    ready = [outer] if outer.pending() else select.select([outer, inner], [], [], _LOOK_SECONDS)[0]
                    for one in ready:
                        data = one.recv(1 << 16)
                        if not data:
                            return
                        (inner if one is outer else outer).sendall(data)
