"""The control socket's server, in the process that holds a store.

LevelDB lets only one process open a store, so other commands send their calls to that process. It listens on a socket
in its state folder, which only its own user may use. A separate thread handles each call, so a long audit does not
delay the status. The server rejects clients above a small limit, which suffices for an operator and a timer. The socket
also serves the status page and its API.

No client can stop the janitor or delay its work: requests are checked, and unread responses are dropped. Queries use a
separate engine with the read-only interface of the store, so they cannot change data and do not wait for a sweep
(invariant S5). Decisions use the sweeping engine, which executes one operation at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from janitor.control import api, wire
from janitor.control.api import ControlBackend
from janitor.report import EXPECTED
from tms_core.errors import BUSY, ArchiveError, StateError, StopRequested, StoreBusy, StoreError, TmsError
from tms_core.logs import audit
from tms_core.topic import TopicId
from tms_core.web.protocol import HttpProtocol, abort_of
from tms_core.web.thread import ServerThread

#: The maximum number of concurrent calls.
MAX_CLIENTS = 16
#: The time limit for a client to complete its request, in seconds.
REQUEST_SECONDS = 10
#: The time limit for a client to read its response, in seconds.
ANSWER_SECONDS = 30.0
#: The maximum interval between two lines of a response, in seconds.
PULSE_SECONDS = 5.0
#: The minimum interval between two progress messages, in seconds.
PROGRESS_SECONDS = 0.1
#: The time that a stop waits for running calls, in seconds; queries stop within a page, and runs within a batch.
STOP_SECONDS = 30.0
#: The time that a stop then waits for clients to read the responses, in seconds.
LAST_SECONDS = 5

_CREDENTIALS = struct.Struct("iII")

logger = logging.getLogger(__name__)


class ControlServer:
    """A server on the socket of a state folder, from :meth:`start` to :meth:`stop`.

    Args:
        folder: the state folder.
        backend: executes the calls.
        request_seconds: the time limit for a client to complete its request.
        pulse_seconds: the maximum interval between two lines of a response.
    """

    def __init__(
        self,
        folder: Path,
        backend: ControlBackend,
        *,
        request_seconds: int = REQUEST_SECONDS,
        pulse_seconds: float = PULSE_SECONDS,
    ) -> None:
        self._folder = folder
        self._path = folder / api.SOCKET_NAME
        self._backend = backend
        self._request_seconds = request_seconds
        self._pulse_seconds = pulse_seconds
        self._stopping = Event()
        self._lock = Lock()
        self._running: dict[_RunningCall, Thread] = {}
        self._server: ServerThread | None = None
        self._inode = 0

    def start(self) -> None:
        """Listen; return when the socket exists.

        Raises:
            StoreBusy: another janitor listens on it.
            StoreError: the socket cannot be created.
        """
        with ExitStack() as stack:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                self._bind(listening)
            except OSError as error:
                raise StoreError(
                    f"The control socket {self._path} cannot be created: {error.strerror or error}.",
                    "Set janitor.state to a folder that you own, on a local disk.",
                ) from error
            stack.pop_all()
        config = uvicorn.Config(
            self._app(),
            loop="asyncio",
            http=type("ControlProtocol", (_SocketProtocol,), {"stopping": self._stopping}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=self._request_seconds,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        self._server = ServerThread(config, listening, "control", give_up_seconds=LAST_SECONDS + 1)
        if not self._server.start():
            raise StoreError(f"The control socket {self._path} cannot be created.", "Check the log for the reason.")

    def stop(self) -> None:
        """Reject further calls, stop running calls, and remove the socket; a second call has no effect."""
        if self._server is None:
            return
        with suppress(OSError):
            # Keep the socket if another janitor has replaced it.
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        with self._lock:
            self._stopping.set()
            running = dict(self._running)
        for exchange in running:
            exchange.disconnect.set()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in running.values():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("a call on the control socket did not finish in time; the janitor stops without it")
        self._server.stop()
        self._server = None

    def _bind(self, listening: socket.socket) -> None:
        with api.address(self._folder) as address:
            self._remove_stale(address)
            listening.bind(address)
        # Set the permissions before it listens, so that no other user can connect in between.
        self._path.chmod(0o600)
        self._inode = self._path.stat().st_ino
        listening.listen(MAX_CLIENTS)

    def _remove_stale(self, address: str) -> None:
        """Remove the socket of a dead process."""
        try:
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise StoreError(f"{self._path} is not a socket.", "Remove it, if no other program needs it.")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(address)
            except ConnectionRefusedError:
                self._path.unlink()
                return
        raise StoreBusy(
            f"Another janitor listens on {self._path}.",
            "Give each store a separate state folder (janitor.state), or stop the other janitor.",
        )

    def _app(self) -> ASGIApp:
        page = self._backend.page
        routes: list[BaseRoute] = [Route("/control/{method}", self._answer, methods=["POST"])]
        inner = Starlette(routes=[*routes, Mount("/", page)] if page is not None else routes)

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["client"][1] not in (0, os.geteuid()):
                audit.record(
                    audit.Event.CONTROL_FORBIDDEN,
                    principal=f"uid:{scope['client'][1]}",
                    address="unix",
                    verb=scope["path"].rpartition("/")[2],
                    result="refused",
                )
                refusal = _rejection(
                    403,
                    StoreBusy("The janitor that holds the store runs as another user.", "Run this as that user."),
                )
                await refusal(scope, receive, send)
            else:
                await inner(scope, receive, send)

        return guarded

    async def _answer(self, request: Request) -> Response:
        """Start a thread for a call; return its response."""
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response()
        except ValueError as error:
            return _rejection(413, api.invalid_request(str(error)))
        exchange = _RunningCall(abort_of(request.scope))
        work = (exchange, request.path_params["method"], body, request.scope["client"][1])
        thread = Thread(target=self._work, args=work, name="control-client", daemon=True)
        with self._lock:
            if self._stopping.is_set():
                return _rejection(
                    503, StopRequested("Nothing was done: the janitor is stopping.", "Try again after its restart.")
                )
            if len(self._running) >= MAX_CLIENTS:
                return _rejection(
                    503,
                    StoreBusy(
                        f"The janitor that holds the store already serves {MAX_CLIENTS} commands.", "Try again later."
                    ),
                )
            # Start it first, because `stop` waits for each registered thread.
            thread.start()
            self._running[exchange] = thread
        return _Answer(exchange, self._pulse_seconds)

    def _work(self, exchange: _RunningCall, method: str, body: bytes, uid: int) -> None:
        """Execute a call; its errors do not affect other calls."""
        result = "failed"
        try:
            line = wire.encode(
                {"result": api.answer(self._backend, method, body, exchange.observe, exchange.disconnect)}
            )
            result = "done"
        except TmsError as error:
            line = wire.encode_error(error)
            is_failure = isinstance(error, (StoreError, StateError, ArchiveError))
            result = "failed" if is_failure and not isinstance(error, BUSY) else "refused"
        # A bug: send an error to the client, log the traceback, and continue.
        except Exception as error:
            logger.exception("a call on the control socket failed")
            bug = TmsError(f"The janitor that holds the store failed: {error!r}.", "Check its log.")
            line = wire.encode_error(bug)
        finally:
            with self._lock:
                del self._running[exchange]
        if method in api.DECISIONS:
            request = body.decode(errors="replace")
            audit.record(
                audit.Event.DECISION,
                principal=f"uid:{uid}",
                address="unix",
                verb=method,
                object_=request,
                result=result,
            )
        exchange.finish(line)


class _SocketProtocol(HttpProtocol):
    """A connection that identifies the client's user, and counts as disconnected when the client closes its half."""

    limit: ClassVar[int] = 4 * MAX_CLIENTS
    stopping: ClassVar[Event]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = ("", peer_uid(transport.get_extra_info("socket")))
        if self.stopping.is_set():  # otherwise uvicorn would wait for this connection
            transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        return False


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process on the other side of a connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > wire.MAX_BYTES:
            raise ValueError(f"more than {wire.MAX_BYTES} bytes")
    return bytes(body)


def _rejection(status: int, error: TmsError) -> Response:
    return Response(wire.encode_error(error), status, media_type="application/x-ndjson")


class _RunningCall:
    """A running call, shared by its thread and the event loop that sends its messages.

    The thread never waits for the client, which may be suspended or disconnected: unsent progress is summed up.

    Attributes:
        disconnect: set when the client has disconnected, or the janitor stops.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.disconnect = Event()
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._has_messages = asyncio.Event()
        self._lock = Lock()
        self._at: tuple[str, TopicId | None] | None = None
        self._rows = 0
        self._expected: int | None = None
        self._next = 0.0
        self._answer: bytes | None = None
        self._limit: asyncio.TimerHandle | None = None

    def observe(self, phase: str, topic: TopicId | None, rows: int) -> None:
        """Send progress to the client, at most ten times a second."""
        with self._lock:
            if phase == EXPECTED:
                self._expected = rows
                return
            self._at = phase, topic
            self._rows += rows
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_SECONDS
            self._wake()

    def finish(self, line: bytes) -> None:
        """Set the last line."""
        self._answer = line
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._has_messages.set)

    async def lines(self, pulse_seconds: float) -> AsyncIterator[bytes]:
        """Yield the lines for the client, at least one per ``pulse_seconds``."""
        answer = None
        while answer is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_messages.wait(), pulse_seconds)
            self._has_messages.clear()
            answer, progress = self._answer, self._progress()
            if progress or answer is None:
                yield wire.encode({"progress": progress})
        self._limit = self._loop.call_later(ANSWER_SECONDS, self._abort)
        yield answer

    def end(self) -> None:
        """Note that all lines are sent, or that the client has disconnected."""
        self.disconnect.set()
        if self._limit is not None:
            self._limit.cancel()

    def _progress(self) -> dict[str, Any]:
        with self._lock:
            at, rows = self._at, self._rows
            expected, self._expected = self._expected, None
            self._at, self._rows = None, 0
        if at is None:
            return {}
        more = {} if expected is None else {"expected": expected}
        return {"phase": at[0], "topic": at[1] and str(at[1]), "rows": rows, **more}


class _Answer(StreamingResponse):
    """A response that is sent as it is produced."""

    def __init__(self, exchange: _RunningCall, pulse_seconds: float) -> None:
        super().__init__(exchange.lines(pulse_seconds), media_type="application/x-ndjson")
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.end()
