"""Polls of consumers.

This is plain ASGI for speed. Threads read pages of the store and encode them in steps: half a megabyte, or one larger
message, or the pages within :data:`STEP_SECONDS`. Between two steps the connection is checked, so that nothing is read
for a disconnected client. A step starts after the event loop has sent the previous step, except for the connection's
buffer. Therefore the memory of a response does not depend on its length; it is reserved before each step
(:mod:`tms_core.server.memory`). After "200" was sent, an error can only truncate the response, which the client detects
by the chunked encoding.

A short response has a header with its position, so that the next poll does not read the same rows. A poll without
messages may wait for a message before the response is sent.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest, Forbidden, Unauthorized, Unavailable
from tms_core.logs.loggers import harmless
from tms_core.messaging.fetcher import Fetch
from tms_core.messaging.model import FetchRequest, MessageList
from tms_core.rowkey import LONG_MAX
from tms_core.server.auth.gate import Need
from tms_core.server.codec.bodies import Codec
from tms_core.server.memory import FREE_BYTES, Share
from tms_core.server.rest.body import GZIP, Disconnected, Headers, accepts_gzip
from tms_core.server.rest.context import ContextRoute, ServerContext, headers_of, make_wake, spend, topic_of
from tms_core.topic import TopicId
from tms_core.web.protocol import probe_of

#: The maximum size of an encoded step in bytes; the cost of a thread switch is negligible for this size.
_STEP_BYTES = 1 << 19
#: The maximum duration of a step in seconds, because other requests may wait for the thread.
STEP_SECONDS = 0.02
#: The maximum size of a response that is sent in one piece, in bytes.
_SMALL_BYTES = 50_000
#: The memory for each encoded byte of a step: the byte, its source page, and the bytes in transit.
_COPIES = 4
#: The interval at which a waiting poll checks its topic and its client, in seconds.
_CHECK_SECONDS = 5.0

#: The request header with the time to wait for a message, in whole seconds.
WAIT = b"x-tms-wait-seconds"
#: The response header with the position of a poll: the id from which the next poll may start.
POSITION = b"x-tms-position"
#: The header of an empty response after the whole requested wait.
WAITED = b"x-tms-waited"
#: The response header of a topic that accepts no more messages.
SEALED = b"x-tms-sealed"
#: The response header of a poll that the server's limit has reduced.
LIMITED = b"x-tms-limited"


class Poll(ContextRoute):
    """``POST …/poll``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers = self._context, headers_of(scope)
        topic, codec = topic_of(scope), context.codec(headers)
        with context.share(scope) as share:
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
        """Return a request within the server's limits (``server.poll_limit``)."""
        limit = self._context.poll_limit
        messages = min(request.limit, limit.messages or request.limit)
        size = limit.bytes or LONG_MAX
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
        #: The number of bytes by which compression has reduced the response.
        self.saved_bytes = 0

    def close(self) -> None:
        """Release the read data, which a reference cycle with the generators would keep alive."""
        self._pieces = iter(())
        self._fetch = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response: the position after a complete response, the seal, and a useless wait."""
        found = self._fetch.position if self.ended and self._fetch is not None else None
        headers = [] if found is None else [(POSITION, str(found).encode())]
        if self._fetch is not None and self._fetch.is_sealed:
            headers.append((SEALED, b"true"))
        return [*headers, (WAITED, b"true")] if self.waited else headers

    async def begin(self, scope: Scope, receive: Receive) -> list[bytes]:
        """Return the first pieces: a complete short response, or the start of a long response.

        Raises:
            Disconnected: the client has disconnected.
            Unavailable: the poll must wait, but the principal has too many waiting polls.
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
                    _check_client(scope, disconnect)
                    made += await self._context.in_poll_thread(scope, self._step)
                remaining = until - asyncio.get_running_loop().time()
                if self._found or not self.ended:
                    return made
                if (
                    remaining <= 0
                    or not await self._wait_for_arrival(remaining, disconnect, scope.get("principal"))
                    or not self._is_permitted(scope)
                ):
                    self.waited = remaining <= 0 < self._request.wait_seconds
                    return made
                _check_client(scope, disconnect)
                await self._reserve_step()
                made = await self._context.in_poll_thread(scope, self._read_again)

    def _is_permitted(self, scope: Scope) -> bool:
        """Return whether the client may still read: its token may have been revoked, or have expired, during a wait.

        If not, the poll returns no messages, and the server rejects the client's next request.
        """
        gate = self._context.gate
        if gate is not None:
            try:
                gate.require(gate.principal(scope["headers"]), self._topic, Need.CONSUME)
            except (Unauthorized, Forbidden, Unavailable):
                return False
        return True

    async def stream(self, made: list[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        """Send pieces and read the next ones, until all messages are sent or the client has disconnected."""
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
            # Remove the last reference, so that the piece is freed after it is sent.
            piece = made.pop()
            more = not self.ended or bool(made) or len(piece) > FREE_BYTES
            await send({"type": "http.response.body", "body": piece, "more_body": more})
        if more:
            # Wait until nearly all bytes are sent, so that the next step does not start earlier.
            await send({"type": "http.response.body", "body": b"", "more_body": not self.ended})
        self._share.end_waiting()

    async def _reserve_step(self) -> None:
        """Reserve memory for a step, including the largest possible message."""
        known = self._context.sizes.of(self._topic)
        largest = self._context.max_request_bytes if known is None else known
        size = _COPIES * (_STEP_BYTES + largest) - self._share.size
        if size > 0:
            await self._share.take(size, brief=not self._is_streaming and (known or 0) <= _STEP_BYTES)

    async def _wait_for_arrival(
        self, seconds: float, disconnect: asyncio.Future[object], principal: str | None
    ) -> bool:
        """Wait until messages may have arrived; return False if the poll must not wait any longer.

        Raises:
            Unavailable: the principal has too many waiting polls.
        """
        fetch, context = self._fetch, self._context
        if fetch is None or not fetch.is_at_end or context.waiting.closed:
            return False
        self._share.close()
        arrival = asyncio.get_running_loop().create_future()
        wake = make_wake(arrival)
        with fetch.on_messages(wake), context.waiting.waiting(wake, principal):
            if not fetch.has_more and not context.waiting.closed:
                await asyncio.wait(
                    {arrival, disconnect}, timeout=min(seconds, _CHECK_SECONDS), return_when=asyncio.FIRST_COMPLETED
                )
        return not context.waiting.closed

    # -- in a thread --------------------------------------------------------------------------------------------------

    def _first(self) -> list[bytes]:
        """Start a fetch, and return the first pieces."""
        self._fetch = fetch = self._context.service.begin_fetch(self._topic, self._request)
        pieces = self._codec.write_messages(self._counted(fetch.pages()))
        self._pieces = _gzip(self._measured(pieces)) if self._zipped else pieces
        self.ended = False
        return self._step()

    def _read_again(self) -> list[bytes]:
        """Start another fetch after the rows that were already read."""
        position = self._fetch.position if self._fetch is not None else None
        if position is not None:
            self._request = replace(self._request, start=position, inclusive=True)
        return self._first()

    def _step(self) -> list[bytes]:
        """Return the pieces of one step, which may have none."""
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
    """Yield a future that is done when the client has disconnected."""
    disconnect: asyncio.Future[object] = asyncio.ensure_future(receive())
    try:
        yield disconnect
    finally:
        disconnect.cancel()
        with suppress(asyncio.CancelledError):
            await disconnect


def _check_client(scope: Scope, disconnect: asyncio.Future[object]) -> None:
    """Raise :class:`Disconnected` if the client has disconnected."""
    if disconnect.done():
        raise Disconnected
    probe_of(scope)()


def _waits(headers: Headers, request: FetchRequest) -> FetchRequest:
    """Return a request with the wait of the header.

    Raises:
        BadRequest: the header is not a valid number of seconds.
    """
    seconds = headers.get(WAIT)
    if seconds is None:
        return request
    if not seconds.isdigit() or len(seconds) > len(str(LONG_MAX)):
        raise BadRequest("X-TMS-Wait-Seconds: this is not a whole number of seconds.", "Use 0 to 60.")
    return replace(request, wait_seconds=int(seconds))


def _size(made: list[bytes]) -> int:
    return sum(map(len, made))


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield compressed pieces; the fastest level already reduces messages to a fraction of their size."""
    member = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    yield from map(member.compress, pieces)
    yield member.flush()
