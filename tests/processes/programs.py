"""Programs that publish orders and bill them, each a process of its own, written as the guides tell.

    python -m tests.processes.programs producer URL HOST:PORT NAME
    python -m tests.processes.programs worker URL HOST:PORT GROUP [outside]

An order is ``NAME SERIES NUMBER GENERATION``: who published it, in a transaction (``labeled``) or in a request alone
(``single``), its number in that series, and the generation of the instance. Single orders are numbered per instance,
since their producer does not know after a restart which of them were published.
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
    """An order, as its payload says."""

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
        """Whether the program of the group ``sharing`` fails with it each time."""
        return self.series == "labeled" and self.number % 40 == 17


class Poisonous(Exception):
    """An order that the program cannot process."""


def bills_of(group: str) -> str:
    """The topic with the bills of a group."""
    return f"default:bills-of-{group}"


def publish_orders(url: str, transactions: str, name: str) -> int:
    """Publish orders until SIGTERM; a number on standard output is that of a labeled order which was acknowledged."""
    enough = Event()
    signal.signal(signal.SIGTERM, lambda *_: enough.set())
    while not enough.is_set():
        try:
            with (
                Client(url, transactions=transactions, options=OPTIONS) as client,
                client.producer(ORDERS, name) as producer,
            ):
                _publish(producer, name, enough)
        except ProducerFenced:
            return FENCED
        except (MessagingError, TransactionError):
            # Whether the last one was published is not known: the next instance learns it.
            time.sleep(_PAUSE_SECONDS)
    return 0


def _publish(producer: Producer, name: str, enough: Event) -> None:
    singles = count()
    labeled = _labeled_after(producer)
    while not enough.is_set():
        single = Order(name, "single", next(singles), producer.generation)
        producer.publish([single.payload], key=name.encode())
        _acknowledge(single)
        orders = [Order(name, "labeled", next(labeled), producer.generation) for _ in range(3)]
        with producer.transaction(str(orders[-1].number), timeout_seconds=TRANSACTION_SECONDS) as tx:
            for order in orders:
                tx.publish(ORDERS, [order.payload], key=name.encode())
        _acknowledge(orders[-1])
        time.sleep(_PAUSE_SECONDS)


def _labeled_after(producer: Producer) -> Iterator[int]:
    return count(published_by(producer))


def published_by(producer: Producer) -> int:
    """Return how many labeled orders the instances before this one have published."""
    previous = producer.previous
    return int(previous.label) + 1 if previous and previous.outcome == "committed" else 0


def _acknowledge(order: Order) -> None:
    sys.stdout.write(order.payload.decode() + "\n")
    sys.stdout.flush()


def bill_orders(url: str, transactions: str, group: str, *, outside: bool) -> None:
    """Bill orders until killed.

    Args:
        outside: a planted bug: the bills are published outside the transaction.
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
