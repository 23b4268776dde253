"""The HTTP server: many connections, large responses, TLS, and a stop that waits for accepted requests.

On the loopback address it rejects requests of foreign web pages. Without authentication, every program on this machine
may publish, including a browser, and a browser executes requests of web sites. A site that resolves its own name to
127.0.0.1 (DNS rebinding) would count as a page of this server; therefore the ``Host`` header must be a loopback name.
Any page may also send a form to any server; the browser then names the page in ``Origin``, which other clients do not
send.
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
from tms_core.web.protocol import Heads, bounded
from tms_core.web.thread import ThreadedServer

#: How many connections may wait to be accepted.
_BACKLOG = 1024
#: How many connections there may be, unless told otherwise.
_CONNECTIONS = 500
#: How long a connection may be idle, in seconds: longer than clients keep theirs, because a publish that meets a
#: connection just being closed is sent again by Java's, and so published twice.
_IDLE_SECONDS = 75
#: How long answers under way may take when the server stops, in seconds; longer than any one batch.
_STOP_SECONDS = 30
#: An IPv6 address in brackets or a name or IPv4 address, and a port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d+)?")


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """The figures of an HTTP server.

    Attributes:
        max_connections: how many there may be at once.
        stop_seconds: how long answers under way may take when it stops.
        lifespan: whether the application handles the start and stop of its event loop.
    """

    max_connections: int = _CONNECTIONS
    stop_seconds: int = _STOP_SECONDS
    lifespan: bool = False


class Listener(ThreadedServer):
    """Serves an application until it is stopped.

    Args:
        host, port: as of :class:`~tms_core.web.thread.ThreadedServer`.
        tls: certificate and key; None: plain HTTP.
        ending: called before it stops, to interrupt waiting requests.
        heads: where known heads are kept (:mod:`tms_core.web.protocol`); None: every request is parsed.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: TlsSettings | None = None,
        options: ListenerOptions | None = None,
        *,
        ending: Callable[[], None] | None = None,
        heads: Heads | None = None,
    ) -> None:
        options = options or ListenerOptions()
        config = uvicorn.Config(
            app,
            interface="asgi3",
            loop="uvloop",
            http=bounded(options.max_connections, heads),
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
        self._ending = ending

    def start(self) -> None:
        """Listen; returns when requests are answered.

        Raises:
            ConfigurationError: the address, the port or the certificate cannot be had.
        """
        self._load()
        super().start()

    def stop(self) -> None:
        """Interrupt waiting requests, finish running ones and close the port."""
        if self._ending is not None:
            self._ending()
        super().stop()

    def _load(self) -> None:
        """Read the certificate, before there is anything to undo."""
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
    """Return whether a request has two ``Host`` headers: a proxy may go by the other one (RFC 9112, 3.2)."""
    return [name for name, _ in scope["headers"]].count(b"host") > 1


def is_of_foreign_page(scope: Scope) -> bool:
    """Return whether a browser sends a request for a page of another server (RFC 6454, Fetch Metadata).

    A page of another port of this machine is foreign, too; an address that a user types or follows is not.
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
