"""One janitor: a store, its memory, a clock and a source of snapshots, and what can be asked of them.

The commands, the daemon and the tests all come through here. Every question begins the same way (``_prepare``): read
the clocks, the state and the snapshot, and run the guards. After that a plan walks with an act that does nothing, a
run with one that deletes; what was learnt is saved at the end, in one transaction, after the store's own writes are
durable. A run that dies in between has forgotten nothing but its report: the next one finds the same rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from janitor import boundary, frontier, guards, plan, txstate
from janitor.boundary import Boundary
from janitor.pacing import Pacer
from janitor.policy import Hold
from janitor.report import ForeignKey, GuardNote, Mode, Report, Tally
from janitor.state.base import Claim, ClockAnchor, Evidence, OpenIdRecord, RunRecord, State, StoreRecord
from janitor.sweep import Sweep
from janitor.txstate import TransactionView, TxState
from janitor.walk import Act, Observer, Preview, Walk
from janitor.world import Limits, Terms, World
from tms_core.clock import Clock
from tms_core.errors import NotAdopted, TmsError
from tms_core.tables.base import Store
from tms_core.topic import TopicId
from tms_core.transaction.source import SnapshotSource

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
THOROUGH_EVERY_MS = 24 * 3600 * 1000

NOT_ADOPTED = GuardNote(
    "adoption", True, "nobody has adopted this store yet, nothing is deleted; look at janitor plan, then: janitor adopt"
)

logger = logging.getLogger(__name__)


class _Guarded:
    """An observer that cannot hurt: one that fails is named in the log and not called again (rule S15)."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        try:
            self._observer(phase, topic, rows)
        # Whatever it raises: showing progress must never stop a deletion half-way.
        except Exception:
            logger.exception("showing progress failed; the run goes on without it")
            self._observer = tell_nobody


def tell_nobody(phase: str, topic: TopicId | None, rows: int) -> None:
    """The observer of runs nobody watches."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What every question begins with.

    Attributes:
        now: the clocks; ``wall_ms`` is the moment rows are judged by.
        record: what is known of the store; a fresh one for a store that is not the one remembered.
        open_ids: invalid pointers whose clients may still write.
        gone_ids: such pointers that have left the invalid list.
    """

    now: ClockAnchor
    record: StoreRecord
    tx: TxState
    open_ids: list[OpenIdRecord]
    gone_ids: list[int]
    notes: list[GuardNote]

    @property
    def stopped(self) -> bool:
        """Whether nothing may be written."""
        return self.record.adopted_ms is None or any(note.tripped for note in self.notes)


@dataclass(slots=True)
class Pass:
    """A walk under way, and what is counted of it."""

    id: str
    mode: Mode
    started_ms: int
    running_ms: int
    calls: int
    ready: Prepared
    world: World
    tally: Tally
    boundary: int | None = None
    failed: frozenset[bytes] = frozenset()


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
        self._observer = _Guarded(observer)
        self._named: set[ForeignKey] = set()

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
        strange = ready.record.adopted_ms is None or any(note.guard == "identity" for note in ready.notes)
        label = Hold.FIRST_CONTACT if strange else None
        world = self._world(ready, thorough=True, patterns=patterns, label=label)
        world.load_topics()
        current = self._begin("plan", ready, world)
        claim = self.state.claim()
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
        obstacles = self._obstacles(ready.tx)
        if obstacles:
            return self.state.claim(), Boundary.none(*obstacles)
        pointers = [record.pointer for record in ready.open_ids]
        return self.state.claim(), boundary.claim(self.state.evidence(), pointers, self.terms.lifetime)

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
        """
        ready = self._prepare()
        if ready.record.adopted_ms is None:
            raise NotAdopted("Nobody has adopted this store yet.", "Look at janitor plan, then: janitor adopt")
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
            adopt: accept the store first, as :meth:`adopt` does.
            patterns: shell patterns of the topics to do; such a pass claims nothing.

        Raises:
            StoreError: the store or the state failed as a whole.
        """
        ready = self._prepare()
        if adopt:
            ready, _ = self._adopt(ready)
        last = self.state.last_thorough_ms()
        thorough = last is None or ready.now.wall_ms - last >= THOROUGH_EVERY_MS
        world = self._world(ready, thorough=thorough, patterns=patterns)
        return self._sweep(ready, world, self._conclude_run)

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
        if adopt:
            ready, _ = self._adopt(ready)
        now = replace(ready.now, wall_ms=min(ready.now.wall_ms, wanted.effective_now_ms))
        ready = replace(ready, now=now)
        world = self._world(ready, thorough=True, only=wanted.pointers, limits=wanted.limits)
        return self._sweep(ready, world, self._conclude_apply)

    def _sweep(self, ready: Prepared, world: World, conclude: Callable[[Pass], None]) -> Report:
        current = self._begin("apply", ready, world)
        self.state.begin_run(RunRecord(current.id, current.mode, current.started_ms))
        try:
            if not ready.stopped:
                world.load_topics()
                sweep = Sweep(self.store, Pacer(self._rows_per_second, self._clock))
                self._walk(current, sweep)
                with self._phase(current, "sync"):
                    sweep.sync()
                with self._phase(current, "compact"):
                    sweep.deleted.compact(lambda: self._observer("compact", None, 0))
        except TmsError as error:
            self.state.finish_run(current.id, self._clock.now_ms(), "failed", json.dumps({"error": str(error)}))
            raise
        with self.state.transaction():
            if not ready.stopped:
                conclude(current)
            report = self._report(current)
            result = "stopped" if ready.stopped else "partial" if report.errors else "done"
            self.state.finish_run(current.id, self._clock.now_ms(), result, json.dumps(report.to_json()))
        return report

    # -- before a pass -------------------------------------------------------------------------------------------

    def _prepare(self, at_ms: int | None = None) -> Prepared:
        now = guards.read_clocks(self._clock)
        notes = [guards.check_clock(self.state.anchor(), now, self.terms.lifetime.allowance_ms)]
        if at_ms is not None:
            now, notes = replace(now, wall_ms=at_ms), []
        record, note = self._known_store()
        notes.append(note)
        tx = txstate.refresh(
            self._source,
            now.wall_ms,
            interval_seconds=self.terms.snapshot_interval_seconds,
            allowance_ms=self.terms.lifetime.allowance_ms,
        )
        system = guards.check_transaction_system(record, tx.usable)
        if system is not None:
            notes.append(system)
        open_ids: list[OpenIdRecord] = []
        gone_ids: list[int] = []
        if tx.usable is not None:
            open_ids, gone_ids = txstate.observe(self.state.open_ids(), tx.usable.invalid, now.wall_ms)
        return Prepared(now, record, tx, open_ids, gone_ids, [note for note in notes if note is not None])

    def _known_store(self) -> tuple[StoreRecord, GuardNote | None]:
        """What is remembered of the store. One that is not the one remembered is a first contact (rule S13)."""
        identity = self.store.identity()
        record = self.state.store()
        if record is None:
            record = StoreRecord.first_contact(identity, self._token_hex)
            self.state.save_store(record)
            return record, None
        note = guards.check_store(record, identity)
        if note is None:
            return record, None
        return StoreRecord(mark=guards.successor_mark(record.mark, identity), identity=identity), note

    def _world(
        self,
        ready: Prepared,
        *,
        thorough: bool,
        patterns: tuple[str, ...] = (),
        label: Hold | None = None,
        only: frozenset[int] | None = None,
        limits: Limits | None = None,
    ) -> World:
        usable = ready.tx.usable
        since_ms = None
        if usable is not None and len(usable.invalid):
            since_ms = 0 if thorough else txstate.search_since_ms(ready.open_ids, self.terms.lifetime)
        return World(
            now=ready.now,
            metadata=self.store.metadata,
            terms=self.terms,
            transactions=TransactionView(usable, ready.now.wall_ms, self.terms.lifetime.max_ms, only),
            records=self.state.frontiers(),
            search_since_ms=since_ms,
            thorough=thorough,
            label=label,
            patterns=patterns,
            limits=limits,
        )

    def _adopt(self, ready: Prepared) -> tuple[Prepared, list[TopicId]]:
        world = self._world(ready, thorough=False, label=Hold.FIRST_CONTACT)
        world.load_topics()
        topics = {work.topic.topic: frontier.admit(work.topic, ready.now) for work in world.topics.values()}
        record = _seen(replace(ready.record, adopted_ms=ready.now.wall_ms), ready.tx)
        with self.state.transaction():
            self.state.save_store(record)
            self.state.save_frontiers(topics)
            self.state.save_anchor(ready.now)
        warnings = [note for note in ready.notes if not note.tripped]
        return replace(ready, record=record, notes=warnings), sorted(topics)

    # -- a pass --------------------------------------------------------------------------------------------------

    def _begin(self, mode: Mode, ready: Prepared, world: World) -> Pass:
        started_ms = self._clock.now_ms()
        run_id = f"{started_ms}-{self._token_hex(4)}"
        return Pass(
            run_id, mode, started_ms, self._clock.running_ms(), self.store.calls.total(), ready, world, Tally()
        )

    def _walk(self, current: Pass, act: Act) -> None:
        walk = Walk(
            self.store, current.world, act, current.tally, page_rows=self._batch_rows, observer=self._observer
        )
        with self._phase(current, "message"):
            walk.messages()
        with self._phase(current, "invert"):
            walk.inversions()
        with self._phase(current, "payload"):
            walk.payloads()
        current.failed = frozenset(walk.failed)

    @contextmanager
    def _phase(self, current: Pass, name: str) -> Iterator[None]:
        started = self._clock.running_ms()
        yield
        current.tally.phase_seconds[name] = (self._clock.running_ms() - started) / 1000

    # -- after a pass --------------------------------------------------------------------------------------------

    def _conclude_apply(self, current: Pass) -> None:
        """A plan file carried out moves no frontier and claims nothing."""
        self._save_sight(current.ready)

    def _conclude_run(self, current: Pass) -> None:
        """Save what the pass has reached."""
        ready, world = current.ready, current.world
        self._save_sight(ready)
        self.state.save_frontiers(
            {
                work.topic.topic: work.record
                for key, work in world.topics.items()
                if key not in current.failed and world.in_scope(key)
            }
        )
        complete = not current.tally.errors and not world.patterns
        open_ids = ready.open_ids
        if complete and ready.tx.usable is not None:
            now_ms = self._clock.now_ms()
            open_ids = txstate.covered(open_ids, ready.now.wall_ms, now_ms, self.terms.lifetime)
            self._save_evidence(current, [record.pointer for record in open_ids if record.closed_ms is None])
        self.state.save_open_ids(open_ids)
        self.state.forget_open_ids(ready.gone_ids)
        if complete and world.thorough:
            self.state.save_last_thorough_ms(ready.now.wall_ms)

    def _save_sight(self, ready: Prepared) -> None:
        """Remember the clocks and the transaction system as they were seen."""
        self.state.save_anchor(guards.next_anchor(self.state.anchor(), guards.read_clocks(self._clock)))
        self.state.save_store(_seen(ready.record, ready.tx))

    def _save_evidence(self, current: Pass, open_pointers: list[int]) -> None:
        """Rule S4: this pass has covered everything, so what it stands on may be claimed."""
        ready = current.ready
        usable = ready.tx.usable
        if usable is None:
            return
        bound = max(0, usable.prune_upper_bound())
        interval = Evidence(b"", None, usable.timestamp_ms, bound, ready.now.wall_ms, current.id)
        self.state.replace_evidence([interval])
        if self._obstacles(ready.tx):
            return
        current.boundary = boundary.claim([interval], open_pointers, self.terms.lifetime).bound
        if current.boundary is not None:
            self.state.save_claim(Claim(current.boundary, ready.now.wall_ms, current.id))

    def _obstacles(self, tx: TxState) -> list[str]:
        """Why nothing can be claimed, whatever the evidence."""
        obstacles = []
        if not self.terms.lifetime_known:
            obstacles.append(
                "transactions.max_lifetime_seconds is not set, so it is not known how long a transaction may write; "
                "set it to what the servers enforce (data.tx.max.lifetime)"
            )
        if tx.usable is None:
            obstacles.append(tx.message)
        return obstacles

    def _report(self, current: Pass) -> Report:
        ready, tally = current.ready, current.tally
        self._name_foreign(tally)
        notes = list(ready.notes)
        if current.mode == "apply" and ready.record.adopted_ms is None:
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
            store_calls=self.store.calls.total() - current.calls,
            duration_seconds=(self._clock.running_ms() - current.running_ms) / 1000,
            phase_seconds=tally.phase_seconds,
            thorough=current.world.thorough,
        )

    def _name_foreign(self, tally: Tally) -> None:
        """Name foreign rows in the log, each once in this process (rule L0)."""
        for found in tally.foreign:
            if found not in self._named:
                logger.warning("left alone: a row of the %s table that is none of ours, key %s", *found)
                self._named.add(found)


def _seen(record: StoreRecord, tx: TxState) -> StoreRecord:
    """The record with the transaction system as it was seen; unchanged without a usable snapshot."""
    usable = tx.usable
    if usable is None:
        return record
    return replace(record, snapshot_timestamp_ms=usable.timestamp_ms, snapshot_write_pointer=usable.write_pointer)
