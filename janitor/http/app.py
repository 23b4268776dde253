"""The routes: the status page, its API, health and metrics.

All responses use a status that the daemon keeps current. Therefore requests never make the janitor read a table, and
failures here do not affect a sweep (invariant S15). Handlers that may wait for a lock run in a thread. Probes do not,
so they get a response even if all threads hang.

The page has no password, and shows names and errors that other programs have written. Therefore its content security
policy allows only its script and its style sheet, by their hashes. On a loopback address, a web site that resolves its
name to 127.0.0.1 (DNS rebinding) must not read the page: the ``Host`` header must be a loopback name, and requests from
pages of other web sites are rejected.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from janitor.state.base import EVERYTHING, State
from janitor.state.values import pack
from janitor.status import past
from janitor.status.health import judge
from janitor.status.status import Status
from tms_core.errors import INTERNAL, BadRequest, Forbidden, StateBusy, StateUnavailable, TmsError, code_of_status
from tms_core.logs.printable import complete, complete_command
from tms_core.settings.models import is_loopback
from tms_core.topic import TopicId
from tms_core.web import problem
from tms_core.web.listener import is_of_foreign_page, names_loopback, names_two_hosts

logger = logging.getLogger(__name__)

#: The default and the maximum number of listed runs.
DEFAULT_RUNS, MAX_RUNS = 100, 1000

#: Compression for long responses: with thousands of topics, the fastest level reduces them to a tenth.
_ZIPPED = Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1)


class StatusViews(Protocol):
    """The data that the server shows. Threads may call the methods concurrently."""

    def status(self) -> Status:
        """Return the current status from memory."""
        ...

    def past(self) -> AbstractContextManager[State | None]:
        """Yield the open state; None if it does not exist yet.

        Raises:
            StoreError: the state cannot be opened.
        """
        ...

    def metrics(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the metrics in the Prometheus text format for an ``Accept`` header, and their content type."""
        ...

    def alive(self) -> str:
        """Return why the janitor is not alive; empty if it is alive. Takes no lock and reads no file."""
        ...

    def ready(self) -> str:
        """Return why the janitor cannot work; empty if it can, also while paused. Takes no lock and reads no file."""
        ...


def make_app(views: StatusViews, host: str = "127.0.0.1", arguments: str = "") -> Starlette:
    """Return the application.

    Args:
        views: the source of the responses.
        host: the address of the server; on a loopback address, requests with another host name are rejected.
        arguments: the command-line options of this store, such as ``--config janitor.yaml``, for displayed commands.
    """
    page = files("janitor.http").joinpath("page.html").read_text(encoding="utf-8")
    routes = _Routes(views, page, arguments)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/topics/{name:path}", routes.page),
            Route("/runs/{run_id}", routes.page),
            Route("/api/status", routes.status, middleware=[_ZIPPED]),
            Route("/api/history", routes.history, middleware=[_ZIPPED]),
            Route("/api/runs", routes.runs, middleware=[_ZIPPED]),
            Route("/api/runs/{run_id}", routes.run, middleware=[_ZIPPED]),
            Route("/api/topics/{name:path}", routes.topic, middleware=[_ZIPPED]),
            Route("/healthz", routes.healthz),
            Route("/readyz", routes.readyz),
            Route("/metrics", routes.metrics),
        ],
        middleware=[
            Middleware(SecurityHeaders, policy=content_security_policy(page), loopback=is_loopback(host)),
            # Not Starlette's own error handler, which responds and then raises the error again.
            Middleware(ExceptionMiddleware, handlers={Exception: _report_failure}),
        ],
        exception_handlers={HTTPException: _reject},
    )
    app.router.redirect_slashes = False
    return app


def make_waiting_app(reason: str) -> Starlette:
    """Return the application of a janitor that is waiting for its start: alive, but not ready.

    Args:
        reason: the reason why it waits, as a sentence.
    """

    async def alive(_: Request) -> Response:
        return _probe("")

    async def waits(_: Request) -> Response:
        return _probe(reason)

    return Starlette(routes=[Route("/healthz", alive), Route("/{path:path}", waits)])


class _Routes:
    """The responses by path."""

    def __init__(self, views: StatusViews, page: str, arguments: str) -> None:
        self._views = views
        self._page = page
        self._arguments = arguments
        self._history = past.RunHistory()
        #: The last status with its probes, and the prepared response.
        self._rendered: tuple[Status, str, str, bytes] | None = None

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html")

    def status(self, request: Request) -> Response:
        return Response(self._status_body(), media_type="application/json")

    def runs(self, request: Request) -> Response:
        limit = _limit(request.query_params.get("limit", str(DEFAULT_RUNS)))
        from_ms, to_ms = (_time_ms(request, name) for name in ("from_ms", "to_ms"))
        with self._views.past() as state:
            found = past.runs_between(state, limit, from_ms, to_ms) if state else []
        return JSONResponse({"runs": pack(found)})

    def run(self, request: Request) -> Response:
        with self._views.past() as state:
            found = past.run_detail(state, request.path_params["run_id"]) if state else None
        return _response_or_404(self._complete_texts(found), "run")

    def history(self, request: Request) -> Response:
        name = request.query_params.get("range", "24h")
        if name not in past.RANGES:
            raise HTTPException(400, f"invalid range {name!r}: use one of {', '.join(past.RANGES)}")
        with self._views.past() as state:
            found = self._history.range(state, name, self._views.status().now_ms) if state else None
        return _response_or_404(found, "history")

    def topic(self, request: Request) -> Response:
        try:
            topic = TopicId.parse(request.path_params["name"])
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        with self._views.past() as state:
            found = past.topic_detail(state, self._views.status(), topic) if state else None
        if found is not None:
            found["why_command"] = self._command("why", str(topic))
        return _response_or_404(found, "topic")

    def metrics(self, request: Request) -> Response:
        body, content_type = self._views.metrics(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def healthz(self, request: Request) -> Response:
        return _probe(self._views.alive())

    async def readyz(self, request: Request) -> Response:
        return _probe(self._views.ready())

    def _status_body(self) -> bytes:
        """Return the status as JSON, which is rendered once for each status."""
        status, alive, ready = self._views.status(), self._views.alive(), self._views.ready()
        rendered = self._rendered
        if rendered is None or rendered[0] is not status or rendered[1:3] != (alive, ready):
            document = self._document(status, alive, ready)
            rendered = status, alive, ready, json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
            self._rendered = rendered
        return rendered[3]

    def _document(self, status: Status, alive: str, ready: str) -> dict[str, Any]:
        document = status.to_json()
        document |= {"alive": alive, "ready": ready, "health": pack(judge(status, alive, ready))}
        document["adopt_command"] = self._command("adopt")
        for name in ("guards", "health", "last_run"):
            document[name] = self._complete_texts(document[name])
        for entry in document["paused"]:
            entry["command"] = self._command("resume", entry["pattern"])
        for entry in document["quarantined"]:
            entry["command"] = self._command("resume", entry["topic"])
        return document

    def _complete_texts(self, value: Any) -> Any:
        """Return the texts of a run or guard with the options of this store in their commands."""
        if isinstance(value, dict):
            return {name: self._complete_texts(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._complete_texts(inner) for inner in value]
        return complete(value, self._arguments) if isinstance(value, str) else value

    def _command(self, verb: str, topic: str = EVERYTHING) -> str:
        words = ["janitor", verb, *([] if topic == EVERYTHING else [shlex.quote(topic)])]
        return complete_command(" ".join(words), self._arguments)


def _response_or_404(document: Mapping[str, Any] | None, what: str) -> Response:
    if document is None:
        raise HTTPException(404, f"this {what} does not exist, or is no longer kept")
    return JSONResponse(document)


def _time_ms(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise HTTPException(400, f"{name} must be a time in milliseconds since 1970")
    return int(text)


def _limit(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_RUNS:
        raise HTTPException(400, f"limit must be a number from 1 to {MAX_RUNS}")
    return int(text)


def _probe(reason: str) -> Response:
    return PlainTextResponse(reason or "ok", status_code=503 if reason else 200)


async def _reject(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    known = {"Not Found": "this page does not exist", "Method Not Allowed": "this page is read-only: use GET"}
    sentence = known.get(error.detail, error.detail)
    return problem.response(error.status_code, code_of_status(error.status_code), sentence, error.headers)


async def _report_failure(request: Request, error: Exception) -> Response:
    logger.error("no response to %s: %s", request.url.path, error, exc_info=error)
    # The message may have a path of this machine, so it is only in the log.
    status = 503 if isinstance(error, (StateBusy, StateUnavailable)) else 500
    code = error.code if isinstance(error, TmsError) else INTERNAL
    return problem.response(status, code, "the response failed; the janitor's log has the reason")


# -- protection --------------------------------------------------------------------------------------------------------


def content_security_policy(page: str) -> str:
    """Return a policy that allows the inline style and script of a page, its data: icon, and its own server."""
    styles, scripts = (_hashes(page, tag) for tag in ("style", "script"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    blocks: list[str] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digests = (hashlib.sha256(block.encode()).digest() for block in blocks)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


class SecurityHeaders:
    """ASGI middleware that adds security headers, and rejects requests with another ``Host`` or from other sites.

    Args:
        app: the protected application.
        policy: the Content-Security-Policy.
        loopback: whether the server listens on a loopback address, where ``Host`` must be a loopback name.
    """

    def __init__(self, app: ASGIApp, policy: str, loopback: bool) -> None:
        self._app = app
        self._loopback = loopback
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        if names_two_hosts(scope):
            await problem.response(400, BadRequest.code, "the request has several Host headers; send one")(
                scope, receive, send_with_headers
            )
        elif self._loopback and not names_loopback(scope):
            refusal = "this address serves localhost only; use http://localhost with the port, or set janitor.http.host"
            await problem.response(400, BadRequest.code, refusal)(scope, receive, send_with_headers)
        elif self._loopback and is_of_foreign_page(scope):
            refusal = "requests from pages of other web sites are rejected"
            await problem.response(403, Forbidden.code, refusal)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)
