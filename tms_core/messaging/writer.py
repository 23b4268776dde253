"""Writing batches of requests: into the message table, and into the payload table.

Messages of one request are contiguous, and nothing of a batch is shown before all of it is durable.

A write that fails may have been done in part (HBase has no batches): the rows of transactions are negated and stored
payloads are deleted before the error is answered, as far as the store lets one. Nothing can be taken back of what was
published outside transactions. A client that does not know the outcome invalidates its transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import cast

from tms_core.errors import StoreError
from tms_core.messaging.cache import MessageCache, Run
from tms_core.messaging.ids import expires_ms, id_parts, tail
from tms_core.messaging.lines import Line
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.queue import Queue, Request, Site
from tms_core.rowkey import MESSAGE_TAIL_BYTES, pointer_prefix
from tms_core.side import Expiries
from tms_core.tables.base import MessageTable, MessageValue, PayloadTable, TxCell
from tms_core.topic import TopicId, TopicMetadata

#: Cells read at once by a rollback.
_CELLS = 1000
#: Makes a row's value of pointer and payload; the constructor of a named tuple without its detour through Python.
_value = partial(tuple.__new__, MessageValue)


class MessageWriter(Queue[RollbackRange | None]):
    """The queue of a topic's messages.

    Args:
        table: the message table.
        cache: what is durable goes there.
        expiries: where messages with a ttl of their own are announced; None where there can be none.
    """

    def __init__(
        self, topic: TopicId, site: Site, table: MessageTable, cache: MessageCache, expiries: Expiries | None
    ) -> None:
        super().__init__(topic, site)
        self._table = table
        self._cache = cache
        self._expiries = expiries

    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[Request[RollbackRange | None]]) -> None:
        line = self._site.lines.messages(topic)
        first = stop = line.ids.first(now_ms)
        runs: list[Run] = []
        written: list[Request[RollbackRange | None]] = []
        for request in batch:
            if self._in_time(request, stop):
                written.append(request)
                runs.append(Run(stop, request.pointer, request.messages or None, request.size, request.ttl_ms))
                stop += len(request.messages) or 1
        if not runs:
            return
        line.ids.take(first, stop)
        try:
            self._announce(line, runs)
            self._put(line.prefix, runs)
            self._cache.add(line.prefix, runs)
        except BaseException:
            self._cache.forget(line.prefix, stop)
            raise
        finally:
            line.ids.release()
        for request, run in zip(written, runs, strict=True):
            request.answer.set_result(_rollback_range(run))

    def _announce(self, line: Line, runs: Sequence[Run]) -> None:
        """Write down which messages have a ttl of their own, before they are there."""
        mortal = [(run, run.ttl_ms) for run in runs if run.ttl_ms is not None]
        if mortal and self._expiries is not None:
            line.mortal = True
            self._expiries.put(
                (line.prefix + tail(at), expires_ms(at, ttl_ms))
                for run, ttl_ms in mortal
                for at in range(run.first, run.stop)
            )

    def _put(self, prefix: bytes, runs: Sequence[Run]) -> None:
        rows: list[tuple[bytes, MessageValue]] = []
        for run in runs:
            payloads = (None,) if run.payloads is None else run.payloads
            rows += zip(_keys(prefix, run), map(_value, zip(repeat(run.pointer), payloads, strict=False)), strict=True)
        try:
            self._table.put(rows)
        except StoreError:
            with suppress(StoreError):
                self._table.invert([TxCell(key, p, payload is None) for key, (p, payload) in rows if p is not None])
            raise


class PayloadWriter(Queue[None]):
    """The queue of a topic's stored payloads.

    Args:
        table: the payload table.
    """

    def __init__(self, topic: TopicId, site: Site, table: PayloadTable) -> None:
        super().__init__(topic, site)
        self._table = table

    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[Request[None]]) -> None:
        rows: list[tuple[bytes, bytes]] = []
        written: list[Request[None]] = []
        for request in batch:
            pointer = cast(int, request.pointer)
            ids = self._site.lines.payloads(topic, pointer)
            first = ids.first(now_ms)
            if self._in_time(request, first):
                ids.skip(first + len(request.messages))
                prefix = pointer_prefix(topic.topic.prefix, topic.generation, pointer)
                rows += zip(_keys(prefix, Run(first, None, request.messages, 0)), request.messages, strict=True)
                written.append(request)
        self._put(rows)
        for request in written:
            request.answer.set_result(None)

    def _put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        if not rows:
            return
        try:
            self._table.put(rows)
        except StoreError:
            with suppress(StoreError):
                self._table.delete([key for key, _ in rows])
            raise


def roll_back(table: MessageTable, prefix: bytes, first: int, last: int, pointer: int) -> None:
    """Negate a pointer in the rows between two positions, both included; rows with another one stay as they are.

    Raises:
        StoreError: the store failed; some may be negated.
    """
    start: bytes | None = prefix + tail(first)
    stop = prefix + tail(last) + b"\0"
    while start is not None:
        page = table.cells(start, stop, _CELLS)
        cells = [cell for cell in page.items if cell.pointer == pointer]
        if cells:
            table.invert(cells)
        start = page.resume


def _keys(prefix: bytes, run: Run) -> list[bytes]:
    return [prefix + at.to_bytes(MESSAGE_TAIL_BYTES, "big") for at in range(run.first, run.stop)]


def _rollback_range(run: Run) -> RollbackRange | None:
    if run.pointer is None:
        return None
    return RollbackRange(run.pointer, *id_parts(run.first), *id_parts(run.stop - 1))
