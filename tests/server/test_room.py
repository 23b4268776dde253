"""Who may keep how much of an answer in memory, for how long, and who is cut off when others wait."""

from __future__ import annotations

import asyncio

from tests.server.client import PATIENCE_SECONDS
from tms_core.server.room import Part, Room


class Parts:
    """Makes parts of a room, and notes which are cut off."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.cut: list[str] = []

    def __call__(self, name: str) -> Part:
        return Part(self.room, lambda: self.cut.append(name))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_given_room_when_a_step_is_to_be_made_then_nobody_waits() -> None:
    async def scene() -> None:
        room = Room(10, PATIENCE_SECONDS)
        with Part(room, lambda: None) as part:
            part.keep(9)
            await room.free()
            part.keep(9)  # in the place of what it had
            await room.free()

    asyncio.run(scene())


def test_given_no_room_when_others_wait_then_all_go_on_as_soon_as_something_is_sent() -> None:
    async def scene() -> None:
        parts = Parts(Room(10, PATIENCE_SECONDS))
        part = parts("a")
        part.keep(10)
        waiting = [asyncio.ensure_future(parts.room.free()) for _ in range(3)]
        await settle()
        assert not any(one.done() for one in waiting)
        part.let_go()
        part.let_go()
        await asyncio.gather(*waiting)
        assert parts.cut == []

    asyncio.run(scene())


def test_given_those_who_keep_others_waiting_then_the_longest_at_it_are_cut_off_until_there_is_room() -> None:
    async def scene() -> None:
        parts = Parts(Room(10, 0.01))
        first, second, third = (parts(name) for name in "abc")
        for part in (first, second, third):
            part.keep(6)
        first.keep(6)  # has sent what it had, and is now the one that has kept its part for the least time
        await parts.room.free()
        assert parts.cut == ["b", "c"]
        first.let_go()
        second.let_go()

    asyncio.run(scene())


def test_given_one_who_waits_no_more_then_the_others_are_not_held_up() -> None:
    async def scene() -> None:
        parts = Parts(Room(10, PATIENCE_SECONDS))
        part = parts("a")
        part.keep(10)
        leaving, staying = (asyncio.ensure_future(parts.room.free()) for _ in range(2))
        await settle()
        leaving.cancel()
        await settle()
        part.let_go()
        await staying
        assert leaving.cancelled()

    asyncio.run(scene())
