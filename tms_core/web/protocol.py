"""One connection: uvicorn's HTTP/1.1, safe from what uvicorn itself is not.

* **A proposal to speak another protocol** (``Upgrade: h2c``, which Java's HttpClient and ``curl --http2`` make with
  their first request) is ignored, as RFC 9110 wants it. The parser takes it for agreed upon: it skips the body and
  reads what comes next as another request, so that the body of one is carried out as the next (request smuggling). So
  such a request is read again without its ``Upgrade`` header, by a new parser, which goes on from there.
* **Connections that say nothing** end: uvicorn gives its time limit to those only that were answered before. A client
  may be as slow as it likes while it says something, or has an answer to read.
* **There is a bound on connections**, or a few hundred idle ones would take all the files that the process may open,
  and with them those the store needs. One too many is answered 503 without being read, and closed.
* **A head may not grow without end**, and nor may what follows a body; trailers do not count as headers.
* **A client that has said all and closes its half** is answered (not over TLS, which has no halves).

Traded: it overrides what uvicorn's protocol calls and keeps, so that a new version of uvicorn has to pass
``tests/server/test_protocol.py``.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

#: What a client may send before what it sends makes sense: a head, or whatever is neither head nor body.
_SENSELESS_BYTES = 64 << 10
#: How long one warning of too many connections stands for all others, in seconds.
_WARNING_SECONDS = 60
#: Under this name a request's state has what ends its connection.
_ABORT = "abort"
_BUSY = b"There are too many connections (server.max_connections)."


def bounded(most_connections: int) -> type[Protocol]:
    """The protocol of a server that has at most so many connections, and no more than half of the files that the
    process may open (``ulimit -n``): the store needs files, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most_connections if files == resource.RLIM_INFINITY else min(most_connections, max(1, files // 2))
    if most < most_connections:
        logger.warning(
            "at most %d connections are taken instead of %d: half of the files this process may open (ulimit -n)",
            most,
            most_connections,
        )
    return type("BoundedProtocol", (Protocol,), {"most": most})


def abort_of(scope: Scope) -> Callable[[], None]:
    """What ends the connection of a request at once, whatever is still to be sent."""
    abort: Callable[[], None] = scope["state"][_ABORT]
    return abort


class Protocol(HttpToolsProtocol):
    """One connection; :func:`bounded` makes the class that a server uses.

    Attributes:
        most: how many there may be.
        warn_at: before when, by the event loop's clock, it is not said again that there are too many.
    """

    most: ClassVar[int]
    warn_at: ClassVar[float] = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_body = False
        self._senseless_bytes = 0

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._warn()
            self._refuse(b"503 Service Unavailable", b"There are too many connections (server.max_connections).")
        else:
            self._wait()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to stay until what was asked is answered."""
        if self.scheme == "https" or not self._owes():
            return False
        self.cycle.keep_alive = False
        return True

    def timeout_keep_alive_handler(self) -> None:
        if self.flow.read_paused:
            self._wait()  # it is not the client who keeps the other waiting
        else:
            super().timeout_keep_alive_handler()

    def _wait(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _owes(self) -> bool:
        """Whether all that was said is whole requests, and the last has no answer yet."""
        cycle = self._last
        return cycle is not None and cycle.scope is self.scope and not (cycle.more_body or cycle.response_complete)

    @property
    def _last(self) -> RequestResponseCycle | None:
        """The last request whose head came."""
        return self.cycle  # None at first, whatever uvicorn declares

    def _warn(self) -> None:
        now, here = self.loop.time(), type(self)
        if now >= here.warn_at:
            here.warn_at = now + _WARNING_SECONDS
            logger.warning("%d connections are open, and no more are taken (server.max_connections)", self.most)

    def _refuse(self, status: bytes, reason: bytes) -> None:
        """Say why and close, whatever else was said."""
        head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close" % len(reason)
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, reason))
        self.transport.close()

    # -- what comes ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._in_body = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._end()
            return
        if self._owes():
            return
        # More has to come.
        self._senseless_bytes = 0 if self._in_body else self._senseless_bytes + len(data)
        if self._senseless_bytes > _SENSELESS_BYTES:
            self._end(b"431 Request Header Fields Too Large", b"The head of the request is too long.")
        else:
            self._wait()

    def _end(self, status: bytes = b"400 Bad Request", reason: bytes = b"This is no HTTP request.") -> None:
        """Nothing more is read, and no request that is being answered takes this for its answer."""
        cycle = self._last
        if self.pipeline or (cycle is not None and cycle.more_body and cycle.response_started):
            self.transport.close()
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
        """That of the request once more, without the proposal."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))

    # -- what the parser finds ----------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy")
            return
        self._senseless_bytes = 0
        self.scope["state"][_ABORT] = self.transport.abort
        super().on_headers_complete()
        self.headers = []  # for trailers, which nobody reads

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
