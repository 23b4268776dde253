"""The same histories on a Kafka broker and on this server: equal atomicity, fencing, repetition and order.

In a history, instances of one producer follow each other, while older instances continue. They publish orders, and copy
orders to bills together with their position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, Protocol

import pytest

from tests import maven
from tests.client.faults import Faults, faulty_client
from tests.kafka.broker import FENCED, Broker, Refused
from tests.kit.proxy import HONEST, Conduct, Fault, Proxy
from tests.support import free_port, require_or_skip, seeds
from tms_core.client import Client, Limits, Producer, ProducerFenced, TmsError, TransactionContext
from tms_core.client.testing import in_process

pytestmark = pytest.mark.timeout(600)

STEPS = 40
SEEDS = seeds(6)
#: Limits with which the client sends each message at once, like Kafka's client.
EAGER = Limits(transaction_bytes=1)


class System(Protocol):
    """A system on which a history is played. A step returns ``fenced`` if a newer instance has fenced this instance."""

    def register(self, instance: int) -> None: ...

    def begin(self, instance: int) -> str: ...

    def send(self, instance: int, topic: str, values: list[str]) -> str: ...

    def copy(self, instance: int, limit: int) -> str: ...

    def end(self, instance: int, *, commit: bool) -> str: ...

    def read(self, topic: str, *, committed: bool) -> list[str]: ...


class Kafka:
    """Kafka, with separate names for each history."""

    def __init__(self, broker: Broker, number: int) -> None:
        self._broker = broker
        self._number = number
        for topic in ("orders", "bills"):
            broker.call("create", topic=self._named(topic))

    def register(self, instance: int) -> None:
        self._broker.call("register", instance=self._named(instance), name=self._named("copier"))

    def begin(self, instance: int) -> str:
        return self._try("begin", instance)

    def send(self, instance: int, topic: str, values: list[str]) -> str:
        return self._try("send", instance, topic=self._named(topic), values=values)

    def copy(self, instance: int, limit: int) -> str:
        return self._try("copy", instance, topic=self._named("orders"), to=self._named("bills"), limit=limit)

    def end(self, instance: int, *, commit: bool) -> str:
        return self._try("commit" if commit else "abort", instance)

    def read(self, topic: str, *, committed: bool) -> list[str]:
        found: list[str] = self._broker.call("read", topic=self._named(topic), committed=committed)
        return found

    def _try(self, name: str, instance: int, **fields: Any) -> str:
        try:
            self._broker.call(name, instance=self._named(instance), **fields)
        except Refused as error:
            if str(error) not in FENCED:
                raise
            return "fenced"
        return ""

    def _named(self, name: str | int) -> str:
        return f"{name}-{self._number}"


class Tms:
    """This server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._instances: dict[int, Producer] = {}
        self._open: dict[int, TransactionContext] = {}
        self._empty: set[int] = set()
        for topic in ("orders", "bills"):
            client.create_topic(f"default:{topic}")

    def register(self, instance: int) -> None:
        self._instances[instance] = self._client.producer("default:bills", "copier").__enter__()

    def begin(self, instance: int) -> str:
        self._open[instance] = self._instances[instance].transaction().__enter__()
        self._empty.add(instance)
        return ""

    def send(self, instance: int, topic: str, values: list[str]) -> str:
        self._empty -= {instance} if values else set()
        try:
            self._open[instance].publish(f"default:{topic}", [value.encode() for value in values])
        except ProducerFenced as error:
            with suppress(TmsError):
                self._open.pop(instance).__exit__(type(error), error, None)
            return "fenced"
        return ""

    def copy(self, instance: int, limit: int) -> str:
        claimed = self._open[instance].consume("default:orders", "billing", limit=limit)
        orders = [message.payload.decode() for message in claimed]
        return self.send(instance, "bills", orders) if orders else ""

    def end(self, instance: int, *, commit: bool) -> str:
        tx = self._open.pop(instance)
        if commit and instance in self._empty:
            # Kafka's client sends no request for an empty transaction, so a fenced instance gets no error.
            return ""
        try:
            if not commit:
                tx.roll_back()
            tx.__exit__(None, None, None)
        except ProducerFenced:
            return "fenced"
        return ""

    def read(self, topic: str, *, committed: bool) -> list[str]:
        if not committed:
            return [message.payload.decode() for message in self._client.poll(f"default:{topic}")]
        with self._client.transaction() as tx:
            return [message.payload.decode() for message in tx.poll(f"default:{topic}")]


class Player:
    """A player of steps on a system.

    Attributes:
        results: the read messages and the ends of transactions, in order.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._newest = -1
        self._open: dict[int, str] = {}
        self._fenced: set[int] = set()
        self._numbers = 0
        self.results: list[Any] = []

    def play(self, step: str, age: int = 0, number: int = 1) -> None:
        """Play a step, or skip it if it is impossible in the current state.

        Args:
            age: the number of newer instances than the instance of the step.
            number: the number of messages.
        """
        instance = self._newest - age
        if step == "register":
            self._newest += 1
            self._system.register(self._newest)
        elif step == "read":
            self._read()
        elif instance < 0 or (step == "begin") == (instance in self._open):
            return
        elif step == "begin":
            self._open[instance] = "fenced" if instance in self._fenced else self._system.begin(instance)
        elif step in ("commit", "abort"):
            result = self._open.pop(instance) or self._system.end(instance, commit=step == "commit")
            self._note(instance, result)
            self.results.append((instance, step, result))
        elif not self._open[instance]:
            self._open[instance] = self._write(step, instance, number)
            self._note(instance, self._open[instance])

    def finish(self) -> None:
        """Commit open transactions and read all messages."""
        for age in range(self._newest + 1):
            self.play("commit", age)
        self._read()

    def _write(self, step: str, instance: int, number: int) -> str:
        if step == "copy":
            return self._system.copy(instance, number)
        values = [f"{instance}:{self._numbers + at}" for at in range(number)]
        self._numbers += number
        result = self._system.send(instance, "orders", values)
        return result or (self._system.send(instance, "bills", values[:1]) if step == "both" else "")

    def _note(self, instance: int, result: str) -> None:
        if result:
            self._fenced.add(instance)

    def _read(self) -> None:
        for topic in ("orders", "bills"):
            committed = self._system.read(topic, committed=True)
            # Readers of uncommitted messages see different messages of a rolled back transaction: on Kafka all of them,
            # and here only published messages, but not stored payloads.
            assert set(committed) <= set(self._system.read(topic, committed=False))
            self.results.append((topic, committed))


def play(system: System, steps: list[tuple[str, int, int]]) -> list[Any]:
    player = Player(system)
    for step in steps:
        player.play(*step)
    player.finish()
    return player.results


def random_history(seed: int) -> list[tuple[str, int, int]]:
    """Return random steps, most of them of the newest instance."""
    random = Random(seed)
    names = ["register", "begin", "send", "both", "copy", "commit", "abort", "read"]
    chosen = random.choices(names, [2, 8, 6, 3, 5, 6, 2, 2], k=STEPS)
    ages = random.choices([0, 1, 2], [6, 2, 1], k=STEPS)
    return [("register", 0, 1), *((step, age, random.randint(1, 3)) for step, age in zip(chosen, ages, strict=True))]


NAMED = {
    "newer instance aborts open transaction": "register begin send register commit:1 begin send commit",
    "send after abort is rejected": "register begin both abort register begin:1 send:1 commit:1",
    "transaction covers both topics": "register begin both register read begin both commit",
    "reader waits for undecided messages": "register begin send:0:2 read commit read",
    "position is committed with the output": (
        "register begin send:0:3 commit begin copy:0:2 abort begin copy:0:2 register begin copy:0:2 commit "
        "begin copy:0:2 commit"
    ),
    "fenced instance stays fenced": "register register begin:1 send:1 commit:1 begin:1 send:1 commit:1",
}


def steps_of(text: str) -> list[tuple[str, int, int]]:
    found = []
    for word in text.split():
        step, age, number = [*word.split(":"), "0", "1"][:3] if word.count(":") < 2 else word.split(":")
        found.append((step, int(age), int(number)))
    return found


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Proxy]]:
    """Yield a broker, and the proxy between producers and the broker."""
    if reason := maven.missing():
        require_or_skip(reason)
    port = free_port()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        advertised_port = int(proxy.address.rpartition(":")[2])
        with Broker(tmp_path_factory.mktemp("kafka"), port, advertised_port) as broker:
            yield broker, proxy


HISTORIES = {name: steps_of(text) for name, text in NAMED.items()}
HISTORIES |= {f"random {seed}": random_history(seed) for seed in SEEDS}


@pytest.mark.seeded
@pytest.mark.parametrize("name", HISTORIES)
def test_history_on_kafka_commits_and_rejects_the_same(name: str, network: tuple[Broker, Proxy]) -> None:
    with in_process() as server, server.client(limits=EAGER) as client:
        results = play(Tms(client), HISTORIES[name])
    assert results == play(Kafka(network[0], list(HISTORIES).index(name)), HISTORIES[name])
    bills = results[-1][1]
    assert len(bills) == len(set(bills))


def test_rolled_back_messages_are_read_alike_on_kafka(network: tuple[Broker, Proxy]) -> None:
    kafka = Kafka(network[0], -2)
    kafka.register(0)
    kafka.begin(0)
    kafka.send(0, "orders", ["rolled back"])
    kafka.end(0, commit=False)
    with in_process() as server, server.client() as client:
        tms = Tms(client)
        with client.transaction() as tx:
            published = client.publish("default:orders", [b"rolled back"], transaction=tx.transaction)
            client.rollback("default:orders", published)
            tx.roll_back()
        for system in (kafka, tms):
            assert system.read("orders", committed=False) == ["rolled back"]
            assert system.read("orders", committed=True) == []


def test_repeated_requests_on_kafka_keep_each_message_once_in_order(network: tuple[Broker, Proxy]) -> None:
    values = [str(number) for number in range(60)]
    broker, proxy = network
    kafka = Kafka(broker, -1)
    lost = proxy.struck
    connections = count()
    proxy.conduct = lambda _: HONEST if next(connections) % 5 == 4 else Conduct(down=Fault("cut", after_bytes=1500))
    try:
        broker.call("register", instance="idempotent", name="")
        for value in values:
            broker.call("send", instance="idempotent", topic="orders--1", values=[value])
    finally:
        proxy.conduct = lambda _: HONEST
    assert proxy.struck > lost
    faults = Faults()
    with in_process() as server, faulty_client(server, faults) as client:
        tms = Tms(client)
        with client.producer("default:orders", "idempotent") as producer:
            for number, value in enumerate(values):
                if number % 3 == 0:
                    faults.at("publish", "after", 2)
                producer.publish([value.encode()])
        assert tms.read("orders", committed=True) == values
    assert kafka.read("orders", committed=True) == values
