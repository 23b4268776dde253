"""``spark.read.format("tms")``: a store's tables as DataFrames, with the verdict on each row.

    from janitor.spark.source import register

    register(spark)
    rows = spark.read.format("tms").option("leveldb", "data/messaging").option("table", "message").load()
    rows.groupBy("topic", "action", "rule").count().show()

Rows are returned as Arrow batches, one for each page. The rules are evaluated at the time of the query's planning,
without holds, because invariant S8 limits runs only. ``docs/how-to/spark.md`` has the options and columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.types import StructField, StructType

from janitor.report import DataTable
from janitor.spark.access import freeze_modules
from janitor.spark.columns import NEVER_MS, Longs, split
from janitor.spark.session import plain_kind
from janitor.spark.source import pages
from janitor.spark.source.batches import CLAIM_COLUMNS, METADATA_COLUMNS, arrow_batch, columns_of, row_batch
from janitor.spark.source.options import NAME, SourceOptions
from janitor.spark.source.parts import NOTHING, Piece, pieces
from janitor.spark.source.selection import RowSelection
from janitor.spark.stream import is_stream
from tms_core.clock import SystemClock
from tms_core.consumers.claim_rows import all_claims
from tms_core.consumers.claims import claim_outcome
from tms_core.errors import ConfigurationError, MetadataError, StoreError
from tms_core.tables.base import MetadataReads, Reads
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import Transaction

# Spark starts a Python process for each step of a query, and each process imports this module; only streams need the
# client.
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from janitor.spark.stream.feed import Feed

#: The setting that passes filters to sources in Python.
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register the source in a session, with filter push-down if the session supports it."""
    offered = str(spark.conf.get(PUSHDOWN, "false")) == "true"
    spark.dataSource.register(FilteringSource if offered else TmsSource)


class TmsSource(DataSource):
    """The source for Spark.

    Args:
        options: the options of ``spark.read``.

    Raises:
        ConfigurationError: an option is wrong; the error names it.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self._options = _feed(options) if is_stream(options) else SourceOptions.parse(options)

    @classmethod
    def name(cls) -> str:
        return NAME

    @property
    def request(self) -> SourceOptions:
        """Return the requested rows of a store."""
        if isinstance(self._options, SourceOptions):
            return self._options
        raise ConfigurationError(
            "url and topic are options of spark.readStream.", "Set leveldb, hbase or config to read a store."
        )

    def schema(self) -> StructType:
        if isinstance(self._options, SourceOptions):
            return StructType(list(columns_of(self.request.table, self.request.ask)))
        from janitor.spark.stream.stream import STREAM_SCHEMA  # noqa: PLC0415

        return STREAM_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return _small(self.request) or RowReader(self.request)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        if isinstance(self._options, SourceOptions):
            raise ConfigurationError(
                "A stream reads a topic of a server.", "Set url and topic; spark.read is for stores."
            )
        from janitor.spark.stream.stream import StreamReader  # noqa: PLC0415

        return StreamReader(self._options)


class FilteringSource(TmsSource):
    """The source with filter push-down; Spark rejects it in a session without push-down."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return _small(self.request) or FilteringReader(self.request)


class RowPartition(InputPartition):
    """The rows that one task reads."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece


class RowReader(DataSourceReader):
    """A reader of the message or the payload table.

    Args:
        request: the requested rows.

    Attributes:
        selection: the selection of rows.
        policy: the rules for the rows.

    Raises:
        StoreError: the store cannot be read; raised when the query is planned.
    """

    def __init__(self, request: SourceOptions) -> None:
        table: DataTable = "message" if request.table == "message" else "payload"
        self._request = request
        self.selection = RowSelection(table, request.patterns, from_ms=request.from_ms, to_ms=request.to_ms)
        now_ms = SystemClock().now_ms() if request.now_ms is None else request.now_ms
        with request.access.reading() as store:
            self.policy = request.access.policy(store, now_ms, request.changes)

    def partitions(self) -> list[InputPartition]:
        with self._request.access.salted() as parts:
            found = pieces(parts, self.selection, self._request.partitions)
        # Without any partition, Spark would call read with a partition that Spark makes.
        return [RowPartition(piece) for piece in found or [NOTHING]]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        piece, access = cast(RowPartition, partition).piece, self._request.access
        if not piece.ranges:
            return
        open_expiries = access.expiries if self.selection.table == "message" else nullcontext
        with (
            _name_piece_in_errors(f"{self.selection.table} rows of {piece}"),
            access.part(piece.salt) as part,
            open_expiries() as expiries,
        ):
            yield from self.batches(part, piece, expiries)
        freeze_modules()

    def batches(self, part: Reads, piece: Piece, expiries: Expiries | None) -> Iterator[Any]:
        """Yield the rows of a piece, as Arrow batches.

        Args:
            expiries: the expiries of messages; None for payload rows, which have no TTL of their own.
        """
        table = part.message if self.selection.table == "message" else part.payload
        selection = piece.of(self.selection)
        for page in pages.scan(table, piece, selection, self._request.ask):
            rows = split(selection.table, page.keys)
            keep = selection.mask(rows)
            if keep.any():
                decisions = self.policy.judge(selection.table, rows, page.pointers, _expiring(expiries, page.keys))
                yield row_batch(selection.table, page, rows, decisions, keep, piece.salt)


class FilteringReader(RowReader):
    """A reader that skips rows which the filters exclude by their keys."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Inspect the filters; Spark evaluates all of them again."""
        self.selection = self.selection.narrowed(filters)
        return filters


class _SmallReader(DataSourceReader):
    """A reader of a small table, in one task.

    Args:
        request: the requested rows.
    """

    def __init__(self, request: SourceOptions) -> None:
        self._request = request
        self._selection = RowSelection("message", request.patterns)


class MetadataReader(_SmallReader):
    """A reader of the metadata table."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        with _name_piece_in_errors("metadata rows"), self._request.access.reading() as store:
            found = [row for row in self._rows(store.metadata) if row is not None]
        yield from _batch(METADATA_COLUMNS, found)

    def _rows(self, table: MetadataReads) -> Iterator[tuple[Any, ...] | None]:
        for key, value in table.rows():
            text = value.decode("utf-8", "replace")
            try:
                topic = TopicMetadata.parse(key, value)
            except MetadataError as error:
                if not self._selection.names_topics:
                    yield None, None, None, None, None, text, key, str(error)
                continue
            if self._selection.wants(topic.topic):
                name = topic.topic
                yield name.namespace, name.topic, topic.generation, topic.ttl_seconds, topic.deleted, text, key, None


class ClaimReader(_SmallReader):
    """A reader of the claims of consumer groups; a group has as many claims as workers."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        # Read the transactions before the claims: a claim that is rolled back disappears before its transaction
        # finishes.
        now_ms = SystemClock().now_ms() if self._request.now_ms is None else self._request.now_ms
        snapshot = self._request.access.transactions(now_ms).snapshot
        view = None if snapshot is None else snapshot.dummy_transaction()
        with _name_piece_in_errors("claims"), self._request.access.side() as side:
            found = [] if side is None else list(self._rows(side, view))
        yield from _batch(CLAIM_COLUMNS, found)

    def _rows(self, side: SideTable, view: Transaction | None) -> Iterator[tuple[Any, ...]]:
        for _, group, claim in all_claims(side):
            if self._selection.wants(group.topic):
                state = None if view is None else claim_outcome(claim.pointer, view).value
                name = (group.topic.namespace, group.topic.topic, group.generation, group.name)
                yield *name, str(claim.first), str(claim.last), claim.pointer or None, claim.tries, state


def _feed(options: dict[str, str]) -> Feed:
    from janitor.spark.stream.feed import Feed  # noqa: PLC0415

    return Feed.parse(options)


def _small(request: SourceOptions) -> DataSourceReader | None:
    """Return the reader of a table that one task reads."""
    kinds: dict[str, type[MetadataReader | ClaimReader]] = {"metadata": MetadataReader, "claims": ClaimReader}
    kind = kinds.get(request.table)
    return None if kind is None else kind(request)


def _batch(columns: tuple[StructField, ...], rows: list[tuple[Any, ...]]) -> Iterator[Any]:
    if rows:
        names = [field.name for field in columns]
        yield arrow_batch(columns, dict(zip(names, zip(*rows, strict=True), strict=True)))


@contextmanager
def _name_piece_in_errors(what: str) -> Iterator[None]:
    """Add the part that a task was reading to its error."""
    try:
        yield
    except StoreError as error:
        message = f"a task lost its store while it read {what}: {error.message}"
        raise plain_kind(type(error))(message, error.hint) from error


def _expiring(expiries: Expiries | None, keys: list[bytes]) -> Longs | None:
    """Return the expiry of each message with its own TTL (rule L6); ``NEVER_MS`` for other messages.

    Call it after the page was read. A server saves the TTL before the message, so the TTL of a read message is never
    missing. In HBase the saved TTLs have no salt, so a task also reads the TTLs of messages of other salts.

    Args:
        expiries: the saved TTLs; None: the store has none.
        keys: the keys of the messages, in order.

    Returns:
        None if no message has its own TTL.
    """
    found = expiries.expiry_times(keys) if expiries is not None else {}
    if not found:
        return None
    return np.array([min(found.get(key, NEVER_MS), NEVER_MS) for key in keys], dtype=np.int64)
