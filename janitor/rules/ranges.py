"""The rules as key ranges: the rows of a topic to delete, to hold, or to check one by one.

Message rows sort by topic, generation and publish time, so L2 and L3 delete one contiguous range of a topic. A held
frontier (S8) divides it into a part to delete and a part to keep. Payload rows sort by transaction before time, so in a
current generation each row must be checked. A range may contain unrecognized keys; the scan skips them (L0).

The last part finds the payloads that a message row still refers to (rule L5).

A message published with an empty body in a transaction takes its payload from all payload rows of that transaction. The
message has its publish time, the payload rows have the time when they were stored. In a long transaction the payloads
therefore expire first. CDAP deletes them before anyone can read the message; the janitor searches for the message.

Such a message was published while its transaction could still write: after the cutoff (or it is deleted itself) and
before the transaction's start + lifetime + grace (or the clock allowance, if that is longer). The search reads the
message rows of that window, once for many payload rows. If the write time of a payload row does not fit its pointer,
the pointer does not derive from a time, and the window has no upper limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from janitor.rules.policy import Frontier, Rule
from tms_core.rowkey import (
    LONG_MAX,
    NEGATIVE,
    PayloadKey,
    generation_prefix,
    java_abs,
    pointer_prefix,
    position_prefix,
    stop_key,
    time_prefix,
)
from tms_core.tables.base import CELLS, KeyRange, MessageReads
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import TX_PER_MS


class Span(NamedTuple):
    """A range of one topic and the verdict for its rows.

    Attributes:
        rule: the rule that deletes the rows.
        held: whether this run's frontier holds the due rows.
        by_row: whether each row must be checked, because the range is not sorted by time.
    """

    start: bytes
    stop: bytes
    rule: Rule
    held: bool = False
    by_row: bool = False


def message_spans(topic: TopicMetadata, frontier: Frontier) -> list[Span]:
    """Return the ranges of a topic's message rows to delete, in key order; contiguous if nothing is held."""
    prefix = topic.topic.prefix
    spans = _old_generations(topic, frontier)
    held_generation = _held_generation(topic, frontier)
    if held_generation is not None:
        # The generation has become old, but its rows before the cutoff are due by time alone (S8).
        middle = time_prefix(prefix, held_generation, frontier.cutoff.ms)
        start, stop = _generation(prefix, held_generation)
        spans.append(Span(start, middle, Rule.OLD_GENERATION))
        spans.append(Span(middle, stop, Rule.OLD_GENERATION, held=True))
    spans += _held_generations(topic, frontier)
    if not topic.deleted:
        start = generation_prefix(prefix, topic.generation)
        cutoff = time_prefix(prefix, topic.generation, frontier.cutoff.ms)
        due = time_prefix(prefix, topic.generation, frontier.due.ms)
        spans.append(Span(start, cutoff, Rule.EXPIRED))
        spans.append(Span(cutoff, due, Rule.EXPIRED, held=True))
        processed = position_prefix(prefix, topic.generation, frontier.processed)
        spans.append(Span(due, processed, Rule.PROCESSED, held=frontier.hold is not None))
    return [span for span in spans if span.start < span.stop]


def payload_spans(topic: TopicMetadata, frontier: Frontier, newest_pointer: int | None) -> list[Span]:
    """Return the ranges of a topic's payload rows that may be deleted, in key order, without empty ranges.

    Args:
        newest_pointer: the first transaction not to read in the current generation; None: read all. See
            :func:`newest_expired_pointer`.
    """
    prefix = topic.topic.prefix
    spans = _old_generations(topic, frontier)
    held_generation = _held_generation(topic, frontier)
    if held_generation is not None:
        spans.append(Span(*_generation(prefix, held_generation), Rule.OLD_GENERATION, by_row=True))
    spans += _held_generations(topic, frontier)
    if not topic.deleted and (frontier.due.ms > 0 or frontier.processed):
        start, stop = _generation(prefix, topic.generation)
        if newest_pointer is not None:
            stop = pointer_prefix(prefix, topic.generation, newest_pointer)
        spans.append(Span(start, stop, Rule.EXPIRED, by_row=True))
    return [span for span in spans if span.start < span.stop]


def newest_expired_pointer(frontier: Frontier, allowance_ms: int) -> int | None:
    """Return the pointer from which on no payload is due, because transactions are younger than the cutoff.

    It relies on the agreement of clocks. None if the number does not fit into a pointer, so that there is no bound.
    """
    pointer = (max(frontier.due.ms, frontier.processed >> 16) + allowance_ms) * TX_PER_MS
    return pointer if pointer < 2**63 else None


def stop_of_spans(topic: TopicMetadata) -> bytes:
    """Return the key after all spans and live rows; rows after it have negative times or newer generations."""
    prefix = topic.topic.prefix
    if topic.deleted:
        return generation_prefix(prefix, topic.old_below)
    return generation_prefix(prefix, topic.generation) + NEGATIVE


def topic_stop(prefix: bytes) -> bytes:
    """Return the first key after all rows of a topic; it always exists, since the prefix ends in a colon."""
    stop = stop_key(prefix)
    if stop is None:
        raise ValueError(f"{prefix!r} is not a topic's prefix")
    return stop


def intersect(spans: Iterable[Span], allowed: Sequence[KeyRange]) -> list[Span]:
    """Return the parts of ``spans`` that lie inside ``allowed``; both are in key order."""
    pieces = []
    for span in spans:
        for piece in allowed:
            start = max(span.start, piece.start)
            stop = span.stop if piece.stop is None else min(span.stop, piece.stop)
            if start < stop:
                pieces.append(span._replace(start=start, stop=stop))
    return pieces


def remainder(whole: KeyRange, parts: Iterable[KeyRange]) -> list[KeyRange]:
    """Subtract ranges from a range; return the remaining ranges in key order."""
    rest = []
    position: bytes | None = whole.start
    for start, stop in sorted(parts, key=lambda part: part.start):
        if position is None or (whole.stop is not None and start >= whole.stop):
            break
        if stop is not None and stop <= max(start, position):
            continue
        if start > position:
            rest.append(KeyRange(position, start))
        position = stop
    if position is not None and (whole.stop is None or position < whole.stop):
        rest.append(KeyRange(position, whole.stop))
    return rest


def _old_generations(topic: TopicMetadata, frontier: Frontier) -> list[Span]:
    prefix = topic.topic.prefix
    stop = min(frontier.old_below, topic.old_below)
    return [Span(generation_prefix(prefix, 1), generation_prefix(prefix, stop), Rule.OLD_GENERATION)]


def _held_generation(topic: TopicMetadata, frontier: Frontier) -> int | None:
    """Return the generation that was current when the frontier last advanced and has become old since."""
    return frontier.generation if 0 < frontier.generation < topic.old_below else None


def _held_generations(topic: TopicMetadata, frontier: Frontier) -> list[Span]:
    """Return the span of generations that became old since the frontier last advanced, except the then current one."""
    first = frontier.old_below + (1 if _held_generation(topic, frontier) is not None else 0)
    prefix = topic.topic.prefix
    start, stop = generation_prefix(prefix, first), generation_prefix(prefix, topic.old_below)
    return [Span(start, stop, Rule.OLD_GENERATION, held=True)]


def _generation(prefix: bytes, generation: int) -> tuple[bytes, bytes]:
    return generation_prefix(prefix, generation), generation_prefix(prefix, generation + 1)


# -- payloads that a message refers to (rule L5) -----------------------------------------------------------------------


class Lifetime(NamedTuple):
    """The time limits for writes of a transaction, and the allowance for clocks.

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
        """Return how long after its start, by the local clock, a transaction may commit if no snapshot decides."""
        return self.max_ms + self.allowance_ms

    def window_end_ms(self, pointer: int) -> int:
        """Return the time from which on the transaction can no longer publish, by the clock of any machine."""
        return pointer // TX_PER_MS + self.max_ms + max(self.grace_ms, self.allowance_ms)

    def window_start_ms(self, pointer: int) -> int:
        """Return the earliest time at which the transaction can have published."""
        return pointer // TX_PER_MS - self.allowance_ms


def is_never_deleted(_: bytes) -> bool:
    """Return False: no message counts as deleted."""
    return False


def search_range(
    topic: TopicId,
    generation: int,
    since_ms: int,
    payloads: Iterable[PayloadKey],
    lifetime: Lifetime,
    processed: int = 0,
) -> KeyRange:
    """Return the range of messages that can refer to any of ``payloads``.

    Args:
        since_ms: messages published before this time are deleted in this run (the applied cutoff).
        processed: messages before this position are deleted too (:attr:`~janitor.rules.policy.Frontier.processed`).
    """
    end_ms = 0
    for payload in payloads:
        window_end_ms = lifetime.window_end_ms(payload.write_pointer)
        is_plausible = lifetime.window_start_ms(payload.write_pointer) <= payload.write_ms < window_end_ms
        end_ms = max(end_ms, window_end_ms if is_plausible else LONG_MAX)
    time_start = time_prefix(topic.prefix, generation, since_ms)
    start = max(time_start, position_prefix(topic.prefix, generation, processed))
    if end_ms >= LONG_MAX:
        return KeyRange(start, generation_prefix(topic.prefix, generation + 1))
    return KeyRange(start, max(start, time_prefix(topic.prefix, generation, end_ms)))


def timeless_range(topic: TopicId, generation: int) -> KeyRange:
    """Return the range of message rows with a negative time, which are always kept (L0) and which CDAP reads."""
    start = generation_prefix(topic.prefix, generation)
    return KeyRange(start + NEGATIVE, generation_prefix(topic.prefix, generation + 1))


def find_referenced(
    table: MessageReads,
    windows: Iterable[KeyRange],
    pointers: set[int],
    page_rows: int,
    is_deleted: Callable[[bytes], bool] = is_never_deleted,
) -> Iterator[set[int]]:
    """Yield, after each page, the pointers of ``pointers`` that the message rows read so far in ``windows`` refer to.

    Pointers are compared by Java's absolute value, as CDAP does: a reader without a transaction also sees rolled-back
    messages. ``pointers`` bounds the memory.

    Args:
        is_deleted: returns whether to ignore the message of a key, because the plan deletes it.

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
                if not is_deleted(cell.key):
                    found.add(pointer)
            yield found
            start = page.resume
