"""Polling: what consumers call.

Plain ASGI, because every message leaves this way. Threads read pages of the store and encode them, a few pieces at a
time; the event loop sends what one step made while the next is being made. So an answer of any length takes the memory
of two steps, and a slow consumer holds back only himself. Once "200" is sent, an error can only cut the answer short:
chunked encoding shows the client that its end is missing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from starlette.types import Receive, Scope, Send

from tms_core.messaging.model import FetchRequest, Message
from tms_core.server.body import GZIP, accepts_gzip
from tms_core.server.codec import Codec
from tms_core.server.site import Site, headers_of, topic_of
from tms_core.topic import TopicId

#: How many pieces a thread makes at a time: half a megabyte, so that handing over costs next to nothing.
_STEP = 8


class Poll:
    """``POST …/poll``."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, headers = self._site, headers_of(scope)
        topic, codec = topic_of(scope), site.codec(headers)
        request = await site.read(headers, receive, codec.read_poll)
        answer_headers = [(b"content-type", codec.content_type)]
        zipped = accepts_gzip(headers)
        if zipped:
            answer_headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
        pieces = self._pieces(topic, request, codec, zipped=zipped)
        first = await site.in_thread(_step, pieces)
        await send({"type": "http.response.start", "status": 200, "headers": answer_headers})
        await self._stream(first, pieces, receive, send)

    def _pieces(self, topic: TopicId, request: FetchRequest, codec: Codec, *, zipped: bool) -> Iterator[bytes]:
        """The answer's body; nothing is read before the first of it is asked for."""
        pages = self._counted(self._site.service.fetch(topic, request))
        pieces = codec.write_messages(pages)
        yield from _gzip(pieces) if zipped else pieces

    def _counted(self, pages: Iterable[list[Message]]) -> Iterator[list[Message]]:
        for page in pages:
            self._site.metrics.fetched.inc(len(page))
            yield page

    async def _stream(self, first: list[bytes], pieces: Iterator[bytes], receive: Receive, send: Send) -> None:
        """Send the pieces, one ahead of each other, until there are no more or the client is gone."""
        made, gone = first, None
        try:
            while len(made) == _STEP:
                gone = gone or asyncio.ensure_future(receive())
                ahead = asyncio.ensure_future(self._site.in_thread(_step, pieces))
                for piece in made:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                made = await ahead
                if gone.done():
                    return
            for piece in made[:-1]:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": made[-1] if made else b""})
        finally:
            if gone is not None:
                gone.cancel()
                with suppress(asyncio.CancelledError):
                    await gone


def _step(pieces: Iterator[bytes]) -> list[bytes]:
    return list(islice(pieces, _STEP))


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Fast rather than small: the fastest level makes messages a fraction of their size already."""
    member = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    for piece in pieces:
        if packed := member.compress(piece):
            yield packed
    yield member.flush()
