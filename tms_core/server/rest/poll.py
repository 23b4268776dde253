"""Polls of consumers.

This is plain ASGI, because every message leaves the server here. Separate threads read pages of the store and encode
them in steps: half a megabyte, or one larger message, or the pages within :data:`STEP_SECONDS`. Between two steps the
connection is checked, so that nothing is read for a disconnected client. The next step starts after the event loop has
sent the last one, except for the connection's buffer. Therefore the memory of a response does not depend on its length;
it is reserved before each step (:mod:`tms_core.server.memory`). After "200" was sent, an error can only cut the
response short; chunked encoding shows the client that it is incomplete.

A short response has a header with its position, so that the next poll need not read the same rows. A poll that found no
messages may wait for one before the response is sent.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest
from tms_core.logs.loggers import harmless
from tms_core.messaging.fetcher import Fetch
from tms_core.messaging.model import FetchRequest, MessageList
from tms_core.rowkey import LONG_MAX
from tms_core.server.codec.bodies import Codec
from tms_core.server.memory import FREE_BYTES, Share
from tms_core.server.rest.body import GZIP, Disconnected, Headers, accepts_gzip
from tms_core.server.rest.context import ContextRoute, ServerContext, headers_of, spend, topic_of, waking
from tms_core.topic import TopicId
from tms_core.web.protocol import abort_of, probe_of

#: The bytes that a thread encodes at once; the cost of a thread switch is negligible next to it.
_STEP_BYTES = 1 << 19
#: The time that a thread reads at once, in seconds: other requests may wait for it this long.
STEP_SECONDS = 0.02
#: A response up to this size is sent as a whole; it is smaller than a piece of a long response.
_SMALL_BYTES = 50_000
#: The memory for each encoded byte of a step: the byte, its source page, and the bytes in transit.
_HELD = 4
#: The interval at which a waiting poll checks its topic and its client, in seconds.
_LOOK_SECONDS = 5.0

#: The request header with the time to wait for a message, in whole seconds.
WAIT = b"x-tms-wait-seconds"
#: The response header with the position of a poll: the id from which the next poll may start.
POSITION = b"x-tms-position"
#: The header of an empty response after the whole requested wait.
WAITED = b"x-tms-waited"
#: The response header of a topic that accepts no more messages.
SEALED = b"x-tms-sealed"
#: The response header of a poll whose request exceeds the server's limit.
LIMITED = b"x-tms-limited"


class Poll(ContextRoute):
    """``POST …/poll``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers = self._context, headers_of(scope)
        topic, codec = topic_of(scope), context.codec(headers)
        with context.memory.share(abort_of(scope)) as share:
            query = await context.read(scope, headers, receive, codec.read_poll, share, limit=context.poll_body)
            share.close()
            request = self._limit_request(_waits(headers, query))
            answer_headers = [(b"content-type", codec.content_type)]
            if request is not query and (request.limit, request.limit_bytes) != (query.limit, query.limit_bytes):
                answer_headers.append((LIMITED, b"true"))
            zipped = accepts_gzip(headers)
            if zipped:
                answer_headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
            with closing(_Polling(context, topic, request, codec, share, zipped=zipped)) as polling:
                made = await polling.begin(scope, receive)
                await send({"type": "http.response.start", "status": 200, "headers": answer_headers + polling.headers})
                if polling.ended:
                    small = _size(made) < _SMALL_BYTES
                    await polling.send([b"".join(made)] if small else made, send)
                else:
                    await polling.stream(made, scope, receive, send)
                spend(scope, polling.saved_bytes)

    def _limit_request(self, request: FetchRequest) -> FetchRequest:
        """Return a request within the server's own limits (``server.poll_limit``)."""
        most = self._context.poll_limit
        messages = min(request.limit, most.messages or request.limit)
        size = most.bytes or LONG_MAX
        if messages == request.limit and size == LONG_MAX:
            return request
        return replace(request, limit=messages, limit_bytes=size)


class _Polling:
    """A running poll."""

    def __init__(
        self, context: ServerContext, topic: TopicId, request: FetchRequest, codec: Codec, share: Share, *, zipped: bool
    ) -> None:
        self._context = context
        self._topic = topic
        self._request = request
        self._codec = codec
        self._share = share
        self._zipped = zipped
        self._pieces: Iterator[bytes] = iter(())
        self._fetch: Fetch | None = None
        self._found = 0
        self._is_streaming = False
        self.ended = self.waited = False
        #: The ratio by which compression has reduced the response.
        self.saved_bytes = 0

    def close(self) -> None:
        """Release the read data, because this object and its generators refer to each other."""
        self._pieces = iter(())
        self._fetch = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response: its position if the response is complete, and whether the poll waited in
        vain.
        """
        found = self._fetch.position if self.ended and self._fetch is not None else None
        headers = [] if found is None else [(POSITION, str(found).encode())]
        if self._fetch is not None and self._fetch.is_sealed:
            headers.append((SEALED, b"true"))
        return [*headers, (WAITED, b"true")] if self.waited else headers

    async def begin(self, scope: Scope, receive: Receive) -> list[bytes]:
        """Return the first pieces: a short response as a whole, or the start of a long one.

        Raises:
            Disconnected: the client has disconnected.
            Unavailable: the poll has to wait, but the principal has too many waiting polls.
        """
        await self._reserve_step()
        made = await self._context.in_poll_thread(scope, self._first)
        if self.ended and (self._found or not self._request.wait_seconds):
            return made
        if not self.ended and _size(made) >= _SMALL_BYTES:
            return made
        until = asyncio.get_running_loop().time() + self._request.wait_seconds
        async with _watching(receive) as disconnect:
            while True:
                while not self.ended and _size(made) < _SMALL_BYTES:
                    _look(scope, disconnect)
                    made += await self._context.in_poll_thread(scope, self._step)
                remaining = until - asyncio.get_running_loop().time()
                if self._found or not self.ended:
                    return made
                if remaining <= 0 or not await self._arrival(remaining, disconnect, scope.get("principal")):
                    self.waited = remaining <= 0 < self._request.wait_seconds
                    return made
                _look(scope, disconnect)
                await self._reserve_step()
                made = await self._context.in_poll_thread(scope, self._read_again)

    async def stream(self, made: list[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        """Send each piece and produce the next one, until there are no more or the client has disconnected."""
        self._is_streaming = True
        async with _watching(receive) as disconnect:
            while not (self.ended or disconnect.done()):
                await self.send(made, send)
                if not disconnect.done():
                    await self._reserve_step()
                if not disconnect.done():
                    made = await self._context.in_poll_thread(scope, self._step)
            await self.send(made, send)

    async def send(self, made: list[bytes], send: Send) -> None:
        """Send the encoded pieces, and close the response after the last piece."""
        self._share.begin_waiting()
        made.reverse()
        more = True
        while made:
            # No other reference remains, so the piece is freed after it is sent.
            piece = made.pop()
            more = not self.ended or bool(made) or len(piece) > FREE_BYTES
            await send({"type": "http.response.body", "body": piece, "more_body": more})
        if more:
            # The next piece is encoded before the previous one is sent; this waits until nearly all of it is sent.
            await send({"type": "http.response.body", "body": b"", "more_body": not self.ended})
        self._share.end_waiting()

    async def _reserve_step(self) -> None:
        """Reserve memory for a step, enough for the largest possible message."""
        known = self._context.sizes.of(self._topic)
        largest = self._context.max_request_bytes if known is None else known
        size = _HELD * (_STEP_BYTES + largest) - self._share.size
        if size > 0:
            await self._share.take(size, brief=not self._is_streaming and (known or 0) <= _STEP_BYTES)

    async def _arrival(self, seconds: float, disconnect: asyncio.Future[object], principal: str | None) -> bool:
        """Wait until messages may have arrived; return False if waiting is useless.

        Raises:
            Unavailable: the principal has too many waiting polls.
        """
        fetch, context = self._fetch, self._context
        if fetch is None or not fetch.is_at_end or context.waiting.closed:
            return False
        self._share.close()
        came = asyncio.get_running_loop().create_future()
        wake = waking(came)
        with fetch.on_messages(wake), context.waiting.waiting(wake, principal):
            if not fetch.has_more and not context.waiting.closed:
                await asyncio.wait(
                    {came, disconnect}, timeout=min(seconds, _LOOK_SECONDS), return_when=asyncio.FIRST_COMPLETED
                )
        return not context.waiting.closed

    # -- in a thread --------------------------------------------------------------------------------------------------

    def _first(self) -> list[bytes]:
        """Start to read, and encode the first pieces."""
        self._fetch = fetch = self._context.service.begin_fetch(self._topic, self._request)
        pieces = self._codec.write_messages(self._counted(fetch.pages()))
        self._pieces = _gzip(self._measured(pieces)) if self._zipped else pieces
        self.ended = False
        return self._step()

    def _read_again(self) -> list[bytes]:
        """Read again after the rows that were already read."""
        position = self._fetch.position if self._fetch is not None else None
        if position is not None:
            self._request = replace(self._request, start=position, inclusive=True)
        return self._first()

    def _step(self) -> list[bytes]:
        """Return the next pieces; there may be none yet."""
        until = time.monotonic() + STEP_SECONDS
        made: list[bytes] = []
        size = 0
        for piece in self._pieces:
            if piece:
                made.append(piece)
                size += len(piece)
            if size >= _STEP_BYTES or time.monotonic() >= until:
                break
        else:
            self.ended = True
        if self._zipped:
            self.saved_bytes -= size
        if self._fetch is not None:
            self._context.sizes.learn(self._topic, self._fetch.largest_bytes)
        return made

    def _measured(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.saved_bytes += len(piece)
            yield piece

    def _counted(self, pages: Iterable[MessageList]) -> Iterator[MessageList]:
        for page in pages:
            if page:
                self._found += len(page)
                harmless(self._context.metrics.fetched, self._topic, len(page))
            yield page


@asynccontextmanager
async def _watching(receive: Receive) -> AsyncIterator[asyncio.Future[object]]:
    """Clean up after the client has disconnected."""
    disconnect: asyncio.Future[object] = asyncio.ensure_future(receive())
    try:
        yield disconnect
    finally:
        disconnect.cancel()
        with suppress(asyncio.CancelledError):
            await disconnect


def _look(scope: Scope, disconnect: asyncio.Future[object]) -> None:
    """Check whether the client is still connected."""
    if disconnect.done():
        raise Disconnected
    probe_of(scope)()


def _waits(headers: Headers, request: FetchRequest) -> FetchRequest:
    """Return a request with the wait of its header.

    Raises:
        BadRequest: the header is not a valid number of seconds.
    """
    seconds = headers.get(WAIT)
    if seconds is None:
        return request
    if not seconds.isdigit() or len(seconds) > len(str(LONG_MAX)):
        raise BadRequest("X-TMS-Wait-Seconds: this is not a whole number of seconds.", "Give 0 to 60.")
    return replace(request, wait_seconds=int(seconds))


def _size(made: list[bytes]) -> int:
    return sum(map(len, made))


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Return a fast compressor: even the fastest level reduces messages to a fraction of their size."""
    member = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    yield from map(member.compress, pieces)
    yield member.flush()
