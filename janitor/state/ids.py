"""Invalid transactions in the state.

There may be a million of them, nearly all closed, and a daemon reads them every minute. Therefore they are stored as
columns of 64-bit numbers, and only the ids of one batch are objects. Open and closed ids have separate leaves of some
thousand ids, sorted by pointer; a change rewrites the affected leaves. The list of leaves also shows whether all closed
ids count for a given clock and window. The pointers are cached until that list changes: a rewritten leaf gets a new
name.
"""

from __future__ import annotations

import json
import secrets
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from heapq import merge
from itertools import islice, pairwise, zip_longest
from operator import attrgetter, le, lt, sub
from threading import get_ident
from typing import NamedTuple

from janitor.state.documents import Documents, View, damage_as_error
from janitor.state.records import KnownIds, OpenIdRecord, is_among
from janitor.state.values import unpack
from tms_core.transaction.model import transaction_ms

#: The maximum number of ids in one change; half a megabyte as numbers.
BATCH_IDS = 16_384
#: The names of the lists of leaves, and the prefixes of the names of leaves.
_OPEN, _CLOSED_IDS = "ids.open", "ids.closed"
#: The size of a leaf's random number, in bits.
_NUMBER_BITS = 53
#: Flags for the known times of an id.
_SCANNED, _CLOSED = 1, 2


class Leaf(NamedTuple):
    """An entry in the list of leaves.

    Attributes:
        number: a random number that makes the leaf's name unique.
        first: its first pointer; the leaf has the ids up to the first pointer of the next leaf. The first leaf also has
            lower ids.
        latest_scan_ms: the start of the last pass that searched for any of its ids.
        window_ms: the longest window for which all its ids count as closed.
    """

    number: int
    first: int
    latest_scan_ms: int
    window_ms: int


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class IdColumns:
    """Ids sorted by pointer: four columns of numbers, and a column of flags for the known times."""

    pointers: array[int] = field(default_factory=_numbers)
    seen: array[int] = field(default_factory=_numbers)
    scanned: array[int] = field(default_factory=_numbers)
    closed: array[int] = field(default_factory=_numbers)
    known: bytearray = field(default_factory=bytearray)

    @classmethod
    def of(cls, records: Sequence[OpenIdRecord]) -> IdColumns:
        """Return the columns of records, in their order."""
        return cls(
            array("q", [record.pointer for record in records]),
            array("q", [record.first_seen_ms for record in records]),
            array("q", [record.scanned_ms or 0 for record in records]),
            array("q", [record.closed_ms or 0 for record in records]),
            bytearray([(r.scanned_ms is not None) * _SCANNED + (r.closed_ms is not None) * _CLOSED for r in records]),
        )

    @classmethod
    def unpack(cls, packed: bytes | None) -> IdColumns:
        """Read the stored columns: little-endian, 33 bytes an id, compressed."""
        if packed is None:
            return cls()
        packed = zlib.decompress(packed)
        if len(packed) % 33:
            raise ValueError(f"{len(packed)} bytes")
        size = len(packed) // 33 * 8
        pointers, seen, scanned, closed = (
            _to_little_endian(array("q", packed[at : at + size])) for at in range(0, 4 * size, size)
        )
        return cls(pointers, seen, scanned, closed, bytearray(packed[4 * size :]))

    def pack(self) -> bytes:
        """Return the columns as stored bytes."""
        numbers = (self.pointers, self.seen, self.scanned, self.closed)
        return zlib.compress(b"".join([*(_to_little_endian(column) for column in numbers), self.known]), 1)

    def append(self, other: IdColumns, at: int) -> None:
        """Append the id at a position of other columns."""
        self.pointers.append(other.pointers[at])
        self.seen.append(other.seen[at])
        self.scanned.append(other.scanned[at])
        self.closed.append(other.closed[at])
        self.known.append(other.known[at])

    def part(self, begin: int, end: int) -> IdColumns:
        return IdColumns(
            self.pointers[begin:end],
            self.seen[begin:end],
            self.scanned[begin:end],
            self.closed[begin:end],
            self.known[begin:end],
        )

    def extend(self, other: IdColumns) -> None:
        """Append all ids of other columns."""
        self.pointers += other.pointers
        self.seen += other.seen
        self.scanned += other.scanned
        self.closed += other.closed
        self.known += other.known

    def without(self, pointers: array[int], before_ms: int | None = None) -> IdColumns:
        """Return the ids without these pointers; with ``before_ms``, keep pointers closed at or after that time."""
        rest, begin = IdColumns(), 0
        if before_ms is None and self.pointers == pointers:
            return rest
        for pointer in pointers:
            at = bisect_left(self.pointers, pointer, begin)
            if at == len(self.pointers):
                break
            if self.pointers[at] == pointer and (before_ms is None or self.closed[at] < before_ms):
                if begin < at:
                    rest.extend(self.part(begin, at))
                begin = at + 1
        if not begin:
            return self
        rest.extend(self.part(begin, len(self.pointers)))
        return rest

    def merged(self, other: IdColumns) -> IdColumns:
        """Merge two disjoint columns, sorted by pointer."""
        if not self.pointers or not other.pointers:
            return self if self.pointers else other
        new, own_at, other_at = IdColumns(), 0, 0
        while own_at < len(self.pointers) and other_at < len(other.pointers):
            end = bisect_left(self.pointers, other.pointers[other_at], own_at)
            new.extend(self.part(own_at, end))
            own_at = end
            if own_at < len(self.pointers):
                end = bisect_left(other.pointers, self.pointers[own_at], other_at)
                new.extend(other.part(other_at, end))
                other_at = end
        new.extend(self.part(own_at, len(self.pointers)))
        new.extend(other.part(other_at, len(other.pointers)))
        return new

    def __iter__(self) -> Iterator[OpenIdRecord]:
        columns = self.pointers, self.seen, self.scanned, self.closed, self.known
        for pointer, seen, scanned, closed, known in zip(*columns, strict=True):
            scanned_ms, closed_ms = scanned if known & _SCANNED else None, closed if known & _CLOSED else None
            yield OpenIdRecord(pointer, seen, scanned_ms, closed_ms)


class InvalidIds(Documents):
    """The invalid transactions in the state."""

    #: The last read list of leaves of closed ids, and their pointers.
    _known_closed: tuple[tuple[Leaf, ...], array[int]] | None = None

    def open_ids(self) -> dict[int, OpenIdRecord]:
        """Return all invalid transactions by write pointer, up to a million objects; a pass uses :meth:`known_ids`."""

        def read(view: View) -> dict[int, OpenIdRecord]:
            return _by_pointer(record for kind in (_OPEN, _CLOSED_IDS) for ids in _all(kind, view) for record in ids)

        return self._read(read)

    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        """Return the invalid transactions, with closed transactions as bare pointers; cheap until more ids are closed.

        An id counts as closed if the pass that closed it started at least ``window_ms`` after the transaction, and not
        after ``now_ms``. Therefore a longer lifetime, or a clock that was set back, opens the id again.

        Args:
            now_ms: the current time.
            window_ms: the longest time from a transaction's start to its last publish.
        """

        def read(view: View) -> KnownIds:
            closed, open_ids = self._closed_pointers(view), [record for ids in _all(_OPEN, view) for record in ids]
            leaves = _leaves(_CLOSED_IDS, view)
            unsure = [leaf for leaf in leaves if leaf.latest_scan_ms > now_ms or leaf.window_ms < window_ms]
            if not unsure:
                return KnownIds({record.pointer: record for record in open_ids}, closed)
            for leaf in unsure:
                open_ids += [
                    record for record in _leaf(_CLOSED_IDS, leaf, view) if not _counts(record, now_ms, window_ms)
                ]
            found = _by_pointer(open_ids)
            return KnownIds(found, array("q", (pointer for pointer in closed if pointer not in found)))

        return self._read(read)

    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        """Return the number of ids that no full pass has closed, and the lowest ``limit`` of them."""

        def read(view: View) -> tuple[int, list[OpenIdRecord]]:
            number, lowest = 0, list[OpenIdRecord]()
            for ids in _all(_OPEN, view):
                lowest += ids.part(0, max(0, limit - number))
                number += len(ids.pointers)
            return number, lowest

        return self._read(read)

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        """Save these ids; unchanged records cost no write, and other pointers are unchanged."""
        batches: Iterable[tuple[IdColumns, IdColumns]] = map(_separate, _batches(records))
        if self._inside != get_ident():
            # ``_write`` may repeat the change after a conflict.
            batches = list(batches)

        def save() -> None:
            for opened, closed in batches:
                self._change_ids(opened, closed, array("q"))

        self._write(save)

    def delete_open_ids(self, pointers: Iterable[int]) -> None:
        """Delete pointers that left the invalid list; ignore unknown pointers."""
        removals = _sort_pointers(pointers)
        self._write(lambda: self._change_ids(IdColumns(), IdColumns(), removals))

    def delete_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        """Delete pointers that were closed before a time; ignore other pointers."""
        removals = _sort_pointers(pointers)
        self._write(lambda: self._change(_CLOSED_IDS, IdColumns(), removals, before_ms))

    def _change_ids(self, opened: IdColumns, closed: IdColumns, removals: array[int]) -> None:
        """Save open and closed ids in place of ids with the same pointers, and delete the removed ids."""
        pointers = array("q", merge(opened.pointers, closed.pointers, removals))
        self._change(_OPEN, opened, pointers)
        if not closed.pointers:
            known = self._read(self._closed_pointers)
            pointers = array("q", (pointer for pointer in pointers if is_among(known, pointer)) if known else ())
        self._change(_CLOSED_IDS, closed, pointers)

    def _change(self, kind: str, added: IdColumns, removals: array[int], before_ms: int | None = None) -> None:
        """Delete ids, with ``before_ms`` only ids closed before that time, and add others."""
        if not added.pointers and not removals:
            return
        leaves = self._read(partial(_leaves, kind))
        firsts = [leaf.first for leaf in leaves[1:]]
        edges = [
            pairwise([0, *(bisect_left(pointers, first) for first in firsts), len(pointers)])
            for pointers in (added.pointers, removals)
        ]
        old_leaves: list[Leaf | None] = [*leaves] or [None]
        new_leaves: list[Leaf] = []
        size = self.driver.leaf_ids
        for leaf, (begin, end), (first_removal, end_removal) in zip(old_leaves, *edges, strict=True):
            if begin == end and first_removal == end_removal:
                new_leaves += [leaf] if leaf else []
                continue
            present = IdColumns() if leaf is None else self._read(partial(_leaf, kind, leaf))
            new = present.without(removals[first_removal:end_removal], before_ms).merged(added.part(begin, end))
            if leaf is not None and new == present:
                new_leaves.append(leaf)
                continue
            if leaf is not None:
                # Never rewrite a leaf in place: caches and other processes identify a leaf by its name.
                self._save_packed(_name(kind, leaf), None)
            new_leaves += [self._save_leaf(kind, new.part(at, at + size)) for at in range(0, len(new.pointers), size)]
        self._save(kind, new_leaves or None)

    def _save_leaf(self, kind: str, ids: IdColumns) -> Leaf:
        searched = ids.known.count(_SCANNED) + ids.known.count(_SCANNED | _CLOSED)
        # An id without a search counts as open for each window.
        window_ms = -1
        if searched == len(ids.known):
            window_ms = min(map(sub, ids.scanned, map(transaction_ms, ids.pointers)))
        leaf = Leaf(secrets.randbits(_NUMBER_BITS), ids.pointers[0], max(0, *ids.scanned), window_ms)
        self._save_packed(_name(kind, leaf), ids.pack())
        return leaf

    def _closed_pointers(self, view: View) -> array[int]:
        leaves, known = _leaves(_CLOSED_IDS, view), self._known_closed
        if known is None or known[0] != leaves:
            pointers = array("q")
            for ids in _all(_CLOSED_IDS, view):
                pointers += ids.pointers
            # Another thread may replace the cache by another version, so return the local value.
            self._known_closed = known = leaves, pointers
        return known[1]


def _separate(records: Sequence[OpenIdRecord]) -> tuple[IdColumns, IdColumns]:
    """Return open and closed ids separately; the last record of a pointer counts."""
    columns, opened, closed = IdColumns.of(records), IdColumns(), IdColumns()
    closings = columns.known.count(_CLOSED) + columns.known.count(_CLOSED | _SCANNED)
    if closings in (0, len(columns.pointers)) and all(map(lt, columns.pointers, islice(columns.pointers, 1, None))):
        # The usual order at first contact with a store that has a million ids.
        return (opened, columns) if closings else (columns, closed)
    order = sorted(range(len(columns.pointers)), key=columns.pointers.__getitem__)
    for at, following in zip_longest(order, islice(order, 1, None)):
        if following is None or columns.pointers[at] != columns.pointers[following]:
            (closed if columns.known[at] & _CLOSED else opened).append(columns, at)
    return opened, closed


def _batches(records: Iterable[OpenIdRecord]) -> Iterator[list[OpenIdRecord]]:
    rest = iter(records)
    while batch := list(islice(rest, BATCH_IDS)):
        yield batch


def _sort_pointers(pointers: Iterable[int]) -> array[int]:
    """Return sorted pointers; skip the sort of a sorted array, which would create a million objects."""
    values = array("q", pointers)
    return values if all(map(le, values, islice(values, 1, None))) else array("q", sorted(values))


def _leaves(kind: str, view: View) -> tuple[Leaf, ...]:
    value = view.value(kind)
    with damage_as_error(kind):
        return () if value is None else _parse_leaves(value)


@lru_cache(maxsize=4)
def _parse_leaves(value: bytes) -> tuple[Leaf, ...]:
    """Parse a list of leaves; cached, because up to a thousand entries are the same for hours and are read often."""
    return tuple(unpack(list[Leaf], json.loads(value)))


def _name(kind: str, leaf: Leaf) -> str:
    return f"{kind}.{leaf.number}"


def _leaf(kind: str, leaf: Leaf, view: View) -> IdColumns:
    name = _name(kind, leaf)
    value = view.value(name)
    with damage_as_error(name):
        return IdColumns.unpack(value)


def _all(kind: str, view: View) -> Iterator[IdColumns]:
    """Return the columns of all leaves, sorted by pointer."""
    return (_leaf(kind, leaf, view) for leaf in _leaves(kind, view))


def _by_pointer(records: Iterable[OpenIdRecord]) -> dict[int, OpenIdRecord]:
    return {record.pointer: record for record in sorted(records, key=attrgetter("pointer"))}


def _counts(record: OpenIdRecord, now_ms: int, window_ms: int) -> bool:
    """Return whether the last pass that searched for an id started after its window, and not after now."""
    scanned_ms = record.scanned_ms
    return scanned_ms is not None and transaction_ms(record.pointer) + window_ms <= scanned_ms <= now_ms


def _to_little_endian(column: array[int]) -> array[int]:
    """Convert a column between the byte order of this machine and little-endian."""
    if sys.byteorder == "little":
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped
