"""A Thrift server with configurable faults.

It understands each request as HBase's would and builds the right answer, a row that carries the key it was asked for.
What then goes over the wire is up to the test's *conduct*: the answer, half of it, somebody else's, nothing.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.transport.buffered import TCyBufferedTransport

from tms_core.tables.hbase.thrift import HBASE, Service, calls_of, interface

_CALL, _REPLY, _EXCEPTION = 1, 2, 3


class Request:
    def __init__(self, server: FakeThrift, connection: socket.socket, name: str, number: int, arguments: Any) -> None:
        self.server = server
        self.connection = connection
        self.name = name
        self.number = number
        self.arguments = arguments
        self.row: bytes = getattr(arguments, "row", b"")

    def answer(self, *, row: bytes | None = None, number: int | None = None, name: str | None = None) -> bytes:
        """Return a correct response to ``getRow``, except for the given fields."""
        found = HBASE.TRowResult(row=self.row if row is None else row, columns={})
        result = HBASE.Hbase.getRow_result(success=[found])
        return self._message(name or self.name, _REPLY, self.number if number is None else number, result)

    def reply(self, value: object) -> None:
        """Send a response of any type to any call, or None to a call without a result."""
        result = getattr(self.server.calls, f"{self.name}_result")()
        if value is not None:
            result.success = value
        self.send(self._message(self.name, _REPLY, self.number, result))

    def failure(self, **exception: Any) -> bytes:
        """Return a response that carries ``io`` or ``ia``, one of HBase's exceptions."""
        kind = "scannerGetList" if "ia" in exception else "getRow"
        result = getattr(HBASE.Hbase, f"{kind}_result")(**exception)
        return self._message(self.name, _REPLY, self.number, result)

    def unserved(self, kind: int, text: str) -> bytes:
        """Return a response that carries an exception of Thrift."""
        return self._message(self.name, _EXCEPTION, self.number, _Text(text, kind))

    def send(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError:
            self.server.unheard.set()

    def cut(self) -> None:
        self.connection.close()

    @staticmethod
    def _message(name: str, kind: int, number: int, result: Any) -> bytes:
        out = _Bytes()
        protocol = TCyBinaryProtocol(TCyBufferedTransport(out))
        protocol.write_message_begin(name, kind, number)
        protocol.write_struct(result)
        protocol.trans.flush()
        return bytes(out.data)


class FakeThrift:
    """A server on a port of its own.

    Args:
        conduct: what it does with each request; by default it answers.
        port: where; 0: a free port.
        service: which calls it understands.

    Attributes:
        connections: how many were accepted.
        reads: the number of reads of each row.
        unheard: set when an answer could not be delivered.
        over: set when the test is; for a conduct that waits.
    """

    def __init__(
        self, conduct: Callable[[Request], None] | None = None, *, port: int = 0, service: Service = "Hbase"
    ) -> None:
        self.calls = calls_of(service)
        self.conduct = conduct or (lambda request: request.send(request.answer()))
        self.connections = 0
        self.reads: Counter[bytes] = Counter()
        self.unheard = threading.Event()
        self.over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut_all(self) -> None:
        for connection in self._open:
            _shut(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        _shut(self._listener)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=[connection])
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        protocol = TCyBinaryProtocol(TCyBufferedTransport(_Readable(connection)), decode_response=False)
        with connection:
            while True:
                try:
                    name, _, number = protocol.read_message_begin()
                    arguments = _OpenScan() if name == "scannerOpenWithScan" else getattr(self.calls, f"{name}_args")()
                    protocol.read_struct(arguments)
                except (OSError, EOFError):
                    return
                request = Request(self, connection, name, number, arguments)
                self.reads[request.row] += 1
                self.conduct(request)


class _OpenScan(HBASE.Hbase.scannerOpenWithScan_args):  # type: ignore[misc]
    """As a server of today understands it: with all that a scan may say."""

    thrift_spec = {**HBASE.Hbase.scannerOpenWithScan_args.thrift_spec, 2: (12, "scan", interface().Scan, False)}  # noqa: RUF012


class _Readable:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, size: int) -> bytes:
        if data := self._connection.recv(size):
            return data
        raise EOFError


class _Bytes:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    def flush(self) -> None:
        """Nothing is held back."""


class _Text:
    """Thrift's own exception, as a struct."""

    thrift_spec = {1: (11, "message", False), 2: (8, "type", False)}  # noqa: RUF012

    def __init__(self, message: str, kind: int) -> None:
        self.message = message
        self.type = kind


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
