"""Security headers of the status page, and the refusal of requests under a foreign host name.

The page has no password, and shows names and errors that others wrote, so the browser is told to run nothing but the
one script and use nothing but the one style sheet in it, known by their hashes. And a page on the loopback address must
not be read by a web site that points its own name at 127.0.0.1 (DNS rebinding): there the ``Host`` header has to be a
loopback name. Nor does anything there answer to a page of another web site that a browser has open.
"""

from __future__ import annotations

import base64
import hashlib
import re

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tms_core.web.listener import is_of_foreign_page, names_loopback, names_two_hosts


def content_security_policy(page: str) -> str:
    """A policy that allows the inline style and script of a page, its data: icon, and talking to its own server."""
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
    """ASGI middleware: adds the headers to every answer, and refuses a foreign ``Host`` or page.

    Args:
        app: the application that it protects.
        policy: the Content-Security-Policy.
        loopback: whether the server listens on a loopback address, where ``Host`` can only be such a name.
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
            await JSONResponse({"error": "a request has one Host header"}, status_code=400)(
                scope, receive, send_with_headers
            )
        elif self._loopback and not names_loopback(scope):
            refusal = (
                "this address answers to localhost only; ask http://localhost with the port, or set janitor.http.host"
            )
            await JSONResponse({"error": refusal}, status_code=400)(scope, receive, send_with_headers)
        elif self._loopback and is_of_foreign_page(scope):
            refusal = "requests from pages of other web sites are refused"
            await JSONResponse({"error": refusal}, status_code=403)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)
