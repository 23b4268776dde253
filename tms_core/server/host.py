"""Which names a server on the loopback address answers to.

Without authentication everybody on this machine may publish, a browser included. A web site that points its own name at
127.0.0.1 (DNS rebinding) would be taken for this server's own pages; so there the ``Host`` header has to be a loopback
name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_address

from starlette.types import Scope

#: An IPv6 address in brackets or a name or IPv4 address, and a port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d+)?")


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a host: ``localhost``, 127.0.0.0/8, ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(scope: Scope) -> bool:
    """Whether a request's ``Host`` header is a loopback name."""
    return _is_loopback_header(next((value for name, value in scope["headers"] if name == b"host"), b""))


@lru_cache(maxsize=64)
def _is_loopback_header(header: bytes) -> bool:
    match = _HOST.fullmatch(header.decode("latin-1"))
    return match is not None and is_loopback(match[1] or match[2])
