"""The files of the archive and their columns; the only module that imports pyarrow.

pyarrow needs 40 MB of memory and is optional, so it is loaded with the first file. A file is self-contained: its
metadata has layout and topic, and Parquet's statistics describe its rows. Therefore an archive needs no index, and you
can move its folders.

Rows are written and read in groups of a few megabytes, so a batch of large messages never fills the memory. Every page
has a checksum, which readers check. See ``docs/reference/formats/reports.md``, "Archive".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from tms_core.errors import ArchiveError, ConfigurationError, hint_for_extra, shortened
from tms_core.topic import TopicId

#: The version of the layout, increased by each change of a column.
LAYOUT = 1

#: The keys of the metadata of a file.
_LAYOUT, _TOPIC, _REFERENCES = b"tms_janitor.layout", b"tms_janitor.topic", b"tms_janitor.references"


class Column(NamedTuple):
    """A column of the archive; ``type`` is the name of its Arrow type."""

    name: str
    type: str
    nullable: bool = False


COLUMNS = (
    Column("table", "string"),
    Column("rule", "string"),
    Column("run_id", "string"),
    Column("deleted_ms", "int64"),
    Column("generation", "int32"),
    Column("key", "binary"),
    Column("publish_ms", "int64", nullable=True),
    Column("sequence", "int32", nullable=True),
    Column("write_pointer", "int64", nullable=True),
    Column("write_ms", "int64", nullable=True),
    Column("payload_sequence", "int32", nullable=True),
    Column("payload", "binary", nullable=True),
    Column("verdict", "string"),
    Column("snapshot_timestamp_ms", "int64", nullable=True),
)

#: Columns with few distinct values in a file, for which a dictionary saves space.
_REPEATING = ["table", "rule", "run_id", "deleted_ms", "generation", "write_pointer", "verdict"]

#: Columns with statistics (lowest and highest value) in each row group and page: all except payloads.
_WITH_STATISTICS = [column.name for column in COLUMNS if column.name != "payload"]

#: The number of rows that are converted to Python objects at a time.
_READ_ROWS = 1000
#: The maximum size of a readable row group, in bytes. The writer starts a new group after some megabytes, so a group
#: has at most one large message.
_GROUP_BYTES = 256 << 20


class Summary(NamedTuple):
    """The description of a file in its footer.

    Attributes:
        topic: the topic of the rows; the folder's name may have a digest of it.
        table: ``message`` or ``payload``.
        rule: the rule that deleted the rows.
        deleted_ms: the time of archiving, just before the deletion.
        oldest_ms, newest_ms: publish times, or write times of payload rows.
        references: the number of messages that refer to the payload table.
    """

    topic: TopicId
    table: str
    generation: int
    rule: str
    run_id: str
    deleted_ms: int
    rows: int
    oldest_ms: int
    newest_ms: int
    references: int


def require_pyarrow() -> None:
    """Check that pyarrow is installed, without loading it.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:
        raise ConfigurationError(
            "The archive needs pyarrow, which is not installed.",
            f"{hint_for_extra('archive')} Or use the image …-archive, or set janitor.archive.enabled: false.",
        )


def write(stream: BinaryIO, topic: TopicId, groups: Iterable[Mapping[str, Sequence[Any]]]) -> None:
    """Write a file.

    Args:
        groups: the row groups, as values of all columns by name.

    Raises:
        OSError: the stream could not be written.
    """
    pa = _load_pyarrow()
    schema = _schema(pa).with_metadata({_LAYOUT: str(LAYOUT), _TOPIC: str(topic)})
    references = 0
    with pa.parquet.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        use_dictionary=_REPEATING,
        write_statistics=_WITH_STATISTICS,
        write_page_checksum=True,
    ) as writer:
        for columns in groups:
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
            references += sum(payload is None for payload in columns["payload"])
        writer.add_key_value_metadata({_REFERENCES: str(references)})


def summarize(path: Path) -> Summary:
    """Return the description of a file from its footer.

    Raises:
        ArchiveError: the file is damaged, unrecognized, or from a newer janitor.
    """
    with _open_file(path) as file:
        footer, metadata = file.metadata, file.metadata.metadata
        table = _span(footer, "table")[0]
        oldest_ms, newest_ms = _span(footer, "publish_ms" if table == "message" else "write_ms")
        return Summary(
            topic=TopicId.parse(metadata[_TOPIC].decode("utf-8")),
            table=table,
            generation=_span(footer, "generation")[0],
            rule=_span(footer, "rule")[0],
            run_id=_span(footer, "run_id")[0],
            deleted_ms=_span(footer, "deleted_ms")[0],
            rows=footer.num_rows,
            oldest_ms=oldest_ms,
            newest_ms=newest_ms,
            references=int(metadata[_REFERENCES]),
        )


def read(path: Path, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the values of some columns in batches of rows.

    Raises:
        ArchiveError: as :func:`summarize`, or a checksum is wrong.
    """
    with _open_file(path) as file:
        for batch in file.iter_batches(_READ_ROWS, columns=list(columns), use_threads=False):
            found = batch.to_pydict()
            yield list(zip(*(found[name] for name in columns), strict=True))


def _load_pyarrow() -> ModuleType:
    require_pyarrow()
    import pyarrow.parquet  # noqa: PLC0415

    return pyarrow


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    """Open a file of the archive, and convert pyarrow's errors."""
    pa = _load_pyarrow()
    try:
        with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check(pa, path, file)
            yield file
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ArchiveError(
            f"{path} cannot be read: {shortened(' '.join(str(error).split())).rstrip('.') or type(error).__name__}.",
            "The file is damaged, or the janitor did not write it: move the file out of the archive. Other files are "
            "not affected.",
        ) from error


def _check(pa: ModuleType, path: Path, file: Any) -> None:
    metadata = file.metadata.metadata or {}
    layout = metadata.get(_LAYOUT, b"").decode("utf-8", "replace")
    if layout and layout != str(LAYOUT):
        raise ArchiveError(
            f"{path} was written by a newer janitor (layout {layout}; this version knows {LAYOUT}).",
            "Use the newer version.",
        )
    complete = {_LAYOUT, _TOPIC, _REFERENCES} <= set(metadata)
    if not complete or not file.schema_arrow.equals(_schema(pa), check_metadata=False):
        raise ValueError("it does not have the layout of an archive file")
    _check_size(file.metadata)


def _check_size(footer: Any) -> None:
    """Check the sizes in the footer, so that a small file does not expand to gigabytes.

    Raises:
        ValueError: the file would expand too much.
    """
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        if sum(column.total_uncompressed_size for column in columns) > _GROUP_BYTES:
            raise ValueError(f"a group of its rows has more than {_GROUP_BYTES >> 20} MB")
        # Such a dictionary could have one large value that a million rows refer to.
        if any(column.path_in_schema not in _REPEATING and column.has_dictionary_page for column in columns):
            raise ValueError("a column has a dictionary that the janitor does not write")


def _schema(pa: ModuleType) -> Any:
    return pa.schema([pa.field(c.name, pa.type_for_alias(c.type), nullable=c.nullable) for c in COLUMNS])


def _span(footer: Any, column: str) -> tuple[Any, Any]:
    """Return the lowest and the highest value of a column without nulls."""
    index = [c.name for c in COLUMNS].index(column)
    found = [footer.row_group(number).column(index).statistics for number in range(footer.num_row_groups)]
    if not found or any(statistics is None or not statistics.has_min_max for statistics in found):
        raise ValueError(f"column {column} has no statistics")
    return min(statistics.min for statistics in found), max(statistics.max for statistics in found)
