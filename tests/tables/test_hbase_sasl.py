"""Frames after a Kerberos login, with a login that needs no realm."""

from __future__ import annotations

import socket
import struct
from contextlib import closing
from typing import Any, cast

import pytest

from tests.kit.sockets import SocketServer
from tms_core.errors import LoginFailed
from tms_core.tables.hbase.wire.sasl import SaslSocket

LONG_SECONDS = 60
HEAD_BYTES = 60


class FakeLogin:
    """A login that is complete after the first token, and wraps bytes with a header until the ticket expires."""

    is_complete = is_expired = False
    has_ticket = True

    def exchange(self, _: str) -> FakeLogin:
        return self

    def step(self) -> bytes:
        self.is_complete = True
        return b"token"

    def unwrap(self, data: bytes) -> bytes:
        return data

    def wrap(self, data: bytes, *, encrypt: bool) -> bytes:
        if encrypt and not self.has_ticket:
            raise LoginFailed("the ticket has expired")
        return bytes(HEAD_BYTES) + data

    def max_plain_bytes(self, size: int, *, encrypt: bool) -> int:
        return max(0, size - HEAD_BYTES) if encrypt else size


def offer_encryption(limit: int) -> SocketServer:
    """Return a server that offers encryption, with frames up to a limit."""
    offer = b"\4" + limit.to_bytes(3, "big")

    def handle(connection: socket.socket) -> None:
        connection.sendall(struct.pack(">BI", 2, len(offer)) + offer + struct.pack(">BI", 5, 0))
        while connection.recv(1 << 16):
            """Read until the client closes."""

    return SocketServer(handle)


def log_in(address: str, login: FakeLogin) -> SaslSocket:
    return SaslSocket(address, LONG_SECONDS, None, cast(Any, login), "hbase/_HOST")


def test_login_with_frame_limit_of_the_header_size_fails() -> None:
    with offer_encryption(HEAD_BYTES) as server, pytest.raises(LoginFailed, match=f"{HEAD_BYTES} bytes"):
        log_in(server.address, FakeLogin())


def test_write_with_expired_ticket_raises_connection_error() -> None:
    login = FakeLogin()
    with offer_encryption(65_536) as server, closing(log_in(server.address, login)) as connection:
        connection.write(b"a")
        login.has_ticket = False
        with pytest.raises(ConnectionError, match="expired"):
            connection.write(b"b")
