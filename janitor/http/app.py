"""The routes: the status page, the API behind it, health and metrics.

All of it is made from a status that the daemon keeps up to date, so requests, however many, never make the janitor
read a table, and no failure here reaches a sweep (rule S15). What may wait for a lock is answered in a thread; health
is not, so that a probe still gets its answer when every thread is stuck.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from janitor.http.security_headers import SecurityHeaders, content_security_policy
from janitor.state.base import EVERYTHING
from janitor.status.health import judge
from janitor.status.status import RunSummary, Status
from tms_core.settings.models import is_loopback

logger = logging.getLogger(__name__)

#: How many runs are listed, unless a request says otherwise, and at most.
DEFAULT_RUNS, MAX_RUNS = 100, 1000

#: Answers of thousands of topics are long and repeat themselves; the fastest level already makes them a tenth.
_ZIPPED = Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1)


class StatusViews(Protocol):
    """What the server shows. Any of it may be called by several threads at once."""

    def status(self) -> Status:
        """The status now; kept ready, never collected for a request."""
        ...

    def runs(self, limit: int) -> Sequence[RunSummary]:
        """The last ``limit`` runs, newest first."""
        ...

    def metrics(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics in a text format of Prometheus, as the ``Accept`` header wants it, and its content type."""
        ...

    def alive(self) -> str:
        """Empty while the janitor lives, else why it does not, in a sentence. Takes no lock and reads no file."""
        ...

    def ready(self) -> str:
        """Empty when it does its work (a paused janitor does), else why not. Takes no lock and reads no file."""
        ...


def make_app(views: StatusViews, host: str = "127.0.0.1", arguments: str = "") -> Starlette:
    """The application.

    Args:
        views: where the answers come from.
        host: the address it is served on; on a loopback one, requests under another name are refused.
        arguments: the options that lead the command line to this store, as in ``--config janitor.yaml``; they follow
            the commands that are shown.
    """
    page = files("janitor.http").joinpath("page.html").read_text(encoding="utf-8")
    routes = _Routes(views, page, arguments)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/api/status", routes.status, middleware=[_ZIPPED]),
            Route("/api/runs", routes.runs, middleware=[_ZIPPED]),
            Route("/healthz", routes.healthz),
            Route("/readyz", routes.readyz),
            Route("/metrics", routes.metrics),
        ],
        middleware=[
            Middleware(SecurityHeaders, policy=content_security_policy(page), loopback=is_loopback(host)),
            # Here and not as Starlette's own handler of errors, which answers and then raises them all the same.
            Middleware(ExceptionMiddleware, handlers={Exception: _failed}),
        ],
        exception_handlers={HTTPException: _refused},
    )
    app.router.redirect_slashes = False
    return app


class _Routes:
    """The answers, by path."""

    def __init__(self, views: StatusViews, page: str, arguments: str) -> None:
        self._views = views
        self._page = page
        self._arguments = arguments
        self._made: tuple[Status, str, str, bytes] | None = None

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html")

    def status(self, request: Request) -> Response:
        return Response(self._status_body(), media_type="application/json")

    def runs(self, request: Request) -> Response:
        limit = _limit(request.query_params.get("limit", str(DEFAULT_RUNS)))
        return JSONResponse({"runs": [asdict(run) for run in self._views.runs(limit)]})

    def metrics(self, request: Request) -> Response:
        body, content_type = self._views.metrics(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def healthz(self, request: Request) -> Response:
        return _probe(self._views.alive())

    async def readyz(self, request: Request) -> Response:
        return _probe(self._views.ready())

    def _status_body(self) -> bytes:
        """The status as JSON; made once per status, however many ask."""
        status, alive, ready = self._views.status(), self._views.alive(), self._views.ready()
        made = self._made
        if made is None or made[0] is not status or made[1:3] != (alive, ready):
            document = self._document(status, alive, ready)
            made = status, alive, ready, json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
            self._made = made
        return made[3]

    def _document(self, status: Status, alive: str, ready: str) -> dict[str, Any]:
        document = status.to_json()
        document |= {"alive": alive, "ready": ready, "health": judge(status, alive, ready).to_json()}
        document["adopt_command"] = self._command("adopt")
        for entry in document["paused"]:
            entry["command"] = self._command("resume", entry["pattern"])
        for entry in document["quarantined"]:
            entry["command"] = self._command("resume", entry["topic"])
        return document

    def _command(self, verb: str, topic: str = EVERYTHING) -> str:
        words = ["janitor", verb, "" if topic == EVERYTHING else shlex.quote(topic), self._arguments]
        return " ".join(filter(None, words))


def _limit(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_RUNS:
        raise HTTPException(400, f"limit has to be a number from 1 to {MAX_RUNS}")
    return int(text)


def _probe(reason: str) -> Response:
    return PlainTextResponse(reason or "ok", status_code=503 if reason else 200)


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    sentence = {404: "there is nothing here", 405: "nothing can be changed here"}.get(error.status_code, error.detail)
    return JSONResponse({"error": sentence}, status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("%s could not be answered: %s", request.url.path, error, exc_info=error)
    return JSONResponse({"error": "this could not be made; the janitor's log says why"}, status_code=500)
