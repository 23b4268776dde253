"""``tms serve`` is killed while producers publish: each message exists once, in order."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from tests.server.process import Serve, configure
from tests.support import PATIENCE_SECONDS, free_port, size
from tms_core.client import Client, MessagingError, Options, Producer, Retry, TransactionError

TOPIC = "default:bills"
PRODUCERS = 3
#: The number of kills.
KILLS = size("TMS_TEST_KILLS", 8)
#: The retries outlast each restart of the server.
PATIENT = Retry(attempts=None, first_seconds=0.02, longest_seconds=0.2)


class Publisher(threading.Thread):
    """A producer that publishes numbers, each fourth time three of them in a transaction."""

    def __init__(self, server: Serve, name: str) -> None:
        super().__init__()
        self.address, self.transactions = server.url, server.transactions
        self.producer, self.published, self.errors = name, 0, list[Exception]()
        self.enough = threading.Event()

    def run(self) -> None:
        options = Options(retry=PATIENT)
        try:
            with (
                Client(self.address, transactions=self.transactions, options=options) as client,
                client.producer(TOPIC, self.producer) as producer,
            ):
                while not self.enough.is_set():
                    if self.published % 4 != 3:
                        producer.publish([b"%s %d" % (self.producer.encode(), self.published)])
                        self.published += 1
                    else:
                        self.publish_three(producer)
        except Exception as error:  # noqa: BLE001 the test shows it
            self.errors.append(error)

    def publish_three(self, producer: Producer) -> None:
        """Publish three numbers in a transaction; a failed transaction has no effect."""
        try:
            with producer.transaction(str(self.published)) as tx:
                payloads = [b"%s %d" % (self.producer.encode(), self.published + more) for more in range(3)]
                tx.publish(TOPIC, payloads)
        except (TransactionError, MessagingError):
            return
        self.published += 3


def test_producers_of_a_killed_server_have_each_message_once_in_order(tmp_path: Path) -> None:
    chance, config = random.Random(7), configure(tmp_path, port=free_port(), thrift_port=free_port())
    server = Serve(config)
    try:
        with Client(server.url) as client:
            client.create_topic(TOPIC)
        publishing = [Publisher(server, name) for name in "abc"]
        for one in publishing:
            one.start()
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.05, 0.4))
            server.kill()
            server.__exit__()
            server = Serve(config)
        for one in publishing:
            one.enough.set()
        for one in publishing:
            one.join(PATIENCE_SECONDS)
            assert not one.is_alive()
        assert [one.errors for one in publishing] == [[]] * PRODUCERS
        with Client(server.url, transactions=server.transactions) as client, client.transaction() as tx:
            found = [message.payload.split() for message in tx.poll(TOPIC)]
        for one in publishing:
            numbers = [int(number) for name, number in found if name == one.producer.encode()]
            assert numbers == list(range(one.published))
            assert one.published > KILLS
        server.end()
    finally:
        server.__exit__()
