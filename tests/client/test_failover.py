"""Failover of a client between servers: waits, selection of servers, and errors."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.client.faults import ServerTransport
from tests.kit.client import BILLS, ORDERS, payloads
from tests.support import free_port, in_event_loop
from tms_core.client import (
    AsyncClient,
    Attempt,
    BadRequest,
    Buffer,
    BufferFull,
    Client,
    ConfigurationError,
    NotPublished,
    PublishFigures,
    Retry,
    TmsError,
    TopicNotFound,
    Unanswered,
    Unavailable,
    WhenFull,
)
from tms_core.client.protocol.calls import retry_after_seconds
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock, SystemClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc.service import TransactionService

FIRST, SECOND, THIRD = (f"http://server-{number}:11015" for number in (1, 2, 3))
Fates = list[tuple[bytes, TmsError | None]]


class Network:
    """Simulated time, which advances in the pauses of a client, and servers with outages.

    Attributes:
        seconds: the time.
        pauses: the lengths of the pauses.
        requested: the names of the requested servers, in order.
        away: returns whether a server is unreachable at a time.
        refuses: returns the response of a server instead of its own; None: its own.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []
        self.requested: list[str] = []
        self.away: Callable[[str, float], bool] = lambda _, __: False
        self.refuses: Callable[[str], httpx2.Response | None] = lambda _: None

    def monotonic(self) -> float:
        return self.seconds

    def pause(self, event: threading.Event, seconds: float) -> None:
        if not event.is_set():
            self.pauses.append(seconds)
            self.seconds += seconds

    async def async_pause(self, event: asyncio.Event, seconds: float) -> None:
        if not event.is_set():
            self.pauses.append(seconds)
            self.seconds += seconds

    def handle(self, request: httpx2.Request) -> httpx2.Response | None:
        host = request.url.host
        self.requested.append(host)
        if self.away(host, self.seconds):
            raise httpx2.ConnectError("nobody listens")
        return self.refuses(host)


class NetworkTransport(ServerTransport):
    """A transport to one server, which has all names and the outages of a network."""

    def __init__(self, network: Network, server: InProcess) -> None:
        super().__init__(server)
        self._network = network

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return self._network.handle(request) or super().handle_request(_here(request))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return self._network.handle(request) or await super().handle_async_request(_here(request))


def _here(request: httpx2.Request) -> httpx2.Request:
    request.headers["host"] = "localhost"
    return request


@pytest.fixture
def network() -> Network:
    return Network()


def client_of(server: InProcess, network: Network, **options: Any) -> Client:
    transport = NetworkTransport(network, server)
    return server.client(**{"transport": transport, "monotonic": network.monotonic, "pause": network.pause, **options})


# --- long outages and delivery reports -------------------------------------------------------------------------------


@pytest.mark.parametrize("away_seconds", [1, 59, 119.9])
def test_publish_async_outlives_a_server_away_for_two_minutes(
    server: InProcess, client: Client, network: Network, away_seconds: float
) -> None:
    network.away = lambda _, now: now < away_seconds
    sent = [b"%d" % number for number in range(2500)]
    with client_of(server, network) as producer:
        producer.publish_async(ORDERS, sent)
        producer.flush()
        assert producer.publish_figures.published == 2500
    assert payloads(client) == sent
    assert max(network.pauses) <= 5, "the client retries during the whole outage"


def test_publish_async_reports_lost_messages_after_the_delivery_time(server: InProcess, network: Network) -> None:
    network.away = lambda _, __: True
    fates: Fates = []
    producer = client_of(server, network, buffer=Buffer(delivery_seconds=30))
    producer.publish_async(ORDERS, [b"1", b"2"], on_delivery=lambda *fate: fates.append(fate))
    with pytest.raises(NotPublished, match=r"^2 "):
        producer.flush()
    producer.close()
    assert network.seconds == pytest.approx(30, abs=0.1)
    assert [(payload, type(error)) for payload, error in fates] == [(b"1", Unavailable), (b"2", Unavailable)]


def test_flush_reports_the_fate_of_each_message(server: InProcess, network: Network) -> None:
    fates: Fates = []
    with client_of(server, network) as producer:
        producer.publish_async(ORDERS, [b"1", b"2"], on_delivery=lambda *fate: fates.append(fate))
        producer.publish_async("default:none", [b"3"], on_delivery=lambda *fate: fates.append(fate))
        producer.publish_async(BILLS, [b"4"])
        with pytest.raises(NotPublished):
            producer.flush()
        found = {payload: type(error) for payload, error in fates}
    assert found == {b"1": type(None), b"2": type(None), b"3": TopicNotFound}
    assert len(fates) == 3
    assert network.seconds < 1, "the client does not retry for a missing topic"


@pytest.mark.parametrize(("when_full", "lost"), [(WhenFull.DROP_NEWEST, b"3"), (WhenFull.DROP_OLDEST, b"2")])
def test_dropped_message_is_reported_to_on_delivery(
    server: InProcess, network: Network, when_full: WhenFull, lost: bytes
) -> None:
    under_way, go_on = threading.Event(), threading.Event()

    def hold_step(_: str) -> None:
        under_way.set()
        assert go_on.wait(60)

    network.refuses = hold_step
    fates: Fates = []
    with client_of(server, network, buffer=Buffer(messages=1, when_full=when_full)) as producer:
        for payload in (b"1", b"2", b"3"):
            producer.publish_async(ORDERS, [payload], on_delivery=lambda *fate: fates.append(fate))
            assert under_way.wait(60)
        assert [(payload, type(error)) for payload, error in fates] == [(lost, BufferFull)]
        go_on.set()
    assert [payload for payload, error in fates if error is None] == [
        payload for payload in (b"1", b"2", b"3") if payload != lost
    ]


def test_failing_on_delivery_is_logged_and_others_are_published(
    server: InProcess, client: Client, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    def on_delivery(payload: bytes, _: TmsError | None) -> None:
        raise ValueError(payload)

    with client_of(server, network) as producer:
        producer.publish_async(ORDERS, [b"1"], on_delivery=on_delivery)
        producer.publish_async(ORDERS, [b"2"])
        producer.flush()
        assert producer.publish_figures == PublishFigures(published=2)
    assert payloads(client) == [b"1", b"2"]
    assert "on_delivery" in caplog.text


def test_on_delivery_may_publish_but_not_wait(server: InProcess, client: Client, network: Network) -> None:
    refused: list[TmsError] = []
    with client_of(server, network, buffer=Buffer(messages=2)) as producer:

        def on_delivery(payload: bytes, _: TmsError | None) -> None:
            producer.publish_async(BILLS, [b"of " + payload])
            try:
                producer.publish_async(BILLS, [b"x", b"y", b"z"])
            except BufferFull as error:
                refused.append(error)

        producer.publish_async(ORDERS, [b"1"], on_delivery=on_delivery)
        producer.flush()
    assert len(refused) == 1
    assert payloads(client, BILLS) == [b"of 1", b"x"]


def test_publish_async_with_a_ttl_keeps_the_other_messages(
    server: InProcess, client: Client, network: Network, clock: ManualClock
) -> None:
    with client_of(server, network) as producer:
        for payload, ttl in ((b"1", None), (b"2", 60), (b"3", None)):
            producer.publish_async(ORDERS, [payload], ttl=ttl)
    assert payloads(client) == [b"1", b"2", b"3"]
    clock.advance(60_001)
    assert payloads(client) == [b"1", b"3"]


# --- choice of the server --------------------------------------------------------------------------------------------


def test_no_request_comes_before_retry_after(server: InProcess, network: Network) -> None:
    network.refuses = lambda _: (
        httpx2.Response(503, headers={"retry-after": "7"}, text="No server leads.") if network.seconds < 10 else None
    )
    with client_of(server, network) as client:
        client.publish(ORDERS, [b"1"])
        assert network.pauses == [7, 7]
        network.seconds = 0
        client.publish_async(ORDERS, [b"2"])
        client.flush()
        assert [pause for pause in network.pauses[2:] if pause >= 1] == [7, 7]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "0"}, 0),
        ({"retry-after": " 120 "}, 120),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "1.5"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT", "date": "Wed, 21 Oct 2026 07:27:10 GMT"}, 50),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT", "date": "Wed, 21 Oct 2026 08:00:00 GMT"}, 0),
    ],
)
def test_retry_after_header_is_read_in_seconds(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers) == seconds


def test_client_of_several_servers_stays_at_a_working_server(
    server: InProcess, client: Client, network: Network
) -> None:
    network.away = lambda host, _: host == "server-1"
    network.refuses = lambda host: httpx2.Response(503, text="It does not lead.") if host == "server-2" else None
    with client_of(server, network, url=[FIRST, SECOND, THIRD]) as several:
        several.publish(ORDERS, [b"1"])
        assert network.requested == ["server-1", "server-2", "server-3"]
        several.publish(ORDERS, [b"2"])
        assert list(several.poll(ORDERS))
        assert network.requested[3:] == ["server-3", "server-3"]
        network.away = lambda host, _: host == "server-3"
        network.refuses = lambda _: None
        several.publish(ORDERS, [b"3"])
        assert network.requested[5:] == ["server-3", "server-1"]
        assert repr(several) == f"<Client {FIRST}, {SECOND}, {THIRD}>"
    assert payloads(client) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("url", [[], [FIRST, "nowhere"], [FIRST, 5]])
def test_client_with_an_invalid_url_is_rejected(url: Any) -> None:
    with pytest.raises(ConfigurationError):
        Client(url)


# --- timeouts --------------------------------------------------------------------------------------------------------


def test_within_ends_a_call_in_time_and_not_others(server: InProcess, network: Network) -> None:
    network.away = lambda _, __: True
    retry = Retry(attempts=None, first_seconds=1, longest_seconds=1)
    with client_of(server, network, retry=retry) as client:
        with pytest.raises(Unavailable):
            client.within(10).publish(ORDERS, [b"1"])
        assert 8 < network.seconds < 10
        with pytest.raises(Unavailable):
            client.within(3).topic(ORDERS)
        assert 10 < network.seconds < 13
        with pytest.raises(Unavailable):
            next(client.within(3).poll(ORDERS))
        for seconds in (0, -1, float("nan")):
            with pytest.raises(ConfigurationError, match="is not possible"):
                client.within(seconds)


class HangingTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        timeouts = request.extensions["timeout"]
        raise httpx2.ReadTimeout(f"nothing came within {timeouts['read']}")

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.Event().wait()
        raise AssertionError("no test sets it")


@in_event_loop
async def test_unanswered_call_waits_no_longer_than_its_limit(server: InProcess, network: Network) -> None:
    with client_of(server, network, transport=HangingTransport()) as client, pytest.raises(Unanswered) as caught:
        client.within(2.5).publish(ORDERS, [b"1"])
    assert "within 2.5" in str(caught.value.__cause__)
    async with server.async_client(transport=HangingTransport()) as client:
        with pytest.raises(Unanswered, match="in time"):
            await client.within(0.01).publish(ORDERS, [b"1"])


def test_call_with_a_slow_response_ends_at_its_limit(server: InProcess) -> None:
    def send_slowly() -> Iterator[bytes]:
        while True:
            yield b"0"

    class SlowTransport(httpx2.BaseTransport):
        def handle_request(self, _: httpx2.Request) -> httpx2.Response:
            return httpx2.Response(200, content=send_slowly())

    with server.client(transport=SlowTransport()) as client, pytest.raises(Unanswered, match="in time"):
        client.within(0.01).topic(ORDERS)


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_hook_surrounds_each_request_and_adds_headers(server: InProcess, network: Network) -> None:
    happened: list[object] = []
    sent: list[httpx2.Headers] = []

    @contextmanager
    def hook(attempt: Attempt) -> Iterator[None]:
        attempt.headers |= {"traceparent": "00-1-2-01", "Authorization": "Bearer stolen"}
        try:
            yield
        except TmsError as error:
            happened.append(type(error))
            raise
        finally:
            happened.append((attempt.method, attempt.url.rpartition("/")[2], attempt.status))

    class RecordingTransport(NetworkTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            sent.append(request.headers)
            return super().handle_request(request)

    network.refuses = lambda _: httpx2.Response(503, text="Later.") if len(network.requested) == 1 else None
    with client_of(
        server, network, transport=RecordingTransport(network, server), hook=hook, token=lambda: "mine"
    ) as client:
        client.publish(ORDERS, [b"1"])
        assert list(client.poll(ORDERS))
        with pytest.raises(TopicNotFound):
            client.topic("default:none")
    assert happened == [
        Unavailable,
        ("POST", "publish", 503),
        ("POST", "publish", 200),
        ("POST", "poll", 200),
        TopicNotFound,
        ("GET", "none", 404),
    ]
    assert {headers["traceparent"] for headers in sent} == {"00-1-2-01"}
    assert {headers["authorization"] for headers in sent} == {"Bearer mine"}


@in_event_loop
async def test_hook_of_an_async_client_sees_each_status(server: InProcess) -> None:
    seen: list[int | None] = []

    @contextmanager
    def hook(attempt: Attempt) -> Iterator[None]:
        yield
        seen.append(attempt.status)

    async with server.async_client(hook=hook) as client:
        await client.publish(ORDERS, [b"1"])
        assert [message.payload async for message in client.poll(ORDERS)] == [b"1"]
    assert seen == [200, 200]


@pytest.mark.parametrize("header", [{"x-trace": " 1"}, {"x-trace": "a\nb"}, {"x trace": "1"}, {"x-trace": "\xe9"}])
def test_request_with_a_bad_header_is_rejected_and_not_repeated(server: InProcess, header: dict[str, str]) -> None:
    tried: list[Attempt] = []

    @contextmanager
    def hook(attempt: Attempt) -> Iterator[None]:
        tried.append(attempt)
        attempt.headers |= header
        yield

    async def ask() -> None:
        async with server.async_client(hook=hook) as looping:
            await looping.topics()

    with server.client(hook=hook) as client, pytest.raises(BadRequest, match=r"GET /v1/\S+"):
        client.topics()
    with pytest.raises(BadRequest, match=r"GET /v1/\S+"):
        asyncio.run(ask())
    assert len(tried) == 2


def test_client_of_several_transaction_services_uses_a_working_service() -> None:
    with TransactionManager(MemoryStorage(), SystemClock()) as manager:
        service = TransactionService(manager, "127.0.0.1:0")
        service.start()
        try:
            transactions = [f"127.0.0.1:{free_port()}", service.address]
            with Client("http://127.0.0.1:1", transactions=transactions) as client, client.transaction():
                assert len(manager.visibility().in_progress) == 1

            async def begin() -> None:
                client = AsyncClient("http://127.0.0.1:1", transactions=transactions)
                async with client, client.transaction():
                    assert len(manager.visibility().in_progress) == 1

            asyncio.run(begin())
            assert not manager.visibility().in_progress
        finally:
            service.stop()
    for wrong in (["127.0.0.1:1", "nowhere"], list[str]()):
        with pytest.raises(ConfigurationError, match=re.escape(repr(wrong))):
            Client("http://127.0.0.1:1", transactions=wrong)
