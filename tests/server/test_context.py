"""Where bodies are taken apart: small ones at once, others where nobody waits for it."""

from __future__ import annotations

import asyncio
import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from starlette.types import Message

from tms_core.messaging.service import MessagingService
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.context import ServerContext

ZIPPED = {b"content-encoding": b"gzip"}


@pytest.mark.parametrize(
    ("headers", "body", "elsewhere"),
    [
        ({}, b"a", False),
        ({}, bytes(250_000), True),
        (ZIPPED, gzip.compress(b"a"), False),
        (ZIPPED, gzip.compress(bytes(900_000)), True),  # a kilobyte, as it is sent
    ],
    ids=["small", "large", "packed", "packed and large"],
)
def test_loop_does_not_parse_a_large_body(headers: dict[bytes, bytes], body: bytes, elsewhere: bool) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    with ThreadPoolExecutor(1) as threads:
        context = ServerContext(cast("MessagingService", None), threads, cast("ServerMetrics", None), 1_000_000)
        share = context.memory.share(lambda: None)
        thread = asyncio.run(context.read({}, headers, receive, lambda _: threading.current_thread(), share))
    assert (thread is not threading.current_thread()) == elsewhere
