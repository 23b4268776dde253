"""A network with faults: a TCP proxy between a client and a server.

The proxy forwards bytes. The test determines the faults of each connection by its number:

    with Proxy(server.thrift) as proxy:
        proxy.conduct = lambda number: Conduct(down=Fault("cut", after_bytes=500)) if number < 3 else HONEST
        store = HBaseStore(HBaseSettings(thrift=(proxy.address,)))

A fault occurs in one direction after a number of bytes. ``cut`` closes both ends. ``half-open`` closes the end at the
server only, and drops the client's bytes, as when a machine dies. ``blackhole`` leaves both ends open and drops all
further bytes. A test can also hold responses and release them later (:meth:`Proxy.hold`), and delay every piece.
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
    """A fault in one direction of a connection.

    Args:
        kind: the kind of the fault.
        after_bytes: the number of bytes that are forwarded before the fault.
    """

    kind: Kind
    after_bytes: int = 0


@dataclass(frozen=True)
class Conduct:
    """The faults of one connection.

    Args:
        up: the fault of requests; None: no fault.
        down: the fault of responses; None: no fault.
        delay_seconds: the delay of each piece of a response.
        piece_bytes: the largest piece.
    """

    up: Fault | None = None
    down: Fault | None = None
    delay_seconds: float = 0
    piece_bytes: int = _PIECE_BYTES


HONEST = Conduct()


class Proxy:
    """A proxy on a free port, in a separate thread.

    Args:
        target: ``HOST:PORT`` of the server.

    Attributes:
        target: the server of new connections; a test may change it.
        conduct: returns the conduct of each connection, by its number from 0.
        connections: the number of accepted connections.
        struck: the number of faults so far.
        passing: whether responses are forwarded.
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
        """Hold every response from now on."""
        self._loop.call_soon_threadsafe(self.passing.clear)

    def release(self) -> None:
        """Release the held responses, in order."""
        self._loop.call_soon_threadsafe(self.passing.set)

    def treat(self, conduct: Callable[[int], Conduct]) -> None:
        """Cut all open connections, and use another conduct for new connections, which are counted from 0 again."""
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
    """One connection from the client through the proxy to the server."""

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
        """Forward bytes in one direction until either end closes."""
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
        # After a fault, the client must not see that the server has closed the connection.
        if not self._silent or source is self._client[0]:
            self.close()

    async def _piece(self, source: asyncio.StreamReader) -> bytes:
        try:
            return await source.read(self._conduct.piece_bytes)
        except ConnectionError:
            return b""

    def _strike(self, fault: Fault) -> None:
        self._proxy.struck += 1
        # For a cut, too: the client can still read the bytes that were forwarded before it.
        self._silent = True
        if fault.kind == "cut":
            self.close()
        elif fault.kind == "half-open":
            self._server[1].close()
