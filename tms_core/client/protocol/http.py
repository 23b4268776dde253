"""The two wires to a server over HTTP: one waits in the caller's thread, the other in an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import httpx2

from tms_core.client.protocol.calls import Call, check
from tms_core.client.protocol.endpoint import Endpoint
from tms_core.client.protocol.values import Limits
from tms_core.client.protocol.wire import Pieces, Stop
from tms_core.errors import BadRequest, ClientClosed

P = ParamSpec("P")
T = TypeVar("T")

#: A function that waits until the event is set, at most for the given seconds.
Pause = Callable[[threading.Event, float], object]
AsyncPause = Callable[[asyncio.Event, float], Awaitable[object]]

_OK = 200


def library_limits(limits: Limits) -> httpx2.Limits:
    """Return the limits of the connection pool for httpx2."""
    return httpx2.Limits(
        max_connections=limits.connections,
        max_keepalive_connections=limits.idle_connections,
        keepalive_expiry=limits.idle_seconds,
    )


def _read_body(pieces: Iterator[bytes], deadline: float | None) -> bytes:
    """Return a complete body.

    httpx2 limits only the time of each piece; the deadline limits their total.

    Raises:
        TimeoutError: the body did not arrive in time.
    """
    found = []
    for piece in pieces:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        found.append(piece)
    return b"".join(found)


# --- waiting in the thread -------------------------------------------------------------------------------------------


class BlockingWire:
    """A :class:`~tms_core.client.protocol.wire.Wire` that waits in the caller's thread; threads may share it.

    Args:
        transport: the transport of httpx2; None: the network.
    """

    def __init__(self, endpoint: Endpoint, transport: httpx2.BaseTransport | None, pause: Pause) -> None:
        self.endpoint = endpoint
        self._transport = transport
        self._http = self._open_pool()
        self._process = os.getpid()
        self._pause = pause
        self._closed = _BlockingStop(pause)
        self._stops: WeakSet[_BlockingStop] = WeakSet()

    async def ask(self, call: Call[T], seconds: float | None = None) -> T:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self.endpoint.attempt(call, self._closed) as attempt:
            answer = self._pool_of_process().send(self.endpoint.request(call, attempt, seconds), stream=True)
            try:
                attempt.status = answer.status_code
                content = _read_body(answer.iter_bytes(), deadline)
            finally:
                answer.close()
            check(call, answer.status_code, content, answer.headers)
            return call.result(content)

    async def open(self, call: Call[Any], seconds: float | None = None) -> Pieces:
        with self.endpoint.attempt(call, self._closed) as attempt:
            answer = self._pool_of_process().send(self.endpoint.request(call, attempt, seconds), stream=True)
            attempt.status = answer.status_code
            if answer.status_code != _OK:
                check(call, answer.status_code, answer.read(), answer.headers)
        return _BlockingPieces(answer, partial(self.endpoint.convert_errors, call, self._closed, attempt.url))

    def stop(self) -> Stop:
        found = _BlockingStop(self._pause)
        self._stops.add(found)
        if self._closed.is_set():
            found.set()
        return found

    async def call_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    async def start_or_undo(self, start: Callable[[], T], undo: Callable[[T], object]) -> T:
        return start()

    async def close(self) -> None:
        """Interrupt pauses and close connections; a second call does nothing."""
        self._closed.set()
        for stop in list(self._stops):
            stop.set()
        self._pool_of_process().close()

    def _open_pool(self) -> httpx2.Client:
        limits = library_limits(self.endpoint.options.limits)
        return httpx2.Client(transport=self._transport, limits=limits, verify=self.endpoint.verify, trust_env=False)

    def _pool_of_process(self) -> httpx2.Client:
        """Return the connection pool; a forked process opens a new one, because the sockets belong to its parent."""
        if self._process != os.getpid():
            self._http = self._open_pool()
            self._process = os.getpid()
        return self._http


class _BlockingStop:
    """A stop signal whose pauses block the thread."""

    def __init__(self, pause: Pause) -> None:
        self._event = threading.Event()
        self._pause = pause
        self.set = self._event.set
        self.is_set = self._event.is_set

    async def wait(self, seconds: float) -> None:
        self._pause(self._event, seconds)


class _BlockingPieces:
    """A response body whose reads block the thread."""

    def __init__(self, answer: httpx2.Response, convert_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self.headers: Mapping[str, str] = answer.headers
        self._answer = answer
        self._pieces = answer.iter_bytes()
        self._convert_errors = convert_errors

    async def more(self) -> bytes:
        with self._convert_errors():
            return next(self._pieces, b"")

    async def close(self) -> None:
        self._answer.close()


# --- waiting in an event loop ----------------------------------------------------------------------------------------


class LoopWire:
    """A :class:`~tms_core.client.protocol.wire.Wire` that waits in an event loop.

    Args:
        transport: the transport of httpx2; None: the network.
    """

    def __init__(self, endpoint: Endpoint, transport: httpx2.AsyncBaseTransport | None, pause: AsyncPause) -> None:
        self.endpoint = endpoint
        limits = library_limits(endpoint.options.limits)
        self._http = httpx2.AsyncClient(transport=transport, limits=limits, verify=endpoint.verify, trust_env=False)
        self._pause = pause
        self._closed = _LoopStop(pause)
        self._stops: WeakSet[_LoopStop] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The executor starts its threads when it needs them.
        self._threads = ThreadPoolExecutor(endpoint.options.limits.connections, thread_name_prefix="tms-client")

    def settle(self) -> None:
        """Bind the client to the running loop, because connections and conditions cannot be used in another loop.

        Raises:
            BadRequest: the client is bound to another loop.
        """
        running = asyncio.get_running_loop()
        self._loop = self._loop or running
        if self._loop is not running:
            raise BadRequest("The AsyncClient was used in another event loop.", "Create an AsyncClient in each loop.")

    async def ask(self, call: Call[T], seconds: float | None = None) -> T:
        self.settle()
        with self.endpoint.attempt(call, self._closed) as attempt:
            async with asyncio.timeout(seconds):
                answer = await self._http.send(self.endpoint.request(call, attempt, seconds))
            attempt.status = answer.status_code
            check(call, answer.status_code, answer.content, answer.headers)
            return call.result(answer.content)

    async def open(self, call: Call[Any], seconds: float | None = None) -> Pieces:
        self.settle()
        with self.endpoint.attempt(call, self._closed) as attempt:
            async with asyncio.timeout(seconds):
                answer = await self._http.send(self.endpoint.request(call, attempt, seconds), stream=True)
                attempt.status = answer.status_code
                if answer.status_code != _OK:
                    check(call, answer.status_code, await answer.aread(), answer.headers)
        return _LoopPieces(answer, partial(self.endpoint.convert_errors, call, self._closed, attempt.url))

    def stop(self) -> Stop:
        found = _LoopStop(self._pause)
        self._stops.add(found)
        if self._closed.is_set():
            found.set()
        return found

    async def call_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.settle()
        return await asyncio.wrap_future(self._submit(partial(function, *args, **kwargs)))

    async def start_or_undo(self, start: Callable[[], T], undo: Callable[[T], object]) -> T:
        self.settle()

        def run_start() -> tuple[T, bool]:
            found, is_closed = start(), self._closed.is_set()
            if is_closed:
                # The client was closed during the call, so no thread of the pool remains to undo the result later.
                undo(found)
            return found, is_closed

        def undo_result() -> None:
            # A call that raised has no result to undo.
            with suppress(Exception):
                found, is_closed = call.result()
                if not is_closed:
                    undo(found)

        call = self._submit(run_start)
        try:
            found, _ = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            # Undo the result in a thread, so that no task stays in the loop. `close` waits for that thread, unless the
            # executor is already shut down.
            try:
                self._threads.submit(undo_result)
            except RuntimeError:
                threading.Thread(target=undo_result).start()
            raise
        return found

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(function)
        except RuntimeError as error:
            raise ClientClosed("The client is closed.", "Create another client.") from error

    async def close(self) -> None:
        """Interrupt pauses, close connections, and wait for running calls to the transaction service.

        A second call does nothing.
        """
        self._closed.set()
        for stop in list(self._stops):
            stop.set()
        await self._http.aclose()
        await asyncio.to_thread(self._threads.shutdown)


class _LoopStop:
    """A stop signal whose pauses suspend only the task."""

    def __init__(self, pause: AsyncPause) -> None:
        self._event = asyncio.Event()
        self._pause = pause
        self.set = self._event.set
        self.is_set = self._event.is_set

    async def wait(self, seconds: float) -> None:
        await self._pause(self._event, seconds)


async def pause_in_loop(event: asyncio.Event, seconds: float) -> None:
    """Wait in the running loop until the event is set or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _LoopPieces:
    """A response body whose reads suspend only the task."""

    def __init__(self, answer: httpx2.Response, convert_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self.headers: Mapping[str, str] = answer.headers
        self._answer = answer
        self._pieces = answer.aiter_bytes()
        self._convert_errors = convert_errors

    async def more(self) -> bytes:
        with self._convert_errors():
            return await anext(self._pieces, b"")

    async def close(self) -> None:
        await self._answer.aclose()
