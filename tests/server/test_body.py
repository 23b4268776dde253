"""Compressed bodies: accepted encodings, and limits of the decompressed size."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from starlette.exceptions import HTTPException

from tms_core.server.rest.body import GZIP, BodyLimit, decompress_body


def test_unpack_of_a_bomb_holds_no_more_than_the_limit() -> None:
    packing = zlib.compressobj(9, zlib.DEFLATED, GZIP)
    bomb = b"".join(packing.compress(bytes(1_000_000)) for _ in range(50)) + packing.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(HTTPException, match="1000000"):
            decompress_body(bomb, BodyLimit(1_000_000, "a test"))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
