"""Programs that publish orders and bill them, each in a separate process, written as in the guides.

    python -m tests.processes.programs producer URL HOST:PORT NAME
    python -m tests.processes.programs worker URL HOST:PORT GROUP [outside]

An order is ``NAME SERIES NUMBER GENERATION``: its producer, the series of orders in labeled transactions (``labeled``)
or in single requests (``single``), its number in the series, and the generation of the instance. Each instance numbers
its single orders from 0, because a producer does not know after a restart which of them were published.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from itertools import count
from threading import Event
from typing import NamedTuple, Self

from tms_core.client import Client, MessagingError, Options, Producer, ProducerFenced, Timeouts, TransactionError

ORDERS, DEAD = "default:orders", "default:orders-dead"
#: Exit code of a producer that was fenced.
FENCED = 3
TRANSACTION_SECONDS = 2
MAX_DELIVERIES = 4
OPTIONS = Options(timeouts=Timeouts(connect_seconds=2, answer_seconds=3, send_seconds=3, transaction_seconds=3))
#: A pause between two requests of a producer, so that workers keep up with it.
_PAUSE_SECONDS = 0.03


class Order(NamedTuple):
    """An order, parsed from its payload."""

    name: str
    series: str
    number: int
    generation: int

    @classmethod
    def of(cls, payload: bytes) -> Self:
        name, series, number, generation = payload.decode().split()
        return cls(name, series, int(number), int(generation))

    @property
    def payload(self) -> bytes:
        return f"{self.name} {self.series} {self.number} {self.generation}".encode()

    @property
    def is_poisonous(self) -> bool:
        """Return whether the program of the group ``sharing`` always fails with this order."""
        return self.series == "labeled" and self.number % 40 == 17


class Poisonous(Exception):
    """An order that the program cannot process."""


def bills_of(group: str) -> str:
    """Return the topic with the bills of a group."""
    return f"default:bills-of-{group}"


def publish_orders(url: str, transactions: str, name: str) -> int:
    """Publish orders until SIGTERM, and print each acknowledged order; return an exit code."""
    stop = Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while not stop.is_set():
        try:
            with (
                Client(url, transactions=transactions, options=OPTIONS) as client,
                client.producer(ORDERS, name) as producer,
            ):
                _publish(producer, name, stop)
        except ProducerFenced:
            return FENCED
        except (MessagingError, TransactionError):
            # The outcome of the last transaction is unknown; the next instance receives it as `previous`.
            time.sleep(_PAUSE_SECONDS)
    return 0


def _publish(producer: Producer, name: str, stop: Event) -> None:
    singles = count()
    labeled = _count_labeled(producer)
    while not stop.is_set():
        single = Order(name, "single", next(singles), producer.generation)
        producer.publish([single.payload], key=name.encode())
        _acknowledge(single)
        orders = [Order(name, "labeled", next(labeled), producer.generation) for _ in range(3)]
        with producer.transaction(str(orders[-1].number), timeout_seconds=TRANSACTION_SECONDS) as tx:
            for order in orders:
                tx.publish(ORDERS, [order.payload], key=name.encode())
        _acknowledge(orders[-1])
        time.sleep(_PAUSE_SECONDS)


def _count_labeled(producer: Producer) -> Iterator[int]:
    return count(published_by(producer))


def published_by(producer: Producer) -> int:
    """Return the number of labeled orders that previous instances have published."""
    previous = producer.previous
    return int(previous.label) + 1 if previous and previous.outcome == "committed" else 0


def _acknowledge(order: Order) -> None:
    sys.stdout.write(order.payload.decode() + "\n")
    sys.stdout.flush()


def bill_orders(url: str, transactions: str, group: str, *, outside: bool) -> None:
    """Bill orders until killed.

    Args:
        outside: a deliberate bug: publish the bills outside the transaction.
    """
    is_sharing = group == "sharing"
    while True:
        with Client(url, transactions=transactions, options=OPTIONS) as client:
            work = client.work(
                ORDERS,
                group,
                batch=7,
                order="none" if is_sharing else "partition",
                max_deliveries=MAX_DELIVERIES if is_sharing else None,
                timeout_seconds=TRANSACTION_SECONDS,
            )
            try:
                for tx, batch in work:
                    bills = [order.payload for order in batch]
                    if is_sharing and any(Order.of(bill).is_poisonous for bill in bills):
                        raise Poisonous
                    if outside:
                        client.publish(bills_of(group), bills)
                    else:
                        tx.publish(bills_of(group), bills)
            except Poisonous:
                continue


def main(kind: str, url: str, transactions: str, name: str, *options: str) -> int:
    """Run one of the programs."""
    if kind == "producer":
        return publish_orders(url, transactions, name)
    bill_orders(url, transactions, name, outside="outside" in options)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
