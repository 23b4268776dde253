"""Consumers: their positions put, looked at and forgotten, and how far they are behind. Plain Starlette, as topics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tms_core.consumers.lag import Lag
from tms_core.server.body import BodyLimit
from tms_core.server.json_text import read_position
from tms_core.server.site import Site, headers_of, topic_of
from tms_core.web.protocol import abort_of

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
            await site.in_thread(site.service.consumers.put, topic, name, message)
        elif request.method == "DELETE":
            await site.in_thread(site.service.consumers.delete, topic, name)
        else:
            found = await site.in_thread(site.service.consumers.get, topic, name)
            return JSONResponse({"position": str(found.id)})
        return Response()


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
