"""A Thrift server with configurable faults.

The server decodes each request as HBase does, and can encode the correct response: a row with the requested key. The
*conduct* of the test decides what the server sends: the response, a part of it, the response to another call, nothing.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.transport.buffered import TCyBufferedTransport

from tests.kit.sockets import SocketServer
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


class FakeThrift(SocketServer):
    """A Thrift server whose behavior the test defines.

    Args:
        conduct: handles each request; by default the server sends the correct response.
        port: the port; 0: a free port.
        service: the Thrift service whose calls the server decodes.

    Attributes:
        reads: the number of reads of each row.
        unheard: set when a response could not be delivered.
    """

    def __init__(
        self, conduct: Callable[[Request], None] | None = None, *, port: int = 0, service: Service = "Hbase"
    ) -> None:
        super().__init__(port=port)
        self.calls = calls_of(service)
        self.conduct = conduct or (lambda request: request.send(request.answer()))
        self.reads: Counter[bytes] = Counter()
        self.unheard = threading.Event()

    def serve(self, connection: socket.socket) -> None:
        protocol = TCyBinaryProtocol(TCyBufferedTransport(_Readable(connection)), decode_response=False)
        while True:
            name, _, number = protocol.read_message_begin()
            arguments = _OpenScan() if name == "scannerOpenWithScan" else getattr(self.calls, f"{name}_args")()
            protocol.read_struct(arguments)
            request = Request(self, connection, name, number, arguments)
            self.reads[request.row] += 1
            self.conduct(request)


class _OpenScan(HBASE.Hbase.scannerOpenWithScan_args):  # type: ignore[misc]
    """The arguments with all fields of a scan, as current servers decode them."""

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
        """Do nothing: writes are not buffered."""


class _Text:
    """Thrift's own exception, as a struct."""

    thrift_spec = {1: (11, "message", False), 2: (8, "type", False)}  # noqa: RUF012

    def __init__(self, message: str, kind: int) -> None:
        self.message = message
        self.type = kind
