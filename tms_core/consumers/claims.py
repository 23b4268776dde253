"""Claims: messages that a consumer group has received, each in a transaction.

A claim is a range of message ids under a transaction's write pointer. It is *done* once the transaction is committed,
*void* once it is invalid, and *open* until then. Therefore a commit needs no further write, and a worker that dies
releases its messages when its transaction times out. A group is a consumer's position (its *base*) and the claims after
it; single messages need no rows.

The messages of a void claim are delivered again. A *mark* preserves their number of deliveries: the same row with
pointer 0, which also has the time of the next delivery.

This module contains pure functions of claims and a reader's transaction snapshot.
:mod:`tms_core.consumers.claim_rows` stores claims.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cached_property
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from tms_core.rowkey import LONG_MAX, MessageId, generation_prefix
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import Transaction

#: The first key byte of rows that belong to a transaction, and the kind byte of a claim.
TRANSACTIONAL, CLAIM = b"t", b"c"
#: The maximum number of doublings of a delay; the result exceeds any configurable limit.
_MAX_DOUBLINGS = 40
#: The highest sequence number of a payload.
_MAX_SEQUENCE = 2**16 - 1

Rank = tuple[int, int, int, int]
#: A rank lower than the rank of any id.
LOWEST: Rank = (0, 0, 0, 0)
_start = attrgetter("start")


class _ClaimFields(NamedTuple):
    first: MessageId
    last: MessageId
    pointer: int
    tries: int
    size: int = 0
    retry_ms: int = 0


class GroupClaim(_ClaimFields):
    """A range of messages delivered in one transaction, or the mark that remains of it.

    Attributes:
        first: the id before the first message.
        last: the id of the last message.
        pointer: the id of the transaction; 0: a mark.
        tries: the number of deliveries, including this one.
        size: the number of messages delivered together; 0: unknown.
        retry_ms: for a mark, the time of the next delivery in milliseconds; 0: immediately.
    """

    # Cached, because the server keeps claims between polls, and each poll compares all claims of the group.
    @cached_property
    def start(self) -> Rank:
        """Return the rank of the id before the first message."""
        return rank(self.first)

    @cached_property
    def stop(self) -> Rank:
        """Return the rank of the last message."""
        return rank(self.last)


class ConsumerGroup(NamedTuple):
    """The identity of a consumer group: topic, generation and consumer name."""

    topic: TopicId
    generation: int
    name: str

    @classmethod
    def of(cls, topic: TopicMetadata, name: str) -> ConsumerGroup:
        """Return a group of a topic's current generation."""
        return cls(topic.topic, topic.generation, name)

    @property
    def prefix(self) -> bytes:
        """Return the key prefix of the group's claims."""
        return self.key(CLAIM)

    def key(self, kind: bytes) -> bytes:
        """Return the start of the keys of the group's rows of one kind, a byte."""
        start = generation_prefix(self.topic.prefix, self.generation)
        return TRANSACTIONAL + start + kind + self.name.encode("ascii") + b"\0"

    @property
    def label(self) -> str:
        """Return a description of the group's claims for messages to operators."""
        return f"claims of {self.name} on {self.topic}"


class Backoff(NamedTuple):
    """The exponential delay of messages after failed deliveries.

    Attributes:
        first_ms: the delay after the first failure in milliseconds; 0: no delay.
        longest_ms: the maximum delay in milliseconds, before rounding up by at most a quarter.
    """

    first_ms: int
    longest_ms: int

    def retry_ms(self, tries: int, now_ms: int) -> int:
        """Return the time of the next delivery of messages that failed at ``now_ms``; 0: immediately.

        The time is rounded up to a quarter of the delay. In an outage adjacent batches fail shortly after each other;
        equal times let them share a mark.
        """
        wait_ms = min(self.longest_ms, self.first_ms << min(max(0, tries - 1), _MAX_DOUBLINGS))
        if wait_ms <= 0:
            return 0
        step_ms = max(1, wait_ms // 4)
        return -(-(now_ms + wait_ms) // step_ms) * step_ms

    def pending_ms(self, retry_ms: int, now_ms: int) -> int:
        """Return a delivery time if it is in the future, else 0; times beyond the maximum delay are ignored."""
        return retry_ms if now_ms < retry_ms <= now_ms + self.longest_ms + self.longest_ms // 4 else 0


class ClaimOutcome(Enum):
    """The outcome of a claim as seen by one reader; OWN: the reader's own transaction made the claim."""

    DONE = "done"
    OPEN = "open"
    VOID = "void"
    OWN = "own"


class Segment(NamedTuple):
    """An unclaimed range of messages that may be delivered together.

    Attributes:
        after: the id before the range.
        until: the last id of the range; None: unbounded.
        tries: the number of previous deliveries.
        size: the number of messages in the previous delivery; 0: unknown.
        retry_ms: the earliest time of the next delivery in milliseconds; 0: immediately.
    """

    after: MessageId
    until: MessageId | None
    tries: int
    size: int = 0
    retry_ms: int = 0


class GroupView(NamedTuple):
    """The state of a group for one reader.

    Attributes:
        base: the id up to which all messages are processed.
        merged: the highest pointer of the done claims that this base now includes; 0: the base includes no claim.
        segments: the ranges that are neither processed nor claimed, in order.
        covered: the ranges of the remaining claims, in order; adjoining claims are joined.
        open: the undecided claims of other transactions.
        own: the rank of the last message that the reader itself has claimed.
        obsolete: rows to delete: claims included in the base, void claims, and old marks.
        free: the marks that replace void claims and old marks.
    """

    base: MessageId
    merged: int
    segments: tuple[Segment, ...]
    covered: list[GroupClaim]
    open: list[GroupClaim]
    own: Rank
    obsolete: list[GroupClaim]
    free: list[GroupClaim]


# --- rules -----------------------------------------------------------------------------------------------------------


def rank(message: MessageId) -> Rank:
    """Return the sort key of an id. An id without a payload part sorts after all payloads of the same row."""
    if message.in_payload_table:
        return message
    return (message.publish_ms, message.sequence, LONG_MAX, _MAX_SEQUENCE)


def claim_outcome(pointer: int, reader: Transaction) -> ClaimOutcome:
    """Return the outcome of claims of a transaction as seen by a reader."""
    if pointer <= 0:
        return ClaimOutcome.VOID
    if reader.is_current_write(pointer):
        return ClaimOutcome.OWN
    if reader.is_in_progress(pointer):
        return ClaimOutcome.OPEN
    if reader.is_visible(pointer):
        return ClaimOutcome.DONE
    return ClaimOutcome.VOID if reader.is_excluded(pointer) else ClaimOutcome.OPEN


def claim_outcomes(pointers: AbstractSet[int], reader: Transaction) -> dict[int, ClaimOutcome]:
    """Return :func:`claim_outcome` of each pointer; set operations handle the many pointers in progress."""
    own = (0, reader.transaction_id, reader.write_pointer, *reader.checkpoint_write_pointers)
    in_progress = pointers & set(reader.in_progress).difference(own)
    found = dict.fromkeys(in_progress, ClaimOutcome.OPEN)
    found.update((pointer, claim_outcome(pointer, reader)) for pointer in pointers - in_progress)
    return found


def settle_claim(claim: GroupClaim, interrupted: int, backoff: Backoff, now_ms: int) -> GroupClaim:
    """Return the mark that replaces a void claim or an old mark; do not store a mark with 0 tries.

    A counted delivery starts a delay; an elapsed delay is removed from the mark.

    A void claim of a transaction that started before the server's last start does not count as a delivery: the worker
    may not have received the messages, or could not commit. A worker that releases its claims reports failures itself.

    Args:
        interrupted: the newest transaction when this server started or became leader; 0: unknown.
    """
    if claim.pointer <= 0:
        return claim._replace(retry_ms=backoff.pending_ms(claim.retry_ms, now_ms))
    if claim.pointer <= interrupted:
        return claim._replace(pointer=0, tries=claim.tries - 1)
    return claim._replace(pointer=0, retry_ms=backoff.retry_ms(claim.tries, now_ms))


def view_group(
    base: MessageId,
    claims: Iterable[GroupClaim],
    reader: Transaction,
    settle: Callable[[GroupClaim], GroupClaim] = lambda claim: claim,
) -> GroupView:
    """Return the state of a group, computed from its position and claims.

    Args:
        settle: turns void claims into marks, see :func:`settle_claim`; by default claims and marks stay unchanged.
    """
    in_order = sorted(claims, key=_start)
    outcomes = claim_outcomes({claim.pointer for claim in in_order}, reader)
    # Local names, because the lookup of an enumeration's member is slow, and these loops dominate the cost of a poll.
    done, void, undecided, own = ClaimOutcome.DONE, ClaimOutcome.VOID, ClaimOutcome.OPEN, ClaimOutcome.OWN
    merged, done_to = 0, rank(base)
    for claim in in_order:
        if outcomes[claim.pointer] is done and claim.start <= done_to:
            merged = max(merged, claim.pointer)
            if claim.stop > done_to:
                base, done_to = claim.last, claim.stop
    covering, opened, obsolete, free, own_to = *(list[GroupClaim]() for _ in range(4)), LOWEST
    for claim in in_order:
        outcome = outcomes[claim.pointer]
        if claim.stop <= done_to or outcome is void:
            obsolete.append(claim)
            if outcome is void and claim.stop > done_to and (mark := settle(claim)).tries:
                free.append(mark)
            continue
        covering.append(claim)
        if outcome is undecided:
            opened.append(claim)
        elif outcome is own:
            own_to = max(own_to, claim.stop)
    covered = _join(covering)
    return GroupView(base, merged, tuple(_segments(base, covered, free)), covered, opened, own_to, obsolete, free)


def release_claims(
    claims: Sequence[GroupClaim], pointer: int, after: MessageId | None, backoff: Backoff, now_ms: int
) -> tuple[list[GroupClaim], list[GroupClaim]]:
    """Divide the claims of a group after a transaction releases its claims.

    Args:
        after: release only messages after this id, without counting a delivery or a delay; None: release all.

    Returns:
        The released claims and the marks; and the remaining claims.
    """
    free = [claim for claim in claims if claim.pointer in (0, pointer)]
    remaining = [claim for claim in claims if claim.pointer not in (0, pointer)]
    if after is None:
        return [
            claim._replace(retry_ms=backoff.retry_ms(claim.tries, now_ms)) if claim.pointer else claim for claim in free
        ], remaining
    own = [claim for claim in free if claim.pointer == pointer]
    remaining += [claim._replace(last=min(claim.last, after, key=rank)) for claim in own if claim.start < rank(after)]
    back = [claim._replace(first=max(claim.first, after, key=rank), tries=claim.tries - 1) for claim in own]
    return [claim for claim in free if claim.pointer == 0] + [one for one in back if one.start < one.stop], remaining


def undo_claims(
    claims: Sequence[GroupClaim], orphans: Sequence[GroupClaim]
) -> tuple[list[GroupClaim], list[GroupClaim]]:
    """Divide the claims of a group after ``orphans`` were not delivered, so that they do not count as deliveries."""
    free = [claim for claim in claims if not claim.pointer]
    remaining = [claim for claim in claims if claim.pointer and claim not in orphans]
    return free + [claim._replace(tries=claim.tries - 1) for claim in claims if claim in orphans], remaining


def batch_limit(limit: int, tries: int, max_deliveries: int | None) -> int:
    """Return the maximum batch size: halved after each delivery, and 1 for the last allowed delivery.

    Args:
        max_deliveries: the maximum number of deliveries of a message; None: unlimited.
    """
    if tries and max_deliveries is not None and tries >= max_deliveries - 1:
        return 1
    return max(1, limit >> tries)


def isolated_batch_size(segment: Segment, found: int) -> int:
    """Return how many of a segment's ``found`` first messages to deliver, so that a poison message is isolated.

    The size is half of the failed batch. If the segment joins several failed batches, as after an outage,
    :func:`batch_limit` halves them instead.
    """
    if not segment.tries or not segment.size or found > segment.size:
        return found
    return min(found, max(1, segment.size // 2))


def marks(free: Sequence[GroupClaim], base: MessageId, covering: Sequence[GroupClaim]) -> list[GroupClaim]:
    """Return non-overlapping marks for the parts of ``free`` that no claim covers."""
    if not free:
        return []
    return [
        GroupClaim(part.after, part.until, 0, *part[2:])
        for part in _segments(base, sorted(covering, key=_start), free)
        if part.tries and part.until is not None
    ]


def runs(
    after: MessageId, until: MessageId, holes: Iterable[tuple[MessageId, MessageId]]
) -> list[tuple[MessageId, MessageId]]:
    """Return the ranges that remain of a range of ids without its holes; the first id of a range is exclusive."""
    covered = sorted((GroupClaim(first, last, 0, 0) for first, last in holes), key=_start)
    return [(first, last) for first, last in _parts_without(after, until, covered) if last is not None]


def _join(claims: Iterable[GroupClaim]) -> list[GroupClaim]:
    """Join adjoining and overlapping claims; the claims are sorted by their start."""
    spans, stop = list[list[MessageId]](), LOWEST
    for claim in claims:
        if not spans or claim.start > stop:
            spans.append([claim.first, claim.last])
            stop = claim.stop
        elif claim.stop > stop:
            spans[-1][1], stop = claim.last, claim.stop
    return [GroupClaim(first, last, 0, 0) for first, last in spans]


def _segments(base: MessageId, covering: Iterable[GroupClaim], free: Sequence[GroupClaim]) -> Iterator[Segment]:
    """Yield unclaimed ranges after an id, each with the highest number of deliveries of its marks.

    A sweep line over the bounds of claims and marks, because a long transaction can have thousands of claims.

    Args:
        base: the id before the first range.
        covering: claims, sorted by their start.
        free: the marks.
    """
    if not free:
        for after, until in _parts_without(base, None, covering):
            yield Segment(after, until, 0)
        return
    free, above = sorted(free, key=_start), rank(base)
    ends = {end for claim in free for end in (claim.first, claim.last) if rank(end) > above}
    gaps = list(_parts_without(base, None, covering))
    cuts = sorted({*ends, *(after for after, _ in gaps)}, key=rank)
    # A heap of the marks that cover the current range; the mark with the most deliveries is first.
    index, at, active, found = 0, 0, list[tuple[int, int, int, Rank]](), None
    for after, until in gaps:
        at = bisect_right(cuts, rank(after), lo=at, key=rank)
        stop = len(cuts) if until is None else bisect_left(cuts, rank(until), lo=at, key=rank)
        for first, last in zip([after, *cuts[at:stop]], [*cuts[at:stop], until], strict=True):
            while index < len(free) and free[index].start <= rank(first):
                mark = free[index]
                heappush(active, (-mark.tries, -mark.retry_ms, mark.size, mark.stop))
                index += 1
            while active and active[0][3] <= rank(first):
                heappop(active)
            tries, size, retry_ms = (-active[0][0], active[0][2], -active[0][1]) if active else (0, 0, 0)
            if found is not None and found[1:] == (first, tries, size, retry_ms):
                found = found._replace(until=last)
                continue
            if found is not None:
                yield found
            found = Segment(first, last, tries, size, retry_ms)
    if found is not None:
        yield found


def _parts_without(
    after: MessageId, until: MessageId | None, covered: Iterable[GroupClaim]
) -> Iterator[tuple[MessageId, MessageId | None]]:
    """Yield the parts of a range that no claim covers; the claims are sorted by their start."""
    at, stop = rank(after), None if until is None else rank(until)
    for claim in covered:
        start = claim.start
        if stop is not None and start >= stop:
            break
        if start > at:
            yield after, claim.first
        if (end := claim.stop) > at:
            after, at = claim.last, end
    if stop is None or at < stop:
        yield after, until
