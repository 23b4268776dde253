"""One connection: uvicorn's HTTP/1.1, protected against attacks that uvicorn does not handle.

* **Protocol upgrades** (``Upgrade: h2c``, which Java's HttpClient and ``curl --http2`` send with their first request)
  are ignored, as RFC 9110 permits. uvicorn's parser would treat the upgrade as accepted, and parse the body as another
  request (request smuggling). Therefore a new parser reads the request again without its ``Upgrade`` header.
* **Silent connections** are closed. uvicorn has a timeout only for connections that have got a response.
* **Slow clients**: the head of a request has a deadline, and the body a minimum rate. Both apply only while the server
  is ready to read. A client may read its responses slowly.
* **The number of connections is limited**, because a few hundred idle connections would use all file descriptors,
  which the store needs as well. At the limit, the server disconnects the client that has left its request incomplete
  for longest, or else the client that has been idle for longest. Without such a client, the new connection may only
  request ``/ping``, so that a supervisor does not restart a busy server. Another request of a principal with fewer
  connections disconnects a client of the principal with most connections; all others get 503.
* **Heads are limited in size**, and so is the data after a body; trailers do not count as headers.
* **Half-closed connections**: a client that closes its half gets responses to all complete requests, except over TLS.
* **The head of a response is sent with the first piece of its body**, while uvicorn would write both separately.
* **A known head is not parsed again.** The application may register a function that serves requests with the same head
  (:func:`know`). The function gets a request if its head is identical except for the digits of :data:`SEQUENCE`, its
  body has the same size, and no other data is pending on the connection. Therefore no request can be hidden in another
  request. Requests that the function declines, and requests that fail, pass through parser and application.

This module overrides methods of uvicorn's protocol, so a new version of uvicorn must pass
``tests/server/test_protocol.py``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import resource
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tms_core.errors import code_of_status
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.web import problem

Serve: TypeAlias = "Callable[[HttpProtocol, bytes, bytes], bool]"
Headers: TypeAlias = "Iterable[tuple[bytes, bytes]]"

logger = get_logger(__name__)

#: The maximum size of a head, and of data that is neither head nor body, in bytes.
_MAX_HEAD_BYTES = 64 << 10
#: The keys in a request's state of the function that closes its connection, and of the function that checks whether its
#: client is still connected.
_ABORT, _PROBE = "abort", "probe"
#: The keys of the function that registers the request's head, and of the error of the function that served the head.
_KNOW, _FAILURE = "know", "failure"
#: The maximum size of a known head, and of the body after it, in bytes.
_KNOWN_HEAD_BYTES, KNOWN_BODY_BYTES = 2 << 10, 64 << 10
#: The header with the number of a producer's request. It differs in each request, so known heads ignore its digits.
SEQUENCE = b"x-tms-sequence"
_NUMBER = re.compile(rb"\r\n%b: *([0-9]{1,19})\r\n" % SEQUENCE, re.IGNORECASE)
_BUSY = b"There are too many connections (server.max_connections)."
#: The maximum number of replaced connections whose clients still wait for a response.
_LEAVING_CONNECTIONS = 16
#: The number of additional connections that may only request /ping.
_PING_CONNECTIONS = 16
#: The timeout for the request of such a connection, in seconds.
_PING_SECONDS = 2.0
_PING = b"/ping"
_HEAD_END = b"\r\n\r\n"
#: The start of data that precedes a response ("100 Continue").
_INTERIM = b"HTTP/1.1 1"
#: The maximum size of two writes that are joined by copying, in bytes; up to this size, a copy is faster than a write.
_JOINED_BYTES = 128 << 10
#: The time for which a request must have been incomplete before another connection may replace it, in seconds.
_INCOMPLETE_SECONDS = 1.0
#: The time for which a connection must have been idle before another connection may replace it, in seconds: longer than
#: the pause between two requests of an active client.
_IDLE_SECONDS = 5.0


def connection_limit(max_connections: int) -> int:
    """Return the limit of connections: at most half of the process's file descriptors, because the store needs some."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections if files == resource.RLIM_INFINITY else min(max_connections, max(1, files // 2))


def limited_protocol(
    max_connections: int, heads: Heads | None = None, identify: Callable[[Headers], str | None] | None = None
) -> type[HttpProtocol]:
    """Return the protocol class of a server with :func:`connection_limit`.

    Args:
        heads: a cache of known heads; None: every request is parsed.
        identify: identifies principals, which share the connections; None: clients are not authenticated.
    """
    limit = connection_limit(max_connections)
    if limit < max_connections:
        logger.warning(
            "the server accepts %d connections instead of %d, half of its file descriptors (ulimit -n)",
            limit,
            max_connections,
        )
    attributes: dict[str, object] = {"limit": limit, "seldom": RateLimitedLogger(logger), "heads": heads}
    if identify is not None:
        attributes["identify"] = staticmethod(identify)
    return type("BoundedProtocol", (HttpProtocol,), attributes)


def abort_of(scope: Scope) -> Callable[[], None]:
    """Return a function that closes the connection of a request immediately."""
    abort: Callable[[], None] = scope["state"][_ABORT]
    return abort


def probe_of(scope: Scope) -> Callable[[], None]:
    """Return a function that detects a disconnected client of a half-closed connection; call it before the response.

    Until the server sends something, a half-closed connection and a disconnected client look the same.
    """
    probe: Callable[[], None] = scope["state"].get(_PROBE, _no_probe)
    return probe


def _no_probe() -> None:
    """Do nothing: the connection cannot be probed."""


def know(scope: Scope, serve: Serve) -> None:
    """Register a function that serves later requests with the head of this request, if the head is cacheable.

    Args:
        serve: receives the connection, the digits of :data:`SEQUENCE` (empty: the head has none) and the body, and
            returns whether it serves the request. If so, it calls :meth:`HttpProtocol.confirm` or
            :meth:`HttpProtocol.fail` later, in the event loop. It must not block.
    """
    if _KNOW in scope["state"]:
        scope["state"][_KNOW](serve)


def failure_of(scope: Scope) -> BaseException | None:
    """Return the error of the function that served a request by its head; None: no error."""
    error: BaseException | None = scope["state"].get(_FAILURE)
    return error


def _without_number(head: bytes) -> tuple[bytes, bytes]:
    """Return a head with 0 as the number of the request, and the number; empty without a number."""
    found = _NUMBER.search(head)
    # A head with an empty number does not match, so the application rejects the request.
    return (head, b"") if found is None else (b"%b0%b" % (head[: found.start(1)], head[found.end(1) :]), found[1])


class KnownHead(NamedTuple):
    """A head that was parsed before.

    Attributes:
        body_bytes: the size of the body.
        serve: serves a request with this head; see :func:`know`.
    """

    body_bytes: int
    serve: Serve


class Heads(Protocol):
    """The known heads, by their bytes with 0 as the number of the request."""

    def get(self, head: bytes, /) -> KnownHead | None: ...

    def __setitem__(self, head: bytes, known: KnownHead, /) -> None: ...


class HttpProtocol(HttpToolsProtocol):
    """One connection; :func:`limited_protocol` creates the class for a server.

    Attributes:
        limit: the maximum number of connections.
        seldom: the logger for connections above the limit.
        head_seconds: the timeout of a request's head, from its first byte.
        body_seconds, body_bytes: the minimum rate of an incomplete body: bytes in this number of seconds.
        heads: the cache of known heads; None: every request is parsed.
        principal: the principal of the last request that was served by its head; None: unknown.
    """

    limit: ClassVar[int]
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
        #: The time since which a request, or the first request, is incomplete; None: no request is incomplete.
        self._owing_since: float | None = self.loop.time()
        #: The current period of the measurement of a body's rate; None: no body is arriving.
        self._stretch: _Stretch | None = None
        self._body_bytes = 0
        self._activity_at = self.loop.time()
        self._has_head_start = False
        #: The request that was passed to the application last; None: no request.
        self._running: RequestResponseCycle | None = None
        self.principal: str | None = None
        #: The request that a function is serving by its head; empty: none.
        self._served = b""
        #: The data that arrived after that request, and the error of the function.
        self._later = b""
        self._failure: BaseException | None = None

    @staticmethod
    def identify(_: Headers) -> str | None:
        """Return the principal of a request with these headers; None: unknown."""
        return None

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit and not self._replace_connection():
            text = "%d connections are open, the maximum (server.max_connections); further connections are rejected"
            self.seldom.log(logging.WARNING, text, self.limit)
            silent = [one for one in self.connections if isinstance(one, HttpProtocol) and one._is_silent]
            self._ping_only = True
            if len(silent) >= _PING_CONNECTIONS:
                # The first of them has had the most time for its request.
                min(silent, key=lambda one: one._activity_at)._refuse(b"503 Service Unavailable", _BUSY)
        self._wait()

    def _replace_connection(self) -> bool:
        """Disconnect the client with the longest incomplete request, or else the longest idle client, if one exists."""
        others = [one for one in self._others if not (one._cut_off or one.flow.read_paused)]
        owing = [(one._owing_since + _INCOMPLETE_SECONDS, one) for one in others if one._owing_since is not None]
        idle = [(one._activity_at + _IDLE_SECONDS, one) for one in others if one._is_idle]
        for some in (owing, idle):
            since, slowest = min(some, key=itemgetter(0), default=(math.inf, self))
            if since <= self.loop.time():
                slowest._cut_off = True
                slowest.transport.abort()
                return True
        return False

    def _take_place(self) -> bool:
        """Take a free place, or else the place of a client of the principal with most connections.

        Only an authenticated client may do the latter, and only if that principal has two connections more. Clients
        without a valid token count as one principal. A client with a running request gets its response first, because
        the request may be executed already; few connections at a time may exceed the limit for this reason.
        """
        others = self._others
        present = [one for one in others if not one._cut_off]
        if len(present) >= self.limit:
            own = self.identify(self.headers)
            if own is None or len(others) - len(present) >= _LEAVING_CONNECTIONS:
                return False
            owned: defaultdict[str | None, list[HttpProtocol]] = defaultdict(list)
            for one in present:
                owned[one._owner].append(one)
            most = max(owned.values(), key=len)
            if len(most) < len(owned[own]) + 2:
                return False
            chosen = min(most, key=lambda one: (not one._is_idle, one._activity_at))
            chosen._cut_off = True
            if chosen._is_idle:
                chosen.transport.abort()
            else:
                chosen.shutdown()
            self.principal = own
        self._ping_only = False
        return True

    @property
    def _others(self) -> list[HttpProtocol]:
        """Return the other connections with a place. A connection above the limit, which only probes, has no place."""
        connections = [one for one in self.connections if isinstance(one, HttpProtocol)]
        return [one for one in connections if one is not self and not one._ping_only]

    @property
    def _is_silent(self) -> bool:
        """Return whether this connection is above the limit, and its first request is incomplete."""
        return self._ping_only and not (self._head_is_whole or self.transport.is_closing())

    @property
    def _owner(self) -> str | None:
        """Return the principal of the last request; None: it has no valid token."""
        scope: Mapping[str, Any] = {} if self._running is None else self._running.scope
        principal: str | None = scope.get("principal", self.principal)
        return principal

    @property
    def _is_idle(self) -> bool:
        """Return whether all requests are answered, and the client has read the responses."""
        cycle = self._last
        answered = (cycle is None or cycle.response_complete) and not (self._served or self.pipeline)
        return answered and self._owing_since is None and not self.transport.get_write_buffer_size()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open until all complete requests are answered."""
        if self.scheme == "https":
            return False
        if not self._served:
            if self.pipeline and self.cycle.more_body:
                # The rest of this request will not arrive, but the requests before it are complete.
                self.pipeline.popleft()
                self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
            if not self._last_awaits_response():
                return False
            self.cycle.keep_alive = False
        self._half_closed = True
        return True

    def shutdown(self) -> None:
        if self._served:
            self._half_closed = True  # closes the connection after the response
        elif self._is_slow_to_close:
            self.transport.abort()
        else:
            super().shutdown()

    @property
    def _is_slow_to_close(self) -> bool:
        """Return whether the connection is closing, and only TLS waits for an idle client.

        A client that does not read while it is idle, such as a connection pool, never completes the close.
        """
        is_silent = self.loop.time() - self._activity_at >= _IDLE_SECONDS
        return is_silent and self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def cancel(self) -> None:
        """Close the connection when a stop times out; the interface of uvicorn's tasks."""
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
            # The server does not read at present, so the client is not late.
            self._activity_at = now
            if self._owing_since is not None:
                self._owing_since = now
            if self._stretch is not None:
                self._stretch = _Stretch(now, self._body_bytes, paused=True)
            self._wait()
        elif self._is_silent:
            self._end(b"503 Service Unavailable", _BUSY)
        elif now - self._activity_at >= self.timeout_keep_alive:
            super().timeout_keep_alive_handler()
        elif self._has_head_start and now >= self._head_deadline:
            self._end(b"408 Request Timeout", b"The head of the request did not arrive in time.")
        elif self._stretch is not None and self._is_too_slow(self._stretch, now):
            self._end(b"408 Request Timeout", b"The body of the request arrives too slowly.")
        else:
            self._wait()

    def on_response_complete(self) -> None:
        self._activity_at = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        if (running := self._running) is not None and not running.response_complete:
            # uvicorn tells only the last request, but an earlier pipelined request may be running.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_too_slow(self, stretch: _Stretch, now: float) -> bool:
        """Return whether too little of a body arrived in a complete period; then start the next period."""
        if now < stretch.since + self.body_seconds:
            return False
        received = self._body_bytes - stretch.bytes
        self._stretch = _Stretch(now, self._body_bytes, paused=self.flow.read_paused)
        return received < self.body_bytes and not stretch.paused

    def _wait(self) -> None:
        """Schedule the next check of the timeouts."""
        self._unset_keepalive_if_required()
        now = self.loop.time()
        due = self._activity_at + self.timeout_keep_alive
        if self._is_silent:
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

    def _awaits_response(self) -> bool:
        """Return whether all received requests are complete, and the last request has no complete response."""
        return self._last_awaits_response() and self.cycle.scope is self.scope

    def _last_awaits_response(self) -> bool:
        """Return whether the last request with a complete head is complete and has no complete response."""
        cycle = self._last
        return cycle is not None and not (cycle.more_body or cycle.response_complete)

    @property
    def _last(self) -> RequestResponseCycle | None:
        """Return the last request with a complete head."""
        return self.cycle  # None at first, despite uvicorn's declaration

    def _refuse(self, status: bytes, reason: bytes) -> None:
        """Send an error response, and close the connection."""
        code = code_of_status(int(status[:3])).encode()
        head = b"content-type: %b\r\n%b: %b\r\ncontent-length: %d\r\nconnection: close"
        head %= (problem.TEXT, problem.CODE, code, len(reason))
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, reason))
        self.transport.close()

    # -- incoming data -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._served:
            # Keep the data until the served request has its response.
            self._later += data
            self.flow.pause_reading()
        elif (heads := self.heads) is None or not self._is_between():
            self._receive(data)
        elif not self._serve(heads, data):
            before = self._body_bytes
            self._receive(data)
            self._offer(heads, data, self._body_bytes - before)

    def _is_between(self) -> bool:
        """Return whether all requests are answered, no byte of the next has arrived, and no special case applies."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not (cycle.response_complete and cycle.keep_alive):
            return False
        return not (self._has_head_start or self._stretch or self._ping_only or self.flow.write_paused)

    def _serve(self, heads: Heads, data: bytes) -> bool:
        """Call the function of a known head; return whether it serves the request."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        head, number = _without_number(data[:end])
        known = heads.get(head)
        if known is None or len(data) - end != known.body_bytes:
            return False
        # Add it to uvicorn's tasks, so that a stop of the server waits for it; before the call, which may already
        # confirm the request.
        self._served = data
        task: Any = self
        self.tasks.add(task)
        self._activity_at, self._owing_since = self.loop.time(), None
        if known.serve(self, number, data[end:]):
            return True
        self._end_serving()
        return False

    def confirm(self) -> None:
        """Respond 200 without a body to the request that a function is serving."""
        self._end_serving()
        if self.transport.is_closing():
            return
        # The same bytes as uvicorn would write.
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
        """Hand the request that a function is serving to the application, which raises this error and responds."""
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
        """Let the application register a head, if the data is exactly one complete request."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        if not (0 < body_bytes <= KNOWN_BODY_BYTES and end <= _KNOWN_HEAD_BYTES and len(data) == end + body_bytes):
            return
        if self._awaits_response() and self.cycle.keep_alive and not self.expect_100_continue:
            head, number = _without_number(data[:end])
            # The parser must have found the same number; it differs if the header occurs twice or in an unusual form.
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
        if self._awaits_response():
            return
        # The request is incomplete.
        self._senseless_bytes = 0 if self._in_body else self._senseless_bytes + len(data)
        if self._senseless_bytes > _MAX_HEAD_BYTES:
            self._end(b"431 Request Header Fields Too Large", b"The head of the request is too long.")
        else:
            self._wait()

    def _end(self, status: bytes = b"400 Bad Request", reason: bytes = b"This is not an HTTP request.") -> None:
        """Stop reading, and send an error if that cannot be mistaken for the response of a running request."""
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
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
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
        if self._ping_only and self.url.partition(b"?")[0] != _PING and not self._take_place():
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
        self.headers = []  # collects trailers, which are ignored

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._stretch = self._owing_since = None
            super().on_message_complete()


class _Joining:
    """A transport that joins the head of one response with the first piece of its body, to save a write."""

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
    """A period for which the rate of a body is measured.

    Attributes:
        since: the start of the period.
        bytes: the bytes that arrived before the period.
        paused: whether the server did not read at the start of the period.
    """

    since: float
    bytes: int
    paused: bool
