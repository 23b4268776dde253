"""The contents of a store by topic and generation, counted on Spark.

It makes one pass over each table, and joins them, because neither table alone shows payloads without a message, or
messages without their payloads. The join also decides about ``candidate`` payload rows (rule L5).

In contrast to ``janitor plan``, it reads and counts all rows, including kept rows. Holds do not apply, because the
counts show the results of the rules, not of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - the name everybody knows it by

from janitor.rules.policy import Rule
from janitor.spark.session import translated
from janitor.spark.source.options import NAME
from janitor.state.base import State, TopicCount
from janitor.state.figures import STATISTICS, StatisticsFigures
from janitor.state.values import Pointer, pack
from janitor.stats.topic_sizes import POINTER_BYTES
from janitor.sweep.run import parse_or_none
from janitor.sweep.transactions import TransactionView
from tms_core.tables.base import Reads
from tms_core.topic import TopicId
from tms_core.transaction.model import transaction_ms

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_HOUR_MS = 3_600_000
#: The upper bounds of the age histogram in milliseconds, and their names; older rows are in the last bar.
AGES = (
    (_HOUR_MS, "under_1h"),
    (24 * _HOUR_MS, "under_1d"),
    (7 * 24 * _HOUR_MS, "under_7d"),
    (30 * 24 * _HOUR_MS, "under_30d"),
)
OLDEST = "older"

_GROUP = ("namespace", "topic", "generation")
_OVERDUE = (Rule.EXPIRED, Rule.OLD_GENERATION)
#: Java's absolute value, with which plain readers search payloads; the lowest number is its own absolute (rule L5).
_JAVA_ABS = "if(write_pointer between -9223372036854775807 and -1, -write_pointer, write_pointer)"


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The rows of one generation of a topic.

    Attributes:
        rows, payload_rows: the numbers of rows in the message and in the payload table.
        size_bytes: the size of keys, write pointers and payloads in both tables, as in ``janitor status``.
        oldest_ms, newest_ms: publish times; None without messages.
        ages: messages by age, by the names of ``AGES``.
        overdue: rows of both tables that the rules delete, by rule.
        invalid_transaction: messages with a pointer to invert.
        orphan_payloads: payload rows that no message refers to.
        missing_payloads: references to payloads that do not exist.
        blocking_transaction: the oldest undecided write pointer of the messages, which blocks all transactional
            readers; None if readers are not blocked.
    """

    topic: TopicId
    generation: int
    rows: int = 0
    payload_rows: int = 0
    size_bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    ages: Mapping[str, int] = field(default_factory=dict)
    overdue: Mapping[str, int] = field(default_factory=dict)
    invalid_transaction: int = 0
    orphan_payloads: int = 0
    missing_payloads: int = 0
    blocking_transaction: Pointer | None = None

    @property
    def blocking_since_ms(self) -> int | None:
        """Return the start of the blocking transaction; None without such a transaction."""
        return None if self.blocking_transaction is None else transaction_ms(self.blocking_transaction)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; 64-bit ids are decimal strings."""
        document, total = pack(self), self.rows + self.payload_rows
        return {
            "bytes": document.pop("size_bytes"),
            **document,
            "overdue_share": {rule: rows / total for rule, rows in self.overdue.items()},
            "blocking_since_ms": self.blocking_since_ms,
        }


def count(
    spark: SparkSession, options: Mapping[str, str], now_ms: int, transactions: TransactionView
) -> list[GenerationStats]:
    """Count a store.

    Args:
        options: the options of the source: store, topics, policy.
        now_ms: the time at which the rules are evaluated.
        transactions: the facts about transactions, to find blocked readers.

    Raises:
        StoreError: the store could not be read.
    """
    with translated():
        messages, payloads = (_rows(spark, options, now_ms, table) for table in ("message", "payload"))
        rows = _count_frame(messages, payloads, now_ms, transactions).collect()
    # Sort here: for a sort, Spark would execute most of the query twice to partition the few rows of the result.
    return [_of_row(row.asDict()) for row in sorted(rows, key=lambda row: [row[name] for name in _GROUP])]


def save(
    state: State, found: list[GenerationStats], living: Mapping[TopicId, int], now_ms: int, *, whole: bool
) -> None:
    """Replace the results of the last background count, for status page and metrics.

    Args:
        living: the counted topics that exist, with their generations.
        whole: whether the whole store was counted.

    Raises:
        StateError: the state could not be written.
    """
    counted = {one.topic: one for one in found if living.get(one.topic) == one.generation}
    with state.transaction():
        state.save_counts(
            {
                topic: TopicCount(one.rows, one.size_bytes, one.oldest_ms, one.newest_ms, now_ms)
                for topic in living
                for one in [counted.get(topic) or GenerationStats(topic, living[topic])]
            }
        )
        if whole:
            STATISTICS.save(state, summary(found, now_ms))


def summary(found: list[GenerationStats], now_ms: int) -> StatisticsFigures:
    """Return the results for the whole store."""
    blocked = [one for one in found if one.blocking_transaction is not None]
    worst = min(blocked, key=lambda one: one.blocking_transaction or 0, default=None)
    return StatisticsFigures(
        counted_ms=now_ms,
        rows=sum(one.rows for one in found),
        payload_rows=sum(one.payload_rows for one in found),
        size_bytes=sum(one.size_bytes for one in found),
        overdue={str(rule): sum(one.overdue.get(rule, 0) for one in found) for rule in _OVERDUE},
        orphans=sum(one.orphan_payloads for one in found),
        missing=sum(one.missing_payloads for one in found),
        blocking=None if worst is None else str(worst.blocking_transaction),
        blocking_topic=None if worst is None else f"{worst.topic}, generation {worst.generation}",
        blocking_since_ms=None if worst is None else worst.blocking_since_ms,
    )


def write(spark: SparkSession, found: list[GenerationStats], folder: str, day: str) -> str:
    """Write statistics as Parquet to a folder per day; replace the statistics of the same day.

    Args:
        folder: a path or a URL that Spark can write.
        day: as ``2026-01-31``.

    Returns:
        The path of the statistics.

    Raises:
        TmsError: Spark cannot write there.
    """
    path = f"{folder.rstrip('/')}/day={day}"
    flat = [one.to_json() for one in found]
    with translated():
        spark.createDataFrame(flat, _FLAT).coalesce(1).write.mode("overwrite").parquet(path)
    return path


def existing_generations(store: Reads) -> dict[TopicId, int]:
    """Return the topics that exist, and their generations.

    Raises:
        StoreError: the metadata could not be read.
    """
    found = (parse_or_none(key, value) for key, value in store.metadata.rows())
    return {topic.topic: topic.generation for topic in found if topic is not None and not topic.deleted}


def _rows(spark: SparkSession, options: Mapping[str, str], now_ms: int, table: str) -> DataFrame:
    source = spark.read.format(NAME).options(**{**options, "table": table, "sizes": "true", "now": str(now_ms)})
    return source.load().where(F.col("topic").isNotNull() & (F.col("generation") > 0))


def _count_frame(messages: DataFrame, payloads: DataFrame, now_ms: int, transactions: TransactionView) -> DataFrame:
    messages = messages.where("publish_ms >= 0")
    payloads = payloads.where("write_ms >= 0")
    refers = F.col("payload_bytes").isNull() & F.col("write_pointer").isNotNull()
    bars = _bars(now_ms)
    # Group by pointer first, also messages without a pointer, so that each row is read once and one join is enough.
    sent = messages.groupBy(*_GROUP, F.expr(_JAVA_ABS).alias("write_pointer")).agg(
        F.count("*").alias("rows"),
        F.sum(_size(pointer=True)).alias("size"),
        F.min("publish_ms").alias("oldest_ms"),
        F.max("publish_ms").alias("newest_ms"),
        *(_number(condition).alias(name) for name, condition in bars),
        *(_count_verdict("delete", rule).alias(f"message_{rule}") for rule in _OVERDUE),
        _count_verdict("invert", Rule.INVALID_TRANSACTION).alias("invalid"),
        F.min(F.when(_is_undecided(transactions), F.col("write_pointer"))).alias("blocking"),
        _number(refers).alias("references"),
        F.max(refers & (F.col("action") != "delete")).alias("stays"),
    )
    stored = payloads.groupBy(*_GROUP, "write_pointer").agg(
        F.count("*").alias("payload_rows"),
        F.sum(_size(pointer=False)).alias("payload_size"),
        *(_count_verdict("delete", rule).alias(f"delete_{rule}") for rule in _OVERDUE),
        *(_count_verdict("candidate", rule).alias(f"candidate_{rule}") for rule in _OVERDUE),
    )
    judged = [f"{action}_{rule}" for action in ("delete", "candidate") for rule in _OVERDUE]
    joined = stored.join(sent, [*_GROUP, "write_pointer"], "full").na.fill(False, ["stays"])
    joined = joined.na.fill(0, ["references", "payload_rows", *judged])
    summed = ("rows", "size", "invalid", "payload_rows", "payload_size", *(f"message_{rule}" for rule in _OVERDUE))
    return joined.groupBy(*_GROUP).agg(
        *(F.sum(name).alias(name) for name in (*summed, *(name for name, _ in bars))),
        F.min("oldest_ms").alias("oldest_ms"),
        F.max("newest_ms").alias("newest_ms"),
        F.min("blocking").alias("blocking"),
        F.sum(F.when(F.col("references") == 0, F.col("payload_rows")).otherwise(0)).alias("orphans"),
        F.sum(F.when(F.col("payload_rows") == 0, F.col("references")).otherwise(0)).alias("missing"),
        *(
            F.sum(
                F.col(f"delete_{rule}") + F.when(F.col("stays"), F.lit(0)).otherwise(F.col(f"candidate_{rule}"))
            ).alias(f"payload_{rule}")
            for rule in _OVERDUE
        ),
    )


def _size(*, pointer: bool) -> Column:
    size = F.length("key") + F.coalesce(F.col("payload_bytes"), F.lit(0))
    return size + F.when(F.col("write_pointer").isNotNull(), POINTER_BYTES).otherwise(0) if pointer else size


def _number(condition: Column) -> Column:
    """Return the number of rows that meet a condition."""
    return F.sum(F.when(condition, 1).otherwise(0))


def _count_verdict(action: str, rule: Rule) -> Column:
    """Return the number of rows with this verdict."""
    return _number((F.col("action") == action) & (F.col("rule") == str(rule)))


def _bars(now_ms: int) -> list[tuple[str, Column]]:
    """Return the bars of the age histogram; each age is in one."""
    age, low = F.lit(now_ms) - F.col("publish_ms"), F.lit(-(2**62))
    bars = []
    for high_ms, name in AGES:
        bars.append((name, (age >= low) & (age < high_ms)))
        low = F.lit(high_ms)
    return [*bars, (OLDEST, age >= low)]


def _is_undecided(transactions: TransactionView) -> Column:
    """Return a condition for messages of undecided transactions, which block transactional readers."""
    pointer, snapshot = F.col("write_pointer"), transactions.snapshot
    if snapshot is None:
        return F.lit(False)
    return (pointer > snapshot.write_pointer) | pointer.isin(sorted(snapshot.open_pointers))


def _of_row(row: Mapping[str, Any]) -> GenerationStats:
    def number(name: str) -> int:
        return int(row[name] or 0)

    return GenerationStats(
        TopicId(row["namespace"], row["topic"]),
        row["generation"],
        rows=number("rows"),
        payload_rows=number("payload_rows"),
        size_bytes=number("size") + number("payload_size"),
        oldest_ms=row["oldest_ms"],
        newest_ms=row["newest_ms"],
        ages={name: number(name) for name in (*(name for _, name in AGES), OLDEST)},
        overdue={str(rule): number(f"message_{rule}") + number(f"payload_{rule}") for rule in _OVERDUE},
        invalid_transaction=number("invalid"),
        orphan_payloads=number("orphans"),
        missing_payloads=number("missing"),
        blocking_transaction=None if row["blocking"] is None else Pointer(row["blocking"]),
    )


_FLAT = (
    "tms_namespace string, topic string, generation int, rows long, payload_rows long, bytes long, oldest_ms long, "
    "newest_ms long, ages map<string, long>, overdue map<string, long>, overdue_share map<string, double>, "
    "invalid_transaction long, orphan_payloads long, missing_payloads long, blocking_transaction string, "
    "blocking_since_ms long"
)
