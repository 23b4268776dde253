"""What the state keeps of invalid transactions.

There may be a million of them, of which all but a few are closed, and a daemon asks every minute. So they are columns
of 64-bit numbers and never objects of their own: open ones one value, closed ones leaves of some ten thousand in order
of pointer, of which a change rewrites those it falls into. What is asked of all closed ones, whether they count by a
certain clock and window, is told by the list of leaves, and the pointers are kept until that list is another: a leaf
that is rewritten gets a new name.
"""

from __future__ import annotations

import json
import secrets
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import islice, pairwise, zip_longest
from operator import attrgetter, lt
from typing import NamedTuple

from janitor.state.documents import Documents, View
from janitor.state.records import KnownIds, OpenIdRecord, is_among
from tms_core.transaction.model import transaction_ms

#: Ids in a leaf, at most: half a megabyte as numbers.
LEAF_IDS = 16_384
_OPEN = "ids.open"
#: The list of leaves.
_LEAVES = "ids"
#: Bits of a leaf's random number.
_NUMBER_BITS = 53
#: What is known of an id.
_SCANNED, _CLOSED = 1, 2


class Leaf(NamedTuple):
    """One leaf, as the list of them describes it.

    Attributes:
        number: its name is made of this; random, so that no two leaves ever have the same.
        first: it holds closed ids from this pointer on, up to the next leaf's; the first leaf also lower ones.
        latest_scan_ms: when the last of the passes began that closed its ids.
        window_ms: they are closed for every window up to this.
    """

    number: int
    first: int
    latest_scan_ms: int
    window_ms: int

    @property
    def name(self) -> str:
        return f"ids.closed.{self.number}"


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class IdColumns:
    """Ids in order of pointer: four columns of numbers, and for each id which of its times are known."""

    pointers: array[int] = field(default_factory=_numbers)
    seen: array[int] = field(default_factory=_numbers)
    scanned: array[int] = field(default_factory=_numbers)
    closed: array[int] = field(default_factory=_numbers)
    known: bytearray = field(default_factory=bytearray)

    @classmethod
    def unpack(cls, packed: bytes | None) -> IdColumns:
        """Read them as they are kept: little-endian, 33 bytes an id."""
        size = len(packed or b"") // 33 * 8
        if not packed or not size:
            return cls()
        pointers, seen, scanned, closed = (
            _swapped(array("q", packed[at : at + size])) for at in range(0, 4 * size, size)
        )
        return cls(pointers, seen, scanned, closed, bytearray(packed[4 * size :]))

    def pack(self) -> bytes:
        """The columns as they are kept."""
        numbers = (self.pointers, self.seen, self.scanned, self.closed)
        return b"".join([*(_swapped(column) for column in numbers), self.known])

    def take(self, other: IdColumns, at: int) -> None:
        """Add one of the others behind the last."""
        self.pointers.append(other.pointers[at])
        self.seen.append(other.seen[at])
        self.scanned.append(other.scanned[at])
        self.closed.append(other.closed[at])
        self.known.append(other.known[at])

    def append(self, record: OpenIdRecord) -> None:
        self.pointers.append(record.pointer)
        self.seen.append(record.first_seen_ms)
        self.scanned.append(record.scanned_ms or 0)
        self.closed.append(record.closed_ms or 0)
        self.known.append((record.scanned_ms is not None) * _SCANNED + (record.closed_ms is not None) * _CLOSED)

    def part(self, begin: int, end: int) -> IdColumns:
        return IdColumns(
            self.pointers[begin:end],
            self.seen[begin:end],
            self.scanned[begin:end],
            self.closed[begin:end],
            self.known[begin:end],
        )

    def extend(self, other: IdColumns) -> None:
        """Add ids behind the last."""
        self.pointers += other.pointers
        self.seen += other.seen
        self.scanned += other.scanned
        self.closed += other.closed
        self.known += other.known

    def without(self, pointers: array[int], before_ms: int | None = None) -> IdColumns:
        """Those that are not among the pointers, and, unless it is None, those that were not closed before."""
        left, begin = IdColumns(), 0
        for pointer in pointers:
            at = bisect_left(self.pointers, pointer, begin)
            if at == len(self.pointers):
                break
            if self.pointers[at] == pointer and (before_ms is None or self.closed[at] < before_ms):
                if begin < at:
                    left.extend(self.part(begin, at))
                begin = at + 1
        if not begin:
            return self
        left.extend(self.part(begin, len(self.pointers)))
        return left

    def merged(self, other: IdColumns) -> IdColumns:
        """These and the others, none of which is among these."""
        if not self.pointers or not other.pointers:
            return self if self.pointers else other
        new, mine, theirs = IdColumns(), 0, 0
        while mine < len(self.pointers) and theirs < len(other.pointers):
            end = bisect_left(self.pointers, other.pointers[theirs], mine)
            new.extend(self.part(mine, end))
            mine = end
            if mine < len(self.pointers):
                end = bisect_left(other.pointers, self.pointers[mine], theirs)
                new.extend(other.part(theirs, end))
                theirs = end
        new.extend(self.part(mine, len(self.pointers)))
        new.extend(other.part(theirs, len(other.pointers)))
        return new

    def __iter__(self) -> Iterator[OpenIdRecord]:
        columns = self.pointers, self.seen, self.scanned, self.closed, self.known
        for pointer, seen, scanned, closed, known in zip(*columns, strict=True):
            scanned_ms, closed_ms = scanned if known & _SCANNED else None, closed if known & _CLOSED else None
            yield OpenIdRecord(pointer, seen, scanned_ms, closed_ms)


class InvalidIds(Documents):
    """The part of the state that is about invalid transactions."""

    #: The leaves last read, and all pointers in them.
    _known_closed: tuple[list[Leaf], array[int]] | None = None

    def open_ids(self) -> dict[int, OpenIdRecord]:
        """Invalid transactions by write pointer, the closed ones among them.

        One object each, and there may be a million: what every pass needs is in :meth:`known_ids`.
        """

        def read(view: View) -> dict[int, OpenIdRecord]:
            stored = [_open(view), *(_leaf(leaf, view) for leaf in _leaves(view))]
            return _by_pointer(record for columns in stored for record in columns)

        return self._read(read)

    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        """Invalid transactions, the closed ones as bare pointers. Cheap while no more are closed.

        One counts as closed if a thorough pass closed it that began at least ``window_ms`` after the transaction did,
        and not after ``now_ms``: a lifetime that was raised since opens it again, and so does a clock set back.

        Args:
            now_ms: what time it is.
            window_ms: how long after a transaction's begin something of it can be published.
        """

        def read(view: View) -> KnownIds:
            closed, open_ids = self._closed_pointers(view), list(_open(view))
            unsure = [leaf for leaf in _leaves(view) if leaf.latest_scan_ms > now_ms or leaf.window_ms < window_ms]
            if not unsure:
                return KnownIds({record.pointer: record for record in open_ids}, closed)
            for leaf in unsure:
                open_ids += [record for record in _leaf(leaf, view) if not _counts(record, now_ms, window_ms)]
            found = _by_pointer(open_ids)
            return KnownIds(found, array("q", (pointer for pointer in closed if pointer not in found)))

        return self._read(read)

    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        """How many ids no thorough pass has closed, and the lowest ``limit`` of them."""
        found = self._read(_open)
        return len(found.pointers), list(found.part(0, limit))

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        """Remember these; a record that did not change costs no write, and those of other pointers stay."""
        opened, closed = _apart(records)
        self._write(lambda: self._change_ids(opened, closed, array("q")))

    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        """Drop pointers that left the invalid list; unknown ones are no error."""
        gone = array("q", sorted(pointers))
        self._write(lambda: self._change_ids(IdColumns(), IdColumns(), gone))

    def forget_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        """Drop those of these pointers that were closed before; others, and unknown ones, are no error."""
        gone = array("q", sorted(pointers))
        self._write(lambda: self._change_closed(IdColumns(), gone, before_ms))

    def _change_ids(self, opened: IdColumns, closed: IdColumns, gone: array[int]) -> None:
        """Put open and closed ids in their place, in which other ones of the same pointer are, and drop others."""
        pointers = array("q", merge(opened.pointers, closed.pointers, gone))
        present = self._read(_open)
        new = present.without(pointers).merged(opened)
        if new != present:
            self._save_packed(_OPEN, new.pack() if new.pointers else None)
        known = self._read(self._closed_pointers)
        if closed.pointers or known:
            self._change_closed(closed, array("q", (pointer for pointer in pointers if is_among(known, pointer))))

    def _change_closed(self, added: IdColumns, gone: array[int], before_ms: int | None = None) -> None:
        """Drop closed ids, those that were closed before, and put others in their place."""
        leaves = self._read(_leaves)
        firsts = [leaf.first for leaf in leaves[1:]]
        edges = [
            pairwise([0, *(bisect_left(pointers, first) for first in firsts), len(pointers)])
            for pointers in (added.pointers, gone)
        ]
        concerned: list[Leaf | None] = [*leaves] or [None]
        kept: list[Leaf] = []
        for leaf, (begin, end), (first_gone, end_gone) in zip(concerned, *edges, strict=True):
            if begin == end and first_gone == end_gone:
                kept += [leaf] if leaf else []
                continue
            present = IdColumns() if leaf is None else self._read(partial(_leaf, leaf))
            new = present.without(gone[first_gone:end_gone], before_ms).merged(added.part(begin, end))
            if leaf is not None and new == present:
                kept.append(leaf)
                continue
            if leaf is not None:
                self._save_packed(leaf.name, None)
            kept += [self._save_leaf(new.part(at, at + LEAF_IDS)) for at in range(0, len(new.pointers), LEAF_IDS)]
        self._save(_LEAVES, kept or None)

    def _save_leaf(self, ids: IdColumns) -> Leaf:
        # Where one was never searched for, no window has ended for all.
        windows = (
            scanned - transaction_ms(pointer) if known & _SCANNED else -1
            for pointer, scanned, known in zip(ids.pointers, ids.scanned, ids.known, strict=True)
        )
        leaf = Leaf(secrets.randbits(_NUMBER_BITS), ids.pointers[0], max(0, *ids.scanned), min(windows))
        self._save_packed(leaf.name, ids.pack())
        return leaf

    def _closed_pointers(self, view: View) -> array[int]:
        leaves = _leaves(view)
        known = self._known_closed
        if known is None or known[0] != leaves:
            pointers = array("q")
            for leaf in leaves:
                pointers += _leaf(leaf, view).pointers
            # Another thread may read those of another moment, so what was read here is what is given back.
            self._known_closed = known = leaves, pointers
        return known[1]


def _apart(records: Iterable[OpenIdRecord]) -> tuple[IdColumns, IdColumns]:
    """The open and the closed ones; of those of one pointer the last."""
    given, opened, closed = IdColumns(), IdColumns(), IdColumns()
    for record in records:
        given.append(record)
    closings = given.known.count(_CLOSED) + given.known.count(_CLOSED | _SCANNED)
    if closings in (0, len(given.pointers)) and all(map(lt, given.pointers, islice(given.pointers, 1, None))):
        # As they are when the janitor meets a store with a million of them.
        return (opened, given) if closings else (given, closed)
    order = sorted(range(len(given.pointers)), key=given.pointers.__getitem__)
    for at, following in zip_longest(order, islice(order, 1, None)):
        if following is None or given.pointers[at] != given.pointers[following]:
            (closed if given.known[at] & _CLOSED else opened).take(given, at)
    return opened, closed


def _leaves(view: View) -> list[Leaf]:
    value = view.value(_LEAVES)
    return [] if value is None else [Leaf(*each) for each in json.loads(value)]


def _leaf(leaf: Leaf, view: View) -> IdColumns:
    return IdColumns.unpack(view.value(leaf.name))


def _open(view: View) -> IdColumns:
    return IdColumns.unpack(view.value(_OPEN))


def _by_pointer(records: Iterable[OpenIdRecord]) -> dict[int, OpenIdRecord]:
    return {record.pointer: record for record in sorted(records, key=attrgetter("pointer"))}


def _counts(record: OpenIdRecord, now_ms: int, window_ms: int) -> bool:
    """Whether the pass that closed it began after its window, and not after now."""
    scanned_ms = record.scanned_ms
    return scanned_ms is not None and transaction_ms(record.pointer) + window_ms <= scanned_ms <= now_ms


def _swapped(column: array[int]) -> array[int]:
    """A column of this machine as one of little-endian numbers, or the other way round."""
    if sys.byteorder == "little":
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped
