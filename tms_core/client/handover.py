"""Requests that are handed to an application in this process, instead of being sent (ASGI).

The HTTP library has such a transport for event loops only, and one that holds each answer whole. This one serves plain
clients too, from any thread: the application has an event loop in a thread of its own, and an answer comes piece by
piece, so a reader that leaves early is seen to leave, as with a socket.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

import httpx2
from starlette.types import ASGIApp, Message, Scope

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: An answer's status and headers.
Head = tuple[int, list[tuple[bytes, bytes]]]


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="in-process")

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Have a coroutine run there."""
        if self._loop.is_closed():
            coroutine.close()
            raise httpx2.ConnectError("the server in this process has ended")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class InProcessTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """Hands requests to an application, from any thread and any event loop.

    Args:
        app: the application.
        loop: where it runs.
    """

    def __init__(self, app: ASGIApp, loop: LoopThread) -> None:
        self._app = app
        self._loop = loop
        self._open: WeakSet[_Exchange] = WeakSet()

    def finish(self) -> None:
        """Wait for all requests; an answer that has not been read by now is dropped."""
        self._loop.begin(self._finish()).result()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Have it answered, in the caller's thread."""
        exchange = _Exchange(_scope(request), request.read())
        status, headers = self._loop.begin(self._start(exchange)).result()
        return httpx2.Response(status, headers=headers, stream=_Body(exchange, self._loop))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Have it answered, in the caller's loop."""
        exchange = _Exchange(_scope(request), await request.aread())
        try:
            status, headers = await asyncio.wrap_future(self._loop.begin(self._start(exchange)))
        except asyncio.CancelledError:
            self._loop.begin(exchange.close())
            raise
        return httpx2.Response(status, headers=headers, stream=_Body(exchange, self._loop))

    async def _start(self, exchange: _Exchange) -> Head:
        self._open.add(exchange)
        return await exchange.start(self._app)

    async def _finish(self) -> None:
        for exchange in list(self._open):
            await exchange.finish()


class _Exchange:
    """A request and its answer, which live in the server's loop.

    Attributes:
        ended: whether the application is done with it.
    """

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.ended = False
        # Under this name the server looks for what ends a connection at once.
        self._scope = {**scope, "state": {"abort": self._abort}}
        self._body: bytes | None = body
        self._head: Head | None = None
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._begun = asyncio.Event()
        self._gone = asyncio.Event()
        self._complete = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> Head:
        """Have the application begin its answer."""
        self._task = asyncio.create_task(self._run(app))
        self._task.add_done_callback(self._done)
        await self._begun.wait()
        if self._head is None:
            raise httpx2.RemoteProtocolError("Server disconnected without sending a response.")
        return self._head

    async def piece(self) -> bytes:
        """The next piece of the answer, empty at its end."""
        piece = await self._pieces.get()
        if not piece and not self._complete:
            raise httpx2.RemoteProtocolError("peer closed connection without sending complete message body")
        return piece

    async def close(self) -> None:
        """End the answer: it is not read any further."""
        self._gone.set()
        while not self._pieces.empty():
            self._pieces.get_nowait()

    def _abort(self) -> None:
        """End it, whatever is still to be read."""
        self._gone.set()
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(b"")

    async def finish(self) -> None:
        """Close it, and wait for the application to be done."""
        await self.close()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _done(self, task: asyncio.Task[None]) -> None:
        """An error of the server's is its own; the client only sees that no answer came."""
        self.ended = True
        if error := task.exception():
            logger.error("the server failed at a request", exc_info=error)

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self._begun.set()
            await self._put(b"")

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message["status"], message["headers"]
            self._begun.set()
            return
        if piece := message.get("body", b""):
            await self._put(piece)
        self._complete = not message.get("more_body", False)

    async def _put(self, piece: bytes) -> None:
        if not self._gone.is_set():
            await self._pieces.put(piece)


class _Body(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """An answer's body on this side."""

    def __init__(self, exchange: _Exchange, loop: LoopThread) -> None:
        self._exchange = exchange
        self._loop = loop

    def __iter__(self) -> Iterator[bytes]:
        while piece := self._loop.begin(self._exchange.piece()).result():
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await asyncio.wrap_future(self._loop.begin(self._exchange.piece())):
            yield piece

    def close(self) -> None:
        if not self._exchange.ended:
            self._loop.begin(self._exchange.close()).result()

    async def aclose(self) -> None:
        if not self._exchange.ended:
            await asyncio.wrap_future(self._loop.begin(self._exchange.close()))


def _scope(request: httpx2.Request) -> Scope:
    path = request.url.path
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "root_path": "",
        "query_string": request.url.query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", request.url.port or 80),
    }
