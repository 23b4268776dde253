"""The routes that write messages: publish, store payloads, and roll back.

This is plain ASGI for speed. The event loop reads and decodes, a thread of the service writes, and "200" is sent when
the messages are durable. A submitted request is written even if its client disconnects.
"""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest
from tms_core.logs.loggers import harmless
from tms_core.server.codec.avro import AvroCodec
from tms_core.server.codec.bodies import Codec
from tms_core.server.codec.json_text import JsonCodec
from tms_core.server.rest.body import BodyLimit, Headers, is_compressed
from tms_core.server.rest.context import ContextRoute, ServerContext, headers_of, json_name, outcome, respond, topic_of
from tms_core.server.rest.known_publish import KnownPublish
from tms_core.server.rest.producers import parse_producer_headers
from tms_core.web.protocol import failure_of, know

#: The header with the TTL of the messages in seconds, if it is shorter than the topic's TTL.
TTL = b"x-tms-ttl-seconds"
_TTL_DIGITS = 10
#: The maximum size of a rollback, whose five numbers need a few hundred bytes.
_ROLLBACK = BodyLimit(16 << 10, "the limit of a rollback")


class Publish(ContextRoute):
    """``POST …/publish``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (failure := failure_of(scope)) is not None:
            raise failure
        context, headers = self._context, headers_of(scope)
        topic, codec = topic_of(scope), context.codec(headers)
        with context.share(scope) as share:
            pointer, messages, ttl_seconds = await context.read(
                scope, headers, receive, codec.read_publish, share, cost=codec.publish_cost
            )
            context.sizes.note(topic, messages, share.size)
            principal = scope.get("principal")
            ttl_seconds, sent = _ttl(headers, ttl_seconds), parse_producer_headers(context, principal, headers)
            began = time.perf_counter()
            written = await outcome(
                context.service.submit_publish(
                    topic, messages, pointer=pointer, ttl_seconds=ttl_seconds, sent=sent, principal=principal
                )
            )
        seconds = time.perf_counter() - began
        try:
            if written is None:
                await respond(send, 200)
                if TTL not in headers and not is_compressed(headers):
                    know(scope, KnownPublish(context, topic, codec, headers, sent))
            else:
                await respond(send, 200, codec.write_published(written), codec.content_type)
        finally:
            # Count after the response, so that the client does not wait.
            harmless(context.metrics.published, topic, len(messages), seconds)


class StorePayloads(ContextRoute):
    """``POST …/store``: stores payloads that an empty ``publish`` of the same transaction makes visible.

    Without payloads, and for the home of the request's producer, it stores the producer's transaction.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers = self._context, headers_of(scope)
        topic, codec = topic_of(scope), context.codec(headers)
        with context.share(scope) as share:
            pointer, messages, ttl_seconds = await context.read(
                scope, headers, receive, codec.read_publish, share, cost=codec.publish_cost
            )
            if pointer is None:
                raise BadRequest("Payloads can only be stored in a transaction.", "Send transactionWritePointer.")
            if _ttl(headers, ttl_seconds) is not None:
                raise BadRequest(
                    "Stored payloads cannot have a ttl; they live as long as the message that publishes them.",
                    "Send ttlSeconds with the publish of the stored payloads.",
                )
            context.sizes.note(topic, messages, share.size)
            principal = scope.get("principal")
            sent = parse_producer_headers(context, principal, headers)
            if not messages and sent is not None and sent.home == topic:
                await context.in_thread(scope, context.service.store_transaction, sent, pointer, principal)
            else:
                stored = context.service.submit_store(topic, messages, pointer=pointer, sent=sent, principal=principal)
                await outcome(stored)
        harmless(context.metrics.published, topic, len(messages))
        await respond(send, 200)


class Rollback(ContextRoute):
    """``POST …/rollback`` with the response of ``publish`` as body; as in CDAP, the content type is optional."""

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self._json: Codec = JsonCodec()
        self._avro: Codec = AvroCodec()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers = self._context, headers_of(scope)
        topic = topic_of(scope)
        codec = self._json if json_name(headers.get(b"content-type", b"")) else self._avro
        with context.share(scope) as share:
            written = await context.read(scope, headers, receive, codec.read_rollback, share, limit=_ROLLBACK)
        principal = scope.get("principal")
        sent = parse_producer_headers(context, principal, headers, numbered=False)
        await context.in_thread(scope, context.service.rollback, topic, written, sent=sent, principal=principal)
        await respond(send, 200)


def _ttl(headers: Headers, body_seconds: int | None) -> int | None:
    """Return the TTL of the messages: from the header, which accompanies CDAP's encoding, or from the body.

    Raises:
        BadRequest: header and body have a TTL, or the header is not a number.
    """
    named = headers.get(TTL)
    if named is None:
        return body_seconds
    if body_seconds is not None:
        raise BadRequest("The header and the body both have a ttl.", "Send the ttl in the header or in the body.")
    if not named.isdigit() or len(named) > _TTL_DIGITS:
        raise BadRequest("X-TMS-TTL-Seconds: this is not a number of seconds.", "Use a whole number.")
    return int(named)
