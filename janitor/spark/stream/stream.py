"""``spark.readStream.format("tms")``: a topic's messages as a stream, each exactly once.

The driver plans a batch by reading it, because an open transaction holds back all messages after its first one, and
only reading shows that limit. The batch's offset stores the findings (positions, numbers), and tasks read the messages
themselves. Therefore each message is sent twice, and the driver keeps none.

**Why a batch is the same when it is read again.** Ids of a topic only grow, and no reader passes the lowest
unacknowledged id (``tms_core.server.ha.sealed_ranges`` guarantees this over a change of leaders). Therefore no message
can appear before a batch's end later. All messages of the batch were decided when it was planned, and a decision is
final: committed rows stay committed, and the invalid list hides invalid rows until they are inverted (rule L4).
Messages may expire, and the topic may be created again; each task counts its messages, so it notices both. The plan's
transaction need not stay open: a later view shows the same messages.

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
from janitor.spark.stream.planner import Planner, lost
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
#: The most messages of one Arrow batch, and the most bytes unless one message is larger.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 4_000_000
#: The last millisecond that a Python timestamp can represent.
_LAST_MS = 253_402_300_799_999


class StretchPartition(InputPartition):
    """The messages that one task reads.

    Args:
        stretch: the range of messages.
        topic, generation: the topic or partition of the messages.
        view: the committed transactions; None: the task reads all messages.
    """

    def __init__(self, stretch: Stretch, topic: str, generation: int, view: Transaction | None) -> None:
        self.stretch = stretch
        self.topic = TopicId.parse(topic)
        self.generation = generation
        self.view = view


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream for Spark: the driver plans batches, and tasks read their parts.

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
        """Return the planner; it is opened when it is needed, because tasks get a reader too."""
        self._opened = self._opened or Planner(self._feed, self._clock)
        return self._opened

    # --- in the driver -----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return no position: Spark does not keep it, and requests it again after a crash in the first batch."""
        return dict(START_OFFSET)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._feed.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._planner.stay()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch; ``start`` without new messages. Raises as :meth:`Planner.next` does.

        Spark calls again at once if there are no messages, so this method first waits for a while, like a consumer.
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
        """Return the parts of a batch, as its end stores them.

        Raises:
            Refused: the end does not belong to a batch with this start.
        """
        topic = str(self._feed.topic)
        first, last = StreamOffset.parse(start, topic), StreamOffset.parse(end, topic)
        found = [part for part in last.parts if part.stretches] if last and first != last else []
        for part in found:
            before = first and first.before(part)
            if before and before.at != part.stretches[0].first:
                raise Refused(
                    f"The checkpoint has a batch from {part.stretches[0].first} on, and the one before ended "
                    f"{before.at}.",
                    "Give the query a separate checkpointLocation.",
                )
        view = self._planner.view() if found else None
        return [
            StretchPartition(stretch, part.topic, part.generation, view) for part in found for stretch in part.stretches
        ]

    def stop(self) -> None:
        """Close connections; stopping twice is not an error."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # --- in a task ---------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a part, as Arrow batches.

        Raises:
            Refused: they differ from the planned messages.
        """
        part = cast(StretchPartition, partition)
        stretch, count, last = part.stretch, 0, None
        for page in self._pages(part):
            count, last = count + len(page), page[-1].id
            yield self._to_arrow(page, part)
        if (count, last) != (stretch.messages, stretch.last):
            lost(
                self._feed,
                f"A batch of {part.topic} was planned with {stretch.messages} messages up to {stretch.last}, and "
                f"{count} of them are there: they have expired, or the topic was created again.",
            )

    def _pages(self, part: StretchPartition) -> Iterator[list[Message]]:
        feed, stretch = self._feed, part.stretch
        # For a reader of uncommitted messages, a reference may have more payloads later.
        limit = stretch.messages if feed.committed else None
        page: list[Message] = []
        size = 0
        with feed.client() as client:
            try:
                is_same = client.topic(part.topic).generation == part.generation
            except TopicNotFound:
                # If the number of partitions changed, partitions without messages are dropped.
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
