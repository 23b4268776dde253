"""Consumer groups: each message goes to one transaction of a group, and counts for the group once that is committed.

A poll as a group claims its messages (:mod:`tms_core.consumers.claims`), durably and before the response. The claims
are remembered with the position that they were read or written with: whatever changes them changes the position, too,
which is read each time. So a turn reads one row, however many claims are open. One request of a group is served at a
time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from tms_core.consumers.claim_rows import NOT_DRAINED, claims_of, drained_in, pack, pack_drained
from tms_core.consumers.claims import (
    LOWEST,
    Backoff,
    ConsumerGroup,
    GroupClaim,
    Look,
    Segment,
    Truth,
    given_back,
    look,
    marks,
    never_given,
    rank,
    runs,
    settled,
    share_of,
    together,
    truth,
)
from tms_core.consumers.positions import Position
from tms_core.errors import BadRequest, ConsumerConflict
from tms_core.logs.loggers import SeldomLogger, get_logger
from tms_core.messaging.families import Families
from tms_core.messaging.fetcher import Fetch, ReadPath
from tms_core.messaging.groups.drained_history import KNOWN_GROUPS, DrainedHistory
from tms_core.messaging.groups.positions import ConsumerRegistry, check_name
from tms_core.messaging.ids import id_parts, position
from tms_core.messaging.model import MESSAGE_BYTES, FetchedMessage, FetchRequest
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.messaging.topics.partitions import PART_OF, SEALED, layout_of
from tms_core.rowkey import LONG_MAX, MessageId
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import Transaction, transaction_ms

#: How many claims and groups are remembered at most.
_MOST_KEPT = 200_000
#: How many ranges of failed messages are shown of a group.
_MOST_SHOWN = 100
#: Claims that are free, and claims that stay.
_Divided = tuple[list[GroupClaim], list[GroupClaim]]


class Order(Enum):
    """The options of a group."""

    #: One batch at a time, in the order of the messages' ids.
    PARTITION = "partition"
    #: Several batches at a time; messages that are not decided yet are left for later.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class GroupPoll:
    """How a group is polled.

    Attributes:
        limit: the most messages, at least 1.
        limit_bytes: after how many bytes of messages no further one is given out; the first one always is.
        max_deliveries: the highest number of deliveries of a message, at least 1; the last one delivers it alone. None:
            there is no such number.
        principal: the requesting principal; a transaction in progress belongs to its first user, and is over for
            others. None: everybody is the same.
    """

    transaction: Transaction
    limit: int
    limit_bytes: int = LONG_MAX
    order: Order = Order.PARTITION
    max_deliveries: int | None = None
    principal: str | None = None


class GroupBatch(NamedTuple):
    """The claims of a poll.

    Attributes:
        deliveries: their number of deliveries, including this one; 0 without messages.
        held: the transaction whose open claim must be decided first; None: there is none.
        position: without messages, the id from which the next one may come, where nothing before it is undecided or
            claimed.
        at_end: whether all messages are delivered, and none before is undecided or claimed by another transaction.
        sealed: whether the topic takes no more messages; all running writes are finished before.
        drained: whether it is sealed, and the group has read it all.
        behind: the partition that the group must read completely first; None: there is none.
        wait_ms: without messages, in how many milliseconds some come again that have failed; None: none wait.
    """

    messages: list[FetchedMessage]
    deliveries: int = 0
    held: int | None = None
    position: MessageId | None = None
    at_end: bool = False
    sealed: bool = False
    drained: bool = False
    behind: TopicId | None = None
    wait_ms: int | None = None


class FailedRange(NamedTuple):
    """Messages that a program received and did not process.

    Attributes:
        mark: their range, number of deliveries, and delay.
        message: the one that failed alone; None: they failed together.
    """

    mark: GroupClaim
    message: MessageId | None


class _Part(NamedTuple):
    """The rows read of one segment.

    Attributes:
        ranges: the rows read, without undecided ones.
        is_whole: whether that is all of the segment, and all its messages are here.
    """

    messages: list[FetchedMessage]
    claims: list[GroupClaim]
    ranges: list[tuple[MessageId, MessageId]]
    is_whole: bool
    fetch: Fetch


class _KnownRows(NamedTuple):
    """The claims of a group, and the context in which they were read or written; they hold as long as that is the same.

    Attributes:
        taken_back: of the consumers, which a position that is set by hand changes.
    """

    position: Position
    taken_back: int
    rows: list[tuple[bytes, GroupClaim]]


class _Choice(NamedTuple):
    """The result of a read: messages, required claims, and the position up to which all is processed or invisible."""

    batch: GroupBatch
    taken: list[GroupClaim]
    base: MessageId


class Groups:
    """The consumer groups of one store's topics; threads may share it.

    Args:
        transactions: the manager in this process; None: transactions are managed elsewhere.
        backoff: how long messages wait after failed deliveries.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        families: Families,
        consumers: ConsumerRegistry,
        side: SideTable,
        read_path: ReadPath,
        transactions: TransactionManager | None,
        backoff: Backoff,
    ) -> None:
        self._topics = topics
        self._families = families
        self._consumers = consumers
        self._side = side
        self._read_path = read_path
        self._transactions = transactions
        self._backoff = backoff
        #: Which transaction was merged last, by group; and the last that had begun when some of that was forgotten, and
        #: when this began to serve the groups.
        self._merged: dict[ConsumerGroup, int] = {}
        self._forgotten = self._interrupted = self._last_pointer()
        #: Whether failed messages came first the last time; see _in_turn.
        self._failed_first = False
        self._rows: dict[ConsumerGroup, _KnownRows] = {}
        self._kept_rows = 0
        self._seldom = SeldomLogger(get_logger(__name__))
        self._drained_history = DrainedHistory(families, consumers, read_path.clock, alone=side.private)

    def poll(self, topic: TopicId, name: str, request: GroupPoll) -> GroupBatch:
        """Claim messages for a transaction. The claim is durable on return.

        Args:
            name: the group's, which is registered (:meth:`ConsumerRegistry.put`).

        Raises:
            BadRequest: a number that is none, a name that is none.
            ConsumerConflict: the transaction is over, or is older than a transaction may be.
            ConsumerNotFound, TopicNotFound, MetadataError: there is no such group or topic, or its row is damaged.
            Unavailable: another server leads, or has changed the group meanwhile; nothing was delivered.
            StoreError: the store failed. The transaction must be invalidated: a claim may be written.
        """
        check_name(name)
        if request.limit < 1 or (request.max_deliveries is not None and request.max_deliveries < 1):
            raise BadRequest("A limit and a number of deliveries are at least 1.", "Give 1 or more.")
        reader = request.transaction
        pointer = reader.transaction_id
        self._require_open(pointer, request.principal)
        metadata = self._topics.get(topic)
        layout = layout_of(topic, metadata.properties)
        if layout is not None and not layout.has_own:
            return GroupBatch([], at_end=True, sealed=True, drained=True)
        behind = self._behind(metadata, name, request)
        if behind is not None:
            # One that is not registered here holds nothing, while it reads what is before.
            self._consumers.found(metadata, name)
            return GroupBatch([], behind=behind)
        sealed = layout is not None or SEALED in metadata.properties
        if sealed:
            self._families.settle(topic)
        group = ConsumerGroup.of(metadata, name)
        with self._consumers.lock(group), self._claiming(pointer, request.principal):
            former = self._consumers.found(metadata, name)
            rows = self._rows_of(group, former)
            now_ms = self._read_path.clock.now_ms()
            claims = [claim for _, claim in rows]
            settle = partial(settled, interrupted=self._interrupted, backoff=self._backoff, now_ms=now_ms)
            seen = look(former.id, claims, reader, settle)
            self._tell_failed(metadata, name, _failed_since(seen.free, seen.gone), reader)
            held = self._held(group, former, seen, request)
            self._remember(group, seen.merged)
            found = _Choice(GroupBatch([], held=held), [], seen.base)
            if held is None:
                found = self._read(metadata, seen, request)
            if found.base != seen.base:
                # It may touch claims now that are done.
                seen = look(found.base, claims, reader, settle)
                self._remember(group, seen.merged)
            drained = sealed and found.batch.at_end and seen.own == LOWEST
            noted = self._drained_row(group) if drained else []
            if found.taken and self._transactions is not None:
                self._transactions.note_written(pointer, group.label)
            new = [*found.taken, *marks(seen.free, seen.base, [*seen.covered, *found.taken])]
            self._write(metadata, former, seen.base, seen.gone, new, noted)
            # Without waiting for the disk: if that failed, the claim would be answered as not written.
            if found.taken and self._transactions is not None and not self._transactions.is_in_progress(pointer):
                # It ended while the claim was on its way to the disk, and what it has claimed is not answered.
                former = self._consumers.found(metadata, name)
                rows = self._rows_of(group, former)
                self._free(metadata, former, rows, pointer, never_given([claim for _, claim in rows], found.taken))
                raise _ended(pointer)
        return found.batch._replace(sealed=sealed, drained=drained)

    def roll_back(
        self,
        topic: TopicId,
        name: str,
        pointer: int,
        after: MessageId | None = None,
        principal: str | None = None,
    ) -> None:
        """Release the claims of a transaction at once. Durable on return.

        It comes before the abort: an aborted transaction's pointer looks committed to readers.

        Args:
            after: release only messages after this id, without counting a delivery; None: all.
            principal: the requesting principal, as of :class:`GroupPoll`; claims of another principal stay.

        Raises:
            BadRequest, ConsumerNotFound, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`poll`; after
                the last one the transaction must be invalidated.
            ConsumerConflict: the transaction is committed.
        """
        check_name(name)
        if not 0 < pointer <= LONG_MAX:
            raise BadRequest(f"{pointer} is no write pointer.", "Send the transaction's id.")
        metadata = self._topics.get(topic)
        group = ConsumerGroup.of(metadata, name)
        with self._consumers.lock(group):
            former = self._consumers.found(metadata, name)
            rows = self._rows_of(group, former)
            if not self._belongs_to(pointer, principal) or all(claim.pointer != pointer for _, claim in rows):
                return
            if self._transactions is not None and self._transactions.status(pointer) == "ended":
                raise ConsumerConflict(f"Transaction {pointer} has ended.", "What it has claimed cannot be given back.")
            now_ms = self._read_path.clock.now_ms()
            free, kept = given_back([claim for _, claim in rows], pointer, after, self._backoff, now_ms)
            self._free(metadata, former, rows, pointer, (free, kept))
            if after is None:
                self._tell_failed(metadata, name, _failed_since(free, free), None)
            if self._transactions is not None and all(claim.pointer != pointer for claim in kept):
                self._transactions.note_taken_back(pointer, group.label)

    def failed(self, topic: TopicId, name: str) -> list[FailedRange]:
        """Return messages that a group received and has not processed, those with the most failures first; some of very
        much.

        Raises:
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`poll`.
        """
        metadata = self._topics.get(topic)
        self._consumers.found(metadata, name)
        claims = [claim for _, claim in claims_of(self._side, ConsumerGroup.of(metadata, name))]
        now_ms = self._read_path.clock.now_ms()
        marked = (
            claim._replace(retry_ms=self._backoff.still(claim.retry_ms, now_ms))
            for claim in claims
            if not claim.pointer and claim.tries
        )
        reader = None if self._transactions is None else self._transactions.visibility().dummy_transaction()
        found: list[FailedRange] = []
        for mark in sorted(marked, key=lambda mark: -mark.tries)[:_MOST_SHOWN]:
            if mark.size == 1:
                found += [FailedRange(mark, one) for one in self._inside(metadata, mark, reader, _MOST_SHOWN)]
            else:
                found.append(FailedRange(mark, None))
        return found[:_MOST_SHOWN]

    def _tell_failed(
        self, metadata: TopicMetadata, name: str, failed: Sequence[GroupClaim], reader: Transaction | None
    ) -> None:
        """Log the message that is to blame for failed deliveries, once it was alone."""
        for mark in failed:
            for message in self._inside(metadata, mark, reader, 1) if mark.size == 1 else ():
                seconds = max(0, mark.retry_ms - self._read_path.clock.now_ms()) / 1000
                text = "message %s of %s has failed %d times for consumer %s, and comes again in %.1f s"
                self._seldom.log(logging.WARNING, text, message, metadata.topic, mark.tries, name, seconds)

    def _inside(
        self, metadata: TopicMetadata, mark: GroupClaim, reader: Transaction | None, most: int
    ) -> list[MessageId]:
        """Return the first messages that a reader finds where a mark is."""
        asked = FetchRequest(mark.first, inclusive=False, limit=most, transaction=reader)
        ids = (
            MessageId.parse(message.id)
            for page in Fetch(self._read_path, metadata, asked, steps_over=True).pages()
            for message in page
        )
        return list(takewhile(lambda found: rank(found) <= rank(mark.last), ids))

    def forget(self, concerns: Callable[[bytes], bool]) -> None:
        """Forget the data read of some topics, because another process may have written.

        Args:
            concerns: tells which, by the start of their keys.
        """
        self._merged = {group: at for group, at in list(self._merged.items()) if not concerns(group.topic.prefix)}
        self._forgotten = self._interrupted = self._last_pointer()
        self._rows.clear()
        self._drained_history.forget()

    # -- what may be given out ----------------------------------------------------------------------------------------

    def _held(self, group: ConsumerGroup, former: Position, seen: Look, request: GroupPoll) -> int | None:
        """Return the transaction that must be decided before the group goes on in order; it may be the reader's own."""
        if request.order is Order.NONE:
            return None
        reader = request.transaction
        # What was done by a transaction that this one does not see must not be built upon in it.
        if seen.own == LOWEST and self._is_too_old(reader, former):
            return reader.transaction_id
        merged = max(seen.merged, self._merged.get(group, 0))
        if merged and truth(merged, reader) is Truth.OPEN:
            return merged
        return min((claim.pointer for claim in seen.open), default=None)

    def _is_too_old(self, reader: Transaction, former: Position) -> bool:
        """Return whether a group has moved since a transaction started, and it may be forgotten by whom."""
        pointer = reader.transaction_id
        return pointer <= self._forgotten and transaction_ms(pointer) <= former.updated_ms

    def _last_pointer(self) -> int:
        """Return the last transaction that has started; 0 where they are managed elsewhere, and that is not known."""
        return 0 if self._transactions is None else self._transactions.last_pointer

    def _remember(self, group: ConsumerGroup, merged: int) -> None:
        if merged > self._merged.get(group, 0):
            if len(self._merged) >= KNOWN_GROUPS:
                self._merged.clear()
                self._forgotten = self._last_pointer()
            self._merged[group] = merged

    def _behind(self, metadata: TopicMetadata, name: str, request: GroupPoll) -> TopicId | None:
        """Return the partition of an earlier family that a group in order has not read completely, as the reader sees
        it.
        """
        if request.order is Order.NONE or PART_OF not in metadata.properties:
            return None
        return self._drained_history.unread(metadata, name, request.transaction)

    def _read(self, metadata: TopicMetadata, seen: Look, request: GroupPoll) -> _Choice:
        """Read the first messages that are free."""
        base, position, at_end, retry_ms = seen.base, None, False, list[int]()
        segments = self._in_turn(seen.segments, request)
        for at, segment in enumerate(segments):
            # A transaction reads forwards, so that what it has not handed on lies behind what it has.
            if rank(segment.after) < seen.own:
                continue
            if segment.retry_ms:
                # In order the group waits with it, else others go first.
                retry_ms.append(segment.retry_ms)
                if request.order is Order.PARTITION:
                    break
                continue
            part = self._part(
                metadata, segment, request, together(request.limit, segment.tries, request.max_deliveries)
            )
            if part.messages:
                messages, claims = self._with_next(metadata, segments[at + 1 :], request, part, segment.tries)
                return _Choice(GroupBatch(messages, segment.tries + 1), claims, base)
            if part.ranges and segment.after == base == part.ranges[0][0]:
                base = part.ranges[0][1]
            fetch = part.fetch
            if not fetch.is_at_end and request.order is Order.PARTITION and segment.until is None:
                break
            # What another one has claimed may come free at any time, without a new message.
            if segment.until is None and fetch.is_at_end and not fetch.holes and not seen.open:
                at_end, position = True, fetch.position or _behind(segment.after)
        wait_ms = max(1, min(retry_ms) - self._read_path.clock.now_ms()) if retry_ms else None
        return _Choice(GroupBatch([], position=position, at_end=at_end and not retry_ms, wait_ms=wait_ms), [], base)

    def _in_turn(self, segments: Sequence[Segment], request: GroupPoll) -> Sequence[Segment]:
        """Sort segments in the order in which they are tried.

        Without an order and without waits, failed messages and others come first in turns. If failed ones always came
        first, a message that always fails would stop the queue. If they always came last, it would not reach its last
        delivery while others arrive, and the base of the group would stay before it.
        """
        if request.order is Order.PARTITION or self._backoff.first_ms or not any(one.tries for one in segments):
            return segments
        self._failed_first = not self._failed_first
        return sorted(segments, key=lambda one: ((one.tries > 0) != self._failed_first, one.tries))

    def _with_next(
        self, metadata: TopicMetadata, segments: Sequence[Segment], request: GroupPoll, part: _Part, tries: int
    ) -> tuple[list[FetchedMessage], list[GroupClaim]]:
        """Return the messages of a segment, with those of the next ones that were given out as often; and their
        claims.
        """
        most = together(request.limit, tries, request.max_deliveries)
        messages, claims = list(part.messages), list(part.claims)
        in_order = request.order is Order.PARTITION
        for segment in segments:
            left_bytes = request.limit_bytes - sum(len(one.payload) + MESSAGE_BYTES for one in messages)
            if len(messages) >= most or left_bytes <= 0 or (in_order and not part.is_whole):
                break
            if segment.tries == tries and not segment.retry_ms:
                part = self._part(metadata, segment, request, most - len(messages), left_bytes)
                messages += part.messages
                claims += part.claims
            elif in_order:
                break
        return messages, claims

    def _part(
        self, metadata: TopicMetadata, segment: Segment, request: GroupPoll, room: int, room_bytes: int | None = None
    ) -> _Part:
        """Read the first messages of a segment, and their claims."""
        asked = FetchRequest(
            segment.after,
            inclusive=False,
            limit=room,
            limit_bytes=room_bytes or request.limit_bytes,
            transaction=request.transaction,
        )
        fetch = Fetch(self._read_path, metadata, asked, steps_over=request.order is Order.NONE)
        messages, end = _collected(fetch, segment)
        share = share_of(segment, len(messages))
        if share < len(messages):
            messages, end = messages[:share], MessageId.parse(messages[share - 1].id)
        holes = [(_before(first), _before(stop)) for first, stop in fetch.holes]
        ranges = [] if end is None else runs(segment.after, end, holes)
        with_messages = ranges if len(ranges) == 1 or not messages else _with_messages(ranges, messages)
        pointer = request.transaction.transaction_id
        claims = [
            GroupClaim(first, last, pointer, segment.tries + 1, len(messages))
            for first, last in with_messages
            if messages
        ]
        return _Part(messages, claims, ranges, end is not None and end == segment.until, fetch)

    # -- what is written down -----------------------------------------------------------------------------------------

    def _write(
        self,
        metadata: TopicMetadata,
        former: Position,
        base: MessageId,
        old: Iterable[GroupClaim],
        new: Iterable[GroupClaim],
        noted: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Write how far the group is, and the rows that are new in the place of old ones, if that changes anything.

        Args:
            noted: rows to write besides.
        """
        group = ConsumerGroup.of(metadata, former.name)
        there, wanted = set(old), set(new)
        packed = [(*pack(group, claim), claim) for claim in wanted - there]
        changed = {key: value for key, value, _ in packed}
        puts = [*changed.items(), *noted]
        gone = there - wanted
        deletes = [key for key, _ in (pack(group, claim) for claim in gone) if key not in changed]
        if puts or deletes or base != former.id:
            read_ms = base.publish_ms if base != former.id else 0
            # Always another one, whatever the clock says: by that a deposed server's late write is told.
            updated_ms = max(self._read_path.clock.now_ms(), former.updated_ms + 1, read_ms)
            after = Position(former.name, base, updated_ms, former.since_ms)
            known = self._rows.pop(group, None)
            self._consumers.move(metadata, former, after, puts, deletes)
            if known is not None:
                dropped = {*changed, *deletes}
                kept = [row for row in known.rows if row[0] not in dropped]
                kept += [(key, claim) for key, _, claim in packed]
                self._keep(group, known._replace(position=after, rows=kept))

    def _rows_of(self, group: ConsumerGroup, former: Position) -> list[tuple[bytes, GroupClaim]]:
        """Return the claims of a group whose position was just read, each with its key."""
        known = self._rows.get(group)
        # Before they are read: a position that is set meanwhile is noticed the next time.
        taken_back = self._consumers.taken_back
        if known is None or known.position != former or known.taken_back != taken_back:
            known = _KnownRows(former, taken_back, claims_of(self._side, group))
            self._keep(group, known)
        return known.rows

    def _keep(self, group: ConsumerGroup, known: _KnownRows) -> None:
        # A group without claims takes memory, too, and stays after its topic was deleted.
        size = len(known.rows) + 1
        self._kept_rows += size
        if self._kept_rows > _MOST_KEPT:
            # Each is counted as often as it is kept, so that now and then they are read again.
            self._rows.clear()
            self._kept_rows = size
        self._rows[group] = known

    def _drained_row(self, group: ConsumerGroup) -> list[tuple[bytes, bytes]]:
        """What notes that a group has read a sealed partition completely; nothing where that is known."""
        known = drained_in(self._side, group)
        return [pack_drained(group, self._merged.get(group, 0))] if known in (None, NOT_DRAINED) else []

    def _free(
        self,
        metadata: TopicMetadata,
        former: Position,
        rows: list[tuple[bytes, GroupClaim]],
        pointer: int,
        divided: _Divided,
    ) -> None:
        """Make marks of the claims of a transaction that are free; the others stay."""
        free, kept = divided
        old = [claim for _, claim in rows if claim.pointer in (0, pointer)]
        new = [*(claim for claim in kept if claim.pointer == pointer), *marks(free, former.id, kept)]
        self._write(metadata, former, former.id, old, new)

    # -- the transaction ----------------------------------------------------------------------------------------------

    def _require_open(self, pointer: int, principal: str | None) -> None:
        if not 0 < pointer <= LONG_MAX:
            raise BadRequest(f"{pointer} is no transaction.", "Send the transaction as it was begun.")
        lifetime_ms = self._read_path.lifetime_ms
        if transaction_ms(pointer) + lifetime_ms <= self._read_path.clock.now_ms():
            raise ConsumerConflict(
                f"Transaction {pointer} is older than {lifetime_ms // 1000} s, the longest one may last.",
                "Begin another one.",
            )
        if not self._is_open(pointer) or not self._belongs_to(pointer, principal):
            raise _ended(pointer)

    @contextmanager
    def _claiming(self, pointer: int, principal: str | None) -> Iterator[None]:
        """Nothing is claimed in a transaction that is over; aborted while the block runs, it becomes invalid instead.

        An aborted transaction's pointer looks committed, so a claim that is written behind the abort would count.
        """
        if self._transactions is not None and not self._transactions.begin_write(pointer, principal):
            raise _ended(pointer)
        try:
            yield
        finally:
            if self._transactions is not None:
                self._transactions.end_write(pointer)

    def _belongs_to(self, pointer: int, principal: str | None) -> bool:
        return self._transactions is None or self._transactions.belongs_to(pointer, principal)

    def _is_open(self, pointer: int) -> bool:
        return self._transactions is None or self._transactions.status(pointer) == "in progress"


def _failed_since(free: Iterable[GroupClaim], rows: Iterable[GroupClaim]) -> list[GroupClaim]:
    """New failures that are not yet marks in the table.

    Args:
        free: marks, and claims of one transaction that returns them.
        rows: among which the marks of the table are.
    """
    known = {(claim.first, claim.tries) for claim in rows if not claim.pointer}
    return [claim for claim in free if claim.tries > 1 and (claim.first, claim.tries) not in known]


def _ended(pointer: int) -> ConsumerConflict:
    return ConsumerConflict(f"Transaction {pointer} is not in progress, so it claims nothing.", "Begin another one.")


def _collected(fetch: Fetch, segment: Segment) -> tuple[list[FetchedMessage], MessageId | None]:
    """Return the messages of a segment, and the id up to which all were looked at; None: there were none."""
    messages = [message for page in fetch.pages() for message in page]
    read_to = None if fetch.position is None else _before(position(fetch.position.publish_ms, fetch.position.sequence))
    if segment.until is not None:
        last = rank(segment.until)
        inside = [message for message in messages if rank(MessageId.parse(message.id)) <= last]
        if len(inside) < len(messages):
            return inside, segment.until
    ends = [read_to] if read_to is not None else []
    if messages:
        ends.append(MessageId.parse(messages[-1].id))
    end = max(ends, default=None, key=rank)
    if end is None or rank(end) <= rank(segment.after):
        return messages, None
    return messages, end if segment.until is None else min(end, segment.until, key=rank)


def _with_messages(
    parts: Sequence[tuple[MessageId, MessageId]], messages: Sequence[FetchedMessage]
) -> list[tuple[MessageId, MessageId]]:
    """Return those of some ranges that have one of the messages in them; both are in order."""
    ranks = [rank(MessageId.parse(message.id)) for message in messages]
    return [part for part in parts if bisect_right(ranks, rank(part[0])) < bisect_right(ranks, rank(part[1]))]


def _before(at: int) -> MessageId:
    """Return the id of the row before a position."""
    return MessageId(*id_parts(max(0, at - 1)))


def _behind(message: MessageId) -> MessageId | None:
    """Return the id of the row behind a message that is a row of its own."""
    if message.in_payload_table:
        return None
    return MessageId(*id_parts(position(message.publish_ms, message.sequence) + 1))
