"""Publishes with a known request head: the same responses and rows as fully parsed publishes."""

from __future__ import annotations

import gzip
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import HOUR, NOW_MS, Call, watch
from tests.kit.avro import block, publish_body
from tests.server.client import AVRO, JSON, Client, TopicClient
from tests.server.conftest import Serving, serving
from tests.server.identities import JwtIdentities, gate_of
from tests.support import PATIENCE_SECONDS, is_listening, raising, wait_until
from tms_core.clock import ManualClock
from tms_core.errors import Forbidden, StoreError, TmsError, Unavailable
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.messaging.service import MessagingService
from tms_core.server.auth.gate import Need, Rules
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.server.codec.avro import AvroCodec
from tms_core.server.codec.bodies import PublishRequest
from tms_core.tables.base import MESSAGES, MessageValue, read_all
from tms_core.topic import TopicId
from tms_core.transaction.model import TX_PER_MS
from tms_core.web import listener as listener_module
from tms_core.web.protocol import Heads, HttpProtocol

TOPICS = "/v1/namespaces/default/topics"
#: The only header that differs between the two servers.
_DATE = re.compile(rb"date: [^\r]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")
_numbers = count()


class Connection:
    """A connection that sends and returns raw bytes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def shut(self) -> None:
        """Shut down the sending side of the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close both directions of the connection at once, as if the client dies."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def answer(self) -> bytes:
        """Return the bytes of the next response without its date; empty at the end of the connection."""
        while (stop := self._stop()) is None:
            more = self._socket.recv(65536)
            if not more:
                return self._came
            self._came += more
        found, self._came = self._came[:stop], self._came[stop:]
        return _DATE.sub(b"", found)

    def _stop(self) -> int | None:
        end = self._came.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._came, 0, end)
        stop = end + int(length[1]) if length else end
        return stop if end >= 4 and stop <= len(self._came) else None


def request(method: str, path: str, body: bytes = b"", *lines: str, version: str = "1.1") -> bytes:
    is_chunked = any("transfer-encoding" in line.lower() for line in lines)
    length = [] if is_chunked else [f"content-length: {len(body)}"]
    head = "\r\n".join([f"{method} {path} HTTP/{version}", *lines, *length])
    return f"{head}\r\n\r\n".encode() + body


def publishing(topic: str, body: bytes, kind: str = AVRO, *lines: str) -> bytes:
    return request("POST", f"{TOPICS}/{topic}/publish", body, "Host: localhost", f"Content-Type: {kind}", *lines)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the requests that were served by their heads."""
    found: list[bytes] = []
    begin = HttpProtocol._serve

    def record_request(self: HttpProtocol, heads: Heads, data: bytes) -> bool:
        if begin(self, heads, data):
            found.append(data)
            return True
        return False

    monkeypatch.setattr(HttpProtocol, "_serve", record_request)
    return found


# --- both directions -------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A request of a stream.

    Attributes:
        make: returns the request for a topic.
        cuts: the places at which the request is cut, as fractions of its length.
        waits: whether the client waits for all responses before the next request.
    """

    make: Callable[[str], bytes]
    cuts: list[float]
    waits: bool


payloads = st.lists(st.sampled_from([b"", b"a", b"b" * 100, b"c" * 9000, b"DELETE / HTTP/1.1\r\n\r\n"]), max_size=3)
#: Bodies that are not valid.
odd_bodies = st.sampled_from(
    [b"", b"\x02\x02", b"\x00\x0e" + block([b"a"]) + b"\0", b"\x02\x02\x01\0", publish_body(b"a") + b"x"]
)
json_bodies = st.sampled_from(
    [
        {"messages": ["a"]},
        {"messages": ["a", "b"], "ttlSeconds": 60},
        {"messages": ["a"], "transactionWritePointer": NOW_MS * TX_PER_MS},
        {"messages": []},
        {"messages": 1},
    ]
)
lines = st.sampled_from(
    [
        (),
        (),
        ("Connection: keep-alive",),
        ("X-Trace: 1",),
        ("X-TMS-TTL-Seconds: 60",),
        ("X-TMS-TTL-Seconds: none",),
        ("Host: localhost",),
        ("Origin: http://other.example",),
        ("Content-Encoding: gzip",),
        ("Accept: application/json",),
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    ]
)


def _avro_publish(messages: Sequence[bytes], more: tuple[str, ...]) -> Callable[[str], bytes]:
    return lambda topic: publishing(topic, publish_body(*messages), AVRO, *more)


def _odd_publish(body: bytes, more: tuple[str, ...]) -> Callable[[str], bytes]:
    return lambda topic: publishing(topic, body, AVRO, *more)


def _json_publish(body: dict[str, object], more: tuple[str, ...]) -> Callable[[str], bytes]:
    return lambda topic: publishing(topic, json.dumps(body).encode(), JSON, *more)


def _zipped(messages: Sequence[bytes]) -> Callable[[str], bytes]:
    return lambda topic: publishing(
        topic, gzip.compress(publish_body(*messages), mtime=0), AVRO, "Content-Encoding: gzip"
    )


def _chunked(body: bytes) -> Callable[[str], bytes]:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return lambda topic: publishing(topic, chunks, AVRO, "Transfer-Encoding: chunked")


def _numbered_publish(
    messages: Sequence[bytes], line: str, more: tuple[str, ...] = (), generation: int = NOW_MS
) -> Callable[[str], bytes]:
    """Return a request of the producer of a topic; the line contains its sequence number."""
    return lambda topic: publishing(
        topic,
        publish_body(*messages),
        AVRO,
        f"X-TMS-Producer: default:{topic.removesuffix('x')}/p",
        f"X-TMS-Generation: {generation}",
        line,
        *more,
    )


def _registration(instance: int) -> Callable[[str], bytes]:
    body = json.dumps({"instance": f"{instance:032x}"}).encode()
    return lambda topic: request(
        "POST", f"{TOPICS}/{topic}/producers/p", body, "Host: localhost", f"Content-Type: {JSON}"
    )


def _on_topic(method: str, properties: dict[str, str] | None, suffix: str = "") -> Callable[[str], bytes]:
    body = b"" if properties is None else json.dumps(properties).encode()
    return lambda topic: request(method, f"{TOPICS}/{topic}{suffix}", body, "Host: localhost")


def _to_another_topic(make: Callable[[str], bytes]) -> Callable[[str], bytes]:
    return lambda topic: make(f"{topic}x")


#: The header of a sequence number, as clients go_on send it.
numbers = st.one_of(
    st.integers(1, 12).map(lambda number: f"X-TMS-Sequence: {number}"),
    st.sampled_from(
        [
            "x-tms-sequence: 3",
            "X-TMS-Sequence:4",
            "X-TMS-Sequence: 5 ",
            "X-TMS-Sequence:\t6",
            "X-TMS-Sequence: 07",
            "X-TMS-Sequence: -1",
            "X-TMS-Sequence: 99999999999999999999",
            "X-TMS-Sequence: 8\r\nX-TMS-Sequence: 9",
            "X-TMS-Sequence: 9\r\nx-tms-sequence:\t8",
            "X-TMS-Sequence: ",
            "X-TMS-Sequences: 9",
        ]
    ),
)
numbered = st.builds(
    _numbered_publish,
    st.sampled_from([[b"a"], [b"a"], [b"a", b"b"], []]),
    numbers,
    st.one_of(st.just(()), lines),
    st.sampled_from([NOW_MS, NOW_MS, NOW_MS, NOW_MS + 1]),
)
publishes = st.one_of(
    st.builds(_avro_publish, payloads, lines),
    st.builds(_avro_publish, payloads, st.just(())),
    st.builds(_odd_publish, odd_bodies, lines),
    st.builds(_json_publish, json_bodies, lines),
    st.builds(_zipped, payloads),
    st.builds(_chunked, st.sampled_from([publish_body(b"a"), publish_body()])),
)
changes = st.one_of(
    st.just(_on_topic("DELETE", None)),
    st.just(_on_topic("PUT", {})),
    st.just(_on_topic("GET", None)),
    st.just(_on_topic("PUT", {"transactions": "required"}, "/properties")),
    st.just(_on_topic("PUT", {"ttl": "60"}, "/properties")),
    st.just(_on_topic("PUT", {"partitions": "2"}, "/properties")),
    st.just(_on_topic("GET", None, "/nothing")),
    st.just(_registration(2)),
)
makes = st.one_of(publishes, publishes, publishes, changes, st.builds(_to_another_topic, publishes))
#: Publishes that the server recognizes by their heads from the second time on.
usual = st.builds(
    _avro_publish, payloads.filter(bool), st.sampled_from([(), ("Connection: keep-alive",), ("X-Trace: 1",)])
)
# A stream repeats few requests, most of them uncut and alone, so that heads are repeated.
streams = st.tuples(usual, st.lists(makes, min_size=1, max_size=4)).flatmap(
    lambda pool: st.lists(
        st.builds(
            Step,
            st.one_of(st.just(pool[0]), st.sampled_from(pool[1]), numbered),
            st.one_of(st.just([]), st.just([]), st.just([]), st.lists(st.floats(0, 1), max_size=3)),
            st.sampled_from([True, True, True, False]),
        ),
        min_size=2,
        max_size=12,
    )
)
#: The last request of a connection. No other request is pending, so the response does not depend on time.
lasts = st.sampled_from(
    [
        b"",
        b"nonsense\r\n\r\n",
        b"\r\n",
        publishing("{}", publish_body(b"a"), AVRO, "Connection: close"),
        publishing("{}", publish_body(b"a"), AVRO).replace(b"1.1", b"1.0", 1),
        publishing("{}", publish_body(b"a"), AVRO, "Content-Length: 1"),
        _numbered_publish([b"a"], "X-TMS-Sequence: 9\r\n 1")("{}"),
        publishing("{}", publish_body(b"a"), AVRO, "Transfer-Encoding: chunked", "Content-Length: 4"),
    ]
)


@pytest.fixture(scope="module")
def both() -> Iterator[list[Serving]]:
    """Run a server that knows heads, and a server that parses all requests; one clock makes their rows equal."""
    clock = ManualClock(NOW_MS)
    with (
        serving(clock=clock, loop_writes=True) as knowing,
        serving(clock=clock, loop_writes=True, knows_heads=False) as parsing,
    ):
        yield [knowing, parsing]


def played(server: Serving, topic: str, stream: Sequence[Step], last: bytes) -> list[bytes]:
    """Return the answers to a stream of requests on one connection."""
    answers, owed = [], 0
    with Connection(server.port) as connection:
        for first in (_on_topic("PUT", {}), _registration(1)):
            connection.send(first(topic))
            answers.append(connection.answer())
        for step in stream:
            data, owed = step.make(topic), owed + 1
            places = [0, *sorted(round(cut * len(data)) for cut in step.cuts), len(data)]
            for start, stop in pairwise(places):
                connection.send(data[start:stop])
            if step.waits or step is stream[-1]:
                answers += [connection.answer() for _ in range(owed)]
                owed = 0
        if last:
            connection.send(last.replace(b"{}", topic.encode()))
        connection.shut()
        while answer := connection.answer():
            answers.append(answer)
    return answers


def stored(server: Serving, topic: str) -> tuple[list[tuple[bytes, MessageValue]], list[tuple[bytes, bytes]]]:
    start = f"default:{topic}".encode()
    rows = read_all(server.store.message, MESSAGES, start, start + b"\xff").items
    return list(rows), [row for row in server.store.metadata.rows() if row[0].startswith(start)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(streams, lasts)
def test_answers_and_rows_are_the_same_both_ways(both: list[Serving], stream: list[Step], last: bytes) -> None:
    topic = f"any{next(_numbers)}"
    knowing, parsing = ((played(server, topic, stream, last), stored(server, topic)) for server in both)
    assert knowing == parsing


# --- requests that are served by their head --------------------------------------------------------------------------


@contextmanager
def open_topic(server: Serving) -> Iterator[tuple[Connection, str]]:
    """Create a topic; yield a connection and the name of the topic."""
    topic = f"t{next(_numbers)}"
    with Connection(server.port) as connection:
        assert ask(connection, _on_topic("PUT", {})(topic)) == 200
        yield connection, topic


def wait_until_read(server: Serving) -> None:
    """Wait until the server has read all bytes that were sent before."""
    with Connection(server.port) as connection:
        assert ask(connection, request("GET", "/ping", b"", "Host: localhost")) == 200


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def ask(connection: Connection, data: bytes) -> int:
    connection.send(data)
    return status(connection.answer())


@pytest.mark.parametrize(
    "make",
    [
        _avro_publish([b"a"], ()),
        _avro_publish([b"a", b"b" * 9000], ("Connection: keep-alive", "X-Trace: 1")),
        _json_publish({"messages": ["a"]}, ()),
    ],
    ids=["avro", "two messages", "json"],
)
def test_publish_with_a_head_that_was_served_before_is_not_parsed(
    both: list[Serving], served: list[bytes], make: Callable[[str], bytes]
) -> None:
    with open_topic(both[0]) as (connection, topic):
        data = make(topic)
        for requests in range(3):
            assert len(served) == max(0, requests - 1)
            connection.send(data)
            assert connection.answer() == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        with Connection(both[0].port) as another:
            assert ask(another, data) == 200
        assert served == [data] * 3


@pytest.mark.parametrize(
    "make",
    [
        _avro_publish([b"a"], ("X-TMS-TTL-Seconds: 60",)),
        _json_publish({"messages": ["a"], "ttlSeconds": 60}, ()),
        _json_publish({"messages": ["a"], "transactionWritePointer": NOW_MS * TX_PER_MS}, ()),
        _avro_publish([b"a" * (64 << 10)], ()),
        _avro_publish([b"a"], ("X-Trace: " + "a" * 2048,)),
        _avro_publish([b"a"], ("Expect: 100-continue",)),
        _odd_publish(b"\x02\x02", ()),
        _zipped([b"a"]),
        _chunked(publish_body(b"a")),
    ],
    ids=["ttl", "ttl in json", "transaction", "large", "long head", "expect", "not avro", "gzip", "chunks"],
)
def test_publish_that_is_unusual_is_parsed_each_time(
    both: list[Serving], served: list[bytes], make: Callable[[str], bytes]
) -> None:
    with open_topic(both[0]) as (connection, topic):
        found = set()
        for _ in range(3):
            connection.send(make(topic))
            answer = connection.answer()
            if status(answer) == 100:
                answer = connection.answer()
            found.add(status(answer))
        assert len(found) == 1
    assert served == []


def test_request_inside_a_body_of_a_known_head_is_never_executed(both: list[Serving], served: list[bytes]) -> None:
    with open_topic(both[0]) as (connection, topic):
        inside = _on_topic("DELETE", None)(topic)
        data = publishing(topic, publish_body(inside))
        for _ in range(2):
            assert ask(connection, data) == 200
        assert served == [data]
        for part in (data + data, data[:-1], data[-1:], data):
            connection.send(part)
        assert [status(connection.answer()) for _ in range(4)] == [200] * 4
        # The same for a request inside a head that starts in the segment of another body.
        unknown = publishing(topic, publish_body(b"a"), AVRO, "X-Trace: 1")
        assert ask(connection, unknown + b"GET /ping HTTP/1.1\r\nX-Trace: ") == 200
        connection.send(data)
        assert connection.answer().endswith(b"OK.")
        # The same for a request in a body that arrives after the rejection of its request.
        assert ask(connection, publishing(topic, b"-" + data, "text/plain")[: -len(data)]) == 400
        connection.send(data)
        wait_until_read(both[0])
        connection.send(request("GET", "/ping", b"", "Host: localhost"))
        assert connection.answer().endswith(b"OK.")
        head, body = data[: -len(publish_body(inside))], publish_body(inside)
        # The body has exactly the length in the head.
        connection.send(head + body[:10])
        connection.send(body[10:] + inside)
        assert [status(connection.answer()) for _ in range(2)] == [200, 200]
        assert ask(connection, _on_topic("GET", None)(topic)) == 404


def test_publish_in_a_transaction_with_a_known_head_is_parsed(both: list[Serving], served: list[bytes]) -> None:
    inside = json.dumps({"messages": ["a"], "transactionWritePointer": NOW_MS * TX_PER_MS})
    outside = json.dumps({"messages": ["a"]}).ljust(len(inside))
    with open_topic(both[0]) as (connection, topic):
        for _ in range(2):
            assert ask(connection, publishing(topic, outside.encode(), JSON)) == 200
        connection.send(publishing(topic, inside.encode(), JSON))
        assert b"rollbackRange" in connection.answer()
    assert len(served) == 1


def test_plain_body_with_the_head_of_a_compressed_one_is_rejected(both: list[Serving]) -> None:
    zipped = gzip.compress(publish_body(b"a"), mtime=0)
    plain = publish_body(bytes(len(zipped) - len(publish_body(b""))))
    with open_topic(both[0]) as (connection, topic):
        found = [ask(connection, publishing(topic, body, AVRO, "Content-Encoding: gzip")) for body in (zipped, plain)]
    assert (found, len(plain)) == ([200, 400], len(zipped))


def test_publish_that_closes_its_connection_is_parsed_each_time(both: list[Serving], served: list[bytes]) -> None:
    with open_topic(both[0]) as (_, topic):
        for _ in range(3):
            with Connection(both[0].port) as connection:
                connection.send(publishing(topic, publish_body(b"a"), AVRO, "Connection: close"))
                assert b"connection: close" in connection.answer()
    assert served == []


def test_heads_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch, served: list[bytes]) -> None:
    monkeypatch.setattr("tests.server.conftest.KNOWN_HEADS", 2)
    with serving() as server, open_topic(server) as (connection, topic):
        for size in (1, 2, 3, 1):
            assert ask(connection, publishing(topic, publish_body(b"a" * size))) == 200
    assert served == []


# --- checks of each request ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda jwt: jwt._clock.advance(2 * HOUR), 401),
        (lambda jwt: setattr(jwt.gate, "_rules", Rules([])), 403),
    ],
    ids=["expired token", "no permission"],
)
def test_request_with_a_known_head_is_authorized_again(
    tmp_path: Path, served: list[bytes], change: Callable[[JwtIdentities], object], code: int
) -> None:
    jwt = JwtIdentities(tmp_path)
    with serving(gate=jwt.gate) as server, Connection(server.port) as connection:
        server.service.create_topic(TopicId("default", "t"))
        data = publishing("t", publish_body(b"a"), AVRO, f"Authorization: Bearer {jwt.good('publisher')}")
        for _ in range(2):
            assert ask(connection, data) == 200
        assert served == [data]
        change(jwt)
        assert ask(connection, data) == code
        assert len(stored(server, "t")[0]) == 2


def test_quota_of_a_principal_counts_every_publish(tmp_path: Path, served: list[bytes]) -> None:
    token, file = new_token(), tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{token_line('owner', token)}\n")
    quotas = [{"principal": "owner", "bytes_per_second": 1000}]
    gate = gate_of(ManualClock(NOW_MS), kind="tokens", tokens_file=file, quotas=quotas)
    with serving(gate=gate) as server, Connection(server.port) as connection:
        server.service.create_topic(TopicId("default", "t"))
        data = publishing("t", publish_body(b"a" * 400), AVRO, f"Authorization: Bearer {token}")
        assert [ask(connection, data) for _ in range(4)] == [200, 200, 200, 429]
    assert served == []


# --- requests during another request ---------------------------------------------------------------------------------


def pause_next_write(server: Serving, topic: str, error: Exception | None = None) -> tuple[Event, Event]:
    """Pause writes to a topic with a message; return the event of a started write, and the event that releases it.

    Args:
        error: the error of released writes; None: they succeed.
    """
    started, go_on = Event(), Event()

    def wait(call: Call) -> None:
        if call.name == "message.put" and stored(server, topic)[0]:
            started.set()
            assert go_on.wait(PATIENCE_SECONDS)
            if error is not None:
                raise error

    watch(server.store, before=wait)
    return started, go_on


@pytest.fixture
def held() -> Iterator[tuple[Serving, Connection, bytes, Event]]:
    """Run a server that pauses a publish with a known head until an event is set."""
    with serving() as server, open_topic(server) as (connection, topic):
        started, go_on = pause_next_write(server, topic)
        data = publishing(topic, publish_body(b"a"))
        assert ask(connection, data) == 200
        connection.send(data)
        assert started.wait(PATIENCE_SECONDS)
        assert not server.listener.alone(0)
        yield server, connection, data, go_on
        go_on.set()


def test_later_requests_wait_their_turn(served: list[bytes], held: tuple[Serving, Connection, bytes, Event]) -> None:
    server, connection, data, go_on = held
    path = f"{TOPICS}/{data.split(b'/')[5].decode()}"
    for part in (data, request("GET", "/ping", b"", "Host: localhost"), data[:20]):
        connection.send(part)
        wait_until_read(server)
    go_on.set()
    assert [status(connection.answer()) for _ in range(3)] == [200] * 3
    assert ask(connection, data[20:]) == 200
    assert ask(connection, request("GET", path, b"", "Host: localhost")) == 200
    assert len(served) == 2
    wait_until(lambda: server.listener.alone(0))


@pytest.mark.parametrize("error", [None, Unavailable("Not now.", "Later.")])
@pytest.mark.parametrize("unfinished", [0, 20, -1])
def test_requests_before_the_close_of_a_half_after_a_served_publish_get_responses(
    held: tuple[Serving, Connection, bytes, Event],
    monkeypatch: pytest.MonkeyPatch,
    error: Unavailable | None,
    unfinished: int,
) -> None:
    _, connection, data, go_on = held
    if error is not None:
        monkeypatch.setattr(HttpProtocol, "confirm", lambda self: self.fail(error))
    connection.send(data + request("GET", "/ping", b"", "Host: localhost") + data[:unfinished])
    connection.shut()
    go_on.set()
    assert [status(connection.answer()) for _ in range(3)] == [200 if error is None else 503, 200, 200]
    assert connection.answer() == b""


def test_connection_that_was_served_by_heads_only_is_idle_and_owes_nothing(served: list[bytes]) -> None:
    with serving() as server, open_topic(server) as (connection, topic):
        data = publishing(topic, publish_body(b"a"))
        assert ask(connection, data) == 200
        with Connection(server.port) as other:
            assert ask(other, data) == 200
            assert len(served) == 1
            [found] = [one for one in open_connections(server) if one._last is None]
            assert (found._is_idle, found._owing_since) == (True, None)


def test_server_that_stops_during_a_request_responds(
    served: list[bytes], held: tuple[Serving, Connection, bytes, Event]
) -> None:
    server, connection, _, go_on = held
    [known] = open_connections(server)
    stopping = Thread(target=server.listener.stop)
    stopping.start()
    # The server stops listening first, and then marks its connections.
    wait_until(lambda: known._half_closed)
    assert not is_listening(server.port)
    go_on.set()
    assert connection.answer() == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    stopping.join()
    assert len(served) == 1


def test_publish_with_a_known_head_waits_for_the_request_before_it(served: list[bytes]) -> None:
    with serving() as server, open_topic(server) as (connection, topic):
        started, go_on = pause_next_write(server, topic)
        data = publishing(topic, publish_body(b"a"))
        assert ask(connection, data) == 200
        connection.send(publishing(topic, publish_body(b"b"), AVRO, "X-Trace: 1"))
        assert started.wait(PATIENCE_SECONDS)
        connection.send(data)
        wait_until_read(server)
        go_on.set()
        assert [status(connection.answer()) for _ in range(2)] == [200, 200]
    assert served == []


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("error", [None, Unavailable("Not now.", "Later.")])
def test_served_publish_whose_client_closes_its_half_is_answered(
    error: Unavailable | None, leaves: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving() as server, open_topic(server) as (connection, topic):
        _, go_on = pause_next_write(server, topic, error)
        data = publishing(topic, publish_body(b"a"))
        assert ask(connection, data) == 200
        connection.send(data)
        [known] = open_connections(server)
        if leaves:
            wait_until(lambda: known._served)
            connection.reset()
            wait_until(known.transport.is_closing)
            go_on.set()
            wait_until(lambda: not known._served)
        else:
            connection.shut()
            wait_until(lambda: known._half_closed)
            go_on.set()
            answer = connection.answer()
            assert (status(answer), b"connection: close" in answer) == (200 if error is None else 503, True)
            assert connection.answer() == b""
    assert capfd.readouterr().err == ""


def open_connections(server: Serving) -> list[HttpProtocol]:
    thread = server.listener._server
    assert thread is not None
    return [one for one in thread._server.server_state.connections if isinstance(one, HttpProtocol)]


def test_silence_during_a_request_does_not_close_the_connection(
    monkeypatch: pytest.MonkeyPatch, served: list[bytes]
) -> None:
    monkeypatch.setattr(listener_module, "_IDLE_SECONDS", 0.1)
    with serving() as server, open_topic(server) as (connection, topic):
        _, go_on = pause_next_write(server, topic)
        data = publishing(topic, publish_body(b"a"))
        assert ask(connection, data) == 200
        connection.send(data)
        wait_until(lambda: served)
        time.sleep(0.4)
        go_on.set()
        assert status(connection.answer()) == 200
        # After the response, the silence closes the connection.
        assert connection.answer() == b""


@pytest.mark.parametrize(
    ("error", "code"), [(StoreError("It failed.", "Look."), 500), (Unavailable("Not now.", "Later."), 503)]
)
def test_failed_write_gets_the_same_response_and_is_not_repeated(
    served: list[bytes], error: TmsError, code: int
) -> None:
    answers = []
    writes, failing = list[Call](), Event()

    def fail(call: Call) -> None:
        if call.name == "message.put":
            writes.append(call)
            if failing.is_set():
                raise error

    for knows_heads in (True, False):
        writes.clear()
        with serving(knows_heads=knows_heads) as server, open_topic(server) as (connection, topic):
            watch(server.store, before=fail)
            data = publishing(topic, publish_body(b"a"))
            assert ask(connection, data) == 200
            failing.set()
            connection.send(data)
            answers.append(connection.answer())
            failing.clear()
            assert ask(connection, data) == 200
        assert len(writes) == 3
    assert answers[0] == answers[1]
    assert status(answers[0]) == code

    assert len(served) == 2


def test_check_that_fails_unexpectedly_gets_500_and_no_other_publish_fails(
    monkeypatch: pytest.MonkeyPatch, served: list[bytes], held: tuple[Serving, Connection, bytes, Event]
) -> None:
    server, connection, data, go_on = held
    broken = data.replace(b"a\0", b"b\0")
    read = AvroCodec.read_publish

    def fail(codec: AvroCodec, body: bytes) -> PublishRequest:
        if body in broken:
            raise RuntimeError("a defect of the server")
        return read(codec, body)

    monkeypatch.setattr(AvroCodec, "read_publish", fail)
    with Connection(server.port) as first, Connection(server.port) as second:
        for other in (first, second):
            other.send(data)
        wait_until_read(server)
        first.send(broken)
        wait_until_read(server)
        go_on.set()
        assert [status(first.answer()) for _ in range(2)] == [200, 500]
        assert status(second.answer()) == 200
    assert status(connection.answer()) == 200
    assert served == [data] * 3
    assert len(server.store.message.read(MESSAGES, b"", b"\xff", 10).items) == 4


def test_error_after_acceptance_is_500_and_final(monkeypatch: pytest.MonkeyPatch, served: list[bytes]) -> None:
    submit, defects = MessagingService.submit_publish, [False, True]

    def submit_and_fail(service: MessagingService, *given: Any, **named: Any) -> object:
        answer = submit(service, *given, **named)
        if defects.pop(0):
            raise RuntimeError("a defect of the server")
        return answer

    monkeypatch.setattr(MessagingService, "submit_publish", submit_and_fail)
    with serving() as server, open_topic(server) as (connection, topic):
        data = publishing(topic, publish_body(b"a"))
        assert ask(connection, data) == 200
        assert ask(connection, data) == 500
        assert served == [data]
        wait_until(lambda: len(stored(server, topic)[0]) == 2)


@pytest.mark.parametrize("written_by", ["the loop", "a thread", "a thread that was faster"])
def test_metric_that_fails_ends_no_connection_whoever_writes(
    monkeypatch: pytest.MonkeyPatch, served: list[bytes], caplog: pytest.LogCaptureFixture, written_by: str
) -> None:
    written: PublishFuture[None] = PublishFuture()
    written.set_outcome(None)
    with serving(loop_writes=written_by == "the loop") as server, open_topic(server) as (connection, topic):
        if written_by == "a thread that was faster":
            monkeypatch.setattr(MessagingService, "submit_publish", lambda *_, **__: written)
        monkeypatch.setattr(server.metrics, "published", raising(ZeroDivisionError()))
        for _ in range(3):
            assert ask(connection, publishing(topic, publish_body(b"a"))) == 200
    assert len(served) == 2
    assert caplog.records == []


# --- producer requests -----------------------------------------------------------------------------------------------


@contextmanager
def open_producer(server: Serving) -> Iterator[tuple[Connection, str, Callable[..., int]]]:
    """Register a producer; yield a connection, a topic and a function that publishes and returns the status."""
    with open_topic(server) as (connection, topic):
        connection.send(_registration(1)(topic))
        generation = int(json.loads(connection.answer().partition(b"\r\n\r\n")[2])["generation"])

        def publish(line: str) -> int:
            return ask(connection, _numbered_publish([b"a"], line, generation=generation)(topic))

        yield connection, topic, publish


def test_requests_of_a_producer_with_any_number_are_served_by_their_head(served: list[bytes]) -> None:
    with serving() as server, open_producer(server) as (_, topic, publish):
        found = [publish(f"X-TMS-Sequence: {number}") for number in (1, 2, 2, 30, 7)]
        assert len(stored(server, topic)[0]) == 3
    assert found == [200, 200, 200, 200, 400]
    assert [data.count(b"X-TMS-Sequence") for data in served] == [1] * 4


def test_producer_with_an_empty_number_is_rejected_with_a_known_head(served: list[bytes]) -> None:
    with serving() as server, open_producer(server) as (_, topic, publish):
        assert [publish(f"X-TMS-Sequence: {number}") for number in (1, 2, "")] == [200, 200, 400]
        assert len(stored(server, topic)[0]) == 2
    assert len(served) == 1


def test_fenced_producer_is_rejected_with_a_known_head(served: list[bytes]) -> None:
    with serving() as server, open_producer(server) as (connection, topic, publish):
        assert [publish(f"X-TMS-Sequence: {number}") for number in (1, 2)] == [200, 200]
        assert ask(connection, _registration(2)(topic)) == 200
        assert publish("X-TMS-Sequence: 3") == 409
        assert len(stored(server, topic)[0]) == 2
    assert len(served) == 2


def test_response_to_a_served_publish_has_the_date(served: list[bytes]) -> None:
    with serving() as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        assert all("date" in topic.publish("a").headers for _ in range(3))
    assert len(served) == 2


def test_publish_that_is_served_by_its_head_is_counted(served: list[bytes]) -> None:
    with serving() as server, open_topic(server) as (connection, topic):
        for _ in range(3):
            assert ask(connection, publishing(topic, publish_body(b"a", b"b"))) == 200
        value = server.metrics.registry.get_sample_value
        wait_until(lambda: value("tms_requests_total", {"route": "publish", "code": "200"}) == 3)
        assert value("tms_messages_published_total") == 6
    assert len(served) == 2


def test_permission_for_the_home_of_a_producer_is_checked(tmp_path: Path, served: list[bytes]) -> None:
    jwt = JwtIdentities(tmp_path)
    bearer = f"Authorization: Bearer {jwt.good('publisher')}"
    with serving(gate=jwt.gate) as server, Connection(server.port) as connection:
        topics = [TopicId("default", name) for name in ("t", "home")]
        for topic in topics:
            server.service.create_topic(topic)
        generation = server.service.producers.register(topics[1], "p", UUID(int=1)).generation
        lines = ["X-TMS-Producer: default:home/p", f"X-TMS-Generation: {generation}", bearer]

        def publish(number: int) -> int:
            return ask(connection, publishing("t", publish_body(b"a"), AVRO, *lines, f"X-TMS-Sequence: {number}"))

        assert [publish(number) for number in (1, 2)] == [200, 200]
        require = jwt.gate.require

        def refuse(principal: str, topic: TopicId, need: Need, name: str = "") -> None:
            if (topic, name) == (topics[1], "p"):
                raise Forbidden("Not there.", "Ask.")
            require(principal, topic, need, name)

        jwt.gate.require = refuse  # type: ignore[method-assign]
        assert publish(3) == 403
    assert len(served) == 1


@pytest.mark.parametrize(
    "line",
    [
        "X-TMS-Sequence: {}\r\nX-TMS-Sequence: 90",
        "X-TMS-Sequence: {}\r\nX-Tms-Sequence:\t90",
        "X-TMS-Sequence: 90\r\nX-TMS-Sequence: {}",
        "X-TMS-Sequence:\t{}",
    ],
)
def test_head_with_several_numbers_for_the_parser_is_not_known(served: list[bytes], line: str) -> None:
    with serving() as server, open_producer(server) as (_, _, publish):
        assert [publish(line.format(number)) for number in (1, 2, 3)] == [200] * 3
    assert served == []
