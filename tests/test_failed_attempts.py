"""Failed attempts: growing delays, with a manual clock."""

from __future__ import annotations

import asyncio

from tests.builders import NOW_MS
from tests.support import in_event_loop
from tms_core.clock import ManualClock
from tms_core.web.failed_attempts import FREE_ATTEMPTS, MAX_ADDRESSES, MAX_DELAY_SECONDS, FailedAttempts


def test_failed_attempts_are_slowed_down_by_address_and_forgiven_with_time() -> None:
    clock = ManualClock(NOW_MS)
    failed = FailedAttempts(clock)
    assert [failed.note("a") for _ in range(FREE_ATTEMPTS)] == [0.0] * FREE_ATTEMPTS
    assert [failed.note("a") for _ in range(3)] == [0.5, 1.0, 1.5]
    assert failed.note("b") == 0.0
    assert max(failed.note("a") for _ in range(100)) == MAX_DELAY_SECONDS
    clock.advance(3_600_000)
    assert failed.note("a") == 0.0
    for number in range(MAX_ADDRESSES + 100):
        failed.note(str(number))
    assert len(failed._failed) == MAX_ADDRESSES


def test_failed_attempts_from_one_ipv6_network_count_together_and_mapped_ones_apart() -> None:
    failed = FailedAttempts(ManualClock(NOW_MS))
    for number in range(FREE_ATTEMPTS):
        assert failed.note(f"2001:db8::{number:x}%eth0" if number % 2 else f"2001:db8::{number:x}:1") == 0.0
        assert failed.note(f"::ffff:192.0.2.{number}") == 0.0
    assert failed.note("2001:db8:0:0:ffff::1") == 0.5
    assert failed.note("2001:db8:0:1::1") == 0.0
    for number in range(FREE_ATTEMPTS - 1):
        assert failed.note("192.0.2.1") == 0.0, number
    assert failed.note("::ffff:192.0.2.1") == 0.5


@in_event_loop
async def test_failed_attempts_above_the_connection_limit_get_a_response_at_once() -> None:
    failed = FailedAttempts(ManualClock(NOW_MS), max_waiting=2)
    for _ in range(FREE_ATTEMPTS):
        await failed.delay("a")
    waits = [asyncio.create_task(failed.delay("a")) for _ in range(3)]
    done, waiting = await asyncio.wait(waits, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert (done, waiting) == ({waits[2]}, set(waits[:2]))
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    assert failed._waiting == 0
