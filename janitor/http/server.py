"""An HTTP server in a thread of its own, inside a process that has other things to do.

The socket is opened by whoever starts the server, in his thread, so that a port in use is an error he gets, and the
port is known before anything runs. The server's thread is a daemon: nothing that hangs in it keeps the process from
ending. Signals stay with the process: uvicorn installs handlers in the main thread only.
"""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from tms_core.errors import ConfigurationError

#: How long answers under way may take when the server stops, in seconds; they are drawn from memory.
STOP_SECONDS = 2

#: How many connections may wait to be accepted.
BACKLOG = 128

_CAUSES = {
    errno.EADDRINUSE: (
        "janitor.http.port is {port}, and another program listens there already.",
        "Stop it (another janitor?), or set janitor.http.port to a free port; 0 takes any.",
    ),
    errno.EACCES: (
        "janitor.http.port is {port}, and this user may not open it.",
        "Set janitor.http.port to one above 1023.",
    ),
}


class HttpServer:
    """Serves an application until it is stopped.

    Args:
        app: what is served.
        host: the address to listen on; a name is resolved, and its first address taken.
        port: the port; 0: a free one, which :attr:`port` tells once it is started.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self.port = port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it, without a slash at the end."""
        host = "localhost" if self._host in ("", "0.0.0.0", "::") else self._host  # noqa: S104 it is compared with
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> None:
        """Listen; returns when requests are answered.

        Raises:
            ConfigurationError: the address or port cannot be had.
        """
        listener = self._listen()
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http", daemon=True)
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            listener.close()
            raise ConfigurationError(f"nothing can be served on {self.url}.", "The log says why.")

    def stop(self) -> None:
        """Answer what is under way and close the port; without effect on a server that does not run."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS + 1)
        self._server = self._thread = None

    def _listen(self) -> socket.socket:
        try:
            [(family, _, _, _, address), *_] = socket.getaddrinfo(
                self._host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            cause, hint = _CAUSES.get(
                error.errno or 0,
                (f"janitor.http.host is {self._host}, which cannot be listened on: {error.strerror}.", ""),
            )
            hint = hint or "Set janitor.http.host to an address of this machine, or 127.0.0.1."
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
