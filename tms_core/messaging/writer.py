"""Writing batches of requests: into the message table, and into the payload table.

Messages of one request are contiguous, and nothing of a batch is shown before all of it is durable.

A write that fails may have been done in part (HBase has no batches): the rows of transactions are negated and stored
payloads are deleted before the error is answered, as far as the store lets one. Nothing can be taken back of what was
published outside transactions. A client that does not know the outcome invalidates its transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import cast

from tms_core.errors import BadRequest, StoreError
from tms_core.messaging.cache import CachedRun, MessageCache
from tms_core.messaging.ids import expires_ms, id_parts, tail
from tms_core.messaging.lines import Line
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.queue import Queue, WriterContext, WriteRequest
from tms_core.rowkey import GENERATION_BYTES, MESSAGE_TAIL_BYTES, generation_prefix, pointer_prefix
from tms_core.tables.base import MessageTable, MessageValue, PayloadTable, TxCell
from tms_core.tables.side import Expiries
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
        self,
        topic: TopicId,
        context: WriterContext,
        table: MessageTable,
        cache: MessageCache,
        expiries: Expiries | None,
    ) -> None:
        super().__init__(topic, context)
        self._table = table
        self._cache = cache
        self._expiries = expiries

    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[WriteRequest[RollbackRange | None]]) -> None:
        line = self._context.lines.messages(topic)
        first = stop = line.ids.first(now_ms)
        runs: list[CachedRun] = []
        written: list[WriteRequest[RollbackRange | None]] = []
        for request in batch:
            if self._in_time(request, stop) and self._hides_nothing(topic, request):
                written.append(request)
                runs.append(CachedRun(stop, request.pointer, request.messages or None, request.size, request.ttl_ms))
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
            if run.pointer is not None and self._context.transactions is not None:
                self._context.transactions.note_published(run.pointer, str(topic.topic), id_parts(run.first)[0])
            if run.pointer is not None and run.payloads is None:
                self._context.lines.show(topic, run.pointer)
            request.answer.set_result(_rollback_range(run))
        line.tell()

    def _hides_nothing(self, topic: TopicMetadata, request: WriteRequest[RollbackRange | None]) -> bool:
        """Whether all that its transaction has stored here is published already; answers if not.

        Readers would take its messages for all there is, and what was stored would never be seen (CDAP publishes one or
        the other in a transaction).
        """
        pointer = request.pointer
        if pointer is None or not request.messages or not self._context.lines.hides(topic, pointer):
            return True
        request.answer.set_exception(
            BadRequest(
                f"Transaction {pointer} has stored payloads in {topic.topic} that are not published.",
                "Publish them first, with a publish that has no messages.",
            )
        )
        return False

    def _announce(self, line: Line, runs: Sequence[CachedRun]) -> None:
        """Write down which messages have a ttl of their own, before they are there."""
        mortal = [(run, run.ttl_ms) for run in runs if run.ttl_ms is not None]
        if mortal and self._expiries is not None:
            line.mortal = True
            self._expiries.put(
                (line.prefix + tail(at), expires_ms(at, ttl_ms))
                for run, ttl_ms in mortal
                for at in range(run.first, run.stop)
            )

    def _put(self, prefix: bytes, runs: Sequence[CachedRun]) -> None:
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

    def __init__(self, topic: TopicId, context: WriterContext, table: PayloadTable) -> None:
        super().__init__(topic, context)
        self._table = table

    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[WriteRequest[None]]) -> None:
        rows: list[tuple[bytes, bytes]] = []
        written: list[WriteRequest[None]] = []
        for request in batch:
            pointer = cast(int, request.pointer)
            ids = self._context.lines.payloads(topic, pointer)
            first = ids.first(now_ms)
            if self._in_time(request, first):
                ids.skip(first + len(request.messages))
                prefix = pointer_prefix(topic.topic.prefix, topic.generation, pointer)
                rows += zip(_keys(prefix, CachedRun(first, None, request.messages, 0)), request.messages, strict=True)
                written.append(request)
        self._put(rows)
        for request in written:
            self._context.lines.hide(topic, cast(int, request.pointer))
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


def earlier_generations(table: MessageTable, topic: TopicMetadata) -> Iterator[bytes]:
    """Key prefixes of the generations before the topic's own that still have rows; one read of the table for each.

    Raises:
        StoreError: the store failed.
    """
    prefix = topic.topic.prefix
    start, stop = (generation_prefix(prefix, generation) for generation in (1, topic.generation))
    while start < stop and (key := table.first(start, stop)) is not None:
        # A key that is none of ours may end in the middle of that number.
        generation = int.from_bytes(key[len(prefix) : len(start)].ljust(GENERATION_BYTES, b"\0"), "big")
        yield generation_prefix(prefix, generation)
        start = generation_prefix(prefix, generation + 1)


def _keys(prefix: bytes, run: CachedRun) -> list[bytes]:
    return [prefix + at.to_bytes(MESSAGE_TAIL_BYTES, "big") for at in range(run.first, run.stop)]


def _rollback_range(run: CachedRun) -> RollbackRange | None:
    if run.pointer is None:
        return None
    return RollbackRange(run.pointer, *id_parts(run.first), *id_parts(run.stop - 1))
