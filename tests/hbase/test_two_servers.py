"""Two servers on one HBase: one leads, the other forwards. Tests kill the leader, and pause it during a write.

With several slots, the topic is in slot 0, and a resumed leader gets this slot back.

``python -m tests.hbase.test_two_servers`` is the command ``tms``, which pauses itself in the middle of sending the
message :data:`FATAL` to HBase.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hbase.tables import Tables
from tests.kit.hbase_servers import (
    HBaseServers,
    WorkerThread,
    is_paused,
    leads_first_slot,
    pause_this_process,
    wait_for_leader,
    wait_for_more,
    working,
)
from tests.server.client import JSON, Answer, Client, TopicClient
from tests.server.process import TMS, Serve
from tests.support import PATIENCE_SECONDS, wait_until
from tms_core.cli.main import execute
from tms_core.server.ha.slot_assignment import slot_of
from tms_core.tables.base import KEYS, MESSAGES
from tms_core.tables.hbase.wire import socket as hbase_wire

TOPIC = "events"
#: The acknowledged messages of a publisher between two faults.
SOME = 25
#: The message that a server sends only in part.
FATAL = b"paused in the middle of this"
BODY = b'{"messages": ["%s"]}' % FATAL
#: A number with which the topic is in slot 0.
SLOTS = 3
PAUSES_ITSELF = (sys.executable, "-m", "tests.hbase.test_two_servers")


class HttpWorker(WorkerThread):
    """A worker that sends requests about the topic to one server, and reconnects after failures."""

    def __init__(self, server: Serve, name: str = "") -> None:
        super().__init__(name or f"reader of {server.port}")
        self._port = server.port

    def work(self) -> None:
        try:
            with Client(self._port) as client:
                while not self.stopping.is_set():
                    self.request(TopicClient(client, TOPIC))
        except (OSError, EOFError):
            self.handle_lost_connection()
            time.sleep(0.1)

    def request(self, topic: TopicClient) -> None:
        raise NotImplementedError

    def handle_lost_connection(self) -> None:
        """Handle a connection that broke before or after the response."""


class Publisher(HttpWorker):
    """A worker that publishes numbered messages, and repeats only messages that are certainly not written."""

    number = 0

    def request(self, topic: TopicClient) -> None:
        message = f"{self.name} {self.number}"
        answer = topic.post("publish", {"messages": [message]})
        if answer.status == 503:
            time.sleep(0.05)
            return
        self.number += 1
        assert answer.status in (200, 500, 502), answer.text
        if answer.status == 200:
            self.acknowledged.append(message)

    def handle_lost_connection(self) -> None:
        self.number += 1


class Reader(HttpWorker):
    """A worker that reads each message once; ``acknowledged`` has the messages with their ids."""

    def request(self, topic: TopicClient) -> None:
        start = {"startFrom": {"id": self.acknowledged[-1][0]}, "inclusive": False} if self.acknowledged else {}
        answer = topic.post("poll", start)
        if answer.status == 200:
            self.acknowledged += messages(answer)
        if not (answer.status == 200 and answer.json):
            time.sleep(0.02)


def messages(answer: Answer) -> list[tuple[str, str]]:
    return [(message["id"], message["payload"]) for message in answer.json]


def read_all(server: Serve) -> list[tuple[str, str]]:
    def poll() -> Answer:
        with Client(server.port) as client:
            return TopicClient(client, TOPIC).post("poll", {"limit": 1_000_000})

    wait_until(lambda: poll().status == 200)
    return messages(poll())


def create_topic(server: Serve) -> None:
    with Client(server.port) as client:
        wait_until(lambda: client.ask("PUT", f"/v1/namespaces/default/topics/{TOPIC}", b"{}").status == 200)


@pytest.mark.parametrize("slots", [1, SLOTS])
def test_killed_servers_lose_repeat_and_reorder_no_message(hbase_tables: Tables, tmp_path: Path, slots: int) -> None:
    assert slot_of(f"default:{TOPIC}:".encode(), slots) == 0
    with HBaseServers(hbase_tables, tmp_path, slots=slots) as servers:
        one, other = servers.start("a"), servers.start("b")
        first, second = wait_for_leader(one, other)
        create_topic(second)
        publishers = {server: [Publisher(server, f"{server.port}-{at}") for at in range(2)] for server in (one, other)}
        readers = [Reader(server) for server in (one, other)]
        all_publishers = [*publishers[one], *publishers[other]]
        with working([*all_publishers, *readers]):
            wait_for_more(all_publishers, SOME)
            first.pause()
            wait_for_more(publishers[second][:1], SOME)
            first.resume()
            wait_for_more(publishers[first][:1], SOME)
            if slots > 1:
                wait_until(lambda: leads_first_slot(first))
                wait_for_more(publishers[second][:1], SOME)
            second.kill()
            wait_for_more(publishers[first][:1], SOME)
        found = read_all(first)
        check(found, all_publishers, readers)
        first.end()
        assert read_all(servers.start("c")) == found


def check(found: list[tuple[str, str]], publishers: list[Publisher], readers: list[Reader]) -> None:
    """Check that no message is lost or duplicated, and that all readers saw the same order."""
    payloads = [payload for _, payload in found]
    assert len(set(payloads)) == len(payloads)
    for publisher in publishers:
        own = [payload for payload in payloads if payload.startswith(f"{publisher.name} ")]
        assert set(publisher.acknowledged) <= set(own)
        assert own == sorted(own, key=lambda payload: int(payload.split()[1]))
    for reader in readers:
        assert reader.acknowledged
        assert reader.acknowledged == found[: len(reader.acknowledged)]


def test_late_write_of_former_leader_is_never_visible(hbase_tables: Tables, tmp_path: Path) -> None:
    with (
        HBaseServers(hbase_tables, tmp_path) as servers,
        hbase_tables.open(servers.namespace) as store,
        Client(servers.start("a", *PAUSES_ITSELF).port) as client,
    ):
        one = servers.running["a"]
        create_topic(one)
        publish(one, "before")
        publish_until_paused(one, client)
        other = servers.start("b")
        wait_until(lambda: leads_first_slot(other))
        publish(other, "after")
        seen = read_all(other)
        assert [payload for _, payload in seen] == ["before", "after"]
        assert len(store.message.read(KEYS, b"", None, 10).items) == 2
        one.resume()
        assert client.answer().status == 500
        rows = [row.payload for _, row in store.message.read(MESSAGES, b"", None, 10).items]
        assert rows == [b"before", FATAL, b"after"], "HBase has the late message"
        assert read_all(other) == seen == read_all(one)
        other.kill()
        wait_until(lambda: leads_first_slot(one))
        assert read_all(one) == seen


def publish(server: Serve, message: str) -> None:
    with Client(server.port) as client:
        topic = TopicClient(client, TOPIC)
        wait_until(lambda: topic.post("publish", {"messages": [message]}).status == 200)


def publish_until_paused(server: Serve, client: Client) -> None:
    """Send the fatal message until the server, which must lead first, pauses itself in the write."""
    while True:
        client.send("POST", f"/v1/namespaces/default/topics/{TOPIC}/publish", BODY, content_type=JSON)
        while not select.select([client.socket], [], [], 0.05)[0]:
            if is_paused(server.process):
                return
        assert client.answer().status == 503


def test_second_server_without_advertise_is_rejected(hbase_tables: Tables, tmp_path: Path) -> None:
    # A lease that the first server does not lose on a slow machine; otherwise, the second server would serve.
    with HBaseServers(hbase_tables, tmp_path, advertise=None, seconds=20) as servers:
        one = servers.start("a")
        config = tmp_path / "a.yaml"
        rejected = subprocess.run([TMS, "serve", "--config", config], capture_output=True, text=True, check=False)
        assert (rejected.returncode, "server.leader.advertise" in rejected.stderr) == (4, True), rejected.stderr
        wait_until(lambda: leads_first_slot(one))


def main(arguments: list[str]) -> int:
    """Run the command, which pauses itself once while it writes the fatal message."""
    write, fatal = vars(hbase_wire.TimedSocket)["write"], [FATAL]

    def write_in_halves(connection: Any, data: bytes) -> None:
        if fatal and fatal[0] in data:
            fatal.clear()
            write(connection, data[: len(data) // 2])
            pause_this_process()
            # Otherwise the call would time out.
            connection.allow(PATIENCE_SECONDS)
            data = data[len(data) // 2 :]
        write(connection, data)

    hbase_wire.TimedSocket.write = write_in_halves  # type: ignore[method-assign, assignment]
    return execute(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
