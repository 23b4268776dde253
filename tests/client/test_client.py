"""The methods of both clients, against a server in this process."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import httpx2
import pytest

from tests.builders import NOW_MS
from tests.client.faults import ATTEMPTS, Faults, faulty_client
from tests.support import each_raises, in_event_loop
from tms_core.client import (
    AsyncClient,
    BadRequest,
    Client,
    ClientClosed,
    ConsumerPosition,
    Limits,
    Message,
    MessageId,
    ServerFailed,
    Timeouts,
    TopicId,
    TopicNotFound,
    Unanswered,
    Unavailable,
)
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock
from tms_core.messaging.model import FetchedMessage as Row
from tms_core.server.codec.avro import AvroCodec

TOPIC = "default:orders"


def payloads(messages: Iterator[Message]) -> list[bytes]:
    return [message.payload for message in messages]


# --- topics ----------------------------------------------------------------------------------------------------------


def test_topics_are_listed_by_namespace(client: Client) -> None:
    client.create_topic("shop:carts")
    assert client.topics("shop") == [TopicId("shop", "carts")]
    assert client.topics() == [TopicId("default", "bills"), TopicId("default", "orders")]
    assert client.topics(None) == [TopicId("default", "bills"), TopicId("default", "orders"), TopicId("shop", "carts")]


def test_ping_of_a_server_that_answers_returns(client: Client) -> None:
    client.within(60).ping()


@pytest.mark.parametrize("name", ["orders", "a:b:c", "a b:c", ""])
def test_wrong_name_of_a_topic_is_rejected_with_its_form(client: Client, name: str) -> None:
    with pytest.raises(BadRequest, match="namespace:topic"):
        client.topic(name)


# --- messages --------------------------------------------------------------------------------------------------------


def test_poll_starts_at_a_message_or_a_time(client: Client, clock: ManualClock) -> None:
    client.publish(TOPIC, [b"1"])
    clock.advance(1)
    client.publish(TOPIC, [b"2"])
    first, second = client.poll(TOPIC)
    for at, after in ((second.id, first.id), (second.time, first.time)):
        assert payloads(client.poll(TOPIC, start=at)) == [b"2"]
        assert payloads(client.poll(TOPIC, start=after, inclusive=False)) == [b"2"]


def test_poll_of_many_messages_streams_the_response(server: InProcess) -> None:
    sent = 0

    class EndlessBody(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            nonlocal sent
            page = [Row(MessageId(NOW_MS, number).pack(), bytes(1000)) for number in range(58)]
            [block] = AvroCodec().write_messages([page])
            while True:
                sent += 1
                # The block without the end of the array.
                yield block[:-1]

    class Transport(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            return httpx2.Response(200, stream=EndlessBody())

    with server.client(transport=Transport()) as client, client.poll(TOPIC) as messages:
        assert len([next(messages) for _ in range(601)]) == 601
        assert sent == 11


def test_closed_poll_returns_no_more_messages(client: Client) -> None:
    client.publish(TOPIC, [b"a", b"b"])
    with client.poll(TOPIC) as messages:
        next(messages)
        messages.close()
        assert list(messages) == []
    unused = client.poll(TOPIC)
    unused.close()
    assert list(unused) == []


def test_poll_of_a_truncated_answer_is_unanswered(server: InProcess) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=b"\x04\x28" + bytes(20) + b"\x04hi"))
    with server.client(transport=transport) as client:
        messages = client.poll(TOPIC)
        assert next(messages).payload == b"hi"
        with pytest.raises(Unanswered, match="truncated"):
            next(messages)


# --- positions -------------------------------------------------------------------------------------------------------


def test_position_of_a_consumer_is_shown_and_deleted(client: Client) -> None:
    client.publish(TOPIC, [b"a", b"b"])
    first, _ = client.poll(TOPIC)
    client.set_position(TOPIC, "billing", first.id)
    assert client.positions(TOPIC) == [ConsumerPosition("billing", first.id, 1, False, 0, first.time, False)]
    client.delete_position(TOPIC, "billing")
    assert client.positions(TOPIC) == []


@pytest.mark.parametrize("name", ["a/b", "?", "x" * 256, ""])
def test_name_that_cannot_be_a_consumer_is_rejected(client: Client, name: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(repr(name))):
        client.set_position(TOPIC, name, MessageId(0, 0))


# --- repeated requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_publish_without_a_response_is_not_retried(server: InProcess, faults: Faults, when: str) -> None:
    faults.at("publish", "before" if when == "before" else "after", times=1)
    with faulty_client(server, faults) as client:
        with pytest.raises(Unanswered, match="publish"):
            client.publish(TOPIC, [b"x"])
        assert faults.seen["publish"] == 1
        assert payloads(client.poll(TOPIC)) == ([b"x"] if when == "after" else [])


def test_poll_without_a_response_is_retried(server: InProcess, faults: Faults, client: Client) -> None:
    client.publish(TOPIC, [b"x"])
    faults.at("poll", "after", times=2)
    with faulty_client(server, faults) as faulty:
        assert payloads(faulty.poll(TOPIC)) == [b"x"]
        faults.at("poll", "after")
        with pytest.raises(Unanswered):
            next(faulty.poll(TOPIC))
        assert faults.seen["poll"] == 3 + ATTEMPTS


def test_publish_to_a_stopping_server_is_retried(server: InProcess) -> None:
    answers = iter([503, 503, 200])

    def handle(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(next(answers), content=b"The server is stopping.")

    with server.client(transport=httpx2.MockTransport(handle), pause=lambda *_: None) as client:
        client.publish(TOPIC, [b"x"])
        assert list(answers) == []


def test_retries_pause_longer_each_time_and_never_after_the_last(server: InProcess) -> None:
    waited: list[float] = []
    transport = httpx2.MockTransport(lambda _: httpx2.Response(503, content=b"The server is stopping."))
    client = server.client(transport=transport, pause=lambda _, seconds: waited.append(seconds))
    with client, pytest.raises(Unavailable, match="stopping"):
        client.topics()
    assert len(waited) == 3
    assert waited == sorted(waited)
    assert 0.05 <= waited[0] <= 0.1


@pytest.mark.parametrize(("status", "error"), [(302, BadRequest), (405, BadRequest), (502, ServerFailed)])
@pytest.mark.parametrize("content", [b"This is why.", b""])
def test_status_of_a_proxy_is_an_error_with_status_and_body(
    server: InProcess, status: int, error: type[Exception], content: bytes
) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, content=content))
    with server.client(transport=transport) as client, pytest.raises(error, match=rf"{status}.* {content.decode()}"):
        client.publish(TOPIC, [b"x"])


@pytest.mark.parametrize("body", [b"<html>", b"[{}]", b'{"a": 1}', b"null"])
def test_foreign_response_is_a_clear_error(server: InProcess, body: bytes) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=body))
    with server.client(transport=transport, pause=lambda *_: None) as client:
        each_raises(
            Unanswered,
            client.topics,
            lambda: client.topic(TOPIC),
            lambda: client.position(TOPIC, "x"),
            match="cannot be read",
        )
        with pytest.raises(Unanswered):
            list(client.poll(TOPIC))


def test_bad_arguments_are_rejected_before_anything_is_sent(server: InProcess, faults: Faults) -> None:
    wrong: Any = "x"
    missing: Any = None
    with faulty_client(server, faults) as client:
        each_raises(
            BadRequest,
            lambda: list(client.poll(TOPIC, start=wrong)),
            lambda: client.poll(TOPIC, limit=wrong),
            lambda: client.publish(TOPIC, [b"x"], ttl=wrong),
            lambda: client.create_topic("default:new", ttl=wrong),
            lambda: client.topic(missing),
            lambda: client.topic("orders"),
            lambda: client.poll(TOPIC, start=datetime(2026, 1, 1)),  # noqa: DTZ001 that is the point
            lambda: client.position(TOPIC, missing),
            lambda: client.store(TOPIC, wrong, transaction=server.manager.start_short()),
        )
    assert faults.seen == {}


# --- the client itself -----------------------------------------------------------------------------------------------


def test_call_of_a_closed_client_is_rejected(server: InProcess) -> None:
    with server.client() as client:
        pass
    client.close()
    each_raises(
        ClientClosed,
        client.topics,
        lambda: list(client.poll(TOPIC)),
        lambda: client.consume(TOPIC),
        lambda: client.publish_async(TOPIC, [b"x"]),
    )


def test_repr_shows_the_url_of_the_server(client: Client, server: InProcess) -> None:
    assert repr(client) == f"<Client {server.url}>"
    assert repr(server.async_client(url="http://localhost/tms/")) == "<AsyncClient http://localhost/tms>"


def test_client_shared_by_threads_returns_each_its_own_responses(server: InProcess) -> None:
    limits = Limits(connections=3)
    with server.client(limits=limits) as client, ThreadPoolExecutor(8) as threads:

        def work(number: int) -> tuple[list[bytes], list[bytes]]:
            topic, mine = f"t{number}:x", [b"%d/%d" % (number, at) for at in range(20)]
            client.create_topic(topic)
            for payload in mine[:10]:
                client.publish(topic, [payload])
            with client.transaction() as tx:
                tx.publish(topic, mine[10:])
            return payloads(client.poll(topic)), mine

        for found, expected in threads.map(work, range(16)):
            assert found == expected


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        members = {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}
        return {
            name: [f"{given}" for given in inspect.signature(member).parameters.values()] if callable(member) else []
            for name, member in members.items()
        }

    assert surface(Client) == surface(AsyncClient)
    plain, other = (list(inspect.signature(kind).parameters) for kind in (Client, AsyncClient))
    assert plain == other


@in_event_loop
async def test_every_method_of_the_async_client_works(server: InProcess) -> None:
    async with server.async_client(timeouts=Timeouts(answer_seconds=60)) as client:
        await client.create_topic("shop:carts", ttl=3600)
        await client.update_topic("shop:carts", ttl=60)
        assert (await client.topic("shop:carts")).ttl_seconds == 60
        assert await client.topics("shop") == [TopicId("shop", "carts")]
        await client.publish("shop:carts", [b"a", b"b"])
        await client.publish("shop:carts", [b"c"], ttl=10)
        found = [message async for message in client.poll("shop:carts")]
        assert payloads(iter(found)) == [b"a", b"b", b"c"]
        async with client.poll("shop:carts", start=found[1].id, inclusive=False) as messages:
            assert payloads(iter([message async for message in messages])) == [b"c"]
            assert [message async for message in messages] == []
        async with client.transaction() as tx:
            await client.store("shop:carts", [b"d"], transaction=tx.transaction)
            published = await client.publish("shop:carts", [], transaction=tx.transaction)
            await client.rollback("shop:carts", published)
        await client.set_position("shop:carts", "x", found[0].id)
        assert await client.position("shop:carts", "x") == found[0].id
        assert [position.name for position in await client.positions("shop:carts")] == ["x"]
        await client.delete_position("shop:carts", "x")
        await client.delete_topic("shop:carts")
        with pytest.raises(TopicNotFound):
            await client.publish("shop:carts", [b"x"])
        with pytest.raises(TopicNotFound):
            await anext(client.poll("shop:carts"))
    with pytest.raises(ClientClosed):
        await client.topics()
    with pytest.raises(ClientClosed):
        client.consume("shop:carts")


def test_async_client_in_another_event_loop_is_rejected(server: InProcess) -> None:
    client = server.async_client()

    async def publish() -> None:
        await client.publish_async(TOPIC, [b"x"])
        await client.flush()

    async def poll() -> list[Message]:
        return [message async for message in client.poll(TOPIC)]

    async def transact() -> None:
        async with client.transaction():
            pass

    with asyncio.Runner() as home:
        home.run(publish())
        for use in (publish, client.flush, poll, transact, client.close):
            with pytest.raises(BadRequest, match="event loop"):
                asyncio.run(use())
        assert len(home.run(poll())) == 1
        home.run(client.close())
