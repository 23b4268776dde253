"""Compressed bodies: accepted encodings, and limits of the decompressed size."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import zlib

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message

from tms_core.server.codec.avro import AvroCodec
from tms_core.server.codec.bodies import Codec
from tms_core.server.codec.json_text import JsonCodec
from tms_core.server.memory import Memory
from tms_core.server.rest.body import GZIP, BodyLimit, decompress_body, read_body


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


def test_body_in_pieces_of_two_bytes_takes_a_small_multiple_of_its_size() -> None:
    size, memory = 100_000, Memory()
    left = size

    async def receive() -> Message:
        nonlocal left
        left -= 2
        return {"type": "http.request", "body": bytes((left & 255, left & 127)), "more_body": left > 0}

    async def read() -> bytes:
        return await read_body({}, receive, BodyLimit(size, "a test"), memory.share(lambda: None))

    tracemalloc.start()
    try:
        assert len(asyncio.run(read())) == size
        assert memory.used_bytes == 2 * size
        assert tracemalloc.get_traced_memory()[1] < 10 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (AvroCodec(), b"\x02\xa0\x9c\x01" + bytes(10_000) + b"\0"),
        (JsonCodec(), json.dumps({"messages": [""] * 10_000}).encode()),
        (JsonCodec(), json.dumps({"messages": [{"base64": ""}] * 10_000}).encode()),
        (JsonCodec(), json.dumps({"messages": ["\U0001f600" + "a" * 100_000]}, ensure_ascii=False).encode()),
    ],
    ids=["avro", "json", "base64", "wide"],
)
def test_publish_cost_covers_the_memory_of_decoding(codec: Codec, body: bytes) -> None:
    tracemalloc.start()
    try:
        codec.read_publish(body)
        assert tracemalloc.get_traced_memory()[1] <= codec.publish_cost(body)
    finally:
        tracemalloc.stop()
