"""What can be asked of a store without changing anything in it: what a run would do, and why, and what is proven.

Every question begins the same way (``prepare``): read the clocks, the state and the snapshot, and run the guards. A
plan then walks the store as a run does, with an act that does nothing. Whoever only asks is given an :class:`Inquiry`
on a clone of the store or on its face for reading, so there is nothing at hand that could write (rule S5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Required, TypedDict

from janitor.archive import index as archived
from janitor.archive.restore import Request, Restored, restore
from janitor.boundary import claim as boundary
from janitor.boundary import coverage as rounds
from janitor.boundary.claim import Boundary, Limit
from janitor.boundary.coverage import Round
from janitor.inspect.answer import Why
from janitor.inspect.rows import (
    Audit,
    Heartbeat,
    Inspected,
    Table,
    audit,
    messages,
    metadata,
    payloads,
    snapshot_figures,
)
from janitor.inspect.why import why
from janitor.law.policy import Hold
from janitor.report import GuardNote, Mode, Report
from janitor.run import conclude, quarantine
from janitor.run import plan_file as plan
from janitor.run.conclude import Pass
from janitor.run.prepare import Prepared, prepare
from janitor.run.unrecognised import UnrecognisedRows
from janitor.state.base import Claim, State
from janitor.sweep import transactions as txstate
from janitor.sweep.consumer_holds import ConsumerHolds
from janitor.sweep.context import Limits, RunContext, Terms, nobody_knows
from janitor.sweep.executor import Preview
from janitor.sweep.outcome import Outcome
from janitor.sweep.permission import never
from janitor.sweep.progress import Guarded, Observer, tell_nobody
from janitor.sweep.scan import Act, Part
from janitor.sweep.sweep import Division, Over, Threads, sweep_store
from janitor.sweep.transactions import TransactionView, TxState
from tms_core.clock import Clock
from tms_core.consumers.positions import Floor
from tms_core.errors import Halted, Interrupted, NoSnapshot
from tms_core.rowkey import MessageId
from tms_core.tables.base import Store
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.source.source import SnapshotSource

NOT_ADOPTED = GuardNote(
    "adoption", True, "this store is not adopted yet, nothing is deleted; look at janitor plan, then: janitor adopt"
)


class Planned(NamedTuple):
    """A plan, and the document of its file (:func:`janitor.run.plan_file.save`)."""

    report: Report
    document: dict[str, Any]


class Options(TypedDict, total=False):
    """Further arguments of :class:`Inquiry`."""

    token_hex: Required[Callable[[int], str]]
    batch_rows: int
    workers: int
    division: Division | None
    history_days: int
    observer: Observer
    halted: Callable[[], bool]
    unrecognised: UnrecognisedRows | None
    expiries: Expiries | None
    floor: Floor | None
    newborn: Callable[[TopicMetadata], bool]


class Inquiry:
    """Answers questions about one store.

    Args:
        store: the store, or a clone of it, or its face for reading.
        state: what is remembered of it.
        source: where transaction snapshots come from; None for nowhere.
        clock: what time it is.
        terms: the settings verdicts rest on.
        token_hex: makes that many random bytes, as hex (``secrets.token_hex``).
        batch_rows: rows per page, and so per batch of a run.
        workers: how many parts of the store are swept at once.
        division: who does it instead, and in which parts; None: threads of this process.
        history_days: how long past runs are remembered.
        observer: told about progress.
        halted: whether to end before the next page or batch.
        unrecognised: what was named in the log already; the questions and runs of one process share it.
        expiries: messages with a ttl of their own (L6); None: there are none.
        floor: holds what registered consumers have not read; None: nothing is held for them.
        newborn: whether a topic is known to have been made with nothing in it, so that it need not be held.
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
        division: Division | None = None,
        history_days: int = 30,
        observer: Observer = tell_nobody,
        halted: Callable[[], bool] = never,
        unrecognised: UnrecognisedRows | None = None,
        expiries: Expiries | None = None,
        floor: Floor | None = None,
        newborn: Callable[[TopicMetadata], bool] = nobody_knows,
    ) -> None:
        self.store = store
        self.state = state
        self.terms = terms
        self.unrecognised = unrecognised or UnrecognisedRows()
        self._source = source
        self._clock = clock
        self._token_hex = token_hex
        self._batch_rows = batch_rows
        self._division = division or Threads(workers)
        self._history_ms = history_days * 86_400_000
        self._observer = Guarded(observer)
        self._halted = halted
        self._expiries = expiries
        self._floor = floor
        self._newborn = newborn

    def plan(self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "") -> Planned:
        """What a run would do, without doing it; the next run then looks at everything, as this did.

        Args:
            at_ms: judge by another moment than the present; such a plan cannot be applied.
            patterns: shell patterns of the topics to look at; none for all.
            digest: names the settings in force, for the plan file.

        Raises:
            StoreError: the store or the state could not be read.
            Halted: the process is ending.
        """
        current = self._intend(self._prepare(at_ms), patterns, thorough=True)
        report = self._foresee(current)
        store_id, what_if = current.ready.record.mark, at_ms is not None
        if report.entries and not what_if:
            # A frequent run searches less, and would leave some of it for a day.
            self.state.save_note(rounds.WANTED, current.ready.now.wall_ms)
        document = plan.document(
            report, current.outcome, current.context, store_id=store_id, digest=digest, what_if=what_if
        )
        return Planned(report, document)

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
        context = self._context(ready, thorough=True, patterns=(str(topic),), label=label)
        context.load_topics()
        history_days = self._history_ms // 86_400_000
        return why(self.store, self.state, context, topic, message_id, ready.now.wall_ms, history_days)

    def boundary(self) -> tuple[Claim | None, Boundary]:
        """The claim last made, and what would hold one back that were made now.

        Raises:
            StoreError: the store or the state could not be read.
        """
        ready = self._prepare()
        claim = self._claim(ready)
        obstacles = conclude.obstacles(ready, self.terms, self.store)
        if obstacles:
            return claim, Boundary.none(*obstacles)
        pointers = (record.pointer for record in ready.ids.open_ids())
        found = boundary.claim(self.state.evidence(), pointers, self.terms.lifetime)
        refuted = rounds.refutation(self.state)
        if refuted is not None:
            found = replace(found, bound=None, obstacles=(refuted.message, *found.obstacles))
        return claim, replace(found, limits=tuple(map(self._with_region, found.limits)))

    def verify(self) -> Audit:
        """Read every transactional row, and prove the claim or refute it; one that is refuted is withdrawn.

        A pointer counts as invalid that is in the invalid list now, or was when it was last seen: an operator may
        have taken it off the list because of the claim.

        Raises:
            StoreError: the store could not be read, or the state not read or written.
        """
        found = self._audit(self._prepare(), self.heartbeat)
        if found.refuted:
            rounds.refute(self.state, found.refutation, self._clock.now_ms())
        known = rounds.refutation(self.state)
        found.withdrawn = known.message if known is not None else ""
        return found

    def _audit(self, ready: Prepared, heartbeat: Heartbeat) -> Audit:
        usable, claim = ready.tx.usable, self._claim(ready)
        known = self.state.known_ids(ready.now.wall_ms, self.terms.lifetime.window_end_ms(0))
        return audit(
            # Each part by itself: a key may be there under a second salt, which the whole shows once.
            [part.message for part in self.store.parts()],
            claim.bound if claim else None,
            lambda pointer: pointer in known or (usable is not None and usable.is_invalid(pointer)),
            heartbeat,
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

    # -- what a plan and a run have in common -----------------------------------------------------------------------

    def _prepare(self, at_ms: int | None = None) -> Prepared:
        return prepare(self.state, self.store, self._source, self._clock, self.terms, self._token_hex, at_ms)

    def _with_region(self, limit: Limit) -> Limit:
        return limit if limit.start is None else replace(limit, region=self.store.region(limit.start))

    def _quarantined(self, ready: Prepared) -> frozenset[TopicId]:
        return quarantine.quarantined(self.state.strikes(), ready.now.wall_ms)

    def _claim(self, ready: Prepared) -> Claim | None:
        """The claim in force: not of another store, nor by a clock set back since, nor with a lifetime raised since."""
        claim = self.state.claim()
        if claim is None or ready.first_contact or ready.speaks_against(claim):
            return None
        now_ms, evidence = self._clock.now_ms(), self.state.evidence()
        return claim if boundary.in_force(claim, evidence, now_ms, self.terms.lifetime) else None

    def _context(
        self,
        ready: Prepared,
        *,
        thorough: bool,
        patterns: tuple[str, ...] = (),
        label: Hold | None = None,
        limits: Limits | None = None,
        patient: bool = False,
    ) -> RunContext:
        usable = ready.tx.usable
        since_ms = None
        if usable is not None and len(usable.invalid):
            since_ms = 0 if thorough else txstate.search_since_ms(ready.ids.open_ids(), self.terms.lifetime)
        return RunContext(
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
            consumers=ConsumerHolds(self._floor) if self._floor is not None else None,
            newborn=self._newborn,
        )

    def _restore(self, folder: Path, request: Request) -> Restored:
        files, now_ms = archived.find_topic(folder, request.source), self._clock.now_ms()
        transactions = TransactionView(self.transactions().usable, now_ms, self.terms.lifetime.undecided_ms)
        return restore(self.store, self.state, transactions, files, request, now_ms, self.heartbeat)

    def _intend(self, ready: Prepared, patterns: tuple[str, ...], *, thorough: bool) -> Pass:
        """A plan that has yet to look."""
        label = Hold.FIRST_CONTACT if ready.first_contact else None
        current = self._begin("plan", ready, self._context(ready, thorough=thorough, patterns=patterns, label=label))
        claim = self._claim(ready)
        current.boundary = claim.bound if claim else None
        return current

    def _foresee(self, current: Pass) -> Report:
        """Look, and change nothing."""
        current.context.load_topics()
        self._walk(current, Preview(self._stop_if_halted, self._observer))
        if current.halted is not None:
            raise current.halted
        return self._report(current)

    def _begin(self, mode: Mode, ready: Prepared, context: RunContext) -> Pass:
        started_ms = self._clock.now_ms()
        run_id = f"{started_ms}-{self._token_hex(4)}"
        calls, refuted = Counter(self.store.calls), rounds.refutation(self.state)
        return Pass(
            run_id, mode, started_ms, self._clock.running_ms(), calls, ready, context, Outcome(), refutation=refuted
        )

    def _walk(self, current: Pass, act: Act, begin_round: Callable[[Sequence[Store]], Round] | None = None) -> None:
        """Take the steps of a pass; what was found and done is in its outcome.

        Raises:
            StoreError: the store failed as a whole.
        """
        planned = self._expiries if current.mode == "plan" else None

        def part_of(store: Store) -> Part:
            return Part.of(store, current.context, self._batch_rows, act, whole=self.store, planned=planned)

        with self._division.begin(current.id, current.mode, self.store, current.context) as (stores, run):
            parts = [part_of(store) for store in stores]
            over = Over(part_of(self.store), parts, self._expiries, begin_round, partial(self._phase, current))
            current.outcome += sweep_store(over, run)
        ended = current.outcome.ended
        if isinstance(ended, Interrupted):
            current.halted = ended
        elif ended is not None:
            raise ended

    def _stop_if_halted(self) -> None:
        if self._halted():
            raise Halted("the janitor is stopping.", "Try again when it is back.")

    @contextmanager
    def _phase(self, current: Pass, name: str) -> Iterator[None]:
        started = self._clock.running_ms()
        yield
        current.outcome.phase_seconds[name] = (self._clock.running_ms() - started) / 1000

    def _report(self, current: Pass) -> Report:
        ready, outcome = current.ready, current.outcome
        self.unrecognised.name(outcome)
        notes = list(ready.notes)
        if current.mode == "apply" and not ready.adopted:
            notes.append(NOT_ADOPTED)
        if current.halted is not None:
            name = "halted" if isinstance(current.halted, Halted) else "lease"
            notes.append(GuardNote(name, False, str(current.halted)))
        notes += conclude.notes_on_aside(current, self.state)
        notes += conclude.notes_on_consumers(current)
        if ready.tx.problem is not None:
            notes.append(GuardNote("snapshot", False, ready.tx.message))
        notes += [GuardNote("snapshot", False, f"passed over {item}") for item in ready.tx.rejected]
        notes += [GuardNote("metadata", False, message) for message in current.context.unparsed.values()]
        notes += current.notes
        return Report(
            id=current.id,
            mode=current.mode,
            started_ms=current.started_ms,
            effective_now_ms=ready.now.wall_ms,
            snapshot=ready.tx.used,
            entries=outcome.entries,
            kept=outcome.kept,
            boundary=current.boundary,
            guards=notes,
            errors=outcome.errors,
            store_calls=sum(conclude.calls_made(current, self.store).values()),
            seeks_spared=outcome.seeks_spared,
            duration_seconds=(self._clock.running_ms() - current.running_ms) / 1000,
            phase_seconds=outcome.phase_seconds,
            thorough=current.context.thorough,
            truncated=current.truncated,
        )
