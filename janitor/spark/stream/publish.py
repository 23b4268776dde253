"""``publish_batches``: what a stream has made goes into a topic, each batch in one transaction and once.

Spark does a batch again if it ends between doing it and writing that down. So the batch's number is published with it,
as a *marker* in a topic beside: in the same transaction, and so exactly if the batch is. A batch that is done again
finds its marker and does nothing. Another batch of that number, from a checkpoint that was put back or copied, would be
lost if it did nothing: it is told by when it was planned (:mod:`janitor.spark.stream.checkpoint`), and is refused.

Messages go to the server while the batch is computed (``tms_core.client.outbox``), where no reader sees them; rows that
hold back readers are written last, just before the commit. The price of all this is a small message for each batch, and
a small file that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.types import BinaryType, StringType

from janitor.spark.stream.checkpoint import planned, query_id
from janitor.spark.stream.feed import connect, named
from janitor.spark.stream.markers import History, Marking, require_topic
from tms_core.client import Client, ConfigurationError, NotInProgress, Timeouts, TopicId
from tms_core.client.site import service_at
from tms_core.client.sync import DEFAULT_TRANSACTIONS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: How long a batch's transaction may take, in seconds. Nothing of it holds up readers before its last moment.
TIMEOUT_SECONDS = 300
#: What is handed over at a time; one message may be larger.
_CHUNK_ROWS, _CHUNK_BYTES = 1_000, 1_000_000


def publish_batches(
    url: str,
    topic: str,
    checkpoint: str,
    *,
    column: str = "payload",
    transactions: str = DEFAULT_TRANSACTIONS,
    token_file: str | None = None,
    ca_file: str | None = None,
    markers: str | None = None,
    timeout_seconds: int = TIMEOUT_SECONDS,
    first_batch: int | None = None,
    ttl_seconds: int | None = None,
) -> BatchPublisher:
    """What ``foreachBatch`` calls to have each batch published in one transaction, and once.

    Args:
        url: of the server.
        topic: where to, as ``namespace:topic``.
        checkpoint: the query's ``checkpointLocation``. It has the query's id, by which its batches are told from
            those of others; a new checkpoint is a new query, whose batches begin anew.
        column: whose values are published, bytes or text; in the order of the partitions, and of rows in them.
        transactions: ``HOST:PORT`` of the transaction service.
        token_file, ca_file: as of the client.
        markers: the topic beside it in which batches are noted; None: the topic's name and ``-batches``. It is made
            where there is none.
        timeout_seconds: after how long a batch's transaction is given up.
        first_batch: the first batch to publish, given by a person who has checked that it is not published yet and
            those before it are; None: the query's first, unless it was planned so long ago that its marker may have
            expired.
        ttl_seconds: how long these messages live, where that is shorter than the topic's ttl; whole seconds.

    Raises:
        ConfigurationError: an argument is wrong.
    """
    target = named(topic)
    beside = named(markers or f"{topic}-batches")
    if beside == target:
        raise ConfigurationError("markers is the topic itself.", "Give another one: its readers would see markers.")
    if timeout_seconds < 1:
        raise ConfigurationError(f"timeout_seconds is {timeout_seconds}.", "Give 1 or more.")
    if ttl_seconds is not None and ttl_seconds < 1:
        raise ConfigurationError(f"ttl_seconds is {ttl_seconds}.", "Give 1 or more.")
    connect(url, transactions, token_file, ca_file).close()
    site = _Site(url, transactions, token_file, ca_file, timeout_seconds)
    return BatchPublisher(site, target, beside, checkpoint, column, first_batch, ttl_seconds)


class _Site(NamedTuple):
    """Where a batch goes."""

    url: str
    transactions: str
    token_file: str | None
    ca_file: str | None
    timeout_seconds: int


@dataclass
class BatchPublisher:
    """Publishes the batches of one query, one after the other; Spark Connect may send it elsewhere.

    Attributes:
        site: where to.
        topic, markers: the topics.
        checkpoint: where the query's id is.
        column: what is published.
        first_batch: the first batch.
        ttl_seconds: of its messages; None: as long as the topic's live.
    """

    site: _Site
    topic: TopicId
    markers: TopicId
    checkpoint: str
    column: str
    first_batch: int | None
    ttl_seconds: int | None = None
    _history: History | None = field(default=None, repr=False)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Publish a batch, unless it is published.

        Raises:
            ConfigurationError: the column is none of the batch, or the checkpoint none of a query.
            Refused: whether it is published cannot be told, or a later one is published.
            Conflict: another driver of the same query is at work.
            NotInProgress: it took too long, or another driver came; nothing is published.
            TransactionError, MessagingError: as of a transaction's end (docs/client.md); Spark does the batch again.
        """
        if self.first_batch is not None and batch_id < self.first_batch:
            return
        _check(batch, self.column)
        known = planned(batch.sparkSession, self.checkpoint, batch_id)
        service = service_at(self.site.transactions, Timeouts())
        with connect(self.site.url, service, self.site.token_file, self.site.ca_file) as client:
            history = self._known(client, batch, batch_id)
            try:
                with client.transaction(timeout_seconds=self.site.timeout_seconds) as transaction:
                    if history.has(client, service, transaction, known):
                        transaction.roll_back()
                        return
                    transaction.register(Marking(client, history, known, transaction.transaction))
                    for chunk in _chunks(batch, self.column):
                        transaction.publish(self.topic, chunk, ttl=self.ttl_seconds)
            except NotInProgress as error:
                raise NotInProgress(
                    f"Batch {batch_id} took longer than its transaction may, {self.site.timeout_seconds} s, or another "
                    "driver of the query has ended that; nothing of it is published.",
                    "Raise timeout_seconds, or lower maxMessagesPerBatch for batches to come.",
                ) from error
            history.published(known)

    def _known(self, client: Client, batch: DataFrame, batch_id: int) -> History:
        # A new query, with a new checkpoint in the place of the old one, begins with 0.
        if self._history is None or batch_id == 0:
            require_topic(client, self.markers)
            query = query_id(batch.sparkSession, self.checkpoint)
            self._history = History(query, self.topic, self.markers, self.first_batch)
        return self._history


def _check(batch: DataFrame, column: str) -> None:
    fields = {found.name: found.dataType for found in batch.schema.fields}
    if column not in fields:
        raise ConfigurationError(f"{column} is no column of the batch.", f"Set column to one of {', '.join(fields)}.")
    if not isinstance(fields[column], BinaryType | StringType):
        raise ConfigurationError(
            f"Column {column} is of type {fields[column].simpleString()}.", "Make it binary or string: to_json(…)."
        )


def _chunks(batch: DataFrame, column: str) -> Iterator[list[bytes]]:
    """The values in order, one partition at a time."""
    chunk: list[bytes] = []
    size = 0
    for row in batch.select(batch[column].cast("binary")).toLocalIterator():
        if row[0] is None:
            raise ConfigurationError(f"Column {column} has a row without a value.", "Filter such rows, or fill them.")
        chunk.append(bytes(row[0]))
        size += len(chunk[-1])
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk
