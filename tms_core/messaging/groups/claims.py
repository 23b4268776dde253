"""Consumer groups: each message is delivered to one transaction of a group, whose commit marks it as processed.

A poll of a group claims the returned messages (:mod:`tms_core.consumers.claims`); the claim is durable before the
response. The server caches the claims together with the group's position. Each change of claims also changes the
position, which every poll reads. Therefore a poll reads one row, however many claims are open. The server handles one
request of a group at a time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from tms_core.consumers.claim_rows import claims_of, draining_transaction, pack, pack_drained
from tms_core.consumers.claims import (
    LOWEST,
    Backoff,
    ClaimOutcome,
    ConsumerGroup,
    GroupClaim,
    GroupView,
    Segment,
    batch_limit,
    claim_outcome,
    isolated_batch_size,
    marks,
    rank,
    release_claims,
    runs,
    settle_claim,
    undo_claims,
    view_group,
)
from tms_core.consumers.positions import Position
from tms_core.errors import BadRequest, ConsumerConflict
from tms_core.logs.loggers import RateLimitedLogger, get_logger
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

#: The maximum number of cached claims and groups together.
_MAX_ROWS = 200_000
#: The maximum number of ranges of failed messages in a response.
_MAX_FAILED = 100
#: The released claims, and the remaining claims.
_Division = tuple[list[GroupClaim], list[GroupClaim]]


class Order(Enum):
    """The order in which a group receives messages."""

    #: One batch at a time, in the order of the messages' ids.
    PARTITION = "partition"
    #: Several batches at a time; undecided messages are skipped and delivered later.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class GroupPoll:
    """The parameters of a group's poll.

    Attributes:
        limit: the maximum number of messages, at least 1.
        limit_bytes: the maximum size of the messages in bytes; a first message is returned whatever its size.
        max_deliveries: the maximum number of deliveries of a message, at least 1; the last delivery has a single
            message. None: unlimited.
        principal: the requesting principal. A transaction in progress belongs to its first user, and counts as ended
            for other principals. None: clients are not authenticated.
    """

    transaction: Transaction
    limit: int
    limit_bytes: int = LONG_MAX
    order: Order = Order.PARTITION
    max_deliveries: int | None = None
    principal: str | None = None


class GroupBatch(NamedTuple):
    """The result of a poll.

    Attributes:
        deliveries: the number of deliveries of the messages, including this one; 0 without messages.
        held: the transaction that must be decided before the group continues; None: no transaction blocks the group.
        position: without messages, the lowest possible id of the next message, if no earlier message is undecided or
            claimed.
        at_end: whether all messages are delivered, and none is undecided or claimed by another transaction.
        sealed: whether the topic accepts no more messages, and all running writes have finished.
        drained: whether the topic is sealed, and the group has read all of its messages.
        earlier_partition: the partition that the group must drain first; None: no partition.
        wait_ms: without messages, the milliseconds until failed messages are delivered again; None: no failed message
            waits.
    """

    messages: list[FetchedMessage]
    deliveries: int = 0
    held: int | None = None
    position: MessageId | None = None
    at_end: bool = False
    sealed: bool = False
    drained: bool = False
    earlier_partition: TopicId | None = None
    wait_ms: int | None = None


class FailedRange(NamedTuple):
    """Messages that a worker has received but not processed.

    Attributes:
        mark: the range, the number of deliveries, and the delay.
        message: the message that failed in a batch of its own; None: several messages failed together.
    """

    mark: GroupClaim
    message: MessageId | None


class _Part(NamedTuple):
    """The messages read from a segment, and their claims.

    Attributes:
        ranges: the ranges of ids that were read, without undecided rows.
        is_whole: whether the segment was read completely.
    """

    messages: list[FetchedMessage]
    claims: list[GroupClaim]
    ranges: list[tuple[MessageId, MessageId]]
    is_whole: bool
    fetch: Fetch


class _KnownRows(NamedTuple):
    """The cached claims of a group; valid while the position and ``resets`` are unchanged.

    Attributes:
        resets: :attr:`ConsumerRegistry.resets`, which changes when a client sets a position.
    """

    position: Position
    resets: int
    rows: list[tuple[bytes, GroupClaim]]


class _Choice(NamedTuple):
    """The messages to deliver and their new claims.

    Attributes:
        base: the id up to which all messages are processed or invisible.
    """

    batch: GroupBatch
    claims: list[GroupClaim]
    base: MessageId


class Groups:
    """The consumer groups of one store's topics; threads may share it.

    Args:
        transactions: the manager in this process; None: another process manages transactions.
        backoff: the delays after failed deliveries.
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
        #: For each group, the newest transaction whose claims are merged into the position.
        self._merged: dict[ConsumerGroup, int] = {}
        #: The newest transaction when entries of `_merged` were dropped, and when this process became the leader.
        self._forgotten = self._interrupted = self._last_pointer()
        #: Whether the last poll tried failed messages first; see _order_segments.
        self._failed_first = False
        self._rows: dict[ConsumerGroup, _KnownRows] = {}
        self._known_row_count = 0
        self._seldom = RateLimitedLogger(get_logger(__name__))
        self._drained_history = DrainedHistory(families, consumers, read_path.clock, alone=side.private)

    def poll(self, topic: TopicId, name: str, request: GroupPoll) -> GroupBatch:
        """Claim messages for a transaction. The claim is durable on return.

        Args:
            name: the name of a registered group (:meth:`ConsumerRegistry.put`).

        Raises:
            BadRequest: a number or the name is invalid.
            ConsumerConflict: the transaction has ended, or is too old.
            ConsumerNotFound, TopicNotFound, MetadataError: the group or the topic does not exist, or a row is damaged.
            Unavailable: another server leads the topic, or has changed the group; nothing was delivered.
            StoreError: the store failed. The claim may be stored, so invalidate the transaction.
        """
        check_name(name)
        if request.limit < 1 or (request.max_deliveries is not None and request.max_deliveries < 1):
            raise BadRequest(
                f"The limit {request.limit} or the number of deliveries {request.max_deliveries} is below 1.",
                "Use numbers of at least 1.",
            )
        reader = request.transaction
        pointer = reader.transaction_id
        self._require_open(pointer, request.principal)
        metadata = self._topics.get(topic)
        layout = layout_of(topic, metadata.properties)
        if layout is not None and not layout.has_own:
            return GroupBatch([], at_end=True, sealed=True, drained=True)
        earlier = self._find_earlier(metadata, name, request)
        if earlier is not None:
            # Raise an error for a group that is not registered here: this partition would not hold messages for it
            # while it reads the earlier partition.
            self._consumers.find(metadata, name)
            return GroupBatch([], earlier_partition=earlier)
        sealed = layout is not None or SEALED in metadata.properties
        if sealed:
            # A write that was admitted before the seal may still add messages; "drained" must be final.
            self._families.wait_for_writes(topic)
        group = ConsumerGroup.of(metadata, name)
        with self._consumers.lock(group), self._claiming(pointer, request.principal):
            previous = self._consumers.find(metadata, name)
            rows = self._rows_of(group, previous)
            now_ms = self._read_path.clock.now_ms()
            claims = [claim for _, claim in rows]
            settle = partial(settle_claim, interrupted=self._interrupted, backoff=self._backoff, now_ms=now_ms)
            view = view_group(previous.id, claims, reader, settle)
            self._log_failed(metadata, name, _new_failures(view.free, view.obsolete), reader)
            held = self._blocking_transaction(group, previous, view, request)
            self._remember(group, view.merged)
            choice = _Choice(GroupBatch([], held=held), [], view.base)
            if held is None:
                choice = self._read(metadata, view, request)
            if choice.base != view.base:
                # The new base may adjoin done claims, which merge with it.
                view = view_group(choice.base, claims, reader, settle)
                self._remember(group, view.merged)
            drained = sealed and choice.batch.at_end and view.own == LOWEST
            drained_rows = self._drained_row(group, pointer) if drained else []
            if choice.claims and self._transactions is not None:
                # Before the claim is written: from here on, an abort invalidates the transaction. The claims of an
                # aborted transaction would count as processed.
                self._transactions.note_written(pointer, group.label)
            new = [*choice.claims, *marks(view.free, view.base, [*view.covered, *choice.claims])]
            self._write(metadata, previous, view.base, view.obsolete, new, drained_rows)
            # `is_in_progress` does not wait for the transaction log. If the log's disk failed, an error here would
            # report the claim as not written although it is.
            if choice.claims and self._transactions is not None and not self._transactions.is_in_progress(pointer):
                # The transaction ended while the claim was being written: release the claim, and return no messages.
                previous = self._consumers.find(metadata, name)
                rows = self._rows_of(group, previous)
                self._replace_by_marks(
                    metadata, previous, rows, pointer, undo_claims([claim for _, claim in rows], choice.claims)
                )
                raise _not_in_progress(pointer)
        return choice.batch._replace(sealed=sealed, drained=drained)

    def roll_back(
        self,
        topic: TopicId,
        name: str,
        pointer: int,
        after: MessageId | None = None,
        principal: str | None = None,
    ) -> None:
        """Release the claims of a transaction at once. Durable on return.

        Call it before the abort, because the claims of an aborted transaction count as processed.

        Args:
            after: release only messages after this id, without counting a delivery; None: release all.
            principal: the requesting principal, as of :class:`GroupPoll`; claims of other principals stay.

        Raises:
            BadRequest, ConsumerNotFound, TopicNotFound, MetadataError, Unavailable, StoreError: as :meth:`poll`; after
                a StoreError, invalidate the transaction.
            ConsumerConflict: the transaction is committed.
        """
        check_name(name)
        if not 0 < pointer <= LONG_MAX:
            raise BadRequest(f"{pointer} is not a write pointer.", "Send the transaction's id.")
        metadata = self._topics.get(topic)
        group = ConsumerGroup.of(metadata, name)
        with self._consumers.lock(group):
            previous = self._consumers.find(metadata, name)
            rows = self._rows_of(group, previous)
            if not self._belongs_to(pointer, principal) or all(claim.pointer != pointer for _, claim in rows):
                return
            if self._transactions is not None and self._transactions.status(pointer) == "ended":
                raise ConsumerConflict(
                    f"The claims of transaction {pointer} cannot be released, because it has ended.",
                    f"To process the messages again, set the group back: tms consumer set {topic} {name} --since TIME",
                )
            now_ms = self._read_path.clock.now_ms()
            free, remaining = release_claims([claim for _, claim in rows], pointer, after, self._backoff, now_ms)
            self._replace_by_marks(metadata, previous, rows, pointer, (free, remaining))
            if after is None:
                self._log_failed(metadata, name, _new_failures(free, free), None)
            if self._transactions is not None and all(claim.pointer != pointer for claim in remaining):
                self._transactions.note_rolled_back(pointer, group.label)

    def failed(self, topic: TopicId, name: str) -> list[FailedRange]:
        """Return messages that a group has received but not processed, most deliveries first; at most 100 ranges.

        Raises:
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`poll`.
        """
        metadata = self._topics.get(topic)
        self._consumers.find(metadata, name)
        claims = [claim for _, claim in claims_of(self._side, ConsumerGroup.of(metadata, name))]
        now_ms = self._read_path.clock.now_ms()
        marked = (
            claim._replace(retry_ms=self._backoff.pending_ms(claim.retry_ms, now_ms))
            for claim in claims
            if not claim.pointer and claim.tries
        )
        reader = None if self._transactions is None else self._transactions.visibility().dummy_transaction()
        found: list[FailedRange] = []
        for mark in sorted(marked, key=lambda mark: -mark.tries)[:_MAX_FAILED]:
            if mark.size == 1:
                found += [FailedRange(mark, one) for one in self._ids_in(metadata, mark, reader, _MAX_FAILED)]
            else:
                found.append(FailedRange(mark, None))
        return found[:_MAX_FAILED]

    def _log_failed(
        self, metadata: TopicMetadata, name: str, failed: Sequence[GroupClaim], reader: Transaction | None
    ) -> None:
        """Log each message that has failed in a batch of its own."""
        for mark in failed:
            for message in self._ids_in(metadata, mark, reader, 1) if mark.size == 1 else ():
                seconds = max(0, mark.retry_ms - self._read_path.clock.now_ms()) / 1000
                text = "message %s of %s has failed %d times for consumer %s; next delivery in %.1f s"
                self._seldom.log(logging.WARNING, text, message, metadata.topic, mark.tries, name, seconds)

    def _ids_in(
        self, metadata: TopicMetadata, mark: GroupClaim, reader: Transaction | None, limit: int
    ) -> list[MessageId]:
        """Return the ids of the first messages in the range of a mark that a reader sees."""
        fetch_request = FetchRequest(mark.first, inclusive=False, limit=limit, transaction=reader)
        ids = (
            MessageId.parse(message.id)
            for page in Fetch(self._read_path, metadata, fetch_request, skips_undecided=True).pages()
            for message in page
        )
        return list(takewhile(lambda found: rank(found) <= rank(mark.last), ids))

    def invalidate(self) -> None:
        """Drop cached data, because another process may have written."""
        # `_merged` stays valid, and `_forgotten` covers the transactions that another process has merged.
        self._forgotten = self._interrupted = self._last_pointer()
        self._rows.clear()
        self._drained_history.invalidate()

    # -- the messages to deliver --------------------------------------------------------------------------------------

    def _blocking_transaction(
        self, group: ConsumerGroup, previous: Position, view: GroupView, request: GroupPoll
    ) -> int | None:
        """Return the transaction that must be decided before an ordered group continues; it may be the reader's own."""
        if request.order is Order.NONE:
            return None
        reader = request.transaction
        # The reader must not process messages after those of a transaction whose results its snapshot does not have.
        if view.own == LOWEST and self._is_too_old(reader, previous):
            return reader.transaction_id
        merged = max(view.merged, self._merged.get(group, 0))
        if merged and claim_outcome(merged, reader) is ClaimOutcome.OPEN:
            return merged
        return min((claim.pointer for claim in view.open), default=None)

    def _is_too_old(self, reader: Transaction, previous: Position) -> bool:
        """Return whether a forgotten transaction may have advanced the group since the reader's transaction started."""
        pointer = reader.transaction_id
        return pointer <= self._forgotten and transaction_ms(pointer) <= previous.updated_ms

    def _last_pointer(self) -> int:
        """Return the newest transaction; 0: another process manages transactions."""
        return 0 if self._transactions is None else self._transactions.last_pointer

    def _remember(self, group: ConsumerGroup, merged: int) -> None:
        if merged > self._merged.get(group, 0):
            if len(self._merged) >= KNOWN_GROUPS:
                self._merged.clear()
                self._forgotten = self._last_pointer()
            self._merged[group] = merged

    def _find_earlier(self, metadata: TopicMetadata, name: str, request: GroupPoll) -> TopicId | None:
        """Return the first partition of an earlier family that an ordered group has not drained; None: all drained."""
        if request.order is Order.NONE or PART_OF not in metadata.properties:
            return None
        return self._drained_history.find_unread(metadata, name, request.transaction)

    def _read(self, metadata: TopicMetadata, view: GroupView, request: GroupPoll) -> _Choice:
        """Read the first unclaimed messages."""
        base, position, at_end, retry_ms = view.base, None, False, list[int]()
        segments = self._order_segments(view.segments, request)
        for at, segment in enumerate(segments):
            # A transaction only reads forwards. Therefore the messages that its worker did not receive follow the
            # messages that it did receive, and a rollback with `after` separates them.
            if rank(segment.after) < view.own:
                continue
            if segment.retry_ms:
                # An ordered group waits for failed messages; other groups read later messages first.
                retry_ms.append(segment.retry_ms)
                if request.order is Order.PARTITION:
                    break
                continue
            part = self._part(
                metadata, segment, request, batch_limit(request.limit, segment.tries, request.max_deliveries)
            )
            if part.messages:
                messages, claims = self._fill_batch(metadata, segments[at + 1 :], request, part, segment.tries)
                return _Choice(GroupBatch(messages, segment.tries + 1), claims, base)
            if part.ranges and segment.after == base == part.ranges[0][0]:
                base = part.ranges[0][1]
            fetch = part.fetch
            if not fetch.is_at_end and request.order is Order.PARTITION and segment.until is None:
                break
            # Another transaction may release its claims without a new message, which would not wake a waiting poll.
            if segment.until is None and fetch.is_at_end and not fetch.holes and not view.open:
                at_end, position = True, fetch.position or _after(segment.after)
        wait_ms = max(1, min(retry_ms) - self._read_path.clock.now_ms()) if retry_ms else None
        return _Choice(GroupBatch([], position=position, at_end=at_end and not retry_ms, wait_ms=wait_ms), [], base)

    def _order_segments(self, segments: Sequence[Segment], request: GroupPoll) -> Sequence[Segment]:
        """Return the segments in the order in which to try them.

        For an unordered group without delays, polls alternate between failed and other messages. If failed messages
        always came first, a poison message would block the queue. If they always came last, it would not reach its last
        delivery while other messages arrive, and the base of the group would stay before it.
        """
        if request.order is Order.PARTITION or self._backoff.first_ms or not any(one.tries for one in segments):
            return segments
        self._failed_first = not self._failed_first
        return sorted(segments, key=lambda one: ((one.tries > 0) != self._failed_first, one.tries))

    def _fill_batch(
        self, metadata: TopicMetadata, segments: Sequence[Segment], request: GroupPoll, part: _Part, tries: int
    ) -> tuple[list[FetchedMessage], list[GroupClaim]]:
        """Add messages of further segments with the same number of deliveries; return all messages and claims."""
        limit = batch_limit(request.limit, tries, request.max_deliveries)
        messages, claims = list(part.messages), list(part.claims)
        in_order = request.order is Order.PARTITION
        for segment in segments:
            left_bytes = request.limit_bytes - sum(len(one.payload) + MESSAGE_BYTES for one in messages)
            if len(messages) >= limit or left_bytes <= 0 or (in_order and not part.is_whole):
                break
            if segment.tries == tries and not segment.retry_ms:
                part = self._part(metadata, segment, request, limit - len(messages), left_bytes)
                messages += part.messages
                claims += part.claims
            elif in_order:
                break
        return messages, claims

    def _part(
        self, metadata: TopicMetadata, segment: Segment, request: GroupPoll, limit: int, limit_bytes: int | None = None
    ) -> _Part:
        """Read the first messages of a segment, and return them with their new claims."""
        fetch_request = FetchRequest(
            segment.after,
            inclusive=False,
            limit=limit,
            limit_bytes=limit_bytes or request.limit_bytes,
            transaction=request.transaction,
        )
        fetch = Fetch(self._read_path, metadata, fetch_request, skips_undecided=request.order is Order.NONE)
        messages, end = _collect(fetch, segment)
        share = isolated_batch_size(segment, len(messages))
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

    # -- the stored rows ----------------------------------------------------------------------------------------------

    def _write(
        self,
        metadata: TopicMetadata,
        previous: Position,
        base: MessageId,
        old: Iterable[GroupClaim],
        new: Iterable[GroupClaim],
        drained_rows: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Write the position and the changed rows of a group; do nothing if nothing has changed.

        Args:
            old, new: the claims and marks before and after.
            drained_rows: additional rows to write.
        """
        group = ConsumerGroup.of(metadata, previous.name)
        old_rows, new_rows = set(old), set(new)
        packed = [(*pack(group, claim), claim) for claim in new_rows - old_rows]
        changed = {key: value for key, value, _ in packed}
        puts = [*changed.items(), *drained_rows]
        obsolete = old_rows - new_rows
        deletes = [key for key, _ in (pack(group, claim) for claim in obsolete) if key not in changed]
        if puts or deletes or base != previous.id:
            read_ms = base.publish_ms if base != previous.id else 0
            # Increase the time even if the clock stands still: a late write of a former leader compares with the old
            # value, and fails.
            updated_ms = max(self._read_path.clock.now_ms(), previous.updated_ms + 1, read_ms)
            after = Position(previous.name, base, updated_ms, previous.since_ms)
            known = self._rows.pop(group, None)
            self._consumers.move(metadata, previous, after, puts, deletes)
            if known is not None:
                dropped = {*changed, *deletes}
                rows = [row for row in known.rows if row[0] not in dropped]
                rows += [(key, claim) for key, _, claim in packed]
                self._keep(group, known._replace(position=after, rows=rows))

    def _rows_of(self, group: ConsumerGroup, previous: Position) -> list[tuple[bytes, GroupClaim]]:
        """Return the claims of a group, each with its key.

        Args:
            previous: the position as read by this request.
        """
        known = self._rows.get(group)
        # Read the counter before the claims: the next poll then notices a position that a client sets in between.
        resets = self._consumers.resets
        if known is None or known.position != previous or known.resets != resets:
            known = _KnownRows(previous, resets, claims_of(self._side, group))
            self._keep(group, known)
        return known.rows

    def _keep(self, group: ConsumerGroup, known: _KnownRows) -> None:
        # A group without claims uses memory as well, even after its topic was deleted, so it counts as a row.
        size = len(known.rows) + 1
        self._known_row_count += size
        if self._known_row_count > _MAX_ROWS:
            # The count includes replaced entries, so the cache is cleared more often than necessary.
            self._rows.clear()
            self._known_row_count = size
        self._rows[group] = known

    def _drained_row(self, group: ConsumerGroup, reader: int) -> list[tuple[bytes, bytes]]:
        """Return the row that marks a partition as drained; an empty list if it is already stored.

        Args:
            reader: the transaction that found the partition drained.
        """
        if draining_transaction(self._side, group) is not None:
            return []
        # After a restart, the last transaction that read the partition may be unknown. The reader's snapshot contains
        # its results, so other transactions wait for the reader instead.
        return [pack_drained(group, self._merged.get(group, reader))]

    def _replace_by_marks(
        self,
        metadata: TopicMetadata,
        previous: Position,
        rows: list[tuple[bytes, GroupClaim]],
        pointer: int,
        division: _Division,
    ) -> None:
        """Replace the released claims of a transaction by marks."""
        free, remaining = division
        old = [claim for _, claim in rows if claim.pointer in (0, pointer)]
        new = [*(claim for claim in remaining if claim.pointer == pointer), *marks(free, previous.id, remaining)]
        self._write(metadata, previous, previous.id, old, new)

    # -- the transaction ----------------------------------------------------------------------------------------------

    def _require_open(self, pointer: int, principal: str | None) -> None:
        if not 0 < pointer <= LONG_MAX:
            raise BadRequest(f"{pointer} is not a transaction id.", "Send the transaction as returned by its start.")
        lifetime_ms = self._read_path.lifetime_ms
        if transaction_ms(pointer) + lifetime_ms <= self._read_path.clock.now_ms():
            raise ConsumerConflict(
                f"Transaction {pointer} is older than {lifetime_ms // 1000} s, the maximum lifetime.",
                "Start another transaction.",
            )
        if not self._is_open(pointer) or not self._belongs_to(pointer, principal):
            raise _not_in_progress(pointer)

    @contextmanager
    def _claiming(self, pointer: int, principal: str | None) -> Iterator[None]:
        """Announce a write to the transaction manager for the time of the block.

        An abort during the block then invalidates the transaction; a claim written after an abort would count as
        processed.

        Raises:
            ConsumerConflict: the transaction is not in progress.
        """
        if self._transactions is not None and not self._transactions.begin_write(pointer, principal):
            raise _not_in_progress(pointer)
        try:
            yield
        finally:
            if self._transactions is not None:
                self._transactions.end_write(pointer)

    def _belongs_to(self, pointer: int, principal: str | None) -> bool:
        return self._transactions is None or self._transactions.belongs_to(pointer, principal)

    def _is_open(self, pointer: int) -> bool:
        return self._transactions is None or self._transactions.status(pointer) == "in progress"


def _new_failures(free: Iterable[GroupClaim], rows: Iterable[GroupClaim]) -> list[GroupClaim]:
    """Return the failures that are not stored as marks yet.

    Args:
        free: new marks, or the released claims of a transaction.
        rows: rows of the group, including its stored marks.
    """
    known = {(claim.first, claim.tries) for claim in rows if not claim.pointer}
    return [claim for claim in free if claim.tries > 1 and (claim.first, claim.tries) not in known]


def _not_in_progress(pointer: int) -> ConsumerConflict:
    return ConsumerConflict(
        f"Transaction {pointer} is not in progress, so it cannot claim messages.", "Start another transaction."
    )


def _collect(fetch: Fetch, segment: Segment) -> tuple[list[FetchedMessage], MessageId | None]:
    """Return the messages of a segment, and the id up to which its rows were read; None: no row was read."""
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
    """Return the ranges that contain at least one message; ranges and messages are in order."""
    ranks = [rank(MessageId.parse(message.id)) for message in messages]
    return [part for part in parts if bisect_right(ranks, rank(part[0])) < bisect_right(ranks, rank(part[1]))]


def _before(at: int) -> MessageId:
    """Return the id of the position before a position."""
    return MessageId(*id_parts(max(0, at - 1)))


def _after(message: MessageId) -> MessageId | None:
    """Return the id of the position after a message; None: the message is a stored payload."""
    if message.in_payload_table:
        return None
    return MessageId(*id_parts(position(message.publish_ms, message.sequence) + 1))
