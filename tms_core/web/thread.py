"""An HTTP server in a separate thread.

The caller's thread opens the socket, so that a port in use raises an error there, and the port is known before the
server runs. Signals are not affected, because uvicorn installs handlers only in the main thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sized
from contextlib import suppress
from functools import partial
from typing import Self, cast

import uvicorn

from tms_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: The interval of uvicorn's tick in seconds.
_TICK_SECONDS = 1.0
#: The interval at which a stopping server checks whether all requests are answered, in seconds.
_CLOSING_SECONDS = 0.005
#: The maximum number of concurrent TLS handshakes, their timeout, and the pause of accepting without free file
#: descriptors, in seconds.
_HANDSHAKES, _HANDSHAKE_SECONDS, _PAUSE_SECONDS = 64, 10.0, 0.1
#: The number of iterations of the event loop after which a pending connection is accepted and registered.
_TURNS = 10


class ServerThread:
    """uvicorn's server in a thread, on a listening socket.

    Args:
        listening: the socket; the server closes it.
        give_up_seconds: the maximum wait of :meth:`stop` for the thread, which then is a daemon thread; None: wait as
            long as the configuration allows for running requests.
    """

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, name: str = "http", give_up_seconds: float | None = None
    ) -> None:
        self._server = _Server(config)
        self._listening = listening
        self._give_up_seconds = give_up_seconds
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name=name, daemon=give_up_seconds is not None
        )

    @property
    def unanswered(self) -> int:
        """Return the number of received requests without a complete response."""
        return len(self._server.server_state.tasks)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop of the server; None before :meth:`start`."""
        return self._server.loop

    def start(self) -> bool:
        """Start the thread; return whether the server accepts connections."""
        # Hide uvicorn's INFO messages about each start and stop, which would fill the log of an embedding program.
        logging.getLogger("uvicorn.error").addFilter(self._is_relevant)
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            self._listening.close()
        return self._server.started

    def stop(self) -> None:
        """Finish running requests and close the socket."""
        self._server.finish()
        self._thread.join(self._give_up_seconds)
        logging.getLogger("uvicorn.error").removeFilter(self._is_relevant)

    def _is_relevant(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.thread != self._thread.ident


class ThreadedServer:
    """A server with a configuration of uvicorn in a separate thread.

    Args:
        host: the address to listen on; for a name, its first address.
        port: the port; 0: a free port, which is in :attr:`port` after the start.
        setting: the prefix of the settings of host and port, for errors: ``server``.
        other: a program that may use the port, for errors: ``another tms serve``.
        backlog: the maximum number of connections that wait to be accepted.
        give_up_seconds: see :class:`ServerThread`.

    Attributes:
        scheme: the scheme of :attr:`url`.
    """

    scheme = "http"

    def __init__(
        self,
        config: uvicorn.Config,
        host: str,
        port: int,
        *,
        setting: str,
        other: str,
        backlog: int,
        give_up_seconds: float | None = None,
    ) -> None:
        self.port = port
        self._config = config
        self._host = host
        self._setting = setting
        self._other = other
        self._backlog = backlog
        self._give_up_seconds = give_up_seconds
        self._server: ServerThread | None = None

    @property
    def url(self) -> str:
        """Return the URL for clients on this machine, without a trailing slash."""
        host = "localhost" if self._host in ("", "0.0.0.0", "::") else self._host  # noqa: S104 it is compared with
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop of the server; None: the server is not running."""
        return None if self._server is None else self._server.loop

    def alone(self, requests: int, waiting: Sized = ()) -> bool:
        """Return whether the server has no unanswered requests except a number of requests.

        Args:
            waiting: unanswered requests that do not count, because they only wait.
        """
        return self._server is not None and self._server.unanswered - len(waiting) == requests

    def start(self) -> None:
        """Start the server; return when it serves requests.

        Raises:
            ConfigurationError: the address or the port cannot be used.
        """
        listener = listen(self._host, self.port, setting=self._setting, other=self._other, backlog=self._backlog)
        self.port = listener.getsockname()[1]
        self._server = ServerThread(self._config, listener, give_up_seconds=self._give_up_seconds)
        if not self._server.start():
            raise ConfigurationError(f"The server on {self.url} cannot start.", "The log has the reason.")

    def stop(self) -> None:
        """Finish running requests, and close the port; do nothing if the server is not running."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def listen(host: str, port: int, *, setting: str, other: str, backlog: int = 1) -> socket.socket:
    """Return a listening socket; see :class:`ThreadedServer` for the arguments.

    Raises:
        ConfigurationError: the address or the port is not available.
    """
    try:
        return open_port(host, port, backlog)
    except OSError as error:
        raise _refusal(error, host, port, setting, other) from error


def open_port(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the address or the port is not available.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return socket.create_server(address[:2], family=family, backlog=backlog)


def _refusal(error: OSError, host: str, port: int, name: str, other: str) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        variable = f"TMS_{name.upper().replace('.', '__')}__PORT"
        return ConfigurationError(
            f"{name}.port is {port}, which another program or another setting uses already.",
            f"Stop that program ({other}?), or set {name}.port to a free port ({variable}=PORT; 0: any).",
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"{name}.port is {port}, and this user may not open it.", f"Set {name}.port to a port above 1023."
        )
    return ConfigurationError(
        f"{name}.host is {host}, which cannot be listened on: {error.strerror}.",
        f"Set {name}.host to an address of this machine, or 127.0.0.1.",
    )


class _Server(uvicorn.Server):
    """uvicorn's server with an event for its start or failure, an immediate stop, and bounded TLS handshakes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event = asyncio.Event()
        self._acceptors: list[_TlsAcceptor] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop; None before the start."""
        return self._loop

    def finish(self) -> None:
        """Request a stop; thread-safe."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop_event.set)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            with suppress(SystemExit):  # raised by uvicorn after it has logged a failed start
                super().run(sockets)
        finally:
            self.settled.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        config = self.config
        await super().startup([] if config.ssl else sockets)
        if config.ssl:
            kind, state = cast("Callable[..., asyncio.Protocol]", config.http_protocol_class), self.lifespan.state
            make = partial(kind, config=config, server_state=self.server_state, app_state=state)
            self._acceptors = [_TlsAcceptor(listening, config.ssl, make) for listening in sockets or []]
        self.settled.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # updates the Date header of responses
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._stop_event.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await _yield_to_loop()  # accept pending connections
        for server in self.servers:
            server.close()
        for acceptor in self._acceptors:
            await acceptor.close()
        for listening in sockets or []:
            listening.close()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._close_connections()
        except TimeoutError:
            logger.error("%d requests did not finish in time and were cancelled", len(self.server_state.tasks))
            for task in list(self.server_state.tasks):
                task.cancel()
        await self.lifespan.shutdown()

    async def _close_connections(self) -> None:
        """Close idle connections, and other connections after their responses."""
        while True:
            await _yield_to_loop()  # register connections that were just accepted
            if not (self.server_state.connections or self.server_state.tasks):
                return
            for connection in list(self.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(_CLOSING_SECONDS)


class _TlsAcceptor:
    """An acceptor of TLS connections with a limit of concurrent handshakes.

    A protocol object learns about its connection after the handshake, so it cannot limit silent clients. At the limit,
    a new client replaces the client with the longest handshake.
    """

    def __init__(self, listening: socket.socket, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]) -> None:
        self._listening = listening
        self._context = context
        self._make = make
        self._agreeing: dict[asyncio.Task[None], None] = {}
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting, and drop connections with an unfinished handshake."""
        tasks = [self._accepting, *self._agreeing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._agreeing) >= _HANDSHAKES:
                slowest = next(iter(self._agreeing))
                del self._agreeing[slowest]
                slowest.cancel()
            task = loop.create_task(self._agree(connection))
            self._agreeing[task] = None
            task.add_done_callback(lambda done: self._agreeing.pop(done, None))

    async def _agree(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client has disconnected, or does not use TLS
            await loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
            )


async def _yield_to_loop() -> None:
    """Let the event loop run ready callbacks, and the callbacks that they schedule."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
