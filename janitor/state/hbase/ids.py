"""What the state in HBase keeps of invalid transactions.

There may be a million of them, of which all but a few are closed, and a daemon asks every minute. So open ones are one
block, and closed ones leaves of some ten thousand in order of pointer, as columns of 64-bit numbers: a change rewrites
the leaf it falls into. What is asked of all closed ones, whether they count by a certain clock and window, is told by
the list of leaves, and the pointers are kept until the leaves are others.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from janitor.state.base import KnownIds, OpenIdRecord, State
from janitor.state.hbase.transactions import HBaseTransactions
from janitor.state.hbase.view import CLOSED, View
from janitor.state.records import is_among
from tms_core.transaction.model import transaction_ms

#: Ids in a leaf, at most: half a megabyte as numbers, and less as it is stored.
LEAF_IDS = 16_384
_OPEN = "ids.open"
#: The list of leaves.
_LEAVES = "ids"
#: What is known of an id.
_SCANNED, _CLOSED = 1, 2

_Changed = Mapping[int, OpenIdRecord | None]
_May = Callable[[OpenIdRecord], bool]


class Leaf(NamedTuple):
    """One leaf, as the list of them describes it.

    Attributes:
        number: its name is made of this.
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
        return f"{CLOSED}{self.number}"


class _Closed(NamedTuple):
    """All pointers that have a closing time, and the blocks they came from."""

    stamps: list[tuple[str, ...] | None]
    pointers: array[int]


class HBaseIds(HBaseTransactions, State):
    """The part of the state that is about invalid transactions."""

    _known_closed: _Closed | None = None

    def open_ids(self) -> dict[int, OpenIdRecord]:
        def read(view: View) -> dict[int, OpenIdRecord]:
            stored = [_open(view), *(_unpack(view.value(leaf.name)) for leaf in _leaves(view))]
            return dict(sorted((record.pointer, record) for record in chain.from_iterable(stored)))

        return self._read_view(read)

    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        def read(view: View) -> KnownIds:
            closed, open_ids = self._closed_pointers(view), _open(view)
            unsure = [leaf for leaf in _leaves(view) if leaf.latest_scan_ms > now_ms or leaf.window_ms < window_ms]
            if not unsure:
                return KnownIds({record.pointer: record for record in open_ids}, closed)
            records = chain.from_iterable(_unpack(view.value(leaf.name)) for leaf in unsure)
            open_ids += [record for record in records if not _counts(record, now_ms, window_ms)]
            found = dict(sorted((record.pointer, record) for record in open_ids))
            return KnownIds(found, array("q", (pointer for pointer in closed if pointer not in found)))

        return self._read_view(read)

    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        found = self._read_view(_open)
        return len(found), found[:limit]

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        saved = {record.pointer: record for record in records}
        self._write(lambda: self._change_ids(saved, _always))

    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        gone = dict.fromkeys(pointers)
        self._write(lambda: self._change_ids(gone, _always))

    def forget_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        def is_old(present: OpenIdRecord) -> bool:
            return present.closed_ms is not None and present.closed_ms < before_ms

        gone = dict.fromkeys(pointers)
        self._write(lambda: self._change_ids(gone, is_old))

    def _change_ids(self, changed: _Changed, may: _May) -> None:
        """Put ids in their place, or (None) drop them; of those present only where ``may`` allows it."""
        present = {record.pointer: record for record in self._read_view(_open)}
        opened = {
            pointer: record if record and record.closed_ms is None else None for pointer, record in changed.items()
        }
        new = _merged(present, opened, may)
        if new != present:
            self._save_packed(_OPEN, _pack(new) if new else None)
        known = self._read_view(self._closed_pointers)
        closed = {
            pointer: record if record and record.closed_ms is not None else None
            for pointer, record in changed.items()
            if (record and record.closed_ms is not None) or is_among(known, pointer)
        }
        if closed:
            self._change_closed(closed, may)

    def _change_closed(self, changed: _Changed, may: _May) -> None:
        leaves = self._read_view(_leaves)
        number = max((leaf.number for leaf in leaves), default=0)
        concerned: dict[Leaf | None, dict[int, OpenIdRecord | None]] = {}
        firsts = [leaf.first for leaf in leaves]
        for pointer, record in changed.items():
            leaf = leaves[max(0, bisect_right(firsts, pointer) - 1)] if leaves else None
            concerned.setdefault(leaf, {})[pointer] = record
        kept = [leaf for leaf in leaves if leaf not in concerned]
        for leaf, changed_here in concerned.items():
            present = self._present(leaf)
            new = _merged(present, changed_here, may)
            if leaf is not None and new == present:
                kept.append(leaf)
                continue
            if leaf is not None:
                self._save_packed(leaf.name, None)
            pointers = list(new)
            for begin in range(0, len(pointers), LEAF_IDS):
                number += 1
                kept.append(self._save_leaf(number, {p: new[p] for p in pointers[begin : begin + LEAF_IDS]}))
        self._save(_LEAVES, sorted(kept, key=lambda leaf: leaf.first) or None)

    def _present(self, leaf: Leaf | None) -> dict[int, OpenIdRecord]:
        if leaf is None:
            return {}
        return {record.pointer: record for record in self._read_view(lambda view: _unpack(view.value(leaf.name)))}

    def _save_leaf(self, number: int, records: dict[int, OpenIdRecord]) -> Leaf:
        # Where one was never searched for, no window has ended for all.
        windows = [-1 if r.scanned_ms is None else r.scanned_ms - transaction_ms(r.pointer) for r in records.values()]
        latest_ms = max(0 if record.scanned_ms is None else record.scanned_ms for record in records.values())
        leaf = Leaf(number, next(iter(records)), latest_ms, min(windows))
        self._save_packed(leaf.name, _pack(records))
        return leaf

    def _closed_pointers(self, view: View) -> array[int]:
        leaves = _leaves(view)
        stamps = [view.stamp(leaf.name) for leaf in leaves]
        if self._known_closed is not None and self._known_closed.stamps == stamps:
            return self._known_closed.pointers
        pointers = array("q")
        for leaf in leaves:
            pointers.extend(_columns(view.value(leaf.name))[0])
        # What has changed in a transaction may yet be undone.
        if None not in stamps:
            self._known_closed = _Closed(stamps, pointers)
        return pointers


def _leaves(view: View) -> list[Leaf]:
    value = view.value(_LEAVES)
    return [] if value is None else [Leaf(*each) for each in json.loads(value)]


def _open(view: View) -> list[OpenIdRecord]:
    return _unpack(view.value(_OPEN))


def _counts(record: OpenIdRecord, now_ms: int, window_ms: int) -> bool:
    """Whether the pass that closed it began after its window, and not after now."""
    scanned_ms = record.scanned_ms
    return scanned_ms is not None and transaction_ms(record.pointer) + window_ms <= scanned_ms <= now_ms


def _always(_: OpenIdRecord) -> bool:
    return True


def _merged(present: dict[int, OpenIdRecord], changed: _Changed, may: _May) -> dict[int, OpenIdRecord]:
    """The ids with the changes, in order of pointer."""
    new = dict(present)
    for pointer, record in changed.items():
        if pointer in present and not may(present[pointer]):
            continue
        new.pop(pointer, None)
        if record is not None:
            new[pointer] = record
    return dict(sorted(new.items()))


def _pack(records: dict[int, OpenIdRecord]) -> bytes:
    """Four columns of little-endian numbers, and for each id which of its times are known."""
    rows = records.values()
    columns = (
        array("q", records),
        array("q", (record.first_seen_ms for record in rows)),
        array("q", (record.scanned_ms or 0 for record in rows)),
        array("q", (record.closed_ms or 0 for record in rows)),
    )
    for column in columns if sys.byteorder == "big" else ():
        column.byteswap()
    known = bytes((r.scanned_ms is not None) * _SCANNED + (r.closed_ms is not None) * _CLOSED for r in rows)
    return b"".join([*(column.tobytes() for column in columns), known])


def _columns(packed: bytes | None) -> list[array[int]]:
    size = len(packed or b"") // 33 * 8
    columns = [array("q", (packed or b"")[at : at + size]) for at in range(0, 4 * size, size or 1)]
    for column in columns if sys.byteorder == "big" else ():
        column.byteswap()
    return columns


def _unpack(packed: bytes | None) -> list[OpenIdRecord]:
    if packed is None:
        return []
    known = packed[len(packed) // 33 * 32 :]
    return [
        OpenIdRecord(pointer, seen, scanned if flags & _SCANNED else None, closed if flags & _CLOSED else None)
        for pointer, seen, scanned, closed, flags in zip(*_columns(packed), known, strict=True)
    ]
