"""The routes of topics and of consumers' positions. They use Starlette's requests, because these calls are rare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from threading import Lock
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tms_core.consumers.lag import Lag
from tms_core.errors import BadRequest
from tms_core.messaging.families import Permit, permit_all
from tms_core.server.auth.gate import Need
from tms_core.server.codec.json_text import read_position, read_properties
from tms_core.server.rest.body import BodyLimit
from tms_core.server.rest.context import ContextRoute, ServerContext, named_topic, topic_of
from tms_core.topic import INT_MAX, TopicId, parse_java_int

#: The maximum size of properties in JSON: 64 KiB of bytes that are escaped with six characters each.
_PROPERTIES = BodyLimit(400 << 10, "the properties of a topic may have 64 KB together")
#: The header of a change despite open claims, which invalidates their transactions.
FORCE = "x-tms-force"
#: The maximum size of a position in JSON; the position itself is 40 digits.
_POSITION = BodyLimit(16 << 10, "the limit of a position")


class TopicRoutes(ContextRoute):
    """The routes of topics."""

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        #: Held from the count of a principal's topics to the creation, so that concurrent requests respect the quota.
        self._counting = Lock()

    async def topics(self, request: Request) -> Response:
        """Handle ``GET …/topics``: the topics that the client may see."""
        namespace = named_topic(request.path_params["namespace"], "topics").namespace
        scope = request.scope
        listing = self._context.in_thread(scope, self._list_topics, namespace, scope.get("principal"))
        return JSONResponse(await listing)

    def _list_topics(self, namespace: str, principal: str | None) -> list[str]:
        found = [TopicId(namespace, name) for name in self._context.service.topics(namespace)]
        return [topic.topic for topic in self._visible(principal, found)]

    async def all_topics(self, request: Request) -> Response:
        """Handle ``GET /v1/topics``: the topics of all namespaces that the client may see."""
        scope = request.scope
        return JSONResponse(await self._context.in_thread(scope, self._list_all_topics, scope.get("principal")))

    def _list_all_topics(self, principal: str | None) -> list[str]:
        return [str(topic) for topic in self._visible(principal, self._context.service.all_topics())]

    def _visible(self, principal: str | None, topics: list[TopicId]) -> list[TopicId]:
        gate = self._context.gate
        return topics if gate is None or principal is None else list(gate.visible(principal, topics))

    async def topic(self, request: Request) -> Response:
        """``PUT``, ``GET`` and ``DELETE …/topics/{topic}``."""
        context, topic = self._context, topic_of(request.scope)
        if request.method == "PUT":
            async with context.body_of(request, read_properties, _PROPERTIES) as properties:
                await self._change(request, context.service.create_topic, topic, properties)
        elif request.method == "DELETE":
            await context.in_thread(request.scope, context.service.delete_topic, topic)
        else:
            return JSONResponse(await context.in_thread(request.scope, context.service.topic, topic))
        return Response()

    async def ages(self, request: Request) -> Response:
        """``GET …/topics/{topic}/ages?olderThanSeconds=N``: the messages that a shorter TTL would hide."""
        seconds = parse_java_int(request.query_params.get("olderThanSeconds", ""))
        if seconds is None or seconds <= 0:
            raise BadRequest(
                "olderThanSeconds is missing or is not a number of seconds.", f"Use whole seconds from 1 to {INT_MAX}."
            )
        context = self._context
        found = await context.in_poll_thread(
            request.scope, context.service.count_ages, topic_of(request.scope), seconds
        )
        counts = {"messages": found.messages, "older": found.older, "atLeast": found.at_least}
        return JSONResponse({**counts, "holdSeconds": context.hold_seconds()})

    async def properties(self, request: Request) -> Response:
        """``PUT …/topics/{topic}/properties``: replaces all properties."""
        context, topic = self._context, topic_of(request.scope)
        async with context.body_of(request, read_properties, _PROPERTIES) as properties:
            await self._change(request, context.service.update_topic, topic, properties)
        return Response()

    async def _change(
        self, request: Request, change: Callable[..., object], topic: TopicId, properties: Mapping[str, str]
    ) -> None:
        """Create or change a topic, within the client's permissions and quota."""
        gate, permit = self._context.gate, self._permit(request)
        quota = None if gate is None else gate.quotas.of(request.scope["principal"])

        def changed() -> None:
            # Without the lock, two requests could both count the topics before either creates one.
            with nullcontext() if quota is None or quota.topics is None else self._counting:
                change(topic, properties, permit=permit)

        await self._context.in_thread(request.scope, changed)

    def _permit(self, request: Request) -> Permit:
        """Return a check of the client's permission and quota for each created topic, including partitions."""
        gate = self._context.gate
        if gate is None:
            return permit_all
        principal: str = request.scope["principal"]
        places: Iterator[int] | None = None

        def permit(topic: TopicId) -> None:
            nonlocal places
            gate.require(principal, topic, Need.ADMIN)
            quota = gate.quotas.of(principal)
            if quota is not None and quota.topics is not None:
                # One request may create a thousand topics, so the existing ones are counted once.
                places = places or count(gate.administered(principal, self._context.service.all_topics()))
                gate.quotas.require_topics(principal, next(places))

        return permit


class Consumers(ContextRoute):
    """The routes of consumers."""

    async def consumers(self, request: Request) -> Response:
        """``GET …/topics/{topic}/consumers``."""
        context, topic = self._context, topic_of(request.scope)
        lags, now_ms = await context.in_thread(request.scope, context.service.consumers.lags, topic)
        return JSONResponse([_lag_fields(lag, now_ms) for lag in lags])

    async def consumer(self, request: Request) -> Response:
        """``PUT``, ``GET`` and ``DELETE …/topics/{topic}/consumers/{name}``."""
        context, topic, name = self._context, topic_of(request.scope), request.path_params["name"]
        principal = request.scope.get("principal")
        if request.method == "PUT":
            only_new = request.headers.get("if-none-match", "").strip() == "*"
            put = partial(context.service.consumers.put, force=_forces(request), only_new=only_new, principal=principal)
            async with context.body_of(request, read_position, _POSITION) as message:
                await context.in_thread(request.scope, put, topic, name, message)
        elif request.method == "DELETE":
            delete = partial(context.service.consumers.delete, force=_forces(request), principal=principal)
            await context.in_thread(request.scope, delete, topic, name)
        else:
            return JSONResponse(await context.in_thread(request.scope, self._consumer_fields, topic, name))
        return Response()

    def _consumer_fields(self, topic: TopicId, name: str) -> dict[str, Any]:
        """Return a consumer's position, its open claims, and its failed messages."""
        consumers = self._context.service.consumers
        found, claims = consumers.get(topic, name), consumers.claims(topic, name)
        fields: dict[str, Any] = {"position": str(found.id)}
        if claims:
            fields["claims"] = [
                {
                    "transaction": str(claim.pointer),
                    "after": str(claim.first),
                    "last": str(claim.last),
                    "deliveries": claim.tries,
                }
                for claim in claims
            ]
        if failed := self._context.service.groups.failed(topic, name):
            fields["failed"] = [
                {
                    "message": None if one.message is None else str(one.message),
                    "after": str(one.mark.first),
                    "last": str(one.mark.last),
                    "deliveries": one.mark.tries,
                    "retryMs": one.mark.retry_ms or None,
                }
                for one in failed
            ]
        return fields


def _forces(request: Request) -> bool:
    """Return whether the request has the header for a change despite open claims."""
    value = request.headers.get(FORCE, "false").lower()
    if value not in ("true", "false"):
        raise BadRequest("X-TMS-Force: this is neither true nor false.", "Send true, or omit the header.")
    return value == "true"


def _lag_fields(lag: Lag, now_ms: int) -> dict[str, Any]:
    position = lag.position
    return {
        "name": position.name,
        "position": str(position.id),
        "lagMessages": lag.messages,
        "lagIsAtLeast": lag.at_least,
        "lagSeconds": lag.seconds(now_ms),
        "updatedMs": str(position.updated_ms),
        "expired": lag.expired,
    }
