"""What the memory in HBase keeps of invalid transactions.

There may be a million of them, of which all but a few are closed, and a daemon asks every minute. So open ones are one
block, and closed ones leaves of some ten thousand in order of pointer, as columns of 64-bit numbers: a change rewrites
the leaf it falls into. What is asked of all closed ones, whether they count by a certain clock and window, stands beside
the names of the leaves, and the pointers are kept until the leaves are others.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from janitor.state.base import KnownIds, OpenIdRecord, State
from janitor.state.hbase_memory import CLOSED, HBaseMemory, View
from janitor.state.records import is_among
from tms_core.transaction.model import transaction_ms

#: Ids in a leaf, at most: half a megabyte as numbers, and less as it is stored.
LEAF_IDS = 16_384
_OPEN = "ids.open"
#: The list of leaves.
_LEAVES = "ids"
_MISSING = 0


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


@dataclass(frozen=True, slots=True)
class _Closed:
    """All pointers that have a closing time, and the leaves they came from."""

    stamps: tuple[tuple[str, ...] | None, ...]
    pointers: array[int]


class HBaseIds(HBaseMemory, State):
    """The part of the memory that is about invalid transactions."""

    _known_closed: _Closed | None = None

    def open_ids(self) -> dict[int, OpenIdRecord]:
        def read(view: View) -> dict[int, OpenIdRecord]:
            stored = [_open(view), *(_records(view, leaf) for leaf in _leaves(view))]
            return {record.pointer: record for record in sorted(chain.from_iterable(stored), key=_pointer)}

        return self._look(read)

    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        def counts(record: OpenIdRecord) -> bool:
            scanned_ms = record.scanned_ms
            if scanned_ms is None or scanned_ms > now_ms:
                return False
            return transaction_ms(record.pointer) + window_ms <= scanned_ms

        def read(view: View) -> KnownIds:
            leaves = _leaves(view)
            closed, again = self._closed_pointers(view), []
            for leaf in leaves:
                if leaf.latest_scan_ms > now_ms or leaf.window_ms < window_ms:
                    again += [record for record in _records(view, leaf) if not counts(record)]
            open_ids = {record.pointer: record for record in sorted([*_open(view), *again], key=_pointer)}
            if again:
                closed = array("q", (pointer for pointer in closed if pointer not in open_ids))
            return KnownIds(open_ids, closed)

        return self._look(read)

    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        found = self._look(_open)
        return len(found), found[:limit]

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        saved = {record.pointer: record for record in records}
        self._write(lambda: self._change_ids(saved, lambda _: True))

    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        gone: dict[int, OpenIdRecord | None] = dict.fromkeys(pointers)
        self._write(lambda: self._change_ids(gone, lambda _: True))

    def forget_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        def is_old(present: OpenIdRecord) -> bool:
            return present.closed_ms is not None and present.closed_ms < before_ms

        gone: dict[int, OpenIdRecord | None] = dict.fromkeys(pointers)
        self._write(lambda: self._change_ids(gone, is_old))

    def _change_ids(
        self, changed: dict[int, OpenIdRecord] | dict[int, OpenIdRecord | None], may: Callable[[OpenIdRecord], bool]
    ) -> None:
        """Put or (None) drop ids, of those present only where ``may`` allows it."""
        present = {record.pointer: record for record in self._look(_open)}
        new = dict(present)
        for pointer, record in changed.items():
            if pointer not in present or may(present[pointer]):
                new.pop(pointer, None)
                if record is not None and record.closed_ms is None:
                    new[pointer] = record
        if new != present:
            self._save_packed(_OPEN, _pack(sorted(new.values(), key=_pointer)) if new else None)
        self._change_closed(changed, may)

    def _change_closed(
        self, changed: dict[int, OpenIdRecord] | dict[int, OpenIdRecord | None], may: Callable[[OpenIdRecord], bool]
    ) -> None:
        leaves = self._look(_leaves)
        known = self._look(self._closed_pointers)
        concerned = sorted(
            pointer
            for pointer, record in changed.items()
            if (record is not None and record.closed_ms is not None) or is_among(known, pointer)
        )
        if not concerned:
            return
        number = max((leaf.number for leaf in leaves), default=0)
        firsts = [leaf.first for leaf in leaves]
        by_leaf: dict[int, list[int]] = {}
        for pointer in concerned:
            by_leaf.setdefault(max(0, bisect_right(firsts, pointer) - 1), []).append(pointer)
        kept = [leaf for at, leaf in enumerate(leaves) if at not in by_leaf]
        for at, pointers in by_leaf.items():
            leaf = leaves[at] if leaves else None
            present = {r.pointer: r for r in self._look(lambda view, leaf=leaf: _records(view, leaf))} if leaf else {}
            new = dict(present)
            for pointer in pointers:
                record = changed[pointer]
                if pointer in present and not may(present[pointer]):
                    continue
                new.pop(pointer, None)
                if record is not None and record.closed_ms is not None:
                    new[pointer] = record
            if new == present:
                kept += [leaf] if leaf else []
                continue
            if leaf is not None:
                self._save_packed(leaf.name, None)
            ordered = sorted(new.values(), key=_pointer)
            for begin in range(0, len(ordered), LEAF_IDS):
                number += 1
                kept.append(self._save_leaf(number, ordered[begin : begin + LEAF_IDS]))
        self._save(_LEAVES, sorted(kept, key=lambda leaf: leaf.first) or None)

    def _save_leaf(self, number: int, records: list[OpenIdRecord]) -> Leaf:
        scans = [record.scanned_ms for record in records if record.scanned_ms is not None]
        # Where one was never searched for, no window has ended for all.
        whole = len(scans) == len(records)
        window_ms = min(r.scanned_ms - transaction_ms(r.pointer) for r in records if r.scanned_ms is not None) if whole else -1
        leaf = Leaf(number, records[0].pointer, max(scans, default=0), window_ms)
        self._save_packed(leaf.name, _pack(records))
        return leaf

    def _closed_pointers(self, view: View) -> array[int]:
        leaves = _leaves(view)
        stamps = tuple(view.stamp(leaf.name) for leaf in leaves)
        known = self._known_closed
        if known is not None and known.stamps == stamps and None not in stamps:
            return known.pointers
        pointers = array("q")
        for leaf in leaves:
            pointers.extend(_columns(view, leaf)[0])
        if None not in stamps:
            self._known_closed = _Closed(stamps, pointers)
        return pointers


def _pointer(record: OpenIdRecord) -> int:
    return record.pointer
