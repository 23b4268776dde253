"""One janitor: a store, its memory, a clock and a source of snapshots, and what can be asked of them.

The commands, the daemon and the tests all come through here. Every question begins the same way (``prepare``): read the
clocks, the state and the snapshot, and run the guards. After that a plan walks with an act that does nothing, a
run with one that deletes; what was learnt is saved at the end, in one transaction, after the store's own writes are
durable. A run that dies in between has forgotten nothing but its report: the next one finds the same rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, Protocol

from janitor import archived, boundary, conclude, figures, frontier, guards, plan, quarantine, txstate
from janitor.boundary import Boundary
from janitor.conclude import Pass
from janitor.crew import Crew
from janitor.inspect import Audit, Inspected, Table, audit, messages, metadata, payloads, snapshot_figures
from janitor.ledger import KEPT_ENTRIES, Ledger
from janitor.observe import Guarded, Observer, tell_nobody
from janitor.pacing import Pacer
from janitor.permission import Permission, never
from janitor.plan import PlanFile
from janitor.policy import Hold
from janitor.prepare import Prepared, prepare
from janitor.report import GuardNote, Mode, Report, Tally
from janitor.restore import Request, Restored, restore
from janitor.state.base import Claim, RunRecord, State
from janitor.strangers import Strangers
from janitor.sweep import Keeper, Sweep
from janitor.txstate import TransactionView, TxState
from janitor.walk import Act, Preview
from janitor.why import Why, why
from janitor.world import Limits, Terms, World, parse_or_none
from tms_core.clock import Clock
from tms_core.errors import GuardTripped, Halted, Interrupted, LeaseLost, NoSnapshot, NotAdopted, StoreError
from tms_core.lease import Lease
from tms_core.rowkey import MessageId
from tms_core.tables.base import Store
from tms_core.topic import TopicId
from tms_core.transaction.source import SnapshotSource

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
THOROUGH_EVERY_MS = 24 * 3600 * 1000

NOT_ADOPTED = GuardNote(
    "adoption", True, "nobody has adopted this store yet, nothing is deleted; look at janitor plan, then: janitor adopt"
)


class Archive(Protocol):
    """Where rows go before they are deleted (``janitor.archive``)."""

    def begin(self, run_id: str, transactions: TransactionView) -> Keeper:
        """A keeper for one run's rows, which are kept with what the run knows of their transactions."""
        ...

    def expire(self, keep_days: int, now_ms: int) -> int:
        """Give up what was kept longer than that; returns how many files went."""
        ...


class Planned(NamedTuple):
    """A plan, and the document of its file (:func:`janitor.plan.save`)."""

    report: Report
    document: dict[str, Any]


class Engine:
    """Answers for one store.

    Args:
        store: the store, or a clone of it where only questions are asked.
        state: what is remembered of it.
        source: where transaction snapshots come from; None for nowhere.
        clock: what time it is.
        terms: the settings verdicts rest on.
        token_hex: makes that many random bytes, as hex (``secrets.token_hex``).
        batch_rows: rows per page and per batch.
        workers: how many parts of the store are walked at once.
        rows_per_second: the limit on deleting; None for none.
        history_days: how long past runs are remembered.
        observer: told about progress.
        lease: what runs write under; None where nothing else can write.
        halted: whether a run shall end before its next batch.
        archive: where rows go before they are deleted; None for nowhere.
        archive_days: how long they are kept there.
        strangers: what was named in the log already; engines of one process share it.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        source: SnapshotSource | None,
        clock: Clock,
        terms: Terms,
        *,
        token_hex: Callable[[int], str],
        batch_rows: int = 2000,
        workers: int = 1,
        rows_per_second: float | None = None,
        history_days: int = 30,
        observer: Observer = tell_nobody,
        lease: Lease | None = None,
        halted: Callable[[], bool] = never,
        archive: Archive | None = None,
        archive_days: int = 7,
        strangers: Strangers | None = None,
    ) -> None:
        self.store = store
        self.state = state
        self.terms = terms
        self._source = source
        self._clock = clock
        self._token_hex = token_hex
        self._batch_rows = batch_rows
        self._workers = workers
        self._rows_per_second = rows_per_second
        self._history_ms = history_days * 86_400_000
        self._observer = Guarded(observer)
        self._lease = lease
        self._halted = halted
        self._archive = archive
        self._archive_days = archive_days
        self.strangers = strangers or Strangers()
        self._turn = RLock()

    # -- questions -----------------------------------------------------------------------------------------------

    def plan(self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "") -> Planned:
        """What a run would do, without doing it.

        Args:
            at_ms: judge by another moment than the present; such a plan cannot be applied.
            patterns: shell patterns of the topics to look at; none for all.
            digest: names the settings in force, for the plan file.

        Raises:
            StoreError: the store or the state could not be read.
            Halted: the process is ending.
        """
        ready = self._prepare(at_ms)
        label = Hold.FIRST_CONTACT if ready.first_contact else None
        world = self._world(ready, thorough=True, patterns=patterns, label=label)
        world.load_topics()
        current = self._begin("plan", ready, world)
        claim = self._claim(ready)
        current.boundary = claim.bound if claim else None
        self._walk(current, Preview(self._stop_if_halted))
        if current.halted is not None:
            raise current.halted
        report = self._report(current)
        store_id, what_if = ready.record.mark, at_ms is not None
        document = plan.document(report, current.tally, world, store_id=store_id, digest=digest, what_if=what_if)
        return Planned(report, document)

    def rehearse(self, *, patterns: tuple[str, ...] = ()) -> Report:
        """A plan that is remembered as a run is, for a daemon that only plans (``janitor.apply: false``).

        Raises:
            StoreError, Halted: as :meth:`plan`.
        """
        report = self.plan(patterns=patterns).report
        with self.state.transaction():
            record = RunRecord(report.id, report.mode, report.started_ms)
            self.state.begin_run(record)
            self.state.finish_run(report.id, self._clock.now_ms(), "done", json.dumps(report.to_history()))
            figures.save_plan(self.state, report)
            self.state.prune_runs(report.started_ms - self._history_ms)
        return report

    def remember_topics(self) -> None:
        """Read the metadata table, so that a topic is shown before the next sweep has come to it.

        Raises:
            StoreError: the store could not be read, or the state not written.
        """
        parsed = (parse_or_none(key, value) for key, value in self.store.metadata.rows())
        figures.save_topics(self.state, [topic for topic in parsed if topic is not None])

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

    def inspect(self, table: Table, patterns: tuple[str, ...], limit: int) -> Inspected:
        """The rows of one table, the first ones decoded, all of them counted.

        Raises:
            StoreError: the store could not be read.
        """
        if table == "metadata":
            return metadata(self.store, patterns)
        read = messages if table == "message" else payloads
        return read(self.store, self.transactions().usable, patterns, limit, self.heartbeat)

    def why(self, topic: TopicId, message_id: MessageId) -> Why:
        """Which rule will take a message, when, and what holds it; or which run has taken it.

        Raises:
            StoreError: the store or the state could not be read.
        """
        ready = self._prepare()
        label = Hold.FIRST_CONTACT if ready.first_contact else None
        world = self._world(ready, thorough=True, patterns=(str(topic),), label=label)
        world.load_topics()
        history_days = self._history_ms // 86_400_000
        return why(self.store, self.state, world, topic, message_id, ready.now.wall_ms, history_days)

    def boundary(self) -> tuple[Claim | None, Boundary]:
        """The claim last made, and what would hold one back that were made now."""
        ready = self._prepare()
        claim = self._claim(ready)
        obstacles = conclude.obstacles(ready, self.terms)
        if obstacles:
            return claim, Boundary.none(*obstacles)
        pointers = (record.pointer for record in ready.ids.open_ids())
        return claim, boundary.claim(self.state.evidence(), pointers, self.terms.lifetime)

    def audit(self) -> Audit:
        """Read every transactional row, and prove the claim or refute it.

        A pointer counts as invalid that is in the invalid list now, or was when it was last seen: an operator may
        have taken it off the list because of the claim.

        Raises:
            StoreError: the store or the state could not be read.
        """
        ready = self._prepare()
        usable, claim = ready.tx.usable, self._claim(ready)
        known = self.state.known_ids(ready.now.wall_ms, self.terms.lifetime.window_end_ms(0))
        return audit(
            self.store.message,
            claim.bound if claim else None,
            lambda pointer: pointer in known or (usable is not None and usable.is_invalid(pointer)),
            self.heartbeat,
        )

    def heartbeat(self, rows: int) -> None:
        """Tell the observer that a read outside a pass has come so many rows further.

        Raises:
            Halted: the process is ending.
        """
        self._observer("read", None, rows)
        self._stop_if_halted()

    def transactions(self) -> TxState:
        """The snapshot a run would use now, or why it would use none."""
        return self._prepare().tx

    def snapshot_figures(self, limit: int) -> dict[str, Any]:
        """That snapshot as JSON values, its longest lists cut to ``limit``; ``problem`` says why it is not used.

        Raises:
            NoSnapshot: there is none, and why.
        """
        state = self.transactions()
        if state.snapshot is None:
            raise NoSnapshot(f"There is no snapshot: {state.message}")
        return {**snapshot_figures(state.snapshot, state.name, limit), "problem": state.message or None}

    def restorable(self, folder: Path, request: Request) -> Restored:
        """What :meth:`restore` would do; raises as it does."""
        return self._restore(folder, replace(request, dry_run=True))

    def at_work(self) -> bool:
        """Whether a run, or a decision that excludes one, is under way in another thread."""
        if not self._turn.acquire(blocking=False):
            return True
        self._turn.release()
        return False

    # -- decisions of an operator --------------------------------------------------------------------------------

    def adopt(self) -> list[TopicId]:
        """Accept this store, this transaction system and this clock as they are now.

        Returns:
            The topics whose rows may go from now on as they come due.
        """
        with self._turn:
            return self._adopt(self._prepare())[1]

    def approve(self, patterns: tuple[str, ...] = ()) -> list[TopicId]:
        """Let held frontiers go with the next run.

        Args:
            patterns: shell patterns of topics; none approves all, and the machine's clock with them.

        Raises:
            NotAdopted: there is nothing to approve before the store is adopted.
            GuardTripped: some topics are named while the clock is in doubt; what is due by it is not known.
        """
        ready = self._prepare()
        if not ready.adopted:
            raise NotAdopted("Nobody has adopted this store yet.", "Look at janitor plan, then: janitor adopt")
        for note in ready.notes:
            if patterns and note.tripped and note.guard == "clock":
                raise GuardTripped(f"Nothing was approved: {note.message}.")
        world = self._world(ready, thorough=False, patterns=patterns)
        world.load_topics()
        held = {
            work.topic.topic: frontier.approve(work.record, work.topic)
            for work in world.topics.values()
            if work.frontier.hold is Hold.FRONTIER and world.in_scope(work.topic.topic.prefix)
        }
        with self.state.transaction():
            self.state.save_frontiers(held)
            if not patterns:
                self.state.save_anchor(ready.now)
        return sorted(held)

    def restore(self, folder: Path, request: Request) -> Restored:
        """Bring archived rows back (:func:`janitor.restore.restore`).

        Args:
            folder: the archive's.

        Raises:
            Refused, ArchiveError, StoreError: as that says; what was written until then stays.
        """
        with self._turn:
            return self._restore(folder, request)

    def _restore(self, folder: Path, request: Request) -> Restored:
        files, now_ms = archived.find_topic(folder, request.source), self._clock.now_ms()
        return restore(self.store, self.state, self.transactions().usable, files, request, now_ms, self.heartbeat)

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
            adopt: accept a store met for the first time, as :meth:`adopt` does. Without effect on one that is adopted,
                also when a guard stops the run: only :meth:`adopt` and :meth:`approve` settle that.
            patterns: shell patterns of the topics to do; such a pass claims nothing.
            patient: leave topics for later in which little has come due; for a daemon, which comes again soon.

        Raises:
            StoreError: the store or the state failed as a whole.
        """
        with self._turn:
            ready = self._prepare()
            if adopt and not ready.adopted:
                ready, _ = self._adopt(ready)
            thorough = self._thorough_is_due(ready)
            world = self._world(ready, thorough=thorough, patterns=patterns, patient=patient and not thorough)
            return self._sweep(ready, world, moves_frontiers=True)

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        """Carry out a plan file: at most what it shows, and nothing the law no longer allows.

        Raises:
            PlanRefused: what it rests on has moved; nothing was done.
            StoreError: the store or the state failed as a whole.
        """
        with self._turn:
            ready = self._prepare()
            present = self._world(ready, thorough=True)
            present.load_topics()
            wanted.check(ready.record.mark, self.terms, present)
            if adopt and not ready.adopted:
                ready, _ = self._adopt(ready)
            now = replace(ready.now, wall_ms=min(ready.now.wall_ms, wanted.effective_now_ms))
            ready = replace(ready, now=now)
            world = self._world(ready, thorough=True, limits=wanted.limits)
            return self._sweep(ready, world, moves_frontiers=False)

    def _sweep(self, ready: Prepared, world: World, *, moves_frontiers: bool) -> Report:
        current = self._begin("apply", ready, world)
        usable = ready.tx.usable
        ledger = Ledger(self.state, self._clock, current.id, usable.timestamp_ms if usable else None)
        self.state.begin_run(RunRecord(current.id, current.mode, current.started_ms, heartbeat_ms=current.started_ms))
        try:
            if not ready.stopped:
                self._sweep_store(current, ledger, moves_frontiers)
        # Also for a bug of ours: what was deleted has to be in the ledger, and the run must not look alive.
        except Exception as error:
            self._close(current, ledger, "failed", {"error": str(error)})
            raise
        claim = self._claim(ready)
        current.boundary = claim.bound if claim else None
        report = self._report(current)
        self._close(current, ledger, _result(current, report), report.to_history(), report)
        return report

    def _close(
        self, current: Pass, ledger: Ledger, result: str, history: dict[str, Any], report: Report | None = None
    ) -> None:
        """Remember how a run ended; unless its lease was lost and the next holder has closed it already."""
        with self.state.transaction():
            record = self.state.run(current.id)
            if record is None or record.finished_ms is not None:
                return
            self.state.finish_run(current.id, self._clock.now_ms(), result, json.dumps(history))
            self.state.add_ledger(ledger.entries())
            if report is None:
                self.state.add_counters(figures.results(result, 1))
            else:
                figures.save(self.state, current, report, result, conclude.calls_made(current, self.store))
            self.state.prune_runs(current.started_ms - self._history_ms)
        # What stands there after the lease was lost is another holder's.
        if not isinstance(current.halted, LeaseLost):
            self.state.clear_intents()

    def _sweep_store(self, current: Pass, ledger: Ledger, moves_frontiers: bool) -> None:
        current.world.load_topics()
        permission = Permission(self.state, self._lease, self._clock, current.id, self._halted)
        pacer = Pacer(self._rows_per_second, self._clock, permission.alive)
        keeper = self._archive.begin(current.id, current.world.transactions) if self._archive else None
        sweep = Sweep(self.store, permission, pacer, ledger, keeper)
        self._walk(current, sweep)
        with self._phase(current, "sync"):
            sweep.sync()
        if sweep.archive_error is not None:
            current.tally.errors.append(
                f"nothing more was deleted, since it could not be archived: {sweep.archive_error}"
            )
        if current.halted is not None or not self._concluded(current, moves_frontiers):
            return
        with self._phase(current, "compact"):
            self._compact(current, sweep, permission)

    def _concluded(self, current: Pass, moves_frontiers: bool) -> bool:
        """Save what the pass has reached, if this is still the one who may say so (rules S4, S12)."""
        with self.state.transaction():
            try:
                if self._lease is not None:
                    self._lease.check()
            except Interrupted as error:
                current.halted = error
                return False
            self._conclude(current, moves_frontiers)
            return True

    def _compact(self, current: Pass, sweep: Sweep, permission: Permission) -> None:
        def heartbeat() -> None:
            self._observer("compact", None, 0)
            permission.alive()

        try:
            sweep.deleted.compact(heartbeat)
        except Interrupted as error:
            current.halted = error
        except StoreError as error:
            # The rows are gone and what was reached is saved; only their space is not free yet.
            current.tally.errors.append(f"space was not given back: {error}")

    # -- before a pass -------------------------------------------------------------------------------------------

    def _prepare(self, at_ms: int | None = None) -> Prepared:
        identity = self.store.identity()
        return prepare(self.state, identity, self._source, self._clock, self.terms, self._token_hex, at_ms)

    def _thorough_is_due(self, ready: Prepared) -> bool:
        """Whether this run looks at everything: daily, and when the last such run could prove nothing."""
        last = self.state.last_thorough_ms()
        # A last time that lies ahead was written by a clock that has been set back since.
        if last is None or not 0 <= ready.now.wall_ms - last < THOROUGH_EVERY_MS:
            return True
        if ready.tx.usable is None or self.state.pauses() or self._quarantined(ready):
            return False  # it could prove nothing either
        return all(item.started_ms < last for item in self.state.evidence())

    def _quarantined(self, ready: Prepared) -> frozenset[TopicId]:
        return quarantine.quarantined(self.state.strikes(), ready.now.wall_ms)

    def _claim(self, ready: Prepared) -> Claim | None:
        """The claim in force: not of another store, nor by a clock set back since, nor with a lifetime raised since."""
        claim = self.state.claim()
        if claim is None or ready.first_contact:
            return None
        return claim if boundary.in_force(claim, self._clock.now_ms(), self.terms.lifetime) else None

    def _world(
        self,
        ready: Prepared,
        *,
        thorough: bool,
        patterns: tuple[str, ...] = (),
        label: Hold | None = None,
        limits: Limits | None = None,
        patient: bool = False,
    ) -> World:
        usable = ready.tx.usable
        since_ms = None
        if usable is not None and len(usable.invalid):
            since_ms = 0 if thorough else txstate.search_since_ms(ready.ids.open_ids(), self.terms.lifetime)
        return World(
            now=ready.now if label is Hold.FIRST_CONTACT else ready.measured,
            now_ms=ready.now.wall_ms,
            metadata=self.store.metadata,
            terms=self.terms,
            transactions=TransactionView(usable, ready.now.wall_ms, self.terms.lifetime.undecided_ms),
            records={} if label is Hold.FIRST_CONTACT else self.state.frontiers(),
            search_since_ms=since_ms,
            thorough=thorough,
            label=label,
            patterns=patterns,
            limits=limits,
            paused=tuple(pause.pattern for pause in self.state.pauses()),
            quarantined=self._quarantined(ready),
            patient=patient,
        )

    def _adopt(self, ready: Prepared) -> tuple[Prepared, list[TopicId]]:
        world = self._world(ready, thorough=False, label=Hold.FIRST_CONTACT)
        world.load_topics()
        topics = {work.topic.topic: work.record for work in world.topics.values()}
        record = ready.record
        if ready.adopted and ready.first_contact:
            # Another transaction system: what is known of open ids and claims is about the former one's.
            record = replace(record, mark=guards.successor_mark(record.mark, "transactions"))
        record = conclude.seen(replace(record, adopted_ms=ready.now.wall_ms), ready.tx)
        with self.state.transaction():
            self.state.save_store(record)
            self.state.save_frontiers(topics)
            self.state.save_anchor(ready.now)
        return self._prepare(), sorted(topics)

    # -- a pass --------------------------------------------------------------------------------------------------

    def _begin(self, mode: Mode, ready: Prepared, world: World) -> Pass:
        started_ms = self._clock.now_ms()
        run_id = f"{started_ms}-{self._token_hex(4)}"
        return Pass(
            run_id, mode, started_ms, self._clock.running_ms(), Counter(self.store.calls), ready, world, Tally()
        )

    def _walk(self, current: Pass, act: Act) -> None:
        crew = Crew(
            self.store,
            current.world,
            act,
            page_rows=self._batch_rows,
            observer=self._observer,
            workers=self._workers,
        )
        try:
            crew.walk(current.tally, partial(self._phase, current))
        except Interrupted as error:
            current.halted = error
        current.failed, current.withheld = crew.failed, crew.withheld

    def _stop_if_halted(self) -> None:
        if self._halted():
            raise Halted("the janitor is stopping.", "Try again when it is back.")

    @contextmanager
    def _phase(self, current: Pass, name: str) -> Iterator[None]:
        started = self._clock.running_ms()
        yield
        current.tally.phase_seconds[name] = (self._clock.running_ms() - started) / 1000

    def _conclude(self, current: Pass, moves_frontiers: bool) -> None:
        clocks = guards.read_clocks(self._clock)
        if moves_frontiers:
            conclude.conclude_run(current, self.state, self.terms, clocks, clocks.wall_ms)
        else:
            conclude.conclude_apply(current, self.state, clocks)

    def _report(self, current: Pass) -> Report:
        ready, tally = current.ready, current.tally
        self.strangers.name(tally)
        notes = list(ready.notes)
        if current.mode == "apply" and not ready.adopted:
            notes.append(NOT_ADOPTED)
        if current.halted is not None:
            name = "halted" if isinstance(current.halted, Halted) else "lease"
            notes.append(GuardNote(name, False, str(current.halted)))
        notes += conclude.notes_on_aside(current, self.state)
        if ready.tx.problem is not None:
            notes.append(GuardNote("snapshot", False, ready.tx.message))
        notes += [GuardNote("snapshot", False, f"passed over {item}") for item in ready.tx.rejected]
        notes += [GuardNote("metadata", False, message) for message in current.world.unparsed.values()]
        return Report(
            id=current.id,
            mode=current.mode,
            started_ms=current.started_ms,
            effective_now_ms=ready.now.wall_ms,
            snapshot=ready.tx.used,
            entries=tally.entries,
            kept=tally.kept,
            boundary=current.boundary,
            guards=notes,
            errors=tally.errors,
            store_calls=sum(conclude.calls_made(current, self.store).values()),
            duration_seconds=(self._clock.running_ms() - current.running_ms) / 1000,
            phase_seconds=tally.phase_seconds,
            thorough=current.world.thorough,
        )


def _result(current: Pass, report: Report) -> str:
    """How a run ended, in a word (``RunRecord.result``)."""
    if current.ready.stopped:
        return "stopped"
    if current.halted is not None:
        return "halted"
    return "partial" if report.errors or current.withheld else "done"
