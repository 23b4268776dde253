"""Writing batches of requests: into the message table, and into the payload table.

Messages of one request are contiguous, and nothing of a batch is shown before all of it is durable.

A write that fails may have been done in part (HBase has no batches): the rows of transactions are negated and stored
payloads are deleted before the error is answered, as far as the store lets one; a producer's stay until it repeats the
request, since what is taken back late could have been found and acknowledged by another server meanwhile. Nothing can
be taken back of what was published outside transactions. A client that does not know the outcome invalidates its
transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from tms_core.errors import BadRequest, StoreError, TooLarge
from tms_core.logs.loggers import get_logger
from tms_core.logs.printable import duration
from tms_core.messaging.cache import CachedRun, MessageCache
from tms_core.messaging.ids import expires_ms, id_parts, milliseconds, tail
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.producers.last_request import AHEAD_MS, SEATED_ROWS, LastRequest
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import IDLE_MS
from tms_core.messaging.publish.lines import Line
from tms_core.messaging.publish.queue import Queue, WriterContext, WriteRequest, Written, ended
from tms_core.messaging.publish.work import Once
from tms_core.rowkey import GENERATION_BYTES, MESSAGE_TAIL_BYTES, generation_prefix, pointer_prefix
from tms_core.tables.base import (
    CELLS,
    KEYS,
    PAYLOADS,
    KeyTable,
    MessageTable,
    MessageValue,
    Page,
    PayloadTable,
    TxCell,
    read_all,
)
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata

Rows = Sequence[tuple[bytes, MessageValue]]

logger = get_logger(__name__)

#: Cells read at once by a rollback.
_CELLS = 1000
#: From how many rows on they are made while a request is announced.
_MANY_ROWS = 100


class MessageWriter(Queue[RollbackRange | None]):
    """The queue of a topic's messages."""

    def __init__(
        self,
        topic: TopicId,
        context: WriterContext,
        table: MessageTable,
        cache: MessageCache,
        expiries: Expiries,
    ) -> None:
        super().__init__(topic, context)
        self._table = table
        self._cache = cache
        self._expiries = expiries

    def _write(
        self, topic: TopicMetadata, now_ms: int, batch: Sequence[WriteRequest[RollbackRange | None]]
    ) -> Written[RollbackRange | None]:
        line = self._context.lines.messages(topic)
        first = self._first(line, now_ms)
        # What is published without transactions and producers, as most is, is not looked at any further.
        transactional = any(request.pointer is not None for request in batch)
        sent = any(request.admitted is not None for request in batch)
        followed: dict[bytes, LastRequest] = {}
        places: list[int] | None = None
        if sent or line.ahead.seats:
            batch, followed, places = self._seated(topic, line, batch, first, now_ms)
        written, runs, stop = self._placed(topic, batch, first, places)
        if not runs:
            return Written([])
        line.ids.take(first, stop)
        try:
            if line.ahead.stale:
                self._take_back(line, written, first)
            rows = self._announce_sent(line, runs, written, followed) if sent else None
            if sent and not followed and rows is None:
                runs = [run for request, run in zip(written, runs, strict=True) if not request.answer.done()]
                written = [request for request in written if not request.answer.done()]
            self._announce(line, runs)
            if transactional:
                self._count(runs)
            self._put(line.prefix, runs, written, rows or self._rows(line.prefix, runs))
            if transactional:
                runs = [
                    run if run.pointer is None else self._looked_at(line, request, run)
                    for request, run in zip(written, runs, strict=True)
                ]
            self._cache.add(line.prefix, runs)
        except BaseException:
            self._cache.forget(line.prefix, stop)
            self._context.lines.note_failed()
            raise
        finally:
            line.ids.release()
        if sent:
            there = written
            if transactional and self._context.transactions is not None:
                # What was negated is written again when it is repeated: a manager whose log failed may forget an end.
                pairs = zip(written, runs, strict=True)
                there = [request for request, run in pairs if run.pointer is None or run.pointer > 0]
            self._note_written(there)
        answers = [
            (request, _rollback_range(run))
            for request, run in zip(written, runs, strict=True)
            if run.pointer is None or self._note(topic, request, run, run.pointer)
        ]
        return Written(answers, line.tell)

    def _first(self, line: Line, now_ms: int) -> int:
        """Return the position to write at. If ids go on from a time that is still to come, the log says so once."""
        first = line.ids.first(now_ms)
        ahead_ms = milliseconds(first) - now_ms
        if ahead_ms > self._context.lines.allowance_ms and not line.warned:
            line.warned = True
            logger.warning(
                "messages of %s are dated %s ahead of the clock, as one before them is, and outlive their ttl by that "
                "time. If the clock is behind, set it right; else read what is there, then: tms topic delete %s; then: "
                "tms topic create %s",
                self.topic,
                duration(ahead_ms, rough=True),
                self.topic,
                self.topic,
            )
        return first

    def _seated(
        self,
        topic: TopicMetadata,
        line: Line,
        batch: Sequence[WriteRequest[RollbackRange | None]],
        at: int,
        now_ms: int,
    ) -> tuple[Sequence[WriteRequest[RollbackRange | None]], dict[bytes, LastRequest], list[int] | None]:
        """Return a batch in the order in which it is written from a position on, what was announced of it, and its
        places.

        What was announced is there if it is for all, by the keys of last requests; places, if they are not any.
        """
        ahead, requests = line.ahead, self._context.requests
        asked = [request.admitted for request in batch if request.admitted is not None]
        # Of what may be gone it could not be told after a crash whether it was there, not even that a request is new;
        # who does nothing for as long as these live is forgotten.
        lasts = topic.ttl_seconds * 1000 >= IDLE_MS and not topic.consumed
        keeps_time = milliseconds(at) < now_ms + AHEAD_MS
        alone = len(asked) == len(batch) and not any(request.ttl_ms for request in batch)
        if not (lasts and keeps_time and alone):
            ahead.note((), small=False)
            return batch, {}, None
        small = max([admitted.number for admitted in asked]) <= SEATED_ROWS
        ahead.note([admitted.keys.request for admitted in asked], small=small)
        if len(asked) > 1 and small:
            pairs = sorted(zip(asked, batch, strict=True), key=lambda pair: ahead.seat(pair[0].keys.request))
            asked, batch = [admitted for admitted, _ in pairs], [request for _, request in pairs]
        found = requests.next(ahead, asked, at)
        if found is None:
            return batch, {}, requests.places(ahead, asked, at)
        followed = {admitted.keys.request: one for admitted, one in zip(asked, found, strict=True)}
        return batch, followed, [one.first for one in found]

    def _placed(
        self,
        topic: TopicMetadata,
        batch: Sequence[WriteRequest[RollbackRange | None]],
        at: int,
        places: Sequence[int] | None,
    ) -> tuple[list[WriteRequest[RollbackRange | None]], list[CachedRun], int]:
        """Return the requests that may be written, what each becomes from a position on, and the first one behind them.

        Args:
            places: where each begins; None: behind the one before.
        """
        written: list[WriteRequest[RollbackRange | None]] = []
        runs: list[CachedRun] = []
        for number, request in enumerate(batch):
            if places is not None:
                at = places[number]
            if self._in_time(request, at) and self._hides_nothing(topic, request):
                written.append(request)
                runs.append(CachedRun(at, request.pointer, request.messages or None, request.size, request.ttl_ms))
                at += len(request.messages) or 1
        return written, runs, at

    def _take_back(self, line: Line, written: Sequence[WriteRequest[RollbackRange | None]], at: int) -> None:
        """See that what is written next cannot be taken for what was announced for producers."""
        found = self._context.requests.take_back(line.ahead, at)
        for request in written:
            if request.admitted is not None and request.admitted.keys.request in found:
                request.admitted = request.admitted._replace(former=found[request.admitted.keys.request])

    def _announce_sent(
        self,
        line: Line,
        runs: Sequence[CachedRun],
        written: Sequence[WriteRequest[RollbackRange | None]],
        followed: dict[bytes, LastRequest],
    ) -> Rows | None:
        """Write down where the rows of producers will be, unless that was done before; answers those refused.

        Returns:
            The rows, where there are many, made while the disk was waited for; None: they are to be made.
        """
        if followed:
            keys = [request.admitted.keys.request for request in written if request.admitted is not None]
            self._context.requests.follow(line.ahead, keys, followed)
            return None
        rows = Once(partial(self._rows, line.prefix, runs))
        many = sum(run.rows for run in runs) >= _MANY_ROWS and any(request.admitted is not None for request in written)
        if many:
            self._context.work.aside(rows.begin)
        refused = self._announce_requests(written, [run.first for run in runs], line.ahead)
        return rows() if many and not refused else None

    def _count(self, runs: Sequence[CachedRun]) -> None:
        """Have the manager know of rows that are about to be written: unless they are taken back there is no abort."""
        if (manager := self._context.transactions) is not None:
            for run in runs:
                if run.pointer is not None:
                    manager.note_written(run.pointer, str(self.topic), run.rows)

    def _note(
        self, topic: TopicMetadata, request: WriteRequest[RollbackRange | None], run: CachedRun, pointer: int
    ) -> bool:
        """Note what was written in a transaction; False: it came too late, and is answered."""
        if pointer < 0:
            request.answer.set_exception(ended(request.pointer))
            return False
        if self._context.transactions is not None:
            self._context.transactions.note_published(pointer, str(topic.topic), milliseconds(run.first))
        if run.payloads is None:
            self._context.lines.show(topic, pointer)
        return True

    def _hides_nothing(self, topic: TopicMetadata, request: WriteRequest[RollbackRange | None]) -> bool:
        """Return whether all that its transaction has stored here is published already; answers if not.

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
        if mortal:
            line.mortal = True
            self._expiries.put(
                (line.prefix + tail(at), expires_ms(at, ttl_ms))
                for run, ttl_ms in mortal
                for at in range(run.first, run.stop)
            )

    def _looked_at(self, line: Line, request: WriteRequest[RollbackRange | None], run: CachedRun) -> CachedRun:
        """What was written in a transaction, negated if that ended while it was on its way to the disk."""
        if run.pointer is None or not self._is_late(request):
            return run
        # Where this fails it is not seen either: a transaction that is aborted meanwhile is invalid.
        with suppress(StoreError):
            self._table.invert(_cells(line.prefix, run))
        return run._replace(pointer=-run.pointer)

    def _rows(self, prefix: bytes, runs: Sequence[CachedRun]) -> Rows:
        return self._table.rows_of((_keys(prefix, run), run.pointer, run.payloads) for run in runs)

    def _put(
        self,
        prefix: bytes,
        runs: Sequence[CachedRun],
        written: Sequence[WriteRequest[RollbackRange | None]],
        rows: Rows,
    ) -> None:
        """Write rows; where that fails, those are taken back that are in transactions, and that no producer repeats."""
        try:
            self._table.put(rows)
        except TooLarge:
            raise
        except StoreError:
            pairs = zip(written, runs, strict=True)
            alone = [run for request, run in pairs if request.sent is None and run.pointer is not None]
            if alone:
                with suppress(StoreError):
                    self._table.invert([cell for run in alone for cell in _cells(prefix, run)])
            raise

    def _is_written(
        self, topic: TopicMetadata, request: WriteRequest[RollbackRange | None], last: LastRequest, *, keeps: bool
    ) -> bool:
        prefix = generation_prefix(topic.topic.prefix, topic.generation)
        run = CachedRun(last.first, request.pointer, request.messages or None, request.size)
        keys = _keys(prefix, run)
        # What no reader is shown does not count; cells have that, too.
        found, _, origin, *_ = _present(self._table, keys)
        if request.pointer is None:
            if 0 < len(found) < last.number and not keeps:
                self._table.hide(keys)
                self._table.delete(found, origin)
            return len(found) == last.number
        shown = frozenset(found)
        cells = read_all(self._table, CELLS, keys[0], keys[-1] + b"\0")
        own = [cell for cell in cells.items if cell.pointer == request.pointer and cell.key in shown]
        if 0 < len(own) < last.number and not keeps:
            self._table.hide(keys)
            self._table.invert(own, cells.origin)
        return len(own) == last.number

    def _answer_again(self, topic: TopicMetadata, request: WriteRequest[RollbackRange | None], first: int) -> None:
        if request.pointer is not None and not request.messages:
            self._context.lines.show(topic, request.pointer)
        run = CachedRun(first, request.pointer, request.messages or None, request.size)
        request.answer.set_result(_rollback_range(run))


class PayloadWriter(Queue[None]):
    """The queue of a topic's stored payloads."""

    def __init__(self, topic: TopicId, context: WriterContext, table: PayloadTable) -> None:
        super().__init__(topic, context)
        self._table = table

    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[WriteRequest[None]]) -> Written[None]:
        written: list[WriteRequest[None]] = []
        firsts: list[int] = []
        for request in batch:
            pointer = cast(int, request.pointer)
            ids = self._context.lines.payloads(topic, pointer)
            at = ids.first(now_ms)
            if self._in_time(request, at):
                first = _announced(request, at)
                ids.skip(first + len(request.messages))
                written.append(request)
                firsts.append(first)
        if self._announce_requests(written, firsts):
            left = [one for one in zip(written, firsts, strict=True) if not one[0].answer.done()]
            written, firsts = [request for request, _ in left], [first for _, first in left]
        self._put(topic, written, firsts)
        answers: list[tuple[WriteRequest[None], None]] = []
        for request, first in zip(written, firsts, strict=True):
            if self._is_late(request):
                with suppress(StoreError):
                    self._table.delete(self._keys_of(topic, request, first))
                request.answer.set_exception(ended(request.pointer))
                continue
            self._note_written([request])
            self._context.lines.hide(topic, cast(int, request.pointer))
            answers.append((request, None))
        return Written(answers)

    def _put(self, topic: TopicMetadata, written: Sequence[WriteRequest[None]], firsts: Sequence[int]) -> None:
        """Write rows; where that fails, those are taken back that no producer repeats: it writes them over."""
        pairs = list(zip(written, firsts, strict=True))
        rows = [row for request, first in pairs for row in self._rows(topic, request, first)]
        if not rows:
            return
        try:
            self._table.put(rows)
        except TooLarge:
            raise
        except StoreError:
            # A delete that came late would take what the producer has repeated meanwhile.
            alone = [self._keys_of(topic, request, first) for request, first in pairs if request.sent is None]
            with suppress(StoreError):
                self._table.delete([key for keys in alone for key in keys])
            raise

    def _rows(self, topic: TopicMetadata, request: WriteRequest[None], first: int) -> Iterator[tuple[bytes, bytes]]:
        return zip(self._keys_of(topic, request, first), request.messages, strict=True)

    def _keys_of(self, topic: TopicMetadata, request: WriteRequest[None], first: int) -> list[bytes]:
        prefix = pointer_prefix(topic.topic.prefix, topic.generation, cast(int, request.pointer))
        return _keys(prefix, CachedRun(first, None, request.messages, 0))

    def _is_written(self, topic: TopicMetadata, request: WriteRequest[None], last: LastRequest, *, keeps: bool) -> bool:
        rows = dict(self._rows(topic, request, last.first))
        keys = list(rows)
        there = read_all(self._table, PAYLOADS, keys[0], keys[-1] + b"\0")
        found = [row for row in there.items if row[0] in rows]
        if any(rows[key] != payload for key, payload in found):
            sent = cast(Sent, request.sent)
            raise BadRequest(
                f"Request {sent.sequence} of producer {sent.name} was sent before with other contents.",
                "Repeat a request unchanged, or give the new request the next number.",
            )
        return len(found) == last.number

    def _answer_again(self, topic: TopicMetadata, request: WriteRequest[None], first: int) -> None:
        self._context.lines.hide(topic, cast(int, request.pointer))
        request.answer.set_result(None)


def _announced(request: WriteRequest[None], at: int) -> int:
    """Return where payloads are written: a repeated request's where they were announced before, all others at ``at``.

    A write of them that comes late from a server that has lost the lead then changes nothing.
    """
    admitted = request.admitted
    return at if admitted is None or admitted.repeated is None else admitted.repeated.first


def roll_back(table: MessageTable, prefix: bytes, first: int, last: int, pointer: int) -> int:
    """Negate a pointer in the rows between two positions, both included; rows with another one stay as they are.

    Returns:
        How many rows carried it until now.

    Raises:
        StoreError: the store failed; some may be negated.
    """
    start: bytes | None = prefix + tail(first)
    stop = prefix + tail(last) + b"\0"
    done = 0
    while start is not None:
        page = table.read(CELLS, start, stop, _CELLS)
        cells = [cell for cell in page.items if cell.pointer == pointer]
        if cells:
            done += sum(table.invert(cells, page.origin))
        start = page.resume
    return done


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


def _cells(prefix: bytes, run: CachedRun) -> list[TxCell]:
    return [TxCell(key, cast(int, run.pointer), run.payloads is None) for key in _keys(prefix, run)]


def _present(table: KeyTable, keys: Sequence[bytes]) -> Page[list[bytes]]:
    """Return those of some keys, which follow one another, that a table has."""
    return read_all(table, KEYS, keys[0], keys[-1] + b"\0")


def _keys(prefix: bytes, run: CachedRun) -> list[bytes]:
    return [prefix + at.to_bytes(MESSAGE_TAIL_BYTES, "big") for at in range(run.first, run.stop)]


def _rollback_range(run: CachedRun) -> RollbackRange | None:
    if run.pointer is None:
        return None
    return RollbackRange(run.pointer, *id_parts(run.first), *id_parts(run.stop - 1))
