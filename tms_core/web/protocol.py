"""One connection: uvicorn's HTTP/1.1, protected against attacks that uvicorn does not handle.

* **A proposal of another protocol** (``Upgrade: h2c``, which Java's HttpClient and ``curl --http2`` send with their
  first request) is ignored, as RFC 9110 requires. The parser assumes agreement: it skips the body and reads the
  following bytes as another request, so that it would execute a body as a request (request smuggling). Therefore a new
  parser reads such a request again, without its ``Upgrade`` header, and continues from there.
* **Silent connections** are closed. Uvicorn has a time limit only for connections that have got a response.
* **Slow clients**: a request's head has a deadline, and its body a minimum rate. Both count only while the server is
  ready to read. A client may be slow while it has a response to read.
* **The number of connections is limited**, because a few hundred idle ones would take all files that the process may
  open, including the store's. For one connection too many, the server disconnects the client that has owed the rest of
  its request for longest, or else the client that has been idle for longest. Without such a client, the new connection
  may only request ``/ping``, so that a supervisor does not restart a busy server; all other requests get 503.
* **A head is limited in size**, and so is the data after a body; trailers do not count as headers.
* **A client that closes its half after its last request** gets a response (not over TLS, which has no half-close).
* **A response's head goes with the first piece of its body**, because uvicorn would write them one after the other.
* **A known head is not parsed again.** The application may pass a function that serves requests with the same head
  (:func:`know`). The function serves a request if its head is the known one, byte for byte, except for the digits of
  :data:`SEQUENCE`. As many bytes must follow as the parser read after that head, and nothing else may be pending on the
  connection. So no request can hide in another request. Requests that the function declines, and requests that fail,
  pass parser and application.

The trade-off: this module overrides methods of uvicorn's protocol, so a new version of uvicorn must pass
``tests/server/test_protocol.py``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import resource
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tms_core.errors import code_of_status
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.web import problem

Serve: TypeAlias = "Callable[[HttpProtocol, bytes, bytes], bool]"

logger = get_logger(__name__)

#: The most bytes that a client may send before they make sense: a head, or data that is neither head nor body.
_SENSELESS_BYTES = 64 << 10
#: The keys in a request's state of the function that closes its connection, and of the function that checks whether its
#: client is still connected.
_ABORT, _PROBE = "abort", "probe"
#: The keys of the function that makes its head known, and of the error of the function that served its head.
_KNOW, _FAILURE = "know", "failure"
#: The longest head that becomes known, and the largest body after it, in bytes.
_KNOWN_HEAD_BYTES, KNOWN_BODY_BYTES = 2 << 10, 64 << 10
#: The header with the number of a producer's request. It differs in each request, so known heads do not contain it.
SEQUENCE = b"x-tms-sequence"
_NUMBER = re.compile(rb"\r\n%b: *([0-9]{1,19})\r\n" % SEQUENCE, re.IGNORECASE)
_BUSY = b"There are too many connections (server.max_connections)."
#: The number of additional connections that may only request /ping.
_PING_CONNECTIONS = 16
#: The time limit for their request, in seconds.
_PING_SECONDS = 2.0
_PING = b"/ping"
_HEAD_END = b"\r\n\r\n"
#: The start of data that precedes a response ("100 Continue").
_INTERIM = b"HTTP/1.1 1"
#: The most bytes that are copied to join two writes: copying them takes less time than another write.
_JOINED_BYTES = 128 << 10
#: How long a client must have owed the rest of its request before another connection may replace it, in seconds.
_OWED_SECONDS = 1.0
#: How long a connection with a response must have been idle, in seconds: longer than the pause between two requests of
#: a working client.
_IDLE_SECONDS = 5.0


def places(most_connections: int) -> int:
    """Return the most connections: half of the files that the process may open (``ulimit -n``), because the store
    needs files too.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most_connections if files == resource.RLIM_INFINITY else min(most_connections, max(1, files // 2))


def bounded(most_connections: int, heads: Heads | None = None) -> type[HttpProtocol]:
    """Return the protocol class of a server with at most so many connections, and no more than :func:`places`.

    Args:
        heads: the known heads, empty at first; None: every request is parsed.
    """
    most = places(most_connections)
    if most < most_connections:
        logger.warning(
            "at most %d connections are taken instead of %d: half of the files this process may open (ulimit -n)",
            most,
            most_connections,
        )
    return type("BoundedProtocol", (HttpProtocol,), {"most": most, "seldom": RateLimitedLogger(logger), "heads": heads})


def abort_of(scope: Scope) -> Callable[[], None]:
    """Return a function that closes the connection of a request at once."""
    abort: Callable[[], None] = scope["state"][_ABORT]
    return abort


def probe_of(scope: Scope) -> Callable[[], None]:
    """Return a function that closes the connection of a request if its client has disconnected; call it before the
    response starts.

    A client that has closed its half, and a client that is gone, look the same until something is sent.
    """
    probe: Callable[[], None] = scope["state"].get(_PROBE, _no_probe)
    return probe


def _no_probe() -> None:
    """Do nothing: the connection cannot be probed."""


def know(scope: Scope, serve: Serve) -> None:
    """Make a function serve later requests with the same head as this one, if the head can be recognized.

    Args:
        serve: gets the connection, the digits of :data:`SEQUENCE` (empty: the head has none) and the body, and
            returns whether it serves the request. If so, it calls :meth:`HttpProtocol.confirm` or
            :meth:`HttpProtocol.fail` later, in the event loop. It must not wait.
    """
    if _KNOW in scope["state"]:
        scope["state"][_KNOW](serve)


def failure_of(scope: Scope) -> BaseException | None:
    """Return why the function that served a request by its head has failed; None: no function did."""
    error: BaseException | None = scope["state"].get(_FAILURE)
    return error


def _without_number(head: bytes) -> tuple[bytes, bytes]:
    """Return a head with 0 as the number of its request, and the number; empty without a number."""
    found = _NUMBER.search(head)
    # A head with an empty number is another head, and its request is rejected.
    return (head, b"") if found is None else (b"%b0%b" % (head[: found.start(1)], head[found.end(1) :]), found[1])


class KnownHead(NamedTuple):
    """A head that was parsed before.

    Attributes:
        body_bytes: the size of the body after it.
        serve: serves a request with this head; see :func:`know`.
    """

    body_bytes: int
    serve: Serve


class Heads(Protocol):
    """The known heads, by their bytes with 0 as the number of the request."""

    def get(self, head: bytes, /) -> KnownHead | None: ...

    def __setitem__(self, head: bytes, known: KnownHead, /) -> None: ...


class HttpProtocol(HttpToolsProtocol):
    """One connection; :func:`bounded` makes the class that a server uses.

    Attributes:
        most: the most connections.
        seldom: logs that there are too many.
        head_seconds: the time limit of a request's head, from its first byte.
        body_seconds, body_bytes: the minimum bytes of a body within so many seconds, while more of it is expected.
        heads: the known heads; None: every request is parsed.
    """

    most: ClassVar[int]
    heads: ClassVar[Heads | None] = None
    seldom: ClassVar[RateLimitedLogger]
    head_seconds: ClassVar[float] = 20.0
    body_seconds: ClassVar[float] = 10.0
    body_bytes: ClassVar[int] = 10_000

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_body = False
        self._senseless_bytes = 0
        self._ping_only = self._turned_away = self._half_closed = self._cut_off = False
        #: The time since which the client owes the rest of a request, or its first request; None: it owes nothing.
        self._owing_since: float | None = self.loop.time()
        #: The start of the present stretch of a body, in time and bytes; None: no body is arriving.
        self._stretch: _Stretch | None = None
        self._body_bytes = 0
        self._activity_at = self.loop.time()
        self._has_head_start = False
        #: The request that a function serves by its head; empty: none.
        self._served = b""
        #: Data that arrived since then, and the error of the function.
        self._later = b""
        self._failure: BaseException | None = None

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._take_a_place():
            text = "%d connections are open, and no more are taken (server.max_connections)"
            self.seldom.log(logging.WARNING, text, self.most)
            if len(self.connections) > self.most + _PING_CONNECTIONS:
                self._refuse(b"503 Service Unavailable", _BUSY)
                return
            self._ping_only = True
        self._wait()

    def _take_a_place(self) -> bool:
        """Disconnect the client that has owed the rest of its request for longest, or is idle; return whether there
        was one.
        """
        others = [one for one in self.connections if isinstance(one, HttpProtocol) and one is not self]
        others = [one for one in others if not (one._cut_off or one.flow.read_paused)]
        owing = [(one._owing_since + _OWED_SECONDS, one) for one in others if one._owing_since is not None]
        idle = [(one._activity_at + _IDLE_SECONDS, one) for one in others if one._is_idle]
        for some in (owing, idle):
            since, slowest = min(some, key=itemgetter(0), default=(math.inf, self))
            if since <= self.loop.time():
                slowest._cut_off = True
                slowest.transport.abort()
                return True
        return False

    @property
    def _is_idle(self) -> bool:
        """Return whether all requests are answered, and the client has read the responses."""
        cycle = self._last
        answered = (cycle is None or cycle.response_complete) and not (self._served or self.pipeline)
        return answered and self._owing_since is None and not self.transport.get_write_buffer_size()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to stay until the running request is answered."""
        if self.scheme == "https" or not (self._served or self._owes()):
            return False
        self._half_closed = True
        if not self._served:
            self.cycle.keep_alive = False
        return True

    def shutdown(self) -> None:
        if self._served:
            self._half_closed = True  # its response is the last
        elif self._is_slow_to_close:
            self.transport.abort()
        else:
            super().shutdown()

    @property
    def _is_slow_to_close(self) -> bool:
        """Return whether all is sent and closed, and only TLS still waits for an idle client to close too.

        A client that does not read while it is idle, like a connection pool, never closes.
        """
        is_silent = self.loop.time() - self._activity_at >= _IDLE_SECONDS
        return is_silent and self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def cancel(self) -> None:
        """Close the connection after a timeout of its request; uvicorn's tasks have the same method."""
        self.transport.abort()

    def probe(self) -> None:
        """Check whether a client that has closed its half is still connected (RFC 9110, 15.2)."""
        if self._half_closed and not self.cycle.response_started and self.parser.get_http_version() == "1.1":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")

    def timeout_keep_alive_handler(self) -> None:
        now = self.loop.time()
        if self.transport.is_closing():
            return
        if self.flow.read_paused or self._served:
            # The server delays the other connection, not the client.
            self._activity_at = now
            if self._owing_since is not None:
                self._owing_since = now
            if self._stretch is not None:
                self._stretch = _Stretch(now, self._body_bytes, paused=True)
            self._wait()
        elif self._ping_only and not self._head_is_whole:
            self._end(b"503 Service Unavailable", _BUSY)
        elif now - self._activity_at >= self.timeout_keep_alive:
            super().timeout_keep_alive_handler()
        elif self._has_head_start and now >= self._head_deadline:
            self._end(b"408 Request Timeout", b"The head of the request did not come in time.")
        elif self._stretch is not None and self._is_too_slow(self._stretch, now):
            self._end(b"408 Request Timeout", b"The body of the request comes too slowly.")
        else:
            self._wait()

    def on_response_complete(self) -> None:
        self._activity_at = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _is_too_slow(self, stretch: _Stretch, now: float) -> bool:
        """Return whether too little of a body arrived; start the next stretch if one is complete."""
        if now < stretch.since + self.body_seconds:
            return False
        came = self._body_bytes - stretch.bytes
        self._stretch = _Stretch(now, self._body_bytes, paused=self.flow.read_paused)
        return came < self.body_bytes and not stretch.paused

    def _wait(self) -> None:
        """Schedule the next check, at the earliest time at which the client could be too late."""
        self._unset_keepalive_if_required()
        now = self.loop.time()
        due = self._activity_at + self.timeout_keep_alive
        if self._ping_only and not self._head_is_whole:
            due = min(due, self._activity_at + _PING_SECONDS)
        if self._has_head_start:
            due = min(due, self._head_deadline)
        if self._stretch is not None:
            due = min(due, self._stretch.since + self.body_seconds)
        self.timeout_keep_alive_task = self.loop.call_later(max(0.0, due - now), self.timeout_keep_alive_handler)

    @property
    def _head_deadline(self) -> float:
        return (self._owing_since or self._activity_at) + self.head_seconds

    @property
    def _head_is_whole(self) -> bool:
        """Return whether the head of the first request is complete."""
        return self._last is not None

    def _owes(self) -> bool:
        """Return whether only complete requests arrived, and the last has no response yet."""
        cycle = self._last
        return cycle is not None and cycle.scope is self.scope and not (cycle.more_body or cycle.response_complete)

    @property
    def _last(self) -> RequestResponseCycle | None:
        """Return the last request with a complete head."""
        return self.cycle  # None at first, despite uvicorn's declaration

    def _refuse(self, status: bytes, reason: bytes) -> None:
        """Send the reason and close, ignoring further data."""
        code = code_of_status(int(status[:3])).encode()
        head = b"content-type: %b\r\n%b: %b\r\ncontent-length: %d\r\nconnection: close"
        head %= (problem.TEXT, problem.CODE, code, len(reason))
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, reason))
        self.transport.close()

    # -- incoming data -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._served:
            # The served request gets its response first; nothing more is read until then.
            self._later += data
            self.flow.pause_reading()
        elif (heads := self.heads) is None or not self._is_between():
            self._receive(data)
        elif not self._serve(heads, data):
            before = self._body_bytes
            self._receive(data)
            self._offer(heads, data, self._body_bytes - before)

    def _is_between(self) -> bool:
        """Return whether the last request has a response, no byte of the next has arrived, and the state is usual."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not (cycle.response_complete and cycle.keep_alive):
            return False
        unusual = self._has_head_start or self._stretch or self._senseless_bytes or self._half_closed or self._ping_only
        return not (unusual or self.pipeline or self.flow.write_paused)

    def _serve(self, heads: Heads, data: bytes) -> bool:
        """Return whether a function serves a request by its head."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        head, number = _without_number(data[:end])
        known = heads.get(head)
        if known is None or len(data) - end != known.body_bytes:
            return False
        # Count it among the requests without a response, so that a stop of the server waits for it. Before the call: if
        # a thread has written the body by then, the call itself confirms the request.
        self._served = data
        task: Any = self
        self.tasks.add(task)
        self._activity_at, self._owing_since = self.loop.time(), None
        if known.serve(self, number, data[end:]):
            return True
        self._end_serving()
        return False

    def confirm(self) -> None:
        """Respond 200 without a body to the request that a function serves."""
        self._end_serving()
        if self.transport.is_closing():
            return
        # The same bytes as uvicorn writes.
        last = [(b"connection", b"close")] if self._half_closed else []
        headers = [*self.server_state.default_headers, (b"content-length", b"0"), *last]
        self.transport.write(STATUS_LINE[200] + b"\r\n".join(map(b": ".join, headers)) + _HEAD_END)
        self._activity_at = self.loop.time()
        if last:
            self.transport.close()
        elif self._later:
            data, self._later = self._later, b""
            self.flow.resume_reading()
            self.data_received(data)

    def fail(self, error: BaseException) -> None:
        """Let the application respond to the request that a function serves, by raising this error."""
        data, self._later = self._served + self._later, b""
        self._end_serving()
        if self.transport.is_closing():
            return
        self._failure = error
        self._receive(data)
        if self._half_closed:
            self.cycle.keep_alive = False

    def _end_serving(self) -> None:
        task: Any = self
        self.tasks.discard(task)
        self._served = b""

    def _offer(self, heads: Heads, data: bytes, body_bytes: int) -> None:
        """Let the application make a head known, if the parser has read data as one whole request."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        if not (0 < body_bytes <= KNOWN_BODY_BYTES and end <= _KNOWN_HEAD_BYTES and len(data) == end + body_bytes):
            return
        if self._owes() and self.cycle.keep_alive and not (self.pipeline or self.expect_100_continue):
            head, number = _without_number(data[:end])
            # The parser must have found the same number. It differs if the header occurs twice, or in unusual form.
            if [value for name, value in self.scope["headers"] if name == SEQUENCE] == ([number] if number else []):
                self.scope["state"][_KNOW] = lambda serve: heads.__setitem__(head, KnownHead(body_bytes, serve))

    def _receive(self, data: bytes) -> None:
        """Parse data."""
        self._unset_keepalive_if_required()
        self._in_body = False
        self._activity_at = self.loop.time()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if self._turned_away:
                self._refuse(b"503 Service Unavailable", _BUSY)
            else:
                self._end()
            return
        if self._owes():
            return
        # More data must arrive first.
        self._senseless_bytes = 0 if self._in_body else self._senseless_bytes + len(data)
        if self._senseless_bytes > _SENSELESS_BYTES:
            self._end(b"431 Request Header Fields Too Large", b"The head of the request is too long.")
        else:
            self._wait()

    def _end(self, status: bytes = b"400 Bad Request", reason: bytes = b"This is not an HTTP request.") -> None:
        """Stop reading, and send an error that no running request takes as its response."""
        cycle = self._last
        if cycle is not None and (self.pipeline or (cycle.more_body and cycle.response_started)):
            cycle.transport.close()
        elif cycle is None or cycle.more_body or cycle.response_complete:
            self._refuse(status, reason)
        else:
            cycle.keep_alive = False
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head, data = self._head(), data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
                self.parser.feed_data(head)
            else:
                return

    def _head(self) -> bytes:
        """Return the head of the request without the upgrade headers."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_head_start = True
        self._owing_since = self._activity_at

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this is not a proxy")
            return
        self._senseless_bytes = 0
        self._has_head_start = False
        self._stretch = _Stretch(self._activity_at, self._body_bytes, paused=self.flow.read_paused)
        if self._ping_only and self.url.partition(b"?")[0] != _PING:
            self._turned_away = True
            raise httptools.HttpParserError("there are too many connections")
        self.scope["state"] |= {_ABORT: self.transport.abort, _PROBE: self.probe}
        if self._failure is not None:
            self.scope["state"][_FAILURE], self._failure = self._failure, None
        super().on_headers_complete()
        if self.parser.get_method() != b"HEAD":
            self.cycle.transport = _Joining(self.transport)  # type: ignore[assignment]
        if self._ping_only:
            self.cycle.keep_alive = False
        self.headers = []  # for trailers, which are never read

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._stretch = self._owing_since = None
            super().on_message_complete()


class _Joining:
    """A transport that joins the head of one response with the first piece of its body, because two writes wake a
    client twice.

    Args:
        transport: the transport of the connection.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._has_head, self._head = False, b""

    def write(self, data: bytes) -> None:
        if not self._has_head and not data.startswith(_INTERIM):
            self._has_head, self._head = True, data
            return
        head, self._head = self._head, b""
        if len(data) > _JOINED_BYTES:
            self._transport.write(head)
            head = b""
        self._transport.write(head + data if head else data)

    def close(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Stretch(NamedTuple):
    """A period in which a body arrives.

    Attributes:
        since: its start.
        bytes: the bytes that arrived before it.
        paused: whether the server was not ready to read at its start.
    """

    since: float
    bytes: int
    paused: bool
