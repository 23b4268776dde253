"""Tephra's transaction log files: the edits of a manager, in order.

A manager on one machine writes records without gaps. A manager on HDFS writes a Hadoop SequenceFile with a marker
before each flushed batch. A crash can truncate both kinds inside a record. A torn record was never acknowledged, and is
skipped without an error, on HDFS together with its batch. On one machine, a power failure can also leave trailing
zeros, if the file's length reached the disk before its data. Zeros are ignored if they were certainly never synced
data. All other damage is an error, because a skipped edit is a lost commit.

``docs/reference/formats/tephra.md`` has both layouts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from tms_core.errors import FormatError, quoted
from tms_core.logs.loggers import get_logger
from tms_core.transaction.codec.edits import Edit, decode_edit, read_edit, read_exactly
from tms_core.transaction.codec.varint import CHUNK_BYTES, Readable

_MAGIC = b"SEQ"
_SEQUENCE_FILE_VERSION = 6
_KEY_CLASS = b"org.apache.hadoop.io.LongWritable"
#: The second name is of Tephra before version 0.8; the bytes of edits are the same.
_VALUE_CLASSES = (b"org.apache.tephra.persist.TransactionEdit", b"co.cask.tephra.persist.TransactionEdit")
#: Whether batches have markers, by the log version in the header's metadata.
_HAS_MARKERS = {None: False, b"2": True, b"3": True}
_MARKER_KEY = b"count"
#: A value in place of a record length, before the sync bytes of the file.
_SYNC_ESCAPE = -1
_SYNC_BYTES = 16
#: Hadoop writes text up to this length with one length byte.
_SHORT_TEXT_BYTES = 127

_INT = struct.Struct(">i")
_SEQUENCE_NUMBER_BYTES = 8
#: The smallest unit of a write to disk; after a power failure, zeros may start at any multiple of it.
_BLOCK_BYTES = 512

logger = get_logger(__name__)


def read_log(path: Path) -> Iterator[Edit]:
    """Yield the edits of a log file of either kind, in order.

    Args:
        path: a ``txlog.<ms>`` file. A file that is empty, or has a truncated header, has no edits.

    Raises:
        FormatError: the file is not a transaction log, or is damaged before its last record.
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        is_sequence_file = stream.read(len(_MAGIC)) == _MAGIC
        stream.seek(0)
        try:
            yield from _sequence_file(stream) if is_sequence_file else _local_file(stream, path)
        except FormatError as error:
            hint = "Restore the file from a copy, or move it to another folder to recover without its edits."
            raise FormatError(f"transaction log {path}: {error.message}.", hint) from error


def _local_file(stream: BinaryIO, path: Path) -> Iterator[Edit]:
    before = start = 0
    try:
        while True:
            read_exactly(stream, _SEQUENCE_NUMBER_BYTES)
            yield read_edit(stream)
            before, start = start, stream.tell()
    except EOFError:
        return
    except FormatError:
        if not _never_synced(stream, before, start):
            raise
        logger.warning("%s has trailing zeros, as after a power failure; its edits up to byte %d are used", path, start)


def _never_synced(stream: BinaryIO, before: int, start: int) -> bool:
    """Return whether the bytes from ``start`` on are certainly not synced data.

    They must be zeros only, because a record has a version other than 0. If the previous record, which starts at
    ``before``, has a block of trailing zeros, that record may be incomplete; then the result is False.
    """
    stream.seek(max(before, (start - 1) // _BLOCK_BYTES * _BLOCK_BYTES))
    if start and not any(stream.read(start - stream.tell())):
        return False
    return not any(any(piece) for piece in iter(lambda: stream.read(CHUNK_BYTES), b""))


def _sequence_file(stream: Readable) -> Iterator[Edit]:
    try:
        has_markers, sync = _read_header(stream)
    except EOFError:
        return
    records = _records(stream, sync)
    yield from _batches(records) if has_markers else map(_edit, records)


def _batches(records: Iterator[tuple[bytes, bytes]]) -> Iterator[Edit]:
    """Yield the edits of each complete batch."""
    for key, value in records:
        if key != _MARKER_KEY or len(value) != _INT.size:
            raise FormatError(f"a record with key {key.hex()} in place of the marker of a batch")
        (count,) = _INT.unpack(value)
        if count < 0:
            raise FormatError(f"a batch of {count} edits")
        batch = list(islice(records, count))
        if len(batch) == count:
            yield from list(map(_edit, batch))


def _edit(record: tuple[bytes, bytes]) -> Edit:
    key, value = record
    if len(key) != _SEQUENCE_NUMBER_BYTES:
        raise FormatError(f"a record with key {key.hex()} in place of an edit")
    return decode_edit(value)


def _records(stream: Readable, sync: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of each record, up to a torn record."""
    try:
        while True:
            (size,) = _INT.unpack(read_exactly(stream, _INT.size))
            if size == _SYNC_ESCAPE:
                if read_exactly(stream, _SYNC_BYTES) != sync:
                    raise FormatError("sync bytes that differ from the header's")
                continue
            (key_size,) = _INT.unpack(read_exactly(stream, _INT.size))
            if not 0 <= key_size <= size:
                raise FormatError(f"a record of {size} bytes with a key of {key_size}")
            yield read_exactly(stream, key_size), read_exactly(stream, size - key_size)
    except EOFError:
        return


def _read_header(stream: Readable) -> tuple[bool, bytes]:
    """Return whether batches have markers, and the file's sync bytes."""
    version = read_exactly(stream, len(_MAGIC) + 1)[-1]
    if version != _SEQUENCE_FILE_VERSION:
        raise FormatError(f"a SequenceFile of version {version}, not {_SEQUENCE_FILE_VERSION}")
    key_class, value_class = _read_text(stream), _read_text(stream)
    if key_class != _KEY_CLASS or value_class not in _VALUE_CLASSES:
        raise FormatError(f"a SequenceFile of {quoted(key_class)} and {quoted(value_class)}")
    if any(read_exactly(stream, 2)):
        raise FormatError("a compressed SequenceFile, which Tephra does not write")
    (pairs,) = _INT.unpack(read_exactly(stream, _INT.size))
    metadata = {_read_text(stream): _read_text(stream) for _ in range(pairs)}
    log_version = metadata.get(b"version")
    if log_version not in _HAS_MARKERS:
        raise FormatError(f"a log of version {quoted(log_version)}; versions 1 to 3 are known")
    return _HAS_MARKERS[log_version], read_exactly(stream, _SYNC_BYTES)


def _read_text(stream: Readable) -> bytes:
    (size,) = read_exactly(stream, 1)
    if size > _SHORT_TEXT_BYTES:
        raise FormatError("a name of more than 127 bytes in the header")
    return read_exactly(stream, size)
