"""Claims: messages that a consumer group has received, each in a transaction.

A claim is a range of message ids under a transaction's write pointer. It is *done* once the transaction is committed,
*void* once it is invalid, and *open* until then. Therefore a commit needs no further write, and a worker that dies
releases its messages when its transaction times out. A group is a consumer's position (its *base*) and the claims after
it; single messages need no rows.

A void claim is free. Its number of deliveries is kept as a *mark*: the same row with the pointer 0, which also has the
time of the next delivery.

The rules are pure functions from claims and a reader's view to messages. :mod:`tms_core.consumers.claim_rows` stores
claims.
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

#: The first byte of rows that are written under a transaction, and what says that one is a claim.
TRANSACTIONAL, CLAIM = b"t", b"c"
#: How often a wait is doubled at most; it is longer than any limit then.
_MOST_DOUBLINGS = 40
#: The highest sequence number of a payload.
_MOST_SEQUENCE = 2**16 - 1

Rank = tuple[int, int, int, int]
#: Below all ids.
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
    """Delivered messages.

    Attributes:
        first: the id before them.
        last: the last of them.
        pointer: the id of the transaction; 0: a mark, which only has the number of deliveries.
        tries: their number of deliveries, including this one.
        size: number of messages delivered together; 0: that is not known.
        retry_ms: for a mark, the time of the next delivery, in milliseconds; 0: at once.
    """

    # A group's server keeps its claims from poll to poll, and each poll compares all of them.
    @cached_property
    def start(self) -> Rank:
        """Return the rank of the id before them."""
        return rank(self.first)

    @cached_property
    def stop(self) -> Rank:
        """Return the rank of the last of them."""
        return rank(self.last)


class ConsumerGroup(NamedTuple):
    """Names a consumer group: a topic's generation, and the consumer's name."""

    topic: TopicId
    generation: int
    name: str

    @classmethod
    def of(cls, topic: TopicMetadata, name: str) -> ConsumerGroup:
        """Return a group of a topic as it is now."""
        return cls(topic.topic, topic.generation, name)

    @property
    def prefix(self) -> bytes:
        """Return the start of the keys of its claims."""
        start = generation_prefix(self.topic.prefix, self.generation)
        return TRANSACTIONAL + start + CLAIM + self.name.encode("ascii") + b"\0"

    @property
    def label(self) -> str:
        """Return its name in a sentence."""
        return f"claims of {self.name} on {self.topic}"


class Backoff(NamedTuple):
    """How long messages wait after failed deliveries: twice as long each time.

    Attributes:
        first_ms: after the first; 0: they do not wait.
        longest_ms: at most, but for rounding up by up to a quarter.
    """

    first_ms: int
    longest_ms: int

    def retry_ms(self, tries: int, now_ms: int) -> int:
        """Return when messages come again that have failed now, after so many deliveries; 0: at once.

        Moments are rounded up to quarters of the wait, so that batches that fail next to each other, as in an outage
        all do, need few marks.
        """
        wait_ms = min(self.longest_ms, self.first_ms << min(max(0, tries - 1), _MOST_DOUBLINGS))
        if wait_ms <= 0:
            return 0
        step_ms = max(1, wait_ms // 4)
        return -(-(now_ms + wait_ms) // step_ms) * step_ms

    def still(self, retry_ms: int, now_ms: int) -> int:
        """Return a moment if it is still to come, else 0; times too far ahead come from a wrong clock."""
        return retry_ms if now_ms < retry_ms <= now_ms + self.longest_ms + self.longest_ms // 4 else 0


class ClaimOutcome(Enum):
    """Outcome of a claim, as one reader sees it."""

    DONE = "done"
    OPEN = "open"
    VOID = "void"
    OWN = "own"


class Segment(NamedTuple):
    """Messages that may be delivered together.

    Attributes:
        after: the id before them.
        until: the last id that may be among them; None: there is no end.
        tries: their number of deliveries.
        size: how many of them together; 0: that is not known.
        retry_ms: until when they wait; 0: they do not.
    """

    after: MessageId
    until: MessageId | None
    tries: int
    size: int = 0
    retry_ms: int = 0


class GroupView(NamedTuple):
    """The state of a group for one reader.

    Attributes:
        base: how far all is done.
        merged: the highest pointer of the claims that are done and lie before the base now; 0 if it does not exist.
        segments: messages neither done nor claimed, in order.
        covered: where claims lie that stay as they are, in order; those that touch are together.
        open: the claims of other transactions that are not decided.
        own: after the reader's own claims.
        obsolete: rows to delete: done claims before the base, void claims, and marks.
        free: the marks that take the place of those.
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
    """Return where an id lies among others. One without a payload part stands for its row, behind all payloads of
    that.
    """
    if message.in_payload_table:
        return message
    return (message.publish_ms, message.sequence, LONG_MAX, _MOST_SEQUENCE)


def claim_outcome(pointer: int, reader: Transaction) -> ClaimOutcome:
    """Return the outcome of the transaction with this id, as a reader sees it."""
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
    """Return :func:`claim_outcome` of each pointer. Nearly all are in progress, and sets find those fastest."""
    own = (0, reader.transaction_id, reader.write_pointer, *reader.checkpoint_write_pointers)
    in_progress = pointers & set(reader.in_progress).difference(own)
    found = dict.fromkeys(in_progress, ClaimOutcome.OPEN)
    found.update((pointer, claim_outcome(pointer, reader)) for pointer in pointers - in_progress)
    return found


def settle_claim(claim: GroupClaim, interrupted: int, backoff: Backoff, now_ms: int) -> GroupClaim:
    """Return the mark that replaces a void claim or mark; a mark with 0 tries is unnecessary.

    Only unfinished messages have marks. A counted delivery starts a delay; a mark whose delay is over loses it.

    A void claim of a transaction that had started before the server was interrupted does not count as a delivery,
    because the program may not have received its messages, or could not commit. A program that releases its claims
    reports them itself.

    Args:
        interrupted: the last transaction that had started when the server last started or took over; 0: none.
    """
    if claim.pointer <= 0:
        return claim._replace(retry_ms=backoff.still(claim.retry_ms, now_ms))
    if claim.pointer <= interrupted:
        return claim._replace(pointer=0, tries=claim.tries - 1)
    return claim._replace(pointer=0, retry_ms=backoff.retry_ms(claim.tries, now_ms))


def view_group(
    base: MessageId,
    claims: Iterable[GroupClaim],
    reader: Transaction,
    settle: Callable[[GroupClaim], GroupClaim] = lambda claim: claim,
) -> GroupView:
    """Return the state of a group by its rows.

    Args:
        settle: makes marks of void claims, see :func:`settle_claim`; by default claims and marks stay unchanged.
    """
    in_order = sorted(claims, key=_start)
    view = claim_outcomes({claim.pointer for claim in in_order}, reader)
    # Looked up once: an enumeration's members are slow, and with many claims these loops are most of what a poll costs.
    done, void, undecided, own = ClaimOutcome.DONE, ClaimOutcome.VOID, ClaimOutcome.OPEN, ClaimOutcome.OWN
    merged, done_to = 0, rank(base)
    for claim in in_order:
        if view[claim.pointer] is done and claim.start <= done_to:
            merged = max(merged, claim.pointer)
            if claim.stop > done_to:
                base, done_to = claim.last, claim.stop
    covering, opened, obsolete, free, own_to = *(list[GroupClaim]() for _ in range(4)), LOWEST
    for claim in in_order:
        is_ = view[claim.pointer]
        if claim.stop <= done_to or is_ is void:
            obsolete.append(claim)
            if is_ is void and claim.stop > done_to and (mark := settle(claim)).tries:
                free.append(mark)
            continue
        covering.append(claim)
        if is_ is undecided:
            opened.append(claim)
        elif is_ is own:
            own_to = max(own_to, claim.stop)
    covered = _join(covering)
    return GroupView(base, merged, tuple(_segments(base, covered, free)), covered, opened, own_to, obsolete, free)


def release_claims(
    claims: Sequence[GroupClaim], pointer: int, after: MessageId | None, backoff: Backoff, now_ms: int
) -> tuple[list[GroupClaim], list[GroupClaim]]:
    """Free and remaining claims after a transaction returned its claims.

    Args:
        after: it returns only messages after this id, without a delivery and a delay; None:
            all.

    Returns:
        Void claims and marks; and claims that stay.
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
    """Free and remaining claims after some claims got no response, so that they do not count as deliveries."""
    free = [claim for claim in claims if not claim.pointer]
    remaining = [claim for claim in claims if claim.pointer and claim not in orphans]
    return free + [claim._replace(tries=claim.tries - 1) for claim in claims if claim in orphans], remaining


def batch_limit(limit: int, tries: int, max_deliveries: int | None) -> int:
    """Return the largest batch for messages with this number of deliveries; alone the last time.

    Args:
        max_deliveries: the highest number of deliveries of a message; None: forever.
    """
    if tries and max_deliveries is not None and tries >= max_deliveries - 1:
        return 1
    return max(1, limit >> tries)


def share_of(segment: Segment, found: int) -> int:
    """Return how many of a segment's first messages to deliver, so that a message that always fails is isolated.

    It is half of a failed batch. If several batches failed next to each other, as in an outage, :func:`batch_limit`
    halves them instead.
    """
    if not segment.tries or not segment.size or found > segment.size:
        return found
    return min(found, max(1, segment.size // 2))


def marks(free: Sequence[GroupClaim], base: MessageId, covering: Sequence[GroupClaim]) -> list[GroupClaim]:
    """Return the marks that are left of void claims, none of which overlap."""
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
    """Return a range of ids without some others in it; the first id of each is exclusive."""
    covered = sorted((GroupClaim(first, last, 0, 0) for first, last in holes), key=_start)
    return [(first, last) for first, last in _parts_without(after, until, covered) if last is not None]


def _join(claims: Iterable[GroupClaim]) -> list[GroupClaim]:
    """Join claims, which come in the order of their beginnings, to ranges that neither touch nor overlap."""
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

    It makes one pass over the bounds of claims and marks, because a long transaction can have thousands.

    Args:
        base: the id before the first range.
        covering: claims in the order of their first messages.
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
    index, at, over, found = 0, 0, list[tuple[int, int, int, Rank]](), None
    for after, until in gaps:
        at = bisect_right(cuts, rank(after), lo=at, key=rank)
        stop = len(cuts) if until is None else bisect_left(cuts, rank(until), lo=at, key=rank)
        for first, last in zip([after, *cuts[at:stop]], [*cuts[at:stop], until], strict=True):
            while index < len(free) and free[index].start <= rank(first):
                mark = free[index]
                heappush(over, (-mark.tries, -mark.retry_ms, mark.size, mark.stop))
                index += 1
            while over and over[0][3] <= rank(first):
                heappop(over)
            tries, size, retry_ms = (-over[0][0], over[0][2], -over[0][1]) if over else (0, 0, 0)
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
    """Yield the parts of a range without claims; the claims are in the order of their first messages."""
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
