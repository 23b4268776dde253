"""Producers that publish until the server stops, and record acknowledged messages."""

from __future__ import annotations

import threading

from tests.kit.avro import publish_body
from tests.server.client import AVRO, Client
from tests.support import PATIENCE_SECONDS


class Producer:
    """Publishes numbered messages, one request after the other; every third request is three messages.

    Args:
        port: of the server.
        topic: where to; it exists.
        name: what its messages begin with.
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
        """Wait until so many are acknowledged."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.acknowledged) >= messages, timeout=PATIENCE_SECONDS)

    def join(self) -> None:
        """Wait until it has found that nobody answers."""
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
    """Every acknowledged message is there once, in its producer's order; of the others only what was sent."""
    assert len(set(found)) == len(found)
    by_name: dict[bytes, list[bytes]] = {producer.name.encode(): [] for producer in producers}
    for message in found:
        by_name[message.partition(b" ")[0]].append(message)
    for producer in producers:
        own = by_name[producer.name.encode()]
        assert own[: len(producer.acknowledged)] == producer.acknowledged
        assert own == producer.sent[: len(own)]
