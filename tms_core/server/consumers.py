"""Consumers: their positions put, looked at and forgotten, and how far they are behind. Plain Starlette, as topics."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tms_core.consumers.lag import Lag
from tms_core.errors import BadRequest
from tms_core.server.body import BodyLimit
from tms_core.server.json_text import read_position
from tms_core.server.site import Site, headers_of, topic_of
from tms_core.topic import TopicId
from tms_core.web.protocol import abort_of

#: The header of a change that is to be made although claims are open, whose transactions are invalidated.
FORCE = "x-tms-force"
#: The largest body of a position, which is 40 digits.
_POSITION = BodyLimit(16 << 10, "a position is 40 digits")


class Consumers:
    """The routes of consumers."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def consumers(self, request: Request) -> Response:
        """``GET …/topics/{topic}/consumers``."""
        site, topic = self._site, topic_of(request.scope)
        lags, now_ms = await site.in_thread(site.service.consumers.lags, topic)
        return JSONResponse([_described(lag, now_ms) for lag in lags])

    async def consumer(self, request: Request) -> Response:
        """``PUT``, ``GET`` and ``DELETE …/topics/{topic}/consumers/{name}``."""
        site, topic, name = self._site, topic_of(request.scope), request.path_params["name"]
        if request.method == "PUT":
            with site.memory.share(abort_of(request.scope)) as share:
                message = await site.read(
                    headers_of(request.scope), request.receive, read_position, share, limit=_POSITION
                )
            only_new = request.headers.get("if-none-match", "").strip() == "*"
            put = partial(site.service.consumers.put, force=_forces(request), only_new=only_new)
            await site.in_thread(put, topic, name, message)
        elif request.method == "DELETE":
            await site.in_thread(partial(site.service.consumers.delete, force=_forces(request)), topic, name)
        else:
            return JSONResponse(await site.in_thread(self._shown, topic, name))
        return Response()

    def _shown(self, topic: TopicId, name: str) -> dict[str, Any]:
        """A consumer's position, and the claims it has open."""
        consumers = self._site.service.consumers
        found, claims = consumers.get(topic, name), consumers.claims(topic, name)
        shown: dict[str, Any] = {"position": str(found.id)}
        if claims:
            shown["claims"] = [
                {
                    "transaction": str(claim.pointer),
                    "after": str(claim.first),
                    "last": str(claim.last),
                    "deliveries": claim.tries,
                }
                for claim in claims
            ]
        return shown


def _forces(request: Request) -> bool:
    """Whether something is to be done although claims are open.

    Raises:
        BadRequest: the header says something else.
    """
    said = request.headers.get(FORCE, "false").lower()
    if said not in ("true", "false"):
        raise BadRequest("X-TMS-Force: this is neither true nor false.", "Send true, or leave it out.")
    return said == "true"


def _described(lag: Lag, now_ms: int) -> dict[str, Any]:
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
