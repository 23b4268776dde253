"""Rows of a table as pages of columns: keys, pointers, sizes and payloads.

If a store keeps its values unchanged (LevelDB), they are split by the page, like keys. HBase sends cells one by one, so
unneeded cells are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from janitor.spark.columns import Flags, Longs, Pointers
from janitor.spark.source.parts import Piece
from janitor.spark.source.selection import RowSelection
from tms_core.tables.base import (
    CELLS,
    KEYS,
    MESSAGES,
    PAYLOADS,
    KeyRange,
    MessageReads,
    MessageValue,
    Page,
    PayloadReads,
    iterate_items,
)
from tms_core.tables.leveldb.store import STORED, LevelDBMessageReads, decode, pointer_of

#: The number of rows in the first page and in the first page after a seek, and the maximum of other pages. Small pages
#: avoid the read of unneeded rows before the next seek.
FIRST_ROWS, PAGE_ROWS = 64, 8192
#: The first byte of a message's value: plain, and transactional with a payload; other values are references.
_PLAIN, _TRANSACTIONAL = 0, 1
#: The number of bytes before the payload of a plain message and of a transactional message.
_PLAIN_BYTES, _TX_BYTES = 1, 9


@dataclass(frozen=True, slots=True)
class Rows:
    """A page of rows.

    Attributes:
        pointers: the pointers of message rows; None for payload rows, whose keys have the pointers.
        sizes: the sizes of payloads in bytes, and flags of rows with a payload; None if not requested.
        payloads: the payloads; None if not requested.
    """

    keys: list[bytes]
    pointers: Pointers | None
    sizes: tuple[Longs, Flags] | None = None
    payloads: Sequence[bytes | None] | None = None


@dataclass(frozen=True, slots=True)
class RowFields:
    """The requested parts of each row in addition to its key."""

    sizes: bool = False
    payloads: bool = False


def scan(table: MessageReads | PayloadReads, piece: Piece, selection: RowSelection, ask: RowFields) -> Iterator[Rows]:
    """Yield the rows of a piece; skip unneeded ranges, but possibly not all unneeded rows.

    Raises:
        StoreError: the table could not be read.
    """
    return chain.from_iterable(_scan(table, reach, selection, ask) for reach in piece.ranges)


def _scan(
    table: MessageReads | PayloadReads, reach: KeyRange, selection: RowSelection, ask: RowFields
) -> Iterator[Rows]:
    start: bytes | None = reach.start
    stop = reach.stop
    limit = FIRST_ROWS
    while start is not None and (stop is None or start < stop):
        rows, start = _read(table, start, stop, limit, ask)
        limit = min(2 * limit, PAGE_ROWS)
        if rows.keys:
            yield rows
            leap = selection.find_next_key(rows.keys[-1])
            if leap is not None and start is not None:
                start, limit = max(start, leap), FIRST_ROWS


def _read(
    table: MessageReads | PayloadReads, start: bytes, stop: bytes | None, limit: int, ask: RowFields
) -> tuple[Rows, bytes | None]:
    if isinstance(table, LevelDBMessageReads):
        stored = table.read(STORED, start, stop, limit)
        return _parse_stored(*stored.items, ask), stored.resume
    if isinstance(table, MessageReads):
        if not (ask.sizes or ask.payloads):
            return _parse_cells(table, table.read(KEYS, start, stop, limit))
        found = table.read(MESSAGES, start, stop, limit)
        return _parse_values(found.items, ask), found.resume
    if not (ask.sizes or ask.payloads):
        page = table.read(KEYS, start, stop, limit)
        return Rows(page.items, None), page.resume
    payloads = table.read(PAYLOADS, start, stop, limit)
    return _parse_payloads(payloads.items, ask), payloads.resume


def _parse_stored(keys: list[bytes], values: list[bytes], ask: RowFields) -> Rows:
    """Parse message rows with LevelDB values; an unreadable value has neither pointer nor payload."""
    buffers: list[Any] = pa.array(values, pa.binary()).buffers()
    offsets = np.frombuffer(buffers[1], dtype=np.int32)[: len(values) + 1]
    data = np.frombuffer(buffers[2] if buffers[2] is not None else b"", dtype=np.uint8)
    lengths, starts = np.diff(offsets), offsets[:-1]
    tags = data[np.minimum(starts, len(data) - 1)] if len(data) else np.zeros(len(values), dtype=np.uint8)
    plain = (tags == _PLAIN) & (lengths > 0)
    whole = lengths >= _TX_BYTES
    with_payload = (tags == _TRANSACTIONAL) & whole
    transactional = with_payload | ((tags > _TRANSACTIONAL) & (lengths > 0))
    value = np.zeros(len(values), dtype=np.int64)
    if (has_pointer := transactional & whole).any():
        # A view with the big-endian number at each offset, without a copy.
        longs = np.ndarray((len(data) - _TX_BYTES + 1,), ">i8", data, 1, (1,))
        value[has_pointer] = longs[starts[has_pointer]]
    for row in np.flatnonzero(transactional & ~whole):
        value[row] = pointer_of(values[row])
    sizes = None
    if ask.sizes:
        sizes = (lengths - np.where(plain, _PLAIN_BYTES, _TX_BYTES), plain | with_payload)
    payloads = [found.payload if (found := decode(raw)) else None for raw in values] if ask.payloads else None
    return Rows(keys, Pointers(value, transactional), sizes, payloads)


def _parse_cells(table: MessageReads, page: Page[list[bytes]]) -> tuple[Rows, bytes | None]:
    """Return message rows with their pointers, without reading payloads."""
    pointers: dict[bytes, int] = {}
    if page.items:
        cells = iterate_items(partial(table.read, CELLS), page.items[0], page.items[-1] + b"\x00", len(page.items))
        pointers = {cell.key: cell.pointer for cell in cells}
    return Rows(page.items, _pointers([pointers.get(key) for key in page.items])), page.resume


def _parse_values(items: Sequence[tuple[bytes, MessageValue]], ask: RowFields) -> Rows:
    payloads = [value.payload for _, value in items]
    return Rows([key for key, _ in items], _pointers([value.pointer for _, value in items]), *_measure(payloads, ask))


def _parse_payloads(items: Sequence[tuple[bytes, bytes]], ask: RowFields) -> Rows:
    return Rows([key for key, _ in items], None, *_measure([value for _, value in items], ask))


def _measure(
    payloads: Sequence[bytes | None], ask: RowFields
) -> tuple[tuple[Longs, Flags] | None, Sequence[bytes | None] | None]:
    lengths = [-1 if payload is None else len(payload) for payload in payloads]
    sizes = np.array(lengths, dtype=np.int64)
    return ((sizes, sizes >= 0) if ask.sizes else None), (payloads if ask.payloads else None)


def _pointers(values: Sequence[int | None]) -> Pointers:
    value = np.array([0 if pointer is None else pointer for pointer in values], dtype=np.int64)
    return Pointers(value, np.array([pointer is not None for pointer in values], dtype=np.bool_))
