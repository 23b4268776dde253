"""``spark.readStream.format("tms")``: a topic as a stream that delivers each message exactly once.

The driver plans a batch by reading it: an open transaction blocks all messages after its first one, and only a read
finds that limit. The batch's offset stores the positions and message counts, and the tasks read the messages again.
Therefore the server sends each message twice, and the driver keeps no messages in memory.

**Why a repeated read of a batch returns the same messages.** Message ids of a topic only grow, and no reader passes the
lowest unacknowledged id (``tms_core.server.ha.sealed_ranges`` guarantees this across leaders). Therefore no message
can appear before a batch's end later. All transactions of the batch had finished when it was planned, and an outcome is
final: committed rows stay committed, and the invalid list hides invalid rows until they are inverted (rule L4).
Messages may expire, and the topic may be created again; each task counts its messages and detects both. The planner's
transaction does not have to stay open, because a later view shows the same messages.

At least one task reads each partition with messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from janitor.spark.stream.feed import Feed
from janitor.spark.stream.messages import messages
from janitor.spark.stream.offsets import START_OFFSET, StreamOffset, Stretch
from janitor.spark.stream.planner import Planner, report_loss
from tms_core.client import Message, TopicId, Transaction
from tms_core.client.consume.consuming import IDLE
from tms_core.clock import Clock, SystemClock
from tms_core.errors import Refused, TopicNotFound

#: The columns of a stream.
STREAM_SCHEMA = StructType(
    [
        StructField("id", StringType()),
        StructField("namespace", StringType()),
        StructField("topic", StringType()),
        StructField("generation", IntegerType()),
        StructField("publish_ms", LongType()),
        StructField("published", TimestampType()),
        StructField("sequence", IntegerType()),
        StructField("payload", BinaryType()),
    ]
)
#: The limits of an Arrow batch in rows and payload bytes; the message that reaches the byte limit is included.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 4_000_000
#: The last millisecond that a Python timestamp can represent.
_LAST_MS = 253_402_300_799_999


class StretchPartition(InputPartition):
    """The input of one task.

    Args:
        stretch: the range of messages to read.
        topic, generation: the topic or partition of the messages.
        view: the transaction whose view filters the messages; None: the task reads uncommitted messages, too.
    """

    def __init__(self, stretch: Stretch, topic: str, generation: int, view: Transaction | None) -> None:
        self.stretch = stretch
        self.topic = TopicId.parse(topic)
        self.generation = generation
        self.view = view


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's reader of a stream: the driver plans batches, and tasks read their ranges.

    Args:
        feed: the source of the messages.
        clock: the clock for expiry and waits.
    """

    def __init__(self, feed: Feed, clock: Clock | None = None) -> None:
        self._feed = feed
        self._clock = clock or SystemClock()
        self._random = Random()  # noqa: S311 it spreads pauses
        self._opened: Planner | None = None
        self._quiet = 0

    @property
    def _planner(self) -> Planner:
        """Return the planner, created on first use: tasks unpickle a reader too, and do not need a connection."""
        self._opened = self._opened or Planner(self._feed, self._clock)
        return self._opened

    # --- in the driver -----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the empty offset: Spark does not store it, and requests it again after a crash in the first batch."""
        return dict(START_OFFSET)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._feed.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._planner.freeze_end()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, or ``start`` without new messages. Raises as :meth:`Planner.next` does.

        Without new messages, Spark calls again immediately. Therefore this method backs off, like an idle consumer.
        """
        if self._quiet:
            self._clock.sleep(IDLE.pause_seconds(self._quiet, self._random))
        before = StreamOffset.parse(start, str(self._feed.topic))
        found = self._planner.next(before, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        if found == before:
            self._quiet += 1
            return start
        self._quiet = 0
        return found.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the input partitions of a batch, which the batch's end offset stores.

        Raises:
            Refused: the batch does not start where the previous batch ended.
        """
        topic = str(self._feed.topic)
        first, last = StreamOffset.parse(start, topic), StreamOffset.parse(end, topic)
        found = [part for part in last.parts if part.stretches] if last and first != last else []
        for part in found:
            before = first and first.before(part)
            if before and before.at != part.stretches[0].first:
                raise Refused(
                    f"The checkpoint has a batch that starts at {part.stretches[0].first}, but the previous batch "
                    f"ended at {before.at}.",
                    "Give the query a separate checkpointLocation.",
                )
        view = self._planner.view() if found else None
        return [
            StretchPartition(stretch, part.topic, part.generation, view) for part in found for stretch in part.stretches
        ]

    def stop(self) -> None:
        """Close the connections; a second call has no effect."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # --- in a task ---------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition, as Arrow batches.

        Raises:
            Refused: the messages differ from the plan, and ``failOnDataLoss`` is set.
        """
        part = cast(StretchPartition, partition)
        stretch, count, last = part.stretch, 0, None
        for page in self._pages(part):
            count, last = count + len(page), page[-1].id
            yield self._to_arrow(page, part)
        if (count, last) != (stretch.messages, stretch.last):
            report_loss(
                self._feed,
                f"A batch of {part.topic} was planned with {stretch.messages} messages up to {stretch.last}, but its "
                f"task read {count} messages: messages have expired, or the topic was created again.",
            )

    def _pages(self, part: StretchPartition) -> Iterator[list[Message]]:
        feed, stretch = self._feed, part.stretch
        # A transaction that is still open may store more payloads under a known id: no limit for uncommitted reads.
        limit = stretch.messages if feed.committed else None
        page: list[Message] = []
        size = 0
        with feed.client() as client:
            try:
                is_same = client.topic(part.topic).generation == part.generation
            except TopicNotFound:
                # The server drops empty partitions after their number changed.
                is_same = False
            if not is_same:
                return
            for message in messages(client, part.topic, stretch.first, view=part.view, limit=limit):
                if message.id > stretch.last:
                    break
                page.append(message)
                size += len(message.payload)
                if len(page) == _BATCH_ROWS or size >= _BATCH_BYTES:
                    yield page
                    page, size = [], 0
        if page:
            yield page

    def _to_arrow(self, page: list[Message], part: StretchPartition) -> Any:
        topic, rows = part.topic, len(page)
        ids = [message.id for message in page]
        columns = {
            "id": pa.array([str(found) for found in ids], pa.string()),
            "namespace": pa.repeat(topic.namespace, rows),
            "topic": pa.repeat(topic.topic, rows),
            "generation": pa.repeat(pa.scalar(part.generation, pa.int32()), rows),
            "publish_ms": pa.array([found.publish_ms for found in ids], pa.int64()),
            "published": pa.array([min(found.publish_ms, _LAST_MS) * 1000 for found in ids], pa.timestamp("us", "UTC")),
            "sequence": pa.array([found.sequence for found in ids], pa.int32()),
            "payload": pa.array([message.payload for message in page], pa.binary()),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in STREAM_SCHEMA.names], STREAM_SCHEMA.names)
