"""How much memory answers take that their clients have not taken yet.

An answer is made step by step, and what a step made is kept until the client has it. A client who reads takes it within
moments; one who does not keeps it for as long as he likes. So there is a bound on what all of them keep together: where
it is reached, nobody makes a further step until something is sent. If nothing is for a while, whoever has kept his part
for longest is cut off, and then the next. As long as there is room, nobody is cut off, however slow he is.

For one event loop: nothing here is shared with threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: What is kept at most, in bytes, before further steps wait; those that are being made already come on top.
ROOM_BYTES = 128 << 20
#: For how long one may keep others waiting, in seconds.
PATIENCE_SECONDS = 30.0


class Room:
    """What all answers share.

    Args:
        limit_bytes: what they may keep together.
        patience_seconds: for how long one may keep others waiting.
    """

    def __init__(self, limit_bytes: int = ROOM_BYTES, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._limit_bytes = limit_bytes
        self._patience_seconds = patience_seconds
        self._kept_bytes = 0
        self._parts: dict[Part, float] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    async def free(self) -> None:
        """Wait until there is room for a step."""
        while self._kept_bytes >= self._limit_bytes:
            loop = asyncio.get_running_loop()
            oldest, since = next(iter(self._parts.items()))
            changed = loop.create_future()
            self._waiting.add(changed)
            try:
                await asyncio.wait_for(changed, max(0.0, since + self._patience_seconds - loop.time()))
            except TimeoutError:
                if self._parts.get(oldest) == since:
                    oldest.cut_off()
            finally:
                self._waiting.discard(changed)

    def keep(self, part: Part, size: int) -> None:
        """A step has made so much."""
        self._parts[part] = asyncio.get_running_loop().time()
        self._kept_bytes += size

    def let_go(self, part: Part, size: int) -> None:
        """It is sent, or nobody wants it any more."""
        del self._parts[part]
        self._kept_bytes -= size
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)


class Part:
    """One answer's part of the room; as a context it is let go at the end.

    Args:
        room: what it is a part of.
        abort: ends the connection at once.
    """

    def __init__(self, room: Room, abort: Callable[[], None]) -> None:
        self._room = room
        self._abort = abort
        self._size = 0

    def keep(self, size: int) -> None:
        """This much is to be sent."""
        self.let_go()
        self._size = size
        self._room.keep(self, size)

    def let_go(self) -> None:
        """All of it is sent."""
        if self._size:
            self._room.let_go(self, self._size)
            self._size = 0

    def cut_off(self) -> None:
        """The client has kept others waiting for too long."""
        self._abort()
        self.let_go()

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
