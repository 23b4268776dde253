"""Waiting in an event loop for what another thread does: nobody who stops waiting stops it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from tms_core.server.site import outcome


async def give_up(future: Future[str]) -> None:
    """Wait for it, and be cancelled while waiting."""
    waiting = asyncio.ensure_future(outcome(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_given_a_result_that_is_there_when_waited_for_then_it_comes_at_once() -> None:
    future: Future[str] = Future()
    future.set_result("written")
    assert asyncio.run(outcome(future)) == "written"


def test_given_a_result_that_comes_from_a_thread_when_waited_for_then_it_comes() -> None:
    async def wait() -> str:
        future: Future[str] = Future()
        asyncio.get_running_loop().run_in_executor(None, future.set_result, "written")
        return await outcome(future)

    assert asyncio.run(wait()) == "written"


def test_given_somebody_who_stops_waiting_when_it_is_done_later_then_it_was_not_cancelled() -> None:
    future: Future[str] = Future()

    async def wait() -> None:
        await give_up(future)
        future.set_result("written")
        # the loop hears of it, and nobody is there
        await asyncio.sleep(0)

    asyncio.run(wait())
    assert future.result() == "written"


def test_given_a_loop_that_has_ended_when_it_is_done_later_then_nobody_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: Future[str] = Future()
    asyncio.run(give_up(future))
    future.set_result("written")
    assert not caplog.records
