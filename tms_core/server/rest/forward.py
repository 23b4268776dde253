"""Forwarding: a server that does not lead forwards requests to the leader, and returns its responses unchanged.

Bodies pass in pieces in both directions, and the next piece is read after the last one was sent. Therefore a request of
any size takes little memory, and a slow client slows down only itself. Tokens pass unchanged; the leader checks
permissions.

If the leader does not respond, the status tells whether it may have executed the request: **503** with ``Retry-After``
if nothing was sent, **502** if it may have. Requests to a leader that has lost the leadership are abandoned, too;
otherwise a client would wait as long as that process is suspended.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tms_core.errors import Unanswered, Unavailable
from tms_core.security.tls import ClientTls
from tms_core.server.ha.leadership import LOOK_SECONDS, Leadership
from tms_core.server.ha.slot_assignment import Slots
from tms_core.server.rest.body import Disconnected

#: Marks a request that was passed on: it is never passed on again.
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
#: The timeouts for a connection to the leader, and for the next piece of its response, in seconds. The leader repeats a
#: slow batch of HBase within that.
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 120.0
#: The most idle connections to the leader, and their lifetime in seconds, which is shorter than the leader's.
_IDLE_CONNECTIONS, _IDLE_SECONDS = 100, 30.0
_TIMEOUT = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS).as_dict()
#: Nothing was sent when one of these comes.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)

Headers = list[tuple[bytes, bytes]]


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing: a placeholder for the handlers of other servers."""


#: The route under which forwarded requests are counted.
_ROUTE = Route("/{path:path}", _never, name="forwarded")


class Forwarder:
    """Passes requests on whose topic this server does not lead."""

    def __init__(self, slots: Slots, ca_file: Path | None = None, certificate_name: str = "") -> None:
        self._slots = slots
        self._extensions = {"timeout": _TIMEOUT} | ({"sni_hostname": certificate_name} if certificate_name else {})
        # At the start, because in the event loop an unusable file would only be logged.
        self._trusted = ClientTls("server.leader.", ca_file)
        self._context: ssl.SSLContext | None = None
        self._transport: httpx2.AsyncHTTPTransport
        self._opened: AsyncExitStack | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application that handles requests of this server's slots itself."""

        async def forwarding(scope: Scope, receive: Receive, send: Send) -> None:
            leadership = self._slots.of(_topic(scope["path"]))
            if leadership.leads or not scope["path"].startswith(_PATHS):
                await app(scope, receive, send)
            else:
                scope["route"] = _ROUTE
                await self._forward(leadership, scope, receive, send)

        return forwarding

    def living(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose connections to the leader live as long as its event loop (ASGI's lifespan)."""

        async def alive(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                await app(scope, receive, send)
                return
            await receive()
            async with AsyncExitStack() as self._opened:
                await self._current(self._opened)
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})

        return alive

    async def _current(self, opened: AsyncExitStack) -> httpx2.AsyncHTTPTransport:
        """Return the connections that trust the authorities in force; requests under way keep theirs."""
        context = self._trusted.context()
        if context is not self._context:
            limits = httpx2.Limits(
                max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS, keepalive_expiry=_IDLE_SECONDS
            )
            self._context = context
            self._transport = httpx2.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)
            await opened.enter_async_context(self._transport)
        return self._transport

    async def _forward(self, leadership: Leadership, scope: Scope, receive: Receive, send: Send) -> None:
        leader = _address(leadership)
        if not leader or self._opened is None or any(name == FORWARDED for name, _ in scope["headers"]):
            raise _unavailable("No server leads at the moment.")
        passage = _ForwardedRequest(scope, receive, send, self._extensions)
        transport = await self._current(self._opened)
        passing = asyncio.ensure_future(passage.run(transport, leader))
        disconnect, leader_changed = (
            asyncio.ensure_future(passage.wait_for_disconnect()),
            asyncio.ensure_future(_leader_changed(leadership, leader)),
        )
        try:
            await asyncio.wait({passing, disconnect, leader_changed}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
            elif disconnect.done():
                raise Disconnected
            else:
                await _end(passing)
                raise _unanswered("The server that led no longer leads.")
        finally:
            await _end(passing, disconnect, leader_changed)


def _topic(path: str) -> bytes:
    """Return the key prefix of the topic in a path; empty: the path has no topic."""
    # /v1/namespaces/{namespace}/topics/{topic}…
    parts = path.split("/", 6)
    return f"{parts[3]}:{parts[5]}:".encode("utf-8", "replace") if len(parts) > 5 else b""


def _address(leadership: Leadership) -> str:
    leader = leadership.leader
    return leader.address if leader is not None else ""


async def _leader_changed(leadership: Leadership, leader: str) -> None:
    """Return when another server leads."""
    while _address(leadership) == leader:
        await asyncio.sleep(LOOK_SECONDS)


class _ForwardedRequest:
    """One request on its way to the leader and its answer on the way back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, extensions: dict[str, Any]) -> None:
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
            response = await transport.handle_async_request(self._request(leader))
            try:
                await self._pass_on(response)
            finally:
                await response.aclose()
        except _NOT_SENT:
            raise _unavailable("The server that leads cannot be reached.") from None
        except httpx2.TransportError as error:
            raise _unanswered(f"The server that leads did not answer: {error!r}.") from error

    async def wait_for_disconnect(self) -> None:
        """Return when the client has disconnected after its request was complete."""
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
            headers=[host, *_lasting(scope["headers"]), (FORWARDED, b"1")],
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

    async def _pass_on(self, response: httpx2.Response) -> None:
        headers = _lasting(response.headers.raw)
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for piece in response.aiter_raw():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def _lasting(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return headers without those of the connection."""
    found = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in found if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in found if name not in _ONE_HOP and name not in named]


def _unavailable(reason: str) -> Unavailable:
    return Unavailable(reason, "Try again in a few seconds.")


def _unanswered(reason: str) -> Unanswered:
    return Unanswered(reason, "It is not known whether that server carried out the request.")


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancel what still runs, and return when it is over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
