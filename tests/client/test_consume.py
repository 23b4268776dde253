"""``consume``: all messages in order, once, despite failures, until it is stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from tests.client.faults import ATTEMPTS, Faults, ServerTransport, When, faulty_async_client, faulty_client
from tests.kit.client import ORDERS
from tests.support import PATIENCE_SECONDS, in_event_loop
from tms_core.client import AsyncClient, AsyncConsumption, Client, ConsumerNotFound, Message, Retry, TopicNotFound
from tms_core.client.consume import consuming
from tms_core.client.testing import InProcess
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.app import make_app
from tms_core.server.rest.context import PollLimit
from tms_core.server.rest.context import ServerContext as Server
from tms_core.web.listener import Listener


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server respond at once, so that the client pauses between its polls."""
    monkeypatch.setattr(consuming, "WAIT_SECONDS", 0)


class PauseActions:
    """Actions that run during the pauses of a consumer, one in each pause.

    Attributes:
        pauses: the lengths of the pauses, in seconds.
    """

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.pauses: list[float] = []
        self._actions = list(actions)

    def __call__(self, event: threading.Event, seconds: float) -> None:
        self.pauses.append(seconds)
        self._actions.pop(0)()

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        self(threading.Event(), seconds)


def take(consumption: Iterator[Message], count: int) -> list[bytes]:
    return [next(consumption).payload for _ in range(count)]


def nothing() -> None:
    """Do nothing."""


def test_consume_gives_messages_that_come_while_it_waits(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    actions = PauseActions(nothing, lambda: client.publish(ORDERS, [b"3"]), lambda: client.publish(ORDERS, [b"4"]))
    with server.client(pause=actions) as reader, reader.consume(ORDERS) as messages:
        assert take(messages, 4) == [b"1", b"2", b"3", b"4"]


def test_consume_starts_at_a_message_or_a_time(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    first, second, _ = client.poll(ORDERS)
    assert take(client.consume(ORDERS, start=second.id), 2) == [b"2", b"3"]
    assert take(client.consume(ORDERS, start=first.id, inclusive=False), 2) == [b"2", b"3"]
    assert take(client.consume(ORDERS, start=first.time), 3) == [b"1", b"2", b"3"]
    with client.consume(ORDERS, consumer="billing", start=second.id) as messages:
        assert take(messages, 1) == [b"2"]


def test_consume_pauses_grow_until_a_message_comes(server: InProcess, client: Client) -> None:
    idle = Retry(first_seconds=1, factor=4, longest_seconds=10)
    publish = lambda: client.publish(ORDERS, [b"x"])  # noqa: E731 it is one of several actions
    actions = PauseActions(nothing, nothing, nothing, publish, publish)
    with server.client(pause=actions) as reader, reader.consume(ORDERS, idle=idle) as messages:
        take(messages, 2)
    lowest = [0.5, 2, 5, 5, 0.5]
    assert [low <= pause <= 2 * low for low, pause in zip(lowest, actions.pauses, strict=True)] == [True] * 5


@pytest.mark.parametrize("when", ["before", "after"])
def test_consume_continues_after_a_failed_poll(server: InProcess, client: Client, faults: Faults, when: When) -> None:
    client.publish(ORDERS, [b"1"])
    actions = PauseActions(nothing, nothing, faults.heal, lambda: client.publish(ORDERS, [b"2"]))
    with faulty_client(server, faults, pause=actions) as reader, reader.consume(ORDERS) as messages:
        assert take(messages, 1) == [b"1"]
        faults.at("poll", when)
        assert take(messages, 1) == [b"2"]
    assert len(actions.pauses) == 4


class TruncatingTransport(ServerTransport):
    """A transport that truncates each response to a poll, a little later each time."""

    polls = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = super().handle_request(request)
        if not request.url.path.endswith("/poll"):
            return answer
        self.polls += 1
        body = answer.read()
        return httpx2.Response(200, stream=_TruncatedBody(body[: self.polls * 30]))


class _TruncatedBody(httpx2.SyncByteStream):
    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body
        raise httpx2.ReadError("cut")


def test_consume_of_truncated_responses_gives_each_message_once(server: InProcess, client: Client) -> None:
    sent = [b"message %d" % number for number in range(100)]
    client.publish(ORDERS, sent)
    cut = TruncatingTransport(server)
    with server.client(transport=cut, pause=lambda *_: None) as reader:
        assert take(reader.consume(ORDERS), 100) == sent
    assert cut.polls > 2


def test_consume_of_a_missing_topic_fails_at_once(client: Client) -> None:
    with pytest.raises(TopicNotFound):
        next(client.consume("default:missing"))
    with pytest.raises(TopicNotFound):
        next(client.consume("default:missing", consumer="billing"))


# --- end of a loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_closing", [False, True])
def test_consume_that_waits_is_ended_by_another_thread(server: InProcess, by_closing: bool) -> None:
    waiting = threading.Event()

    def pause(event: threading.Event, _: float) -> None:
        waiting.set()
        assert event.wait(PATIENCE_SECONDS)

    client = server.client(pause=pause)
    consumption = client.consume(ORDERS)
    found: list[Message] = []
    thread = threading.Thread(target=lambda: found.extend(consumption))
    thread.start()
    assert waiting.wait(PATIENCE_SECONDS)
    if by_closing:
        client.close()
    else:
        consumption.stop()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert found == []
    client.close()


# --- positions -------------------------------------------------------------------------------------------------------


def test_consume_by_name_continues_after_its_position(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    with client.consume(ORDERS, consumer="billing") as messages:
        assert take(messages, 2) == [b"1", b"2"]
    # The consumer has processed 1, because it asked for 2. Whether it has processed 2 is unknown.
    first, second, third = client.poll(ORDERS)
    assert client.position(ORDERS, "billing") == first.id
    with client.consume(ORDERS, consumer="billing", start=third.id) as messages:
        assert take(messages, 1) == [b"2"]
        messages.commit()
        assert client.position(ORDERS, "billing") == second.id
        assert take(messages, 1) == [b"3"]
        messages.stop()
        assert list(messages) == []
    assert client.position(ORDERS, "billing") == third.id


def test_consume_stores_the_position_before_the_next_batch(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    stored: list[bool] = []

    def look() -> None:
        stored.append(client.position(ORDERS, "billing") == list(client.poll(ORDERS))[-1].id)
        client.publish(ORDERS, [b"3"])

    with server.client(pause=PauseActions(look)) as reader, reader.consume(ORDERS, consumer="billing") as messages:
        assert take(messages, 3) == [b"1", b"2", b"3"]
    assert stored == [True]


def test_position_is_stored_once(server: InProcess, client: Client, faults: Faults) -> None:
    client.publish(ORDERS, [b"1"])
    with faulty_client(server, faults) as reader, reader.consume(ORDERS, consumer="billing") as messages:
        take(messages, 1)
        messages.commit()
        messages.commit()
    assert faults.seen["PUT billing"] == 1


def test_position_that_cannot_be_stored_is_stored_later(server: InProcess, client: Client, faults: Faults) -> None:
    client.publish(ORDERS, [b"1"])
    faults.at("PUT billing", "before", times=ATTEMPTS)
    actions = PauseActions(nothing, nothing, lambda: client.publish(ORDERS, [b"2"]))
    reader = faulty_client(server, faults, pause=actions)
    with reader as faulty, faulty.consume(ORDERS, consumer="billing") as messages:
        assert take(messages, 2) == [b"1", b"2"]
        messages.stop()
        assert list(messages) == []
    assert client.position(ORDERS, "billing") == list(client.poll(ORDERS))[-1].id


def test_consume_of_a_closed_client_ends_and_logs_the_position(
    server: InProcess, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    reader = server.client()
    found = []
    with reader.consume(ORDERS, consumer="billing") as messages:
        for message in messages:
            found.append(message.payload)
            reader.close()
    assert found == [b"1"]
    assert "billing in default:orders" in caplog.text
    with pytest.raises(ConsumerNotFound):
        client.position(ORDERS, "billing")


# --- committed messages only -----------------------------------------------------------------------------------------


def test_consume_of_committed_messages_keeps_their_order(server: InProcess, client: Client) -> None:
    given_up, open_one = server.manager.start_short(), client.transaction()
    client.publish(ORDERS, [b"given up"], transaction=given_up)
    server.manager.invalidate(given_up.transaction_id)
    open_one.__enter__()
    client.publish(ORDERS, [b"open"], transaction=open_one.transaction)
    client.publish(ORDERS, [b"plain"])
    actions = PauseActions(nothing, lambda: open_one.__exit__(None, None, None))
    with server.client(pause=actions) as reader, reader.consume(ORDERS, read="committed") as messages:
        assert take(messages, 2) == [b"open", b"plain"]


def test_consume_continues_when_the_service_is_back(server: InProcess, client: Client, faults: Faults) -> None:
    client.publish(ORDERS, [b"1"])
    faults.at("start", "before")
    actions = PauseActions(nothing, faults.heal)
    with faulty_client(server, faults, pause=actions) as reader, reader.consume(ORDERS, read="committed") as messages:
        assert take(messages, 1) == [b"1"]
    assert len(server.manager.visibility().in_progress) == 0


# --- asyncio ---------------------------------------------------------------------------------------------------------


async def take_async(consumption: AsyncConsumption, count: int) -> list[bytes]:
    return [(await anext(consumption)).payload for _ in range(count)]


@in_event_loop
async def test_async_consume_waits_and_keeps_its_position(server: InProcess, client: Client, faults: Faults) -> None:
    client.publish(ORDERS, [b"1"])
    publish = lambda: client.publish(ORDERS, [b"2"])  # noqa: E731 it is one of several actions
    actions = PauseActions(nothing, publish, faults.heal)

    async def last_message(reader: AsyncClient) -> Message:
        return [message async for message in reader.poll(ORDERS)][-1]

    async with faulty_async_client(server, faults, pause=actions.wait) as reader:
        async with reader.consume(ORDERS, consumer="billing", read="committed") as messages:
            assert await take_async(messages, 1) == [b"1"]
            faults.at("poll", "before")
            actions.pauses.clear()
            assert await take_async(messages, 1) == [b"2"]
            await messages.commit()
        assert await reader.position(ORDERS, "billing") == (await last_message(reader)).id
        assert isinstance(messages, AsyncConsumption)
        assert [message async for message in messages] == []


@pytest.mark.parametrize("by_closing", [False, True])
@in_event_loop
async def test_async_consume_that_waits_is_ended_by_another_task(server: InProcess, by_closing: bool) -> None:
    waiting = asyncio.Event()

    async def pause(event: asyncio.Event, _: float) -> None:
        waiting.set()
        await event.wait()

    async with server.async_client(pause=pause) as client:
        consumption = client.consume(ORDERS)
        task = asyncio.ensure_future(anext(consumption, None))
        await waiting.wait()
        if by_closing:
            await client.close()
        else:
            consumption.stop()
        assert await asyncio.wait_for(task, PATIENCE_SECONDS) is None


# --- waiting at the server -------------------------------------------------------------------------------------------


class PollRecorder(ServerTransport):
    """A transport that records polls.

    Attributes:
        polls: the body and the headers of each poll.
    """

    def __init__(self, server: InProcess) -> None:
        super().__init__(server)
        self.polls: list[tuple[bytes, httpx2.Headers]] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/poll"):
            self.polls.append((request.read(), request.headers))
        return super().handle_request(request)


@pytest.mark.parametrize(("wait_seconds", "after_seconds", "polls"), [(60, 0.05, 1), (1, 1.5, 2)])
def test_consume_that_waits_at_the_server_needs_no_pause(
    server: InProcess, client: Client, wait_seconds: int, after_seconds: float, polls: int
) -> None:
    transport, actions = PollRecorder(server), PauseActions()
    waiting = server.client(transport=transport, pause=actions)
    with waiting as reader, reader.consume(ORDERS, wait_seconds=wait_seconds) as messages:
        publishing = threading.Timer(after_seconds, client.publish, (ORDERS, [b"1"]))
        publishing.start()
        assert take(messages, 1) == [b"1"]
        publishing.join()
    assert (actions.pauses, len(transport.polls) >= polls) == ([], True)
    assert transport.polls[0][1]["x-tms-wait-seconds"] == str(wait_seconds)


def test_consume_does_not_look_at_hidden_messages_again(server: InProcess, client: Client) -> None:
    with server.transactions() as service:
        invalid = service.start_short()
        client.publish(ORDERS, [b"invalid"] * 10, transaction=invalid)
        service.invalidate(invalid.transaction_id)
    last = list(client.poll(ORDERS))[-1].id
    transport, actions = PollRecorder(server), PauseActions(nothing, lambda: client.publish(ORDERS, [b"1"]))
    with (
        server.client(transport=transport, pause=actions) as reader,
        reader.consume(ORDERS, read="committed") as messages,
    ):
        assert take(messages, 1) == [b"1"]
    starts = [body[2:12] for body, _ in transport.polls]
    assert len(starts) == 3
    next_position = (int.from_bytes(last.pack()[:10], "big") + 1).to_bytes(10, "big")
    assert starts[1:] == [next_position, next_position]


def test_poll_that_the_server_cuts_reads_on_to_its_limit(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(10)])
    metrics = ServerMetrics(CollectorRegistry(), server.service)
    with ThreadPoolExecutor(2) as threads:
        app = make_app(Server(server.service, threads, metrics, 1_000_000, poll_limit=PollLimit(messages=3)))
        listener = Listener(app, "127.0.0.1", 0)
        listener.start()
        with server.client(url=listener.url) as cut:
            assert len(list(cut.poll(ORDERS))) == 10
            assert [message.payload for message in cut.poll(ORDERS, limit=5)] == [b"0", b"1", b"2", b"3", b"4"]
            with cut.consume(ORDERS) as messages:
                assert take(messages, 10) == [b"%d" % number for number in range(10)]
        listener.stop()
