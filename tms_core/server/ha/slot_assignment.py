"""Which slots this server leads: those of its ordinal, and another server's while that one is not there.

Topics are divided among servers by slots, and each slot has a leader of its own. A topic's slot is the CRC-32 of its
name modulo the number of slots, so any server knows whom to ask, and all that is about one topic, messages, positions,
claims and producers, has one leader. With one slot one server leads everything. Requests about no single topic, such as
the list of topics, go to the leader of slot 0; any server could answer, since topics are not fenced.

Slot *s* belongs to the server with ordinal *s* mod *servers*. A server takes its own slots as soon as they are free.
Another server's it takes only when no server has held them for as long as a lease lasts, and hands them back once their
own server is there: a server that lacks one of its slots writes a new value into its row among the leases each second,
and the leader a slot of another one sees that. Handing back means to start nothing more, to finish running requests,
and to return the lease with a note on holders that may still have late writes; so no acknowledged message is lost or
there twice, and clients get 503 for a second or two.

All leases are rows of the side table: ``l`` where there is one slot, else ``l`` + number of slots + slot. The servers
of a store must agree on that number, or two would lead one topic. Therefore ``l`` is either a lease, or permanently
"*n* slots". Another number is written there by a server that has taken all leases of the former number, and a server
looks there between having taken a lease and leading by it.
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
from tms_core.server.ha.leadership import REACH_MS, Leadership
from tms_core.settings.models import LeaderSettings
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.side import SideTable

#: What keys of leases begin with.
_LEASES = b"l"
#: What follows in the key of a server that lacks a slot, behind the number of slots; above all slots.
_LACKING = b"\xff"
#: How long the word in ``l`` lasts, in seconds: longer than any server watches it.
_FOR_EVER = 2**31 - 1
_SAID = re.compile(r"(\d+) slots(, to be \d+ by .+)?")
_ROWS = 1000

logger = get_logger(__name__)
T = TypeVar("T")


class Slots:
    """Who leads each slot, as one server sees it."""

    def __init__(self, leaderships: Sequence[Leadership]) -> None:
        self.leaderships = tuple(leaderships)

    def number(self, key: bytes) -> int:
        """Return the slot of a key that starts with a topic's name (``namespace:topic:``); 0 for any other."""
        if len(self.leaderships) == 1:
            return 0
        prefix = topic_prefix(key)
        return 0 if prefix is None else slot_of(prefix, len(self.leaderships))

    def of(self, key: bytes) -> Leadership:
        """Return the leader of a key."""
        return self.leaderships[self.number(key)]

    def divided(self, items: Sequence[T], key: Callable[[T], bytes]) -> Iterator[list[T]]:
        """Yield the items of each slot, in the order they had."""
        parts: dict[int, list[T]] = {}
        for item in items:
            parts.setdefault(self.number(key(item)), []).append(item)
        yield from parts.values()

    @property
    def led(self) -> int:
        """Return how many slots this server leads."""
        return sum(leadership.leads for leadership in self.leaderships)


def slot_of(prefix: bytes, slots: int) -> int:
    """Return the slot of a topic.

    Args:
        prefix: the start of its keys, ``namespace:topic:``.
    """
    return crc32(prefix[:-1]) % slots


class SideCell:
    """A row of a side table as the cell of a lease."""

    def __init__(self, side: SideTable, row: bytes) -> None:
        self._side = side
        self.row = row

    def lease(self) -> bytes | None:
        return self._side.get(self.row)

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        return self._side.exchange(self.row, expected, value)


class SlotAssignment:
    """One server's share of the slots. One thread calls :meth:`look`; any thread may ask :attr:`slots`.

    Args:
        side: where the leases are; stays the caller's.
        holder: name of this server for operators; different for every process.
        ordinal: which of the servers this is, from 0; without meaning where there is one slot.

    Attributes:
        slots: the leader each slot.
    """

    def __init__(self, side: SideTable, holder: str, wanted: LeaderSettings, ordinal: int, clock: Clock) -> None:
        self._side = side
        self._ordinal, self._wanted, self._clock = ordinal, wanted, clock
        self._leases = [_lease(side, wanted.slots, slot, holder, wanted.seconds, clock) for slot in range(wanted.slots)]
        self.slots = Slots(
            [Leadership(lease, clock, fencing_delay_seconds=wanted.fencing_delay_seconds) for lease in self._leases]
        )
        self._agreement = Agreement(side, holder, wanted, clock)
        self._agreed = False
        self._failure = ""
        self._lacking: dict[int, bytes | None] = {}
        self._looks = 0

    def at(self, address: str) -> None:
        """The other servers reach this one there."""
        for lease in self._leases:
            lease.address = address

    def look(self, prepare: Callable[[int], bool]) -> None:
        """Look the leader each slot: renew leases or try to get them, start and finish terms, hand back.

        Args:
            prepare: called with a slot before a term of it starts; False: not yet.
        """
        try:
            self._agreed = self._agreed or self._agreement.reached()
            if self._agreed:
                self._look(prepare)
            self._failure = ""
        except StoreError as error:
            self._complain(error)

    def resign(self) -> None:
        """Return the slots of this server.

        Raises:
            StoreError: the store failed; other leases expire.
        """
        failure: StoreError | None = None
        for leadership in self.slots.leaderships:
            try:
                leadership.resign()
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure

    def _look(self, prepare: Callable[[int], bool]) -> None:
        slots = self.slots.leaderships
        if len(slots) == 1:
            slots[0].step(partial(prepare, 0))
            return
        try:
            start = _LEASES + bytes([len(slots)])
            rows = dict(self._side.rows(start, stop_key(start), _ROWS).items)
        except StoreError:
            # What is held may be renewed all the same.
            for slot, leadership in enumerate(slots):
                if leadership.holds:
                    leadership.step(partial(self._may_lead, prepare, slot))
            raise
        back = {ordinal for ordinal in range(self._wanted.servers) if self._is_back(ordinal, rows)}
        for slot, leadership in enumerate(slots):
            owner = slot % self._wanted.servers
            if owner != self._ordinal and owner in back and leadership.holds:
                leadership.hand_back()
            leadership.step(
                partial(self._may_lead, prepare, slot),
                patient=owner != self._ordinal,
                read=partial(rows.get, _row(len(slots), slot)),
            )
        self._say_what_is_lacking()

    def _may_lead(self, prepare: Callable[[int], bool], slot: int) -> bool:
        """Return whether a term of a slot may start: its lease is held, and the number of slots is still this one."""
        try:
            agreed = self._agreement.holds()
        except StoreError as error:
            self._complain(error)
            return False
        return agreed and prepare(slot)

    def _is_back(self, ordinal: int, rows: dict[bytes, bytes]) -> bool:
        """Return whether a server has said since the last look that it lacks one of its slots."""
        said = rows.get(_row(self._wanted.slots, ordinal, lacking=True))
        former = self._lacking.get(ordinal, said)
        self._lacking[ordinal] = said
        return said != former

    def _say_what_is_lacking(self) -> None:
        own = self.slots.leaderships[self._ordinal :: self._wanted.servers]
        if self._ordinal < self._wanted.servers and not all(leadership.holds for leadership in own):
            self._looks += 1
            value = b"%d %d" % (self._clock.now_ms(), self._looks)
            self._side.put([(_row(self._wanted.slots, self._ordinal, lacking=True), value)])

    def _complain(self, error: StoreError) -> None:
        if self._failure != error.message:
            logger.warning("which server leads cannot be found out: %s", error)
        self._failure = error.message


class Agreement:
    """On how many slots there are."""

    def __init__(self, side: SideTable, holder: str, wanted: LeaderSettings, clock: Clock) -> None:
        self._side = side
        self._holder, self._wanted, self._clock = holder, wanted, clock
        self._cell = SideCell(side, _LEASES)
        self._former: dict[int, Lease] = {}
        self._told = ""

    def holds(self) -> bool:
        """Return whether the number of slots is the one that was configured, as of now."""
        slots, changes = _said(self._cell.lease())
        return (slots, changes) == (self._wanted.slots, False)

    def reached(self) -> bool:
        """Return whether all servers have this number of slots from now on; False: ask again in a moment.

        Raises:
            StoreError: the store failed.
        """
        value = self._cell.lease()
        slots, changes = _said(value)
        if (slots, changes) == (self._wanted.slots, False):
            return True
        if reason := self._hindrance(slots):
            self._say(f"{self._wanted.slots} slots are not in force yet: {reason}")
            return False
        try:
            done = (
                self._former[0].leave(f"{self._wanted.slots} slots", _FOR_EVER)
                if slots == 1
                else self._write(value, slots)
            )
        except LeaseLost:
            return False
        if done:
            logger.info("the servers of this store share %d slots from now on", self._wanted.slots)
        for lease in self._former.values():
            lease.release()
        self._former.clear()
        return done

    def _hindrance(self, slots: int) -> str | None:
        """Take all leases of another number of slots; returns why that cannot be, or None."""
        if len(self._former) != slots:
            self._former = {
                slot: _lease(self._side, slots, slot, self._holder, self._wanted.seconds, self._clock)
                for slot in range(slots)
            }
        reasons = [reason for lease in self._former.values() if (reason := self._kept_by(lease, slots))]
        return reasons[0] if reasons else None

    def _kept_by(self, lease: Lease, slots: int) -> str | None:
        try:
            if lease.held:
                lease.renew_if_due()
            else:
                lease.acquire()
        except (LeaseHeld, LeaseLost):
            return (
                f"servers whose server.leader.slots is {slots} still run. The new servers wait until those have ended."
            )
        seen = lease.seen
        left = None if seen is None else seen if seen.holder else seen.former
        if left is None or left.renewed_ms + REACH_MS <= self._clock.now_ms():
            return None
        return (
            f"{left.holder} did not end in an orderly way, or a write of it had failed, so HBase may still be writing. "
            f"The new servers wait {REACH_MS // 60_000} minutes."
        )

    def _write(self, value: bytes | None, slots: int) -> bool:
        """Put the new number in the place of a former one, while all leases of that are held."""
        record = LeaseRecord.parse(value)
        if record is None:
            return False
        # Who takes a lease of the former number from here on sees that it must not lead by it.
        change = _record(record, f"{slots} slots, to be {self._wanted.slots} by {self._holder}")
        if not self._cell.swap_lease(value, change):
            return False
        for lease in self._former.values():
            lease.confirm()
        holder = "" if self._wanted.slots == 1 else f"{self._wanted.slots} slots"
        return self._cell.swap_lease(change, _record(record, holder))

    def _say(self, sentence: str) -> None:
        if self._told != sentence:
            logger.warning("%s", sentence)
        self._told = sentence


def _row(slots: int, number: int, *, lacking: bool = False) -> bytes:
    """Return the key of a slot's lease; or of the server with that ordinal, where it says what it is lacking."""
    if lacking:
        return _LEASES + bytes([slots]) + _LACKING + number.to_bytes(2, "big")
    return _LEASES if slots == 1 else _LEASES + bytes([slots, number])


def _lease(side: SideTable, slots: int, slot: int, holder: str, seconds: int, clock: Clock) -> Lease:
    return Lease(SideCell(side, _row(slots, slot)), holder, seconds, clock, wall_clocks=False)


def _said(value: bytes | None) -> tuple[int, bool]:
    """Return how many slots there are, and whether that is being changed."""
    record = LeaseRecord.parse(value)
    said = None if record is None else _SAID.fullmatch(record.holder)
    return (1, False) if said is None else (int(said[1]), said[2] is not None)


def _record(former: LeaseRecord, holder: str) -> bytes:
    return LeaseRecord(holder, former.fence + 1, 0, former.renewed_ms, _FOR_EVER).pack()
