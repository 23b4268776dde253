"""A socket with HTTP in front of a Thrift server, like HBase's with ``hbase.regionserver.thrift.http``."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

from tests.kit.sockets import Front

#: A function that sends the response to a call.
Respond = Callable[[socket.socket, bytes], None]


def respond(connection: socket.socket, answer: bytes) -> None:
    middle = len(answer) // 2
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (answer[:middle], answer[middle:]) if part]
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n")


class HttpFront(Front):
    """An HTTP server that accepts one call in each POST request."""

    def __init__(self, backend: str, respond: Respond = respond) -> None:
        super().__init__(backend)
        self.respond = respond
        self.heads: list[str] = []

    def serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as requests:
            while requests.peek(1):
                head = b"".join(iter(requests.readline, b"\r\n"))
                self.heads.append(head.decode())
                [size] = re.findall(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
                self.respond(connection, self._answer(requests.read(int(size))))

    def _answer(self, call: bytes) -> bytes:
        with self.connect() as backend:
            backend.sendall(call)
            backend.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: backend.recv(1 << 16), b""))
