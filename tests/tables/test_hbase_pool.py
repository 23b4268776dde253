"""Connections to HBase: no call receives the response of another call, and each wait is limited."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from tests.tables.fake_thrift import FakeThrift, Request
from tms_core.clock import ManualClock
from tms_core.errors import StoreError, StoreNotFound, StoreUnavailable
from tms_core.tables.hbase.pool import AVOID_MS, IDLE_MS, PAUSES_SECONDS, HBasePool
from tms_core.tables.hbase.thrift import (
    HBASE,
    ConnectionLost,
    NotServed,
    ScannerLost,
    Service,
    ThriftConnection,
    ThriftTimeout,
)

#: A time limit that expires in a test; no successful call has this limit.
SHORT_SECONDS = 0.3
LONG_SECONDS = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_500_000_000_000)


@pytest.fixture
def pools(clock: ManualClock) -> Iterator[Callable[..., HBasePool]]:
    made: list[HBasePool] = []

    def make(*servers: FakeThrift | str, **options: Any) -> HBasePool:
        addresses = [server if isinstance(server, str) else server.address for server in servers]
        settings = {"connections": 2, "timeout_seconds": LONG_SECONDS, **options}
        made.append(HBasePool(addresses, clock=clock, **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


Pools = Callable[..., HBasePool]


def get(pool: HBasePool, row: bytes) -> bytes:
    [found] = pool.call("getRow", b"table", row, {})
    key: bytes = found.row
    return key


def nth(*conducts: Callable[[Request], None]) -> Callable[[Request], None]:
    """Return a conduct that applies one conduct per request, and the last one to all later requests."""
    numbers = count()

    def conduct(request: Request) -> None:
        conducts[min(next(numbers), len(conducts) - 1)](request)

    return conduct


def respond(request: Request) -> None:
    request.send(request.answer())


def respond_with_wrong_number(request: Request) -> None:
    request.send(request.answer(number=request.number + 1))


def send_nothing(_: Request) -> None:
    """Send no response."""


def forget_scanner(request: Request) -> None:
    request.send(request.failure(ia=HBASE.IllegalArgument(message=b"scanner ID is invalid")))


def test_late_response_is_not_used_for_the_next_call(pools: Pools) -> None:
    gave_up = threading.Event()

    def respond_late(request: Request) -> None:
        gave_up.wait(LONG_SECONDS)
        request.send(request.answer())
        request.send(request.answer())

    with FakeThrift(nth(respond_late, respond)) as server:
        pool = pools(server, connections=1, timeout_seconds=SHORT_SECONDS)
        with pytest.raises(ThriftTimeout, match=r"getRow .*0\.3 s"):
            get(pool, b"first")
        pool.timeout_seconds = LONG_SECONDS
        gave_up.set()
        assert [get(pool, b"%d" % number) for number in range(5)] == [b"%d" % number for number in range(5)]
        assert server.connections > 1


def test_late_response_is_not_used_for_the_next_happybase_call(pools: Pools) -> None:
    gave_up = threading.Event()

    def respond_late(request: Request) -> None:
        gave_up.wait(LONG_SECONDS)
        request.send(request.answer(row=b"of another"))
        request.send(request.answer(row=b"of another"))

    def respond_rows(request: Request) -> None:
        request.reply([HBASE.TRowResult(row=row, columns={}) for row in request.arguments.rows])

    with FakeThrift(nth(respond_late, respond_rows)) as server:
        pool = pools(server, connections=1, timeout_seconds=SHORT_SECONDS)
        with pytest.raises(ThriftTimeout, match=r"getRowWithColumns .*0\.3 s"):
            pool.run(lambda connection: connection.table(b"table").row(b"first"))
        pool.timeout_seconds = LONG_SECONDS
        gave_up.set()
        found = pool.run(lambda connection: connection.table(b"table").rows([b"a", b"b"]))
        assert found == [(b"a", {}), (b"b", {})]
        assert pool.calls == {"getRowWithColumns": 1, "getRowsWithColumns": 1}


def test_response_with_wrong_sequence_id_is_retried_on_a_new_connection(pools: Pools) -> None:
    with FakeThrift(nth(respond_with_wrong_number, lambda request: request.reply([]))) as server:
        assert pools(server).run(lambda connection: connection.table(b"table").row(b"mine")) == {}
        assert server.connections == 2


@pytest.mark.parametrize("wrong", [{"number": 0}, {"name": "getRows"}], ids=["number", "name"])
def test_response_to_another_call_is_discarded(pools: Pools, wrong: dict[str, Any]) -> None:
    def respond_for_another(request: Request) -> None:
        request.send(request.answer(row=b"of another", **wrong))

    with FakeThrift(nth(respond_for_another, respond)) as server:
        assert get(pools(server), b"mine") == b"mine"
        assert server.connections == 2


def test_call_with_only_mismatched_responses_fails_after_retries(pools: Pools, clock: ManualClock) -> None:
    with FakeThrift(respond_with_wrong_number) as server:
        before_ms = clock.monotonic_ms()
        with pytest.raises(ConnectionLost, match=r"getRow.* 2 "):
            get(pools(server), b"mine")
        assert server.reads[b"mine"] == len(PAUSES_SECONDS) + 1
        assert clock.monotonic_ms() - before_ms == sum(PAUSES_SECONDS) * 1000


def test_idle_connection_with_unexpected_bytes_is_not_reused(pools: Pools) -> None:
    def respond_twice(request: Request) -> None:
        request.send(request.answer() + request.answer())

    with FakeThrift(nth(respond_twice, respond)) as server:
        pool = pools(server)
        assert get(pool, b"a") == b"a"
        # The second response to the first call may already be in the buffer, and only its number differs.
        assert get(pool, b"b") == b"b"
        assert server.connections == 2


def test_closed_idle_connection_is_replaced_without_retry(pools: Pools, clock: ManualClock) -> None:
    with FakeThrift() as server:
        pool = pools(server)
        assert get(pool, b"a") == b"a"
        server.cut_all()
        before_ms = clock.monotonic_ms()
        assert get(pool, b"b") == b"b"
        assert clock.monotonic_ms() == before_ms, "a call was repeated"
        assert server.reads == {b"a": 1, b"b": 1}


@pytest.mark.parametrize(("rest_ms", "connections"), [(IDLE_MS - 1, 1), (IDLE_MS, 2)])
def test_connection_idle_for_too_long_is_not_reused(
    pools: Pools, clock: ManualClock, rest_ms: int, connections: int
) -> None:
    with FakeThrift() as server:
        pool = pools(server)
        get(pool, b"a")
        clock.advance(rest_ms)
        get(pool, b"b")
        assert server.connections == connections


@pytest.mark.parametrize(("service", "name"), [("Hbase", "thrift"), ("HbaseAdmin", "thrift2")])
def test_refused_connection_names_server_command_and_setting(pools: Pools, service: Service, name: str) -> None:
    with FakeThrift() as server:
        address = server.address
    message = rf"{address} cannot be reached.*Connection refused.*hbase {name} start.*storage\.hbase\.{name}\."
    with pytest.raises(ConnectionLost, match=message):
        get(pools(address, service=service), b"a")


@pytest.mark.parametrize("length", [0, 1, 3, 17, 30])
def test_truncated_response_is_retried_on_a_new_connection(pools: Pools, length: int) -> None:
    def cut(request: Request) -> None:
        request.send(request.answer()[:length])
        request.cut()

    with FakeThrift(nth(cut, respond)) as server:
        assert get(pools(server), b"whole") == b"whole"
        assert server.reads == {b"whole": 2}


def test_slow_response_times_out_at_the_call_limit(pools: Pools) -> None:
    def send_bytewise(request: Request) -> None:
        for byte in request.answer(row=b"x" * 100_000):
            request.send(bytes([byte]))
            if request.server.unheard.is_set() or request.server.over.wait(0.01):
                return

    with FakeThrift(send_bytewise) as server, pytest.raises(ThriftTimeout):
        get(pools(server, timeout_seconds=SHORT_SECONDS), b"slow")


def test_response_of_a_web_server_hints_at_transport_setting(pools: Pools) -> None:
    def respond_in_http(request: Request) -> None:
        request.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with FakeThrift(respond_in_http) as server, pytest.raises(ConnectionLost, match=r"storage\.hbase\.transport"):
        get(pools(server), b"a")


def test_dead_server_of_two_is_avoided_for_longer_each_time(pools: Pools, clock: ManualClock) -> None:
    with FakeThrift() as gone:
        port = gone.port
    with FakeThrift() as server, ExitStack() as lent:
        pool = pools(f"127.0.0.1:{port}", server, connections=4)

        def open_another() -> None:
            lent.enter_context(pool.connection()).call("getRow", b"table", b"a", {})

        open_another()
        clock.advance(AVOID_MS)
        open_another()
        assert server.connections == 2, "the dead server was tried first, because it had no connections"
        with FakeThrift(port=port) as back:
            clock.advance(AVOID_MS)
            open_another()
            assert (server.connections, back.connections) == (3, 0), "after two failures it is avoided twice as long"
            clock.advance(AVOID_MS)
            open_another()
            assert (server.connections, back.connections) == (3, 1)


def test_calls_after_a_timeout_use_the_other_server(pools: Pools, clock: ManualClock) -> None:
    def lend_four(row: bytes) -> None:
        with ExitStack() as lent:
            for _ in range(4):
                lent.enter_context(pool.connection()).call("getRow", b"table", row, {})

    with FakeThrift(nth(respond, respond, send_nothing)) as hung, FakeThrift() as server:
        pool = pools(hung, server, connections=4)
        lend_four(b"a")
        clock.advance(IDLE_MS)
        pool.timeout_seconds = SHORT_SECONDS
        with pytest.raises(ThriftTimeout):
            get(pool, b"on a connection to the first")
        pool.timeout_seconds = LONG_SECONDS
        lend_four(b"b")
        assert (hung.reads[b"b"], server.reads[b"b"]) == (0, 4)


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt()])
def test_exception_with_a_borrowed_connection_replaces_it(pools: Pools, error: BaseException) -> None:
    with FakeThrift() as server:
        pool = pools(server, connections=1)

        def work(connection: ThriftConnection) -> None:
            connection.call("getRow", b"table", b"a", {})
            raise error

        with pytest.raises(type(error)):
            pool.run(work)
        assert get(pool, b"b") == b"b"
        assert server.connections == 2


def test_failed_connection_rejects_further_calls(pools: Pools) -> None:
    with FakeThrift(Request.cut) as server:
        with pools(server).connection() as connection:
            with pytest.raises(ConnectionLost):
                connection.call("getRow", b"table", b"a", {})
            with pytest.raises(ConnectionLost):
                connection.call("getRow", b"table", b"b", {})
        assert server.reads == {b"a": 1}


def test_wait_for_a_connection_times_out(pools: Pools) -> None:
    with FakeThrift() as server:
        pool = pools(server, connections=1, timeout_seconds=SHORT_SECONDS)
        with pool.connection(), pytest.raises(StoreUnavailable, match=r"All 1 .*storage\.hbase\.connections"):
            get(pool, b"a")
        pool.timeout_seconds = LONG_SECONDS
        assert get(pool, b"b") == b"b"


def test_concurrent_calls_get_their_own_responses(pools: Pools) -> None:
    with FakeThrift() as server, ThreadPoolExecutor(8) as threads:
        pool = pools(server, connections=3)
        rows = [b"%d" % number for number in range(400)]
        assert list(threads.map(lambda row: get(pool, row), rows)) == rows
        assert server.connections <= 3
        assert pool.calls == {"getRow": 400}


def test_connection_returned_to_a_closed_pool_is_closed(pools: Pools) -> None:
    with FakeThrift() as server:
        pool = pools(server)
        with pool.connection() as connection:
            pool.close()
        with pytest.raises(ConnectionLost):
            connection.call("getRow", b"table", b"a", {})


STACK = "\n\tat org.apache.hadoop.hbase.Deep.inside(Deep.java:17)\nCaused by: java.io.IOException: the reason\n\tat x"


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("org.apache.hadoop.hbase.TableNotFoundException: ns:t", StoreNotFound, "TableNotFoundException: ns:t"),
        ("org.apache.hadoop.hbase.NamespaceNotFoundException: ns", StoreNotFound, "tms admin create-tables"),
        ("org.apache.hadoop.hbase.security.AccessDeniedException: no", StoreError, "Grant"),
        ("org.apache.hadoop.hbase.NotServingRegionException: r", StoreUnavailable, "NotServingRegionException: r"),
        ("org.apache.hadoop.hbase.RegionTooBusyException: r", StoreUnavailable, "a later attempt may succeed"),
        (
            "org.apache.hadoop.hbase.client.RetriesExhaustedException: Failed after attempts=16",
            StoreUnavailable,
            "Caused by: java.io.IOException: the reason",
        ),
        ("org.apache.hadoop.hbase.DoNotRetryIOException: never", StoreError, "DoNotRetryIOException: never"),
        ("", StoreError, "could not execute getRow"),
    ],
)
def test_hbase_error_has_its_name_and_no_stack_trace(
    pools: Pools, message: str, kind: type[StoreError], text: str
) -> None:
    def fail(request: Request) -> None:
        request.send(request.failure(io=HBASE.IOError(message=(message + STACK).encode() if message else None)))

    with FakeThrift(fail) as server:
        with pytest.raises(StoreError, match=text) as caught:
            get(pools(server), b"a")
        assert type(caught.value) is kind
        assert "Deep.java" not in str(caught.value)
        assert server.reads == {b"a": 1}, "a call that HBase gave up is not repeated"


def test_lost_scanner_repeats_the_read(pools: Pools) -> None:
    def read(connection: ThriftConnection) -> bytes:
        if not server.reads[b""]:
            connection.call("scannerGetList", 1, 1)
        return get(pool, b"anew")

    with FakeThrift(nth(forget_scanner, respond)) as server:
        pool = pools(server)
        assert pool.run(read) == b"anew"
    with FakeThrift(forget_scanner) as server, pytest.raises(ScannerLost):
        pools(server).call("scannerGetList", 1, 1)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [(1, NotServed, r"storage\.hbase\.thrift2"), (6, StoreError, "Internal error processing getRow")],
)
def test_thrift_error_explains_possible_causes(pools: Pools, kind: int, error: type[StoreError], text: str) -> None:
    def fail(request: Request) -> None:
        request.send(request.unserved(kind, "Internal error processing getRow"))

    with FakeThrift(fail) as server:
        with pytest.raises(StoreError, match=text) as caught:
            get(pools(server), b"a")
        assert type(caught.value) is error
