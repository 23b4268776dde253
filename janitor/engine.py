"""One janitor: a store, its memory, a clock and a source of snapshots, and what can be asked of them.

The commands, the daemon and the tests all come through here. Every question begins the same way (``prepare``): read the
clocks, the state and the snapshot, and run the guards. After that a plan walks with an act that does nothing, a
run with one that deletes; what was learnt is saved at the end, in one transaction, after the store's own writes are
durable. A run that dies in between has forgotten nothing but its report: the next one finds the same rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from janitor import boundary, conclude, frontier, guards, plan, txstate
from janitor.boundary import Boundary
from janitor.conclude import Pass
from janitor.inspect import Audit, audit
from janitor.inversions import Inversions
from janitor.messages import Messages
from janitor.observe import Guarded, Observer, tell_nobody
from janitor.pacing import Pacer
from janitor.payloads import Payloads
from janitor.policy import Hold
from janitor.prepare import Prepared, prepare
from janitor.report import ForeignKey, GuardNote, Mode, Report, Tally
from janitor.state.base import Claim, RunRecord, State
from janitor.sweep import Sweep
from janitor.txstate import TransactionView, TxState
from janitor.walk import Act, Preview, Walk
from janitor.world import Limits, Terms, World
from tms_core.clock import Clock
from tms_core.errors import GuardTripped, NotAdopted, StoreError, TmsError
from tms_core.tables.base import Store
from tms_core.topic import TopicId
from tms_core.transaction.source import SnapshotSource

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
THOROUGH_EVERY_MS = 24 * 3600 * 1000

NOT_ADOPTED = GuardNote(
    "adoption", True, "nobody has adopted this store yet, nothing is deleted; look at janitor plan, then: janitor adopt"
)

logger = logging.getLogger(__name__)


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
        rows_per_second: the limit on deleting; None for none.
        history_days: how long past runs are remembered.
        observer: told about progress.
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
        rows_per_second: float | None = None,
        history_days: int = 30,
        observer: Observer = tell_nobody,
    ) -> None:
        self.store = store
        self.state = state
        self.terms = terms
        self._source = source
        self._clock = clock
        self._token_hex = token_hex
        self._batch_rows = batch_rows
        self._rows_per_second = rows_per_second
        self._history_ms = history_days * 86_400_000
        self._observer = Guarded(observer)
        self._named: set[ForeignKey | TopicId] = set()

    # -- questions -----------------------------------------------------------------------------------------------

    def plan(
        self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), out: Path | None = None, digest: str = ""
    ) -> Report:
        """What a run would do, without doing it.

        Args:
            at_ms: judge by another moment than the present; such a plan cannot be applied.
            patterns: shell patterns of the topics to look at; none for all.
            out: write a plan file there.
            digest: names the settings in force, for the file.

        Raises:
            StoreError: the store or the state could not be read.
            OSError: the plan file could not be written.
        """
        ready = self._prepare(at_ms)
        label = Hold.FIRST_CONTACT if ready.first_contact else None
        world = self._world(ready, thorough=True, patterns=patterns, label=label)
        world.load_topics()
        current = self._begin("plan", ready, world)
        claim = self._claim(ready)
        current.boundary = claim.bound if claim else None
        self._walk(current, Preview())
        report = self._report(current)
        if out is not None:
            store_id = ready.record.mark
            plan.write(out, report, current.tally, world, store_id=store_id, digest=digest, what_if=at_ms is not None)
        return report

    def boundary(self) -> tuple[Claim | None, Boundary]:
        """The claim last made, and what would hold one back that were made now."""
        ready = self._prepare()
        claim = self._claim(ready)
        obstacles = conclude.obstacles(ready, self.terms)
        if obstacles:
            return claim, Boundary.none(*obstacles)
        pointers = [record.pointer for record in ready.open_ids]
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
        known = self.state.open_ids()
        return audit(
            self.store.message,
            claim.bound if claim else None,
            lambda pointer: pointer in known or (usable is not None and usable.is_invalid(pointer)),
            self.heartbeat,
        )

    def heartbeat(self, rows: int) -> None:
        """Tell the observer that a read outside a pass has come so many rows further."""
        self._observer("read", None, rows)

    def transactions(self) -> TxState:
        """The snapshot a run would use now, or why it would use none."""
        return self._prepare().tx

    # -- decisions of an operator --------------------------------------------------------------------------------

    def adopt(self) -> list[TopicId]:
        """Accept this store, this transaction system and this clock as they are now.

        Returns:
            The topics whose rows may go from now on as they come due.
        """
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

    # -- runs ----------------------------------------------------------------------------------------------------

    def run_once(self, *, adopt: bool = False, patterns: tuple[str, ...] = ()) -> Report:
        """One pass that deletes and inverts what the law and the frontiers allow.

        A run that a guard stops changes nothing and says so in its report; a topic that fails is in the report's
        errors and the others are done.

        Args:
            adopt: accept a store met for the first time, as :meth:`adopt` does. Without effect on one that is adopted,
                also when a guard stops the run: only :meth:`adopt` and :meth:`approve` settle that.
            patterns: shell patterns of the topics to do; such a pass claims nothing.

        Raises:
            StoreError: the store or the state failed as a whole.
        """
        ready = self._prepare()
        if adopt and not ready.adopted:
            ready, _ = self._adopt(ready)
        world = self._world(ready, thorough=self._thorough_is_due(ready), patterns=patterns)
        return self._sweep(ready, world, moves_frontiers=True)

    def apply(self, path: Path, *, adopt: bool = False) -> Report:
        """Carry out a plan file: at most what it shows, and nothing the law no longer allows.

        Raises:
            ConfigurationError: the file is no plan, damaged, or a what-if plan.
            PlanRefused: what it rests on has moved; nothing was done.
            StoreError: the store or the state failed as a whole.
        """
        wanted = plan.read(path)
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
        self.state.begin_run(RunRecord(current.id, current.mode, current.started_ms))
        try:
            if not ready.stopped:
                self._sweep_store(current, moves_frontiers)
        except TmsError as error:
            self.state.finish_run(current.id, self._clock.now_ms(), "failed", json.dumps({"error": str(error)}))
            raise
        claim = self._claim(ready)
        current.boundary = claim.bound if claim else None
        report = self._report(current)
        result = "stopped" if ready.stopped else "partial" if report.errors else "done"
        with self.state.transaction():
            self.state.finish_run(current.id, self._clock.now_ms(), result, json.dumps(report.to_history()))
            self.state.prune_runs(current.started_ms - self._history_ms)
        return report

    def _sweep_store(self, current: Pass, moves_frontiers: bool) -> None:
        current.world.load_topics()
        sweep = Sweep(self.store, Pacer(self._rows_per_second, self._clock))
        self._walk(current, sweep)
        with self._phase(current, "sync"):
            sweep.sync()
        with self.state.transaction():
            self._conclude(current, moves_frontiers)
        with self._phase(current, "compact"):
            try:
                sweep.deleted.compact(lambda: self._observer("compact", None, 0))
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
        return ready.tx.usable is not None and all(item.started_ms < last for item in self.state.evidence())

    def _claim(self, ready: Prepared) -> Claim | None:
        """The claim in force: not of another store, nor by a clock set back since, nor with a lifetime raised since."""
        claim = self.state.claim()
        if claim is None or ready.first_contact or claim.made_ms > self._clock.now_ms():
            return None
        return claim if claim.bound <= boundary.newest_settled(claim.made_ms, self.terms.lifetime) else None

    def _world(
        self,
        ready: Prepared,
        *,
        thorough: bool,
        patterns: tuple[str, ...] = (),
        label: Hold | None = None,
        limits: Limits | None = None,
    ) -> World:
        usable = ready.tx.usable
        since_ms = None
        if usable is not None and len(usable.invalid):
            since_ms = 0 if thorough else txstate.search_since_ms(ready.open_ids, self.terms.lifetime)
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
        return Pass(run_id, mode, started_ms, self._clock.running_ms(), self.store.operations, ready, world, Tally())

    def _walk(self, current: Pass, act: Act) -> None:
        walk = Walk(self.store, current.world, act, current.tally, page_rows=self._batch_rows, observer=self._observer)
        with self._phase(current, "message"):
            Messages(walk).delete()
        with self._phase(current, "invert"):
            Inversions(walk).invert()
        with self._phase(current, "payload"):
            Payloads(walk).delete()
        current.failed = frozenset(walk.failed)

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
        self._name_strangers(tally)
        notes = list(ready.notes)
        if current.mode == "apply" and not ready.adopted:
            notes.append(NOT_ADOPTED)
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
            store_calls=self.store.operations - current.calls,
            duration_seconds=(self._clock.running_ms() - current.running_ms) / 1000,
            phase_seconds=tally.phase_seconds,
            thorough=current.world.thorough,
        )

    def _name_strangers(self, tally: Tally) -> None:
        """Name foreign rows (rule L0) and unknown topics (L1) in the log, each once in this process."""
        for found in tally.foreign:
            if found not in self._named:
                logger.warning("left alone: a row of the %s table that is none of ours, key %s", *found)
        for topic in sorted(tally.unknown):
            if topic not in self._named:
                logger.warning("left alone: rows of topic %s, which has no metadata that can be read", topic)
        self._named.update(tally.foreign, tally.unknown)
