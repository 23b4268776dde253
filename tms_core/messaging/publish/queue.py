"""Group commit: everything that is queued for a topic goes to the disk at once, and one batch at a time.

A synced write takes as long for one message as for a thousand, so while one batch is being written the next one
gathers. Each batch reads the topic's metadata and the clock, writes, and only then answers; so a topic that was deleted
meanwhile takes no more. A few threads serve all topics in turn, a batch each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import Generic, NamedTuple, TypeVar, cast

from tms_core.clock import HonestClock
from tms_core.errors import (
    BadRequest,
    MessagingError,
    PartitionsChanged,
    TmsError,
    TooLarge,
    TransactionEnded,
    TransactionExpired,
    Unavailable,
)
from tms_core.messaging.ids import expires_ms, milliseconds, position
from tms_core.messaging.producers.last_request import AnnouncedAhead, LastRequest
from tms_core.messaging.producers.requests import Admitted, Requests, Sent
from tms_core.messaging.publish.lines import Lines
from tms_core.messaging.publish.work import Answer, Work
from tms_core.messaging.topics.catalog import FORBIDDEN, REQUIRED, TRANSACTIONS, TopicRegistry
from tms_core.messaging.topics.partitions import FAMILIES, PART_OF, SEALED
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

R = TypeVar("R")

#: Bytes after which a batch takes no further request, so that memory and waiting are bounded.
BATCH_BYTES = 8 << 20
#: What a row costs beside its payload, in bytes.
_ROW_BYTES = 100


class WriteRequest(Generic[R]):
    """The messages that one client wants to have written.

    Attributes:
        pointer: of its transaction; None without one.
        ttl_ms: a ttl of their own; None without one.
        sent: what it says of its producer; None: it has none.
        size: bytes of the payloads together.
        weight: what they count for, which many that are empty do, too.
        principal: whose transaction it is; None: the server does not ask who somebody is.
        admitted: the facts about its producer, while it is written.
        answer: done when it is durable, or will not be.
    """

    __slots__ = ("admitted", "answer", "messages", "pointer", "principal", "sent", "size", "ttl_ms", "weight")

    def __init__(
        self,
        messages: Sequence[bytes],
        pointer: int | None,
        ttl_ms: int | None = None,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> None:
        self.sent = sent
        self.principal = principal
        self.admitted: Admitted | None = None
        self.messages = tuple(messages)
        self.pointer = pointer
        self.ttl_ms = ttl_ms
        self.size = sum(map(len, messages))
        self.weight = self.size + _ROW_BYTES * len(messages)
        self.answer: Answer[R] = Answer()


def _nothing() -> None:
    """No reader waits for it."""


class Written(NamedTuple, Generic[R]):
    """What was written of a batch.

    Attributes:
        answers: the requests, and what each is answered.
        tell: what is to be called when they are answered.
    """

    answers: Sequence[tuple[WriteRequest[R], R]]
    tell: Callable[[], None] = _nothing


class WriterContext(NamedTuple):
    """The parts that all writers of a store share.

    Attributes:
        max_lifetime_ms: how long after its start a transaction may write.
        transactions: the manager in this process; None: transactions are managed elsewhere.
    """

    topics: TopicRegistry
    lines: Lines
    clock: HonestClock
    max_lifetime_ms: int
    work: Work
    requests: Requests
    transactions: TransactionManager | None = None


class Queue(ABC, Generic[R]):
    """The queue of one topic and one table."""

    def __init__(self, topic: TopicId, context: WriterContext) -> None:
        self.topic = topic
        self._context = context
        self._queue: deque[WriteRequest[R]] = deque()
        self._busy = False
        self._lock = Lock()

    @property
    def is_busy(self) -> bool:
        """Return whether there are requests that are not answered yet."""
        return self._busy

    def submit(self, request: WriteRequest[R]) -> Answer[R]:
        """Queue a request; its answer comes when a batch has it.

        Raises:
            Unavailable: the service is closed.
        """
        self._context.work.accept(request.weight)
        with self._lock:
            self._queue.append(request)
            idle, self._busy = not self._busy, True
        if idle:
            self._context.work.run(self._run)
        return request.answer

    def settle(self) -> None:
        """Return when what was handed over before is written, or will not be."""
        with suppress(MessagingError):
            self.submit(WriteRequest((), None)).result()

    @abstractmethod
    def _write(self, topic: TopicMetadata, now_ms: int, batch: Sequence[WriteRequest[R]]) -> Written[R]:
        """Write a batch, and answer what was not written."""

    def _run(self) -> None:
        """Write the next batch, and have this called again if there is more."""
        batch = self._take()
        with _Owed(batch):
            topic = self._context.topics.get(self.topic)
            if fitting := [request for request in batch if _fits(topic, request)]:
                written = self._written(topic, fitting)
                # Not before all that was noted of them is taken back: their clients may end the transaction, or send
                # the next request, at once.
                for request, result in written.answers:
                    request.answer.set_result(result)
                written.tell()
        self._context.work.done(len(batch), sum(request.weight for request in batch))
        with self._lock:
            more = self._busy = bool(self._queue)
        if more:
            self._context.work.run(self._run)

    def _written(self, topic: TopicMetadata, batch: Sequence[WriteRequest[R]]) -> Written[R]:
        """Write the requests of a batch that may still be written; answers the others."""
        now_ms = self._context.clock.publish_ms()
        sent = any(request.sent is not None for request in batch)
        begun = self._begin_writes(batch)
        try:
            known = frozenset(map(id, begun))
            open_ = [one for one in batch if one.pointer is None or self._may_write(one, known, now_ms)]
            with self._sent(topic, open_, now_ms) if sent else nullcontext(open_) as counting:
                # What was written before a partition took no more is answered as it was.
                if not counting:
                    return Written([])
                _require_open(topic)
                return self._write(topic, now_ms, counting)
        finally:
            self._end_writes(begun)

    def _take(self) -> list[WriteRequest[R]]:
        """Take what is queued, up to a number of bytes."""
        batch: list[WriteRequest[R]] = []
        size = 0
        with self._lock:
            while self._queue and size < BATCH_BYTES:
                request = self._queue.popleft()
                batch.append(request)
                size += request.weight
        return batch

    @abstractmethod
    def _is_written(self, topic: TopicMetadata, request: WriteRequest[R], last: LastRequest, *, keeps: bool) -> bool:
        """Return whether all rows of a request are there; some of them alone are rolled back, unless they are to be
        kept.
        """

    @abstractmethod
    def _answer_again(self, topic: TopicMetadata, request: WriteRequest[R], first: int) -> None:
        """Answer a request whose rows are there."""

    def _begin_writes(self, batch: Sequence[WriteRequest[R]]) -> Sequence[WriteRequest[R]]:
        """Note in which transactions something is about to be written; returns the requests of those in progress.

        A transaction that is aborted from now on becomes invalid instead, so that the writes in it then is never
        seen, even if this process stops before it can look again. :meth:`_end_writes` is to follow.
        """
        manager = self._context.transactions
        if manager is None:
            return ()
        return [
            request
            for request in batch
            if request.pointer is not None and manager.begin_write(request.pointer, request.principal)
        ]

    def _end_writes(self, begun: Sequence[WriteRequest[R]]) -> None:
        """What was to be written is, or never will be."""
        if (manager := self._context.transactions) is not None:
            for request in begun:
                manager.end_write(cast(int, request.pointer))

    def _may_write(self, request: WriteRequest[R], begun: frozenset[int], now_ms: int) -> bool:
        """Return whether the transaction of a request is in progress, where that is known; answers if not.

        Args:
            started: the identities of the requests whose transactions are.
        """
        if self._context.transactions is None or id(request) in begun:
            return True
        if self._in_time(request, position(now_ms)):
            request.answer.set_exception(self._refusal(request))
        return False

    def _refusal(self, request: WriteRequest[R]) -> TmsError:
        """Why a request of a transaction that is over is refused: for good where a newer instance ended it."""
        if request.sent is not None:
            try:
                self._context.requests.require_newest(request.sent)
            except TmsError as error:
                return error
        return ended(request.pointer)

    @contextmanager
    def _sent(
        self, topic: TopicMetadata, batch: Sequence[WriteRequest[R]], now_ms: int
    ) -> Iterator[list[WriteRequest[R]]]:
        """The requests without a producer, and those to be written of the others; answers the writes before."""
        requests = self._context.requests
        asked = [(request, request.sent) for request in batch if request.sent is not None]
        sent = [(sent, request.pointer, len(request.messages) or 1) for request, sent in asked]
        with requests.sending(topic, now_ms, sent) as found:
            for (request, _), one in zip(asked, found, strict=True):
                if isinstance(one, TmsError):
                    request.answer.set_exception(one)
                    continue
                request.admitted = one
                if one.repeated is not None:
                    self._repeat(topic, request, one, one.repeated, now_ms)
                elif (
                    # One with a ttl of its own would have been announced itself.
                    one.since is not None
                    and request.ttl_ms is None
                    and self._may_be_gone(topic, request, one.since, now_ms)
                ):
                    request.answer.set_exception(_not_known(one))
            yield [request for request in batch if not request.answer.done()]

    def _repeat(
        self, topic: TopicMetadata, request: WriteRequest[R], admitted: Admitted, former: LastRequest, now_ms: int
    ) -> None:
        """Answer a request that was written before."""
        try:
            # What is left of a request that was done stays.
            may_be_gone = self._may_be_gone(topic, request, former.first, now_ms)
            if admitted.written or self._is_written(topic, request, former, keeps=may_be_gone):
                self._answer_again(topic, request, former.first)
            elif may_be_gone:
                raise _not_known(admitted)
        except TmsError as error:
            request.answer.set_exception(error)

    def _may_be_gone(self, topic: TopicMetadata, request: WriteRequest[R], first: int, now_ms: int) -> bool:
        """Return whether rows that were written at a position may have been deleted since (rules L3, L6 and L7)."""
        if request.ttl_ms is not None and expires_ms(first, request.ttl_ms) <= now_ms:
            return True
        if self._context.requests.is_processed(topic, first):
            return True
        return Cutoff.at(now_ms, topic.ttl_seconds).expires(milliseconds(first))

    def _announce_requests(
        self, written: Sequence[WriteRequest[R]], firsts: Sequence[int], ahead: AnnouncedAhead | None = None
    ) -> bool:
        """Write down where the rows of producers' requests will be, before they are there; answers those refused.

        Returns:
            Whether there are any of these.
        """
        asked = [
            (request, (request.admitted, first))
            for request, first in zip(written, firsts, strict=True)
            if request.admitted is not None
        ]
        if not asked:
            return False
        errors = self._context.requests.announce([one for _, one in asked], ahead)
        for (request, _), error in zip(asked, errors, strict=True):
            if error is not None:
                request.answer.set_exception(error)
        return any(errors)

    def _note_written(self, written: Iterable[WriteRequest[R]]) -> None:
        self._context.requests.wrote([request.admitted for request in written if request.admitted is not None])

    def _is_late(self, request: WriteRequest[R]) -> bool:
        """Return whether a request was written after the end of its transaction, or after that was rolled back."""
        manager, admitted, pointer = self._context.transactions, request.admitted, request.pointer
        if pointer is None:
            return False
        if manager is not None and not manager.is_in_progress(pointer):
            return True
        return admitted is not None and self._context.requests.is_void(admitted.keys.producer, pointer)

    def _in_time(self, request: WriteRequest[R], at: int) -> bool:
        """Return whether the transaction may still write at that position; answers if not.

        What decides is the time the row will have, which may be ahead of the clock: the janitor relies on it that no
        row of a transaction is younger than this (rule L5).
        """
        if request.pointer is None:
            return True
        if transaction_ms(request.pointer) + self._context.max_lifetime_ms > milliseconds(at):
            return True
        request.answer.set_exception(
            TransactionExpired(
                f"Transaction {request.pointer} is older than {self._context.max_lifetime_ms // 1000} s, "
                "the longest a transaction may write.",
                "Start another one.",
            )
        )
        return False


def _fits(topic: TopicMetadata, request: WriteRequest[R]) -> bool:
    """Return whether the topic takes what is (or is not) published in a transaction; answers if not."""
    wanted, pointer = topic.properties.get(TRANSACTIONS), request.pointer
    if pointer is None and not request.messages:
        said = ("A message outside a transaction has a payload.", "Send at least one.")
    elif wanted == REQUIRED and pointer is None:
        said = (f"Topic {topic.topic} takes messages in transactions only.", "Publish in a transaction.")
    elif wanted == FORBIDDEN and pointer is not None:
        said = (f"Topic {topic.topic} takes no messages in transactions.", "Publish outside of one.")
    else:
        return True
    request.answer.set_exception(BadRequest(*said))
    return False


def _require_open(topic: TopicMetadata) -> None:
    """See that a topic takes messages, and no partition of it does in its place."""
    if FAMILIES in topic.properties or SEALED in topic.properties:
        name = topic.topic if FAMILIES in topic.properties else topic.properties.get(PART_OF)
        raise PartitionsChanged(
            f"Topic {topic.topic} takes no messages itself.", f"Publish to a partition that {name} names now."
        )


def _not_known(admitted: Admitted) -> MessagingError:
    return MessagingError(
        f"It is no longer known whether request {admitted.sent.sequence} of producer "
        f"{admitted.sent.name} was done: its messages would have expired by now.",
        "Look whether the results of these messages are there.",
    )


def ended(pointer: int | None) -> TransactionEnded:
    """What a request is answered whose transaction is over."""
    return TransactionEnded(f"Transaction {pointer} is not in progress, so it writes nothing.", "Begin another one.")


class _Owed(Generic[R]):
    """The answers still owed to the requests of a batch: an error that ends it goes to all that have no answer."""

    def __init__(self, batch: Sequence[WriteRequest[R]]) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        """Nothing is answered yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            largest = max(_largest(request) for request in self._batch)
            for request in self._batch:
                if not request.answer.done():
                    others = isinstance(error, TooLarge) and _largest(request) < largest
                    request.answer.set_exception(_try_again() if others else error)
        return True


def _largest(request: WriteRequest[R]) -> int:
    return max(map(len, request.messages), default=0)


def _try_again() -> Unavailable:
    return Unavailable(
        "Nothing was written, because the store refused a larger message that was to be written at once.", "Try again."
    )
