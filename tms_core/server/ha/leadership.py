"""Leadership: one of several servers on an HBase publishes and reads, and the others forward requests to it.

If topics are divided into slots, each slot has its own leader (:mod:`tms_core.server.ha.slot_assignment`).

A lease (:mod:`tms_core.tables.lease`) in a cell of HBase determines the leader. The server that acquires it waits for
the *fencing delay* before it starts its **term**, as CDAP's servers do (``LeaderElectionMessagingService``).
Correctness depends neither on that delay nor on clocks:

* **No acknowledged message is lost.** The server reads the lease's cell again before it acknowledges a write. If the
  cell still has this term, any later leader starts after the rows exist, and finds them.
* **No late row is visible.** A leader that is suspended during a write continues when it wakes up, possibly an hour
  later. Its late rows fall into a gap that the next leader has sealed (:mod:`tms_core.server.ha.sealed_ranges`).
* **A former leader returns no outdated reads.** Before and after each read of the store, the lease must be valid by
  this machine's monotonic clock. That clock also counts while the machine is suspended.

During the delay, HBase's Thrift servers finish calls that they received before the lease expired, so that few
publishers get an unknown outcome. A leader that shuts down cleanly has no such calls; it releases the lease, and the
next leader starts immediately.

The cost is one read of HBase for each written batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import NamedTuple

from tms_core.clock import Clock
from tms_core.errors import LeaseHeld, LeaseLost, StoreError, StoreUnavailable, Unavailable
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.tables.lease import Lease, LeaseRecord

#: The interval between two checks of the leases, in seconds.
CHECK_SECONDS = 1.0
#: The maximum delay of a late write of a former leader, in milliseconds. HBase's Thrift servers close a connection that
#: is idle for a minute (hbase.thrift.server.socket.read.timeout), so an hour has a large margin.
REACH_MS = 3_600_000

logger = get_logger(__name__)


class Term(NamedTuple):
    """A term: a period in which one server leads.

    Attributes:
        fence: the number of the term; later terms have higher numbers.
        previous: the previous leader that may have late writes; None: late writes are impossible.
    """

    fence: int
    previous: LeaseRecord | None


class Leadership:
    """The leadership of a slot as one server sees it; one thread calls :meth:`step`, any thread may read.

    Args:
        lease: the lease as seen by this server, without wall clocks.
        fencing_delay_seconds: the delay between acquiring an expired lease and leading; a released lease needs none.
    """

    def __init__(self, lease: Lease, clock: Clock, *, fencing_delay_seconds: int) -> None:
        self._lease = lease
        self._clock = clock
        self._delay_ms = fencing_delay_seconds * 1000
        self._term: Term | None = None
        self._is_releasing = False
        #: Whether the preparation of the last term has failed, so that other servers have precedence.
        self._defers = False
        self._writes = 0
        self._lock = Lock()
        #: The start of the term by the monotonic clock, after the fencing delay.
        self._start_ms = 0
        #: The time of the last failed write by the monotonic clock; None: no write has failed.
        self._failed_ms: int | None = None
        self._failure = ""

    # -- for requests -------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Return whether this server leads; without I/O."""
        return not self._is_releasing and self._has_valid_term

    @property
    def holds(self) -> bool:
        """Return whether this server had the lease at the last check."""
        return self._lease.held

    @property
    def leader(self) -> LeaseRecord | None:
        """Return the other server that led at the last check; None: this server or no server led."""
        seen = self._lease.seen
        return None if self._lease.held or seen is None or not seen.holder else seen

    @property
    def fence(self) -> int:
        """Return the number of the current term at the last check; 0: no term."""
        seen = self._lease.seen
        return self._lease.fence or (seen.fence if seen else 0)

    def term(self) -> Term:
        """Return the current term.

        Raises:
            Unavailable: this server does not lead.
        """
        term = self._term
        if term is None or not self.leads:
            raise not_leader_error()
        return term

    def is_valid(self, term: Term) -> bool:
        """Return whether a term is still valid; during a release, it stays valid for requests that started in it."""
        return self._term is term and self._has_valid_term

    def lease_check(self) -> Callable[[], bool]:
        """Return a function that returns whether this server has kept the lease since this call; for use before a term.

        Raises:
            Unavailable: this server does not have the lease.
        """
        fence = self._lease.fence
        if not fence or self._lease.remaining_ms <= 0:
            raise not_leader_error()
        return lambda: self._lease.fence == fence and self._lease.remaining_ms > 0

    @contextmanager
    def writing(self) -> Iterator[Term]:
        """Run a write in the current term; the lease is not released before the block exits.

        Raises:
            Unavailable: this server does not lead.
        """
        # Under the lock of `_release`, which either sees this write, or has ended the term before.
        with self._lock:
            term = self.term()
            self._writes += 1
        try:
            yield term
        finally:
            with self._lock:
                self._writes -= 1

    def confirm(self, term: Term) -> None:
        """Check, independent of clocks, that a term is valid, so that its writes may be acknowledged.

        Raises:
            StoreUnavailable: the term is over, or the store failed; the outcome of the writes is unknown.
        """
        # Read the cell after the write: if it still has this term, any later leader starts after the rows exist.
        try:
            self._lease.confirm()
        except LeaseLost as error:
            raise unknown_outcome_error() from error
        except StoreError:
            self.note_failed_write()
            raise
        if self._term is not term:
            raise unknown_outcome_error()

    def note_failed_write(self) -> None:
        """Record a failed write, which HBase may still execute."""
        self._failed_ms = self._clock.monotonic_ms()

    # -- for the thread that watches the lease ------------------------------------------------------------------------

    def step(
        self, prepare: Callable[[], bool], *, patient: bool = False, read: Callable[[], bytes | None] | None = None
    ) -> None:
        """Renew the lease or try to acquire it, and start or stop a term.

        Args:
            prepare: called before a term starts; returns False if the term cannot start yet. If it raises, this server
                releases the lease, and acquires it again only if no other server does so for the duration of a lease.
            patient, read: see :meth:`Lease.acquire`.
        """
        try:
            if self._lease.held:
                self._lease.renew_if_due()
                if self._is_releasing:
                    self._release()
            else:
                # The lease may have expired while the process was suspended: no request may use the old term while the
                # lease is being acquired.
                self._end()
                self._lease.acquire(patient=patient or self._defers, read=read)
                self._note_acquired()
            self._failure = ""
        except LeaseHeld:
            pass
        except LeaseLost:
            self._end()
            seen = self._lease.seen
            logger.warning("leadership lost; the leader is now %s", seen.holder if seen else "unknown")
        except StoreError as error:
            self._failure = log_failure(error, self._failure)
        if self._term is None and self._may_start():
            self._start(prepare)

    def hand_back(self) -> None:
        """Reject new writes; the first step without a running write releases the lease and stops the term."""
        with self._lock:
            self._is_releasing = self._lease.held

    def wait_for_term(self, check_leases: Callable[[], object]) -> None:
        """Wait until this server leads; for a server without an address, to which others cannot forward requests.

        Raises:
            LeaseHeld: another server is alive and leads.
        """
        first: LeaseRecord | None = None
        while True:
            check_leases()
            if self.leads:
                return
            other = self.leader
            if other is not None and first is None:
                logger.info("%s has the lease; this server waits until the lease is renewed or expires", other.holder)
                first = other
            if other is not None and other != first:
                raise LeaseHeld(
                    f"{other.holder} serves this store.",
                    "Stop that server, or set server.leader.advertise for both servers.",
                )
            self._clock.sleep(CHECK_SECONDS)

    def resign(self) -> None:
        """Release the lease if no write is running; otherwise let it expire.

        Raises:
            StoreError: the store failed; the lease expires.
        """
        self.hand_back()
        self._release()
        self._end()

    def _release(self) -> None:
        """Release the lease if no write is running, with a note about servers that may have late writes."""
        with self._lock:
            # `_is_releasing` prevents new writes from here on, and a failed write calls `note_failed_write` before it
            # decreases `_writes`. Therefore `_failed_ms` is final below.
            if self._writes or not self._is_releasing:
                return
        now_ms = self._clock.monotonic_ms()
        failed_since_ms = REACH_MS if self._failed_ms is None else now_ms - self._failed_ms
        if failed_since_ms < self._delay_ms:
            # HBase may still execute a failed write. Keep the lease for the fencing delay, which nobody else waits
            # after a release.
            return
        previous = self._find_previous() if now_ms - self._start_ms < REACH_MS else None
        self._lease.release(self._lease.own if failed_since_ms < REACH_MS else previous)
        self._end()

    def _note_acquired(self) -> None:
        previous = self._lease.seen
        is_free = previous is None or not previous.holder
        # The holder of a released lease has no running calls; the holder of an expired lease may have some, until the
        # fencing delay has passed.
        self._start_ms = self._clock.monotonic_ms() + (0 if is_free else self._delay_ms)
        start = "now" if is_free else f"in {self._delay_ms // 1000} s"
        logger.info("lease acquired, term %d; this server leads %s", self._lease.fence, start)

    def _find_previous(self) -> LeaseRecord | None:
        """Return the previous leader that may have late writes; None: no server."""
        seen = self._lease.seen
        return seen.previous if seen is not None and not seen.holder else seen

    @property
    def _has_valid_term(self) -> bool:
        term = self._term
        return term is not None and term.fence == self._lease.fence and self._lease.remaining_ms > 0

    def _may_start(self) -> bool:
        return self._lease.held and self._lease.remaining_ms > 0 and self._clock.monotonic_ms() >= self._start_ms

    def _start(self, prepare: Callable[[], bool]) -> None:
        previous = self._find_previous()
        try:
            is_ready = prepare()
        except Exception:
            # Another server may be able to start a term, but not while this server renews the lease.
            self._defers = True
            self.hand_back()
            with suppress(StoreError):
                self._release()
            raise
        if is_ready:
            self._term, self._defers = Term(self._lease.fence, previous), False

    def _end(self) -> None:
        self._term, self._is_releasing = None, False


def log_failure(error: StoreError, previous: str) -> str:
    """Log an error unless it is the same as the previous one; return its message."""
    if error.message != previous:
        logger.warning("the leader cannot be determined: %s", error)
    return error.message


class LeaseWatcher:
    """A thread that checks the leases each second.

    It continues after any error: a server whose leases are not checked would never lead again. Requests do not depend
    on the thread, because an unchecked lease expires.

    Args:
        check_leases: checks the leases once.
        resign: releases the slots of this server.
    """

    def __init__(self, check_leases: Callable[[], object], resign: Callable[[], object]) -> None:
        self._check_leases = check_leases
        self._resign = resign
        self._seldom = RateLimitedLogger(logger)
        self._stop = Event()
        self._thread = Thread(target=self._run, name="leadership")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and release the leases."""
        self._stop.set()
        self._thread.join()
        try:
            self._resign()
        except StoreError as error:
            logger.warning("the lease could not be released; the next leader waits until it expires: %s", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._check_leases()
            except Exception as error:  # noqa: BLE001 the next check may succeed
                self._seldom.log(logging.ERROR, "the leadership could not be checked: %r", error, exc_info=error)
            self._stop.wait(CHECK_SECONDS)


def not_leader_error() -> Unavailable:
    """Return the error of a server that does not lead."""
    return Unavailable("This server is not the leader.", "Try again in a few seconds.")


def unknown_outcome_error() -> StoreUnavailable:
    """Return the error of a write whose outcome is unknown because the server lost the leadership."""
    return StoreUnavailable(
        "This server lost the leadership during the write, so the outcome is unknown.",
        "Check whether the change took effect before you repeat the request.",
    )
