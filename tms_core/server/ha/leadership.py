"""Who leads: of several servers on one HBase one publishes and reads, and the others forward requests to it.

Where topics are divided into slots, this is so for each slot by itself (:mod:`tms_core.server.ha.slot_assignment`).

A lease says who (:mod:`tms_core.tables.lease`), in a cell of HBase that can be compared and set. The server that gets
it waits for the *fencing delay* before it starts its **term**, as CDAP's servers do
(``LeaderElectionMessagingService``). Correctness depends neither on that wait nor on clocks:

* **No acknowledged message is lost.** Before a write is acknowledged the lease's cell is read once more. If it is still
  this term's, the next leader came after the rows, and finds them.
* **No late row is seen.** A leader that is stopped between looking and sending, or in the middle of sending, goes on
  when it is woken, be it an hour later. Those rows come to lie in a gap that the next leader has sealed
  (:mod:`tms_core.server.ha.sealed_ranges`).
* **Nothing is read from a deposed leader** that a new one may have decided otherwise: before and after each read of the
  store the lease must have time left, by this machine's running time, sleep included.

The delay lets calls end that HBase's Thrift servers had whole when the lease ran out, so that few publishers are left
without knowing what became of their messages. A leader that stops orderly has none, returns the lease, and the next one
starts at once.

The trade: one read of HBase for each batch that is written.
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

#: How often it is looked who leads, in seconds.
LOOK_SECONDS = 1.0
#: After how long nothing of a former leader's can still be under way, in milliseconds: HBase's Thrift servers close a
#: connection that is silent for a minute (hbase.thrift.server.socket.read.timeout), so this is far on the safe side.
REACH_MS = 3_600_000

logger = get_logger(__name__)


class Term(NamedTuple):
    """One time of leading.

    Attributes:
        fence: its number; later ones have higher numbers.
        former: the server that led before and may still have writes under way; None: there is none.
    """

    fence: int
    former: LeaseRecord | None


class Leadership:
    """What one server knows of the leader. One thread calls :meth:`step`; any thread may ask.

    Args:
        lease: this server's side of the lease, without wall clocks.
        fencing_delay_seconds: how long it waits between getting the lease and leading, unless it was given back.
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
        #: When a write failed last, by running time; None: none ever did.
        self._failed_ms: int | None = None
        self._failure = ""

    # -- asked by requests --------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Return whether this server leads now; cheap."""
        return not self._ending and self._runs

    @property
    def holds(self) -> bool:
        """Return whether this server has the lease, when last looked."""
        return self._lease.held

    @property
    def leader(self) -> LeaseRecord | None:
        """Return another server that leads, when last looked; None: there is none, or it is this one."""
        seen = self._lease.seen
        return None if self._lease.held or seen is None or not seen.holder else seen

    @property
    def fence(self) -> int:
        """Return the number of the term that runs, when last looked; 0: none ever did."""
        seen = self._lease.seen
        return self._lease.fence or (seen.fence if seen else 0)

    def term(self) -> Term:
        """Return the term that runs.

        Raises:
            Unavailable: this server does not lead.
        """
        term = self._term
        if term is None or not self.leads:
            raise not_leading()
        return term

    def is_still(self, term: Term) -> bool:
        """Return whether a term is not over; while the lead is handed back, it goes on for what has started in it."""
        return self._term is term and self._runs

    def tenure(self) -> Callable[[], bool]:
        """Return whether this server has had the lease since now, and no other one; asked before a term starts.

        Raises:
            Unavailable: it does not have it.
        """
        fence = self._lease.fence
        if not fence or self._lease.left_ms <= 0:
            raise not_leading()
        return lambda: self._lease.fence == fence and self._lease.left_ms > 0

    @contextmanager
    def writing(self) -> Iterator[Term]:
        """Something is written in the term that runs; until it is done, the lead is not handed back.

        Raises:
            Unavailable: this server does not lead.
        """
        with self._lock:
            term = self.term()
            self._writes += 1
        try:
            yield term
        finally:
            with self._lock:
                self._writes -= 1

    def confirm(self, term: Term) -> None:
        """Return if the term ran until now, whatever clocks say: the writes in it may be acknowledged.

        Raises:
            StoreUnavailable: it is over, or that cannot be found out; whether the writes count is not known.
        """
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
        """A write failed, so it may still be under way."""
        self._failed_ms = self._clock.running_ms()

    # -- in its own thread --------------------------------------------------------------------------------------------

    def step(
        self, prepare: Callable[[], bool], *, patient: bool = False, read: Callable[[], bytes | None] | None = None
    ) -> None:
        """Look the leader: renew the lease or try to get it, and start or finish a term.

        Args:
            prepare: called before a term starts; False: not yet.
            patient, read: see :meth:`Lease.acquire`.
        """
        try:
            if self._lease.held:
                self._lease.renew_if_due()
                if self._ending:
                    self._give_back()
            else:
                self._end()
                self._lease.acquire(patient=patient, read=read)
                self._won()
            self._failure = ""
        except LeaseHeld:
            pass
        except LeaseLost:
            self._end()
            seen = self._lease.seen
            logger.warning("this server does not lead any more, %s does", seen.holder if seen else "no server")
        except StoreError as error:
            self._complain(error)
        if self._term is None and self._may_begin():
            self._begin(prepare)

    def hand_back(self) -> None:
        """Start nothing more. The step that finds nothing under way gives the lease back, and the term is over."""
        with self._lock:
            self._ending = self._lease.held

    def win(self, look: Callable[[], object]) -> None:
        """Lead, or find out that another server does: for a server to which no other can pass anything on.

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
        """Give the lease back if nothing is under way any more; else it expires by itself.

        Raises:
            StoreError: the store failed; it expires.
        """
        self.hand_back()
        self._give_back()
        self._end()

    def _give_back(self) -> None:
        """Give the lease back, if nothing of ours is under way; what may still come late, the next one is told."""
        with self._lock:
            # From here on nothing begins, and what has ended has told before whether it failed.
            if self._writes or not self._ending:
                return
        now_ms = self._clock.running_ms()
        failed_since_ms = REACH_MS if self._failed_ms is None else now_ms - self._failed_ms
        if failed_since_ms < self._delay_ms:
            return
        former = self._former() if now_ms - self._began_ms < REACH_MS else None
        self._lease.release(self._lease.own if failed_since_ms < REACH_MS else former)
        self._end()

    def _won(self) -> None:
        former = self._lease.seen
        is_free = former is None or not former.holder
        self._began_ms = self._clock.running_ms() + (0 if is_free else self._delay_ms)
        logger.info(
            "this server has the lease, number %d, and leads %s", self._lease.fence, _when(is_free, self._delay_ms)
        )

    def _former(self) -> LeaseRecord | None:
        """Return the previous leader, which may still have running writes."""
        seen = self._lease.seen
        return seen.former if seen is not None and not seen.holder else seen

    @property
    def _runs(self) -> bool:
        term = self._term
        return term is not None and term.fence == self._lease.fence and self._lease.left_ms > 0

    def _may_begin(self) -> bool:
        return self._lease.held and self._lease.left_ms > 0 and self._clock.running_ms() >= self._began_ms

    def _begin(self, prepare: Callable[[], bool]) -> None:
        former = self._former()
        if prepare():
            self._term = Term(self._lease.fence, former)

    def _end(self) -> None:
        self._term, self._ending = None, False

    def _complain(self, error: StoreError) -> None:
        if self._failure != error.message:
            logger.warning("which server leads cannot be found out: %s", error)
        self._failure = error.message


class Watch:
    """Has it looked the leader, again and again, in a thread of its own.

    Args:
        resign: returns the slots of this server.
    """

    def __init__(self, look: Callable[[], object], resign: Callable[[], object]) -> None:
        self._look = look
        self._resign = resign
        self._stop = Event()
        self._thread = Thread(target=self._run, name="leadership")
        self._thread.start()

    def stop(self) -> None:
        """Finish it, and return the lease."""
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
    """Return the error that a server that does not lead answers every request with."""
    return Unavailable("This server does not lead now.", "Try again in some seconds.")


def undecided() -> StoreUnavailable:
    """Return the error for a publish whose leadership became uncertain."""
    return StoreUnavailable(
        "This server lost the lead while it wrote; whether that counts is not known.",
        "Look whether the change is there before you send it again.",
    )


def _when(is_free: bool, delay_ms: int) -> str:
    return "now" if is_free else f"in {delay_ms // 1000} s"
