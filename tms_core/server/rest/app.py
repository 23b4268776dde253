"""The ASGI application: routes and middleware.

Routes are sorted by frequency. Each route declares the permissions of its methods, so that a new route cannot be
unprotected by mistake; the gate checks them. The middleware rejects unrecognized host names, converts errors into
status codes and messages, counts requests, and writes the access log, without headers and queries, which may contain
secrets. Unexpected errors propagate to uvicorn, which logs them and responds 500.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tms_core.clock import Clock, SystemClock
from tms_core.errors import (
    BadRequest,
    ConsumerConflict,
    ConsumerNotFound,
    Forbidden,
    PartitionsChanged,
    ProducerFenced,
    ProducerNotFound,
    QuotaExceeded,
    StoreFull,
    TmsError,
    TooLarge,
    TopicExists,
    TopicNotFound,
    TransactionEnded,
    TransactionExpired,
    Unanswered,
    Unauthorized,
    Unavailable,
    code_of_status,
    without_paths,
)
from tms_core.logs.audit import BoundedAudit, Event, record
from tms_core.logs.loggers import RateLimitedLogger, get_logger, harmless
from tms_core.server.auth.gate import Gate, Need
from tms_core.server.auth.quotas import Quotas
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.body import Disconnected
from tms_core.server.rest.context import SPENDS, ServerContext, respond, topic_of
from tms_core.server.rest.groups import PollGroup, RollBackGroup
from tms_core.server.rest.openapi import openapi
from tms_core.server.rest.poll import Poll
from tms_core.server.rest.producers import FENCED, ProducerRoutes
from tms_core.server.rest.publish import Publish, Rollback, StorePayloads
from tms_core.server.rest.topics import FORCE, Consumers, TopicRoutes
from tms_core.web import problem
from tms_core.web.listener import is_of_foreign_page, names_loopback, names_two_hosts

if TYPE_CHECKING:
    from tms_core.server.rest.forward import Forwarder

logger = get_logger(__name__)
access = get_logger("tms_core.access")

#: The HTTP status of errors of the service (CDAP's HttpExceptionHandler); others are 500, and are logged.
_STATUS: dict[type[TmsError], int] = {
    # Before BadRequest, its base class.
    TooLarge: 413,
    BadRequest: 400,
    Unauthorized: 401,
    Forbidden: 403,
    TopicNotFound: 404,
    ConsumerNotFound: 404,
    ProducerNotFound: 404,
    ConsumerConflict: 409,
    PartitionsChanged: 409,
    ProducerFenced: 409,
    TransactionEnded: 409,
    TopicExists: 409,
    TransactionExpired: 409,
    StoreFull: 503,
    QuotaExceeded: 429,
    Unanswered: 502,
    Unavailable: 503,
}
#: The status in metrics and logs if the client disconnected before the response; never sent.
_CLIENT_DISCONNECTED = 499
#: The audit events of rejections by status, and of administrative requests by route and method.
_REFUSALS = {401: Event.UNAUTHORIZED, 403: Event.FORBIDDEN, 429: Event.LIMITED}
_AUDITED = {
    ("topic", "PUT"): Event.TOPIC_CREATE,
    ("topic", "DELETE"): Event.TOPIC_DELETE,
    ("properties", "PUT"): Event.TOPIC_UPDATE,
    ("producer", "DELETE"): Event.PRODUCER_DELETE,
    ("consumer", "PUT"): Event.CONSUMER_FORCE,
    ("consumer", "DELETE"): Event.CONSUMER_FORCE,
    ("rollback", "POST"): Event.ROLLBACK,
    ("group_rollback", "POST"): Event.GROUP_ROLLBACK,
}
#: The header of 401: the method of authentication (RFC 6750).
_CHALLENGE = (b"www-authenticate", b'Bearer realm="tms"')
#: The header of 503: the time until the next attempt, in seconds.
_RETRY = (b"retry-after", b"1")
#: The header of 409 if the partitions of the topic have changed.
_PARTITIONS = (b"x-tms-partitions", b"changed")

_TOPICS = "/v1/namespaces/{namespace}/topics"
_TOPIC = _TOPICS + "/{topic}"


def make_app(
    context: ServerContext, *, loopback: bool = True, access_log: bool = False, forwarder: Forwarder | None = None
) -> ASGIApp:
    """Return the application.

    Args:
        loopback: whether the server listens on a loopback address; it then rejects requests for other host names.
        access_log: whether to log each request.
        forwarder: forwards requests to other leaders; None: this is the only server.
    """
    gates = [route.guard(context.gate) for route in routes(context)]
    paths = combine_routes(gates, require_authentication(_respond_not_found, context.gate))
    if forwarder is None:
        return RequestMiddleware(paths, context.metrics, loopback=loopback, access_log=access_log)
    # Forward inside the middleware, so that a server that does not lead also rejects unrecognized host names.
    return forwarder.with_lifespan(
        RequestMiddleware(forwarder.around(paths), context.metrics, loopback=loopback, access_log=access_log)
    )


def combine_routes(routes: Sequence[Route], default: ASGIApp) -> ASGIApp:
    """Return the routes as one application; as in CDAP, one trailing slash of a path is ignored.

    Args:
        routes: the first matching route handles a request; if only the method does not match, it responds 405.
    """
    router = Router(routes, redirect_slashes=False, default=default)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.endswith("/") and not path.endswith("//"):
            scope["path"] = path[:-1]
        await router(scope, receive, send)

    return app


def routes(context: ServerContext) -> list[GuardedRoute]:
    """Return all routes with their permissions."""
    topics, consumers, producers, about = (
        TopicRoutes(context),
        Consumers(context),
        ProducerRoutes(context),
        _CommonRoutes(context),
    )
    return [
        GuardedRoute(f"{_TOPIC}/publish", Publish(context), "publish", {"POST": Need.PUBLISH}),
        GuardedRoute(f"{_TOPIC}/poll", Poll(context), "poll", {"POST": Need.CONSUME}),
        GuardedRoute(f"{_TOPIC}/store", StorePayloads(context), "store", {"POST": Need.PUBLISH}),
        GuardedRoute(f"{_TOPIC}/rollback", Rollback(context), "rollback", {"POST": Need.PUBLISH}),
        GuardedRoute(_TOPIC, topics.topic, "topic", {"PUT": Need.ADMIN, "GET": Need.ANY, "DELETE": Need.ADMIN}),
        # The response has only the topics that the principal may see.
        GuardedRoute(_TOPICS, topics.topics, "topics", {"GET": Need.KNOWN}),
        GuardedRoute("/v1/topics", topics.all_topics, "all_topics", {"GET": Need.KNOWN}),
        GuardedRoute(
            f"{_TOPIC}/consumers/{{name}}",
            consumers.consumer,
            "consumer",
            {"PUT": Need.CONSUME, "GET": Need.CONSUME, "DELETE": Need.CONSUME},
        ),
        GuardedRoute(f"{_TOPIC}/consumers/{{name}}/poll", PollGroup(context), "group_poll", {"POST": Need.CONSUME}),
        GuardedRoute(
            f"{_TOPIC}/consumers/{{name}}/rollback", RollBackGroup(context), "group_rollback", {"POST": Need.CONSUME}
        ),
        GuardedRoute(f"{_TOPIC}/consumers", consumers.consumers, "consumers", {"GET": Need.CONSUME}),
        GuardedRoute(
            f"{_TOPIC}/producers/{{name}}",
            producers.producer,
            "producer",
            {"POST": Need.PUBLISH, "GET": Need.PUBLISH, "DELETE": Need.PUBLISH},
        ),
        GuardedRoute(f"{_TOPIC}/producers", producers.producers, "producers", {"GET": Need.PUBLISH}),
        GuardedRoute(f"{_TOPIC}/properties", topics.properties, "properties", {"PUT": Need.ADMIN}),
        GuardedRoute(f"{_TOPIC}/ages", topics.ages, "ages", {"GET": Need.ANY}),
        GuardedRoute("/ping", about.ping, "ping", {"GET": Need.NOTHING}),
        GuardedRoute("/metrics", about.metrics, "metrics", {"GET": Need.OBSERVE}),
        GuardedRoute("/openapi.json", about.openapi, "openapi", {"GET": Need.KNOWN}),
    ]


@dataclass(frozen=True)
class GuardedRoute:
    """A route and the permissions of its methods.

    Attributes:
        path: the path; with ``{namespace}`` and ``{topic}`` if a permission on a topic is needed.
        endpoint: a Starlette endpoint, or a plain ASGI callable.
    """

    path: str
    endpoint: Callable[..., Any]
    name: str
    needs: Mapping[str, Need]

    def guard(self, gate: Gate | None) -> Route:
        """Return the route with the checks of a gate; without a gate there are no restrictions."""
        return _Route(self) if gate is None else _GuardedRoute(self, gate)


class _Route(Route):
    def __init__(self, guarded: GuardedRoute) -> None:
        super().__init__(guarded.path, guarded.endpoint, methods=list(guarded.needs), name=guarded.name)
        # Starlette would add HEAD to GET; CDAP does not serve HEAD.
        self.methods = self._served = set(guarded.needs)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self._served:
            # Starlette's own response would have no error code.
            raise HTTPException(405, "Method Not Allowed", {"allow": ", ".join(self._served)})
        await super().handle(scope, receive, send)


class _GuardedRoute(_Route):
    def __init__(self, guarded: GuardedRoute, gate: Gate) -> None:
        super().__init__(guarded)
        self._gate = gate
        self._needs = guarded.needs

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        # "Method not allowed" also requires an authenticated principal.
        need = self._needs.get(scope["method"], Need.KNOWN)
        if need is Need.NOTHING:
            await super().handle(scope, receive, send)
            return
        gate = self._gate
        scope["principal"] = principal = await identify_principal(gate, scope)
        if need is Need.OBSERVE:
            gate.require_observer(principal)
        elif need is not Need.KNOWN:
            gate.require(principal, topic_of(scope), need, scope["path_params"].get("name", ""))
        if gate.quotas.of(principal) is None:
            await super().handle(scope, receive, send)
            return
        with gate.quotas.request(principal):
            scope[SPENDS] = partial(gate.quotas.spend, principal)
            await super().handle(scope, *_count_bytes(gate.quotas, principal, receive, send))


def _count_bytes(quotas: Quotas, principal: str, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Wrap receive and send to count transferred bytes for a principal's quota."""

    async def received() -> Message:
        message = await receive()
        quotas.spend(principal, len(message.get("body", b"")))
        return message

    async def sent(message: Message) -> None:
        quotas.spend(principal, len(message.get("body", b"")))
        await send(message)

    return received, sent


async def identify_principal(gate: Gate, scope: Scope) -> str:
    """Return the principal of a request; rejections are delayed after repeated failures of an address.

    Raises:
        Unauthorized, Unavailable: as :meth:`Gate.principal`.
    """
    try:
        return gate.principal(scope["headers"])
    except (Unauthorized, Unavailable):
        await gate.failed.delay(address_of(scope))
        raise


def require_authentication(app: ASGIApp, gate: Gate | None) -> ASGIApp:
    """Return an application that serves only authenticated clients."""
    if gate is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        scope["principal"] = await identify_principal(gate, scope)
        await app(scope, receive, send)

    return guarded


class RequestMiddleware:
    """The outermost middleware: checks, counts and logs each request, and sends error responses."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        *,
        loopback: bool,
        access_log: bool,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._loopback = loopback
        self._access_log = access_log
        self._seldom = RateLimitedLogger(logger)
        self._bounded = BoundedAudit((clock or SystemClock()).monotonic_ms)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        status = _CLIENT_DISCONNECTED

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, sent)
        except Disconnected:
            pass
        except (TmsError, HTTPException) as error:
            if status != _CLIENT_DISCONNECTED:
                # The response has started, so it can only be aborted.
                raise
            if isinstance(error, StoreFull):
                # Log rarely: every write fails on a full disk, and the log may be on the same disk.
                self._seldom.log(logging.ERROR, "writes are rejected (503): %s", error)
            await _refuse(scope, sent, error, self._seldom)
        finally:
            seconds = time.perf_counter() - started
            harmless(self._metrics.request, _route_name(scope), status, seconds)
            self._audit(scope, status)
            if self._access_log:
                # Encoded, because a line break in a path could forge log lines.
                path, who = quote(scope["path"]), f" {scope['principal']}" if "principal" in scope else ""
                line = "%s %s %s %d %.1f ms%s"
                access.info(line, address_of(scope), scope["method"], path, status, seconds * 1000, who)

    def _audit(self, scope: Scope, status: int) -> None:
        """Log rejected requests, and requests that administer, force or roll back."""
        who, address, method = scope.get("principal"), address_of(scope), scope["method"]
        if (refused := _REFUSALS.get(status)) is not None:
            path = quote(scope["path"])
            self._bounded.record(refused, principal=who, address=address, verb=method, object_=path)
            return
        route = scope.get("route")
        event = None if route is None else _AUDITED.get((route.name, method))
        if event is None or (event is Event.CONSUMER_FORCE and not _is_forced(scope)):
            return
        names = scope["path_params"]
        on = f"{names['namespace']}:{names['topic']}" + (f"/{names['name']}" if "name" in names else "")
        if 400 <= status < 500 and status != _CLIENT_DISCONNECTED:
            # Limited, because a wrong name is refused before the permissions are checked.
            self._bounded.record(event, principal=who, address=address, verb=method, object_=on)
        else:
            result = "done" if status < 400 else "failed"
            record(event, principal=who, address=address, verb=method, object_=on, result=result)

    def _check(self, scope: Scope) -> None:
        if names_two_hosts(scope):
            raise HTTPException(400, "The request has more than one host. Send one Host header.")
        if self._loopback and not names_loopback(scope):
            raise HTTPException(400, "This address serves only localhost. Use http://localhost.")
        if self._loopback and is_of_foreign_page(scope):
            raise HTTPException(403, "Requests from web pages of other sites are rejected.")


def address_of(scope: Scope) -> str:
    """Return the address of a request's connection; for a forwarded request, the address of the forwarding server."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


def _route_name(scope: Scope) -> str:
    """Return the name of a request's route, in metrics and logs."""
    route = scope.get("route")
    return route.name if route else "none"


def _is_forced(scope: Scope) -> bool:
    return any(name == FORCE.encode() and value.lower() == b"true" for name, value in scope["headers"])


async def _refuse(scope: Scope, send: Send, error: TmsError | HTTPException, seldom: RateLimitedLogger) -> None:
    if isinstance(error, HTTPException):
        more = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
        await _answer_error(scope, send, error.status_code, code_of_status(error.status_code), error.detail, "", *more)
        return
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), None)
    if status is None:
        status = 500
        # For each route rarely: every request to a topic with a damaged row fails.
        seldom.log(logging.ERROR, f"a request failed ({_route_name(scope)}): %s", error)
    more = [_CHALLENGE] if isinstance(error, Unauthorized) else []
    if isinstance(error, PartitionsChanged):
        more.append(_PARTITIONS)
    if isinstance(error, QuotaExceeded) and error.retry_after_seconds is not None:
        more.append((b"retry-after", b"%d" % math.ceil(error.retry_after_seconds)))
    elif isinstance(error, (Unavailable, StoreFull)):
        more.append(_RETRY)
    if isinstance(error, ProducerFenced):
        more.append((FENCED, b"true"))
    message, hint = without_paths(error) if status >= 500 else (error.message, error.hint)
    await _answer_error(scope, send, status, error.code, message, hint, *more)


async def _answer_error(
    scope: Scope, send: Send, status: int, code: str, message: str, hint: str, *more: tuple[bytes, bytes]
) -> None:
    """Send an error as text, or as problem JSON to a client that accepts JSON."""
    header = (problem.CODE, code.encode())
    if problem.accepts_json(scope["headers"]):
        await respond(send, status, problem.problem(status, code, message, hint), problem.JSON, header, *more)
    else:
        text = f"{message} {hint}" if hint else message
        await respond(send, status, text.encode("utf-8", "replace"), problem.TEXT, header, *more)


async def _respond_not_found(_: Scope, __: Receive, ___: Send) -> None:
    raise HTTPException(404, "This path does not exist. /openapi.json lists all paths.")


class _CommonRoutes:
    """The routes that are not about topics."""

    def __init__(self, context: ServerContext) -> None:
        self._metrics = context.metrics
        self._threads = context.threads
        self._openapi = openapi(secured=context.gate is not None)

    async def ping(self, request: Request) -> Response:
        return PlainTextResponse("OK.")

    def metrics(self, request: Request) -> Response:
        # Do not wait for this, because metrics are most important while a store hangs.
        with suppress(RuntimeError):  # the server is closing
            self._threads.submit(harmless, self._metrics.drop_deleted_topics)
        body, content_type = self._metrics.text(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._openapi)
