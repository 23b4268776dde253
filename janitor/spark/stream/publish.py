"""``publish_batches``: the results of a stream go to a topic, each batch in one transaction and once.

Spark repeats a batch if it stops between the batch and its record. Therefore the query is a producer
(:mod:`tms_core.messaging.producers`), and the batch's number labels its transaction. A driver that starts a batch gets
the outcome of the last one, and older drivers can no longer commit. Another batch with the same number, from a
checkpoint that was restored or copied, would be lost if it were mistaken for that one. Spark plans a batch once: it
stores the batch's last position and time, and reads both again after a crash. Therefore number and time together
identify a batch, and a different one is refused. Spark reads both files, because only Spark knows every place of a
checkpoint.

Executors store the payloads themselves, invisible to readers. Each attempt of a task has its own pointer, a checkpoint
of the batch's transaction. Just before the commit, the driver publishes the pointers that tasks returned, in the order
of the partitions. Therefore nothing of an attempt is published that failed, or still runs.
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

from janitor.spark.stream.feed import connect, named
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

#: The timeout of a batch's transaction, in seconds. It blocks readers only at its commit.
TIMEOUT_SECONDS = 300
#: The time limit for the check of the topic before the first batch, in seconds.
_ASKING_SECONDS = 5
#: The rows and bytes of one request; a single message may be larger.
_CHUNK_ROWS, _CHUNK_BYTES = 1_000, 1_000_000
#: The time after which the janitor forgets an idle producer, in milliseconds.
_FORGOTTEN_MS = 7 * 86_400_000
#: The wildcards in the names of files that Spark reads; in the name of a checkpoint they are literal.
_SPECIAL = re.compile(r"[\\*?\[\]{}]")


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
    """Return a function for ``foreachBatch`` that publishes each batch in one transaction, and once.

    Args:
        url: the URL of the server.
        topic: the destination, as ``namespace:topic``; for a topic with partitions, one of these.
        checkpoint: the query's ``checkpointLocation``. It has the query's id, which identifies its batches; a new
            checkpoint is a new query, whose batches restart.
        column: the column to publish, bytes or text; in the order of the partitions, and of rows in them.
        transactions: ``HOST:PORT`` of the transaction service; executors call it, too.
        token_file, ca_file: as of the client.
        timeout_seconds: the timeout of a batch's transaction.
        first_batch: the first batch to publish, set by an operator who has checked that it is not published yet and
            earlier ones are; None: the query's first batch, unless it was planned so long ago that the server may have
            forgotten the query.
        ttl_seconds: the TTL of these messages in whole seconds, if it is shorter than the topic's TTL.

    Raises:
        ConfigurationError: an argument is wrong, or the topic has its messages in partitions.
    """
    target = named(topic)
    if timeout_seconds < 1:
        raise ConfigurationError(f"timeout_seconds is {timeout_seconds}.", "Give 1 or more.")
    if ttl_seconds is not None and ttl_seconds < 1:
        raise ConfigurationError(f"ttl_seconds is {ttl_seconds}.", "Give 1 or more.")
    with connect(url, transactions, token_file, ca_file) as client:
        _require_no_partitions(client, target)
    server = _Target(url, transactions, token_file, ca_file, timeout_seconds)
    return BatchPublisher(server, target, checkpoint, column, first_batch, ttl_seconds)


def _require_no_partitions(client: Client, topic: TopicId) -> None:
    """Check that a topic has no partitions; without a response of the server, the first batch checks it.

    Raises:
        ConfigurationError: it has partitions.
    """
    try:
        taking = _taking(client.within(_ASKING_SECONDS), topic)
    except MessagingError:
        return
    if taking != topic:
        raise ConfigurationError(
            f"Topic {topic} has its messages in partitions, and a query publishes to one topic.",
            f"Set topic to one of them, such as {taking}.",
        )


def _taking(client: Client, topic: TopicId) -> TopicId:
    """Return the topic that takes the messages: itself, or its first partition."""
    layout = layout_of(topic, client.topic(topic).properties)
    if layout is None:
        return topic
    return _taking(client, layout.route(layout.routes[0])) if layout.routes else layout.place(0)


class _Target(NamedTuple):
    """The destination of batches."""

    url: str
    transactions: str
    token_file: str | None
    ca_file: str | None
    timeout_seconds: int

    def client(self) -> tuple[Client, TransactionClient]:
        """Return a client of the server, and of the transaction service; also in a task."""
        service = service_at(self.transactions, Timeouts())
        return connect(self.url, service, self.token_file, self.ca_file), service


@dataclass(frozen=True)
class BatchPublisher:
    """Publishes the batches of one query, one after the other; Spark Connect may send it elsewhere.

    Attributes:
        server: the server of the topic.
        topic: the topic.
        checkpoint: where the query's id is.
        column: published messages.
        first_batch: the first batch.
        ttl_seconds: of its messages; None: as long as the topic's live.
    """

    server: _Target
    topic: TopicId
    checkpoint: str
    column: str
    first_batch: int | None
    ttl_seconds: int | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Publish a batch, unless it is published already.

        Raises:
            ConfigurationError: the batch has no such column, or the checkpoint belongs to no query.
            Refused: it is unknown whether the batch is published, or a later batch is published.
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
                f"Batch {batch_id} took longer than its transaction may, {self.server.timeout_seconds} s, or another "
                "driver of the query has ended that; nothing of it is published.",
                "Raise timeout_seconds, or lower maxMessagesPerBatch for batches to come.",
            ) from error

    def _is_published(self, batch: PlannedBatch, previous: PreviousTransaction | None, query: str, now_ms: int) -> bool:
        """Return whether a batch is published, by the outcome of the query's last transaction.

        Raises:
            Refused: it is unknown, or a later batch or another batch with its number is published.
        """
        if previous is None:
            if batch.number == self.first_batch:
                return False
            if batch.number > 0 or batch.ms + _FORGOTTEN_MS < now_ms:
                raise Refused(
                    f"It is not known whether batch {batch.number} of query {query} is published in {self.topic}: "
                    "the query was stopped for so long that the server has forgotten it, or the topic was created "
                    "again.",
                    f"Check whether the batch is in the topic: if not, give first_batch={batch.number}; if so, give "
                    f"first_batch={batch.number + 1}.",
                )
            return False
        last, committed = PlannedBatch(*map(int, previous.label.split())), previous.outcome == "committed"
        if last.number > batch.number or (committed and last.number == batch.number and last != batch):
            raise Refused(
                f"Query {query} has published batch {last} in {self.topic}, and comes with batch {batch}: its "
                "checkpoint is an old one, or a copy.",
                "Give the query a new checkpointLocation, and as startingPosition where it is to go on.",
            )
        return committed and last == batch


@dataclass(frozen=True)
class _Storing:
    """The work of a task: it stores the payloads of its partition, and returns its number and write pointer."""

    server: _Target
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
    """Store a batch with tasks; return the pointers of successful attempts, in the order of the partitions."""
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
    """Yield values in order, in lists."""
    chunk: list[bytes] = []
    size = 0
    for value in values:
        if value is None:
            raise ConfigurationError(f"Column {column} has a row without a value.", "Filter such rows, or fill them.")
        chunk.append(bytes(value))
        size += len(chunk[-1])
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# -- the files of a query's checkpoint, which a batch does not contain -------------------------------------------------


class PlannedBatch(NamedTuple):
    """A batch of a query.

    Attributes:
        number: its number.
        ms: when Spark planned it, by the driver's clock.
    """

    number: int
    ms: int

    def __str__(self) -> str:
        return f"{self.number} (planned {time_at(self.ms):%Y-%m-%d %H:%M:%S} UTC)"


def query_id(spark: SparkSession, checkpoint: str) -> str:
    """Return the query's id.

    Raises:
        ConfigurationError: there is no such checkpoint.
    """
    return str(_checkpoint_entry(spark, checkpoint, "metadata", "id"))


def planned(spark: SparkSession, checkpoint: str, batch: int) -> PlannedBatch:
    """Return a batch by its number; raises as :func:`query_id` does."""
    return PlannedBatch(batch, int(_checkpoint_entry(spark, checkpoint, f"offsets/{batch}", "batchTimestampMs")))


def _checkpoint_entry(spark: SparkSession, checkpoint: str, name: str, key: str) -> Any:
    """Return a value from the first object in a file; before it there may be a version."""
    file = f"{checkpoint.rstrip('/')}/{name}"
    try:
        lines = [str(row[0]) for row in spark.read.text(_SPECIAL.sub(r"\\\g<0>", file)).collect()]
        return json.loads(next(line for line in lines if line.startswith("{")))[key]
    except (PySparkException, StopIteration, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"checkpoint is {checkpoint}, which is not that of this query: there is no {key} in {file}.",
            "Give the very checkpointLocation of the query.",
        ) from error
