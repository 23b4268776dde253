"""The two ways to a server over HTTP, and the only place that knows the library: its errors become ours here.

What matters about an error is whether the request may have been done. It was not where there was no connection to send
it on (``Unavailable``); once there was one, nobody knows (``Unanswered``). Neither proxies nor passwords are taken from
the environment: a token must go where the program says, and nowhere else.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import httpx2

from tms_core.client.calls import Call, check
from tms_core.client.token import Token
from tms_core.client.values import Limits, Timeouts
from tms_core.client.wire import Pieces, Stop
from tms_core.errors import ClientClosed, ConfigurationError, Unanswered, Unavailable

P = ParamSpec("P")
T = TypeVar("T")

#: Waits until somebody sets the event, so many seconds at most.
Pause = Callable[[threading.Event, float], object]
AsyncPause = Callable[[asyncio.Event, float], Awaitable[object]]

_OK = 200
#: Raised before there was a connection to send anything on.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)


@dataclass(frozen=True)
class Site:
    """Which server, and how to speak to it.

    Args:
        url: of the server.
        token: who asks.
        timeouts, limits: how long to wait, and how many connections.
        tls: how the server's certificate is checked; None: as the system does.

    Raises:
        ConfigurationError: the URL is none.
    """

    url: str
    token: Token
    timeouts: Timeouts
    limits: Limits
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise ConfigurationError(f"{self.url!r} is no URL: {error}.", _URL_HINT) from error
        if url.userinfo:
            raise ConfigurationError("The URL has a password in it.", "Give a token instead.")
        if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
            raise ConfigurationError(f"{self.url!r} is no server's URL.", _URL_HINT)
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def request(self, call: Call[Any]) -> httpx2.Request:
        """A call as the library's request."""
        headers = {"content-type": call.content_type, "accept-encoding": "identity", **self.token.headers()}
        return httpx2.Request(
            call.method, self.url + call.path, headers=headers, content=call.body, extensions=self._waits
        )

    @property
    def _waits(self) -> dict[str, Any]:
        waits = self.timeouts
        timeout = httpx2.Timeout(
            connect=waits.connect_seconds,
            read=waits.answer_seconds,
            write=waits.send_seconds,
            pool=waits.free_connection_seconds,
        )
        return {"timeout": timeout.as_dict()}

    @contextmanager
    def border(self, call: Call[Any], stopped: Stop) -> Iterator[None]:
        """The library's errors become ours."""
        if stopped.is_set():
            raise ClientClosed("The client is closed.", "Make another one.")
        try:
            yield
        except _NOT_SENT as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"{self.url} cannot be reached: {reason}.", "Start it (tms serve), or correct the URL."
            ) from error
        except httpx2.TimeoutException as error:
            raise Unanswered(f"{self.url} did not answer {call} in time.", _UNKNOWN) from error
        except (httpx2.RequestError, httpx2.StreamError) as error:
            reason = str(error) or type(error).__name__
            raise Unanswered(f"{self.url} did not answer {call}: {reason}.", _UNKNOWN) from error
        except RuntimeError as error:
            if not stopped.is_set():
                raise
            raise ClientClosed("The client was closed.", "Make another one.") from error


_URL_HINT = "Write it as http://127.0.0.1:11015."
_UNKNOWN = "Whether it was done is not known."


def library_limits(limits: Limits) -> httpx2.Limits:
    """The pool's limits in the library's words."""
    return httpx2.Limits(
        max_connections=limits.connections,
        max_keepalive_connections=limits.idle_connections,
        keepalive_expiry=limits.idle_seconds,
    )


# --- waiting in the thread -------------------------------------------------------------------------------------------


class BlockingWire:
    """In the caller's thread (:class:`tms_core.client.wire.Wire`); threads may share it.

    Args:
        site: which server.
        transport: how requests get there; None: over the network.
        pause: how to wait.
    """

    def __init__(self, site: Site, transport: httpx2.BaseTransport | None, pause: Pause) -> None:
        self.site = site
        limits = library_limits(site.limits)
        self._http = httpx2.Client(transport=transport, limits=limits, verify=site.tls or True, trust_env=False)
        self._pause = pause
        self._closed = _BlockingStop(pause)
        self._stops: WeakSet[_BlockingStop] = WeakSet()

    async def ask(self, call: Call[T]) -> T:
        with self.site.border(call, self._closed):
            answer = self._http.send(self.site.request(call))
        check(call, answer.status_code, answer.content)
        return call.result(answer.content)

    async def open(self, call: Call[Any]) -> Pieces:
        with self.site.border(call, self._closed):
            answer = self._http.send(self.site.request(call), stream=True)
            if answer.status_code != _OK:
                answer.read()
        if answer.status_code != _OK:
            check(call, answer.status_code, answer.content)
        return _BlockingPieces(answer, partial(self.site.border, call, self._closed))

    def stop(self) -> Stop:
        found = _BlockingStop(self._pause)
        self._stops.add(found)
        if self._closed.is_set():
            found.set()
        return found

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    async def close(self) -> None:
        """End pauses and close connections; closing twice is no error."""
        self._closed.set()
        for stop in list(self._stops):
            stop.set()
        self._http.close()


class _BlockingStop:
    """An event that is waited for in the thread."""

    def __init__(self, pause: Pause) -> None:
        self._event = threading.Event()
        self._pause = pause
        self.set = self._event.set
        self.is_set = self._event.is_set

    async def wait(self, seconds: float) -> None:
        self._pause(self._event, seconds)


class _BlockingPieces:
    """A body that is read in the thread."""

    def __init__(self, answer: httpx2.Response, border: Callable[[], AbstractContextManager[None]]) -> None:
        self._answer = answer
        self._pieces = answer.iter_bytes()
        self._border = border

    async def more(self) -> bytes:
        with self._border():
            return next(self._pieces, b"")

    async def close(self) -> None:
        self._answer.close()


# --- waiting in an event loop ----------------------------------------------------------------------------------------


class LoopWire:
    """In an event loop (:class:`tms_core.client.wire.Wire`).

    Args:
        site: which server.
        transport: how requests get there; None: over the network.
        pause: how to wait.
    """

    def __init__(self, site: Site, transport: httpx2.AsyncBaseTransport | None, pause: AsyncPause) -> None:
        self.site = site
        limits = library_limits(site.limits)
        self._http = httpx2.AsyncClient(transport=transport, limits=limits, verify=site.tls or True, trust_env=False)
        self._pause = pause
        self._closed = _LoopStop(pause)
        self._stops: WeakSet[_LoopStop] = WeakSet()
        # Its threads begin when they are needed.
        self._threads = ThreadPoolExecutor(site.limits.connections, thread_name_prefix="tms-client")

    async def ask(self, call: Call[T]) -> T:
        with self.site.border(call, self._closed):
            answer = await self._http.send(self.site.request(call))
        check(call, answer.status_code, answer.content)
        return call.result(answer.content)

    async def open(self, call: Call[Any]) -> Pieces:
        with self.site.border(call, self._closed):
            answer = await self._http.send(self.site.request(call), stream=True)
            if answer.status_code != _OK:
                await answer.aread()
        if answer.status_code != _OK:
            check(call, answer.status_code, answer.content)
        return _LoopPieces(answer, partial(self.site.border, call, self._closed))

    def stop(self) -> Stop:
        found = _LoopStop(self._pause)
        self._stops.add(found)
        if self._closed.is_set():
            found.set()
        return found

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def close(self) -> None:
        """End pauses, close connections, and wait for calls of the transaction service; closing twice is no error."""
        self._closed.set()
        for stop in list(self._stops):
            stop.set()
        await self._http.aclose()
        await asyncio.to_thread(self._threads.shutdown)


class _LoopStop:
    """An event that is waited for in the loop."""

    def __init__(self, pause: AsyncPause) -> None:
        self._event = asyncio.Event()
        self._pause = pause
        self.set = self._event.set
        self.is_set = self._event.is_set

    async def wait(self, seconds: float) -> None:
        await self._pause(self._event, seconds)


async def pause_in_loop(event: asyncio.Event, seconds: float) -> None:
    """Wait in the running loop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _LoopPieces:
    """A body that is read in the loop."""

    def __init__(self, answer: httpx2.Response, border: Callable[[], AbstractContextManager[None]]) -> None:
        self._answer = answer
        self._pieces = answer.aiter_bytes()
        self._border = border

    async def more(self) -> bytes:
        with self._border():
            return await anext(self._pieces, b"")

    async def close(self) -> None:
        await self._answer.aclose()
