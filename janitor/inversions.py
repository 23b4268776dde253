"""Negating the pointers of invalid transactions in the message rows that stay (L4).

Which rows an invalid transaction wrote is written nowhere, so the message table is searched: all of it in a thorough
pass, else only publish times at which an open transaction can have written. The search goes generation by generation,
over topics nobody knows too, because a row stays a row of its transaction whoever it belongs to.
"""

from __future__ import annotations

from janitor.permission import Withheld
from janitor.policy import Delete, Invert, Row, Rule, decide
from janitor.ranges import Range, topic_stop
from janitor.report import EntryKey
from janitor.walk import Walk
from tms_core.errors import StoreError
from tms_core.rowkey import LONG_MAX, MessageKey, generation_prefix, time_prefix
from tms_core.tables.base import TxCell


def _leave(keys: list[bytes]) -> None:
    """Keys of no topic were counted when messages were deleted."""


class Inversions:
    """The step of a pass that comes after the messages', because a row that went need not be inverted.

    Args:
        walk: where.
        since_ms: from which publish time on rows are searched; None: not at all.
        everything: search rows under keys that are none of ours as well, if the pass is a thorough one.
    """

    def __init__(self, walk: Walk, since_ms: int | None, *, everything: bool = True) -> None:
        self._walk = walk
        self._since_ms = since_ms
        self._everything = everything and walk.world.thorough and not walk.world.patterns

    def invert(self) -> None:
        """Negate the pointers of invalid transactions in the message rows that stay (L4)."""
        if self._since_ms is None:
            return
        table = self._walk.store.message
        self._walk.messages.forget()
        key = self._walk.first(table, b"")
        while key is not None:
            parsed = MessageKey.parse(key)
            key = self._look_at_foreign(key) if parsed is None else self._invert_from(key, parsed, self._since_ms)

    def _look_at_foreign(self, key: bytes) -> bytes | None:
        """Take note of invalid pointers under keys that are none of ours; returns the first key behind them."""
        behind = self._walk.skip(self._walk.store.message, key, MessageKey.parse, _leave)
        if self._everything:
            self._search_cells(key, behind)
        return behind

    def _invert_from(self, key: bytes, parsed: MessageKey, since_ms: int) -> bytes | None:
        """Do the key's generation; returns the first key behind it, or behind its topic if that fails."""
        table, prefix = self._walk.store.message, parsed.topic.prefix
        start, stop = self._search(parsed, since_ms)
        if self._walk.passes_by(prefix) or self._walk.world.is_paused(prefix):
            return self._walk.first(table, topic_stop(prefix))
        try:
            self._search_cells(max(key, start), stop)
            return self._walk.first(table, stop)
        except StoreError as error:
            self._walk.fail("message", prefix, error)
        except Withheld:
            self._walk.withheld.add(prefix)
        return self._walk.first(table, topic_stop(prefix))

    def _search(self, key: MessageKey, since_ms: int) -> Range:
        prefix = key.topic.prefix
        start = time_prefix(prefix, key.generation, min(max(0, since_ms), LONG_MAX))
        # A generation of -1 is followed by the next topic, not by generation 0.
        last = key.generation == -1
        return Range(start, topic_stop(prefix) if last else generation_prefix(prefix, key.generation + 1))

    def _search_cells(self, first: bytes, stop: bytes | None) -> None:
        is_invalid = self._walk.world.transactions.is_invalid
        start: bytes | None = first
        while start is not None and (stop is None or start < stop):
            page = self._walk.messages.cells(start, stop, self._walk.page_rows)
            found = [cell for cell in page.items if cell.pointer > 0 and is_invalid(cell.pointer)]
            if found:
                self._negate(found)
            self._walk.observe("invert", None, len(page.items))
            start = page.resume

    def _negate(self, cells: list[TxCell]) -> None:
        """Negate the cells, all of one topic, that the law inverts; it has the last word on each."""
        doomed = [(key, cell) for cell in cells if (key := self._inverts(cell)) is not None]
        if not doomed:
            return
        table = self._walk.store.message
        changed = self._walk.act.invert(doomed[0][0].topic, table, [cell for _, cell in doomed])
        for (key, cell), done in zip(doomed, changed, strict=True):
            if done:
                self._walk.act.inverted(self._walk.world.topics.get(key.topic.prefix), key, cell)
                self._tally_inverted(key, cell)
        self._walk.act.pay(len(doomed))

    def _inverts(self, cell: TxCell) -> MessageKey | None:
        key = MessageKey.parse(cell.key)
        if key is None:
            self._walk.tally.keep_pointer(cell.pointer)
            return None
        work = self._walk.world.topics.get(key.topic.prefix)
        topic, frontier = (work.topic, work.frontier) if work else (None, None)
        limits = self._walk.world.limits
        if limits is not None and cell.pointer not in limits.pointers.get(key.topic, ()):
            return None
        verdict = decide(Row("message", key, cell.pointer), topic, frontier, self._walk.world.transactions, False, None)
        if isinstance(verdict, Delete):
            # Due, and still there: its topic has changed since this part's messages were deleted. The next pass's.
            self._walk.tally.keep_pointer(cell.pointer)
        return key if isinstance(verdict, Invert) else None

    def _tally_inverted(self, key: MessageKey, cell: TxCell) -> None:
        label = EntryKey(key.topic, key.generation, "message", Rule.INVALID_TRANSACTION, self._walk.world.label)
        self._walk.tally.entry(label).add([cell.key], len(cell.key), key.publish_ms, key.publish_ms)
        self._walk.tally.pointers.setdefault(key.topic, set()).add(cell.pointer)
