"""A network that misbehaves: a TCP proxy between the janitor and Thrift.

It passes bytes on. The test determines the faults of each connection, by its number:

    with Proxy(server.thrift) as proxy:
        proxy.conduct = lambda number: Conduct(down=Fault("cut", after_bytes=500)) if number < 3 else HONEST
        store = HBaseStore(HBaseSettings(thrift=(proxy.address,)))

A fault strikes one direction once so many bytes have passed in it. ``cut`` closes both ends. ``half-open`` closes the
end at the server, and the client is not told: its packets go nowhere, as when a machine dies. ``blackhole`` leaves both
ends open and lets nothing more through. Answers can also be held back and let go later (:meth:`Proxy.hold`), and every
piece can be delayed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Self

_PIECE_BYTES = 1 << 16

Kind = Literal["cut", "half-open", "blackhole"]


@dataclass(frozen=True)
class Fault:
    """What happens in one direction.

    Args:
        kind: what.
        after_bytes: how many bytes pass before.
    """

    kind: Kind
    after_bytes: int = 0


@dataclass(frozen=True)
class Conduct:
    """The treatment of one connection.

    Args:
        up: what happens to requests; None: nothing.
        down: what happens to answers.
        delay_seconds: how long each piece of an answer is on its way.
        piece_bytes: how large a piece can be.
    """

    up: Fault | None = None
    down: Fault | None = None
    delay_seconds: float = 0
    piece_bytes: int = _PIECE_BYTES


HONEST = Conduct()


class Proxy:
    """The proxy, on a port of its own, in a thread of its own.

    Args:
        target: ``HOST:PORT`` behind it.

    Attributes:
        target: may be changed; new connections go there.
        conduct: asked for each connection, by its number from 0.
        connections: how many were accepted.
        struck: how often a fault came to pass.
        passing: whether answers are let through.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.conduct: Callable[[int], Conduct] = lambda _: HONEST
        self.connections = 0
        self.struck = 0
        self.passing = asyncio.Event()
        self.passing.set()
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Keep every answer back from now on."""
        self._loop.call_soon_threadsafe(self.passing.clear)

    def release(self) -> None:
        """Release the held answers, in order."""
        self._loop.call_soon_threadsafe(self.passing.set)

    def treat(self, conduct: Callable[[int], Conduct]) -> None:
        """Cut what is open, and treat whoever connects from now on like this, counted from 0 again."""
        self.conduct, self.connections, self.struck = conduct, 0, 0
        self._do(self._cut_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        host, _, port = self.target.rpartition(":")
        try:
            server = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        link = _Link(self, self.conduct(number), (reader, writer), server)
        self._links.add(link)
        await link.run()
        self._links.discard(link)

    async def _cut_all(self) -> None:
        for link in self._links:
            link.close()

    async def _stop(self) -> None:
        self._server.close()
        self.passing.set()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await self._cut_all()
            await asyncio.wait(tasks, timeout=0.1)


_End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection, from the client through us to the server."""

    def __init__(self, proxy: Proxy, conduct: Conduct, client: _End, server: _End) -> None:
        self._proxy = proxy
        self._conduct = conduct
        self._client = client
        self._server = server
        self._silent = False

    async def run(self) -> None:
        up = self._pump(self._client[0], self._server[1], self._conduct.up)
        down = self._pump(self._server[0], self._client[1], self._conduct.down)
        await asyncio.gather(up, down)

    def close(self) -> None:
        self._client[1].close()
        self._server[1].close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, fault: Fault | None) -> None:
        """Pass bytes on in one direction until either end closes."""
        passed = 0
        while piece := await self._piece(source):
            if sink is self._client[1]:
                await asyncio.sleep(self._conduct.delay_seconds)
                await self._proxy.passing.wait()
            if self._silent:
                continue
            if fault is not None and passed + len(piece) > fault.after_bytes:
                sink.write(piece[: fault.after_bytes - passed])
                self._strike(fault)
                continue
            passed += len(piece)
            sink.write(piece)
        # What has fallen silent does not say either that the server has gone.
        if not self._silent or source is self._client[0]:
            self.close()

    async def _piece(self, source: asyncio.StreamReader) -> bytes:
        try:
            return await source.read(self._conduct.piece_bytes)
        except ConnectionError:
            return b""

    def _strike(self, fault: Fault) -> None:
        self._proxy.struck += 1
        # Also where it is cut: what had come before the end is still there to be read.
        self._silent = True
        if fault.kind == "cut":
            self.close()
        elif fault.kind == "half-open":
            self._server[1].close()
