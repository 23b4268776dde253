"""Publishing, storing payloads ahead of a publish, and rolling back: what producers call.

Plain ASGI, because every message comes this way. The event loop reads and decodes, the service's own thread writes, and
"200" is sent when it says that the batch is on disk. A request that was handed over is written even if its client goes
away; the answer then finds nobody.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest
from tms_core.server.avro import AvroCodec
from tms_core.server.codec import Codec
from tms_core.server.json_text import JsonCodec
from tms_core.server.site import Site, answer, headers_of, json_name, outcome, topic_of


class Publish:
    """``POST …/publish``."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, headers = self._site, headers_of(scope)
        topic, codec = topic_of(scope), site.codec(headers)
        pointer, messages, ttl_seconds = await site.read(headers, receive, codec.read_publish)
        written = await outcome(site.service.submit_publish(topic, messages, pointer=pointer, ttl_seconds=ttl_seconds))
        site.metrics.published.inc(len(messages))
        if written is None:
            await answer(send, 200)
        else:
            await answer(send, 200, codec.write_published(written), codec.content_type)


class Store:
    """``POST …/store``: payloads that an empty ``publish`` of the same transaction makes visible."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, headers = self._site, headers_of(scope)
        topic, codec = topic_of(scope), site.codec(headers)
        pointer, messages, ttl_seconds = await site.read(headers, receive, codec.read_publish)
        if pointer is None:
            raise BadRequest("Payloads are stored in a transaction only.", "Give its transactionWritePointer.")
        if ttl_seconds is not None:
            raise BadRequest("ttlSeconds: a stored payload lives as long as its message.", "Leave it out.")
        await outcome(site.service.submit_store(topic, messages, pointer=pointer))
        site.metrics.published.inc(len(messages))
        await answer(send, 200)


class Rollback:
    """``POST …/rollback``: takes the answer of ``publish``. CDAP asks for no content type here."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._json: Codec = JsonCodec(site.json_poll_limit)
        self._avro: Codec = AvroCodec()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, headers = self._site, headers_of(scope)
        topic = topic_of(scope)
        codec = self._json if json_name(headers.get(b"content-type", b"")) else self._avro
        written = await site.read(headers, receive, codec.read_rollback)
        await site.in_thread(site.service.rollback, topic, written)
        await answer(send, 200)
