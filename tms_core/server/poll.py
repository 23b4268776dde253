"""Polling: what consumers call.

Plain ASGI, because every message leaves this way. Threads read pages of the store and encode them, half a megabyte at a
time, or one message that is larger; the next step is made when the event loop has sent this one, but for what the
connection buffers. So what an answer takes does not depend on its length. Measured, of clients that read nothing: 2.6
MB each with messages of 100 bytes, 4.5 MB with messages of 1 MB, threads' leftovers included. A slow consumer holds
back only himself as long as all of them together leave room (:mod:`tms_core.server.room`). Once "200" is sent, an error
can only cut the answer short: chunked encoding shows the client that its end is missing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from tms_core.messaging.model import FetchRequest, Message
from tms_core.server.body import GZIP, accepts_gzip
from tms_core.server.codec import Codec
from tms_core.server.protocol import abort_of
from tms_core.server.room import Part, Room
from tms_core.server.site import Site, headers_of, topic_of
from tms_core.topic import TopicId

#: How much a thread makes at a time, so that handing over costs next to nothing beside it.
_STEP_BYTES = 480_000
#: What is sent at once, as the whole answer; less than a piece of an answer that goes on.
_SMALL_BYTES = 50_000
#: How much memory is taken for each byte that a step made: that, the page it was made of, and what is being sent.
_HELD = 4


class Poll:
    """``POST …/poll``."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._room = Room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, headers = self._site, headers_of(scope)
        topic, codec = topic_of(scope), site.codec(headers)
        request = await site.read(headers, receive, codec.read_poll)
        answer_headers = [(b"content-type", codec.content_type)]
        zipped = accepts_gzip(headers)
        if zipped:
            answer_headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
        pieces = self._pieces(topic, request, codec, zipped=zipped)
        await self._room.free()
        first = await site.in_thread(_make, pieces)
        await send({"type": "http.response.start", "status": 200, "headers": answer_headers})
        if sum(map(len, first)) < _SMALL_BYTES:
            await send({"type": "http.response.body", "body": b"".join(first)})
            return
        with Part(self._room, abort_of(scope)) as part:
            await self._stream(first, pieces, part, receive, send)

    def _pieces(self, topic: TopicId, request: FetchRequest, codec: Codec, *, zipped: bool) -> Iterator[bytes]:
        """The answer's body; nothing is read before the first of it is asked for."""
        pages = self._counted(self._site.service.fetch(topic, request))
        pieces = codec.write_messages(pages)
        yield from _gzip(pieces) if zipped else pieces

    def _counted(self, pages: Iterable[list[Message]]) -> Iterator[list[Message]]:
        for page in pages:
            self._site.metrics.fetched.inc(len(page))
            yield page

    async def _stream(
        self, made: list[bytes], pieces: Iterator[bytes], part: Part, receive: Receive, send: Send
    ) -> None:
        """Send what was made, then make more, until there is no more or the client is gone."""
        gone = asyncio.ensure_future(receive())
        try:
            while made and not gone.done():
                part.keep(_HELD * sum(map(len, made)))
                made.reverse()
                while made:
                    # Kept by nobody else, it is gone once it is sent.
                    await send({"type": "http.response.body", "body": made.pop(), "more_body": True})
                part.let_go()
                await self._room.free()
                made = await self._site.in_thread(_make, pieces)
            await send({"type": "http.response.body"})
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone


def _make(pieces: Iterator[bytes]) -> list[bytes]:
    """The next pieces; none at the end."""
    made: list[bytes] = []
    size = 0
    for piece in pieces:
        made.append(piece)
        size += len(piece)
        if size >= _STEP_BYTES:
            break
    return made


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Fast rather than small: the fastest level makes messages a fraction of their size already."""
    member = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    for piece in pieces:
        if packed := member.compress(piece):
            yield packed
    yield member.flush()
