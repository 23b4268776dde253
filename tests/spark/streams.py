"""Streams without Spark: the tests plan and read them like Spark, with a server in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from janitor.spark.stream import feed as feeds
from janitor.spark.stream.feed import Feed
from janitor.spark.stream.stream import StreamReader
from tests.builders import NOW_MS
from tests.client.faults import SOON, no_pause
from tms_core.client import Client, Transaction
from tms_core.client.testing import InProcess, in_process
from tms_core.clock import ManualClock
from tms_core.errors import TmsError

ORDERS = "default:orders"
#: Spark's error on a machine that is too busy to start Python in time.
TOO_BUSY = "Python worker failed to connect back"
_ATTEMPTS = 10
#: The serialization of tasks by Spark.
_DUMPS: Callable[[object], bytes] = cloudpickle.dumps
#: The ttl of the topic, in seconds.
TTL_SECONDS = 3600


@dataclass
class Query:
    """A query with its checkpoint."""

    server: InProcess
    clock: ManualClock
    options: dict[str, str]
    offsets: list[str] = field(default_factory=list)
    reader: StreamReader | None = None

    def plan(self, limit: ReadLimit | None = None) -> bool:
        self.reader = self.reader or self.new_reader()
        start = self._start(len(self.offsets))
        end = self.reader.latestOffset(start, limit or self.reader.getDefaultReadLimit())
        if end == start:
            return False
        self.offsets.append(json.dumps(end))
        return True

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Return the rows of a batch, read by the current or a new reader."""
        return [row for part in self.parts(number) for row in part]

    def parts(self, number: int) -> list[list[dict[str, Any]]]:
        reader = self.reader or self.new_reader()
        parts = reader.partitions(self._start(number), json.loads(self.offsets[number]))
        found = []
        for part in parts:
            task = self.new_reader()
            found.append([row for batch in task.read(_sent(part)) for row in batch.to_pylist()])
        return found

    def payloads(self, number: int) -> list[bytes]:
        return [row["payload"] for row in self.rows(number)]

    def all_payloads(self) -> list[bytes]:
        return [payload for number in range(len(self.offsets)) for payload in self.payloads(number)]

    def drain(self) -> list[bytes]:
        """Plan until no messages are left and return the payloads of all batches."""
        while self.plan():
            pass
        return self.all_payloads()

    def kill(self) -> None:
        """Discard everything but the checkpoint."""
        if self.reader is not None:
            self.reader.stop()
        self.reader = None

    def new_reader(self) -> StreamReader:
        given = {"url": "http://in.process", "topic": ORDERS, **self.options}
        return StreamReader(Feed.parse(given), self.clock)

    def _start(self, number: int) -> dict[str, Any]:
        reader = self.reader or self.new_reader()
        found: dict[str, Any] = json.loads(self.offsets[number - 1]) if number else reader.initialOffset()
        return found


@dataclass
class StreamKit:
    """A server with topics, its clock and client, and queries of streams."""

    server: InProcess
    clock: ManualClock
    client: Client
    queries: list[Query] = field(default_factory=list)

    def query(self, **options: object) -> Query:
        found = Query(self.server, self.clock, {name: str(value) for name, value in options.items()})
        self.queries.append(found)
        return found

    def publish(self, *payloads: bytes | str | int, pause_ms: int = 1) -> None:
        """Publish messages outside transactions, each at its own time."""
        for payload in payloads:
            self.clock.advance(pause_ms)
            self.client.publish(ORDERS, [_bytes(payload)])

    def begin(self, *payloads: bytes | str | int, long: bool = False) -> Transaction:
        found = self.server.manager.start_long() if long else self.server.manager.start_short()
        self.clock.advance(1)
        self.client.publish(ORDERS, [_bytes(payload) for payload in payloads], transaction=found)
        return found

    def commit(self, transaction: Transaction) -> None:
        self.server.manager.commit(transaction.transaction_id)

    def invalidate(self, transaction: Transaction) -> None:
        self.server.manager.invalidate(transaction.transaction_id)

    def committed(self, topic: str = ORDERS) -> list[bytes]:
        """Return the payloads that a reader in a transaction sees."""
        with self.client.transaction() as transaction:
            return [message.payload for message in transaction.poll(topic)]


@contextmanager
def scene(patch: pytest.MonkeyPatch) -> Iterator[StreamKit]:
    """Yield a server with the topics ``default:orders`` and ``default:bills``."""
    clock = ManualClock(NOW_MS)
    with in_process(clock=clock) as server, server.client() as client:

        def connect(*_: object) -> Client:
            return server.client(retry=SOON, pause=no_pause)

        patch.setattr(feeds, "connect", connect)
        client.create_topic(ORDERS, ttl=TTL_SECONDS)
        client.create_topic("default:bills")
        made = StreamKit(server, clock, client)
        yield made
        for query in made.queries:
            query.kill()


def _sent(part: InputPartition) -> InputPartition:
    """Return an object after serialization."""
    found: InputPartition = cloudpickle.loads(_DUMPS(part))
    return found


def _bytes(payload: bytes | str | int) -> bytes:
    return payload if isinstance(payload, bytes) else str(payload).encode()


def retry_if_busy(work: Callable[[], object]) -> None:
    """Run a job again if the machine was too busy to start Python within Spark's 10 seconds."""
    for _ in range(_ATTEMPTS - 1):
        try:
            work()
        except TmsError as error:
            if TOO_BUSY not in error.message:
                raise
        else:
            return
    work()


def read_all() -> ReadLimit:
    """Return the limit of a query that reads all messages in one batch."""
    return ReadAllAvailable()


def texts(*payloads: str | int) -> list[bytes]:
    return [_bytes(payload) for payload in payloads]
