"""The HTTP server in its thread: start, errors, and no effect on the process."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from http.client import HTTPConnection
from typing import cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from janitor.http.server import HttpServer
from tests.support import raising
from tms_core.errors import ConfigurationError


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise LookupError("the app is broken")


def get(server: HttpServer) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_stop_frees_the_port_and_ends_the_thread() -> None:
    server = HttpServer(hello, "127.0.0.1", 0)
    server.start()
    assert get(server) == (200, b"hello")
    server.stop()
    server.stop()
    assert [thread for thread in threading.enumerate() if thread.name == "http"] == []
    again = HttpServer(hello, "127.0.0.1", server.port)
    again.start()
    assert get(again) == (200, b"hello")
    again.stop()


def test_stop_with_a_hung_response_returns() -> None:
    reached = threading.Event()

    async def hangs(_scope: Scope, receive: Receive, _send: Send) -> None:
        reached.set()
        await receive()
        await receive()

    server = HttpServer(hangs, "127.0.0.1", 0)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reached.wait(20)
        server.stop()
    assert [thread for thread in threading.enumerate() if thread.name == "http"] == []


def test_start_on_a_port_in_use_raises_with_the_setting_and_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError) as caught:
            HttpServer(hello, "127.0.0.1", port).start()
    assert f"janitor.http.port is {port}" in caught.value.message
    assert "TMS_JANITOR__HTTP__PORT=PORT" in caught.value.hint


def test_start_on_a_forbidden_port_raises_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigurationError, match=r"janitor\.http\.port is 80"):
        HttpServer(hello, "127.0.0.1", 80).start()


def test_start_of_a_server_that_cannot_load_raises(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(cast(ASGIApp, "no_such_module:app"), "127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match="cannot start"):
        server.start()
    assert "no_such_module" in caplog.text
    server.stop()


def test_start_in_the_main_thread_keeps_the_signal_handlers() -> None:
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in handled]
    server = HttpServer(hello, "127.0.0.1", 0)
    server.start()
    try:
        assert [signal.getsignal(number) for number in handled] == before
    finally:
        server.stop()


def test_application_that_fails_is_logged_without_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = HttpServer(broken, "127.0.0.1", 0)
    server.start()
    try:
        assert get(server)[0] == 500
    finally:
        server.stop()
    assert "the app is broken" in caplog.text
    assert [record for record in caplog.records if record.name == "uvicorn.access"] == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9847"),
        ("::1", "http://[::1]:9847"),
        ("0.0.0.0", "http://localhost:9847"),  # noqa: S104 nothing is bound
        ("::", "http://localhost:9847"),
        ("janitor.example", "http://janitor.example:9847"),
    ],
)
def test_url_of_a_server_opens_in_a_local_browser(host: str, url: str) -> None:
    assert HttpServer(hello, host, 9847).url == url
