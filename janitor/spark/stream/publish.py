"""``publish_batches``: publish the results of a stream to a topic, each batch exactly once, in one transaction.

Spark repeats a batch after a crash between the batch and its commit log. Therefore the query is a producer
(:mod:`tms_core.messaging.producers`), and the batch number labels its transaction. A driver that starts a batch learns
the outcome of the previous transaction, and fences older drivers. A restored or copied checkpoint can have a different
batch with the same number, which must not count as published. Spark plans a batch once: it stores the batch's offset
and time, and reads both again after a crash. Therefore number and time together identify a batch, and
:class:`BatchPublisher` refuses a different batch with a known number. It reads the checkpoint's files through Spark,
because only Spark can open every kind of checkpoint location.

Executors store the payloads, invisible to readers. Each attempt of a task has its own write pointer, a checkpoint of
the batch's transaction. Just before the commit, the driver publishes the pointers that the tasks returned, in the order
of the partitions. Therefore payloads of failed or still running attempts are never published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, StringType

from janitor.spark.stream.feed import connect, parse_topic
from tms_core.client import Client, NotInProgress, Timeouts, TopicId, Transaction, TransactionClient
from tms_core.client.protocol.endpoint import service_at
from tms_core.client.protocol.messages import time_at
from tms_core.client.protocol.producer_calls import PreviousTransaction
from tms_core.client.sync import DEFAULT_TRANSACTIONS
from tms_core.errors import ConfigurationError, MessagingError, Refused
from tms_core.messaging.topics.partitions import layout_of
from tms_core.transaction.model import transaction_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["publish_batches"]

#: The default timeout of a batch's transaction, in seconds. The transaction blocks readers only during its commit.
TIMEOUT_SECONDS = 300
#: The time limit for the check of the topic before the first batch, in seconds.
_CHECK_SECONDS = 5
#: The limits of one request in messages and bytes; the message that reaches the byte limit is included.
_CHUNK_ROWS, _CHUNK_BYTES = 1_000, 1_000_000
#: The time after which the janitor deletes the state of an idle producer, in milliseconds.
_PRODUCER_EXPIRY_MS = 7 * 86_400_000
#: The wildcards of Spark's file names, which are escaped because they are literal in a checkpoint's name.
_WILDCARDS = re.compile(r"[\\*?\[\]{}]")


def publish_batches(
    url: str,
    topic: str,
    checkpoint: str,
    *,
    column: str = "payload",
    transactions: str = DEFAULT_TRANSACTIONS,
    token_file: str | None = None,
    ca_file: str | None = None,
    timeout_seconds: int = TIMEOUT_SECONDS,
    first_batch: int | None = None,
    ttl_seconds: int | None = None,
) -> BatchPublisher:
    """Return a function for ``foreachBatch`` that publishes each batch exactly once, in one transaction.

    Args:
        url: the URL of the server.
        topic: the destination, as ``namespace:topic``; for a partitioned topic, one of its partitions.
        checkpoint: the query's ``checkpointLocation``. It has the query's id, which identifies its batches; a new
            checkpoint is a new query, whose batch numbers restart.
        column: the column to publish, bytes or text; messages keep the order of the partitions and of their rows.
        transactions: ``HOST:PORT`` of the transaction service; executors call it, too.
        token_file, ca_file: the files of the client's token and of the server's CA, on the driver and the executors.
        timeout_seconds: the timeout of a batch's transaction.
        first_batch: the first batch to publish; earlier batches are skipped. Set it only after you have checked that
            all earlier batches are published and this batch is not. None: batch 0, unless Spark planned it so long ago
            that the server may have deleted the query's state.
        ttl_seconds: the TTL of the messages in whole seconds, if it is shorter than the topic's TTL.

    Raises:
        ConfigurationError: an argument is invalid, or the topic is partitioned.
    """
    target = parse_topic(topic)
    if timeout_seconds < 1:
        raise ConfigurationError(f"timeout_seconds is {timeout_seconds}.", "Set it to 1 or more.")
    if ttl_seconds is not None and ttl_seconds < 1:
        raise ConfigurationError(f"ttl_seconds is {ttl_seconds}.", "Set it to 1 or more.")
    with connect(url, transactions, token_file, ca_file) as client:
        _require_no_partitions(client, target)
    server = _ServerOptions(url, transactions, token_file, ca_file, timeout_seconds)
    return BatchPublisher(server, target, checkpoint, column, first_batch, ttl_seconds)


def _require_no_partitions(client: Client, topic: TopicId) -> None:
    """Check that a topic has no partitions; if the server does not respond, leave the check to the first batch.

    Raises:
        ConfigurationError: the topic has partitions.
    """
    try:
        storage_topic = _storage_topic(client.within(_CHECK_SECONDS), topic)
    except MessagingError:
        return
    if storage_topic != topic:
        raise ConfigurationError(
            f"Topic {topic} has its messages in partitions, and a query publishes to one topic.",
            f"Set topic to one of them, such as {storage_topic}.",
        )


def _storage_topic(client: Client, topic: TopicId) -> TopicId:
    """Return a topic that stores messages: the topic itself, or the first partition of its first route."""
    layout = layout_of(topic, client.topic(topic).properties)
    if layout is None:
        return topic
    return _storage_topic(client, layout.route(layout.routes[0])) if layout.routes else layout.place(0)


class _ServerOptions(NamedTuple):
    """The server of the topic, and how to connect to it."""

    url: str
    transactions: str
    token_file: str | None
    ca_file: str | None
    timeout_seconds: int

    def client(self) -> tuple[Client, TransactionClient]:
        """Return clients of the server and of the transaction service, in the driver or in a task."""
        service = service_at(self.transactions, Timeouts())
        return connect(self.url, service, self.token_file, self.ca_file), service


@dataclass(frozen=True)
class BatchPublisher:
    """A publisher of the batches of one query; it can be pickled, because Spark Connect sends it to its server.

    Attributes:
        server: the server of the topic.
        topic: the destination.
        checkpoint: the query's ``checkpointLocation``.
        column: the column with the payloads.
        first_batch: the first batch to publish; None: batch 0.
        ttl_seconds: the TTL of the messages; None: the topic's TTL.
    """

    server: _ServerOptions
    topic: TopicId
    checkpoint: str
    column: str
    first_batch: int | None
    ttl_seconds: int | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Publish a batch, unless it is published already.

        Raises:
            ConfigurationError: the column is missing or invalid, or the checkpoint is not the query's.
            Refused: it is unknown whether the batch is published, or a later or different batch is published.
            ProducerFenced: another driver of the same query is running.
            NotInProgress: the transaction timed out, or another driver has started; nothing is published.
            TransactionError, MessagingError: as for a commit (docs/how-to/transactions.md); Spark repeats the batch.
        """
        if self.first_batch is not None and batch_id < self.first_batch:
            return
        _check(batch, self.column)
        known = planned(batch.sparkSession, self.checkpoint, batch_id)
        query = query_id(batch.sparkSession, self.checkpoint)
        client, _ = self.server.client()
        try:
            with client, client.producer(self.topic, query) as producer:
                label = f"{known.number} {known.ms}"
                with producer.transaction(label, timeout_seconds=self.server.timeout_seconds) as transaction:
                    now_ms = transaction_ms(transaction.transaction.transaction_id)
                    if self._is_published(known, producer.previous, query, now_ms):
                        transaction.roll_back()
                        return
                    rows = batch.select(batch[self.column].cast("binary"))
                    pointers = _store_rows(
                        rows, _Storing(self.server, self.topic, self.column, transaction.transaction)
                    )
                    transaction.publish_stored(self.topic, pointers, self.ttl_seconds)
        except NotInProgress as error:
            raise NotInProgress(
                f"Batch {batch_id} exceeded its transaction timeout of {self.server.timeout_seconds} s, or another "
                "driver of the query aborted the transaction; the batch is not published.",
                "Raise timeout_seconds, or lower maxMessagesPerBatch for the following batches.",
            ) from error

    def _is_published(self, batch: PlannedBatch, previous: PreviousTransaction | None, query: str, now_ms: int) -> bool:
        """Return whether a batch is published, according to the outcome of the query's previous transaction.

        Raises:
            Refused: the answer is unknown, or a later batch or a different batch with its number is published.
        """
        if previous is None:
            if batch.number == self.first_batch:
                return False
            if batch.number > 0 or batch.ms + _PRODUCER_EXPIRY_MS < now_ms:
                raise Refused(
                    f"It is not known whether batch {batch.number} of query {query} is published in {self.topic}: "
                    "the server has deleted the state of the idle query, or the topic was created again.",
                    f"Check whether the batch is in the topic: if not, set first_batch={batch.number}; if so, set "
                    f"first_batch={batch.number + 1}.",
                )
            return False
        last, committed = PlannedBatch(*map(int, previous.label.split())), previous.outcome == "committed"
        if last.number > batch.number or (committed and last.number == batch.number and last != batch):
            raise Refused(
                f"Query {query} has published batch {last} to {self.topic}, but now sends batch {batch}: its "
                "checkpoint is outdated, or a copy.",
                "Give the query a new checkpointLocation, and set startingPosition to where it should continue.",
            )
        return committed and last == batch


@dataclass(frozen=True)
class _Storing:
    """A task's function, which stores the payloads of a partition and yields the partition's number and pointer."""

    server: _ServerOptions
    topic: TopicId
    column: str
    transaction: Transaction

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chunks = _chunks((value.as_py() for batch in batches for value in batch.column(0)), self.column)
        first = next(chunks, None)
        if first is None:
            return
        client, service = self.server.client()
        with client:
            own = service.checkpoint(self.transaction)
            for chunk in chain([first], chunks):
                client.store(self.topic, chunk, transaction=own)
        context = TaskContext.get()
        at = 0 if context is None else context.partitionId()
        yield pa.RecordBatch.from_pydict({"at": [at], "pointer": [own.write_pointer]})


def _store_rows(rows: DataFrame, storing: _Storing) -> list[int]:
    """Store a batch's payloads in tasks; return the successful attempts' pointers, in the order of the partitions."""
    found = rows.mapInArrow(storing, "at long, pointer long").collect()
    return [pointer for _, pointer in sorted((row[0], row[1]) for row in found)]


def _check(batch: DataFrame, column: str) -> None:
    fields = {found.name: found.dataType for found in batch.schema.fields}
    if column not in fields:
        raise ConfigurationError(
            f"{column} is not a column of the batch.", f"Set column to one of {', '.join(fields)}."
        )
    if not isinstance(fields[column], BinaryType | StringType):
        raise ConfigurationError(
            f"Column {column} is of type {fields[column].simpleString()}.", "Make it binary or string: to_json(…)."
        )


def _chunks(values: Iterable[Any], column: str) -> Iterator[list[bytes]]:
    """Yield values in lists that fit into one request each."""
    chunk: list[bytes] = []
    size = 0
    for value in values:
        if value is None:
            raise ConfigurationError(
                f"Column {column} has a row without a value.", "Filter rows with null, or replace null."
            )
        chunk.append(bytes(value))
        size += len(chunk[-1])
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# -- the files of a query's checkpoint ---------------------------------------------------------------------------------


class PlannedBatch(NamedTuple):
    """A batch, identified across copies of a checkpoint.

    Attributes:
        number: the batch number in the query.
        ms: the time when Spark planned the batch, by the driver's clock.
    """

    number: int
    ms: int

    def __str__(self) -> str:
        return f"{self.number} (planned {time_at(self.ms):%Y-%m-%d %H:%M:%S} UTC)"


def query_id(spark: SparkSession, checkpoint: str) -> str:
    """Return the query's id.

    Raises:
        ConfigurationError: the checkpoint does not exist, or is not the query's.
    """
    return str(_checkpoint_entry(spark, checkpoint, "metadata", "id"))


def planned(spark: SparkSession, checkpoint: str, batch: int) -> PlannedBatch:
    """Return a batch by its number; raises as :func:`query_id` does."""
    return PlannedBatch(batch, int(_checkpoint_entry(spark, checkpoint, f"offsets/{batch}", "batchTimestampMs")))


def _checkpoint_entry(spark: SparkSession, checkpoint: str, name: str, key: str) -> Any:
    """Return a value of the first JSON object in a file; a line with the format version may precede it."""
    file = f"{checkpoint.rstrip('/')}/{name}"
    try:
        lines = [str(row[0]) for row in spark.read.text(_WILDCARDS.sub(r"\\\g<0>", file)).collect()]
        return json.loads(next(line for line in lines if line.startswith("{")))[key]
    except (PySparkException, StopIteration, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"checkpoint is {checkpoint}, which is not the checkpoint of this query: {file} has no {key}.",
            "Set checkpoint to the query's checkpointLocation.",
        ) from error
