"""An HTTP server in a thread of its own, inside a process that has other things to do.

The socket is opened by whoever starts the server, in his thread, so that a port in use is an error he gets, and the
port is known before anything runs. Signals stay with the process: uvicorn installs handlers in the main thread only.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from tms_core.errors import ConfigurationError
from tms_core.settings import TlsSettings

#: How many connections may wait to be accepted.
_BACKLOG = 1024
#: How long a connection may be idle, in seconds: longer than clients keep theirs, because a publish that meets a
#: connection just being closed is sent again by Java's, and so published twice.
_IDLE_SECONDS = 75
#: How long answers under way may take when the server stops, in seconds; longer than any one batch.
_STOP_SECONDS = 30

_CAUSES = {
    errno.EADDRINUSE: (
        "server.port is {port}, and another program listens there already.",
        "Stop it (another tms serve?), or set server.port to a free port; 0 takes any.",
    ),
    errno.EACCES: (
        "server.port is {port}, and this user may not open it.",
        "Set server.port to one above 1023.",
    ),
}


class Listener:
    """Serves an application until it is stopped.

    Args:
        app: what is served.
        host: the address to listen on; a name is resolved, and its first address taken.
        port: the port; 0: a free one, which :attr:`port` tells once it is started.
        tls: certificate and key; None: plain HTTP.
        stop_seconds: how long answers under way may take when it stops.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, tls: TlsSettings | None = None, stop_seconds: int = _STOP_SECONDS
    ) -> None:
        self.port = port
        self._host = host
        self._tls = tls
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=stop_seconds,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=str(tls.key) if tls else None,
        )
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where a client on this machine finds it, without a slash at the end."""
        host = "localhost" if self._host in ("", "0.0.0.0", "::") else self._host  # noqa: S104 it is compared with
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> None:
        """Listen; returns when requests are answered.

        Raises:
            ConfigurationError: the address, the port or the certificate cannot be had.
        """
        self._load()
        listener = self._listen()
        self.port = listener.getsockname()[1]
        self._server = _Server(self._config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http")
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            listener.close()
            raise ConfigurationError(f"Nothing can be served on {self.url}.", "The log says why.")

    def stop(self) -> None:
        """Take no more requests, answer what is under way, close; without effect on a server that does not run."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join()
        self._server = self._thread = None

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

    def _listen(self) -> socket.socket:
        try:
            [(family, _, _, _, address), *_] = socket.getaddrinfo(
                self._host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            cause, hint = _CAUSES.get(
                error.errno or 0,
                (
                    f"server.host is {self._host}, which cannot be listened on: {error.strerror}.",
                    "Set server.host to an address of this machine, or 127.0.0.1.",
                ),
            )
            raise ConfigurationError(cause.format(port=self.port), hint) from error


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it accepts, or has given up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            with suppress(SystemExit):  # is how uvicorn gives up, once it has logged why
                super().run(sockets)
        finally:
            self.settled.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()
