"""Announcements of producers' requests: the positions of a request's rows, stored before the rows.

An announcement costs a sync, as the rows do. While only producers write to a topic, one announcement of a producer also
covers its next requests. The positions of these requests encode their numbers (:func:`~.last_request.place_request`),
so after a crash the rows show which request was the last. A producer that writes alone may use all positions. If
several producers write, each has a *lane*: a part of the sequence numbers.

Announcements that cover future requests are withdrawn before other rows are written to the topic. After a crash, rows
of others inside an announcement would count as rows of the producer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TypeAlias

from tms_core.messaging.ids import milliseconds, position
from tms_core.messaging.producers.last_request import LANE_ROWS, LANES, LastRequest, RememberedRequest
from tms_core.messaging.producers.requests import Admission, Requests
from tms_core.messaging.producers.rows import IDLE_MS
from tms_core.messaging.publish.entry import PublishEntry, remaining
from tms_core.tables.side import SideChange
from tms_core.topic import TopicMetadata

#: The number of batches by the same producers alone after which announcements cover future requests. The saving starts
#: with the second batch after that; an earlier request of others needs a withdrawal, which costs the saved sync.
_ALONE_BATCHES = 1
#: The range of an announcement in milliseconds; after a crash, no other message gets an id in this range. If each batch
#: uses a new millisecond, ids run ahead of the clock by at most this time; then requests start at the next free
#: position until the clock has caught up.
AHEAD_MS = 250

#: Entries with their admissions, by the keys of their last requests.
_Pairs: TypeAlias = dict[bytes, tuple[PublishEntry, Admission]]


@dataclass(slots=True)
class AnnouncedAhead:
    """The announcements of one topic that cover future requests; only :class:`Announcements` uses the attributes.

    Attributes:
        batches: the number of consecutive batches that these producers wrote alone.
        lanes: the lanes of the producers, from 1, by the keys of their last requests.
        windows: by the same keys, the announcement that the table has or may have, and the last request that it covers.
        is_stale: whether the announcements must be withdrawn before the next write.
    """

    batches: int = 0
    lanes: dict[bytes, int] = field(default_factory=dict)
    windows: dict[bytes, tuple[LastRequest, RememberedRequest]] = field(default_factory=dict)
    is_stale: bool = False


class Announcements:
    """A writer of announcements. A batch calls arrange, withdraw (if stale), announce and note_written, in this order.

    Only one batch of a topic at a time calls these methods.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def arrange(
        self, ahead: AnnouncedAhead, topic: TopicMetadata, entries: Sequence[PublishEntry], at: int, now_ms: int
    ) -> Sequence[PublishEntry]:
        """Assign lanes, mark announced entries, and return the entries in the order of their positions.

        Args:
            entries: the whole batch, with and without producers.
            at: the first free position.
        """
        pairs: _Pairs = {
            admission.keys.request: (entry, admission)
            for entry in entries
            if (admission := entry.admission) is not None and entry.ttl_ms is None
        }
        # Rows must live as long as the producer's registration: deleted rows could not show after a crash which request
        # was the last. A TTL of IDLE_MS suffices, because the registration is deleted after that time.
        is_lasting = topic.ttl_seconds * 1000 >= IDLE_MS and not topic.consumed
        is_near = milliseconds(at) < now_ms + AHEAD_MS
        if not (is_lasting and is_near and len(pairs) == len(entries)):
            pairs = {}
        _update_lanes(ahead, pairs, is_small=max([entry.rows for entry in entries]) <= LANE_ROWS)
        if not pairs:
            return entries
        if len(ahead.lanes) > 1:
            pairs = {key: pairs[key] for key in ahead.lanes if key in pairs}
        if requests := self._covered_requests(ahead, pairs, at):
            for (entry, _), request in zip(pairs.values(), requests, strict=True):
                entry.announced = request
        elif len(ahead.lanes) > 1 and self._announces_ahead(ahead):
            for key, (entry, _) in pairs.items():
                entry.lane = ahead.lanes[key]
        return [entry for entry, _ in pairs.values()]

    def withdraw(self, ahead: AnnouncedAhead, entries: Iterable[PublishEntry], at: int) -> None:
        """Limit announcements to requests that may be written already, before other entries are written.

        Durable on return.

        Args:
            entries: the next entries; their admissions are updated with the new values of the rows.
            at: the first position of these entries.

        Raises:
            StoreError: the store failed; the entries must not be written.
        """
        rows, last = self._requests.rows, self._requests.last
        found = {key: rows[key] for key in ahead.windows}
        changes: list[tuple[SideChange, LastRequest]] = []
        for key, (announced, window) in ahead.windows.items():
            raw = found[key]
            if raw is not None and at < announced.until and LastRequest.parse(raw).until:
                request = window.request._replace(until=0, lane=0)
                changes.append((SideChange(key, raw, request.pack()), request))
        if changes:
            # If the exchange of a row fails, a newer announcement has replaced it, which covers only its own request.
            for change, request in compress(changes, rows.change([change for change, _ in changes])):
                last[change.key] = RememberedRequest(change.value, request)
                found[change.key] = change.value
        ahead.windows, ahead.is_stale = {}, False
        for entry in entries:
            if (admission := entry.admission) is not None and (key := admission.keys.request) in found:
                entry.admission = admission._replace(previous=found[key])

    def announce(self, entries: Sequence[PublishEntry], ahead: AnnouncedAhead | None = None) -> Sequence[PublishEntry]:
        """Store the positions of the producers' rows, and their transactions. Durable on return.

        Args:
            entries: entries with assigned positions.
            ahead: for messages, the topic's announcements, which may also cover future requests.

        Returns:
            The entries whose producer is not fenced; the other entries are rejected.

        Raises:
            Unavailable: another process changed a producer; the entries must not be written.
            StoreError: the store failed.
        """
        requests = self._requests
        changes: list[tuple[str, SideChange]] = []
        for entry in entries:
            if (admission := entry.admission) is None:
                continue
            if (announced := entry.announced) is None or (last := admission.last) is None:
                changes.append((admission.sent.name, self._change(ahead, entry, admission)))
            else:
                # Update it before the write, because the rows may exist even if the write fails.
                last.request, last.is_written = announced, False
        if not changes:
            return entries
        requests.change(*changes)
        if requests.is_alone:
            return entries
        # Read the registrations again after the announcement, because another server may lead the producer's home. This
        # read sees an instance registered before; an instance registered later finds the announcement, and aborts the
        # transaction.
        for entry in entries:
            if (
                entry.admission is not None
                and entry.announced is None
                and (error := requests.recheck_fence(entry.admission))
            ):
                entry.drop(error)
        return remaining(entries)

    def note_written(self, entries: Iterable[PublishEntry]) -> None:
        """Record that the rows of entries exist, so that a repeated request needs no search."""
        for entry in entries:
            if (admission := entry.admission) is not None and (last := admission.last) is not None:
                last.is_written = True

    def _change(self, ahead: AnnouncedAhead | None, entry: PublishEntry, admission: Admission) -> SideChange:
        """Return the change that announces an entry, and if possible the next requests of its producer."""
        key, sent = admission.keys.request, admission.sent
        announced = request = LastRequest(sent.generation, sent.sequence, entry.first, entry.rows)
        if ahead is not None and self._announces_ahead(ahead):
            announced = request._replace(until=entry.first + position(AHEAD_MS), lane=entry.lane)
        self._requests.last[key] = last = RememberedRequest(announced.pack(), request)
        if ahead is not None and announced.until:
            # Update it before the write, because the row may exist even if the write fails.
            ahead.windows[key] = announced, last
        entry.admission = admission._replace(last=last)
        puts, deletes = self._requests.transaction_rows(admission, entry.pointer)
        return SideChange(key, admission.previous, last.value, puts, deletes)

    def _announces_ahead(self, ahead: AnnouncedAhead) -> bool:
        """Return whether announcements cover future requests: the same producers have been alone for long enough."""
        return ahead.batches > _ALONE_BATCHES and self._requests.is_alone

    def _covered_requests(self, ahead: AnnouncedAhead, pairs: _Pairs, at: int) -> list[LastRequest]:
        """Return the requests of a batch from a position on; empty unless earlier announcements cover all of them."""
        requests: list[LastRequest] = []
        if ahead.is_stale:
            return requests
        windows = ahead.windows
        for key, (entry, admission) in pairs.items():
            if (window := windows.get(key)) is None:
                return []
            announced, last = window
            # A repeated request needs a separate announcement, and so does a request after a write of another process.
            if admission.repeated is not None or admission.last is not last:
                return []
            # The first request of a transaction also stores the transaction, so it cannot skip the announcement.
            if entry.pointer is not None and not self._requests.is_stored(admission, entry.pointer):
                return []
            request = announced.next(admission.sent.generation, admission.sent.sequence, at, entry.rows)
            if request is None:
                return []
            requests.append(request)
            at = request.first + entry.rows
        return requests


def _update_lanes(ahead: AnnouncedAhead, keys: Collection[bytes], *, is_small: bool) -> None:
    """Assign lanes to the producers of the next batch, or mark the announcements as stale if they do not fit.

    Args:
        keys: the keys of the producers' last requests; empty: the batch has other entries, or its rows expire early.
        is_small: whether each request fits into a lane.
    """
    if not _fits(ahead, keys, is_small=is_small):
        ahead.batches, ahead.lanes, ahead.is_stale = 0, {}, bool(ahead.windows)
        if not _fits(ahead, keys, is_small=is_small):
            return
    ahead.batches += 1
    for key in keys:
        if key not in ahead.lanes:
            ahead.lanes[key] = len(ahead.lanes) + 1


def _fits(ahead: AnnouncedAhead, keys: Collection[bytes], *, is_small: bool) -> bool:
    """Return whether a batch may be written without a withdrawal: one producer is alone, or all can have lanes."""
    if len(ahead.lanes) == 1:
        return list(keys) == list(ahead.lanes)
    if not ahead.lanes and len(keys) == 1:
        return True
    return bool(keys) and is_small and len(ahead.lanes.keys() | keys) <= LANES
