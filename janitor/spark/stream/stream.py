"""``spark.readStream.format("tms")``: a topic's messages as a stream, each once.

A batch is planned by reading it: only so can be told where what is decided ends, since a transaction that is open
holds back all behind its first message. What was found (places, numbers) goes into the batch's offset, and tasks read
the messages themselves: each is sent twice, and the driver keeps none.

**Why a batch is the same when it is read again.** Ids of a topic only grow, and no reader passes the lowest that is
not acknowledged (``tms_core.server.ha.sealed_ranges`` keeps that over a change of leaders), so nothing comes to lie
before a batch's end later. All in it was decided when it was planned, and a decision stands: committed rows stay
committed, and invalid rows are hidden by the invalid list until its rows are negated (rule L4). Messages may expire,
and the topic may be created again; each task counts, so neither goes unseen. Nothing of this needs the transaction of
the plan to stay open: a view that is taken later shows the same.

A topic with partitions is read by at least one task for each partition that has messages.
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
from janitor.spark.stream.offsets import NOT_BEGUN, StreamOffset, Stretch
from janitor.spark.stream.planner import Planner, lost
from tms_core.client import Message, TopicId, Transaction
from tms_core.client.consume.consuming import IDLE
from tms_core.clock import Clock, SystemClock
from tms_core.errors import Refused, TopicNotFound

#: What a stream's rows are.
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
#: What goes into one Arrow batch, at most; one message may be larger.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 4_000_000
#: The last millisecond of which Python can make a timestamp.
_LAST_MS = 253_402_300_799_999


class StretchPartition(InputPartition):
    """What one task reads.

    Args:
        stretch: which messages.
        topic, generation: the topic or partition that has them.
        view: what is committed; None: everything is shown.
    """

    def __init__(self, stretch: Stretch, topic: str, generation: int, view: Transaction | None) -> None:
        self.stretch = stretch
        self.topic = TopicId.parse(topic)
        self.generation = generation
        self.view = view


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream as Spark knows it: batches are planned in the driver, and their parts read in tasks.

    Args:
        feed: what to read.
        clock: what is too old by now, and how to wait.
    """

    def __init__(self, feed: Feed, clock: Clock | None = None) -> None:
        self._feed = feed
        self._clock = clock or SystemClock()
        self._random = Random()  # noqa: S311 it spreads pauses
        self._opened: Planner | None = None
        self._quiet = 0

    @property
    def _planner(self) -> Planner:
        """Opened when it is needed, since tasks get a reader, too."""
        self._opened = self._opened or Planner(self._feed, self._clock)
        return self._opened

    # --- in the driver -----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return no position: Spark does not keep it, and requests it again after a crash in the first batch."""
        return dict(NOT_BEGUN)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._feed.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._planner.stay()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return where the next batch ends; ``start`` where there is none. Raises as :meth:`Planner.next` does.

        Spark asks again at once where there was nothing, so it waits for a while first, as a consumer does.
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
        """Return the parts of a batch, as its end has them.

        Raises:
            Refused: the end is not that of a batch which starts at the start.
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
            Refused: they are not those that were planned.
        """
        part = cast(StretchPartition, partition)
        stretch, count, last = part.stretch, 0, None
        for page in self._pages(part):
            count, last = count + len(page), page[-1].id
            yield self._arrow(page, part)
        if (count, last) != (stretch.messages, stretch.last):
            lost(
                self._feed,
                f"A batch of {part.topic} was planned with {stretch.messages} messages up to {stretch.last}, and "
                f"{count} of them are there: they have expired, or the topic was created again.",
            )

    def _pages(self, part: StretchPartition) -> Iterator[list[Message]]:
        feed, stretch = self._feed, part.stretch
        # To those who see what is not committed, a reference may come to stand for more payloads than it did.
        limit = stretch.messages if feed.committed else None
        page: list[Message] = []
        size = 0
        with feed.client() as client:
            try:
                is_same = client.topic(part.topic).generation == part.generation
            except TopicNotFound:
                # With another number of partitions, those go that have no message left.
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

    def _arrow(self, page: list[Message], part: StretchPartition) -> Any:
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
