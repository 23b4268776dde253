"""Threads that publish orders for a group while servers stop and start, and record the result of each.

What is acknowledged is there once. A plain request, or a commit, of which no answer says whether it was done, is there
at most once. What failed in a transaction is never there. A producer repeats its requests until they are acknowledged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx2

from tests.server.group_worker import ORDERS
from tests.server.process import Serve
from tests.support import PATIENCE_SECONDS
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

#: In slots of two servers where there are several slots: a producer publishes in its own slot only, so each kind of
#: producer has a partition.
PARTITIONS = 3
#: A request is repeated for as long as servers need to take over, where that does no harm.
PATIENT = Retry(attempts=None, first_seconds=0.05, longest_seconds=0.5)
#: A call of the transaction service that has reached a server which is stopped is given up before that is woken.
OPTIONS = Options(retry=PATIENT, timeouts=Timeouts(transaction_seconds=5))
#: Between two requests, so that the group keeps up.
PAUSE_SECONDS = 0.1

Publish = Callable[[list[bytes]], None]
Kind = Callable[[Client, str], AbstractContextManager[Publish]]


class LossyTransport(httpx2.HTTPTransport):
    """A client that loses every other response, so that a producer repeats half of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self._loses = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = super().handle_request(request)
        self._loses = not self._loses
        if self._loses:
            answer.close()
            raise httpx2.ReadError("the answer is lost", request=request)
        return answer


@contextmanager
def plainly(client: Client, _: str) -> Iterator[Publish]:
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


KINDS: tuple[Kind, ...] = (plainly, in_transactions, as_producer, as_producer_in_transactions)


class Publisher(threading.Thread):
    """Publishes two orders at a time, each of its own name, until it is told to stop.

    Args:
        server: which one it asks; that may go and come back at its port.
        kind: how it publishes.

    Attributes:
        acknowledged, unknown, refused: the orders, by what became of them.
    """

    def __init__(self, server: Serve, kind: Kind) -> None:
        super().__init__(name=f"{kind.__name__}-{server.port}")
        self._url, self._transactions, self._kind = server.url, server.transactions, kind
        self._enough = threading.Event()
        self._errors: list[Exception] = []
        self.acknowledged: list[bytes] = []
        self.unknown: list[bytes] = []
        self.refused: list[bytes] = []

    def run(self) -> None:
        is_producer = self._kind in (as_producer, as_producer_in_transactions)
        try:
            with (
                Client(
                    self._url,
                    transactions=self._transactions,
                    options=OPTIONS,
                    transport=LossyTransport() if is_producer else None,
                ) as client,
                self._kind(client, self.name) as publish,
            ):
                number = 0
                while not self._enough.wait(PAUSE_SECONDS):
                    orders = [b"%s %d" % (self.name.encode(), number + more) for more in range(2)]
                    self._fate(publish, orders).extend(orders)
                    number += 2
        except Exception as error:  # noqa: BLE001 the test shows it
            self._errors.append(error)

    def _fate(self, publish: Publish, orders: list[bytes]) -> list[bytes]:
        try:
            publish(orders)
        except OutcomeUnknown:
            return self.unknown
        except (TransactionError, MessagingError) as error:
            if self._kind in (in_transactions, as_producer_in_transactions):
                return self.refused
            if self._kind is plainly and isinstance(error, Unanswered):
                return self.unknown
            raise
        return self.acknowledged

    def check(self) -> None:
        for error in self._errors:
            raise error

    def stop(self) -> None:
        self._enough.set()
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive()
        self.check()
