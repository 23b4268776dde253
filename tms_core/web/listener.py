"""The server's own HTTP server: many connections, large answers, TLS, and an end that waits for what was accepted."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from tms_core.errors import ConfigurationError
from tms_core.settings.models import TlsSettings
from tms_core.web.protocol import bounded
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


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """The figures of an HTTP server.

    Attributes:
        max_connections: how many there may be at once.
        stop_seconds: how long answers under way may take when it stops.
        lifespan: whether the application wants to be told when its event loop begins and ends.
    """

    max_connections: int = _CONNECTIONS
    stop_seconds: int = _STOP_SECONDS
    lifespan: bool = False


class Listener(ThreadedServer):
    """Serves an application until it is stopped.

    Args:
        app: what is served.
        host, port: as of :class:`~tms_core.web.thread.ThreadedServer`.
        tls: certificate and key; None: plain HTTP.
        options: its figures.
        ending: called before it stops, so that what waits for something ends.
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
    ) -> None:
        options = options or ListenerOptions()
        config = uvicorn.Config(
            app,
            interface="asgi3",
            loop="uvloop",
            http=bounded(options.max_connections),
            ws="none",
            lifespan="on" if options.lifespan else "off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=options.stop_seconds,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=str(tls.key) if tls else None,
        )
        super().__init__(config, host, port, setting="server", other="another tms serve", backlog=_BACKLOG)
        self._tls = tls
        self._ending = ending

    def start(self) -> None:
        """Listen; returns when requests are answered.

        Raises:
            ConfigurationError: the address, the port or the certificate cannot be had.
        """
        self._load()
        super().start()

    def stop(self) -> None:
        """Have ended what waits, answer what is under way and close the port."""
        if self._ending is not None:
            self._ending()
        super().stop()

    def _load(self) -> None:
        """Read the certificate, before there is anything to undo."""
        tls = self._tls
        if tls is None:
            self._config.load()
            return
        try:
            self._config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"server.tls: {tls.certificate} and {tls.key} cannot be used: {error}.",
                "Give a certificate chain and its private key, both PEM files.",
            ) from error
