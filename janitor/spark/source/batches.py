"""Pages of rows as Arrow batches, in the columns that ``docs/how-to/spark.md`` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.types import BinaryType, BooleanType, IntegerType, LongType, StringType, StructField

from janitor.report import DataTable
from janitor.spark.columns import ACTIONS, RULES, Columns, Decisions, Flags
from janitor.spark.source.options import SourceTable
from janitor.spark.source.pages import RowFields, Rows

ROW_COLUMNS = (
    StructField("namespace", StringType()),
    StructField("topic", StringType()),
    StructField("generation", IntegerType()),
    StructField("publish_ms", LongType()),
    StructField("sequence", IntegerType()),
    StructField("write_pointer", LongType()),
    StructField("write_ms", LongType()),
    StructField("payload_sequence", IntegerType()),
    StructField("payload_bytes", LongType()),
    StructField("key", BinaryType()),
    StructField("salt", IntegerType()),
    StructField("action", StringType()),
    StructField("rule", StringType()),
)
PAYLOAD_COLUMN = StructField("payload", BinaryType())
METADATA_COLUMNS = (
    StructField("namespace", StringType()),
    StructField("topic", StringType()),
    StructField("generation", IntegerType()),
    StructField("ttl_seconds", IntegerType()),
    StructField("deleted", BooleanType()),
    StructField("properties", StringType()),
    StructField("key", BinaryType()),
    StructField("problem", StringType()),
)
CLAIM_COLUMNS = (
    StructField("namespace", StringType()),
    StructField("topic", StringType()),
    StructField("generation", IntegerType()),
    StructField("consumer", StringType()),
    StructField("after", StringType()),
    StructField("last", StringType()),
    StructField("write_pointer", LongType()),
    StructField("deliveries", IntegerType()),
    StructField("state", StringType()),
)
#: The number of cached columns with one repeated value.
_CACHE_SIZE = 64
_ARROW: Mapping[type, Any] = {
    StringType: pa.string(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    BinaryType: pa.binary(),
    BooleanType: pa.bool_(),
}


def columns_of(table: SourceTable, ask: RowFields) -> tuple[StructField, ...]:
    """Return the columns of a table."""
    if table == "metadata":
        return METADATA_COLUMNS
    if table == "claims":
        return CLAIM_COLUMNS
    return (*ROW_COLUMNS, PAYLOAD_COLUMN) if ask.payloads else ROW_COLUMNS


def row_batch(table: DataTable, page: Rows, rows: Columns, decisions: Decisions, keep: Flags, salt: int | None) -> Any:
    """Return the selected rows of a page with their decisions, as an Arrow batch."""
    at = None if keep.all() else np.flatnonzero(keep)

    def some(values: Any) -> Any:
        return values if at is None else values[at]

    number = len(page.keys) if at is None else len(at)
    code, times, sequences = some(rows.topic), some(rows.time_ms), some(rows.sequence).astype(np.int32)
    is_recognized, nothing = code >= 0, np.zeros(number, dtype=np.bool_)
    message = table == "message"
    pointers = (rows.pointer, rows.topic >= 0) if page.pointers is None else page.pointers
    found = {
        "namespace": _names([topic.namespace for topic in rows.topics], code),
        "topic": _names([topic.topic for topic in rows.topics], code),
        "generation": _numbers(some(rows.generation).astype(np.int32), is_recognized),
        "publish_ms": _numbers(times, is_recognized if message else nothing),
        "sequence": _numbers(sequences, is_recognized if message else nothing),
        "write_pointer": _numbers(some(pointers[0]), some(pointers[1])),
        "write_ms": _numbers(times, nothing if message else is_recognized),
        "payload_sequence": _numbers(sequences, nothing if message else is_recognized),
        "payload_bytes": _numbers(times, nothing) if page.sizes is None else _numbers(*map(some, page.sizes)),
        "key": rows.packed if at is None else rows.packed.take(pa.array(at)),
        "salt": pa.nulls(number, pa.int32()) if salt is None else pa.repeat(pa.scalar(salt, pa.int32()), number),
        "action": _names(ACTIONS, some(decisions.action)),
        "rule": _names(RULES, some(decisions.rule)),
    }
    if page.payloads is not None:
        found["payload"] = page.payloads if at is None else [page.payloads[int(index)] for index in at]
    return arrow_batch(columns_of(table, RowFields(payloads=page.payloads is not None)), found)


def _numbers(values: NDArray[Any], present: Flags) -> Any:
    if present.all():
        return pa.array(values)
    return pa.array(values, mask=~present) if present.any() else _nulls(len(values))


def _names(names: Sequence[str], codes: NDArray[Any]) -> Any:
    """Return the words of codes; null for a negative code."""
    if codes.min() == codes.max():
        word = names[int(codes[0])] if codes[0] >= 0 else None
        return _repeat_value(word, len(codes))
    indices = pa.array(codes.astype(np.int32), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string()))


@lru_cache(_CACHE_SIZE)
def _repeat_value(word: str | None, number: int) -> Any:
    """Return a column with one repeated value; cached, because most columns of most pages are the same."""
    return pa.repeat(pa.scalar(word, pa.string()), number)


@lru_cache(_CACHE_SIZE)
def _nulls(number: int) -> Any:
    return pa.nulls(number, pa.int64())


def arrow_batch(columns: tuple[StructField, ...], found: Mapping[str, Any]) -> Any:
    """Return an Arrow batch of these columns from values by name."""
    kinds = [(field.name, _ARROW[type(field.dataType)]) for field in columns]
    arrays = [_as(kind, found[name]) for name, kind in kinds]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(kinds))


def _as(kind: Any, values: Any) -> Any:
    if not isinstance(values, pa.Array):
        return pa.array(values, kind)
    return values if values.type == kind else values.cast(kind)
