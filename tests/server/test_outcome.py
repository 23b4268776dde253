"""Waiting in an event loop for another thread: a cancelled wait does not cancel the work."""

from __future__ import annotations

import asyncio

import pytest

from tests.support import in_event_loop
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.server.rest.context import outcome


async def give_up(wanted: PublishFuture[str]) -> None:
    """Wait for the outcome and be cancelled while waiting."""
    waiting = asyncio.ensure_future(outcome(wanted))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_outcome_of_a_thread_is_returned() -> None:
    async def wait() -> str:
        wanted: PublishFuture[str] = PublishFuture()
        asyncio.get_running_loop().run_in_executor(None, wanted.set_outcome, "written")
        return await outcome(wanted)

    assert asyncio.run(wait()) == "written"


def test_outcome_that_is_set_is_returned_at_once() -> None:
    wanted: PublishFuture[str] = PublishFuture()
    wanted.set_outcome("written")
    assert asyncio.run(outcome(wanted)) == "written"


@in_event_loop
async def test_outcome_of_a_waiter_that_stops_is_not_cancelled() -> None:
    wanted: PublishFuture[str] = PublishFuture()
    await give_up(wanted)
    wanted.set_outcome("written")
    # the loop receives the outcome, and no task waits for it
    await asyncio.sleep(0)
    assert wanted.result() == "written"


def test_outcome_after_the_end_of_the_loop_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    wanted: PublishFuture[str] = PublishFuture()
    asyncio.run(give_up(wanted))
    wanted.set_outcome("written")
    assert not caplog.records
