"""The assignment of slots to servers: each server leads its own slots, and slots of servers that are absent.

Each slot has a separate leader. The slot of a topic is the CRC-32 of its name modulo the number of slots, so any server
can compute it. All data of a topic (messages, positions, claims, producers) belongs to its slot. With one slot, one
server leads all topics. Requests without a topic, such as the list of topics, go to the leader of slot 0.

Slot *s* belongs to the server with ordinal *s* mod *servers*. A server acquires its own slots as soon as they are free.
It acquires a slot of another server only if the slot has been free for the duration of a lease, and hands it back when
the owner is present. A server that lacks one of its slots writes a new value into its row among the leases each second,
which the current leader of the slot reads. To hand a slot back, a leader rejects new requests, finishes running
requests, and releases the lease with a note about servers that may have late writes. Therefore no acknowledged message
is lost or duplicated, and clients get 503 for one or two seconds.

All leases are rows of the side table: ``l`` with one slot, otherwise ``l`` + number of slots + slot. If servers used
different numbers of slots, two servers could lead one topic. Therefore ``l`` is either a lease, or permanently
"*n* slots". A server changes the number only while it holds all leases of the old number, and every server reads ``l``
between acquiring a lease and leading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar
from zlib import crc32

from tms_core.clock import Clock
from tms_core.errors import LeaseHeld, LeaseLost, StoreError
from tms_core.logs.loggers import get_logger
from tms_core.rowkey import stop_key, topic_prefix
from tms_core.server.ha.leadership import REACH_MS, Leadership, log_failure
from tms_core.settings.models import LeaderSettings
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.side import SideTable

#: The first key byte of leases.
_LEASES = b"l"
#: The key byte in place of the slot, for the row of a server that lacks one of its slots.
_LACKING = b"\xff"
#: The duration of the record in ``l`` in seconds: it never expires.
_UNLIMITED_SECONDS = 2**31 - 1
_SLOTS_VALUE = re.compile(r"(\d+) slots(, to be \d+ by .+)?")
_ROWS = 1000

logger = get_logger(__name__)
T = TypeVar("T")


class Slots:
    """The leadership of each slot, as one server sees it."""

    def __init__(self, leaderships: Sequence[Leadership]) -> None:
        self.leaderships = tuple(leaderships)

    def number(self, key: bytes) -> int:
        """Return the slot of a key that starts with a topic (``namespace:topic:``); 0 for any other key."""
        if len(self.leaderships) == 1:
            return 0
        prefix = topic_prefix(key)
        return 0 if prefix is None else slot_of(prefix, len(self.leaderships))

    def of(self, key: bytes) -> Leadership:
        """Return the leadership of a key's slot."""
        return self.leaderships[self.number(key)]

    def group_by_slot(self, items: Sequence[T], key: Callable[[T], bytes]) -> Iterator[list[T]]:
        """Yield the items of each slot, in their order."""
        parts: dict[int, list[T]] = {}
        for item in items:
            parts.setdefault(self.number(key(item)), []).append(item)
        yield from parts.values()

    @property
    def led(self) -> int:
        """Return the number of slots that this server leads."""
        return sum(leadership.leads for leadership in self.leaderships)


def slot_of(prefix: bytes, slots: int) -> int:
    """Return the slot of a topic.

    Args:
        prefix: the key prefix of the topic, ``namespace:topic:``.
    """
    return crc32(prefix[:-1]) % slots


class SideCell:
    """The cell of a lease in a row of a side table."""

    def __init__(self, side: SideTable, row: bytes) -> None:
        self._side = side
        self.row = row

    def lease(self) -> bytes | None:
        return self._side.get(self.row)

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        return self._side.exchange(self.row, expected, value)


class SlotAssignment:
    """The slots of one server. One thread calls :meth:`check_leases`; any thread may read :attr:`slots`.

    Args:
        side: the table of the leases; the caller closes it.
        holder: the name of this process for operators; unique.
        ordinal: the ordinal of this server, from 0; unused with one slot.

    Attributes:
        slots: the leadership of each slot.
    """

    def __init__(self, side: SideTable, holder: str, settings: LeaderSettings, ordinal: int, clock: Clock) -> None:
        self._side = side
        self._ordinal, self._settings, self._clock = ordinal, settings, clock
        self._leases = [
            _lease(side, settings.slots, slot, holder, settings.seconds, clock) for slot in range(settings.slots)
        ]
        self.slots = Slots(
            [Leadership(lease, clock, fencing_delay_seconds=settings.fencing_delay_seconds) for lease in self._leases]
        )
        self._agreement = SlotAgreement(side, holder, settings, clock)
        self._agreed = False
        self._failure = ""
        self._lacking: dict[int, bytes | None] = {}
        self._reports = 0

    def set_address(self, address: str) -> None:
        """Set the address of this server for other servers."""
        for lease in self._leases:
            lease.address = address

    def check_leases(self, prepare: Callable[[int], bool]) -> None:
        """Renew leases or try to acquire them, start and stop terms, and hand slots back.

        Args:
            prepare: called with a slot before its term starts; returns False if the term cannot start yet.
        """
        try:
            self._agreed = self._agreed or self._agreement.try_change()
            if self._agreed:
                self._check_slots(prepare)
            self._failure = ""
        except StoreError as error:
            self._failure = log_failure(error, self._failure)

    def resign(self) -> None:
        """Release the slots of this server.

        Raises:
            StoreError: the store failed; unreleased leases expire.
        """
        failure: StoreError | None = None
        for leadership in self.slots.leaderships:
            try:
                leadership.resign()
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure

    def _check_slots(self, prepare: Callable[[int], bool]) -> None:
        slots = self.slots.leaderships
        if len(slots) == 1:
            slots[0].step(partial(prepare, 0))
            return
        try:
            start = _LEASES + bytes([len(slots)])
            rows = dict(self._side.rows(start, stop_key(start), _ROWS).items)
        except StoreError:
            # The scan failed, but single rows may be available: renew the leases that this server holds.
            for slot, leadership in enumerate(slots):
                if leadership.holds:
                    leadership.step(partial(self._may_lead, prepare, slot))
            raise
        back = {ordinal for ordinal in range(self._settings.servers) if self._is_back(ordinal, rows)}
        for slot, leadership in enumerate(slots):
            owner = slot % self._settings.servers
            if owner != self._ordinal and owner in back and leadership.holds:
                leadership.hand_back()
            leadership.step(
                partial(self._may_lead, prepare, slot),
                patient=owner != self._ordinal,
                read=partial(rows.get, _row(len(slots), slot)),
            )
        self._report_lacking()

    def _may_lead(self, prepare: Callable[[int], bool], slot: int) -> bool:
        """Return whether a term of a slot may start: the number of slots is unchanged, and ``prepare`` succeeds."""
        # Check after the lease was acquired: a server that changes the number holds all leases of the old number. So
        # this server either sees the change, or has acquired the lease before the change and blocks it.
        try:
            agreed = self._agreement.is_in_force()
        except StoreError as error:
            self._failure = log_failure(error, self._failure)
            return False
        return agreed and prepare(slot)

    def _is_back(self, ordinal: int, rows: dict[bytes, bytes]) -> bool:
        """Return whether a server has reported since the last check that it lacks one of its slots."""
        report = rows.get(_row(self._settings.slots, ordinal, lacking=True))
        previous = self._lacking.get(ordinal, report)
        self._lacking[ordinal] = report
        return report != previous

    def _report_lacking(self) -> None:
        own = self.slots.leaderships[self._ordinal :: self._settings.servers]
        if self._ordinal < self._settings.servers and not all(leadership.holds for leadership in own):
            self._reports += 1
            value = b"%d %d" % (self._clock.now_ms(), self._reports)
            self._side.put([(_row(self._settings.slots, self._ordinal, lacking=True), value)])


class SlotAgreement:
    """The agreement of all servers of a store on the number of slots."""

    def __init__(self, side: SideTable, holder: str, settings: LeaderSettings, clock: Clock) -> None:
        self._side = side
        self._holder, self._settings, self._clock = holder, settings, clock
        self._cell = SideCell(side, _LEASES)
        self._previous_leases: dict[int, Lease] = {}
        self._report = ""

    def is_in_force(self) -> bool:
        """Return whether the stored number of slots is the configured number."""
        slots, changes = _parse_slots(self._cell.lease())
        return (slots, changes) == (self._settings.slots, False)

    def try_change(self) -> bool:
        """Return whether all servers use the configured number of slots from now on; False: call again later.

        Raises:
            StoreError: the store failed.
        """
        value = self._cell.lease()
        slots, changes = _parse_slots(value)
        if (slots, changes) == (self._settings.slots, False):
            return True
        if reason := self._acquire_leases(slots):
            self._warn_once(f"{self._settings.slots} slots are not in force yet: {reason}")
            return False
        try:
            done = (
                self._previous_leases[0].leave(f"{self._settings.slots} slots", _UNLIMITED_SECONDS)
                if slots == 1
                else self._write(value, slots)
            )
        except LeaseLost:
            return False
        if done:
            logger.info("the number of slots changed from %d to %d", slots, self._settings.slots)
        for lease in self._previous_leases.values():
            lease.release()
        self._previous_leases.clear()
        return done

    def _acquire_leases(self, slots: int) -> str | None:
        """Acquire all leases of the old number of slots; return the reason if that is not possible yet, else None."""
        if len(self._previous_leases) != slots:
            self._previous_leases = {
                slot: _lease(self._side, slots, slot, self._holder, self._settings.seconds, self._clock)
                for slot in range(slots)
            }
        reasons = [reason for lease in self._previous_leases.values() if (reason := self._acquire_lease(lease, slots))]
        return reasons[0] if reasons else None

    def _acquire_lease(self, lease: Lease, slots: int) -> str | None:
        """Acquire or renew a lease of the old number; return the reason if writes are still possible, else None."""
        try:
            if lease.held:
                lease.renew_if_due()
            else:
                lease.acquire()
        except (LeaseHeld, LeaseLost):
            return f"servers with server.leader.slots: {slots} are still running. The new servers wait until they stop."
        seen = lease.seen
        # The previous holder, or the holder noted at its release, may have late writes for an hour.
        record = None if seen is None else seen if seen.holder else seen.previous
        if record is None or record.renewed_ms + REACH_MS <= self._clock.now_ms():
            return None
        return (
            f"{record.holder} did not shut down cleanly, or one of its writes failed, so HBase may still execute a "
            f"write. The new servers wait {REACH_MS // 60_000} minutes."
        )

    def _write(self, value: bytes | None, slots: int) -> bool:
        """Replace the stored number of slots while this server holds all leases of the old number."""
        record = LeaseRecord.parse(value)
        if record is None:
            return False
        # Announce the change first: a server that acquires a lease of the old number from here on does not lead. Then
        # confirm all leases: the new holder of a lost lease may not have seen the announcement.
        change = _record(record, f"{slots} slots, to be {self._settings.slots} by {self._holder}")
        if not self._cell.swap_lease(value, change):
            return False
        for lease in self._previous_leases.values():
            lease.confirm()
        holder = "" if self._settings.slots == 1 else f"{self._settings.slots} slots"
        return self._cell.swap_lease(change, _record(record, holder))

    def _warn_once(self, sentence: str) -> None:
        if self._report != sentence:
            logger.warning("%s", sentence)
        self._report = sentence


def _row(slots: int, number: int, *, lacking: bool = False) -> bytes:
    """Return the key of a slot's lease; with ``lacking``, the key of a server's report that it lacks a slot."""
    if lacking:
        return _LEASES + bytes([slots]) + _LACKING + number.to_bytes(2, "big")
    return _LEASES if slots == 1 else _LEASES + bytes([slots, number])


def _lease(side: SideTable, slots: int, slot: int, holder: str, seconds: int, clock: Clock) -> Lease:
    return Lease(SideCell(side, _row(slots, slot)), holder, seconds, clock, wall_clocks=False)


def _parse_slots(value: bytes | None) -> tuple[int, bool]:
    """Return the stored number of slots, and whether a change is in progress."""
    record = LeaseRecord.parse(value)
    match = None if record is None else _SLOTS_VALUE.fullmatch(record.holder)
    return (1, False) if match is None else (int(match[1]), match[2] is not None)


def _record(previous: LeaseRecord, holder: str) -> bytes:
    return LeaseRecord(holder, previous.fence + 1, 0, previous.renewed_ms, _UNLIMITED_SECONDS).pack()
