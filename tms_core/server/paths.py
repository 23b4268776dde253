"""From a path to its route, remembered: clients ask for the same few over and over.

Starlette's own router tries one regular expression after the other each time, which costs a small publish as much as
reading its body does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

#: How many paths are remembered, and how long they may be, so that nobody can fill the memory with them.
_REMEMBERED, _LONGEST = 4096, 300

#: A route and what it adds to the scope.
_Found = tuple[Route, Scope]


class Paths:
    """The routes of an application.

    Args:
        routes: the first that fits has a request; one that fits but for its method answers 405.
        default: has the requests that no route fits, not even without a slash at the end (as CDAP has it).
    """

    def __init__(self, routes: Sequence[Route], default: ASGIApp) -> None:
        self._routes = routes
        self._default = default
        self._remembered = lru_cache(_REMEMBERED)(self._find)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        found = self._remembered(method, path) if len(path) <= _LONGEST else self._find(method, path)
        if found is None:
            await self._default(scope, receive, send)
            return
        route, more = found
        scope.update(more, route=route)
        await route.handle(scope, receive, send)

    def _find(self, method: str, path: str) -> _Found | None:
        other_method: _Found | None = None
        for route in self._routes:
            match, more = route.matches({"type": "http", "method": method, "path": path})
            if match is Match.FULL:
                return route, more
            if match is Match.PARTIAL:
                other_method = other_method or (route, more)
        if other_method is None and path.endswith("/") and not path.endswith("//"):
            return self._find(method, path[:-1])
        return other_method
