"""The body of a request, read to its end within a limit.

A body is held whole, because a batch is written whole; so its size is limited, before and after decompression, and a
small body that inflates without end is stopped at the limit like a large one. CDAP 6's clients send gzip.
"""

from __future__ import annotations

import zlib

from starlette.exceptions import HTTPException
from starlette.types import Receive

from tms_core.errors import BadRequest

Headers = dict[bytes, bytes]

#: zlib's window bits for gzip.
GZIP = 31


class Disconnected(Exception):
    """The client went away before it had said everything."""


async def read_body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body as it was sent.

    Raises:
        HTTPException: it is larger than ``limit_bytes``, or compressed in a way that is not served.
        Disconnected: the client went away.
    """
    if headers.get(b"content-encoding", b"identity").lower() not in (b"identity", b"gzip"):
        raise HTTPException(415, "Of all compressions only gzip is read.")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message["body"])
        size += len(parts[-1])
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not message["more_body"]:
            return parts[0] if len(parts) == 1 else b"".join(parts)


def is_packed(headers: Headers) -> bool:
    """Whether the body is compressed."""
    return headers.get(b"content-encoding", b"identity").lower() != b"identity"


def unpacked(headers: Headers, body: bytes, limit_bytes: int) -> bytes:
    """The body as it was before it was compressed.

    Raises:
        HTTPException: it is larger than ``limit_bytes``.
        BadRequest: it is no gzip, though it should be, or cut short.
    """
    if not is_packed(headers):
        return body
    member = zlib.decompressobj(GZIP)
    try:
        # One byte more, to see whether there is more than is allowed.
        found = member.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"The body is no gzip: {error}.") from error
    if len(found) > limit_bytes:
        raise _too_large(limit_bytes)
    if not member.eof or member.unused_data:
        raise BadRequest("The body is no gzip: it is cut short, or something follows it.")
    return found


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(413, f"A body may have {limit_bytes} bytes at most (server.max_request_mb).")


def accepts_gzip(headers: Headers) -> bool:
    """Whether the client reads gzip (``Accept-Encoding``)."""
    offered = headers.get(b"accept-encoding", b"")
    for part in offered.lower().split(b","):
        name, _, parameter = part.partition(b";")
        if name.strip() == b"gzip":
            quality = parameter.strip().removeprefix(b"q=").strip(b" 0.")
            return not parameter or bool(quality)
    return False
