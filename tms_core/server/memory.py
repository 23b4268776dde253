"""One memory limit for all requests and responses (``server.memory``).

Request bodies, their uncompressed and decoded form, and unread responses each reserve a share before they use memory.
Without enough memory, requests wait. First is the request whose principal uses least memory for other requests, then
the request that has most memory already, then the order of arrival decides. A release wakes only the first waiting
request.

Some shares wait for a client: for a body that does not arrive, or a response that is not read. When the first request
has waited for a few seconds, the server disconnects the clients that have been idle for longest, until the request
fits. If requests that wait for more memory hold all memory, waiting does not help, so the server rejects some of them
immediately until the first one fits. In both cases the principal that uses most memory loses first. While memory is
free, no client is disconnected, however slow it is.

Long-lasting shares may use three quarters of the memory. The rest is for small and short requests, so that slow or
hostile clients cannot block them. Bodies of up to :data:`FREE_BYTES` reserve nothing, because the connection has
buffered as much already.

A :class:`Memory` belongs to one event loop. Other threads use :class:`LentMemory`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple

from tms_core.errors import Unavailable

#: The default memory for all requests and responses together, in bytes.
MEMORY_BYTES = 256 << 20
#: The wait of a request after which the server disconnects clients that block it, in seconds. An active client needs
#: much less.
WAIT_SECONDS = 2.0
#: The maximum wait for memory in seconds; then a request is rejected.
LONGEST_SECONDS = 30.0
#: The share of the memory for long-lasting use: bodies, and responses that are long or have large messages.
_LASTING = 0.75
#: Bodies up to this size reserve nothing, in bytes, because the connection buffers as much already.
FREE_BYTES = 64 << 10


class _Waiter(NamedTuple):
    """A waiting request and its demand."""

    share: Share
    size: int
    granted: asyncio.Future[None]
    since: float


class Memory:
    """The memory that all requests and responses of a server share.

    Args:
        limit_bytes: the total limit.
        wait_seconds: how long a share may block a waiting request.

    Attributes:
        used_bytes: the memory in use.
    """

    def __init__(self, limit_bytes: int = MEMORY_BYTES, wait_seconds: float = WAIT_SECONDS) -> None:
        self.limit_bytes = limit_bytes
        self.wait_seconds = wait_seconds
        self.used_bytes = 0
        self._waiting: list[_Waiter] = []
        #: The shares, by their last use.
        self._shares: dict[Share, float] = {}

    @property
    def waiting(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def share(self, abort: Callable[[], None], principal: str | None = None) -> Share:
        """Return an empty share for one request.

        Args:
            abort: closes the connection of the request at once.
            principal: the principal of the request; None: unknown.
        """
        return Share(self, abort, principal)

    async def take(self, share: Share, size: int, *, brief: bool = False) -> None:
        """Enlarge a share; wait until enough memory is free.

        Args:
            size: the growth in bytes, limited to the memory for long-lasting use.
            brief: whether the use is small and short, so that it does not wait for long-lasting use.

        Raises:
            Unavailable: no memory became free in time.
        """
        size = min(size, int(self.limit_bytes * _LASTING) - share.size)
        # Brief use may take the rest, so that slow clients cannot block it.
        if self.used_bytes + size <= self.limit_bytes if brief else not self._waiting and self._fits(size):
            self._grant(share, size)
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(share, size, loop.create_future(), loop.time())
        self._waiting.append(waiter)
        self._serve()
        self._resolve_deadlock()
        try:
            await self._wait(waiter)
        finally:
            # Also after an error or a disconnect, because the next waiting request may fit now.
            with suppress(ValueError):
                self._waiting.remove(waiter)
            self._serve()

    async def _wait(self, waiter: _Waiter) -> None:
        loop = asyncio.get_running_loop()
        while not waiter.granted.done():
            await asyncio.wait({waiter.granted}, timeout=self.wait_seconds)
            self._make_room(loop.time() - self.wait_seconds)
            if not waiter.granted.done() and loop.time() - waiter.since >= LONGEST_SECONDS:
                raise _memory_full_error()
        waiter.granted.result()

    def _make_room(self, before: float) -> None:
        """Disconnect idle clients to make room for requests that have waited since ``before``, in their order."""
        while self._waiting and (first := self._first()).since <= before:
            self._disconnect_for(first, before)
            if not first.granted.done():
                return

    def _resolve_deadlock(self) -> None:
        """Make room for the first request if waiting requests hold all memory."""
        if self._waiting and sum(waiter.share.size for waiter in self._waiting) == self.used_bytes:
            self._disconnect_for(self._first(), asyncio.get_running_loop().time())

    def _disconnect_for(self, waiter: _Waiter, before: float) -> None:
        """Release shares that were not used since a time until a request fits.

        The shares of the principal that uses most memory are first, the least recently used first. No other request
        gets this memory, although the principal of another request may use least memory now.
        """
        waiting = {one.share: one for one in self._waiting}
        used = self._used_by_principal()
        for share, since in sorted(self._shares.items(), key=lambda item: -used[item[0].principal]):
            if self._fits(waiter.size):
                break
            if share is waiter.share or since > before:
                continue
            if share in waiting:
                waiting[share].granted.set_exception(_memory_full_error())
                self._waiting.remove(waiting[share])
            elif share.waits_for_client:
                share.abort()
            else:
                continue
            self._shrink(share, share.size)
        if self._fits(waiter.size):
            self._serve_waiter(waiter)
        self._serve()

    def release(self, share: Share, size: int) -> None:
        """Release a number of bytes of a share."""
        self._shrink(share, size)
        self._serve()
        self._resolve_deadlock()

    def _shrink(self, share: Share, size: int) -> None:
        self.used_bytes -= size
        share.size -= size
        if not share.size:
            self._shares.pop(share, None)

    def touch(self, share: Share) -> None:
        """Record the use of a share."""
        if share.size:
            self._shares.pop(share, None)
            self._shares[share] = asyncio.get_running_loop().time()

    def _serve(self) -> None:
        """Grant memory to waiting requests in their order, as far as they fit."""
        while self._waiting and self._fits((waiter := self._first()).size):
            self._serve_waiter(waiter)

    def _serve_waiter(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        self._grant(waiter.share, waiter.size)
        waiter.granted.set_result(None)

    def _first(self) -> _Waiter:
        """Return the next request to serve, so that one principal cannot keep the memory from others."""
        used = self._used_by_principal()
        # If new requests were served before requests that have a part of their memory, none could complete.
        return min(self._waiting, key=lambda one: (used[one.share.principal] - one.share.size, -one.share.size))

    def _used_by_principal(self) -> Counter[str | None]:
        used: Counter[str | None] = Counter()
        for share in self._shares:
            used[share.principal] += share.size
        return used

    def _fits(self, size: int) -> bool:
        return self.used_bytes + size <= int(self.limit_bytes * _LASTING)

    def _grant(self, share: Share, size: int) -> None:
        self.used_bytes += size
        share.size += size
        self.touch(share)


class Share:
    """The memory of one request; a context manager that releases it.

    Args:
        abort: closes the connection immediately.
        principal: the principal of the request; None: unknown.

    Attributes:
        size: the current size in bytes.
        waits_for_client: whether the request waits for its client to send or to read.
    """

    __slots__ = ("_memory", "abort", "principal", "size", "waits_for_client")

    def __init__(self, memory: Memory, abort: Callable[[], None], principal: str | None) -> None:
        self._memory = memory
        self.abort = abort
        self.principal = principal
        self.size = 0
        self.waits_for_client = False

    async def take(self, size: int, *, brief: bool = False) -> None:
        """Enlarge the share; wait until enough memory is free, see :meth:`Memory.take`.

        Raises:
            Unavailable: no memory became free in time.
        """
        await self._memory.take(self, size, brief=brief)

    def shrink(self, size: int) -> None:
        """Shrink the share to at most this size."""
        if size < self.size:
            self._memory.release(self, self.size - size)

    def begin_waiting(self) -> None:
        """Mark the share as waiting for its client."""
        self.waits_for_client = True
        self._memory.touch(self)

    def end_waiting(self) -> None:
        """Mark the share as no longer waiting for its client."""
        self.waits_for_client = False

    def close(self) -> None:
        """Release the whole share; closing twice is not an error."""
        self.shrink(0)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LentMemory:
    """Access to a memory for requests of another event loop.

    Args:
        memory: the shared memory.
        loop: the event loop of the memory.
    """

    def __init__(self, memory: Memory, loop: asyncio.AbstractEventLoop) -> None:
        self._memory = memory
        self._loop = loop

    @asynccontextmanager
    async def take(self, size: int, abort: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
        """Reserve a share for the time of a block; yield a function to call when the request is complete.

        Args:
            size: the size in bytes.
            abort: closes the request's connection; called in the memory's loop.

        Raises:
            Unavailable: no memory became free in time.
        """
        share = self._memory.share(abort)
        taken = self._taken(share, size)
        try:
            taking = asyncio.run_coroutine_threadsafe(taken, self._loop)
        except RuntimeError:
            # The server's loop is closed, so memory is no longer limited.
            taken.close()
            yield _do_nothing
            return
        try:
            async with asyncio.timeout(LONGEST_SECONDS + self._memory.wait_seconds):
                await asyncio.wrap_future(taking)
            yield partial(self._call, share.end_waiting)
        except TimeoutError as error:
            raise _memory_full_error() from error
        finally:
            self._call(share.close)

    async def _taken(self, share: Share, size: int) -> None:
        try:
            await share.take(size)
        except BaseException:
            # Memory may be granted after the caller has given up, and after its call of `share.close`.
            share.close()
            raise
        share.begin_waiting()

    def _call(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)


def _do_nothing() -> None:
    pass


def _memory_full_error() -> Unavailable:
    return Unavailable(
        "Requests and responses use all memory of the server (server.memory).", "Try again in a few seconds."
    )
