"""A server that fails before or after any step of a request, and loses the response."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx2
import pytest

from tms_core.client import AsyncClient, Client, Retry, TransactionClient
from tms_core.client.testing import InProcess
from tms_core.transaction.codec.wire import Fields
from tms_core.transaction.rpc.connection import RpcConnection

#: ``before``: the request is lost. ``after``: the response is lost. ``late``: the test executes the request later.
When = Literal["before", "after", "late"]

#: The name of the step of each method of the transaction service.
_STEPS = {
    "startShortClientId": "start",
    "startShortWithClientIdAndTimeOut": "start",
    "startLongClientId": "start",
    "canCommitOrThrow": "canCommit",
    "commitOrThrow": "commit",
    "abortTx": "abort",
    "abortById": "abort",
    "invalidateTx": "invalidate",
    "checkpoint": "checkpoint",
    "checkpointById": "checkpoint",
}
ATTEMPTS = 3
SOON = Retry(attempts=ATTEMPTS, first_seconds=0.001, longest_seconds=0.001)


class Faults:
    """The faults of a server, by step.

    Attributes:
        seen: the number of requests of each step, with and without a response.
        late: functions that execute the delayed requests.
        on_step: called with the name of each step.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.late: list[Callable[[], object]] = []
        self.on_step: Callable[[str], None] = lambda _: None
        self._steps: dict[str, tuple[When, int]] = {}

    def at(self, step: str, when: When, times: int = 1_000_000) -> None:
        """Fail at a step, a number of times."""
        self._steps[step] = (when, times)

    def heal(self) -> None:
        self._steps.clear()

    def next_fault(self, step: str) -> When | None:
        self.seen[step] += 1
        self.on_step(step)
        when, times = self._steps.get(step, (None, 0))
        if when is None or not times:
            return None
        self._steps[step] = (when, times - 1)
        return when


def _step(request: httpx2.Request) -> str:
    """Return the last part of the path, after a method other than POST."""
    last = request.url.path.rpartition("/")[2]
    return last if request.method == "POST" else f"{request.method} {last}"


class ServerTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """A transport that sends all requests to one server."""

    def __init__(self, server: InProcess) -> None:
        self._url = httpx2.URL(server.url)
        self._blocking = httpx2.HTTPTransport(verify=False)
        self._looping = httpx2.AsyncHTTPTransport(verify=False)
        self._closed = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._closed:
            # A delayed request would open a connection in the pool that is never closed.
            with httpx2.HTTPTransport(verify=False) as transport:
                answer = transport.handle_request(self._readdressed(request))
                answer.read()
                return answer
        return self._blocking.handle_request(self._readdressed(request))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._closed:
            async with httpx2.AsyncHTTPTransport(verify=False) as transport:
                answer = await transport.handle_async_request(self._readdressed(request))
                await answer.aread()
                return answer
        return await self._looping.handle_async_request(self._readdressed(request))

    def close(self) -> None:
        self._closed = True
        self._blocking.close()

    async def aclose(self) -> None:
        self._closed = True
        await self._looping.aclose()

    def _readdressed(self, request: httpx2.Request) -> httpx2.Request:
        request.url = request.url.copy_with(host=self._url.host, port=self._url.port)
        return request


class FaultyTransport(ServerTransport):
    """A transport that loses requests and responses."""

    def __init__(self, faults: Faults, server: InProcess) -> None:
        super().__init__(server)
        self._faults = faults

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        when = self._faults.next_fault(_step(request))
        if when == "before":
            raise httpx2.ReadError("cut")
        if when == "late":
            body = request.read()
            again = httpx2.Request(request.method, request.url, headers=request.headers, content=body)
            self._faults.late.append(lambda: self._send_later(again))
            raise httpx2.ReadTimeout("nothing came")
        answer = super().handle_request(request)
        if when == "after":
            answer.read()
            answer.close()
            raise httpx2.ReadError("cut")
        return answer

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        when = self._faults.next_fault(_step(request))
        if when == "before":
            raise httpx2.ReadError("cut")
        answer = await super().handle_async_request(request)
        if when == "after":
            await answer.aread()
            await answer.aclose()
            raise httpx2.ReadError("cut")
        return answer

    def _send_later(self, request: httpx2.Request) -> None:
        with httpx2.HTTPTransport(verify=False) as transport:
            transport.handle_request(self._readdressed(request)).read()


class FaultyConnection:
    """A connection that loses calls and responses."""

    def __init__(self, faults: Faults, connection: RpcConnection) -> None:
        self._faults = faults
        self._connection = connection

    def call(self, name: str, fields: tuple[bytes, ...], seconds: float) -> Fields:
        when = self._faults.next_fault(_STEPS.get(name, name))
        if when == "before":
            raise EOFError("cut")
        if when == "late":
            self._faults.late.append(lambda: self._connection.call(name, fields, seconds))
            raise TimeoutError
        answer = self._connection.call(name, fields, seconds)
        if when == "after":
            raise EOFError("cut")
        return answer

    def is_reusable(self) -> bool:
        return self._connection.is_reusable()

    def close(self) -> None:
        self._connection.close()


def faulty_service(server: InProcess, faults: Faults) -> TransactionClient:
    """Return a client of the transaction service with the faults."""
    inner = server.transactions()
    return TransactionClient("here", connect=lambda *given: FaultyConnection(faults, inner.connect(*given)))


@contextmanager
def faulty_client(server: InProcess, faults: Faults, **options: Any) -> Iterator[Client]:
    """Open a client with the faults, which does not wait between retries."""
    given = {"retry": SOON, "pause": no_pause, **options}
    transport = FaultyTransport(faults, server)
    with server.client(transport=transport, transactions=faulty_service(server, faults), **given) as client:
        yield client


def faulty_async_client(server: InProcess, faults: Faults, **options: Any) -> AsyncClient:
    given = {"retry": SOON, "pause": no_async_pause, **options}
    transport = FaultyTransport(faults, server)
    return server.async_client(transport=transport, transactions=faulty_service(server, faults), **given)


def no_pause(event: threading.Event, _: float) -> None:
    """Let other threads run instead of a pause."""
    event.wait(0.001)


async def no_async_pause(_: asyncio.Event, __: float) -> None:
    await asyncio.sleep(0)


def forget_changes(
    server: InProcess,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    method: Literal["commit", "commit_and_start"],
) -> None:
    """Execute commits like a manager that has just recovered; it has forgotten the changes of the first commit."""
    commit, step = getattr(server.manager, method), "commit" if method == "commit" else "commitAndStart"

    def commit_after_recovery(pointer: int, *given: Any) -> Any:
        state = server.manager._state
        with monkeypatch.context() as patch:
            patch.setattr(state, "recovered_pointer", pointer)
            if faults.seen[step] == 1:
                state.committing.pop(pointer, None)
            return commit(pointer, *given)

    monkeypatch.setattr(server.manager, method, commit_after_recovery)
