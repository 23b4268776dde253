"""Whom a server on the loopback address answers.

Without authentication everybody on this machine may publish, a browser included, and a browser does what web sites tell
it. One that points its own name at 127.0.0.1 (DNS rebinding) would be taken for this server's own pages; so there the
``Host`` header has to be a loopback name. And any page may have a form sent to any server; a browser says then which
page it was, and nothing else sends ``Origin``.
"""

from __future__ import annotations

import re
from functools import lru_cache

from starlette.types import Scope

from tms_core.settings.models import is_loopback

#: An IPv6 address in brackets or a name or IPv4 address, and a port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d+)?")


def names_loopback(scope: Scope) -> bool:
    """Whether a request's ``Host`` header is a loopback name."""
    return _is_loopback_header(next((value for name, value in scope["headers"] if name == b"host"), b""))


def names_two_hosts(scope: Scope) -> bool:
    """Whether a request has two ``Host`` headers: a proxy may go by the other one (RFC 9112, 3.2)."""
    return [name for name, _ in scope["headers"]].count(b"host") > 1


def is_of_foreign_page(scope: Scope) -> bool:
    """Whether a browser asks on behalf of a page that is not this server's own (RFC 6454, Fetch Metadata).

    A page of another port of this machine is foreign, too; what a user types, or follows a link to, is not.
    """
    origin = host = None
    for name, value in scope["headers"]:
        if name == b"sec-fetch-site" and value in (b"same-origin", b"none"):
            return False
        if name == b"origin":
            origin = value
        elif name == b"host":
            host = value
    return origin is not None and origin != scope["scheme"].encode() + b"://" + (host or b"")


@lru_cache(maxsize=64)
def _is_loopback_header(header: bytes) -> bool:
    match = _HOST.fullmatch(header.decode("latin-1"))
    return match is not None and is_loopback(match[1] or match[2])
