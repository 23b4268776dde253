"""Producers that publish until the server stops, and record acknowledged messages."""

from __future__ import annotations

import threading

from tests.kit.avro import publish_body
from tests.server.client import AVRO, Client
from tests.support import PATIENCE_SECONDS


class Producer:
    """A thread that publishes numbered messages; every third request has three messages.

    Args:
        port: the port of the server.
        topic: an existing topic.
        name: the prefix of the messages.
    """

    def __init__(self, port: int, topic: str, name: str) -> None:
        self.name = name
        self.acknowledged: list[bytes] = []
        self.sent: list[bytes] = []
        self._port = port
        self._path = f"/v1/namespaces/default/topics/{topic}/publish"
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reach(self, messages: int) -> None:
        """Wait until the server has acknowledged a number of messages."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.acknowledged) >= messages, timeout=PATIENCE_SECONDS)

    def join(self) -> None:
        """Wait until the server no longer responds."""
        self._thread.join(timeout=PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        try:
            with Client(self._port) as client:
                while self._publish(client, number):
                    number += 1
        except (OSError, EOFError):
            return

    def _publish(self, client: Client, number: int) -> bool:
        batch = [f"{self.name} {number} {at}".encode() for at in range(3 if number % 3 == 0 else 1)]
        self.sent += batch
        if client.ask("POST", self._path, publish_body(*batch), content_type=AVRO).status != 200:
            return False
        with self._more:
            self.acknowledged += batch
            self._more.notify_all()
        return True


def check(producers: list[Producer], found: list[bytes]) -> None:
    """Check that acknowledged messages exist once, in the order of their producer, and that all others were sent."""
    assert len(set(found)) == len(found)
    by_name: dict[bytes, list[bytes]] = {producer.name.encode(): [] for producer in producers}
    for message in found:
        by_name[message.partition(b" ")[0]].append(message)
    for producer in producers:
        own = by_name[producer.name.encode()]
        assert own[: len(producer.acknowledged)] == producer.acknowledged
        assert own == producer.sent[: len(own)]
