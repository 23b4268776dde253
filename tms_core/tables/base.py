"""The interface of all stores, so that one set of rules and one test suite serve them all.

One method reads all rows in *pages* (:meth:`KeyReads.read`). The caller names the parts of a row that it needs. A read
opens the table, reads at most ``limit`` rows, and closes the table; the page has the start of the next page. The page
also has the :class:`Origin` of its rows, which the caller passes back when it deletes or inverts them.

Nothing stays open between pages. A sweep can delete, wait for its rate, or be killed between two pages, and no snapshot
of the store is pinned. The same code works with LevelDB on a disk and with HBase over a Thrift server. The cost is one
seek per page, which is small for a page of a few thousand rows.

Ranges are half-open, ``[start, stop)``; without ``stop``, a range contains the last row. Row keys have no salt here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, cast

from tms_core.errors import StoreError, TooLarge

Item = TypeVar("Item")
T = TypeVar("T")

#: The name under which ``Store.calls`` counts rows with unreadable values.
UNREADABLE = "unreadable"
#: The page size of a search for the first key, after the first page was empty.
_SEARCH_KEYS = 1000

TableName = Literal["message", "payload", "metadata"]


class KeyRange(NamedTuple):
    """The keys from ``start`` up to ``stop``, exclusive; None: up to the last key."""

    start: bytes
    stop: bytes | None

    def holds(self, key: bytes) -> bool:
        """Return whether a key is in the range."""
        return self.start <= key and (self.stop is None or key < self.stop)


#: All keys of a table.
ALL_KEYS = KeyRange(b"", None)


class Origin(NamedTuple):
    """The facts that a store knows about rows of a page; with them, it changes these rows faster.

    Attributes:
        newest_ms: the highest timestamp of their cells.
        salts: the salts under which each key has a row; None: all rows are under the salt that was read.
    """

    newest_ms: int
    salts: Mapping[bytes, Sequence[int]] | None = None

    @classmethod
    def merge(cls, origins: Sequence[Origin | None]) -> Origin | None:
        """Return the origin of the rows of several pages; None if a page has no origin."""
        known = [origin for origin in origins if origin is not None]
        if not known or len(known) < len(origins):
            return None
        salts = [origin.salts for origin in known if origin.salts is not None]
        merged = {key: key_salts for page_salts in salts for key, key_salts in page_salts.items()}
        return cls(max(origin.newest_ms for origin in known), merged if salts else None)


class Page(NamedTuple, Generic[T]):
    """A page of at most ``limit`` rows, in key order.

    A page with a ``resume`` may have fewer items than requested, even no item, because the store omits rows without the
    requested cells.

    Attributes:
        items: a list, or :class:`MessageColumns`.
        resume: the start of the next page; None after the last row of the range.
        origin: the store's facts about the rows; None: unknown.
        rows_read: in a search, the number of read rows.
        gap: in a search, a range without keys: from the last read row to the first row after the searched range.
    """

    items: T
    resume: bytes | None
    origin: Origin | None = None
    rows_read: int = 0
    gap: KeyRange | None = None


def pages(
    read: Callable[[bytes, bytes | None, int], Page[T]], start: bytes, stop: bytes | None, limit: int = 1000
) -> Iterator[Page[T]]:
    """Yield all pages of a range; read each page when the caller requests it.

    Args:
        limit: the largest number of rows in a page.

    Raises:
        StoreError: a page could not be read.
    """
    resume: bytes | None = start
    while resume is not None:
        page = read(resume, stop, limit)
        yield page
        resume = page.resume


def iterate_items(
    read: Callable[[bytes, bytes | None, int], Page[list[Item]]], start: bytes, stop: bytes | None, limit: int = 1000
) -> Iterator[Item]:
    """Yield all items of a range; arguments and errors as of :func:`pages`."""
    for page in pages(read, start, stop, limit):
        yield from page.items


class MessageValue(NamedTuple):
    """The value of a row of the message table.

    Attributes:
        pointer: the stored write pointer, negative after a rollback or an inversion; None outside transactions.
        payload: the bytes; None for a reference to the payload table.
    """

    pointer: int | None
    payload: bytes | None


#: The keys of the rows of one request, their write pointer, and their payloads; without payloads, one reference.
RowsOfRequest = tuple[Sequence[bytes], int | None, Sequence[bytes] | None]


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Rows of the message table, column by column; the length is the number of rows.

    Attributes:
        pointers: the write pointers; None if no row has a pointer.
    """

    keys: list[bytes]
    pointers: list[int | None] | None
    payloads: list[bytes | None]

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, rows: Sequence[tuple[bytes, MessageValue]]) -> MessageColumns:
        """Return rows column by column."""
        return cls([key for key, _ in rows], [value.pointer for _, value in rows], [value.payload for _, value in rows])

    def select(self, chosen: Sequence[bool]) -> MessageColumns:
        """Return the chosen rows, without the rows after the last element of ``chosen``."""
        pointers = None if self.pointers is None else list(compress(self.pointers, chosen))
        return MessageColumns(list(compress(self.keys, chosen)), pointers, list(compress(self.payloads, chosen)))


class TxCell(NamedTuple):
    """The transactional part of one message row.

    Attributes:
        pointer: the stored write pointer, unchanged.
        refers: whether the row refers to the payload table; True if the store would need another read to know.
    """

    key: bytes
    pointer: int
    refers: bool


class PointerSet(NamedTuple):
    """Write pointers above 0, for a search.

    Attributes:
        members: a container of the pointers, which may also contain other numbers.
        stored: the possible stored bytes of each pointer: big-endian, with and without trailing zeros; None if there
            are too many pointers for this form.
    """

    members: Container[int]
    stored: frozenset[bytes] | None = None

    @classmethod
    def of(cls, pointers: frozenset[int]) -> PointerSet:
        """Return a set with both forms of the pointers."""
        packed = [pointer.to_bytes(8, "big") for pointer in pointers if pointer > 0]
        cut_short = (raw[:size] for raw in packed if not raw[-1] for size in range(len(raw.rstrip(b"\x00")), 8))
        return cls(pointers, frozenset(chain(packed, cut_short)))


class Projection(NamedTuple, Generic[T]):
    """The parts of a row that a page contains; use one of the constants after this class.

    Attributes:
        part: ``keys``; ``cells``, of transactional rows only; ``rows``; ``columns``, which are rows column by column;
            or a part that only one kind of store has.
        max_bytes: the bytes of values after which a page stops early, but not before its first row. None: the store's
            own limit.
        pointers: return only cells with one of these pointers.
    """

    part: str
    max_bytes: int | None = None
    pointers: PointerSet | None = None

    @property
    def call(self) -> str:
        """Return the name under which ``Store.calls`` counts the page."""
        return self.part if self.part in ("keys", "cells") else "rows"

    def limit_bytes(self, max_bytes: int | None) -> Projection[T]:
        """Return the projection with another limit of bytes."""
        return self._replace(max_bytes=max_bytes)

    def empty_page(self) -> Page[T]:
        """Return the page of a range without rows."""
        return Page(cast(T, MessageColumns.of(()) if self.part == "columns" else []), None)


#: Keys. A store reads values only if it cannot avoid it.
KEYS: Projection[list[bytes]] = Projection("keys")
#: The transactional part of transactional rows. ``limit`` counts the rows read, not the rows returned.
CELLS: Projection[list[TxCell]] = Projection("cells")
#: Whole rows of the message table.
MESSAGES: Projection[list[tuple[bytes, MessageValue]]] = Projection("rows")
#: Whole rows of the message table, column by column.
COLUMNS: Projection[MessageColumns] = Projection("columns")
#: Whole rows of the payload table.
PAYLOADS: Projection[list[tuple[bytes, bytes]]] = Projection("rows")


def cells_of(pointers: PointerSet) -> Projection[list[TxCell]]:
    """Return the projection of a search for the cells of some pointers."""
    return CELLS._replace(pointers=pointers)


def filter_cells(page: Page[list[TxCell]], pointers: PointerSet | None) -> Page[list[TxCell]]:
    """Return a page with only the cells of some pointers; None: all cells."""
    if pointers is None:
        return page
    # Access fields by position, which is faster than by name: a search visits many rows.
    cells = [cell for cell in page.items if cell[1] in pointers.members and cell[1] > 0]
    return page._replace(items=cells, rows_read=len(page.items))


class KeyReads(ABC):
    """The keys of a message or payload table.

    Attributes:
        keys_per_call: the number of keys that can be read in the time of one call's overhead; 0: no overhead.
    """

    name: TableName
    keys_per_call = 0

    @abstractmethod
    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        """Read a page of ``[start, stop)``.

        Args:
            want: the parts of a row that the page contains.
            limit: the largest number of rows to read.

        Raises:
            StoreError: the store failed.
        """

    def first(self, start: bytes, stop: bytes | None = None) -> bytes | None:
        """Return the first key of the range; None if the range is empty."""
        resume: bytes | None = start
        limit = 1
        while resume is not None:
            page = self.read(KEYS, resume, stop, limit)
            if page.items:
                return page.items[0]
            # The range may start with many rows that no reader sees.
            resume, limit = page.resume, _SEARCH_KEYS
        return None

    @abstractmethod
    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        """Return the approximate size of a range on disk; 0: unknown."""


def read_all(table: KeyReads, want: Projection[list[Item]], start: bytes, stop: bytes | None) -> Page[list[Item]]:
    """Read a whole range as one page.

    Raises:
        StoreError: a page could not be read.
    """
    found = list(pages(partial(table.read, want), start, stop, _SEARCH_KEYS))
    return Page([item for page in found for item in page.items], None, Origin.merge([page.origin for page in found]))


class KeyTable(KeyReads):
    """The common part of message table and payload table: keys, and deleting by key.

    Attributes:
        weighs_compaction: whether :meth:`compact` itself decides if a compaction is worth its cost; if so, the caller
            also calls it for a few rows.
    """

    weighs_compaction = False

    @property
    def max_value_bytes(self) -> int | None:
        """Return the largest message or payload that the table accepts, in bytes; None: unlimited."""
        return None

    def check_sizes(self, values: Sequence[bytes]) -> None:
        """Check that values are small enough for the table.

        Raises:
            TooLarge: a value is too large.
        """
        limit = self.max_value_bytes
        if limit is not None and values and (largest := max(map(len, values))) > limit:
            raise self._too_large(largest, limit)

    def _too_large(self, size: int, limit: int) -> TooLarge:
        return TooLarge(f"A message has {size} bytes, and the store accepts {limit}.", "Send smaller messages.")

    @property
    def can_compact_concurrently(self) -> bool:
        """Return whether another thread may call :meth:`compact` now, during reads and writes."""
        return False

    @abstractmethod
    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        """Delete rows; a key without a row is not an error. Durable after :meth:`sync`.

        Args:
            origin: the origin of the pages with these keys; None: unknown.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until all writes so far survive a crash of the machine."""

    @abstractmethod
    def compact(self, start: bytes, stop: bytes) -> None:
        """Request that the store frees the space of deleted rows in the range."""


class MessageReads(KeyReads):
    """The readable part of the message table."""

    def reserved(self, prefix: bytes) -> int:
        """Return the first position that new messages of a generation may use, even without rows; usually 0.

        Args:
            prefix: the key prefix of the generation.

        Returns:
            The position, as ``milliseconds * 65,536 + sequence``.
        """
        return 0


def partial_write_error(error: TooLarge) -> StoreError:
    """Return the error for a write whose first part was stored before the store rejected a later part."""
    return StoreError(f"A part of the messages is written. {error.message}", error.hint)


class MessageTable(MessageReads, KeyTable):
    """The message table."""

    @abstractmethod
    def invert(self, cells: Sequence[TxCell], origin: Origin | None = None) -> list[bool]:
        """Store the negated pointer in each row that still has exactly ``cell.pointer`` (invariant S6).

        Durable on return. Payload, other cells and key stay the same. A deleted row, or a row with another pointer,
        does not change.

        Args:
            origin: the origin of the pages with these cells; None: unknown.

        Returns:
            Whether the row has changed, for each cell.
        """

    @abstractmethod
    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        """Write rows in one durable batch, as CDAP would."""

    def hide(self, keys: Sequence[bytes]) -> None:
        """Hide adjoining rows from readers if a late write stores them again, in a store with late writes."""

    def rows_of(self, requests: Iterable[RowsOfRequest]) -> Sequence[tuple[bytes, MessageValue]]:
        """Return the rows of requests, in their order and in the form that :meth:`put` writes fastest."""
        return [
            (key, MessageValue(pointer, payload))
            for keys, pointer, payloads in requests
            for key, payload in zip(keys, (None,) if payloads is None else payloads, strict=True)
        ]


class PayloadReads(KeyReads):
    """The readable part of the payload table."""


class PayloadTable(PayloadReads, KeyTable):
    """The payload table."""

    @abstractmethod
    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Write rows in one durable batch, as CDAP would."""


class Calls(Counter[str]):
    """Counts of operations by name; threads may share it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a name; adding 0 creates no entry."""
        if number:
            with self._lock:
                self[name] += number


class MetadataReads(ABC):
    """The readable part of the metadata table, from a topic's key to its JSON. It is small, so a read returns all rows.

    Attributes:
        version: changes with each change of a row; None: other processes also change rows.
    """

    @property
    def version(self) -> int | None:
        return None

    @abstractmethod
    def rows(self) -> list[tuple[bytes, bytes]]:
        """Return all rows in key order, including deleted topics and rows that do not parse."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return the value of one row."""


class MetadataTable(MetadataReads):
    """The metadata table."""

    @abstractmethod
    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        """Write ``value`` if the row still holds ``expected`` (None: no row). Durable on return."""


class Reads(ABC):
    """The readable part of three related tables; readers such as a plan get only this (S5).

    Attributes:
        calls: the number of operations on the store, by name: ``keys``, ``cells``, ``delete`` and so on. A page of any
            size is one call. ``unreadable`` is a number of rows.
        span: the stored keys of the message table that this store has.
    """

    span: KeyRange = ALL_KEYS
    metadata: MetadataReads
    message: MessageReads
    payload: PayloadReads
    calls: Counter[str]

    def parts(self) -> Sequence[Reads]:
        """Return the parts of the store for parallel scans, each in key order; by default the store is its only part.

        A part contains the rows of its span, and shares all else with the store. To find rows in any span, use the
        store. The spans of two parts have no key in common, and keys outside all spans have no messages.
        """
        return (self,)

    def region(self, row: bytes) -> str:
        """Return the current region of a stored row of the message table, for operators; empty without regions.

        Raises:
            StoreError: the store could not be read.
        """
        return ""

    def with_own_counter(self) -> Self:
        """Return the store with a separate count of operations, if that is cheap; closing the result does nothing."""
        return self

    def obstacles(self) -> Sequence[str]:
        """Return the reasons against a prune boundary for this store, each as a sentence with a next step.

        The reasons are other cleaners that work on the store. A store with a single holder has no obstacles.
        """
        return ()

    def disk_bytes(self) -> int | None:
        """Return the size of the store on its disk; None if the store does not know it."""
        return None

    @abstractmethod
    def identity(self) -> str:
        """Return the identity of the store, which changes when the store is copied or replaced (invariant S13)."""

    @abstractmethod
    def lineage(self) -> Mapping[str, Any]:
        """Return marks that no backup of this store has, as JSON values. Each pass records them (invariant S13).

        Raises:
            StoreError: the marks cannot be read now.
        """

    @abstractmethod
    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        """Return the evidence that this store is a restored backup or another store.

        Args:
            known: the recorded lineage; empty: no lineage was recorded.

        Returns:
            The rest of a sentence, for operators; None if this may be the recorded store in a later state.

        Raises:
            StoreError: the marks cannot be read now.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the store; closing twice is not an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store(Reads):
    """Three related tables, for reading and writing."""

    metadata: MetadataTable
    message: MessageTable
    payload: PayloadTable

    def parts(self) -> Sequence[Store]:
        return (self,)

    def sync(self) -> None:
        """Wait until every change of messages and payloads so far survives a crash of the machine."""
        self.message.sync()
        self.payload.sync()
