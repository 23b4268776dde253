"""HTTP connections over raw sockets: other protocols, silence, floods, and aborted requests."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import select
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
from starlette.types import Receive, Scope, Send

from tests.kit.certificates import make_certificate, served_certificate
from tests.server.client import Client
from tests.support import PATIENCE_SECONDS, require_tool, wait_until
from tms_core.errors import ConfigurationError
from tms_core.server.rest.context import respond
from tms_core.settings.models import TlsSettings
from tms_core.web import listener as listener_module
from tms_core.web import protocol, thread
from tms_core.web.listener import Listener, ListenerOptions
from tms_core.web.protocol import Headers, HttpProtocol, KnownHead, limited_protocol

UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
#: A request inside a body, which the server must never execute.
SMUGGLED = b"DELETE /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Echo:
    """An application that responds with the body of each request.

    Attributes:
        requests: the method, the path and the body of each request.
        headers: the headers of the last request.
        started: set when a request has started.
        may_read, may_answer: events for which the application waits before it reads and responds.
        heads: the known heads; None: the server parses every request.
    """

    def __init__(self, *, knows_heads: bool = False) -> None:
        self.heads = EchoHeads() if knows_heads else None
        self.requests: list[tuple[str, str, bytes]] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.started, self.may_read, self.may_answer = Event(), Event(), Event()
        self.may_read.set()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait = partial(asyncio.get_running_loop().run_in_executor, None)
        if (principal := principal_of(scope["headers"])) is not None:
            scope["principal"] = principal
        self.started.set()
        await wait(self.may_read.wait)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.requests.append((scope["method"], scope["path"], body))
        self.headers = scope["headers"]
        await wait(self.may_answer.wait)
        await respond(send, 200, body)


class EchoHeads:
    """Known heads that contain every usual head with a body.

    In the next iteration of the loop, the server parses the requests and passes them to the application.

    Attributes:
        served: the number of requests that were served by their head.
        at_once: whether a request is confirmed before the function returns, as after a finished write.
    """

    _USUAL = re.compile(
        rb"POST /\w* HTTP/1\.1\r\nHost: localhost\r\nContent-Length: ([1-9][0-9]*)\r\n\r\n", re.IGNORECASE
    )

    def __init__(self) -> None:
        self.served = 0
        self.at_once = False

    def __setitem__(self, head: bytes, known: KnownHead) -> None:
        """Do nothing: every usual head is known."""

    def get(self, head: bytes) -> KnownHead | None:
        usual = self._USUAL.fullmatch(head)
        return None if usual is None else KnownHead(int(usual[1]), partial(self._serve, int(usual[1])))

    def _serve(self, size: int, connection: HttpProtocol, number: bytes, body: bytes) -> bool:
        assert (number, len(body)) == (b"", size)
        self.served += 1
        if self.at_once:
            connection.confirm()
        else:
            connection.loop.call_soon(connection.fail, RuntimeError("no error to an echo"))
        return True


def principal_of(headers: Headers) -> str | None:
    return next((value.decode() for name, value in headers if name == b"x-principal"), None)


@contextmanager
def listening(
    app: Echo, tls: TlsSettings | None = None, max_connections: int = 500, stop_seconds: int = 30
) -> Iterator[int]:
    options = ListenerOptions(max_connections, stop_seconds)
    listener = Listener(app, "127.0.0.1", 0, tls, options, heads=app.heads, identify=principal_of)
    listener.start()
    try:
        yield listener.port
    finally:
        app.may_read.set()
        app.may_answer.set()
        listener.stop()


@pytest.fixture(params=[False, True], ids=["parsed", "known"])
def echo(request: pytest.FixtureRequest) -> Echo:
    return Echo(knows_heads=request.param)


@pytest.fixture
def port(echo: Echo) -> Iterator[int]:
    with listening(echo) as number:
        yield number


def request(method: str, path: str, body: bytes = b"", more: str = "", version: str = "1.1") -> bytes:
    head = f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def rest(client: Client) -> bytes:
    found = b""
    while came := client.socket.recv(65536):
        found += came
    return found


# --- other protocols -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        request("POST", "/a", SMUGGLED, UPGRADE),
        request("POST", "/a", SMUGGLED, "Connection: upgrade\r\nUpgrade: websocket\r\n"),
        f"POST /a HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}Transfer-Encoding: chunked\r\n\r\n".encode()
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED),
    ],
    ids=["HTTP/2", "websocket", "chunked"],
)
def test_upgrade_with_a_body_in_the_same_segment_is_read(echo: Echo, port: int, data: bytes) -> None:
    with Client(port) as client:
        client.socket.sendall(data + request("GET", "/b"))
        assert client.answer().body == SMUGGLED
        assert client.answer().status == 200
    assert echo.requests == [("POST", "/a", SMUGGLED), ("GET", "/b", b"")]


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
def test_body_of_an_upgrade_request_cut_anywhere_is_read(echo: Echo, port: int, pieces: int) -> None:
    data = request("POST", "/a", SMUGGLED, UPGRADE)
    with Client(port) as client:
        for first in range(0, len(data), size := -(-len(data) // pieces)):
            client.socket.sendall(data[first : first + size])
        assert client.answer().body == SMUGGLED
        # A body after its head is in another segment.
        head, _, body = data.partition(b"\r\n\r\n")
        client.socket.sendall(head + b"\r\n\r\n")
        time.sleep(0.01)
        client.socket.sendall(body)
        assert client.answer().body == SMUGGLED
    assert echo.requests == [("POST", "/a", SMUGGLED)] * 2


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT /a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n",
        b"nonsense\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
)
def test_nonsense_is_rejected_and_nothing_after_it_is_read(echo: Echo, port: int, data: bytes) -> None:
    with Client(port) as client:
        client.socket.sendall(data + SMUGGLED)
        refusal = client.answer()
        assert (refusal.status, refusal.headers["connection"]) == (400, "close")
        assert rest(client) == b""
    assert echo.requests == []


def test_nonsense_after_a_request_does_not_change_its_response(echo: Echo, port: int) -> None:
    echo.may_answer.clear()
    with Client(port) as client:
        client.socket.sendall(request("POST", "/a", b"one"))
        wait_until(lambda: echo.requests)
        client.socket.sendall(b"nonsense\r\n\r\n" + SMUGGLED)
        echo.may_answer.set()
        found = client.answer()
        assert (found.status, found.body, found.headers["connection"]) == (200, b"one", "close")
        assert rest(client) == b""
    assert echo.requests == [("POST", "/a", b"one")]


def test_nonsense_in_a_second_request_is_not_answered_in_place_of_the_first(echo: Echo, port: int) -> None:
    echo.may_answer.clear()
    with Client(port) as client:
        client.socket.sendall(request("POST", "/a", b"one"))
        wait_until(lambda: echo.requests)
        client.socket.sendall(b"POST /b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n")
        assert b"400" not in rest(client)
    assert echo.requests == [("POST", "/a", b"one")]


def test_client_that_closes_its_half_after_a_request_gets_a_response(echo: Echo, port: int) -> None:
    echo.may_answer.clear()
    with Client(port) as client:
        client.send("POST", "/a", b"a")
        client.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: echo.requests)
        echo.may_answer.set()
        found = client.answer()
        assert (found.body, found.headers["connection"]) == (b"a", "close")
        assert rest(client) == b""


@pytest.mark.parametrize("unfinished", [b"", b"POST /c HT", request("POST", "/c", b"ccc")[:-1]])
def test_requests_before_the_close_of_a_half_get_responses(echo: Echo, port: int, unfinished: bytes) -> None:
    echo.may_answer.clear()
    with Client(port) as client:
        client.socket.sendall(request("POST", "/a", b"a"))
        wait_until(lambda: echo.requests)
        client.socket.sendall(request("POST", "/b", b"b") + unfinished)
        client.socket.shutdown(socket.SHUT_WR)
        echo.may_answer.set()
        answers = [client.answer() for _ in range(2)]
        assert [found.body for found in answers] == [b"a", b"b"]
        assert answers[1].headers["connection"] == "close"
        assert rest(client) == b""
    assert [path for _, path, _ in echo.requests] == ["/a", "/b"]


def test_trailers_are_not_headers(echo: Echo, port: int) -> None:
    head = b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Client(port) as client:
        client.socket.sendall(head + b"1\r\na\r\n0\r\nContent-Encoding: gzip\r\n\r\n")
        assert client.answer().body == b"a"
    assert [name for name, _ in echo.headers] == [b"host", b"transfer-encoding"]


def test_curl_that_prefers_http_2_gets_a_response(echo: Echo, port: int, caplog: pytest.LogCaptureFixture) -> None:
    curl = require_tool("curl", "apt-get install curl")
    url = f"http://127.0.0.1:{port}/a"
    command = [curl, "--silent", "--show-error", "--http2", "--max-time", str(PATIENCE_SECONDS)]
    done = subprocess.run([*command, "--data-binary", "hello", url, url], capture_output=True, check=True)
    assert done.stdout == b"hellohello"
    assert echo.requests == [("POST", "/a", b"hello")] * 2
    assert caplog.text == ""


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Long: ",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;long=",
    ],
    ids=["a head", "a trailer", "a chunk's extension"],
)
def test_endless_head_is_rejected(echo: Echo, port: int, before: bytes) -> None:
    with Client(port) as client:
        client.socket.sendall(before)
        with pytest.raises(OSError, match=r"reset|pipe|abort"):
            _send_without_end(client)
    assert echo.requests == []


def _send_without_end(client: Client) -> None:
    while True:
        client.socket.sendall(b"a" * 10_000)


def test_body_larger_than_any_head_is_read(port: int) -> None:
    body = bytes(range(256)) * 4000
    with Client(port) as client:
        assert client.ask("POST", "/a", body).body == body


@pytest.mark.parametrize(
    "data",
    [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab", request("GET", "/")],
    ids=["nothing", "half a head", "half a body", "a request, and nothing after"],
)
def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch, echo: Echo, data: bytes) -> None:
    monkeypatch.setattr(listener_module, "_IDLE_SECONDS", 0.2)
    with listening(echo) as port, Client(port) as client, suppress(ConnectionError):
        client.socket.sendall(data)
        rest(client)


@pytest.mark.parametrize(("wait", "size"), [("may_answer", 1), ("may_read", 4_000_000)])
def test_wait_of_the_server_ends_no_client(monkeypatch: pytest.MonkeyPatch, echo: Echo, wait: str, size: int) -> None:
    def idle_seconds(connection: HttpProtocol) -> float:
        # Short only while the client waits for the server: on a busy machine the client itself may pause for longer.
        return 0.1 if connection.flow.read_paused or connection._awaits_response() else PATIENCE_SECONDS

    monkeypatch.setattr(HttpProtocol, "timeout_keep_alive", property(idle_seconds, lambda *_: None), raising=False)
    event: Event = getattr(echo, wait)
    event.clear()
    body = bytes(size)
    with listening(echo) as port, Client(port) as client:
        sender = Thread(target=client.send, args=("POST", "/a", body))
        sender.start()
        assert echo.started.wait(PATIENCE_SECONDS)
        time.sleep(0.4)
        event.set()
        sender.join()
        assert client.answer().body == body


def test_one_connection_too_many_is_rejected_until_another_ends(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    with listening(echo, max_connections=3) as port, ExitStack() as stack:
        _, _, first = all_ = [stack.enter_context(Client(port)) for _ in range(3)]
        assert [one.ask("GET", "/").status for one in all_] == [200] * 3
        for _ in range(2):
            with Client(port) as client:
                refusal = client.ask("GET", "/")
                assert (refusal.status, refusal.headers["connection"]) == (503, "close")
                assert "server.max_connections" in refusal.text
        assert first.ask("GET", "/").status == 200
        stack.close()
        wait_until(partial(_gets_in, port))
    assert caplog.text.count("3 connections ") == 1


def test_connections_above_the_limit_serve_only_probes(echo: Echo) -> None:
    with listening(echo, max_connections=1) as port, Client(port) as client:
        assert client.ask("GET", "/").status == 200
        with Client(port) as probe:
            answered = probe.ask("GET", "/ping?now")
            assert (answered.status, answered.headers["connection"]) == (200, "close")
        with Client(port) as other:
            assert other.ask("POST", "/pings", b"a").status == 503
        if echo.heads is not None:
            echo.heads.at_once = True
        with Client(port) as known:
            known.socket.sendall(request("POST", "/a", b"a"))
            assert known.answer().status == 503
    assert [path for _, path, _ in echo.requests] == ["/", "/ping"]


@pytest.mark.parametrize("most", [{"x_principal": "ada"}, {}], ids=["with a token", "without a token"])
def test_new_connection_replaces_an_idle_one_of_the_principal_with_most(echo: Echo, most: dict[str, str]) -> None:
    ben = {"x_principal": "ben"}
    with listening(echo, max_connections=4) as port, ExitStack() as stack:
        busy, *idle, other = (stack.enter_context(Client(port)) for _ in range(4))
        assert other.ask("GET", "/", b"", **ben).status == 200
        for one in idle:
            assert one.ask("GET", "/", b"", **most).status == 200
        echo.may_answer.clear()
        busy.send("GET", "/busy", b"", **most)
        wait_until(lambda: len(echo.requests) == 4)
        new = stack.enter_context(Client(port))
        new.send("POST", "/new", b"a", **ben)
        replaced = _replaced(idle)
        echo.may_answer.set()
        assert busy.answer().status == 200
        assert [one.ask("GET", "/", b"", **most).status for one in idle if one is not replaced] == [200]
        assert new.answer().status == 200
        # Both have two connections.
        for headers in (most, ben, {}):
            with Client(port) as late:
                assert late.ask("GET", "/", b"", **headers).status == 503
        with Client(port) as late:
            assert late.ask("GET", "/", x_principal="cid").status == 200


def test_busy_connection_is_replaced_after_its_response(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LEAVING_CONNECTIONS", 1)
    echo.may_answer.clear()
    with listening(echo, max_connections=3) as port, ExitStack() as stack:
        busy = [stack.enter_context(Client(port)) for _ in range(3)]
        for one in busy:
            one.send("POST", "/", b"a", x_principal="ada")
        wait_until(lambda: len(echo.requests) == 3)
        new = stack.enter_context(Client(port))
        new.send("GET", "/new", x_principal="ben")
        wait_until(lambda: len(echo.requests) == 4)
        with Client(port) as late:
            assert late.ask("GET", "/late", x_principal="cid").status == 503
        echo.may_answer.set()
        assert [one.answer().status for one in (*busy, new)] == [200] * 4
        assert _replaced(busy) in busy


def test_connection_above_the_limit_takes_a_place_that_became_free(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_PING_SECONDS", PATIENCE_SECONDS)
    with listening(echo, max_connections=2) as port, ExitStack() as stack:
        first, second = (stack.enter_context(Client(port)) for _ in range(2))
        for one in (first, second):
            assert one.ask("GET", "/", b"", x_principal="ada").status == 200
        late = stack.enter_context(Client(port))
        assert stack.enter_context(Client(port)).ask("GET", "/ping").status == 200
        first.socket.shutdown(socket.SHUT_RDWR)
        # Each response is sent by a later iteration of the loop, which has noticed the end of the first connection.
        assert [second.ask("GET", "/", b"", x_principal="ada").status for _ in range(3)] == [200] * 3
        assert late.ask("GET", "/late", b"", x_principal="ben").status == 200
        assert second.ask("GET", "/", b"", x_principal="ada").status == 200


def test_probes_are_not_replaced_by_further_connections(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_PING_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(protocol, "_INCOMPLETE_SECONDS", 0)
    with listening(echo, max_connections=1) as port, Client(port) as client, ExitStack() as stack:
        assert client.ask("GET", "/").status == 200
        for _ in range(3):
            stack.enter_context(Client(port)).socket.sendall(b"GET")
            with Client(port) as late:
                assert late.ask("GET", "/late").status == 503


def _replaced(clients: list[Client]) -> Client:
    """Return the client that the server disconnects first."""
    ended, _, _ = select.select([one.socket for one in clients], [], [], PATIENCE_SECONDS)
    [found] = [one for one in clients if one.socket in ended]
    with suppress(ConnectionError):
        assert found.socket.recv(1) == b""
    return found


def test_connections_without_a_request_leave_place_for_probes(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_PING_CONNECTIONS", 2)
    for name in ("_INCOMPLETE_SECONDS", "_PING_SECONDS"):
        monkeypatch.setattr(protocol, name, PATIENCE_SECONDS)
    with listening(echo, max_connections=1) as port, Client(port) as client, ExitStack() as stack:
        assert client.ask("GET", "/").status == 200
        silent = [stack.enter_context(Client(port)) for _ in range(2)]
        assert stack.enter_context(Client(port)).ask("GET", "/ping").status == 200
        refused, _, _ = select.select([one.socket for one in silent], [], [], PATIENCE_SECONDS)
        assert [one.answer().status for one in silent if one.socket in refused] == [503]


def test_silent_connection_beyond_the_limit_is_closed(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(protocol, "_PING_SECONDS", 0.05)
    with listening(echo, max_connections=1) as port, Client(port) as client:
        assert client.ask("GET", "/").status == 200
        with Client(port) as silent:
            assert silent.answer().status == 503


@pytest.mark.parametrize(
    "owed", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab"]
)
def test_new_connection_replaces_the_slowest_request(monkeypatch: pytest.MonkeyPatch, echo: Echo, owed: bytes) -> None:
    monkeypatch.setattr(protocol, "_INCOMPLETE_SECONDS", 0.0)
    with listening(echo, max_connections=3) as port, ExitStack() as stack:
        idle = stack.enter_context(Client(port))
        assert idle.ask("GET", "/").status == 200
        slowest = stack.enter_context(Client(port))
        slowest.socket.sendall(owed)
        time.sleep(0.05)
        other = stack.enter_context(Client(port))
        other.socket.sendall(b"G")
        time.sleep(0.05)
        assert stack.enter_context(Client(port)).ask("GET", "/new").status == 200
        with suppress(ConnectionError):
            assert b"200" not in rest(slowest)
        other.socket.sendall(request("GET", "/")[1:])
        assert other.answer().status == 200
        assert idle.ask("GET", "/").status == 200


def test_new_connection_replaces_the_longest_idle(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    # The limit for the interval between the last two requests, also on a loaded machine.
    monkeypatch.setattr(protocol, "_IDLE_SECONDS", 1)
    with listening(echo, max_connections=3) as port, ExitStack() as stack:
        first, second, busy = (stack.enter_context(Client(port)) for _ in range(3))
        for one in (second, first):
            assert one.ask("GET", "/").status == 200
            time.sleep(0.05)
        echo.may_answer.clear()
        busy.socket.sendall(request("GET", "/busy"))
        time.sleep(1.1)
        echo.may_answer.set()
        assert stack.enter_context(Client(port)).ask("GET", "/new").status == 200
        with suppress(ConnectionError):
            assert second.socket.recv(1) == b""
        assert first.ask("GET", "/").status == 200
        assert busy.answer().status == 200
        # None of the three connections has been idle for long.
        assert stack.enter_context(Client(port)).ask("GET", "/new").status == 503


def test_head_sent_byte_by_byte_is_408(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(protocol.HttpProtocol, "head_seconds", 0.2)
    with listening(echo) as port, Client(port) as client:
        for byte in b"POST / HTTP/1.1":
            client.socket.sendall(bytes([byte]))
        assert client.answer().status == 408
        with Client(port) as second:
            assert second.ask("GET", "/").status == 200
    assert [path for _, path, _ in echo.requests] == ["/"]


def test_slow_body_is_408(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(protocol.HttpProtocol, "body_seconds", 0.1)
    monkeypatch.setattr(protocol.HttpProtocol, "body_bytes", 1000)
    with listening(echo) as port, Client(port) as client:
        client.socket.sendall(request("POST", "/", bytes(5000))[:-1])
        assert client.answer().status == 408
    assert echo.requests == []


def test_body_that_the_server_does_not_take_is_not_too_slow(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(protocol.HttpProtocol, "body_seconds", 0.05)
    echo.may_read.clear()
    body = bytes(4_000_000)
    with listening(echo) as port, Client(port) as client:
        sender = Thread(target=client.send, args=("POST", "/", body))
        sender.start()
        assert echo.started.wait(PATIENCE_SECONDS)
        time.sleep(0.5)
        echo.may_read.set()
        sender.join()
        assert client.answer().body == body


def test_request_that_is_confirmed_before_its_function_returns_is_not_waited_for() -> None:
    echo = Echo(knows_heads=True)
    assert echo.heads is not None
    echo.heads.at_once = True
    listener = Listener(echo, "127.0.0.1", 0, options=ListenerOptions(), heads=echo.heads)
    listener.start()
    try:
        with Client(listener.port) as client:
            for _ in range(2):
                client.socket.sendall(request("POST", "/a", b"b"))
                assert client.answer().status == 200
            client.socket.sendall(request("GET", "/c"))
            assert client.answer().status == 200
            wait_until(lambda: listener.alone(0))
    finally:
        listener.stop()
    assert (echo.heads.served, len(echo.requests)) == (2, 1)


def test_known_head_is_parsed_while_the_client_does_not_read() -> None:
    echo, body = Echo(knows_heads=True), bytes(16 << 20)
    with listening(echo) as port, Client(port) as client:
        client.send("POST", "/large", body)
        assert client.socket.recv(1, socket.MSG_PEEK)
        client.socket.sendall(request("POST", "/a", b"a"))
        wait_until(lambda: len(echo.requests) == 2)
        assert [client.answer().body for _ in range(2)] == [body, b"a"]
    assert echo.heads is not None
    assert echo.heads.served == 0


def test_echo_that_knows_heads_serves_whole_requests_by_them_and_no_parts(echo: Echo, port: int) -> None:
    data = request("POST", "/a", SMUGGLED)
    with Client(port) as client:
        for part in (data, data[:-1], data[-1:] + data[:40], data[40:]):
            client.socket.sendall(part)
            if part in (data, data[40:]):
                assert client.answer().body == SMUGGLED
            else:
                time.sleep(0.01)
        assert client.answer().body == SMUGGLED
        client.socket.sendall(data + data)
        assert [client.answer().body for _ in range(2)] == [SMUGGLED] * 2
    assert echo.requests == [("POST", "/a", SMUGGLED)] * 5
    assert echo.heads is None or echo.heads.served == 1


def _gets_in(port: int) -> bool:
    with Client(port) as client:
        try:
            return client.ask("GET", "/").status == 200
        except (OSError, EOFError):  # closed before the request
            return False


def test_connections_take_half_of_few_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 128))
    assert limited_protocol(64).limit == 64
    assert caplog.text == ""
    assert limited_protocol(500).limit == 64
    assert "ulimit -n" in caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limited_protocol(5000).limit == 5000


# --- end of connections ----------------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path: Path) -> TlsSettings:
    return make_certificate(tmp_path / "certificate.pem", tmp_path / "key.pem")


def test_stop_does_not_wait_for_idle_clients_that_do_not_read(
    echo: Echo, tls: TlsSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "_IDLE_SECONDS", 0.1)
    context = ssl.create_default_context(cafile=tls.certificate)
    with ExitStack() as stack:
        with listening(echo, tls, stop_seconds=3) as port:
            for sends in (True, False):
                plain = stack.enter_context(socket.create_connection(("localhost", port), timeout=PATIENCE_SECONDS))
                client = stack.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
                if sends:
                    client.sendall(request("GET", "/", b""))
                    assert client.recv(1000).startswith(b"HTTP/1.1 200")
        # The server has closed both before the end of its wait.
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert client.recv(1000) == b""


def connect_over_tls(tls: TlsSettings, port: int) -> ssl.SSLSocket:
    bare = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    return ssl.create_default_context(cafile=str(tls.certificate)).wrap_socket(bare, server_hostname="localhost")


def test_renewed_certificate_is_shown_if_it_is_valid(
    echo: Echo, tls: TlsSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0)
    new = make_certificate(tmp_path / "new.crt", tmp_path / "new.key")
    with listening(echo, tls) as port:
        previous = served_certificate(port)
        tls.certificate.write_bytes(new.certificate.read_bytes())
        while "Until then the previous contents are in force" not in caplog.text:
            assert served_certificate(port) == previous
        assert served_certificate(port) == previous
        tls.key.write_bytes(new.key.read_bytes())
        while (found := served_certificate(port)) == previous:
            pass
    assert found == new.certificate.read_bytes().strip()
    assert caplog.text.count("Until then") == 1


def test_private_key_that_others_may_read_is_rejected(echo: Echo, tls: TlsSettings) -> None:
    tls.key.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"server\.tls\.key "), listening(echo, tls):
        raise AssertionError


def test_server_continues_after_a_closed_tls_connection(
    echo: Echo, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(echo, tls) as port:
        for _ in range(2):
            with connect_over_tls(tls, port) as connection:
                connection.sendall(request("POST", "/a", b"a", UPGRADE))
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert caplog.text == ""


def test_unfinished_handshake_gives_its_place_to_the_next(
    echo: Echo, tls: TlsSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread, "_HANDSHAKES", 3)
    with listening(echo, tls) as port, ExitStack() as stack:
        silent = [stack.enter_context(Client(port)) for _ in range(4)]
        assert rest(silent[0]) == b""
        with connect_over_tls(tls, port) as connection:
            connection.sendall(request("GET", "/a"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert rest(silent[1]) == b""
        silent[2].socket.sendall(request("GET", "/b"))
        with suppress(ConnectionError):
            assert b"200" not in rest(silent[2])
        assert select.select([silent[3].socket], [], [], 0) == ([], [], [])
    assert [path for _, path, _ in echo.requests] == ["/a"]
    assert caplog.text == ""


# --- responses -------------------------------------------------------------------------------------------------------


class RecordingTransport:
    """The transport of a connection, which records each written piece, and None for a close."""

    def __init__(self, transport: asyncio.Transport | None = None, *, closed: bool = False) -> None:
        self._transport, self._closed = transport, closed
        self.pieces: list[bytes | None] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        self.pieces.append(None)

    def is_closing(self) -> bool:
        return self._closed


HEAD, BODY = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 is what this body is about"
LARGE = bytes(protocol._JOINED_BYTES + 1)


@pytest.mark.parametrize(
    ("data", "written"),
    [
        ([HEAD, b"", None], [HEAD, None]),
        ([HEAD, BODY, BODY, b"", BODY], [HEAD + BODY, BODY, b"", BODY]),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, BODY], [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + BODY]),
        ([HEAD, LARGE, BODY], [HEAD, LARGE, BODY]),
        ([HEAD, None], [HEAD, None]),
    ],
    ids=["no body", "pieces", "interim", "large", "cut short"],
)
def test_head_is_written_with_the_first_piece(data: list[bytes | None], written: list[bytes | None]) -> None:
    transport = RecordingTransport()
    joining = protocol._Joining(transport)  # type: ignore[arg-type]
    for piece in data:
        joining.close() if piece is None else joining.write(piece)
    assert transport.pieces == written


def test_head_is_not_written_to_a_closed_connection() -> None:
    transport = RecordingTransport(closed=True)
    joining = protocol._Joining(transport)  # type: ignore[arg-type]
    joining.write(HEAD)
    joining.close()
    assert transport.pieces == [None]


def test_nonsense_in_a_body_after_the_head_ends_the_answer() -> None:
    class EarlyEcho(Echo):
        """An application that starts its response before it has received the body."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            self.started.set()
            while (await receive())["type"] != "http.disconnect":
                pass

    early = EarlyEcho()
    with listening(early) as port, Client(port) as client:
        client.socket.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert early.started.wait(PATIENCE_SECONDS)
        client.socket.sendall(b"no chunk\r\n")
        assert rest(client).startswith(b"HTTP/1.1 200 OK")


def test_disconnect_ends_the_request_before_a_pipelined_request(caplog: pytest.LogCaptureFixture) -> None:
    class LateEcho(Echo):
        """An application that responds after its client has disconnected."""

        ended = Event()

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self.started.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            await respond(send, 200, b"late")
            self.ended.set()

    waiting = LateEcho()
    with listening(waiting) as port:
        with Client(port) as client:
            client.socket.sendall(request("GET", "/first") + request("GET", "/second"))
            assert waiting.started.wait(PATIENCE_SECONDS)
            # Reset the connection, because a client that only closes its half still gets its responses.
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert waiting.ended.wait(PATIENCE_SECONDS)
    assert caplog.text == ""


@pytest.mark.parametrize("body", [b"", b"body", LARGE], ids=["none", "small", "large"])
@pytest.mark.parametrize("method", ["POST", "HEAD"])
def test_response_on_a_persistent_connection_is_complete(port: int, method: str, body: bytes) -> None:
    with Client(port) as client:
        for _ in range(2):
            client.send(method, "/", body)
            found = client.answer(head=method == "HEAD")
            assert (found.status, found.body) == (200, b"" if method == "HEAD" else body)


def test_small_answer_is_written_once(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    seen: list[RecordingTransport] = []
    joining = protocol._Joining

    def record_transport(transport: asyncio.Transport) -> object:
        seen.append(RecordingTransport(transport))
        return joining(seen[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(protocol, "_Joining", record_transport)
    with Client(port) as client:
        assert client.ask("POST", "/", b"body").body == b"body"
    ((piece,),) = (transport.pieces for transport in seen)
    assert piece is not None
    assert piece.endswith(b"\r\n\r\nbody")
