"""A socket that requires a Kerberos login in front of a Thrift server, like HBase's."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

from tests.kerberos.kdc import gssapi
from tests.kit.sockets import Front

_LAYERS = {"auth": 1, "auth-int": 2, "auth-conf": 4}


class SaslFront(Front):
    """A proxy that authenticates clients and forwards their calls.

    Args:
        backend: ``HOST:PORT`` of the server.
        keytab: a keytab with the key of ``hbase/localhost``.
        qop: the offered quality of protection.
        limit: the maximum size of a wrapped frame, in bytes.

    Attributes:
        users: the principals that have logged in.
        frames: the sizes of the received frames, in bytes.
        damage: whether to change a byte of the next response.
        refusal: the error of each login; empty: logins succeed.
    """

    def __init__(self, backend: str, keytab: Path, qop: str = "auth-conf", limit: int = 65_536) -> None:
        super().__init__(backend)
        self._keytab = keytab
        self._qop = qop
        self._limit = limit
        self.users: list[str] = []
        self.frames: list[int] = []
        self.damage = False
        self.refusal = ""

    def serve(self, connection: socket.socket) -> None:
        outer, context = connection, self._log_in(connection)
        with self.connect() as inner:
            while (ready := self.ready(outer, inner)) is not None:
                for one in ready:
                    if one is outer:
                        frame = _exactly(outer, *struct.unpack(">I", _exactly(outer, 4)))
                        self.frames.append(len(frame))
                        inner.sendall(frame if self._qop == "auth" else context.unwrap(frame).message)
                    elif data := inner.recv(1 << 16):
                        self._answer(outer, context, data)
                    else:
                        return

    def _answer(self, outer: socket.socket, context: Any, data: bytes) -> None:
        if self._qop != "auth":
            data = context.wrap(data, self._qop == "auth-conf").message
        if self.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
            self.damage = False
        outer.sendall(struct.pack(">I", len(data)) + data)

    def _log_in(self, outer: socket.socket) -> Any:
        kind, mechanism = _status(outer)
        assert (kind, mechanism) == (1, b"GSSAPI")
        if self.refusal:
            _send(outer, 4, self.refusal.encode())
            raise EOFError
        keys = gssapi.Credentials(usage="accept", store={b"keytab": str(self._keytab).encode()})
        context = gssapi.SecurityContext(creds=keys, usage="accept")
        while not context.complete:
            _send(outer, 2, context.step(_status(outer)[1]) or b"")
        assert _status(outer) == (2, b"")
        offered = bytes([_LAYERS[self._qop]]) + (0 if self._qop == "auth" else self._limit).to_bytes(3, "big")
        _send(outer, 2, context.wrap(offered, False).message)
        chosen = context.unwrap(_status(outer)[1]).message
        assert chosen[0] == _LAYERS[self._qop]
        _send(outer, 5, b"")
        self.users.append(str(context.initiator_name))
        return context


def _send(connection: socket.socket, status: int, body: bytes) -> None:
    connection.sendall(struct.pack(">BI", status, len(body)) + body)


def _status(connection: socket.socket) -> tuple[int, bytes]:
    status, length = struct.unpack(">BI", _exactly(connection, 5))
    return status, _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        data = connection.recv(size - len(parts))
        if not data:
            raise EOFError
        parts += data
    return parts
