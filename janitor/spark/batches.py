"""Pages of rows as Arrow batches, in the columns that ``docs/spark.md`` lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
)

from janitor.spark.columns import ACTIONS, RULES, Columns, DataTable, Flags, Longs, Verdicts
from janitor.spark.options import Table
from janitor.spark.pages import Ask, Rows

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
_ARROW: Mapping[type, Any] = {
    StringType: pa.string(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    BinaryType: pa.binary(),
    BooleanType: pa.bool_(),
}


def columns_of(table: Table, ask: Ask) -> tuple[StructField, ...]:
    """The columns of a table."""
    if table == "metadata":
        return METADATA_COLUMNS
    return (*ROW_COLUMNS, PAYLOAD_COLUMN) if ask.payloads else ROW_COLUMNS


def row_batch(table: DataTable, page: Rows, rows: Columns, verdicts: Verdicts, keep: Flags, salt: int | None) -> Any:
    """Those rows of a page that are kept, with their verdicts, as an Arrow batch."""
    at = np.flatnonzero(keep)
    ours = rows.topic[at] >= 0
    message = table == "message"
    pointers = (rows.pointer, rows.topic >= 0) if page.pointers is None else page.pointers

    def numbers(values: Longs, present: Flags) -> Any:
        return pa.array(values, mask=~present)

    nothing = np.zeros(len(at), dtype=np.bool_)
    times, sequences = rows.time_ms[at], rows.sequence[at]
    sizes = (times, nothing) if page.sizes is None else (page.sizes[0][at], page.sizes[1][at])
    found = {
        "namespace": _names([topic.namespace for topic in rows.topics], rows.topic[at], ours),
        "topic": _names([topic.topic for topic in rows.topics], rows.topic[at], ours),
        "generation": numbers(rows.generation[at], ours),
        "publish_ms": numbers(times, ours if message else nothing),
        "sequence": numbers(sequences, ours if message else nothing),
        "write_pointer": numbers(pointers[0][at], pointers[1][at]),
        "write_ms": numbers(times, nothing if message else ours),
        "payload_sequence": numbers(sequences, nothing if message else ours),
        "payload_bytes": numbers(*sizes),
        "key": page.keys if len(at) == len(page.keys) else [page.keys[index] for index in at],
        "salt": pa.nulls(len(at), pa.int32()) if salt is None else numbers(np.full(len(at), salt), ~nothing),
        "action": _names(ACTIONS, verdicts.action[at].astype(np.int64), ~nothing),
        "rule": _names(RULES, verdicts.rule[at].astype(np.int64), ~nothing),
    }
    if page.payloads is not None:
        found["payload"] = [page.payloads[int(index)] for index in at]
    return arrow_batch(columns_of(table, Ask(payloads=page.payloads is not None)), found)


def arrow_batch(columns: tuple[StructField, ...], found: Mapping[str, Any]) -> Any:
    """Values by name as an Arrow batch of those columns."""
    kinds = [(field.name, _ARROW[type(field.dataType)]) for field in columns]
    arrays = [
        values.cast(kind) if isinstance(values := found[name], pa.Array) else pa.array(values, kind)
        for name, kind in kinds
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(kinds))


def _names(names: Iterable[str], codes: Longs, present: Flags) -> Any:
    """Words of a few, by their codes."""
    indices = pa.array(codes, mask=~present)
    return pa.DictionaryArray.from_arrays(indices.cast(pa.int32()), pa.array(list(names), pa.string()))
