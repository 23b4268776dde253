"""Which batches of a query are published: markers, each published in the transaction of its batch.

Whether there is one has to be known for certain. Markers are looked up one by one, since a transaction that is still
open would hide all behind it: that of a driver that was killed is open until its time is over, and is invalidated here,
which also lets the topic's readers go on. And all transactions of one query change the same key, so of two drivers of
one query, or of a driver and a commit that was on its way when the former was killed, one is refused.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from janitor.spark.stream.checkpoint import PlannedBatch
from janitor.spark.stream.messages import messages
from janitor.spark.stream.offsets import EARLIEST, StreamPosition
from tms_core.client import (
    Client,
    Forbidden,
    Invalidated,
    MessageId,
    Participant,
    RollbackRange,
    TopicExists,
    TopicId,
    TopicNotFound,
    Transaction,
    TransactionClient,
    TransactionContext,
)
from tms_core.errors import Refused
from tms_core.rowkey import Cutoff
from tms_core.transaction.model import TX_PER_MS

logger = logging.getLogger(__name__)

#: How long markers are kept, in seconds: longer than a query is away and then goes on from its checkpoint.
MARKERS_TTL_SECONDS = 30 * 86_400


class Marker(NamedTuple):
    """That a batch was published, if its transaction is committed.

    Attributes:
        id: where it stands among the markers.
        batch: which batch.
        pointer: the transaction's id.
    """

    id: MessageId
    batch: PlannedBatch
    pointer: int


@dataclass
class History:
    """Which batches of a query are published.

    Attributes:
        query: the query's id.
        topic, markers: the topics.
        first_batch: the first batch that a person says is not published; None: none was named.
    """

    query: str
    topic: TopicId
    markers: TopicId
    first_batch: int | None
    _last: PlannedBatch | None = None
    _read: StreamPosition = EARLIEST
    _open: list[Marker] = field(default_factory=list)

    def has(
        self, client: Client, service: TransactionClient, transaction: TransactionContext, batch: PlannedBatch
    ) -> bool:
        """Whether a batch is published.

        Args:
            client: reads markers.
            service: is told of transactions whose owner will not end them.
            transaction: in which it would be published; what commits after its begin conflicts with it.
            batch: which batch.

        Raises:
            Refused: it cannot be told, or a later one is published, or another one of its number.
        """
        self._look(client)
        # A transaction is decided once and for all, but not yet where it is still open.
        for marker in reversed(self._open):
            if self._is_committed(transaction, marker.id):
                self.published(marker.batch)
                break
        last, number = self._last, batch.number
        if last is None and self._may_be_forgotten(client, transaction, batch):
            raise Refused(
                f"Batch {number} of query {self.query} may be published in {self.topic} or not: its markers in "
                f"{self.markers} have expired, or it began without.",
                f"Look whether it is, and give first_batch={number} if not, first_batch={number + 1} if so.",
            )
        if last is not None and last != batch and last.number >= number:
            raise Refused(
                f"Query {self.query} has published batch {last} in {self.topic}, and comes with batch {batch}: its "
                "checkpoint is an old one, or a copy.",
                "Give the query a new checkpointLocation, and as startingPosition where it is to go on.",
            )
        if last == batch:
            return True
        for marker in self._open:
            if transaction.transaction.is_in_progress(marker.pointer):
                service.invalidate(marker.pointer)
        return False

    def published(self, batch: PlannedBatch) -> None:
        """A batch is published."""
        self._last = batch if self._last is None else max(batch, self._last)
        self._open = [marker for marker in self._open if marker.batch > self._last]

    def text(self, transaction: Transaction, batch: PlannedBatch) -> bytes:
        """What a marker says; the id of its transaction is there for those who find it open."""
        names = {"query": self.query, "topic": str(self.topic), "batch": batch.number, "planned_ms": batch.ms}
        return json.dumps({**names, "transaction": str(transaction.transaction_id)}).encode()

    def _look(self, client: Client) -> None:
        """Read the markers that came since."""
        for message in messages(client, self.markers, self._read, view=None):
            self._read = StreamPosition.behind(message.id)
            try:
                given = json.loads(message.payload)
                if (given["query"], given["topic"]) == (self.query, str(self.topic)):
                    batch = PlannedBatch(int(given["batch"]), int(given["planned_ms"]))
                    self._add(Marker(message.id, batch, int(given["transaction"])))
            except (ValueError, KeyError, TypeError):
                logger.warning("%s has a message that is no marker: %s", self.markers, message.id)

    def _add(self, marker: Marker) -> None:
        """Keep a marker, and those of the batch before it: one is only tried when all before that are published."""
        numbers = [found.batch.number for found in self._open]
        before = max((number for number in numbers if number < marker.batch.number), default=0)
        self._open = [found for found in self._open if found.batch.number >= before]
        self._open.append(marker)

    def _may_be_forgotten(self, client: Client, transaction: TransactionContext, batch: PlannedBatch) -> bool:
        """Whether a batch may be published although its query has no marker."""
        if self.first_batch is not None or batch.number > 0:
            return batch.number != self.first_batch
        now_ms = transaction.transaction.transaction_id // TX_PER_MS
        return Cutoff.at(now_ms, client.topic(self.markers).ttl_seconds).expires(batch.ms)

    def _is_committed(self, transaction: TransactionContext, marker: MessageId) -> bool:
        """Whether a message is seen in a transaction that skips all before it."""
        with transaction.poll(self.markers, start=marker, limit=1) as found:
            first = next(found, None)
        return first is not None and first.id == marker


class Marking(Participant):
    """The marker of a batch, as what takes part in its transaction: written when all messages are at the server.

    Args:
        client: publishes it.
        history: whose it is.
        batch: which batch.
        transaction: the transaction.
    """

    def __init__(self, client: Client, history: History, batch: PlannedBatch, transaction: Transaction) -> None:
        self._client = client
        self._history = history
        self._batch = batch
        self._transaction = transaction
        self._tried = False
        self._written: RollbackRange | None = None

    def tx_changes(self) -> list[bytes]:
        """Of two transactions of one query that overlap, one is refused."""
        return [f"batches:{self._history.query}:{self._history.topic}".encode()]

    def commit_tx(self) -> None:
        text = self._history.text(self._transaction, self._batch)
        self._tried = True
        self._written = self._client.publish(self._history.markers, [text], transaction=self._transaction)

    def rollback_tx(self) -> None:
        if self._written is not None:
            self._client.rollback(self._history.markers, self._written)
        elif self._tried:
            raise Invalidated(f"Whether the marker of batch {self._batch.number} is written is not known.")


def require_topic(client: Client, markers: TopicId) -> None:
    """See that there is a topic for markers.

    Raises:
        Forbidden: there is none, and it may not be made.
    """
    try:
        client.topic(markers)
    except TopicNotFound:
        _create(client, markers)


def _create(client: Client, markers: TopicId) -> None:
    try:
        client.create_topic(markers, ttl=MARKERS_TTL_SECONDS)
    except TopicExists:
        return
    except Forbidden as error:
        raise Forbidden(
            f"{markers} has to be made, in which batches are noted: {error.message}",
            f"Have an administrator make it with a ttl of {MARKERS_TTL_SECONDS} s or more, or name another as markers.",
        ) from error
