"""Forwarding: a server that does not lead forwards requests to the leader, and returns its responses unchanged.

Bodies are forwarded in pieces in both directions, and a piece is read after the previous piece was sent. Therefore a
request of any size needs little memory, and a slow client slows down only itself. Tokens are forwarded unchanged; the
leader checks permissions.

If the leader does not respond, the status shows whether it may have executed the request: **503** with ``Retry-After``
if nothing was sent, otherwise **502**. Requests to a server that has lost the leadership are abandoned as well;
otherwise a client would wait as long as that server is suspended.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx2
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tms_core.errors import Unanswered, Unavailable
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.security.tls import ClientTls
from tms_core.server.ha.leadership import CHECK_SECONDS, Leadership
from tms_core.server.ha.slot_assignment import Slots
from tms_core.server.rest.body import Disconnected

#: The header of a forwarded request, which is never forwarded again.
FORWARDED = b"x-tms-forwarded"
#: Headers of one connection (RFC 9110, 7.6.1), and headers that each side sets itself.
_ONE_HOP = frozenset(
    {
        b"connection",
        b"date",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: The paths that are forwarded to the leader.
_PATHS = "/v1/"
#: The timeouts for a connection to the leader, and for the next piece of its response, in seconds; long enough for the
#: leader to retry a slow batch of HBase.
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 120.0
#: The maximum number of idle connections to the leader, and their lifetime in seconds, shorter than the leader's.
_IDLE_CONNECTIONS, _IDLE_SECONDS = 100, 30.0
_TIMEOUT = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS).as_dict()
#: The errors after which nothing was sent.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)

Headers = list[tuple[bytes, bytes]]


async def _unused(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing: the metrics need a route, but it is never called."""


#: The route of forwarded requests in the metrics.
_ROUTE = Route("/{path:path}", _unused, name="forwarded")


class Forwarder:
    """A forwarder of requests for topics of other leaders."""

    def __init__(self, slots: Slots, ca_file: Path | None = None, certificate_name: str = "") -> None:
        self._slots = slots
        self._extensions = {"timeout": _TIMEOUT} | ({"sni_hostname": certificate_name} if certificate_name else {})
        # Load the file at the start, because in the event loop an error would only be logged.
        self._trusted = ClientTls("server.leader.", ca_file)
        self._context: ssl.SSLContext | None = None
        self._transport: httpx2.AsyncHTTPTransport
        self._opened: AsyncExitStack | None = None
        self._seldom = RateLimitedLogger(get_logger(__name__))

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application that passes requests for this server's slots to ``app``, and forwards the others."""

        async def forwarding(scope: Scope, receive: Receive, send: Send) -> None:
            leadership = self._slots.of(_topic(scope["path"]))
            if leadership.leads or not scope["path"].startswith(_PATHS):
                await app(scope, receive, send)
            else:
                scope["route"] = _ROUTE
                await self._forward(leadership, scope, receive, send)

        return forwarding

    def with_lifespan(self, app: ASGIApp) -> ASGIApp:
        """Return an application that opens and closes the connections to the leader with ASGI's lifespan."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                await app(scope, receive, send)
                return
            await receive()
            async with AsyncExitStack() as self._opened:
                await self._current(self._opened)
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})

        return wrapped

    async def _current(self, opened: AsyncExitStack) -> httpx2.AsyncHTTPTransport:
        """Return a transport that trusts the current authorities; running requests keep their transport."""
        context = self._trusted.context()
        if context is not self._context:
            limits = httpx2.Limits(
                max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS, keepalive_expiry=_IDLE_SECONDS
            )
            self._context = context
            self._transport = httpx2.AsyncHTTPTransport(verify=context, limits=limits)
            await opened.enter_async_context(self._transport)
        return self._transport

    async def _forward(self, leadership: Leadership, scope: Scope, receive: Receive, send: Send) -> None:
        leader = _address(leadership)
        if not leader or self._opened is None or any(name == FORWARDED for name, _ in scope["headers"]):
            raise _unavailable("No server is the leader at the moment.")
        forwarded = _ForwardedRequest(scope, receive, send, self._extensions, self._seldom)
        transport = await self._current(self._opened)
        running = asyncio.ensure_future(forwarded.run(transport, leader))
        disconnect, leader_change = (
            asyncio.ensure_future(forwarded.wait_for_disconnect()),
            asyncio.ensure_future(_wait_for_leader_change(leadership, leader)),
        )
        try:
            await asyncio.wait({running, disconnect, leader_change}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            elif disconnect.done():
                raise Disconnected
            else:
                await _cancel(running)
                raise _unanswered("The server lost the leadership during the request.")
        finally:
            await _cancel(running, disconnect, leader_change)


def _topic(path: str) -> bytes:
    """Return the key prefix of the topic in a path; empty: the path has no topic."""
    # /v1/namespaces/{namespace}/topics/{topic}…
    parts = path.split("/", 6)
    return f"{parts[3]}:{parts[5]}:".encode("utf-8", "replace") if len(parts) > 5 else b""


def _address(leadership: Leadership) -> str:
    leader = leadership.leader
    return leader.address if leader is not None else ""


async def _wait_for_leader_change(leadership: Leadership, leader: str) -> None:
    """Return when ``leader`` is no longer the leader."""
    while _address(leadership) == leader:
        await asyncio.sleep(CHECK_SECONDS)


class _ForwardedRequest:
    """A request that is being forwarded to the leader."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, extensions: dict[str, Any], seldom: RateLimitedLogger
    ) -> None:
        self._seldom = seldom
        self._scope = scope
        self._extensions = extensions
        self._receive = receive
        self._send = send
        self._request_end = asyncio.Event()

    async def run(self, transport: httpx2.AsyncHTTPTransport, leader: str) -> None:
        """Forward a request to the leader and return its response.

        Raises:
            Disconnected: the client disconnected before its request was complete.
            Unavailable: the leader was not reached.
            Unanswered: the leader did not respond, or its response was incomplete.
        """
        try:
            async with aclosing(await transport.handle_async_request(self._request(leader))) as response:
                await self._send_to_leader(response)
        except _NOT_SENT as error:
            # Clients try again, so only the log shows a wrong address or an authority that is not trusted.
            self._seldom.log(logging.WARNING, "the leader %s cannot be reached: %s", leader, error)
            raise _unavailable("The leader cannot be reached.") from None
        except httpx2.TransportError as error:
            raise _unanswered(f"The leader did not respond: {error!r}.") from error

    async def wait_for_disconnect(self) -> None:
        """Return when the client has disconnected after its complete request."""
        await self._request_end.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _request(self, leader: str) -> httpx2.Request:
        scope = self._scope
        names = {name for name, _ in scope["headers"]}
        has_body = not names.isdisjoint({b"content-length", b"transfer-encoding"})
        if not has_body:
            self._request_end.set()
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        host = (b"host", httpx2.URL(leader).netloc)
        return httpx2.Request(
            scope["method"],
            leader,
            headers=[host, *_end_to_end(scope["headers"]), (FORWARDED, b"1")],
            content=self._body() if has_body else None,
            extensions={"target": target, **self._extensions},
        )

    async def _body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            more = message["more_body"]
            yield message["body"]
        self._request_end.set()

    async def _send_to_leader(self, response: httpx2.Response) -> None:
        headers = _end_to_end(response.headers.raw)
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for piece in response.aiter_raw():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return headers without hop-by-hop headers."""
    found = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in found if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in found if name not in _ONE_HOP and name not in named]


def _unavailable(reason: str) -> Unavailable:
    return Unavailable(reason, "Try again in a few seconds.")


def _unanswered(reason: str) -> Unanswered:
    return Unanswered(reason, "The request may have been executed. Check its effect before you repeat it.")


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and return when they have finished."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
