"""The HTTP server: many connections, large responses, TLS, and a stop that waits for accepted requests.

On a loopback address, where clients need no authentication, the server rejects cross-site requests of browsers. A site
that resolves its own name to 127.0.0.1 (DNS rebinding) would count as the same origin; therefore the ``Host`` header
must be a loopback name. Any page can send a form to any server; the browser then sends the origin of the page in
``Origin``, which other clients do not send.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import uvicorn
from starlette.types import ASGIApp, Scope

from tms_core.security.tls import ServerCertificate
from tms_core.settings.models import TlsSettings, is_loopback
from tms_core.web.protocol import Headers, Heads, limited_protocol
from tms_core.web.thread import ThreadedServer

#: The maximum number of connections that wait to be accepted.
_BACKLOG = 1024
#: The default maximum number of connections.
_CONNECTIONS = 500
#: The maximum idle time of a connection in seconds. It is longer than the idle time of clients, because Java's client
#: repeats a publish on a connection that is being closed, and then publishes twice.
_IDLE_SECONDS = 75
#: The maximum time for running requests when the server stops, in seconds; longer than a batch takes.
_STOP_SECONDS = 30
#: An IPv6 address in brackets, or a name or an IPv4 address, with an optional port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d+)?")


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """Options of an HTTP server.

    Attributes:
        max_connections: the maximum number of connections.
        stop_seconds: the maximum time for running requests when the server stops, in seconds.
        lifespan: whether the application handles the start and stop of its event loop (ASGI's lifespan).
    """

    max_connections: int = _CONNECTIONS
    stop_seconds: int = _STOP_SECONDS
    lifespan: bool = False


class Listener(ThreadedServer):
    """An HTTP server for an ASGI application.

    Args:
        host, port: see :class:`~tms_core.web.thread.ThreadedServer`.
        tls: certificate and key; None: plain HTTP.
        on_stop: called before the server stops, to interrupt waiting requests.
        heads: a cache of known heads (:mod:`tms_core.web.protocol`); None: every request is parsed.
        identify: identifies the principals of requests; None: clients are not authenticated.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: TlsSettings | None = None,
        options: ListenerOptions | None = None,
        *,
        on_stop: Callable[[], None] | None = None,
        heads: Heads | None = None,
        identify: Callable[[Headers], str | None] | None = None,
    ) -> None:
        options = options or ListenerOptions()
        config = uvicorn.Config(
            app,
            interface="asgi3",
            loop="uvloop",
            http=limited_protocol(options.max_connections, heads, identify),
            ws="none",
            lifespan="on" if options.lifespan else "off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=options.stop_seconds,
            callback_notify=self._renew,
            timeout_notify=1,
        )
        super().__init__(config, host, port, setting="server", other="another tms serve", backlog=_BACKLOG)
        self._tls = tls
        self.scheme = "https" if tls else "http"
        self._certificate: ServerCertificate | None = None
        self._on_stop = on_stop

    def start(self) -> None:
        """Start the server; return when it serves requests.

        Raises:
            ConfigurationError: the address, the port or the certificate cannot be used.
        """
        self._load()
        super().start()

    def stop(self) -> None:
        """Interrupt waiting requests, finish running requests, and close the port."""
        if self._on_stop is not None:
            self._on_stop()
        super().stop()

    def _load(self) -> None:
        """Load the certificate, before any resource is acquired."""
        self._config.load()
        if self._tls is not None:
            self._certificate = ServerCertificate("server.tls.", self._tls.certificate, self._tls.key)
            self._config.ssl = self._certificate.context

    async def _renew(self) -> None:
        if self._certificate is not None:
            self._certificate.renew()


def names_loopback(scope: Scope) -> bool:
    """Return whether a request's ``Host`` header is a loopback name."""
    return _is_loopback_header(next((value for name, value in scope["headers"] if name == b"host"), b""))


def names_two_hosts(scope: Scope) -> bool:
    """Return whether a request has several ``Host`` headers, of which a proxy may use another (RFC 9112, 3.2)."""
    return [name for name, _ in scope["headers"]].count(b"host") > 1


def is_of_foreign_page(scope: Scope) -> bool:
    """Return whether a browser sends a cross-origin request for a page (RFC 6454, Fetch Metadata).

    A page of another port of this machine has another origin. A URL that a user types or follows has no origin.
    """
    origin = host = None
    for name, value in scope["headers"]:
        if name == b"sec-fetch-site" and value in (b"same-origin", b"none"):
            return False
        if name == b"origin":
            origin = value
        elif name == b"host":
            host = value
    return origin is not None and origin != scope["scheme"].encode() + b"://" + (host or b"")


@lru_cache(maxsize=64)
def _is_loopback_header(header: bytes) -> bool:
    match = _HOST.fullmatch(header.decode("latin-1"))
    return match is not None and is_loopback(match[1] or match[2])
