"""The conclusions of a pass or an adoption, which are saved in the state after the store's writes are durable.

A run saves the frontiers of the topics that it has processed. If it was full and covered every topic, it also closes
open ids and may publish a boundary (invariant S4). The caller wraps all of this in one transaction.

Two facts are saved earlier: a detected jump, so that its hold ages even if every run is killed; and evidence of covered
intervals, which stays true if the run dies, so that the next run need not cover them again (:mod:`janitor.boundary`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from janitor import boundary
from janitor.boundary import Round
from janitor.rules.policy import Hold
from janitor.run import guards, passes
from janitor.run.prepare import IN_PROGRESS, Deps, make_run, remember_snapshot
from janitor.state import decided
from janitor.state.base import ClockAnchor, Evidence, FrontierRecord, ProvenBoundary, State, StoreRecord, Strikes
from janitor.state.records import LINEAGE, RESTORED, OpenIdRecord
from janitor.sweep import transactions as txstate
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Preparation, Run, TopicWork
from janitor.sweep.scan import Part, SearchScope
from janitor.sweep.sweep import Advance, Event, StepFinished, StepStarted
from janitor.sweep.transactions import TxState
from tms_core.errors import TmsError
from tms_core.tables.base import KeyRange
from tms_core.tables.record import SystemRecord, record_state, record_transactions, recorded_transactions
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState

#: The interval at which a run saves its progress, in milliseconds of monotonic time.
PROGRESS_MS = 10_000
#: Yields the records of its argument, and may stop the run between them.
Stoppable = Callable[[Iterable[OpenIdRecord]], Iterator[OpenIdRecord]]


def start_run(run: Run, state: State, clocks: ClockAnchor, stoppable: Stoppable, *, moves_frontiers: bool) -> None:
    """Save detected jumps before the run changes the store; call this inside the state's transaction.

    Args:
        clocks: the present readings of the machine's clocks.
        moves_frontiers: whether the run saves frontiers; False for a plan file.
    """
    conclude_apply(run, state, clocks, stoppable)
    if moves_frontiers:
        # S8: save jumps before the first deletion, so that a hold ages even if every later run is killed.
        state.save_frontiers(_seen_jumps(run, state.frontiers()))


def _seen_jumps(run: Run, present: Mapping[TopicId, FrontierRecord]) -> dict[TopicId, FrontierRecord]:
    """Return the frontier records that change with a topic's metadata: a new jump, or a reverted jump.

    A jump whose hold has expired stays in the record until all its rows are deleted.
    """
    changed = {}
    for work in run.topics.values():
        topic, hold, jump = work.topic.topic, work.frontier.hold, work.record.pending
        known = present.get(topic)
        if not run.in_scope(topic.prefix) or hold in (Hold.PAUSED, Hold.QUARANTINED, Hold.FIRST_CONTACT):
            continue
        if known is None:
            if jump is not None:
                changed[topic] = work.record
        elif known.pending is not None and jump is None:
            target = (work.topic.generation, work.topic.ttl_seconds, work.topic.consumed)
            if hold is Hold.PROTECTED or known.pending.target != target:
                changed[topic] = replace(known, pending=None)
        elif known.pending != jump:
            changed[topic] = replace(known, pending=jump)
    return changed


class Coverage:
    """The intervals that a full pass covers, saved after each part, or regularly if the store has one part (S4).

    It continues a round, and limits the search of the parts to intervals that are not covered yet.
    """

    def __init__(self, deps: Deps, run: Run, parts: Sequence[Part], stoppable: Stoppable) -> None:
        self._deps = deps
        self._run = run
        self._saved_ms = deps.clock.monotonic_ms()
        stores = [part.store for part in parts]
        with deps.as_holder(), deps.state.transaction():
            deps.check_lease()
            self.round = start_round(run, deps.state, stoppable)
        self._is_whole = boundary.is_whole(stores)
        if gaps := boundary.gaps(stores):
            self._save(gaps, None)
        for part in parts:
            if self.round.has_done(part.store):
                part.search = SearchScope(self.round.since_ms, everything=False)
            elif self._is_whole:
                covered = self.round.first_undone(part.store)
                part.search = SearchScope(part.search.since_ms, True, covered, self.round.since_ms)

    def consume(self, event: Event) -> None:
        """Save the intervals that are covered after an event of the pass."""
        match event:
            case StepStarted("payload", [part]) if self._is_whole:
                part.search = part.search._replace(covered=self.round.payloads_from)
            case Advance() if self._is_whole and self._is_due():
                self._save_advance(event)
            case StepFinished() if event.part.step == "invert":
                self._save_finished(event)

    def _save_advance(self, event: Advance) -> None:
        """Save the key up to which a store of one part was searched, or its payloads were read."""
        if event.part.step == "payload":
            # A later run starts at this key, so it would not retry a failed topic before the key.
            if not any(outcome.failed for outcome in event.so_far):
                with self._deps.as_holder():
                    self._deps.check_lease()
                    boundary.save_payloads(self._deps.state, self._run.id, event.key)
                self._saved_ms = self._deps.clock.monotonic_ms()
            return
        start = self.round.first_undone(event.part.store)
        is_new = not self.round.has_done(event.part.store) and start < event.key
        if is_new and not any(outcome.undone for outcome in event.so_far):
            untouchable = [outcome.untouchable for outcome in event.so_far if outcome.untouchable is not None]
            self._save([KeyRange(start, event.key)], min(untouchable, default=None))

    def _save_finished(self, event: StepFinished) -> None:
        """Save the rest of a part as covered, if nothing was left undone."""
        store, outcome = event.part.store, event.outcome
        if outcome.undone or self.round.has_done(store):
            return
        try:
            self._save([KeyRange(self.round.first_undone(store), store.span.stop)], outcome.untouchable)
        except TmsError as error:
            # The error stops the pass, but the outcomes of the other parts must still be counted.
            outcome.ended = error

    def _is_due(self) -> bool:
        return self._deps.clock.monotonic_ms() - self._saved_ms >= PROGRESS_MS

    def _save(self, covered: Sequence[KeyRange], untouchable: int | None) -> None:
        deps = self._deps
        # S4: sync the rows, then save the evidence about them. After a crash in between, a run searches again.
        deps.writable_store().sync()
        with deps.as_holder():
            # Check outside the state's transaction: other threads may be running, which take the lease's lock first.
            deps.check_lease()
            save_evidence(self._run, deps.state, covered, untouchable)
        self._saved_ms = deps.clock.monotonic_ms()


def start_round(run: Run, state: State, stoppable: Stoppable) -> Round:
    """Start or continue a round of full passes; call this inside the state's transaction.

    Invalid transactions are saved as seen, because coverage counts only for transactions known at its start.

    Args:
        stoppable: yields the records of invalid ids, up to a million, and may stop the run.
    """
    ids, now_ms = run.ready.ids, run.ready.now.wall_ms
    if run.ready.contradicts(state.boundary()):
        state.save_boundary(None)
    # S4: save the ids before the first evidence. Coverage counts only for ids that were known when it started.
    state.save_open_ids(stoppable(ids.open_ids()))
    state.delete_open_ids(ids.unlisted_open)
    progress = boundary.continue_round(state, run.id, now_ms, _usable(run).timestamp_ms)
    open_ids = txstate.mark_searched(stoppable(ids.open_ids()), progress.since_ms)
    return progress._replace(since_ms=txstate.search_since_ms(open_ids, run.terms.lifetime))


def save_evidence(run: Run, state: State, covered: Sequence[KeyRange], untouchable: int | None) -> None:
    """Save evidence that intervals were covered. The writes in these intervals must be durable.

    Args:
        untouchable: the lowest invalid pointer in them that was not negated; None if all were negated.
    """
    usable, started_ms = _usable(run), run.ready.now.wall_ms
    bounds = [usable.prune_upper_bound()]
    if untouchable is not None:
        # CDAP parses a key from its end, so a reader may get a row whose key the janitor does not recognize.
        bounds.append(untouchable - 1)
    bound = max(0, min(bounds))
    newer = [Evidence(*interval, usable.timestamp_ms, bound, started_ms, run.id) for interval in covered]
    with state.transaction():
        # Check in the same transaction as the write, since a verification may refute the boundary at any time.
        if not _was_refuted_since(run, state):
            state.replace_evidence(boundary.with_newer(state.evidence(), newer))


def _was_refuted_since(run: Run, state: State) -> bool:
    """Return whether a boundary was refuted since the run was prepared, so that earlier coverage may be wrong too."""
    return boundary.refutation(state) != run.ready.refutation


def conclude_run(
    run: Run,
    outcome: Outcome,
    progress: Round | None,
    state: State,
    clocks: ClockAnchor,
    blockers: Sequence[str],
    stoppable: Stoppable,
) -> None:
    """Save the results of a run.

    Args:
        progress: the round of full passes that the run continued; None if the run proves nothing.
        clocks: the present readings of the machine's clocks.
        blockers: the reasons why the run may not publish a boundary (:func:`janitor.run.prepare.obstacles`).
        stoppable: as for :func:`start_round`.
    """
    ready, started_ms, finished_ms = run.ready, run.ready.now.wall_ms, clocks.wall_ms
    _save_observations(ready, state, clocks)
    done = {key: work for key, work in run.topics.items() if _is_done(run, outcome, key)}
    reached = [work for work in done.values() if not work.waits]
    state.save_frontiers(_frontier_records(state, run, reached))
    state.save_strikes(_strikes(run, outcome, state, [work.topic.topic for work in reached]))
    open_ids = ready.ids.open_ids()
    refuted = _was_refuted_since(run, state)
    is_complete = passes.is_complete(run, outcome)
    proven = is_complete and progress is not None and not refuted
    evidence = state.evidence()
    if is_complete and ready.tx.usable is not None:
        settled_ms = boundary.covered_since_ms(evidence) if proven else None
        open_ids = txstate.mark_covered(open_ids, started_ms, finished_ms, run.terms.lifetime, settled_ms)
    state.save_open_ids(stoppable(open_ids))
    state.delete_open_ids(ready.ids.unlisted_open)
    if run.full:
        state.delete_closed_ids(ready.ids.unlisted_closed, started_ms - txstate.REMEMBER_CLOSED_MS)
    if proven:
        boundary.end_round(state)
        if not blockers:
            _publish_boundary(run, state, evidence)
    if passes.is_finished(run, outcome) and run.full and not refuted:
        boundary.save_searched(state, boundary.refutation(state))
        state.save_last_full_pass_ms(progress.began_ms if progress else started_ms)
        _drop_full_request(state, started_ms, finished_ms)
    _withdraw_future_evidence(state, started_ms)


def _drop_full_request(state: State, started_ms: int, finished_ms: int) -> None:
    """Drop the request for a full pass, unless it was made during the run."""
    request_ms = state.note(boundary.FULL_REQUEST, int)
    if request_ms is not None and not started_ms < request_ms <= finished_ms:
        state.save_note(boundary.FULL_REQUEST, None)


def _strikes(run: Run, outcome: Outcome, state: State, visited: list[TopicId]) -> dict[TopicId, Strikes | None]:
    """Return the changed failure records. A topic without metadata counts as done: it has no rows that could fail."""
    known = state.strikes()
    blamed = [each for each in outcome.failed.values() if not each.refused]
    failed = {topic: each.message for each in blamed if (topic := TopicId.from_prefix(each.prefix)) is not None}
    deleted_topics = {
        topic for topic in known if topic.prefix not in run.topics and _is_done(run, outcome, topic.prefix)
    }
    written = {entry.topic for entry in outcome.entries.values() if entry.held is None and entry.rows}
    # A lost task also causes deletions without a number of rows, but only a failed write causes a failed topic.
    write_failed = any(entry.topic.prefix in outcome.failed for entry in outcome.unsure)
    now_ms = run.ready.now.wall_ms
    return guards.judge_failures(
        known, failed, deleted_topics.union(visited), written, now_ms, write_failed=write_failed
    )


def _is_done(run: Run, outcome: Outcome, key: bytes) -> bool:
    """Return whether the run processed the whole topic."""
    undone = key in outcome.failed or key in outcome.withheld or run.is_skipped(key)
    return run.in_scope(key) and not undone


def _frontier_records(state: State, run: Run, done: Iterable[TopicWork]) -> dict[TopicId, FrontierRecord]:
    """Return the frontiers of a run, with approvals that arrived during the run."""
    present = state.frontiers()
    records = {}
    for work in done:
        topic, record = work.topic.topic, work.record
        before, now = run.records.get(topic), present.get(topic)
        # An operator may have approved a jump during the run, after this run's record was made.
        if now is not None and now.approved is not None and (before is None or before.approved != now.approved):
            record = replace(record, approved=now.approved)
        records[topic] = record
    return records


def _withdraw_future_evidence(state: State, now_ms: int) -> None:
    """Withdraw evidence and a boundary with times in the future, which a clock that was set back left."""
    proven, evidence = state.boundary(), state.evidence()
    # S7: otherwise an id seen after the clock was set back would look as if that pass had known it.
    believed = [interval for interval in evidence if interval.started_ms <= now_ms]
    if len(believed) < len(evidence):
        state.replace_evidence(believed)
    if proven is not None and (proven.made_ms > now_ms or len(believed) < len(evidence)):
        state.save_boundary(None)


def conclude_apply(run: Run, state: State, clocks: ClockAnchor, stoppable: Stoppable) -> None:
    """Save clocks and transaction system of an applied plan file, which saves no frontiers and no boundary."""
    _save_observations(run.ready, state, clocks)
    state.save_open_ids(stoppable(run.ready.ids.open_ids()))


def _save_observations(ready: Preparation, state: State, clocks: ClockAnchor) -> None:
    state.save_anchor(guards.next_anchor(state.anchor(), clocks))
    state.save_store(with_last_snapshot(ready.record, ready.tx))
    remember_snapshot(state, ready)


def adopt(deps: Deps, ready: Preparation, once_for: str | None = None) -> list[TopicId]:
    """Adopt the prepared store; arguments and result as :meth:`janitor.run.engine.Engine.adopt`."""
    state, lineage = deps.state, deps.store.lineage()
    run = make_run(deps, ready, kind="frequent", label=Hold.FIRST_CONTACT)
    run.load_topics()
    topics = {work.topic.topic: work.record for work in run.topics.values()}
    record = ready.record
    if ready.adopted and ready.first_contact:
        # Another transaction system: the known open ids and the boundary belong to the previous system.
        record = replace(record, mark=guards.successor_mark(record.mark, "transactions"))
    record = with_last_snapshot(replace(record, adopted_ms=ready.now.wall_ms), ready.tx)
    with state.transaction():
        state.save_store(record)
        state.save_frontiers(topics)
        # Do not adopt a clock that is behind: its correction would look like a jump.
        is_clock_slow = any(note.guard == "clock" and not note.tripped for note in ready.notes)
        state.save_anchor(guards.next_anchor(state.anchor(), ready.now) if is_clock_slow else ready.now)
        if not is_clock_slow:
            state.retire_times(ready.now.wall_ms)
        # The store may be a restored backup, about which earlier coverage proves nothing.
        boundary.end_round(state)
        state.replace_evidence([])
        state.save_boundary(None)
        # Only a finished run saves the present invalid ids, so there is nothing to compare the next snapshot with.
        IN_PROGRESS.save(state, None)
        state.save_note(LINEAGE, dict(lineage))
        state.save_note(RESTORED, None)
        if once_for is not None:
            decided.note_done(state, "adopt", once_for)
    # S13: after the commit. If the process dies in between, the store must not name a state that has not adopted it.
    if deps.side is not None:
        recorded = recorded_transactions(deps.side)
        if recorded is not None and guards.check_recorded(recorded, ready.tx) is not None:
            record_transactions(deps.side, SystemRecord("", recorded.place))
        record_adopter(deps, record)
    return sorted(topics)


def record_adopter(deps: Deps, record: StoreRecord) -> None:
    """Record in the side table which state has adopted the store, to detect another, empty state later."""
    if deps.side is not None and record.adopted_ms is not None:
        record_state(deps.side, SystemRecord(record.mark, deps.state.driver.place))


def with_last_snapshot(record: StoreRecord, tx: TxState) -> StoreRecord:
    """Return the record with the last seen transaction system; unchanged without a usable snapshot."""
    usable = tx.usable
    if usable is None:
        return record
    return replace(record, snapshot_timestamp_ms=usable.timestamp_ms, snapshot_write_pointer=usable.write_pointer)


def _publish_boundary(run: Run, state: State, evidence: Sequence[Evidence]) -> None:
    _, lowest = state.lowest_open(1)
    bound = boundary.prove(evidence, [record.pointer for record in lowest], run.terms.lifetime).bound
    made_ms = boundary.covered_since_ms(evidence)
    state.save_boundary(None if bound is None or made_ms is None else ProvenBoundary(bound, made_ms, run.id))
    boundary.REFUTED.save(state, None)


def _usable(run: Run) -> VisibilityState:
    usable = run.ready.tx.usable
    if usable is None:
        raise ValueError("a run without a snapshot proves nothing")
    return usable
