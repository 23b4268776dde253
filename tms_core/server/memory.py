"""One memory limit for all requests and responses (``server.memory``).

Arriving bodies, their unpacked and decoded form, and unread responses each reserve a share before they use memory.
Without enough memory, requests wait in order of arrival. When enough is released, only the first one wakes and
continues.

Short use needs no rule. Shares that wait for a client do: a body that does not arrive, or a response that is not read.
When the first request has waited for a few seconds, the server disconnects the clients that have blocked others for
longest, until there is room. If requests that wait for more memory hold all of it, time does not help, so the server
rejects others of them at once until the first one has room. While there is room, no client is disconnected, however
slow it is.

A part of the memory is reserved for small and short requests, so that honest clients need not wait for hostile ones:
long-lasting shares may use three quarters. Bodies of up to :data:`FREE_BYTES` reserve nothing, because the connection
has buffered as much already.

It serves one event loop. Only :class:`LentMemory` may be used by other threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple

from tms_core.errors import Unavailable

#: The default memory for all requests and responses together, in bytes.
MEMORY_BYTES = 256 << 20
#: The wait of a request after which the server disconnects clients that block it, in seconds. A client that reads or
#: sends at all finishes far within it.
WAIT_SECONDS = 2.0
#: The wait after which a request is rejected if no memory becomes free, in seconds.
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
        self._waiting: deque[_Waiter] = deque()
        #: The shares, by their last use.
        self._shares: dict[Share, float] = {}

    @property
    def waiting(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def share(self, abort: Callable[[], None]) -> Share:
        """Return an empty share for one request.

        Args:
            abort: closes the connection of the request at once.
        """
        return Share(self, abort)

    async def take(self, share: Share, size: int, *, brief: bool = False) -> None:
        """Let a share grow as soon as there is room.

        Args:
            size: the growth; at most all memory.
            brief: whether the use is small and short, so that it need not wait for long-lasting uses.

        Raises:
            Unavailable: no memory became free in time.
        """
        size = min(size, int(self.limit_bytes * _LASTING) - share.size)
        # Lasting uses wait in order of arrival; brief ones may use the rest, so that slow clients cannot block them.
        if self.used_bytes + size <= self.limit_bytes if brief else not self._waiting and self._fits(size):
            self._grant(share, size)
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(share, size, loop.create_future(), loop.time())
        self._waiting.append(waiter)
        self._unlock()
        try:
            await self._wait(waiter)
        finally:
            # Also after an error or a disconnect; the next waiting request may fit now.
            with suppress(ValueError):
                self._waiting.remove(waiter)
            self._serve()

    async def _wait(self, waiter: _Waiter) -> None:
        loop = asyncio.get_running_loop()
        while not waiter.granted.done():
            await asyncio.wait({waiter.granted}, timeout=self.wait_seconds)
            self._make_room(loop.time() - self.wait_seconds)
            if not waiter.granted.done() and loop.time() - waiter.since >= LONGEST_SECONDS:
                raise _no_room()
        waiter.granted.result()

    def _make_room(self, before: float) -> None:
        """Make room for requests that have waited since ``before``, in their order, by disconnecting clients."""
        while self._waiting and self._waiting[0].since <= before:
            first = self._waiting[0]
            self._cut_off_for(first, before)
            if not first.granted.done():
                return

    def _unlock(self) -> None:
        """Make room for the first request if waiting requests hold all memory."""
        if self._waiting and sum(waiter.share.size for waiter in self._waiting) == self.used_bytes:
            self._cut_off_for(self._waiting[0], asyncio.get_running_loop().time())

    def _cut_off_for(self, waiter: _Waiter, before: float) -> None:
        """Disconnect clients whose shares were not used since a time, the oldest use first, until a request fits."""
        waiting = {one.share: one for one in self._waiting}
        for share, since in list(self._shares.items()):
            if waiter.granted.done() or since > before:
                return
            if share is waiter.share:
                continue
            if share in waiting:
                waiting[share].granted.set_exception(_no_room())
                self._waiting.remove(waiting[share])
            elif share.waits_for_client:
                share.abort()
            else:
                continue
            self._shrink(share, share.size)

    def give(self, share: Share, size: int) -> None:
        """Release so many bytes of a share."""
        self._shrink(share, size)
        self._unlock()

    def _shrink(self, share: Share, size: int) -> None:
        self.used_bytes -= size
        share.size -= size
        if not share.size:
            self._shares.pop(share, None)
        self._serve()

    def touch(self, share: Share) -> None:
        """Note that a share is in use."""
        if share.size:
            self._shares.pop(share, None)
            self._shares[share] = asyncio.get_running_loop().time()

    def _serve(self) -> None:
        """Grant memory to the first waiting requests, in their order, while there is room."""
        while self._waiting and self._fits(self._waiting[0].size):
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                self._grant(waiter.share, waiter.size)
                waiter.granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.used_bytes + size <= int(self.limit_bytes * _LASTING)

    def _grant(self, share: Share, size: int) -> None:
        self.used_bytes += size
        share.size += size
        self.touch(share)


class Share:
    """The memory of one request; as a context manager, it is released when the block finishes.

    Args:
        abort: closes the connection at once.

    Attributes:
        size: the present size, in bytes.
        waits_for_client: whether only the client can finish the request.
    """

    __slots__ = ("_memory", "abort", "size", "waits_for_client")

    def __init__(self, memory: Memory, abort: Callable[[], None]) -> None:
        self._memory = memory
        self.abort = abort
        self.size = 0
        self.waits_for_client = False

    async def take(self, size: int, *, brief: bool = False) -> None:
        """Let the share grow as soon as there is room; see :meth:`Memory.take`.

        Raises:
            Unavailable: no memory became free in time.
        """
        await self._memory.take(self, size, brief=brief)

    def shrink(self, size: int) -> None:
        """Shrink the share to at most this size."""
        if size < self.size:
            self._memory.give(self, self.size - size)

    def begin_waiting(self) -> None:
        """Note that only the client can finish the request from now on."""
        self.waits_for_client = True
        self._memory.touch(self)

    def end_waiting(self) -> None:
        """Note that the client has sent its part."""
        self.waits_for_client = False

    def close(self) -> None:
        """Release the whole share; closing twice is not an error."""
        self.shrink(0)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LentMemory:
    """A memory for requests that another event loop serves.

    Args:
        memory: the shared memory.
        loop: the event loop of the memory.
    """

    def __init__(self, memory: Memory, loop: asyncio.AbstractEventLoop) -> None:
        self._memory = memory
        self._loop = loop

    @asynccontextmanager
    async def take(self, size: int, abort: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
        """Reserve a share while a block runs, in any event loop; yield a function to call when the request is complete.

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
            # The loop is closed, and so are its requests.
            taken.close()
            yield _nothing
            return
        try:
            async with asyncio.timeout(LONGEST_SECONDS + self._memory.wait_seconds):
                await asyncio.wrap_future(taking)
            yield partial(self._call, share.end_waiting)
        except TimeoutError as error:
            raise _no_room() from error
        finally:
            self._call(share.close)

    async def _taken(self, share: Share, size: int) -> None:
        try:
            await share.take(size)
        except BaseException:
            # Memory may have become free after the borrower left, when its own call to close the share came too early.
            share.close()
            raise
        share.begin_waiting()

    def _call(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)


def _nothing() -> None:
    """Do nothing: no caller waits."""


def _no_room() -> Unavailable:
    return Unavailable(
        "Requests and answers use all the memory that server.memory allows.", "Try again in a few seconds."
    )
