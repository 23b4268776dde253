"""Requests to a server that does not lead: forwarded unchanged, or rejected with a clear error."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from tests.builders import NOW_MS
from tests.kit.certificates import make_certificate
from tests.kit.servers import Contender, LeaseCell
from tests.kit.sockets import SocketServer
from tests.server.client import Client, TopicClient
from tests.server.conftest import MAX_REQUEST_BYTES, Serving, serving
from tests.support import PATIENCE_SECONDS, wait_until
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError
from tms_core.messaging.service import MessagingService
from tms_core.server.ha.slot_assignment import Slots
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest import forward
from tms_core.server.rest.app import make_app
from tms_core.server.rest.context import ServerContext
from tms_core.server.rest.forward import Forwarder
from tms_core.settings.models import TlsSettings
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.web.listener import Listener, ListenerOptions

PATH = "/v1/namespaces/default/topics/t"
#: More bytes than all buffers between two processes hold.
LARGE = 64 << 20
#: An option for which a close resets the connection, as when a client dies.
AT_ONCE = struct.pack("ii", 1, 0)


class Follower:
    """A server that does not lead, and the leader that it knows."""

    def __init__(self, stack: ExitStack, ca_file: Path | None = None, certificate_name: str = "") -> None:
        self.cell, clock = LeaseCell(), ManualClock(NOW_MS)
        self.leader, self.own = Contender(self.cell, "leader", clock), Contender(self.cell, "follower", clock)
        self.service = stack.enter_context(MessagingService(MemoryStore(), clock, side=MemorySide()))
        self.metrics = ServerMetrics(CollectorRegistry(), self.service)
        threads = stack.enter_context(ThreadPoolExecutor(2))
        context = ServerContext(self.service, threads, self.metrics, MAX_REQUEST_BYTES)
        app = make_app(context, forwarder=Forwarder(Slots([self.own.leadership]), ca_file, certificate_name))
        self.listener = Listener(app, "127.0.0.1", 0, options=ListenerOptions(stop_seconds=1, lifespan=True))
        self.listener.start()
        stack.callback(self.listener.stop)
        self.port = self.listener.port

    def follow(self, port: int, host: str = "http://127.0.0.1") -> None:
        self.leader.lease.release()
        self.leader.lease.address = f"{host}:{port}"
        self.leader.lease.acquire()
        self.own.step()

    def lead(self) -> None:
        self.leader.lease.release()
        assert self.own.step()


@pytest.fixture
def follower() -> Iterator[Follower]:
    with ExitStack() as stack:
        yield Follower(stack)


@pytest.fixture
def leader(follower: Follower) -> Iterator[Serving]:
    with serving() as server:
        follower.follow(server.port)
        yield server


@pytest.fixture
def client(follower: Follower) -> Iterator[Client]:
    with Client(follower.port) as connection:
        yield connection


@contextmanager
def scripted_leader(follower: Follower, handle: Callable[[socket.socket], object]) -> Iterator[None]:
    """Start a leader that handles each connection as the test defines."""
    with SocketServer(handle) as leader:
        follower.follow(leader.port)
        yield


def head_of(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    return received


def send_until_blocked(connection: socket.socket) -> memoryview:
    """Send a large body until the other side reads no more; return the unsent rest."""
    left = memoryview(bytes(LARGE))
    connection.settimeout(1)
    with suppress(TimeoutError):
        while left:
            left = left[connection.send(left[: 1 << 20]) :]
    connection.settimeout(PATIENCE_SECONDS)
    return left


# --- unchanged forwarding --------------------------------------------------------------------------------------------


def test_forwarded_request_gets_the_response_of_the_leader(leader: Serving, client: Client) -> None:
    topic = TopicClient(client, "t").create(ttl="60")
    topic.publish("a", "b")
    assert topic.poll() == ["a", "b"]
    with Client(leader.port) as direct:
        assert TopicClient(direct, "t").poll() == ["a", "b"]
        for method, path in (("GET", PATH), ("GET", "/v1/namespaces/default/topics"), ("GET", f"{PATH}/nothing")):
            passed, own = client.ask(method, path), direct.ask(method, path)
            assert (passed.status, passed.body) == (own.status, own.body)
            assert {**passed.headers, "date": ""} == {**own.headers, "date": ""}
    assert client.ask("DELETE", PATH).status == 200
    assert topic.post("poll").status == 404


@pytest.mark.usefixtures("leader")
def test_ping_and_metrics_are_not_forwarded(client: Client) -> None:
    TopicClient(client, "t").create()
    assert client.ask("GET", "/ping").text == "OK."

    # A forwarded request is counted when both connections are free, possibly after its response.
    def metrics() -> str:
        return client.ask("GET", "/metrics").text

    wait_until(
        lambda: 'tms_requests_total{code="200",route="forwarded"} 1.0' in metrics() and 'route="ping"' in metrics()
    )


@pytest.mark.usefixtures("leader")
def test_request_with_a_foreign_host_is_not_forwarded(client: Client) -> None:
    assert client.ask("GET", PATH, host="evil.example").status == 400


# --- headers ---------------------------------------------------------------------------------------------------------


def test_forwarded_request_keeps_the_token_and_drops_hop_headers(follower: Follower, client: Client) -> None:
    heads = []

    def handle(connection: socket.socket) -> None:
        heads.append(head_of(connection))
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close, x-mine\r\nx-mine: 1\r\nx-kept: 2\r\n"
            b"date: never\r\n\r\nok"
        )

    with scripted_leader(follower, handle):
        answer = client.ask(
            "POST",
            f"{PATH}/p%75blish?a=%2F",
            b"body",
            authorization="Bearer t",
            connection="x-gone",
            x_gone="1",
            te="trailers",
            trailer="x",
            keep_alive="5",
            upgrade="h2c",
            expect="nothing",
        )
    assert (answer.body, answer.headers["x-kept"]) == (b"ok", "2")
    assert {"x-mine", "connection"}.isdisjoint(answer.headers)
    assert answer.headers["date"] != "never"
    line, *headers = heads[0].lower().partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert line == f"POST {PATH}/p%75blish?a=%2F HTTP/1.1".lower().encode()
    names = [header.partition(b":")[0] for header in headers]
    assert {b"authorization: bearer t", b"content-length: 4", b"x-tms-forwarded: 1"} <= set(headers)
    dropped = {b"x-gone", b"te", b"trailer", b"keep-alive", b"upgrade", b"expect", b"transfer-encoding"}
    assert (dropped | {b"accept-encoding"}).isdisjoint(names)
    assert names.count(b"host") == 1
    assert names.count(b"connection") <= 1


# --- large bodies ----------------------------------------------------------------------------------------------------


def test_forward_holds_a_client_back_while_the_leader_does_not_read(follower: Follower, client: Client) -> None:
    reads, read = Event(), [0]

    def handle(connection: socket.socket) -> None:
        read[0] = len(head_of(connection).partition(b"\r\n\r\n")[2])
        assert reads.wait(PATIENCE_SECONDS)
        while read[0] < LARGE:
            read[0] += len(connection.recv(1 << 20))
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    with scripted_leader(follower, handle):
        head = f"POST {PATH}/publish HTTP/1.1\r\nhost: localhost\r\ncontent-length: {LARGE}\r\n\r\n"
        client.socket.sendall(head.encode())
        left = send_until_blocked(client.socket)
        assert len(left) > LARGE // 2
        reads.set()
        client.socket.sendall(left)
        assert client.answer().status == 200
    assert read[0] == LARGE


def test_forward_holds_the_leader_back_while_the_client_does_not_read(follower: Follower, client: Client) -> None:
    held, sent = Event(), [0]

    def handle(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % LARGE)
        left = send_until_blocked(connection)
        sent[0] = LARGE - len(left)
        held.set()
        connection.sendall(left)

    # Otherwise the kernel may buffer the whole response: a part for the client, and a part for the follower.
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    with scripted_leader(follower, handle):
        client.send("POST", f"{PATH}/poll")
        assert held.wait(PATIENCE_SECONDS)
        assert 0 < sent[0] < LARGE
        answer = client.answer()
    assert (answer.status, len(answer.body)) == (200, LARGE)


# --- failed forwarding -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("leader")
def test_forward_of_a_body_in_chunks_is_complete(client: Client) -> None:
    topic = TopicClient(client, "t").create()
    head = f"POST {PATH}/publish HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client.socket.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    for piece in (b'{"messages"', b': ["in chunks"]}', b""):
        client.socket.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
    assert client.answer().status == 200
    assert topic.poll() == ["in chunks"]


@pytest.mark.usefixtures("leader")
def test_forward_of_an_answer_in_gzip_leaves_it_packed(client: Client) -> None:
    topic = TopicClient(client, "t").create()
    topic.publish("a" * 10_000)
    answer = topic.post("poll", accept_encoding="gzip")
    assert json.loads(answer.unzipped)[0]["payload"] == "a" * 10_000
    assert len(answer.body) < 1000


def test_forward_without_a_leader_is_503_with_retry_after(client: Client) -> None:
    answer = client.ask("GET", PATH)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["x-tms-error"] == "TMS-UNAVAILABLE"


@pytest.mark.usefixtures("leader")
def test_forwarded_request_is_not_forwarded_again(client: Client) -> None:
    assert (client.ask("GET", PATH).status, client.ask("GET", PATH, x_tms_forwarded="1").status) == (404, 503)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\ncontent-le", b"nonsense\r\n\r\n"])
def test_forward_to_a_leader_that_dies_is_unanswered(follower: Follower, client: Client, data: bytes) -> None:
    def handle(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(data)

    with scripted_leader(follower, handle):
        answer = client.ask("POST", f"{PATH}/publish", b"body")
    assert (answer.status, answer.headers["x-tms-error"]) == (502, "TMS-UNANSWERED")


def test_forward_to_a_leader_that_is_silent_is_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_TIMEOUT", httpx2.Timeout(0.1, connect=PATIENCE_SECONDS).as_dict())
    over, ends = Event(), list[bool]()
    with ExitStack() as stack:
        follower = Follower(stack)
        behave = scripted_leader(follower, lambda _: ends.append(over.wait(PATIENCE_SECONDS)))
        with behave, Client(follower.port) as client:
            assert client.ask("POST", f"{PATH}/publish", b"body").status == 502
            over.set()
    # The leader was silent until the response; otherwise its closed connection would cause the same response.
    assert ends == [True]


@pytest.mark.parametrize("length", [b"content-length: 20", b"transfer-encoding: chunked"])
def test_forward_of_a_truncated_response_is_truncated(follower: Follower, client: Client, length: bytes) -> None:
    def handle(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n5\r\nhello\r\n" % length)

    with scripted_leader(follower, handle):
        client.send("POST", f"{PATH}/poll")
        with pytest.raises(EOFError):
            client.answer()


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello"])
def test_forward_to_a_stopped_leader_ends_when_another_leads(follower: Follower, client: Client, data: bytes) -> None:
    received, over = Event(), Event()

    def handle(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(data)
        received.set()
        assert over.wait(PATIENCE_SECONDS)

    with scripted_leader(follower, handle):
        client.send("POST", f"{PATH}/publish", b"body")
        assert received.wait(PATIENCE_SECONDS)
        follower.lead()
        if data:
            with pytest.raises(EOFError):
                client.answer()
        else:
            answer = client.answer()
            assert (answer.status, answer.headers["x-tms-error"]) == (502, "TMS-UNANSWERED")
        over.set()


def test_forward_without_a_body_leaves_the_leader_with_the_client(follower: Follower) -> None:
    heads, left = [], Event()

    def handle(connection: socket.socket) -> None:
        heads.append(head_of(connection).lower())
        received.set()
        connection.settimeout(PATIENCE_SECONDS)
        while connection.recv(65536):
            pass
        left.set()

    received = Event()
    with scripted_leader(follower, handle):
        with Client(follower.port) as client:
            client.socket.sendall(f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            assert received.wait(PATIENCE_SECONDS)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        assert left.wait(PATIENCE_SECONDS)
    assert b"content-length" not in heads[0]
    assert b"transfer-encoding" not in heads[0]


@pytest.mark.parametrize(
    ("framing", "body"),
    [("content-length: 0", b""), ("content-length: 13", b"abc"), ("transfer-encoding: chunked", b"3\r\nabc\r\n")],
    ids=["response", "request", "request in chunks"],
)
def test_forward_leaves_the_leader_with_the_client(follower: Follower, framing: str, body: bytes) -> None:
    left, received, forwarded = Event(), Event(), bytearray()

    def handle(connection: socket.socket) -> None:
        forwarded.extend(head_of(connection))
        received.set()
        connection.settimeout(PATIENCE_SECONDS)
        while piece := connection.recv(65536):
            forwarded.extend(piece)
        left.set()

    with scripted_leader(follower, handle):
        with Client(follower.port) as client:
            head = f"POST {PATH}/publish HTTP/1.1\r\nhost: localhost\r\n{framing}\r\n\r\n"
            client.socket.sendall(head.encode() + body)
            assert received.wait(PATIENCE_SECONDS)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        assert left.wait(PATIENCE_SECONDS)
    # Otherwise the leader would execute a request whose body is incomplete.
    assert not forwarded.partition(b"\r\n\r\n")[2].endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("trusts", "host", "name", "status"),
    [
        (True, "localhost", "", 404),
        (False, "localhost", "", 503),
        (True, "127.0.0.1", "", 503),
        (True, "127.0.0.1", "localhost", 404),
        (True, "localhost", "elsewhere", 503),
        (False, "127.0.0.1", "localhost", 503),
    ],
)
def test_forward_over_tls_checks_the_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trusts: bool, host: str, name: str, status: int
) -> None:
    tls, other = (make_certificate(tmp_path / f"{name}.pem", tmp_path / f"{name}.key") for name in ("one", "other"))
    with ExitStack() as stack:
        client = follow_over_tls(stack, tls, (tls if trusts else other).certificate, host, name)
        assert [client.ask("GET", PATH).status for _ in range(2)] == [status, status]
    assert caplog.text.count("certificate verify failed") == (status == 503)


def follow_over_tls(
    stack: ExitStack, tls: TlsSettings, ca_file: Path, host: str = "localhost", name: str = ""
) -> Client:
    """Return a client of a server whose leader shows a certificate."""
    follower = Follower(stack, ca_file, name)
    context = ServerContext(
        follower.service, stack.enter_context(ThreadPoolExecutor(1)), follower.metrics, MAX_REQUEST_BYTES
    )
    leader = Listener(make_app(context), "127.0.0.1", 0, tls)
    leader.start()
    stack.callback(leader.stop)
    follower.follow(leader.port, f"https://{host}")
    return stack.enter_context(Client(follower.port))


def test_forwarder_with_a_new_ca_file_trusts_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0)
    tls, other = (make_certificate(tmp_path / f"{name}.pem", tmp_path / f"{name}.key") for name in ("one", "other"))
    trusted, distrusted = tls.certificate.read_bytes(), other.certificate.read_bytes()
    ca_file = tmp_path / "authorities.pem"
    statuses = []
    with ExitStack() as stack:
        ca_file.write_bytes(distrusted)
        client = follow_over_tls(stack, tls, ca_file)
        for contents in (distrusted, trusted, b"half", distrusted):
            ca_file.write_bytes(contents)
            statuses.append(client.ask("GET", PATH).status)
    assert statuses == [503, 404, 404, 503]


def test_forwarder_with_a_bad_ca_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"server\.leader\.ca_file"):
        Forwarder(Slots([]), tmp_path / "nothing.pem")
