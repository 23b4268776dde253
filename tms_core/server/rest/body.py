"""The body of a request, read completely within a limit.

A body is read into memory completely, because its messages are written together. Therefore its size is limited before
and after decompression, which also stops decompression bombs. CDAP 6's clients send gzip. The memory for a body is
reserved from the memory of all requests (:mod:`tms_core.server.memory`) while it is being read.
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
#: The memory for each byte of a body: the growing body, and its copy.
_COPIES = 2


class BodyLimit(NamedTuple):
    """The size limit of a body.

    Attributes:
        bytes: the limit before and after decompression.
        reason: the source of the limit for the error: a setting, or the kind of body.
    """

    bytes: int
    reason: str


class Disconnected(Exception):
    """The client disconnected before its request was complete."""


async def read_body(headers: Headers, receive: Receive, limit: BodyLimit, share: Share) -> bytes:
    """Read a complete body, without decompression.

    Raises:
        HTTPException: the body is larger than ``limit``, or has an unsupported compression.
        Disconnected: the client has disconnected.
        Unavailable: no memory became free in time.
    """
    if headers.get(b"content-encoding", b"identity").lower() not in (b"identity", b"gzip"):
        raise HTTPException(415, "The Content-Encoding is not supported. Use gzip or identity.")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit.bytes:
        raise _too_large(limit)
    # Not a list of pieces: a client can send pieces of a byte, each of which would take the memory of an object.
    body = bytearray()
    while True:
        share.begin_waiting()
        message = await receive()
        share.end_waiting()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece: bytes = message["body"]
        size = len(body) + len(piece)
        if size > limit.bytes:
            raise _too_large(limit)
        if size > FREE_BYTES:
            await share.take(_COPIES * size - share.size)
        if not (message["more_body"] or body):
            return piece
        body += piece
        if not message["more_body"]:
            return bytes(body)


def decompressed_bytes(size: int, limit: BodyLimit) -> int:
    """Return the maximum memory for the decompression of a body with ``size`` compressed bytes, in bytes."""
    return _COPIES * min(_GZIP_RATIO * size, limit.bytes + 1)


def is_compressed(headers: Headers) -> bool:
    """Return whether the body is compressed."""
    return headers.get(b"content-encoding", b"identity").lower() != b"identity"


def decompress_body(body: bytes, limit: BodyLimit) -> bytes:
    """Return a decompressed body.

    Raises:
        BadRequest: the body is not gzip, or is truncated.
        HTTPException: the decompressed body is larger than ``limit``.
    """
    member = zlib.decompressobj(GZIP)
    try:
        # One byte more than allowed, to detect a larger body.
        found = member.decompress(body, limit.bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"The body is not gzip: {error}.") from error
    if len(found) > limit.bytes:
        raise _too_large(limit)
    if not member.eof or member.unused_data:
        raise BadRequest("The body is not gzip: it is truncated, or more bytes follow it.")
    return found


def _too_large(limit: BodyLimit) -> HTTPException:
    return HTTPException(413, f"The body has more than {limit.bytes} bytes ({limit.reason}).")


def accepts_gzip(headers: Headers) -> bool:
    """Return whether the client accepts gzip (``Accept-Encoding``)."""
    offered = headers.get(b"accept-encoding", b"")
    for part in offered.lower().split(b","):
        name, _, parameter = part.partition(b";")
        if name.strip() == b"gzip":
            quality = parameter.strip().removeprefix(b"q=").strip(b" 0.")
            return not parameter or bool(quality)
    return False
