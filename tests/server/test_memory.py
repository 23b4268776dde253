"""Memory limits of requests: waits, and disconnected clients."""

from __future__ import annotations

import asyncio

import pytest

from tests.support import PATIENCE_SECONDS, in_event_loop
from tms_core.errors import Unavailable
from tms_core.server.memory import LentMemory, Memory, Share


class ShareFactory:
    """A factory of shares of a memory.

    Attributes:
        cut: the names of the shares whose requests were disconnected.
    """

    def __init__(self, limit_bytes: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
        # A quarter of the memory is reserved for brief requests.
        self.memory = Memory(-(-limit_bytes * 4 // 3), patience_seconds)
        self.cut: list[str] = []

    def __call__(self, name: str = "", principal: str | None = None) -> Share:
        return self.memory.share(lambda: self.cut.append(name), principal)

    async def hold(self, name: str, size: int, principal: str | None = None) -> Share:
        share = self(name, principal)
        await share.take(size)
        share.begin_waiting()
        return share


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@in_event_loop
async def test_take_with_room_does_not_wait() -> None:
    shares = ShareFactory(10)
    with shares() as share:
        await share.take(6)
        await share.take(4)
        share.shrink(3)
        assert shares.memory.used_bytes == 3
        await share.take(7)
    share.close()
    assert shares.memory.used_bytes == 0
    with shares() as share:
        await share.take(11)  # more than the memory: all of it
        assert shares.memory.used_bytes == 10


@in_event_loop
async def test_brief_take_does_not_wait_for_memory_of_long_requests() -> None:
    shares = ShareFactory(9)
    await shares.hold("holder", 9)
    waiting = asyncio.ensure_future(shares().take(1))
    await settle()
    with shares() as share:
        await share.take(3, brief=True)
        another = asyncio.ensure_future(shares().take(1, brief=True))
        await settle()
        assert [waiting.done(), another.done()] == [False, False]
    for task in (waiting, another):
        task.cancel()


@in_event_loop
async def test_waiters_continue_in_their_order() -> None:
    shares = ShareFactory(10)
    holder = await shares.hold("holder", 10)
    waiting = [shares() for _ in range(3)]
    tasks = [asyncio.ensure_future(share.take(4)) for share in waiting]
    small = asyncio.ensure_future(shares().take(1))
    await settle()
    holder.shrink(5)
    await settle()
    assert [task.done() for task in (*tasks, small)] == [True, False, False, False]
    holder.shrink(1)
    await settle()
    assert [task.done() for task in (*tasks, small)] == [True, True, False, False]
    waiting[0].close()
    await asyncio.gather(*tasks, small)
    assert (shares.cut, shares.memory.used_bytes) == ([], 10)


@in_event_loop
async def test_holders_that_keep_others_waiting_longest_are_cut_off() -> None:
    shares = ShareFactory(10, 0.01)
    first = await shares.hold("first", 3)
    for name in ("second", "third", "fourth"):
        await shares.hold(name, 2)
    first.begin_waiting()  # its client was active
    await shares().take(4)
    assert shares.cut == ["second", "third"]


@in_event_loop
async def test_principal_that_uses_least_memory_is_served_first() -> None:
    shares = ShareFactory(10)
    busy = await shares.hold("busy", 10, "ada")
    tasks = [asyncio.ensure_future(shares(principal=one).take(5)) for one in ("ada", "ada", "ben")]
    await settle()
    busy.shrink(5)
    await settle()
    assert [task.done() for task in tasks] == [False, False, True]
    busy.close()
    await settle()
    assert [task.done() for task in tasks] == [True, False, True]
    tasks[1].cancel()


@in_event_loop
async def test_new_request_of_another_principal_does_not_wait_for_memory_that_is_free() -> None:
    shares = ShareFactory(10)
    await shares.hold("busy", 6, "ada")
    waiting = asyncio.ensure_future(shares(principal="ada").take(8))
    await settle()
    await shares(principal="ben").take(4)
    assert not waiting.done()
    waiting.cancel()


@in_event_loop
async def test_request_that_holds_memory_is_served_before_a_new_request() -> None:
    shares = ShareFactory(10)
    held = [await shares.hold("", 4, principal) for principal in ("ada", "ben")]
    new = asyncio.ensure_future(shares(principal="cid").take(4))
    await settle()
    # Otherwise requests that cannot complete would fill the memory during an overload.
    await held[0].take(2)
    assert not new.done()
    new.cancel()


@in_event_loop
async def test_principal_that_uses_most_memory_is_disconnected_first() -> None:
    shares = ShareFactory(10, 0.01)
    await shares.hold("of ben", 2, "ben")
    for name in ("first of ada", "second of ada"):
        await shares.hold(name, 4, "ada")
    await shares(principal="cid").take(5)
    assert shares.cut == ["first of ada", "second of ada"]


@in_event_loop
async def test_largest_of_mutually_waiting_principals_is_rejected() -> None:
    shares = ShareFactory(10)
    held = [await shares.hold(*values) for values in (("", 2, "ben"), ("", 4, "ada"), ("", 4, "ada"))]
    tasks = [asyncio.ensure_future(share.take(3)) for share in held]
    await settle()
    assert [type(task.exception()) for task in tasks if task.done()] == [type(None), Unavailable]
    assert [task.done() for task in tasks] == [True, True, False]
    tasks[2].cancel()


@in_event_loop
async def test_disconnect_for_a_request_leaves_the_freed_memory_to_that_request() -> None:
    shares = ShareFactory(45)
    held = [await shares.hold("", size, principal) for size, principal in ((20, "ben"), *[(5, "ada")] * 5)]
    # Without two of its five shares, ada uses less than ben, so that its third request would be the next one.
    tasks = [asyncio.ensure_future(share.take(size)) for share, size in zip(held, (12, *[5] * 5), strict=True)]
    await settle()
    results = [type(task.exception()) if task.done() else "waits" for task in tasks]
    assert results == [type(None), Unavailable, Unavailable, Unavailable, "waits", "waits"]
    for task in tasks[4:]:
        task.cancel()


@in_event_loop
async def test_one_of_two_that_wait_for_each_other_is_rejected() -> None:
    shares = ShareFactory(10)
    one, other, third = shares("one"), shares("other"), shares("third")
    for share, size in ((one, 4), (other, 4), (third, 2)):
        await share.take(size)
    taking = [asyncio.ensure_future(share.take(3)) for share in (one, other)]
    await settle()
    # The third request runs, and will release its memory.
    assert [task.done() for task in taking] == [False, False]
    third.close()
    await settle()
    assert [type(task.exception()) for task in taking if task.done()] == [type(None), Unavailable]
    assert (shares.cut, one.size, other.size) == ([], 7, 0)
    other = shares("other")
    await other.take(3)
    taking = [asyncio.ensure_future(share.take(2)) for share in (one, other)]
    await settle()
    assert [type(task.exception()) for task in taking if task.done()] == [type(None), Unavailable]
    assert (shares.cut, one.size, other.size) == ([], 9, 0)


@in_event_loop
async def test_request_that_waits_too_long_for_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.server.memory.LONGEST_SECONDS", 0.05)
    shares = ShareFactory(10, 0.01)
    await shares().take(10)
    with pytest.raises(Unavailable, match=r"server\.memory"):
        await shares().take(1)
    assert shares.memory.waiting == 0


@in_event_loop
async def test_request_that_gives_up_lets_the_next_request_continue() -> None:
    shares = ShareFactory(10)
    await shares.hold("holder", 8)
    large, small = (asyncio.ensure_future(shares().take(size)) for size in (5, 2))
    await settle()
    assert not small.done()
    large.cancel()
    await settle()
    assert small.done()


def test_borrower_that_leaves_while_room_comes_gives_it_back() -> None:
    async def cancel_after(steps: int) -> None:
        shares = ShareFactory(10)
        holder = await shares.hold("holder", 8)
        lent = LentMemory(shares.memory, asyncio.get_running_loop())

        async def borrow() -> None:
            async with lent.take(5, lambda: None):
                await asyncio.Event().wait()

        borrower = asyncio.ensure_future(borrow())
        await settle()
        assert shares.memory.waiting == 1
        borrower.cancel()
        # The memory becomes free at any time between the cancellation and its arrival in the loop of the memory.
        for _ in range(steps):
            await asyncio.sleep(0)
        holder.close()
        await asyncio.wait({borrower})
        await settle()
        assert (shares.memory.used_bytes, shares.memory.waiting) == (0, 0)

    for steps in range(10):
        asyncio.run(cancel_after(steps))
