"""An unresponsive server: calls fail at once instead of waiting for a timeout each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tables.fake_thrift import FakeThrift, Request
from tms_core.clock import ManualClock
from tms_core.errors import StoreUnavailable
from tms_core.tables.hbase.pool import MAX_AVOID_MS, OUTAGE_TIMEOUTS, PAUSES_SECONDS, HBasePool

TIMEOUT_SECONDS = 30


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0)


@pytest.fixture
def server() -> Iterator[FakeThrift]:
    with FakeThrift(Request.cut) as fake:
        yield fake


@pytest.fixture
def pool(server: FakeThrift, clock: ManualClock) -> Iterator[HBasePool]:
    opened = HBasePool([server.address], timeout_seconds=TIMEOUT_SECONDS, clock=clock)
    yield opened
    opened.close()


def fail(pool: HBasePool) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        pool.call("getRow", b"ns:t", b"row", {})
    return str(caught.value)


def test_unresponsive_server_is_not_called_until_the_next_attempt(
    pool: HBasePool, server: FakeThrift, clock: ManualClock
) -> None:
    while "has not responded for" not in fail(pool):
        pass
    assert clock.monotonic_ms() > OUTAGE_TIMEOUTS * TIMEOUT_SECONDS * 1000
    connections, now_ms = server.connections, clock.monotonic_ms()
    for _ in range(1000):
        assert f"{server.address} has not responded for" in fail(pool)
    assert (server.connections, clock.monotonic_ms()) == (connections, now_ms)
    clock.advance(MAX_AVOID_MS)
    fail(pool)
    assert server.connections == connections + 1


def test_response_ends_the_outage_of_a_server(pool: HBasePool, server: FakeThrift, clock: ManualClock) -> None:
    while "has not responded for" not in fail(pool):
        pass
    server.conduct = lambda request: request.send(request.answer())
    clock.advance(MAX_AVOID_MS)
    [row] = pool.call("getRow", b"ns:t", b"row", {})
    assert row.row == b"row"
    server.conduct = Request.cut
    assert "broke during getRow" in fail(pool)


def test_one_old_failure_causes_no_outage(pool: HBasePool, server: FakeThrift, clock: ManualClock) -> None:
    fail(pool)
    clock.advance(10 * OUTAGE_TIMEOUTS * TIMEOUT_SECONDS * 1000)
    connections = server.connections
    assert "broke during getRow" in fail(pool)
    assert server.connections == connections + 1 + len(PAUSES_SECONDS)
