"""A socket that speaks HTTP in front of a Thrift server, as HBase's does with ``hbase.regionserver.thrift.http``."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

#: Sends a response with the answer of a call.
Respond = Callable[[socket.socket, bytes], None]


def respond(connection: socket.socket, answer: bytes) -> None:
    """Respond in chunks, as HBase does."""
    middle = len(answer) // 2
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (answer[:middle], answer[middle:]) if part]
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n")


class HttpFront:
    """Takes calls by POST, one in each request.

    Args:
        backend: ``HOST:PORT`` of the Thrift server.
        respond: sends the responses.

    Attributes:
        connections: how many were accepted.
        heads: of all requests.
    """

    def __init__(self, backend: str, respond: Respond = respond) -> None:
        self._backend = backend.rpartition(":")
        self.respond = respond
        self.connections = 0
        self.heads: list[str] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"localhost:{self.port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=[connection]))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as requests:
            while requests.peek(1):
                head = b"".join(iter(requests.readline, b"\r\n"))
                self.heads.append(head.decode())
                [size] = re.findall(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
                self.respond(connection, self._answer(requests.read(int(size))))

    def _answer(self, call: bytes) -> bytes:
        host, _, port = self._backend
        with socket.create_connection((host, int(port))) as backend:
            backend.sendall(call)
            backend.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: backend.recv(1 << 16), b""))
