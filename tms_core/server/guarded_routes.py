"""Routes that say what they need, and are not reached without it.

A route is made with what each of its methods needs; a method that is not there is not served. So a new
route cannot be open by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tms_core.server.auth.gate import Gate
from tms_core.server.auth.rules import Need
from tms_core.server.site import topic_of


@dataclass(frozen=True)
class GuardedRoute:
    """A route before it has its gate.

    Attributes:
        path: with ``{namespace}`` and ``{topic}``, if something on a topic is needed.
        endpoint: a Starlette endpoint, or a plain ASGI callable.
        name: for the metrics.
        needs: by method.
    """

    path: str
    endpoint: Callable[..., Any]
    name: str
    needs: Mapping[str, Need]

    def behind(self, gate: Gate | None) -> Route:
        """The route itself; without a gate everybody may do everything."""
        return _Route(self) if gate is None else _GuardedRoute(self, gate)


class _Route(Route):
    def __init__(self, guarded: GuardedRoute) -> None:
        super().__init__(guarded.path, guarded.endpoint, methods=list(guarded.needs), name=guarded.name)
        # Where GET is, Starlette serves HEAD too; CDAP does not.
        self.methods = set(guarded.needs)


class _GuardedRoute(_Route):
    def __init__(self, guarded: GuardedRoute, gate: Gate) -> None:
        super().__init__(guarded)
        self._gate = gate
        self._needs = guarded.needs

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What is not served needs a known principal to be told so.
        need = self._needs.get(scope["method"], Need.KNOWN)
        if need is not Need.NOTHING:
            scope["principal"] = principal = self._gate.principal(scope["headers"])
            if need is not Need.KNOWN:
                self._gate.require(principal, topic_of(scope), need)
        await super().handle(scope, receive, send)


def known_only(app: ASGIApp, gate: Gate | None) -> ASGIApp:
    """An application that answers only those who prove who they are."""
    if gate is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        scope["principal"] = gate.principal(scope["headers"])
        await app(scope, receive, send)

    return guarded
