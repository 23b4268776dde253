"""One holder at a time, with a number that only grows (rule S12).

A lease lives in one small cell that can be compared and set: in the janitor's state, in a table of the store it cleans.
The process that writes the cell holds the lease; every holder gets a higher *fence* than the one before, so that late
writes of a former holder can be recognized. A holder that lost the lease cannot be stopped from outside, so it checks
before every batch: at most the one batch whose call had started can follow the loss, of several threads one of each.

Time is measured by each side's own running clock: a holder renews when a third of ``seconds`` is over, and a challenger
waits until it has watched the same record for all of it. Wall clocks are only believed when they say that the lease is
over by far, which saves the wait after a crash; not at all where a holder relies on :attr:`Lease.left_ms` instead of
checking. A holder that slept longer still holds it if no other process took it meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from threading import RLock
from typing import NoReturn, Protocol

from tms_core.clock import Clock
from tms_core.errors import LeaseHeld, LeaseLost

#: How far two wall clocks may disagree, in milliseconds, where a lease is taken over by what they say.
WALL_ALLOWANCE_MS = 300_000


class LeaseCell(Protocol):
    """Where a lease is kept."""

    def lease(self) -> bytes | None:
        """Return the cell's value; None when it was never written."""
        ...

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write ``value`` if ``expected`` is still there; returns whether it was."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as it is kept, in JSON.

    Attributes:
        holder: name of the holder for operators; empty after it was returned.
        fence: one more than that of the holder before.
        beat: how often it was renewed.
        renewed_ms: when that last was, by the holder's wall clock.
        seconds: how long it lasts without being renewed.
        address: where its holder is reached; empty where that is not needed, and then not kept.
        former: of one that was given back, a holder before that may still have writes under way; None: there is none.
        store: identity of the store that only its holder can have open; empty where several processes can.
    """

    holder: str
    fence: int
    beat: int
    renewed_ms: int
    seconds: int
    address: str = ""
    former: LeaseRecord | None = None
    store: str = ""

    @classmethod
    def parse(cls, value: bytes | None) -> LeaseRecord | None:
        """Read a cell; None where it is empty or cannot be read, so that the lease is free."""
        try:
            fields = json.loads(value or b"null")
            former = fields.pop("former", None)
            return cls(**fields, former=None if former is None else cls(**former))
        except (ValueError, TypeError, AttributeError):
            return None

    def is_renewed(self, now_ms: int) -> bool:
        """Return whether a living process has the lease: one that goes on renewing it.

        Two machines' clocks differ a little; a renewal far ahead was dated by a clock that was wrong.
        """
        return bool(self.holder) and -WALL_ALLOWANCE_MS <= now_ms - self.renewed_ms <= self.seconds * 1000

    def pack(self) -> bytes:
        optional = ("address", "former", "store")
        fields = {name: value for name, value in asdict(self).items() if value or name not in optional}
        if self.former is not None:
            fields["former"] = json.loads(replace(self.former, former=None).pack())
        return json.dumps(fields, sort_keys=True).encode()


class Lease:
    """One candidate's side of a lease; threads may share it.

    Args:
        cell: where it is kept.
        holder: name of this holder for operators; different for every process.
        seconds: how long it lasts without being renewed.
        clock: whose running time counts.
        wall_clocks: whether a lease that is over by far by wall clocks is taken without having been watched.
        store: identity of the store that this process has open, and no other can; another holder that had it open is
            dead. Empty: several processes can have it open.

    Attributes:
        fence: this holder's number; 0 while it does not hold the lease.
        address: where this holder is reached, for the processes that do not get the lease.
        seen: what was there when it was last asked for: of a lease that is held, the record of the holder before.
    """

    def __init__(
        self,
        cell: LeaseCell,
        holder: str,
        seconds: int,
        clock: Clock,
        *,
        wall_clocks: bool = True,
        store: str = "",
    ) -> None:
        self._cell = cell
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._wall_clocks = wall_clocks
        self._store = store
        self.address = ""
        self.seen: LeaseRecord | None = None
        self._mine: bytes | None = None
        self._renewed_at_ms = 0
        self._watched: tuple[bytes | None, int] | None = None
        self._lock = RLock()
        self.fence = 0

    @property
    def held(self) -> bool:
        """Return whether it was held when last checked."""
        return self._mine is not None

    @property
    def own(self) -> LeaseRecord | None:
        """The last record of this holder; None: it does not hold it."""
        return LeaseRecord.parse(self._mine)

    @property
    def left_ms(self) -> int:
        """For how long no other process can get it, by this machine's running time; 0 or less: another may have it.

        Takes no lock and reads no cell. Only true where all candidates have ``wall_clocks`` off.
        """
        if self._mine is None:
            return 0
        return self._renewed_at_ms + self._seconds * 1000 - self._clock.running_ms()

    def acquire(
        self, *, sole: bool = False, patient: bool = False, read: Callable[[], bytes | None] | None = None
    ) -> None:
        """Take the lease.

        Args:
            sole: the caller knows by other means, such as LevelDB's own lock, that no other holder can be alive.
            patient: a free one is taken only after it was watched for its time, because others come first.
            read: the cell as it was a moment ago, where all cells are read at once; None: it is read.

        Raises:
            LeaseHeld: another process has it; says which, and for how long at most.
        """
        with self._lock:
            present = self._cell.lease() if read is None else read()
            self.seen = record = LeaseRecord.parse(present)
            # A record in its own name is one whose writing was not answered.
            is_others = record is not None and record.holder not in ("", self._holder)
            if patient and not is_others and not self._is_over(present, record):
                raise LeaseHeld("The lease is free, and another process comes first.", "Wait.")
            is_dead = sole or (record is not None and bool(self._store) and record.store == self._store)
            if record is not None and is_others and not is_dead and not self._is_over(present, record):
                raise LeaseHeld(
                    f"{record.holder} has the lease, renewed for the last time {self._age(record)}.",
                    f"Stop that process, or wait: when it has died, a process that waits gets the lease after "
                    f"{record.seconds} s, and one that starts anew {WALL_ALLOWANCE_MS // 1000} s later.",
                )
            fence = record.fence + 1 if record else 1
            now_ms = self._clock.now_ms()
            taken = LeaseRecord(self._holder, fence, 0, now_ms, self._seconds, self.address, store=self._store)
            started_ms = self._clock.running_ms()
            if not self._cell.swap_lease(present, taken.pack()):
                raise LeaseHeld("Another process took the lease at this moment.", "Try again.")
            self._mine, self._renewed_at_ms, self.fence = taken.pack(), started_ms, fence

    def renew(self) -> None:
        """Hold it for another while.

        Raises:
            LeaseLost: another process has taken it.
        """
        with self._lock:
            started_ms = self._clock.running_ms()
            if not self._beat():
                # An earlier renewal may have been done and not answered.
                self._adopt(self._cell.lease())
                if not self._beat():
                    self._lose(LeaseRecord.parse(self._cell.lease()))
            self._renewed_at_ms = started_ms

    def renew_if_due(self) -> None:
        """Renew it when a third of its time is over; cheap otherwise.

        Raises:
            LeaseLost: another process has taken it.
        """
        with self._lock:
            if self._clock.running_ms() - self._renewed_at_ms >= self._seconds * 1000 // 3:
                self.renew()

    def check(self) -> None:
        """Check that it is still held; called before every batch.

        Raises:
            LeaseLost: another process has taken it.
        """
        with self._lock:
            if self._mine is None:
                raise _lost(self.seen)
            self._adopt(self._cell.lease())
            self.renew_if_due()

    def confirm(self) -> None:
        """Check that it is still held, beside the thread that renews it; earlier work happened under it.

        Raises:
            LeaseLost: another process has taken it.
        """
        fence = self.fence
        record = LeaseRecord.parse(self._cell.lease())
        if not self._is_own(record, fence):
            if fence == self.fence:
                self._mine, self.fence, self.seen = None, 0, record
            raise _lost(record)

    def release(self, former: LeaseRecord | None = None) -> None:
        """Give it back; without effect when it is not held any more.

        Args:
            former: the next holder has to reckon with what this one may still have under way.
        """
        self.leave("", self._seconds, former)

    def leave(self, holder: str, seconds: int, former: LeaseRecord | None = None) -> bool:
        """Have another holder's name in it from now on; returns whether it was held until then."""
        with self._lock:
            mine = self.own
            if mine is None:
                return False
            left = replace(mine, holder=holder, seconds=seconds, former=former)
            # From here on another process can get it, and the answer to this may come late or never.
            self._renewed_at_ms = self._clock.running_ms() - self._seconds * 1000
            done = self._cell.swap_lease(self._mine, left.pack())
            self._mine, self.fence, self.seen = None, 0, left
            return done

    def _beat(self) -> bool:
        """Write the next record behind the one that was last seen; returns whether that was still there."""
        present, mine = self._mine, self.own
        if mine is None:
            raise _lost(self.seen)
        renewed = replace(mine, beat=mine.beat + 1, renewed_ms=self._clock.now_ms()).pack()
        if not self._cell.swap_lease(present, renewed):
            return False
        self._mine = renewed
        return True

    def _adopt(self, present: bytes | None) -> None:
        """Go on from what is there, if it is this holder's own."""
        record = LeaseRecord.parse(present)
        if not self._is_own(record, self.fence):
            self._lose(record)
        self._mine = present

    def _is_own(self, record: LeaseRecord | None, fence: int) -> bool:
        """Return whether only this holder can have written a record: another one, of the same name too, has another
        fence.
        """
        return record is not None and fence > 0 and (record.holder, record.fence) == (self._holder, fence)

    def _is_over(self, present: bytes | None, record: LeaseRecord | None) -> bool:
        """Return whether its holder has let it expire, or there has been none for as long."""
        time_ms = (self._seconds if record is None else record.seconds) * 1000
        if record and self._wall_clocks and self._clock.now_ms() - record.renewed_ms > time_ms + WALL_ALLOWANCE_MS:
            return True
        now_ms = self._clock.running_ms()
        if self._watched is None or self._watched[0] != present:
            self._watched = (present, now_ms)
        return now_ms - self._watched[1] > time_ms

    def _age(self, record: LeaseRecord) -> str:
        return f"{max(0, self._clock.now_ms() - record.renewed_ms) // 1000} s ago"

    def _lose(self, record: LeaseRecord | None) -> NoReturn:
        self._mine, self.fence, self.seen = None, 0, record
        raise _lost(record)


def _lost(record: LeaseRecord | None) -> LeaseLost:
    holder = f"{record.holder} has it now" if record and record.holder else "no process has it now"
    return LeaseLost(f"the lease was lost, {holder}; the run ends here, the next holder goes on from there.")
