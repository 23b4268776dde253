"""Threads that publish orders for a consumer group while servers stop and start, and record each outcome.

An acknowledged order is stored once. A plain request or a commit with an unknown outcome stores its orders at most
once. A failed transaction stores no order. A producer repeats a request until it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx2

from tests.kit.hbase_servers import WorkerThread
from tests.server.group_worker import ORDERS
from tests.server.process import Serve
from tms_core.client import (
    Client,
    MessagingError,
    Options,
    OutcomeUnknown,
    Retry,
    Timeouts,
    TransactionError,
    Unanswered,
)

#: The partitions of the orders. They are in different slots if several servers lead slots, so each mode of producers,
#: which publish to one partition only, has its own partition.
PARTITIONS = 3
#: Retries for as long as another server needs to take over.
RETRY = Retry(attempts=None, first_seconds=0.05, longest_seconds=0.5)
#: A call of the transaction service on a paused server times out before the server resumes.
OPTIONS = Options(retry=RETRY, timeouts=Timeouts(transaction_seconds=5))
#: A pause between two requests, so that the group keeps up.
PAUSE_SECONDS = 0.1

Publish = Callable[[list[bytes]], None]
Mode = Callable[[Client, str], AbstractContextManager[Publish]]


class LossyTransport(httpx2.HTTPTransport):
    """A transport that loses every other response, so that a producer repeats half of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self._loses = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = super().handle_request(request)
        self._loses = not self._loses
        if self._loses:
            answer.close()
            raise httpx2.ReadError("the response is lost", request=request)
        return answer


@contextmanager
def without_transactions(client: Client, _: str) -> Iterator[Publish]:
    yield lambda orders: client.publish(ORDERS, orders)


@contextmanager
def in_transactions(client: Client, _: str) -> Iterator[Publish]:
    """Publish each order to another partition, in one transaction."""

    def publish(orders: list[bytes]) -> None:
        with client.transaction() as tx:
            for order in orders:
                tx.publish(ORDERS, [order])

    yield publish


@contextmanager
def as_producer(client: Client, name: str) -> Iterator[Publish]:
    with client.producer(f"{ORDERS}-0", name) as producer:
        yield producer.publish


@contextmanager
def as_producer_in_transactions(client: Client, name: str) -> Iterator[Publish]:
    """Publish in a transaction that the next producer instance would find."""
    partition = f"{ORDERS}-{PARTITIONS - 1}"
    with client.producer(partition, name) as producer:

        def publish(orders: list[bytes]) -> None:
            with producer.transaction(orders[0].decode()) as tx:
                tx.publish(partition, orders)

        yield publish


MODES: tuple[Mode, ...] = (without_transactions, in_transactions, as_producer, as_producer_in_transactions)


class Publisher(WorkerThread):
    """A worker that publishes two new orders per request.

    Args:
        server: the server, which may restart on its port.

    Attributes:
        unknown: orders with an unknown outcome.
    """

    def __init__(self, server: Serve, mode: Mode) -> None:
        super().__init__(f"{mode.__name__}-{server.port}")
        self._url, self._transactions, self._mode = server.url, server.transactions, mode
        self.unknown: list[bytes] = []

    def work(self) -> None:
        is_producer = self._mode in (as_producer, as_producer_in_transactions)
        transport = LossyTransport() if is_producer else None
        with (
            Client(self._url, transactions=self._transactions, options=OPTIONS, transport=transport) as client,
            self._mode(client, self.name) as publish,
        ):
            number = 0
            while not self.stopping.wait(PAUSE_SECONDS):
                self._publish(publish, [b"%s %d" % (self.name.encode(), number + more) for more in range(2)])
                number += 2

    def _publish(self, publish: Publish, orders: list[bytes]) -> None:
        try:
            publish(orders)
        except OutcomeUnknown:
            self.unknown += orders
        except (TransactionError, MessagingError) as error:
            if self._mode is without_transactions and isinstance(error, Unanswered):
                self.unknown += orders
            elif self._mode not in (in_transactions, as_producer_in_transactions):
                raise
        else:
            self.acknowledged += orders
