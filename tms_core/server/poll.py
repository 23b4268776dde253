"""Polling: what consumers call.

Plain ASGI, because every message leaves this way. Threads read pages of the store and encode them, half a megabyte at a
time; the event loop sends what one step made while the next is being made. So an answer of any length takes the memory
of two steps, and a slow consumer holds back only himself. Once "200" is sent, an error can only cut the answer short:
chunked encoding shows the client that its end is missing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from tms_core.messaging.model import FetchRequest, Message
from tms_core.server.body import GZIP, accepts_gzip
from tms_core.server.codec import Codec
from tms_core.server.site import Site, headers_of, topic_of
from tms_core.topic import TopicId

#: How much a thread makes at a time, so that handing over costs next to nothing beside it.
_STEP_BYTES = 480_000


class _Made(NamedTuple):
    """Pieces of an answer, and whether there may be more."""

    pieces: list[bytes]
    more: bool


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
        first = await site.in_thread(_make, pieces)
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

    async def _stream(self, made: _Made, pieces: Iterator[bytes], receive: Receive, send: Send) -> None:
        """Send what was made while more is being made, until there is no more or the client is gone."""
        gone = asyncio.ensure_future(receive()) if made.more else None
        try:
            while gone is not None and made.more:
                ahead = self._site.in_thread(_make, pieces)
                for piece in made.pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                made = await ahead
                if gone.done():
                    return
            *pieces_before, last = made.pieces or [b""]
            for piece in pieces_before:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": last})
        finally:
            if gone is not None:
                gone.cancel()
                with suppress(asyncio.CancelledError):
                    await gone


def _make(pieces: Iterator[bytes]) -> _Made:
    made: list[bytes] = []
    size = 0
    for piece in pieces:
        made.append(piece)
        size += len(piece)
        if size >= _STEP_BYTES:
            return _Made(made, more=True)
    return _Made(made, more=False)


def _gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Fast rather than small: the fastest level makes messages a fraction of their size already."""
    member = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    for piece in pieces:
        if packed := member.compress(piece):
            yield packed
    yield member.flush()
