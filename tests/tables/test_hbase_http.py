"""Thrift over HTTP: connections are reused, and no response reaches another call."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.certificates import make_certificate
from tests.tables.fake_thrift import FakeThrift
from tests.tables.http_front import HttpFront, Respond, respond
from tests.tables.test_hbase_pool import LONG_SECONDS, SHORT_SECONDS, get
from tests.tables.tls_front import TlsFront
from tms_core.clock import ManualClock
from tms_core.errors import StoreUnavailable
from tms_core.settings.models import ClientTlsSettings, HBaseSettings
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.thrift import Call, ConnectionLost, ThriftTimeout
from tms_core.tables.hbase.wire.http import HttpSocket

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def front() -> Iterator[HttpFront]:
    with FakeThrift() as thrift, HttpFront(thrift.address) as front:
        yield front


def pool_of(address: str, *, seconds: float = LONG_SECONDS, tls: ClientTlsSettings | None = None) -> closing[HBasePool]:
    wanted = HBaseSettings(thrift=(address,), transport="http", tls=tls)
    return closing(HBasePool.configured(wanted, timeout_seconds=seconds, clock=ManualClock(0)))


def test_http_calls_share_one_connection(front: HttpFront) -> None:
    rows = [b"a", b"x" * 3_000_000, b"b"]
    with pool_of(front.address) as pool:
        assert [get(pool, row) for row in rows] == rows
        with pool.connection() as connection:
            calls: list[Call] = [("getRow", (b"table", row, {})) for row in rows]
            assert [found[0].row for found in connection.calls(calls)] == rows
    assert front.connections == 1
    assert len(front.heads) == 6
    assert front.heads[0].startswith(f"POST / HTTP/1.1\r\nHost: {front.address}\r\nContent-Type: application/x-thrift")


def test_http_response_with_late_last_chunk_keeps_the_connection(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = threading.Event()
    finish = HttpSocket.finish

    def in_pieces(connection: socket.socket, answer: bytes) -> None:
        is_read.clear()
        connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(answer) + answer)
        is_read.wait()
        connection.sendall(b"\r\n0\r\n\r\n")

    def finish_after_all(connection: HttpSocket) -> None:
        is_read.set()
        finish(connection)

    front.respond = in_pieces
    monkeypatch.setattr(HttpSocket, "finish", finish_after_all)
    with pool_of(front.address) as pool:
        assert [get(pool, row) for row in (b"a", b"b", b"c")] == [b"a", b"b", b"c"]
    assert front.connections == 1


def test_http_connection_marked_close_is_not_reused(front: HttpFront) -> None:
    def respond_once(connection: socket.socket, answer: bytes) -> None:
        connection.sendall(OK + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)

    front.respond = respond_once
    with pool_of(front.address) as pool:
        assert [get(pool, row) for row in (b"a", b"b")] == [b"a", b"b"]
    assert (front.connections, len(front.heads)) == (2, 2)


def respond_with(text: bytes) -> Respond:
    return lambda connection, _: connection.sendall(text)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nthere", "it responds with HTTP 404 Not Found"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "it responds with HTTP 100 Continue"),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", "HTTP 101 Switching"),
        (b"\x80\x01\x00\x02\x00\x00\x00\x06getRow", "not speak HTTP"),
        (OK + b"a: b\r\n" * 60_000, "too long"),
        (OK + b"Content-Length: 0\r\n\r\n" * 2, "not speak HTTP|without a request"),
        (OK + b"Content-Length: 0\r\n\r\n" + OK + b"\r\n", "without a request"),
    ],
)
def test_invalid_http_response_raises_connection_lost(front: HttpFront, response: bytes, message: str) -> None:
    front.respond = respond_with(response)
    with pool_of(front.address) as pool, pytest.raises(ConnectionLost, match=f"getRow: .*({message})"):
        get(pool, b"a")


def test_duplicate_http_response_is_not_used_for_the_next_call(front: HttpFront) -> None:
    answers: list[bytes] = []

    def respond_twice(connection: socket.socket, answer: bytes) -> None:
        answers.append(answer)
        respond(connection, answer)
        if len(answers) == 1:
            respond(connection, answer)

    front.respond = respond_twice
    with pool_of(front.address) as pool:
        assert [get(pool, row) for row in (b"a", b"b", b"c")] == [b"a", b"b", b"c"]


def test_http_server_requiring_login_names_the_setting(front: HttpFront) -> None:
    front.respond = respond_with(
        b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Negotiate\r\nContent-Length: 0\r\n\r\n"
    )
    with pool_of(front.address) as pool, pytest.raises(StoreUnavailable) as caught:
        get(pool, b"a")
    assert caught.value.message == (
        f"HBase's Thrift server {front.address} cannot be used: it requires a Kerberos login."
    )
    assert "storage.hbase.kerberos" in caught.value.hint


def test_incomplete_http_response_times_out(front: HttpFront) -> None:
    front.respond = lambda connection, answer: connection.sendall(
        OK + b"Content-Length: %d\r\n\r\n" % len(answer) + answer[:-1]
    )
    with pool_of(front.address, seconds=SHORT_SECONDS) as pool, pytest.raises(ThriftTimeout):
        get(pool, b"a")


def test_https_calls_verify_the_server_certificate(front: HttpFront, tmp_path: Path) -> None:
    tls, other = (make_certificate(tmp_path / f"{name}.pem", tmp_path / f"{name}.key") for name in ("one", "other"))
    with TlsFront(front.address, tls, clients=other.certificate) as outer:
        own = ClientTlsSettings(ca_file=tls.certificate, certificate=other.certificate, key=other.key)
        with pool_of(outer.address, tls=own) as pool:
            assert [get(pool, row) for row in (b"a", b"x" * 1_000_000)] == [b"a", b"x" * 1_000_000]
        wrong = ClientTlsSettings(ca_file=other.certificate)
        with pool_of(outer.address, tls=wrong) as pool, pytest.raises(StoreUnavailable, match="self-signed"):
            get(pool, b"a")
    assert outer.handshakes == 1
