"""Parsing of bodies: small bodies at once, large bodies in threads."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast
from uuid import UUID

import pytest
from starlette.requests import Request
from starlette.types import Message

from tests.support import in_event_loop
from tms_core.messaging.service import MessagingService
from tms_core.server.codec.json_text import read_properties, read_registration
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.body import BodyLimit
from tms_core.server.rest.context import ServerContext, ThreadShares

ZIPPED = {b"content-encoding": b"gzip"}


@pytest.mark.parametrize(
    ("headers", "body", "elsewhere"),
    [
        ({}, b"a", False),
        ({}, bytes(250_000), True),
        (ZIPPED, gzip.compress(b"a"), False),
        (ZIPPED, gzip.compress(bytes(900_000)), True),  # a kilobyte on the wire
    ],
    ids=["small", "large", "compressed", "compressed and large"],
)
def test_loop_does_not_parse_a_large_body(headers: dict[bytes, bytes], body: bytes, elsewhere: bool) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    with ThreadPoolExecutor(1) as threads:
        context = ServerContext(cast("MessagingService", None), threads, cast("ServerMetrics", None), 1_000_000)
        share = context.memory.share(lambda: None)
        thread = asyncio.run(context.read({}, headers, receive, lambda _: threading.current_thread(), share))
    assert (thread is not threading.current_thread()) == elsewhere


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (read_properties, json.dumps({f"{number:x}": "" for number in range(20_000)})),
        (read_properties, json.dumps({f"{number:x}": number for number in range(20_000)})),
        (read_registration, json.dumps({"instance": str(UUID(int=1)), "ended": dict.fromkeys(range(9000), "aborted")})),
    ],
    ids=["empty properties", "numbers", "outcomes"],
)
def test_decoded_fields_take_no_more_memory_than_reserved(decode: Callable[[bytes], object], body: str) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def use(context: ServerContext) -> tuple[int, int]:
        request = Request({"type": "http", "headers": [], "state": {"abort": lambda: None}}, receive)
        async with context.body_of(request, decode, BodyLimit(1_000_000, "a test")):
            return context.memory.used_bytes, tracemalloc.get_traced_memory()[1]

    with ThreadPoolExecutor(1) as threads:
        context = ServerContext(cast("MessagingService", None), threads, cast("ServerMetrics", None), 1_000_000)
        tracemalloc.start()
        try:
            reserved, peak = asyncio.run(use(context))
        finally:
            tracemalloc.stop()
    assert peak <= reserved
    assert context.memory.used_bytes == 0


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class PrincipalCalls:
    """Calls that share threads by principal, and last until the test ends them.

    Attributes:
        running: the principals of the calls that have a thread.
    """

    def __init__(self, threads: int) -> None:
        self._turns = ThreadShares(threads)
        self.running: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def _call(self, principal: str) -> None:
        async with self._turns.of(principal):
            self.running.append(principal)
            try:
                await asyncio.Event().wait()
            finally:
                self.running.remove(principal)

    async def start(self, *principals: str) -> None:
        self.tasks += [asyncio.ensure_future(self._call(principal)) for principal in principals]
        await _settle()

    async def end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await _settle()


@in_event_loop
async def test_turns_of_hostile_principals_leave_a_thread_for_another() -> None:
    calls = PrincipalCalls(8)
    await calls.start(*["ada"] * 20, *["eve"] * 20, *["kim"] * 20)
    assert Counter(calls.running) == {"ada": 4, "eve": 2, "kim": 1}
    await calls.start("ben")
    assert "ben" in calls.running
    await calls.end(*calls.tasks)


@in_event_loop
async def test_turn_that_ends_goes_to_the_next_call_that_may_start() -> None:
    calls = PrincipalCalls(4)
    await calls.start("ada", "ada", "ada", "eve", "eve", "kim")
    assert calls.running == ["ada", "ada", "eve", "kim"]
    await calls.end(calls.tasks[0])
    assert calls.running == ["ada", "eve", "kim"]
    await calls.end(calls.tasks[1])
    assert calls.running == ["eve", "kim", "ada"]
    await calls.end(*calls.tasks)


@in_event_loop
async def test_turn_of_a_cancelled_call_is_free_again() -> None:
    calls = PrincipalCalls(2)
    await calls.start("ada", "ada", "ada")
    # All calls are cancelled at once, also the second call, which gets the turn of the first.
    await calls.end(*calls.tasks)
    await calls.start("ada")
    assert calls.running == ["ada"]
    await calls.end(*calls.tasks)
