"""The server of tests, ``in_process``: it is complete, and leaves no files or threads."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.client.faults import SOON
from tests.kit.client import BILLS, ORDERS, visible
from tests.support import in_event_loop, raising
from tms_core.client import Client, TopicNotFound, Unanswered, Unavailable
from tms_core.client.testing import InProcess, in_process
from tms_core.errors import StoreError
from tms_core.messaging.fetcher import Fetch
from tms_core.messaging.model import FetchedMessage as Stored
from tms_core.tables.memory import MemoryStore


def test_in_process_server_leaves_no_thread_and_no_port() -> None:
    before = set(threading.enumerate())
    with in_process() as server, server.client() as client:
        client.create_topic(ORDERS)
        client.create_topic(BILLS)
        with client.transaction() as tx:
            tx.publish(ORDERS, [b"a"])
        assert visible(server) == [b"a"]

        async def main() -> None:
            async with server.async_client() as other, other.transaction() as tx:
                await tx.publish(ORDERS, [b"b"])

        asyncio.run(main())
    assert set(threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_store_of_the_caller_outlives_the_server() -> None:
    store = MemoryStore()
    with in_process(store=store) as server, server.client() as client:
        client.create_topic(ORDERS)
    assert len(store.metadata.rows()) == 1


def test_reader_that_left_early_does_not_hold_the_server() -> None:
    with in_process() as server:
        client = server.client()
        client.create_topic(ORDERS)
        client.publish(ORDERS, [bytes(1_000_000)] * 3)
        left = client.poll(ORDERS)
        assert len(next(left).payload) == 1_000_000
        client.close()
    with pytest.raises(Unavailable, match="cannot be reached"):
        server.client(retry=SOON).topics()


def test_store_that_fails_is_reported_and_logged(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.service, "topics", raising(StoreError("The disk is gone.")))
    with pytest.raises(Unanswered, match="The disk is gone"):
        client.topics()
    assert "The disk is gone" in caplog.text


def test_answer_of_a_crashing_server_is_cut_short(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    client.publish(ORDERS, [bytes(1000)] * 2000)
    pages = Fetch.pages

    def crash(fetch: Fetch) -> Iterator[list[Stored]]:
        yield from islice(pages(fetch), 10)
        raise StoreError("The disk is gone.")

    monkeypatch.setattr(Fetch, "pages", crash)
    found = client.poll(ORDERS)
    with pytest.raises(Unanswered):
        list(found)


@in_event_loop
async def test_cancelled_request_leaves_the_server_working(server: InProcess) -> None:
    async with server.async_client() as client:
        task = asyncio.create_task(client.topics())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await client.topics()) == 2
        with pytest.raises(TopicNotFound):
            await client.topic("default:missing")


def test_fixture_tms_server_gives_each_test_a_server_with_a_clock_to_advance(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tms_core.client.testing"]\n')
    (tmp_path / "test_app.py").write_text(
        "def test_orders(tms_server):\n"
        "    with tms_server.client() as client:\n"
        "        client.create_topic('default:orders', ttl='1m')\n"
        "        client.publish('default:orders', [b'one'])\n"
        "        assert [message.payload for message in client.poll('default:orders')] == [b'one']\n"
        "        tms_server.clock.advance(61_000)\n"
        "        assert list(client.poll('default:orders')) == []\n"
        "\n"
        "def test_another_server(tms_server):\n"
        "    with tms_server.client() as client:\n"
        "        assert client.topics() == []\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
