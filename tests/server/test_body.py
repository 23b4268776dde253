"""Bodies that are compressed: what is taken, and that a small one cannot fill the memory."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from starlette.exceptions import HTTPException

from tms_core.server.rest.body import GZIP, BodyLimit, unpacked


def test_given_a_small_body_that_inflates_without_end_when_unpacked_then_no_more_than_the_limit_is_held() -> None:
    packing = zlib.compressobj(9, zlib.DEFLATED, GZIP)
    bomb = b"".join(packing.compress(bytes(1_000_000)) for _ in range(50)) + packing.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(HTTPException, match="1000000"):
            unpacked(bomb, BodyLimit(1_000_000, "a test"))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
