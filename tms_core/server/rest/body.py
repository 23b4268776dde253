"""The body of a request, read completely within a limit.

A body is read into memory completely, because a batch is written at once. Therefore its size is limited before and
after decompression; a small body that inflates without bound is stopped at the limit. CDAP 6's clients send gzip. The
memory for a body is reserved from the memory of all requests (:mod:`tms_core.server.memory`) before more of it is read.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.types import Receive

from tms_core.errors import BadRequest
from tms_core.server.memory import FREE_BYTES, Share

Headers = dict[bytes, bytes]

#: zlib's window bits for gzip.
GZIP = 31
#: The highest compression ratio of gzip (RFC 1951: 258 bytes from two bits).
_GZIP_RATIO = 1032
#: The memory of a body for each of its bytes: its pieces, and the joined body.
_HELD = 2


class BodyLimit(NamedTuple):
    """The size limit of a body.

    Attributes:
        bytes: the limit before and after decompression.
        reason: its source: the setting, or the kind of body.
    """

    bytes: int
    reason: str


class Disconnected(Exception):
    """The client disconnected before its request was complete."""


async def read_body(headers: Headers, receive: Receive, limit: BodyLimit, share: Share) -> bytes:
    """Return the whole body as it was sent.

    Raises:
        HTTPException: it is larger than ``limit``, or compressed in a way that is not served.
        Disconnected: the client went away.
        Unavailable: there is no memory for it.
    """
    if headers.get(b"content-encoding", b"identity").lower() not in (b"identity", b"gzip"):
        raise HTTPException(415, "Of all compressions only gzip is read.")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit.bytes:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        share.begin_waiting()
        message = await receive()
        share.end_waiting()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message["body"])
        size += len(parts[-1])
        if size > limit.bytes:
            raise _too_large(limit)
        if size > FREE_BYTES:
            await share.take(_HELD * size - share.size)
        if not message["more_body"]:
            return parts[0] if len(parts) == 1 else b"".join(parts)


def unpacked_bytes(size: int, limit: BodyLimit) -> int:
    """Return how large a body of so many packed bytes may become, within a limit, and twice that while it is put
    together.
    """
    return _HELD * min(_GZIP_RATIO * size, limit.bytes + 1)


def is_packed(headers: Headers) -> bool:
    """Return whether the body is compressed."""
    return headers.get(b"content-encoding", b"identity").lower() != b"identity"


def unpacked(body: bytes, limit: BodyLimit) -> bytes:
    """Return a body as it was before it was compressed.

    Raises:
        BadRequest: it is no gzip, though it should be, or cut short.
        HTTPException: it is larger than ``limit``.
    """
    member = zlib.decompressobj(GZIP)
    try:
        # One byte more, to see whether there is more than is allowed.
        found = member.decompress(body, limit.bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"The body is not gzip: {error}.") from error
    if len(found) > limit.bytes:
        raise _too_large(limit)
    if not member.eof or member.unused_data:
        raise BadRequest("The body is not gzip: it is cut short, or something follows it.")
    return found


def _too_large(limit: BodyLimit) -> HTTPException:
    return HTTPException(413, f"A body may have {limit.bytes} bytes at most here ({limit.reason}).")


def accepts_gzip(headers: Headers) -> bool:
    """Return whether the client reads gzip (``Accept-Encoding``)."""
    offered = headers.get(b"accept-encoding", b"")
    for part in offered.lower().split(b","):
        name, _, parameter = part.partition(b";")
        if name.strip() == b"gzip":
            quality = parameter.strip().removeprefix(b"q=").strip(b" 0.")
            return not parameter or bool(quality)
    return False
