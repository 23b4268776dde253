"""Polls of consumer groups, and the release of a transaction's claims.

Unlike a plain poll, a group's poll claims and reads the whole batch before the response starts. Therefore the server
limits its size, independent of the request.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest
from tms_core.logs.loggers import harmless
from tms_core.messaging.groups.claims import GroupBatch, GroupPoll, Order
from tms_core.messaging.model import FetchRequest
from tms_core.server.rest.body import BodyLimit, Headers
from tms_core.server.rest.context import ContextRoute, headers_of, respond, topic_of
from tms_core.server.rest.poll import POSITION, SEALED
from tms_core.topic import INT_MAX

#: The header with the order of the group: ``partition`` or ``none``.
ORDER = b"x-tms-order"
#: The header with the maximum number of deliveries of a message; the last delivery has a single message.
MAX_DELIVERIES = b"x-tms-max-deliveries"
#: The response header with the number of deliveries of the messages, including this one.
DELIVERIES = b"x-tms-deliveries"
#: The header of an empty response with the transaction that must be decided first.
HELD = b"x-tms-held"
#: The header of an empty response with the partition that the group must drain first.
EARLIER_PARTITION = b"x-tms-behind"

#: The header of an empty response with the time until failed messages are delivered again, in milliseconds.
RETRY = b"x-tms-retry-ms"

#: The maximum size of a batch in bytes, which is a reasonable size for a transaction.
_BATCH_BYTES = 4_000_000
#: The memory for each byte of a batch: the messages, the encoded response, and the bytes being sent.
_COPIES = 3
_ROLLBACK = BodyLimit(16 << 10, "the limit of a rollback")
_DIGITS = 10


class PollGroup(ContextRoute):
    """``POST …/topics/{topic}/consumers/{name}/poll``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers, name = self._context, headers_of(scope), scope["path_params"]["name"]
        topic, codec = topic_of(scope), context.codec(headers)
        with context.share(scope) as share:
            fetch_request = await context.read(scope, headers, receive, codec.read_poll, share, limit=context.poll_body)
            share.close()
            request = self._request(headers, fetch_request, scope.get("principal"))
            known = context.sizes.of(topic)
            largest = context.max_request_bytes if known is None else known
            # Most waiting polls of one principal hold no memory, which other principals need. No poll waits for memory
            # with the turn of a thread, because plain polls have memory while they wait for a turn.
            async with context.group_poll_shares.of(request.principal):
                await share.take(_COPIES * (request.limit_bytes + largest))
                batch = await context.in_poll_thread(scope, context.service.groups.poll, topic, name, request)
            body = b"".join(codec.write_messages([batch.messages] if batch.messages else []))
            harmless(context.metrics.fetched, topic, len(batch.messages))
            if batch.deliveries > 1:
                harmless(context.metrics.redelivered.inc, len(batch.messages))
            if batch.deliveries > (request.max_deliveries or INT_MAX):
                harmless(context.metrics.dead_letters.inc, len(batch.messages))
            await respond(send, 200, body, codec.content_type, *_batch_headers(batch))

    def _request(self, headers: Headers, fetch_request: FetchRequest, principal: str | None) -> GroupPoll:
        """Return the parameters of a poll, within the server's limits.

        Raises:
            BadRequest: the poll has no transaction, or has a field or a header that is not valid for groups.
        """
        if fetch_request.transaction is None:
            raise BadRequest("The poll of a group needs a transaction.", "Start a transaction, and send it.")
        if fetch_request.start is not None:
            raise BadRequest(
                "The poll of a group cannot have startFrom, because the group has a position.",
                "Omit startFrom, or set the position of the group first.",
            )
        if fetch_request.wait_seconds:
            raise BadRequest(
                "The poll of a group cannot wait.", "Wait with a poll without a group before you start a transaction."
            )
        limit = self._context.poll_limit
        return GroupPoll(
            fetch_request.transaction,
            min(fetch_request.limit, limit.messages or INT_MAX),
            min(_BATCH_BYTES, limit.bytes or _BATCH_BYTES),
            _order(headers),
            _number(headers, MAX_DELIVERIES),
            principal,
        )


class RollBackGroup(ContextRoute):
    """``POST …/topics/{topic}/consumers/{name}/rollback``: releases the claims of a transaction, all or after an id."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers, name = self._context, headers_of(scope), scope["path_params"]["name"]
        topic, codec = topic_of(scope), context.codec(headers)
        with context.share(scope) as share:
            pointer, after = await context.read(
                scope, headers, receive, codec.read_group_rollback, share, limit=_ROLLBACK
            )
        await context.in_thread(
            scope, context.service.groups.roll_back, topic, name, pointer, after, scope.get("principal")
        )
        await respond(send, 200)


def _batch_headers(batch: GroupBatch) -> list[tuple[bytes, bytes]]:
    """Return the response headers of a batch."""
    headers: list[tuple[bytes, bytes]] = []
    if batch.messages:
        headers.append((DELIVERIES, b"%d" % batch.deliveries))
    if batch.held is not None:
        headers.append((HELD, b"%d" % batch.held))
    if batch.position is not None:
        headers.append((POSITION, str(batch.position).encode()))
    if batch.sealed:
        headers.append((SEALED, b"drained" if batch.drained else b"draining"))
    if batch.earlier_partition is not None:
        headers.append((EARLIER_PARTITION, str(batch.earlier_partition).encode()))
    if batch.wait_ms is not None:
        headers.append((RETRY, b"%d" % batch.wait_ms))
    return headers


def _order(headers: Headers) -> Order:
    try:
        return Order(headers.get(ORDER, b"partition").decode("latin-1"))
    except ValueError as error:
        raise BadRequest("X-TMS-Order: this is not an order.", "Send partition or none.") from error


def _number(headers: Headers, name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > _DIGITS or not 0 < int(value) <= INT_MAX:
        raise BadRequest("X-TMS-Max-Deliveries: this is not a number of deliveries.", f"Use 1 to {INT_MAX}.")
    return int(value)
