"""Leadership: of several servers on one HBase, one publishes and reads, and the others forward requests to it.

If topics are divided into slots, each slot has its own leader (:mod:`tms_core.server.ha.slot_assignment`).

A lease (:mod:`tms_core.tables.lease`) in a cell of HBase determines the leader. The server that acquires it waits for
the *fencing delay* before it starts its **term**, as CDAP's servers do (``LeaderElectionMessagingService``).
Correctness depends neither on that delay nor on clocks:

* **No acknowledged message is lost.** The server reads the lease's cell again before it acknowledges a write. If the
  cell still has this term, the next leader starts after the rows exist, and finds them.
* **No late row is visible.** A leader that is suspended before or during a write continues after it wakes, possibly an
  hour later. Its late rows fall into a gap that the next leader has sealed (:mod:`tms_core.server.ha.sealed_ranges`).
* **A former leader returns no outdated reads.** The lease must have time left before and after each read of the store,
  by this machine's monotonic clock, sleep included.

During the delay, HBase's Thrift servers finish calls that they had received before the lease expired. Therefore few
publishers get an unknown outcome. A leader that stops in an orderly way has no such calls. It releases the lease, and
the next leader starts at once.

The trade: one read of HBase for each written batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import NamedTuple

from tms_core.clock import Clock
from tms_core.errors import LeaseHeld, LeaseLost, StoreError, StoreUnavailable, Unavailable
from tms_core.logs.loggers import get_logger
from tms_core.tables.lease import Lease, LeaseRecord

#: The interval between two looks at the leases, in seconds.
LOOK_SECONDS = 1.0
#: After so many milliseconds, no write of a former leader can be under way: HBase's Thrift servers close a connection
#: that is silent for a minute (hbase.thrift.server.socket.read.timeout), so an hour has a large margin.
REACH_MS = 3_600_000

logger = get_logger(__name__)


class Term(NamedTuple):
    """A term: a period in which one server leads.

    Attributes:
        fence: its number; later terms have higher numbers.
        previous: the previous leader that may have writes under way; None: no writes can be under way.
    """

    fence: int
    previous: LeaseRecord | None


class Leadership:
    """The view of one server on the leadership of a slot. One thread calls :meth:`step`; any thread may read it.

    Args:
        lease: this server's side of the lease, without wall clocks.
        fencing_delay_seconds: the delay between acquiring the lease and leading, unless the lease was released.
    """

    def __init__(self, lease: Lease, clock: Clock, *, fencing_delay_seconds: int) -> None:
        self._lease = lease
        self._clock = clock
        self._delay_ms = fencing_delay_seconds * 1000
        self._term: Term | None = None
        self._ending = False
        self._writes = 0
        self._lock = Lock()
        self._began_ms = 0
        #: The time of the last failed write, by the monotonic clock; None: no write has failed.
        self._failed_ms: int | None = None
        self._failure = ""

    # -- for requests -------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Return whether this server leads now, without I/O."""
        return not self._ending and self._runs

    @property
    def holds(self) -> bool:
        """Return whether this server had the lease at the last look."""
        return self._lease.held

    @property
    def leader(self) -> LeaseRecord | None:
        """Return the other server that led at the last look; None: no server led, or this one."""
        seen = self._lease.seen
        return None if self._lease.held or seen is None or not seen.holder else seen

    @property
    def fence(self) -> int:
        """Return the number of the current term at the last look; 0: there was no term."""
        seen = self._lease.seen
        return self._lease.fence or (seen.fence if seen else 0)

    def term(self) -> Term:
        """Return the current term.

        Raises:
            Unavailable: this server does not lead.
        """
        term = self._term
        if term is None or not self.leads:
            raise not_leading()
        return term

    def is_still(self, term: Term) -> bool:
        """Return whether a term is still valid; during a release, it stays valid for requests that started in it."""
        return self._term is term and self._runs

    def tenure(self) -> Callable[[], bool]:
        """Return a function that checks whether this server has kept the lease since this call; for before a term.

        Raises:
            Unavailable: this server does not have the lease.
        """
        fence = self._lease.fence
        if not fence or self._lease.remaining_ms <= 0:
            raise not_leading()
        return lambda: self._lease.fence == fence and self._lease.remaining_ms > 0

    @contextmanager
    def writing(self) -> Iterator[Term]:
        """Run a write in the current term; the lease is not released before the block is left.

        Raises:
            Unavailable: this server does not lead.
        """
        # Under the lock of `_give_back`: the release sees either this write, or a term that has stopped already.
        with self._lock:
            term = self.term()
            self._writes += 1
        try:
            yield term
        finally:
            with self._lock:
                self._writes -= 1

    def confirm(self, term: Term) -> None:
        """Check that a term was valid until now, independent of clocks, so that its writes may be acknowledged.

        Raises:
            StoreUnavailable: the term is over, or the store failed; the outcome of the writes is unknown.
        """
        # Read the cell after the rows: if it still has this term, any later leader starts after the rows exist.
        try:
            self._lease.confirm()
        except LeaseLost as error:
            raise undecided() from error
        except StoreError:
            self.doubt()
            raise
        if self._term is not term:
            raise undecided()

    def doubt(self) -> None:
        """Note a failed write, which may still be under way."""
        self._failed_ms = self._clock.monotonic_ms()

    # -- for the thread that watches the lease ------------------------------------------------------------------------

    def step(
        self, prepare: Callable[[], bool], *, patient: bool = False, read: Callable[[], bytes | None] | None = None
    ) -> None:
        """Renew the lease or try to acquire it, and start or stop a term.

        Args:
            prepare: called before a term starts; returns False if the term cannot start yet.
            patient, read: see :meth:`Lease.acquire`.
        """
        try:
            if self._lease.held:
                self._lease.renew_if_due()
                if self._ending:
                    self._give_back()
            else:
                # The lease was lost in this process's sleep: no request may use the old term while the lease is
                # acquired.
                self._end()
                self._lease.acquire(patient=patient, read=read)
                self._won()
            self._failure = ""
        except LeaseHeld:
            pass
        except LeaseLost:
            self._end()
            seen = self._lease.seen
            logger.warning("this server no longer leads, %s does", seen.holder if seen else "no server")
        except StoreError as error:
            self._log_failure(error)
        if self._term is None and self._may_begin():
            self._begin(prepare)

    def hand_back(self) -> None:
        """Accept no further writes. The first step without a running write releases the lease and stops the term."""
        with self._lock:
            self._ending = self._lease.held

    def win(self, look: Callable[[], object]) -> None:
        """Wait until this server leads; for a server without an address, to which no other can forward requests.

        Raises:
            LeaseHeld: another server is alive and leads.
        """
        first: LeaseRecord | None = None
        while True:
            look()
            if self.leads:
                return
            other = self.leader
            if other is not None and first is None:
                logger.info("%s was leading; this server waits to see whether it still runs", other.holder)
                first = other
            if other is not None and other != first:
                raise LeaseHeld(
                    f"{other.holder} serves this store.",
                    "Stop it, or give both of them an address: server.leader.advertise.",
                )
            self._clock.sleep(LOOK_SECONDS)

    def resign(self) -> None:
        """Release the lease if no write is under way; otherwise it expires by itself.

        Raises:
            StoreError: the store failed; the lease expires.
        """
        self.hand_back()
        self._give_back()
        self._end()

    def _give_back(self) -> None:
        """Release the lease if no write is under way, with a note about writes that may still be late."""
        with self._lock:
            # `_ending` prevents new writes from here on, and a finished write has noted its failure before `_writes`
            # decreased. Therefore `_failed_ms` is final below.
            if self._writes or not self._ending:
                return
        now_ms = self._clock.monotonic_ms()
        failed_since_ms = REACH_MS if self._failed_ms is None else now_ms - self._failed_ms
        if failed_since_ms < self._delay_ms:
            # A failed write may still reach HBase. Keep the lease for the delay, as the next leader would wait.
            return
        previous = self._find_previous() if now_ms - self._began_ms < REACH_MS else None
        self._lease.release(self._lease.own if failed_since_ms < REACH_MS else previous)
        self._end()

    def _won(self) -> None:
        previous = self._lease.seen
        is_free = previous is None or not previous.holder
        # A released lease has no calls under way; an expired one may have, until the fencing delay has passed.
        self._began_ms = self._clock.monotonic_ms() + (0 if is_free else self._delay_ms)
        logger.info(
            "this server has the lease, number %d, and leads %s", self._lease.fence, _when(is_free, self._delay_ms)
        )

    def _find_previous(self) -> LeaseRecord | None:
        """Return the previous leader that may have writes under way; None: no server."""
        seen = self._lease.seen
        return seen.former if seen is not None and not seen.holder else seen

    @property
    def _runs(self) -> bool:
        term = self._term
        return term is not None and term.fence == self._lease.fence and self._lease.remaining_ms > 0

    def _may_begin(self) -> bool:
        return self._lease.held and self._lease.remaining_ms > 0 and self._clock.monotonic_ms() >= self._began_ms

    def _begin(self, prepare: Callable[[], bool]) -> None:
        previous = self._find_previous()
        if prepare():
            self._term = Term(self._lease.fence, previous)

    def _end(self) -> None:
        self._term, self._ending = None, False

    def _log_failure(self, error: StoreError) -> None:
        if self._failure != error.message:
            logger.warning("which server leads cannot be found out: %s", error)
        self._failure = error.message


class LeaseWatcher:
    """A thread that looks at the leases each second.

    Args:
        look: looks at the leases once.
        resign: releases the slots of this server.
    """

    def __init__(self, look: Callable[[], object], resign: Callable[[], object]) -> None:
        self._look = look
        self._resign = resign
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
            logger.warning("the lease could not be given back, so the next server waits until it is over: %s", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            self._stop.wait(LOOK_SECONDS)


def not_leading() -> Unavailable:
    """Return the error of a server that does not lead."""
    return Unavailable("This server does not lead now.", "Try again in a few seconds.")


def undecided() -> StoreUnavailable:
    """Return the error of a write whose outcome is unknown because the server lost the leadership."""
    return StoreUnavailable(
        "This server lost the leadership while it wrote; whether that counts is not known.",
        "Check whether the change is there before you send it again.",
    )


def _when(is_free: bool, delay_ms: int) -> str:
    return "now" if is_free else f"in {delay_ms // 1000} s"
