"""A lease: one holder at a time, with a fence that only grows (invariant S12).

A lease is a cell with compare-and-set: in the janitor's state, or in a table of the store. The process that writes the
cell holds the lease. Every holder gets a higher *fence* than the previous holder, so that late writes of a former
holder can be recognized. A process that has lost the lease cannot be stopped from outside. Therefore it checks the
lease before every batch: at most one started batch per thread can follow the loss.

Each process measures time by its monotonic clock. A holder renews the lease after a third of ``seconds``. A challenger
waits until it has seen the same record for ``seconds``. Wall clocks count only if they show that the lease expired long
ago, which saves the wait after a crash. They never count if a holder relies on :attr:`Lease.remaining_ms` instead of
checks. A holder that slept longer still holds the lease if no other process has acquired it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from threading import RLock
from typing import NoReturn, Protocol

from tms_core.clock import Clock
from tms_core.errors import LeaseHeld, LeaseLost

#: The largest difference between two wall clocks, in milliseconds, for a takeover by wall time.
WALL_ALLOWANCE_MS = 300_000


class LeaseCell(Protocol):
    """The cell of a lease."""

    def lease(self) -> bytes | None:
        """Return the value of the cell; None if it was never written."""
        ...

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write ``value`` if the cell has ``expected``; return whether it was written."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The record in the cell of a lease, in JSON.

    Attributes:
        holder: the name of the holder, for operators; empty after a release.
        fence: one more than the fence of the previous holder.
        beat: the number of renewals.
        renewed_ms: the time of the last renewal, by the holder's wall clock.
        seconds: the duration of the lease without a renewal.
        address: the address of the holder; empty: unused, and not stored.
        previous: in a released lease, an earlier holder whose writes may still arrive; None: no such holder.
        store: the identity of a store that only one process can open; empty: several processes can open it.
    """

    holder: str
    fence: int
    beat: int
    renewed_ms: int
    seconds: int
    address: str = ""
    previous: LeaseRecord | None = None
    store: str = ""

    @classmethod
    def parse(cls, value: bytes | None) -> LeaseRecord | None:
        """Parse a cell; None if it is empty or damaged, so that the lease is free."""
        try:
            fields = json.loads(value or b"null")
            previous = fields.pop("former", None)
            return cls(**fields, previous=None if previous is None else cls(**previous))
        except (ValueError, TypeError, AttributeError):
            return None

    def is_renewed(self, now_ms: int) -> bool:
        """Return whether a live process holds the lease, by the time of the last renewal.

        The allowance covers the difference between two clocks. A renewal further in the future has a wrong clock.
        """
        return bool(self.holder) and -WALL_ALLOWANCE_MS <= now_ms - self.renewed_ms <= self.seconds * 1000

    def pack(self) -> bytes:
        optional = ("address", "store")
        fields = {name: value for name, value in asdict(self).items() if value or name not in optional}
        # The stored field has another name: `former`.
        del fields["previous"]
        if self.previous is not None:
            fields["former"] = json.loads(replace(self.previous, previous=None).pack())
        return json.dumps(fields, sort_keys=True).encode()


class Lease:
    """One candidate's side of a lease; threads may share it.

    Args:
        cell: the cell of the lease.
        holder: the name of this candidate, for operators; different for every process.
        seconds: the duration of the lease without a renewal.
        clock: measures the duration by monotonic time.
        wall_clocks: whether to acquire a lease that expired long ago by wall time without waiting.
        store: the identity of the store that only this process has open, so that another holder with this identity is
            dead. Empty: several processes can open the store.

    Attributes:
        fence: the fence of this holder; 0: it does not hold the lease.
        address: the address of this holder, for other candidates.
        seen: the record at the last attempt to acquire the lease; for a holder, the previous holder's record.
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
        self._own_value: bytes | None = None
        self._renewed_at_ms = 0
        self._watched: tuple[bytes | None, int] | None = None
        self._lock = RLock()
        self.fence = 0

    @property
    def held(self) -> bool:
        """Return whether the lease was held at the last check."""
        return self._own_value is not None

    @property
    def own(self) -> LeaseRecord | None:
        """Return the last record of this holder; None if it does not hold the lease."""
        return LeaseRecord.parse(self._own_value)

    @property
    def remaining_ms(self) -> int:
        """Return the time in which no other process can acquire the lease, in milliseconds of monotonic time.

        0 or less: another process may hold it. The property takes no lock and reads no cell. The result is valid only
        if all candidates have ``wall_clocks`` off.
        """
        if self._own_value is None:
            return 0
        return self._renewed_at_ms + self._seconds * 1000 - self._clock.monotonic_ms()

    def acquire(
        self, *, sole: bool = False, patient: bool = False, read: Callable[[], bytes | None] | None = None
    ) -> None:
        """Acquire the lease.

        Args:
            sole: whether no other holder is alive, as the caller knows by other means, such as LevelDB's lock.
            patient: whether to acquire a free lease only after its duration, because other candidates have precedence.
            read: returns the value of the cell, if the caller has just read all cells at once; None: read the cell.

        Raises:
            LeaseHeld: another process holds the lease.
        """
        with self._lock:
            present = self._cell.lease() if read is None else read()
            self.seen = record = LeaseRecord.parse(present)
            # A record with this holder's name is from an earlier attempt whose response was lost.
            is_others = record is not None and record.holder not in ("", self._holder)
            if patient and not is_others and not self._has_expired(present, record):
                raise LeaseHeld("The lease is free, but another process has precedence.", "Wait.")
            is_dead = sole or (record is not None and bool(self._store) and record.store == self._store)
            if record is not None and is_others and not is_dead and not self._has_expired(present, record):
                raise LeaseHeld(
                    f"{record.holder} has the lease, last renewed {self._age(record)}.",
                    f"Stop that process, or wait: if it is dead, a waiting process gets the lease after "
                    f"{record.seconds} s, and a new process {WALL_ALLOWANCE_MS // 1000} s later.",
                )
            fence = record.fence + 1 if record else 1
            now_ms = self._clock.now_ms()
            own_record = LeaseRecord(self._holder, fence, 0, now_ms, self._seconds, self.address, store=self._store)
            # The time before the write: a challenger may see the record at any time after it, so a later time would
            # overstate `remaining_ms`.
            started_ms = self._clock.monotonic_ms()
            if not self._cell.swap_lease(present, own_record.pack()):
                raise LeaseHeld("Another process acquired the lease at the same time.", "Try again.")
            self._own_value, self._renewed_at_ms, self.fence = own_record.pack(), started_ms, fence

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLost: another process has acquired it.
        """
        with self._lock:
            started_ms = self._clock.monotonic_ms()
            if not self._write_renewal():
                # The response to an earlier renewal may have been lost; then the cell has this holder's own record.
                self._adopt(self._cell.lease())
                if not self._write_renewal():
                    self._lose(LeaseRecord.parse(self._cell.lease()))
            self._renewed_at_ms = started_ms

    def renew_if_due(self) -> None:
        """Renew the lease after a third of its duration; do nothing before that.

        Raises:
            LeaseLost: another process has acquired it.
        """
        with self._lock:
            if self._clock.monotonic_ms() - self._renewed_at_ms >= self._seconds * 1000 // 3:
                self.renew()

    def check(self) -> None:
        """Check that the lease is still held; call it before every batch (invariant S12).

        Raises:
            LeaseLost: another process has acquired it.
        """
        with self._lock:
            # S12: read the cell, because another process may have acquired the lease while this process slept.
            if self._own_value is None:
                raise _lease_lost(self.seen)
            self._adopt(self._cell.lease())
            self.renew_if_due()

    def confirm(self) -> None:
        """Check that the lease is still held, so that earlier work was covered by it; any thread may call it.

        Raises:
            LeaseLost: another process has acquired it.
        """
        # Without the lock, so that a confirmation does not wait for a renewal. The fence shows whether the lease that
        # was held at the start is still the current one.
        fence = self.fence
        record = LeaseRecord.parse(self._cell.lease())
        if not self._is_own(record, fence):
            if fence == self.fence:
                self._own_value, self.fence, self.seen = None, 0, record
            raise _lease_lost(record)

    def release(self, previous: LeaseRecord | None = None) -> None:
        """Release the lease; do nothing if it is not held.

        Args:
            previous: an earlier holder whose writes may still arrive, for the next holder.
        """
        self.leave("", self._seconds, previous)

    def leave(self, holder: str, seconds: int, previous: LeaseRecord | None = None) -> bool:
        """Write another holder's name into the lease; return whether this process held the lease until then."""
        with self._lock:
            own_record = self.own
            if own_record is None:
                return False
            change = replace(own_record, holder=holder, seconds=seconds, previous=previous)
            # Before the write: another process can acquire the lease as soon as the write arrives, and the response may
            # be late or lost. From here on, `remaining_ms` is 0.
            self._renewed_at_ms = self._clock.monotonic_ms() - self._seconds * 1000
            done = self._cell.swap_lease(self._own_value, change.pack())
            self._own_value, self.fence, self.seen = None, 0, change
            return done

    def _write_renewal(self) -> bool:
        """Replace this holder's last record by the next record; return whether the cell still had the last record."""
        present, own_record = self._own_value, self.own
        if own_record is None:
            raise _lease_lost(self.seen)
        renewed = replace(own_record, beat=own_record.beat + 1, renewed_ms=self._clock.now_ms()).pack()
        # Compare-and-set: a renewal must not overwrite the record of another holder.
        if not self._cell.swap_lease(present, renewed):
            return False
        self._own_value = renewed
        return True

    def _adopt(self, present: bytes | None) -> None:
        """Adopt the record in the cell, which an earlier renewal of this holder may have written.

        Raises:
            LeaseLost: another process has written it.
        """
        record = LeaseRecord.parse(present)
        if not self._is_own(record, self.fence):
            self._lose(record)
        self._own_value = present

    def _is_own(self, record: LeaseRecord | None, fence: int) -> bool:
        """Return whether this holder wrote a record; another process with the same name has another fence."""
        return record is not None and fence > 0 and (record.holder, record.fence) == (self._holder, fence)

    def _has_expired(self, present: bytes | None, record: LeaseRecord | None) -> bool:
        """Return whether the lease has expired, or was free for its duration."""
        time_ms = (self._seconds if record is None else record.seconds) * 1000
        if record and self._wall_clocks and self._clock.now_ms() - record.renewed_ms > time_ms + WALL_ALLOWANCE_MS:
            return True
        now_ms = self._clock.monotonic_ms()
        if self._watched is None or self._watched[0] != present:
            self._watched = (present, now_ms)
        return now_ms - self._watched[1] > time_ms

    def _age(self, record: LeaseRecord) -> str:
        return f"{max(0, self._clock.now_ms() - record.renewed_ms) // 1000} s ago"

    def _lose(self, record: LeaseRecord | None) -> NoReturn:
        self._own_value, self.fence, self.seen = None, 0, record
        raise _lease_lost(record)


def _lease_lost(record: LeaseRecord | None) -> LeaseLost:
    holder = f"{record.holder} has it now" if record and record.holder else "no process has it now"
    return LeaseLost(f"the lease was lost, {holder}; the run stops, and the next holder continues it.")
