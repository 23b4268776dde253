"""Which payloads a message row still refers to (rule L5).

A message published with an empty body in a transaction takes its payload from all payload rows of that transaction.
Its own time is the publish time, theirs is when they were stored, so in a long transaction the payloads grow old
first. CDAP deletes them then, before anyone could read the message; we look for the message first.

Such a message can only have been published while its transaction could still write: after the cut-off (or it goes
itself) and before the transaction's start + lifetime + grace (or the clock allowance, where that is more). Looking
costs reading the message rows of that window, once for many payload rows. A payload row whose own write time does not
fit its pointer shows a pointer that was not made from the time, which tells nothing about when its message may come;
then the window has no end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, cast

from tms_core.rowkey import LONG_MAX, NEGATIVE, PayloadKey, generation_prefix, java_abs, position_prefix, time_prefix
from tms_core.tables.base import CELLS, KeyRange, MessageReads
from tms_core.topic import TopicId
from tms_core.transaction.model import TX_PER_MS


class Lifetime(NamedTuple):
    """How long a transaction may write, and how far clocks and late writes may be off.

    Attributes:
        max_ms: the longest time from a transaction's start to its last write.
        grace_ms: how much later such a write may still arrive.
        allowance_ms: how far the clocks of two machines may differ.
    """

    max_ms: int
    grace_ms: int
    allowance_ms: int

    @property
    def undecided_ms(self) -> int:
        """Return how long after its start, by our clock, a transaction of which nothing more is known may still
        commit.
        """
        return self.max_ms + self.allowance_ms

    def window_end_ms(self, pointer: int) -> int:
        """Return the first moment at which nothing of the transaction can be published any more, by any machine's
        clock.
        """
        return pointer // TX_PER_MS + self.max_ms + max(self.grace_ms, self.allowance_ms)

    def window_start_ms(self, pointer: int) -> int:
        """Return the first moment at which something of the transaction can have been published."""
        return pointer // TX_PER_MS - self.allowance_ms


def stays(_: bytes) -> bool:
    """Return no message that is there goes."""
    return False


def search_range(
    topic: TopicId,
    generation: int,
    since_ms: int,
    payloads: Iterable[PayloadKey],
    lifetime: Lifetime,
    processed: int = 0,
) -> KeyRange:
    """Return where messages that refer to any of ``payloads`` can lie.

    Args:
        since_ms: messages published before this moment go in this run (the applied cut-off).
        processed: so do those before this position (:attr:`~janitor.rules.policy.Frontier.processed`).
    """
    end_ms = 0
    for payload in payloads:
        honest = lifetime.window_start_ms(payload.write_pointer) <= payload.write_ms
        honest = honest and payload.write_ms < lifetime.window_end_ms(payload.write_pointer)
        end_ms = max(end_ms, lifetime.window_end_ms(payload.write_pointer) if honest else LONG_MAX)
    first, behind = (
        time_prefix(topic.prefix, generation, since_ms),
        position_prefix(topic.prefix, generation, processed),
    )
    start = max(first, behind)
    if end_ms >= LONG_MAX:
        return KeyRange(start, generation_prefix(topic.prefix, generation + 1))
    return KeyRange(start, max(start, time_prefix(topic.prefix, generation, end_ms)))


def timeless_range(topic: TopicId, generation: int) -> KeyRange:
    """Return where message rows of a negative time lie; they always stay (L0), and CDAP reads them."""
    start = generation_prefix(topic.prefix, generation)
    return KeyRange(start + NEGATIVE, generation_prefix(topic.prefix, generation + 1))


def find_referenced(
    table: MessageReads,
    windows: Iterable[KeyRange],
    pointers: set[int],
    page_rows: int,
    goes: Callable[[bytes], bool] = stays,
) -> Generator[None, None, set[int]]:
    """Find which of ``pointers`` are referred to by a message row in one of ``windows``; yield after each page.

    Pointers are compared as CDAP reads them: by Java's absolute value, since a reader without a transaction sees
    rolled-back messages too. Memory is bounded by ``pointers``.

    Args:
        goes: whether the message of this key does not count, because a plan shows it as deleted.

    Raises:
        StoreError: the table could not be read.
    """
    found: set[int] = set()
    for window in windows:
        start: bytes | None = window.start
        while start is not None and (window.stop is None or start < window.stop) and len(found) < len(pointers):
            page = table.read(CELLS, start, window.stop, page_rows)
            for cell in page.items:
                if not cell.refers or (pointer := java_abs(cell.pointer)) not in pointers or pointer in found:
                    continue
                if not goes(cell.key):
                    found.add(pointer)
            yield
            start = page.resume
    return found


def returned(steps: Generator[None, None, set[int]]) -> set[int]:
    """Exhaust :func:`find_referenced`; return the pointers that it found."""
    try:
        while True:
            next(steps)
    except StopIteration as found:
        return cast(set[int], found.value)
