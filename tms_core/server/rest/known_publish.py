"""A fast path for publishes with a known request head: it skips parsing and routing, but no checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from tms_core.messaging.model import RollbackRange
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.server.auth.gate import Need
from tms_core.server.codec.bodies import Codec
from tms_core.server.rest.body import Headers
from tms_core.server.rest.context import ServerContext, when_done
from tms_core.topic import TopicId
from tms_core.web.protocol import HttpProtocol

#: The maximum number of cached heads; a client has one for each topic, token and body size.
KNOWN_HEADS = 2048
#: Creates a Sent faster than its constructor, because every request of a producer needs one.
_sent = partial(tuple.__new__, Sent)


class KnownPublish:
    """A handler of publishes with a known head, which has neither a TTL nor a compression.

    Route, host, topic name and codec depend only on the head, so they were checked when it was parsed. The token, the
    permissions, the body, the topic and the number of a producer's request are checked for each request.

    Args:
        headers: the headers of the head.
        sent: the producer headers of the first request with the head; None: without a producer.
    """

    __slots__ = ("_authorization", "_codec", "_context", "_sent", "_topic")

    def __init__(
        self, context: ServerContext, topic: TopicId, codec: Codec, headers: Headers, sent: Sent | None
    ) -> None:
        self._context = context
        self._topic = topic
        self._codec = codec
        self._sent = sent
        self._authorization = tuple(header for header in headers.items() if header[0] == b"authorization")

    def __call__(self, connection: HttpProtocol, number: bytes, body: bytes) -> bool:
        """Publish a body; return False if the application must handle the request, for example to reject it."""
        context, topic, sent = self._context, self._topic, self._sent
        started = time.perf_counter()
        try:
            if (gate := context.gate) is not None:
                connection.principal = principal = gate.principal(self._authorization)
                gate.require(principal, topic, Need.PUBLISH)
                if sent is not None:
                    gate.require(principal, sent.home, Need.PUBLISH, sent.name)
                if gate.quotas.of(principal) is not None:
                    return False
            pointer, messages, ttl_seconds = self._codec.read_publish(body)
        except Exception:  # noqa: BLE001 the application repeats the check, and sends the error
            return False
        if pointer is not None or ttl_seconds is not None:
            return False
        if sent is not None:
            home, name, generation, _, label, oldest_open = sent
            sent = _sent((home, name, generation, int(number), label, oldest_open))
        began = time.perf_counter()
        try:
            written = context.service.submit_publish(topic, messages, sent=sent)
        except Exception as error:  # noqa: BLE001 the application sends the error
            # Do not repeat the publish, which may be submitted. Fail later, because this is a call of the connection.
            connection.loop.call_soon(connection.fail, error)
            return True
        when_done(written, partial(self._end, connection, written, messages, started, began))
        return True

    def _end(
        self,
        connection: HttpProtocol,
        written: PublishFuture[RollbackRange | None],
        messages: Sequence[bytes],
        started: float,
        began: float,
    ) -> None:
        try:
            written.result()
        except BaseException as error:  # noqa: BLE001 the application sends the error
            connection.fail(error)
            return
        connection.confirm()
        ended, metrics = time.perf_counter(), self._context.metrics
        metrics.published(self._topic, len(messages), ended - began)
        metrics.request("publish", 200, ended - started)
