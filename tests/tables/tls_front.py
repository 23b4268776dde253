"""A socket with TLS in front of a server without TLS, like stunnel."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from tests.kit.sockets import Front
from tms_core.settings.models import TlsSettings


class TlsFront(Front):
    """A proxy that terminates TLS on its own port and forwards the bytes.

    Attributes:
        handshakes: the number of completed handshakes.
    """

    def __init__(self, backend: str, tls: TlsSettings, clients: Path | None = None) -> None:
        super().__init__(backend)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(tls.certificate, tls.key)
        if clients is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
            self.context.load_verify_locations(clients)
        self.handshakes = 0

    def serve(self, connection: socket.socket) -> None:
        with self.context.wrap_socket(connection, server_side=True) as outer:
            self.handshakes += 1
            with self.connect() as inner:
                while (ready := [outer] if outer.pending() else self.ready(outer, inner)) is not None:
                    for one in ready:
                        data = one.recv(1 << 16)
                        if not data:
                            return
                        (inner if one is outer else outer).sendall(data)
