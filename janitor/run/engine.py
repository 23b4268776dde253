"""One janitor: a store, its memory, a clock and a source of snapshots, and what can be done with them.

The commands, the daemon and the tests all come through here. A run begins as a question does
(:mod:`janitor.run.questions`) and walks with an act that deletes; what was learnt is saved at the end, in one
transaction, after the store's own writes are durable. A run that dies in between has forgotten nothing but its report:
the next one finds the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Protocol, Unpack

from janitor.archive.restore import Request, Restored
from janitor.boundary import claim as boundary
from janitor.boundary import coverage as rounds
from janitor.boundary.coverage import Round
from janitor.law import frontier
from janitor.law.intervals import Interval
from janitor.law.policy import Hold
from janitor.report import Report
from janitor.run import conclude, guards
from janitor.run import counters as figures
from janitor.run.conclude import Pass
from janitor.run.feedback import Feedback
from janitor.run.plan_file import PlanFile
from janitor.run.prepare import IN_PROGRESS, Prepared
from janitor.run.questions import Inquiry, Options
from janitor.state import decided
from janitor.state.base import LedgerEntry, RunRecord, State
from janitor.state.records import LINEAGE, RESTORED
from janitor.state.topic_history import save_topics
from janitor.sweep.booking import Booking
from janitor.sweep.context import RunContext, Terms, parse_or_none
from janitor.sweep.executor import Keeper, Sweep
from janitor.sweep.ledger import KEPT_ENTRIES, Ledger
from janitor.sweep.outcome import covers, ledger_entries
from janitor.sweep.permission import Permission, asked_of_memory
from janitor.sweep.rate_limit import Pacer
from janitor.sweep.transactions import TransactionView
from tms_core.clock import Clock
from tms_core.errors import (
    GuardTripped,
    Interrupted,
    LeaseHeld,
    LeaseLost,
    MemoryFailed,
    NotAdopted,
    StoreBusy,
    StoreError,
)
from tms_core.tables.base import Store
from tms_core.tables.lease import Lease
from tms_core.topic import TopicId
from tms_core.transaction.source.source import SnapshotSource

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
THOROUGH_EVERY_MS = 24 * 3600 * 1000
#: How often a run writes down how far it has come, in milliseconds of running time.
PROGRESS_MS = 10_000


class Archive(Protocol):
    """Where rows go before they are deleted (``janitor.archive``)."""

    def begin(self, run_id: str, transactions: TransactionView) -> Keeper:
        """A keeper for one run's rows, which are kept with what the run knows of their transactions."""
        ...

    def expire(self, keep_days: int, now_ms: int) -> int:
        """Give up what was kept longer than that; returns how many files went."""
        ...


class Engine(Inquiry):
    """Answers for one store, and cleans it.

    What is not listed here is :class:`~janitor.run.questions.Inquiry`'s; the store must be one that can be written.

    Args:
        rows_per_second: the limit on deleting; None for none.
        lease: what runs write under; None where nothing else can write.
        archive: where rows go before they are deleted; None for nowhere.
        archive_days: how long they are kept there.
        feedback: who is told of transactions that are proven clean; None for nobody.
        restored: told of a topic that archived rows were written to; None: nobody else knows what is in it.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        source: SnapshotSource | None,
        clock: Clock,
        terms: Terms,
        *,
        rows_per_second: float | None = None,
        lease: Lease | None = None,
        archive: Archive | None = None,
        archive_days: int = 7,
        feedback: Feedback | None = None,
        restored: Callable[[TopicId], None] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(store, state, source, clock, terms, **options)
        self._rows_per_second = rows_per_second
        self._lease = lease
        self._archive = archive
        self._archive_days = archive_days
        self._feedback = feedback
        self._restored = restored
        self._turn = RLock()

    # -- decisions of an operator --------------------------------------------------------------------------------

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        """Accept this store, this transaction system and this clock as they are now.

        Args:
            once_for: do it once for this text; the state remembers it in the transaction that adopts.
            store_id: adopt no other store (``store_id`` of a plan).

        Returns:
            The topics whose rows may go from now on as they come due.

        Raises:
            NotAdopted: this is another store; nothing was changed.
        """
        with self._turn:
            ready = self._prepare()
            if store_id is not None and store_id != ready.record.mark:
                raise NotAdopted(
                    f"The store that is meant is {store_id}, and this one is {ready.record.mark}: it was not adopted.",
                    "See that the settings name the store that is meant, then: janitor plan",
                )
            return self._adopt(ready, once_for)[1]

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        """Let held frontiers go with the next run, accept the machine's clock, or both.

        Args:
            patterns: shell patterns of the topics whose held rows may go; none lets no topic go.
            clock: accept this machine's clock as it is now.
            once_for: do it once for this text; the state remembers it in the same transaction.

        Raises:
            NotAdopted: there is nothing to approve before the store is adopted.
            GuardTripped: topics are named while the clock is in doubt and not accepted with them; what is due by it is
                not known.
        """
        ready = self._prepare()
        if not ready.adopted:
            raise NotAdopted("This store is not adopted yet.", "Look at janitor plan, then: janitor adopt")
        for note in ready.notes:
            if not clock and note.tripped and note.guard == "clock":
                raise GuardTripped(f"Nothing was approved: {note.message}.")
        context = self._context(ready, thorough=False, patterns=patterns)
        context.load_topics()
        held = {
            work.topic.topic: frontier.approve(work.record, work.topic)
            for work in context.topics.values()
            if patterns and work.frontier.hold is Hold.FRONTIER and context.in_scope(work.topic.topic.prefix)
        }
        with self.state.transaction():
            self.state.save_frontiers(held)
            if clock:
                self.state.save_anchor(ready.now)
            if once_for is not None:
                decided.note_done(self.state, decided.approval(patterns, clock=clock), once_for)
        return sorted(held)

    def restore(self, folder: Path, request: Request) -> Restored:
        """Bring archived rows back (:func:`janitor.archive.restore.restore`).

        Args:
            folder: the archive's.

        Raises:
            Refused, ArchiveError, StoreError: as that says; what was written until then stays.
        """
        with self._turn:
            try:
                return self._restore(folder, request)
            finally:
                if self._restored is not None:
                    self._restored(request.target or request.source)

    # -- runs ----------------------------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Close what a janitor left open that has died; called once this one holds the store and the lease.

        Its runs are closed as lost, and what it had announced goes into the ledger, with no number of rows.

        Returns:
            The ids of those runs.

        Raises:
            StoreError: the state could not be read or written.
        """
        with self._turn, self.state.transaction():
            self.state.save_created_ms(self._clock.now_ms())
            lost = {run.id for run in self.state.unfinished_runs()}
            self.state.add_ledger(entry for entry in self.state.intents() if entry.run_id in lost)
            for run_id in lost:
                self.state.add_counters(self.state.booked(run_id))
                error = {"error": "the process ended before the run did"}
                self.state.finish_run(run_id, self._clock.now_ms(), "lost", json.dumps(error))
            self.state.add_counters(figures.results("lost", len(lost)))
        self.state.clear_intents()
        return sorted(lost)

    def run_once(self, *, adopt: bool = False, patterns: tuple[str, ...] = (), patient: bool = False) -> Report:
        """One pass that deletes and inverts what the law and the frontiers allow.

        A run that a guard stops changes nothing and says so in its report; a topic that fails is in the report's
        errors and the others are done; a run that is halted or loses its lease keeps what it did, and says so.

        Args:
            adopt: accept a store met for the first time, as :meth:`adopt` does. Without effect where the state knows
                an adopted store, be it this one or not, and also when a guard stops the run: only :meth:`adopt` and
                :meth:`approve` settle that.
            patterns: shell patterns of the topics to do; such a pass claims nothing.
            patient: leave topics for later in which little has come due; for a daemon, which comes again soon.

        Raises:
            StoreError: the store or the state failed as a whole.
        """
        with self._turn:
            ready = self._prepare()
            if adopt and ready.unknown:
                ready, _ = self._adopt(ready)
            thorough = self._thorough_is_due(ready)
            context = self._context(ready, thorough=thorough, patterns=patterns, patient=patient and not thorough)
            return self._sweep(ready, context, moves_frontiers=True)

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        """Carry out a plan file: at most what it shows, and nothing the law no longer allows.

        Raises:
            PlanRefused: what it rests on has moved; nothing was done.
            StoreError: the store or the state failed as a whole.
        """
        with self._turn:
            ready = self._prepare()
            present = self._context(ready, thorough=True)
            present.load_topics()
            wanted.check(ready.record.mark, self.terms, present)
            if adopt and ready.unknown:
                ready, _ = self._adopt(ready)
            now = replace(ready.now, wall_ms=min(ready.now.wall_ms, wanted.effective_now_ms))
            ready = replace(ready, now=now)
            context = self._context(ready, thorough=True, limits=wanted.limits)
            return self._sweep(ready, context, moves_frontiers=False)

    def at_work(self) -> bool:
        """Whether a run, or a decision that excludes one, is under way in another thread."""
        if not self._turn.acquire(blocking=False):
            return True
        self._turn.release()
        return False

    def rehearse(self, *, patterns: tuple[str, ...] = ()) -> Report:
        """A plan that is remembered as a run is, for a daemon that only plans (``janitor.apply: false``).

        Raises:
            StoreError, Halted: as :meth:`plan`.
        """
        with self._turn:
            ready = self._prepare()
            known = self.state.note(figures.REHEARSED)
            thorough = known is None or not 0 <= ready.now.wall_ms - known < THOROUGH_EVERY_MS
            current = self._intend(ready, patterns, thorough=thorough)
            self._recover_if_needed()
            self.state.begin_run(RunRecord(current.id, "plan", current.started_ms, heartbeat_ms=current.started_ms))
            try:
                report = self._foresee(current)
            except Exception as error:
                result = "halted" if isinstance(error, Interrupted) else "failed"
                self._close(current, result, {"error": str(error)})
                raise
            self._close(current, "partial" if report.errors else "done", report.to_history(), report)
            return report

    def renew_lease(self) -> None:
        """Hold the lease for another while between runs; a run renews it by itself.

        Raises:
            LeaseLost: somebody else has taken it.
        """
        # Never beside a run: that takes the memory's lock before the lease's, and this the other way round.
        if self._lease is None or not self._turn.acquire(blocking=False):
            return
        try:
            if self._lease.held:
                self._lease.renew_if_due()
        finally:
            self._turn.release()

    def regain_lease(self) -> bool:
        """Take the lease again after it was lost; returns whether this process holds it.

        Raises:
            StoreError: the state could not be read or written.
        """
        with self._turn:
            if self._lease is None or self._lease.held:
                return True
            try:
                self._lease.acquire()
            except LeaseHeld:
                return False
            self.recover()
            return True

    def _recover_if_needed(self) -> None:
        """Close a run of this process whose end could not be written, before its announcements are cleared."""
        if (self._lease is None or self._lease.held) and self.state.unfinished_runs():
            self.recover()

    def _sweep(self, ready: Prepared, context: RunContext, *, moves_frontiers: bool) -> Report:
        current = self._begin("apply", ready, context)
        usable = ready.tx.usable
        ledger = Ledger(self.state, self._clock, current.id, usable.timestamp_ms if usable else None)
        self._recover_if_needed()
        self.state.begin_run(RunRecord(current.id, current.mode, current.started_ms, heartbeat_ms=current.started_ms))
        try:
            if not ready.stopped:
                self._sweep_store(current, ledger, moves_frontiers)
        except LeaseLost as error:
            current.halted = error
        # Also for a bug of ours: what was deleted has to be in the ledger, and the run must not look alive.
        except Exception as error:
            self._close(current, "failed", {"error": str(error)})
            raise
        claim = self._claim(ready)
        current.boundary = claim.bound if claim else None
        report = self._report(current)
        try:
            with self._as_its_holder():
                self._close(current, _result(current, report), report.to_history(), report)
        except LeaseLost as error:
            current.halted = error
            report = self._report(current)
        return report

    def _close(
        self,
        current: Pass,
        result: str,
        history: dict[str, Any],
        report: Report | None = None,
    ) -> None:
        """Remember how a run ended; unless its lease was lost and the next holder has closed it already."""
        with self.state.transaction():
            record = self.state.run(current.id)
            if record is None or record.finished_ms is not None:
                return
            if report is None:
                figures.save_unreported(self.state, current, result)
            self.state.finish_run(current.id, self._clock.now_ms(), result, json.dumps(history))
            self.state.add_ledger(self._ledger_entries(current))
            if report is not None:
                figures.save(self.state, current, report, result, conclude.calls_made(current, self.store))
            if not current.ready.stopped:
                # A clock in doubt would forget what is not old.
                self.state.prune_runs(current.started_ms - self._history_ms)
        # What stands there after the lease was lost is another holder's.
        if current.mode == "apply" and not isinstance(current.halted, LeaseLost):
            self.state.clear_intents()

    def _sweep_store(self, current: Pass, ledger: Ledger, moves_frontiers: bool) -> None:
        current.context.load_topics()
        with self._as_its_holder(), self.state.transaction():
            self._check_lease()
            conclude.begin_run(current, self.state, guards.read_clocks(self._clock), moves_frontiers=moves_frontiers)
        permission = Permission(self.state, self._lease, self._clock, current.id, self._halted)
        pacer = Pacer(self._rows_per_second, self._clock, permission.alive)
        keeper = self._archive.begin(current.id, current.context.transactions) if self._archive else None
        booking = Booking(partial(figures.book, self.state, current.id), self._clock)
        sweep = Sweep(self.store.metadata, permission, pacer, ledger, keeper, self._observer, booking)
        self._walk(current, sweep, partial(self._begin_round, current) if current.proves else None)
        with self._phase(current, "sync"):
            # A run that took nothing and proves nothing has nothing that a crash may not take back.
            if current.outcome.deleted.slices or current.round is not None:
                self._sync()
        outcome = current.outcome
        if self._expiries is not None:
            self._expiries.forget(outcome.expired)
        if isinstance(current.halted, MemoryFailed):
            with self._as_its_holder():
                raise current.halted.__cause__ or current.halted
        if outcome.archive_error is not None:
            outcome.failures["message", "archive"] += 1
            outcome.errors.append(f"nothing more was deleted, since it could not be archived: {outcome.archive_error}")
        if current.halted is not None or not self._concluded(current, moves_frontiers):
            return
        with self._phase(current, "compact"):
            self._compact(current, permission)
        if self._feedback is not None and moves_frontiers and current.halted is None:
            self._feed_back(current, self._feedback, permission)

    def _sync(self) -> None:
        """Return when all that was deleted and negated survives a crash, also by a run before that ended early."""
        self.store.message.sync()
        self.store.payload.sync()

    def _ledger_entries(self, current: Pass) -> list[LedgerEntry]:
        """What a run took; what it announced and its outcome does not tell of goes in without a number of rows."""
        if current.mode == "plan":
            return []
        usable, outcome = current.ready.tx.usable, current.outcome
        taken = ledger_entries(outcome, current.id, usable.timestamp_ms if usable else None)
        own = [entry for entry in self.state.intents() if entry.run_id == current.id]
        return taken + [entry for entry in own if not any(covers(told, entry) for told in taken)]

    def _begin_round(self, current: Pass, parts: Sequence[Store]) -> Round:
        saved_ms = [self._clock.running_ms()]

        def is_due() -> bool:
            return self._clock.running_ms() - saved_ms[0] >= PROGRESS_MS

        def save(covered: Sequence[Interval], untouchable: int | None) -> None:
            self._sync()
            with asked_of_memory(), self._as_its_holder():
                # Not inside the memory's transaction: others may be walking, who take the lease's lock first.
                self._check_lease()
                conclude.save_evidence(current, self.state, covered, untouchable)
            saved_ms[0] = self._clock.running_ms()

        def save_payloads(upto: bytes) -> None:
            if is_due():
                with asked_of_memory(), self._as_its_holder():
                    self._check_lease()
                    rounds.save_payloads(self.state, current.id, upto)
                saved_ms[0] = self._clock.running_ms()

        with asked_of_memory(), self._as_its_holder(), self.state.transaction():
            self._check_lease()
            begun = conclude.begin_round(current, self.state, save)
        if rounds.is_whole(parts):
            begun = replace(begun, is_due=is_due, payloads_done=save_payloads)
        current.round = begun
        return begun

    def _concluded(self, current: Pass, moves_frontiers: bool) -> bool:
        """Save what the pass has reached, if this is still the one who may say so (rules S4, S12)."""
        barred = conclude.obstacles(current.ready, self.terms, self.store) if current.round is not None else ()
        clocks = guards.read_clocks(self._clock)
        try:
            lineage = self._lineage(current)
            if lineage is None:
                return False
            with self._as_its_holder(), self.state.transaction():
                self._check_lease()
                if moves_frontiers:
                    conclude.conclude_run(current, self.state, self.terms, clocks, clocks.wall_ms, barred)
                else:
                    conclude.conclude_apply(current, self.state, clocks)
                if lineage != self.state.note(LINEAGE):
                    self.state.save_note(LINEAGE, lineage)
        except Interrupted as error:
            current.halted = error
            return False
        return True

    def _lineage(self, current: Pass) -> dict[str, Any] | None:
        """What the store is recognised by from now on; None where it was put back meanwhile, or has gone silent."""
        with self._as_its_holder():
            self._check_lease()
        try:
            with self._as_its_holder():
                _, put_back = guards.check_lineage(self.state, self.store, current.ready.record)
            if put_back is None:
                return dict(self.store.lineage())
            current.notes.append(put_back)
        except StoreError as error:
            if current.finished:
                raise
            # It has failed in the pass already, so there is little to conclude.
            current.outcome.errors.append(f"nothing was concluded: {error}")
        return None

    @contextmanager
    def _as_its_holder(self) -> Iterator[None]:
        """What the memory refuses because another process writes it is the loss of the lease, where that is lost.

        Raises:
            LeaseLost: instead of the memory's ``StoreBusy``.
        """
        try:
            yield
        except StoreBusy:
            self._check_lease()
            raise

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _compact(self, current: Pass, permission: Permission) -> None:
        def heartbeat() -> None:
            self._observer("compact", None, 0)
            permission.alive()

        try:
            current.outcome.deleted.compact(heartbeat)
        except Interrupted as error:
            current.halted = error
        except StoreError as error:
            # The rows are gone and what was reached is saved; only their space is not free yet.
            current.outcome.errors.append(f"space was not given back: {error}")

    def _feed_back(self, current: Pass, feedback: Feedback, permission: Permission) -> None:
        """Hand over what is proven, after a run of everything in whose way nothing was (rule S4)."""
        ready, window_ms = current.ready, self.terms.lifetime.window_end_ms(0)

        def alive(rows: int) -> None:
            self._observer("audit", None, rows)
            permission.alive()

        try:
            feedback.hand_over(
                current,
                self.state,
                self._claim(ready) if current.complete else None,
                lambda: self.state.known_ids(self._clock.now_ms(), window_ms).closed,
                lambda: None if conclude.obstacles(ready, self.terms, self.store) else self._audit(ready, alive),
                permission.check_all,
            )
        except Interrupted as error:
            current.halted = error

    def _thorough_is_due(self, ready: Prepared) -> bool:
        """Whether this run looks at everything: daily, after a plan, and when the last such run could prove nothing."""
        if self.state.note(rounds.WANTED) is not None:
            return True
        last = self.state.last_thorough_ms()
        # A last time that lies ahead was written by a clock that has been set back since.
        if last is None or not 0 <= ready.now.wall_ms - last < THOROUGH_EVERY_MS:
            return True
        refuted = rounds.refutation(self.state)
        if refuted is not None and not refuted.searched:
            return True
        if ready.tx.usable is None or self.state.pauses() or self._quarantined(ready):
            return False  # it could prove nothing either
        evidence = self.state.evidence()
        return boundary.find_gap(evidence) is not None or any(item.started_ms < last for item in evidence)

    def _adopt(self, ready: Prepared, once_for: str | None = None) -> tuple[Prepared, list[TopicId]]:
        lineage = self.store.lineage()
        context = self._context(ready, thorough=False, label=Hold.FIRST_CONTACT)
        context.load_topics()
        topics = {work.topic.topic: work.record for work in context.topics.values()}
        record = ready.record
        if ready.adopted and ready.first_contact:
            # Another transaction system: what is known of open ids and claims is about the former one's.
            record = replace(record, mark=guards.successor_mark(record.mark, "transactions"))
        record = conclude.seen(replace(record, adopted_ms=ready.now.wall_ms), ready.tx)
        with self.state.transaction():
            self.state.save_store(record)
            self.state.save_frontiers(topics)
            self.state.save_anchor(ready.now)
            # Whoever adopts may have put back what was covered already.
            rounds.end(self.state)
            self.state.replace_evidence([])
            self.state.save_claim(None)
            # Ids that are invalid by now are known only when a run has ended.
            self.state.save_note(IN_PROGRESS, None)
            self.state.save_note(LINEAGE, dict(lineage))
            self.state.save_note(RESTORED, None)
            if once_for is not None:
                decided.note_done(self.state, "adopt", once_for)
        return self._prepare(), sorted(topics)

    # -- between runs --------------------------------------------------------------------------------------------

    def remember_topics(self) -> None:
        """Read the metadata table, so that a topic is shown before the next sweep has come to it.

        Raises:
            StoreError: the store could not be read, or the state not written.
        """
        parsed = (parse_or_none(key, value) for key, value in self.store.metadata.rows())
        save_topics(self.state, [topic for topic in parsed if topic is not None], self._clock.now_ms())

    def keep_house(self) -> None:
        """Forget what was remembered and archived for long enough, unless a guard doubts what time it is.

        Raises:
            StoreError: the state could not be written.
            ArchiveError: something archived could not be removed.
        """
        ready = self._prepare()
        if ready.stopped:
            return
        self.state.prune_ledger(ready.now.wall_ms - self._history_ms, KEPT_ENTRIES)
        if self._archive is not None:
            self._archive.expire(self._archive_days, ready.now.wall_ms)


def _result(current: Pass, report: Report) -> str:
    """How a run ended, in a word (``RunRecord.result``)."""
    if current.ready.stopped:
        return "stopped"
    if current.halted is not None:
        return "halted"
    return "partial" if report.errors or current.outcome.withheld else "done"
