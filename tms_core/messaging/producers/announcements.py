"""Announcements of producers: where the rows of a request will be, written down before the rows.

An announcement is synced, as the rows are. While only producers write to a topic, one announcement of a producer covers
its next requests, too. They lie in places that tell their numbers (:func:`~.last_request.placed`). After a crash the
rows themselves tell which request was the last. A producer that writes alone has all positions; several producers have
a *seat* each, a part of the sequence numbers.

Before anything else is written to the topic, announcements that cover more than rows that may exist are withdrawn.
Otherwise these rows would be taken for rows of a producer after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import cast

from tms_core.messaging.ids import milliseconds, position
from tms_core.messaging.producers.last_request import SEATED_ROWS, SEATS, LastRequest, RememberedRequest
from tms_core.messaging.producers.requests import Admission, Requests, Sent
from tms_core.messaging.producers.rows import IDLE_MS
from tms_core.messaging.publish.entry import PublishEntry, remaining
from tms_core.tables.side import SideChange
from tms_core.topic import TopicMetadata

#: Batches of the same producers alone after which their next requests are announced as well.
_ALONE = 4
#: How far an announcement reaches, in milliseconds; after a crash no other message gets an id of that time. If each
#: batch starts a millisecond, ids run ahead of the clock by at most as much: after that, requests start at the next
#: position that is free until the clock has come near.
AHEAD_MS = 250


@dataclass(slots=True)
class AnnouncedAhead:
    """The announcements of one topic that cover the next requests. Only :class:`Announcements` reads and changes them.

    Attributes:
        batches: number of consecutive batches that these producers wrote alone.
        seats: their seats, from 1, by the keys of their last requests.
        windows: what the table holds, or may hold, by the same keys, and the last request that it covers.
        is_stale: whether the announcements must be withdrawn before anything is written.
    """

    batches: int = 0
    seats: dict[bytes, int] = field(default_factory=dict)
    windows: dict[bytes, tuple[LastRequest, RememberedRequest]] = field(default_factory=dict)
    is_stale: bool = False

    def seat(self, key: bytes) -> int:
        """Return the seat of a producer; 0: it needs none, or has none."""
        return self.seats.get(key, 0) if len(self.seats) > 1 else 0


class Announcements:
    """Announces the requests of producers before their rows are written.

    One batch of a topic at a time calls these methods, in the order arrange, withdraw (if stale), announce,
    note_written.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def arrange(
        self, ahead: AnnouncedAhead, topic: TopicMetadata, entries: Sequence[PublishEntry], at: int, now_ms: int
    ) -> Sequence[PublishEntry]:
        """Return the entries in the order in which they are to be written, with seats; marks what is announced.

        Args:
            entries: all that is about to be written, of producers and of others.
            at: the first position that is free.
        """
        keys = [entry.admission.keys.request for entry in entries if entry.admission is not None]
        # Only producers may write beside an announcement. If rows may be deleted they would no longer tell the last
        # request after a crash, not even that a request is new. A producer that does nothing for IDLE_MS is forgotten.
        is_lasting = topic.ttl_seconds * 1000 >= IDLE_MS and not topic.consumed
        is_near = milliseconds(at) < now_ms + AHEAD_MS
        is_alone = len(keys) == len(entries) and not any(entry.ttl_ms for entry in entries)
        if not (is_lasting and is_near and is_alone):
            keys = []
        is_small = max([entry.rows for entry in entries]) <= SEATED_ROWS
        _note(ahead, keys, is_small=is_small)
        if not keys:
            return entries
        if len(keys) > 1 and is_small:
            entries = sorted(entries, key=lambda entry: ahead.seat(_key(entry)))
        if self._covers(ahead, entries, at):
            for entry in entries:
                announced, _ = ahead.windows[_key(entry)]
                entry.seat, entry.is_announced = announced.seat, True
        elif len(ahead.seats) > 1 and self._announces_ahead(ahead):
            for entry in entries:
                entry.seat = ahead.seat(_key(entry))
        return entries

    def withdraw(self, ahead: AnnouncedAhead, entries: Iterable[PublishEntry], at: int) -> None:
        """Announce only what may be written already, before others write from a position on. Durable on return.

        Args:
            entries: about to be written; they learn what the table holds now.

        Raises:
            StoreError: the store failed; nothing else may be written.
        """
        rows, last = self._requests.rows, self._requests.last
        found = {key: rows.get(key) for key in ahead.windows}
        changes: list[tuple[SideChange, LastRequest]] = []
        for key, (announced, window) in ahead.windows.items():
            raw = found[key]
            if raw is not None and at < announced.until and LastRequest.parse(raw).until:
                request = window.request._replace(until=0, seat=0)
                changes.append((SideChange(key, raw, request.pack()), request))
        if changes:
            # A row that is not changed was replaced by an announcement that covers its own request only.
            for change, request in compress(changes, rows.change([change for change, _ in changes])):
                last[change.key] = RememberedRequest(change.value, request)
                found[change.key] = change.value
        ahead.windows, ahead.is_stale = {}, False
        for entry in entries:
            if entry.admission is not None and (key := _key(entry)) in found:
                entry.admission = entry.admission._replace(previous=found[key])

    def announce(self, entries: Sequence[PublishEntry], ahead: AnnouncedAhead | None = None) -> Sequence[PublishEntry]:
        """Write down where the rows of producers will be, and their transactions. Durable on return.

        Then the producers' registrations are read again, because another server may lead the home of a producer. An
        instance that it registers from now on finds the announcement and aborts the transaction.

        Args:
            entries: with their positions.
            ahead: of the topic, for messages: the announcements may cover the next requests, too.

        Returns:
            The entries without those whose producer is fenced, which are refused.

        Raises:
            Unavailable: another process changed a producer meanwhile; nothing may be written.
            StoreError: the store failed.
        """
        requests = self._requests
        changes: list[tuple[str, SideChange]] = []
        for entry in entries:
            if entry.is_announced and ahead is not None:
                self._follow(ahead, entry)
            elif entry.admission is not None:
                changes.append((cast(Sent, entry.sent).name, self._change(ahead, entry, entry.admission)))
        if not changes:
            return entries
        requests.change(*changes)
        for entry in entries:
            if entry.admission is not None and not entry.is_announced:
                generation = cast(Sent, entry.sent).generation
                if error := requests.refusal_since(entry.admission, generation):
                    entry.drop(error)
        return remaining(entries)

    def note_written(self, entries: Iterable[PublishEntry]) -> None:
        """Note that the rows of entries exist, so that a repetition need not look for them."""
        for entry in entries:
            if entry.admission is not None and (last := self._requests.last.get(_key(entry))) is not None:
                last.is_written = True

    def _follow(self, ahead: AnnouncedAhead, entry: PublishEntry) -> None:
        """Note that an entry, which is announced already, is about to be written."""
        key = _key(entry)
        _, last = ahead.windows[key]
        last.request, last.is_written = _request(entry), False
        self._requests.last[key] = last

    def _change(self, ahead: AnnouncedAhead | None, entry: PublishEntry, admission: Admission) -> SideChange:
        """Return the change that announces an entry, and the next ones of its producer if that is possible."""
        key, request = admission.keys.request, _request(entry)
        announced = request
        if ahead is not None and self._announces_ahead(ahead):
            announced = request._replace(until=entry.first + position(AHEAD_MS), seat=ahead.seat(key))
        self._requests.last[key] = last = RememberedRequest(announced.pack(), request)
        if ahead is not None and announced.until:
            # Also if the write fails: the row may exist all the same.
            ahead.windows[key] = announced, last
        puts, deletes = self._requests.begin_change(admission, cast(Sent, entry.sent), entry.pointer)
        return SideChange(key, admission.previous, last.value, puts, deletes)

    def _announces_ahead(self, ahead: AnnouncedAhead) -> bool:
        """Return whether announcements cover the next requests: the same producers have been alone for long enough."""
        return ahead.batches > _ALONE and self._requests.announces_ahead

    def _covers(self, ahead: AnnouncedAhead, entries: Sequence[PublishEntry], at: int) -> bool:
        """Return whether earlier announcements cover all of some entries, from a position on."""
        if ahead.is_stale:
            return False
        for entry in entries:
            admission, sent = cast(Admission, entry.admission), cast(Sent, entry.sent)
            window = ahead.windows.get(admission.keys.request)
            # A repeated request is announced by itself.
            if window is None or admission.repeated is not None or admission.previous != window[1].value:
                return False
            # The transaction is written down with its first request.
            if entry.pointer is not None and not self._requests.has_begun(admission, entry.pointer):
                return False
            request = window[0].next(sent.generation, sent.sequence, at, entry.rows)
            if request is None:
                return False
            at = request.first + request.number
        return True


def _request(entry: PublishEntry) -> LastRequest:
    """Return an entry of a producer as the last request."""
    sent = cast(Sent, entry.sent)
    return LastRequest(sent.generation, sent.sequence, entry.first, entry.rows)


def _key(entry: PublishEntry) -> bytes:
    """Return the key of the last request of an entry's producer to the topic."""
    return cast(Admission, entry.admission).keys.request


def _note(ahead: AnnouncedAhead, keys: Sequence[bytes], *, is_small: bool) -> None:
    """Note that something is about to be written.

    Args:
        keys: of the last requests of its producers; none: others write, too, or the rows do not last.
        is_small: whether each request fits into a seat.
    """
    if not _shares(ahead, keys, is_small=is_small):
        ahead.batches, ahead.seats, ahead.is_stale = 0, {}, bool(ahead.windows)
    if _shares(ahead, keys, is_small=is_small):
        ahead.batches += 1
        for key in keys:
            ahead.seats.setdefault(key, len(ahead.seats) + 1)


def _shares(ahead: AnnouncedAhead, keys: Sequence[bytes], *, is_small: bool) -> bool:
    """Return whether a batch may be written beside the announcements: one producer is alone, or all have seats."""
    if len(ahead.seats) == 1:
        return list(keys) == list(ahead.seats)
    if not ahead.seats and len(keys) == 1:
        return True
    return bool(keys) and is_small and len(ahead.seats.keys() | keys) <= SEATS
