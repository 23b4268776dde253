"""``tms serve`` is killed under load: acknowledged messages exist once, in order."""

from __future__ import annotations

from pathlib import Path

from tests.server.client import Client, TopicClient
from tests.server.process import Serve, configure
from tests.server.producers import Producer, check
from tests.support import size

KILLS = size("TMS_TEST_KILLS", 8)


def test_killed_server_keeps_acknowledged_messages_once_in_order(tmp_path: Path) -> None:
    config = configure(tmp_path)
    topics = ("one", "two")
    producers: dict[str, list[Producer]] = {topic: [] for topic in topics}
    for kill in range(KILLS + 1):
        with Serve(config) as server, Client(server.port) as client:
            for topic in topics:
                if kill == 0:
                    TopicClient(client, topic).create()
                check(producers[topic], TopicClient(client, topic).payloads())
            if kill == KILLS:
                break
            started = {topic: [Producer(server.port, topic, f"{kill}{name}") for name in "abc"] for topic in topics}
            for topic in topics:
                for number, producer in enumerate(started[topic]):
                    producer.reach(2 + 7 * ((kill + number) % 5))
            server.kill()
            for topic in topics:
                for producer in started[topic]:
                    producer.join()
                producers[topic] += started[topic]
    assert all(producer.acknowledged for found in producers.values() for producer in found)
