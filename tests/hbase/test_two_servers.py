"""Two ``tms serve`` on one HBase: one leads, the other forwards; leaders are killed, and suspended in a write.

With several slots the topic is one of slot 0, so its leader is the same; but a leader that is back gets its slot again.

Time is the machine's, so nothing here waits for anything but conditions.

As a module this is the ``tms`` command, but that it stops itself in the middle of sending a certain message to HBase.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any

import pytest

from tests.hbase.tables import Tables, write_config
from tests.server.client import JSON, Answer, Client, TopicClient
from tests.server.process import TMS, Serve
from tests.support import PATIENCE_SECONDS, wait_until
from tms_core.cli.main import execute
from tms_core.server.ha.slot_assignment import slot_of
from tms_core.tables.base import KEYS, MESSAGES
from tms_core.tables.hbase.wire import socket as hbase_wire

TOPIC = "events"
#: What is acknowledged before the next blow, by each server's producers.
SOME = 25
#: The message in the middle of which the process stops.
FATAL = b"stopped in the middle of this"
BODY = b'{"messages": ["%s"]}' % FATAL
ORDINALS = {"a": 0, "b": 1, "c": 0}
#: With so many, the topic is one of slot 0.
SLOTS = 3
ROOT = Path(__file__).parent.parent.parent
STOPS_ITSELF = (sys.executable, "-m", "tests.hbase.test_two_servers")


class Pair:
    """Two servers on the same tables, at free ports unless ``ports`` is given."""

    def __init__(self, tables: Tables, folder: Path, source: str = "none", **leader: object) -> None:
        self.namespace = tables.make()
        self._hbase = tables.server.settings(self.namespace, buckets=4)
        self._folder = folder
        self._source = source
        self.ports: dict[str, tuple[int, str]] = {}
        self.leader = {"advertise": "http://127.0.0.1:0", "seconds": 3, "fencing_delay_seconds": 1, **leader}

    def server(self, name: str, *tms: str) -> Serve:
        return Serve(self.configure(name), tms=tms or (str(TMS),))

    def configure(self, name: str) -> Path:
        port, thrift = self.ports.get(name, (0, "127.0.0.1:0"))
        transactions = {
            "source": self._source,
            "thrift": thrift,
            "directory": str(self._folder / "none"),
            "snapshot_interval_seconds": 1,
        }
        server = {"port": port, "leader": {**self.leader, "ordinal": ORDINALS[name]}}
        return write_config(self._folder / f"{name}.yaml", self._hbase, transactions=transactions, server=server)


def leads(server: Serve) -> bool:
    with Client(server.port) as client:
        return "tms_server_is_leader 1.0" in client.ask("GET", "/metrics").text


def leader_of(one: Serve, other: Serve) -> tuple[Serve, Serve]:
    wait_until(lambda: leads(one) or leads(other))
    return (one, other) if leads(one) else (other, one)


class Worker:
    """A thread that repeats a request to one server and reconnects after failures."""

    def __init__(self, server: Serve) -> None:
        self._port = server.port
        self._stop = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with Client(self._port) as client:
                    while not self._stop.is_set():
                        self._ask(TopicClient(client, TOPIC))
            except (OSError, EOFError):
                self._broken()
                time.sleep(0.1)

    def _ask(self, topic: TopicClient) -> None:
        raise NotImplementedError

    def _broken(self) -> None:
        """Handle a connection that broke before or after the response."""


class Publisher(Worker):
    """A worker that publishes numbered messages and repeats only those that were certainly not written."""

    def __init__(self, server: Serve, name: str) -> None:
        self.name = name
        self.acknowledged: list[str] = []
        self.number = 0
        super().__init__(server)

    def _ask(self, topic: TopicClient) -> None:
        message = f"{self.name} {self.number}"
        answer = topic.post("publish", {"messages": [message]})
        if answer.status == 503:
            time.sleep(0.05)
            return
        self.number += 1
        assert answer.status in (200, 500, 502), answer.text
        if answer.status == 200:
            self.acknowledged.append(message)

    def _broken(self) -> None:
        self.number += 1


class Follower(Worker):
    def __init__(self, server: Serve) -> None:
        self.seen: list[tuple[str, str]] = []
        super().__init__(server)

    def _ask(self, topic: TopicClient) -> None:
        start = {"startFrom": {"id": self.seen[-1][0]}, "inclusive": False} if self.seen else {}
        answer = topic.post("poll", start)
        if answer.status == 200:
            self.seen += messages(answer)
        if not (answer.status == 200 and answer.json):
            time.sleep(0.02)


def messages(answer: Answer) -> list[tuple[str, str]]:
    return [(message["id"], message["payload"]) for message in answer.json]


def everything(server: Serve) -> list[tuple[str, str]]:
    def read() -> Answer:
        with Client(server.port) as client:
            return TopicClient(client, TOPIC).post("poll", {"limit": 1_000_000})

    wait_until(lambda: read().status == 200)
    return messages(read())


def create(server: Serve) -> None:
    with Client(server.port) as client:
        wait_until(lambda: client.ask("PUT", f"/v1/namespaces/default/topics/{TOPIC}", b"{}").status == 200)


def more(publisher: Publisher) -> None:
    """Wait until more messages of a publisher are acknowledged."""
    wanted = len(publisher.acknowledged) + SOME
    wait_until(lambda: len(publisher.acknowledged) >= wanted)


@pytest.mark.parametrize("slots", [1, SLOTS])
def test_killed_servers_lose_repeat_and_reorder_no_message(hbase_tables: Tables, tmp_path: Path, slots: int) -> None:
    assert slot_of(f"default:{TOPIC}:".encode(), slots) == 0
    pair = Pair(hbase_tables, tmp_path, slots=slots, servers=min(2, slots))
    with pair.server("a") as one, pair.server("b") as other:
        first, second = leader_of(one, other)
        create(second)
        publishers = {server: [Publisher(server, f"{server.port}-{at}") for at in range(2)] for server in (one, other)}
        consumers = [Follower(server) for server in (one, other)]
        everybody = [*publishers[one], *publishers[other]]
        with ExitStack() as stack:
            for worker in (*everybody, *consumers):
                stack.callback(worker.join)
            for worker in (*everybody, *consumers):
                stack.callback(worker.stop)
            for publisher in everybody:
                more(publisher)
            first.process.send_signal(signal.SIGSTOP)
            more(publishers[second][0])
            first.process.send_signal(signal.SIGCONT)
            more(publishers[first][0])
            if slots > 1:
                wait_until(lambda: leads(first))
                more(publishers[second][0])
            second.kill()
            more(publishers[first][0])
        found = everything(first)
        check(found, everybody, consumers)
        first.end()
    with pair.server("c") as last:
        assert everything(last) == found


def check(found: list[tuple[str, str]], publishers: list[Publisher], consumers: list[Follower]) -> None:
    """Check that no message is lost or duplicated, and that all consumers saw the same order."""
    payloads = [payload for _, payload in found]
    assert len(set(payloads)) == len(payloads)
    for publisher in publishers:
        own = [payload for payload in payloads if payload.startswith(f"{publisher.name} ")]
        assert set(publisher.acknowledged) <= set(own)
        assert own == sorted(own, key=lambda payload: int(payload.split()[1]))
    for consumer in consumers:
        assert consumer.seen
        assert consumer.seen == found[: len(consumer.seen)]


def test_late_write_of_former_leader_is_never_visible(hbase_tables: Tables, tmp_path: Path) -> None:
    pair = Pair(hbase_tables, tmp_path)
    with pair.server("a", *STOPS_ITSELF) as one, Client(one.port) as client:
        create(one)
        publish(one, "before")
        stop_in_write(one, client)
        with pair.server("b") as other, hbase_tables.open(pair.namespace) as store:
            wait_until(lambda: leads(other))
            publish(other, "after")
            seen = everything(other)
            assert [payload for _, payload in seen] == ["before", "after"]
            assert len(store.message.read(KEYS, b"", None, 10).items) == 2
            one.process.send_signal(signal.SIGCONT)
            assert client.answer().status == 500
            rows = [row.payload for _, row in store.message.read(MESSAGES, b"", None, 10).items]
            assert rows == [b"before", FATAL, b"after"], "it has come"
            assert everything(other) == seen == everything(one)
            other.kill()
            wait_until(lambda: leads(one))
            assert everything(one) == seen


def publish(server: Serve, message: str) -> None:
    with Client(server.port) as client:
        topic = TopicClient(client, TOPIC)
        wait_until(lambda: topic.post("publish", {"messages": [message]}).status == 200)


def stop_in_write(server: Serve, client: Client) -> None:
    """Have a server stop itself while it writes; it stands alone, so nothing else can happen but that it must wait."""
    while True:
        client.send("POST", f"/v1/namespaces/default/topics/{TOPIC}/publish", BODY, content_type=JSON)
        while not select.select([client.socket], [], [], 0.05)[0]:
            process, status = os.waitpid(server.process.pid, os.WUNTRACED | os.WNOHANG)
            if process:
                assert os.WIFSTOPPED(status)
                return
        assert client.answer().status == 503


def test_second_server_without_advertise_is_rejected(hbase_tables: Tables, tmp_path: Path) -> None:
    # Long enough for the slowest of machines: the other one would serve.
    pair = Pair(hbase_tables, tmp_path, advertise=None, seconds=20)
    with pair.server("a") as one:
        config = tmp_path / "a.yaml"
        refused = subprocess.run([TMS, "serve", "--config", config], capture_output=True, text=True, check=False)
        assert (refused.returncode, "server.leader.advertise" in refused.stderr) == (4, True), refused.stderr
        wait_until(lambda: leads(one))


def main(arguments: list[str]) -> int:
    """Run the command, which stops itself while it writes the fatal message."""
    write, fatal = vars(hbase_wire.TimedSocket)["write"], [FATAL]

    def halfway(connection: Any, data: bytes) -> None:
        if fatal and fatal[0] in data:
            fatal.clear()
            write(connection, data[: len(data) // 2])
            # This very thread, or it would go on for a moment.
            signal.pthread_kill(get_ident(), signal.SIGSTOP)
            # As if the call had just begun.
            connection.allow(PATIENCE_SECONDS)
            data = data[len(data) // 2 :]
        write(connection, data)

    hbase_wire.TimedSocket.write = halfway  # type: ignore[method-assign, assignment]
    return execute(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
