"""What a pass leaves behind in memory once the store's own writes are durable.

A run that covered everything moves frontiers, and if it was a thorough one it closes open ids and may make a claim
(rule S4). A run that did not, because it was scoped, a topic failed, or no snapshot could be used, moves only what it
really reached. The caller wraps all of it in one transaction.

What does not wait for the end: that a jump was seen, so that a hold ages although every run is killed; and evidence of
what was covered, which is true whatever becomes of the rest, so that the run after one that died need not do it again
(:mod:`janitor.boundary.coverage`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from janitor.boundary import claim as boundary
from janitor.boundary import coverage as rounds
from janitor.boundary.coverage import Record, Round
from janitor.law.intervals import Interval
from janitor.law.policy import Hold
from janitor.report import GuardNote, Mode
from janitor.run import guards, quarantine
from janitor.run.prepare import Prepared, remember_snapshot
from janitor.state.base import Claim, ClockAnchor, Evidence, FrontierRecord, State, StoreRecord, Strikes
from janitor.sweep import transactions as txstate
from janitor.sweep.context import RunContext, Terms, TopicWork
from janitor.sweep.outcome import Outcome
from janitor.sweep.transactions import TxState
from tms_core.errors import Interrupted
from tms_core.tables.base import UNREADABLE, Store
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState

#: How many of the topics that wait for a consumer are named.
NAMED_TOPICS = 20


@dataclass(slots=True)
class Pass:
    """A walk under way, and what is counted of it.

    Attributes:
        running_ms: the machine's running time when it began.
        calls: which store operations had been made by then.
        boundary: the claim in force; None while there is none.
        round: the round of thorough passes it goes on with; None as long as it proves nothing.
        halted: why the walk ended early; None when it came to its end.
        truncated: transactions that were taken off the invalid list.
        refutation: how the last claim was refuted, as that was known when it began.
        notes: what else is to be said of it.
    """

    id: str
    mode: Mode
    started_ms: int
    running_ms: int
    calls: Counter[str]
    ready: Prepared
    context: RunContext
    outcome: Outcome
    boundary: int | None = None
    round: Round | None = None
    halted: Interrupted | None = None
    truncated: int = 0
    refutation: rounds.Refutation | None = None
    notes: list[GuardNote] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it came to every topic that is not put aside."""
        return not (self.outcome.errors or self.context.patterns or self.outcome.withheld or self.halted)

    @property
    def complete(self) -> bool:
        """Whether it covered every topic (rule S4)."""
        return self.finished and not self.context.has_aside

    @property
    def proves(self) -> bool:
        """Whether a part that it covers is evidence: a look at everything, under a snapshot, with nothing put aside."""
        context = self.context
        scoped = context.patterns or context.limits is not None
        return context.thorough and self.ready.tx.usable is not None and not scoped and not context.has_aside


def calls_made(current: Pass, store: Store) -> Counter[str]:
    """The store operations of a pass so far, by name."""
    made = store.calls - current.calls
    del made[UNREADABLE]
    return made


def notes_on_aside(current: Pass, state: State) -> list[GuardNote]:
    """What there is to say of topics in which nothing was changed."""
    context = current.context
    notes = []
    if context.paused:
        patterns = ", ".join(sorted(context.paused))
        notes.append(
            GuardNote("paused", False, f"nothing is changed in {patterns}, because it is paused: janitor resume")
        )
    strikes = state.strikes() if context.quarantined else {}
    for topic in sorted(set(context.quarantined) & set(strikes)):
        record = strikes[topic]
        message = f"{topic} is passed by after {record.count} failures in a row, the last one: {record.error}"
        notes.append(GuardNote("quarantine", False, message))
    return notes


def notes_on_consumers(current: Pass) -> list[GuardNote]:
    """For whom rows are held."""
    consumers, seconds = current.context.consumers, current.context.terms.consumer_hold_seconds
    waiting = sorted(consumers.waiting.items()) if consumers is not None else ()
    notes = [
        GuardNote(
            "consumer",
            False,
            f"{topic} keeps what consumer {position.name} has not read, for {seconds} s after its ttl at most",
        )
        for topic, position in waiting[:NAMED_TOPICS]
    ]
    if len(waiting) > NAMED_TOPICS:
        notes.append(GuardNote("consumer", False, f"and {len(waiting) - NAMED_TOPICS} topics more wait for consumers"))
    return notes


def begin_run(current: Pass, state: State, clocks: ClockAnchor, *, moves_frontiers: bool) -> None:
    """Save what a run has seen before it does anything; call it inside the state's transaction.

    Args:
        clocks: what the machine's clocks show now.
        moves_frontiers: whether it is a run of the janitor's own, and not of a plan file.
    """
    conclude_apply(current, state, clocks)
    if moves_frontiers:
        state.save_frontiers(_seen_jumps(current.context, state.frontiers()))
    if current.ready.tx.usable is not None:
        state.save_open_ids(current.ready.ids.open_ids())


def _seen_jumps(context: RunContext, present: Mapping[TopicId, FrontierRecord]) -> dict[TopicId, FrontierRecord]:
    """What changes by the sight of a topic's metadata: a jump begins to wait, or has been taken back meanwhile.

    A jump that has waited for long enough is remembered until all it lets go is gone.
    """
    changed = {}
    for work in context.topics.values():
        topic, hold, jump = work.topic.topic, work.frontier.hold, work.record.pending
        known = present.get(topic)
        if not context.in_scope(topic.prefix) or hold not in (None, Hold.CONSUMER, Hold.FRONTIER, Hold.PROTECTED):
            continue
        if known is None:
            if jump is not None:
                changed[topic] = work.record
        elif known.pending is not None and jump is None:
            target = (known.pending.generation, known.pending.ttl_seconds)
            if hold is Hold.PROTECTED or target != (work.topic.generation, work.topic.ttl_seconds):
                changed[topic] = replace(known, pending=None)
        elif known.pending != jump:
            changed[topic] = replace(known, pending=jump)
    return changed


def begin_round(current: Pass, state: State, record: Record) -> Round:
    """Begin a round of thorough passes, or go on with one; call it inside the state's transaction.

    Invalid transactions are saved as seen, since what is covered from now on counts for those that are known by now.

    Args:
        record: saves evidence at once.
    """
    ids, now_ms = current.ready.ids, current.ready.now.wall_ms
    if current.ready.speaks_against(state.claim()):
        state.save_claim(None)
    state.save_open_ids(ids.open_ids())
    state.forget_open_ids(ids.gone)
    progress = rounds.go_on(state, current.id, now_ms, _usable(current).timestamp_ms)
    open_ids = txstate.searched(ids.open_ids(), progress.since_ms)
    since_ms = txstate.search_since_ms(open_ids, current.context.terms.lifetime)
    return Round(progress.began_ms, record, progress.done, since_ms, payloads_from=progress.payloads_from)


def save_evidence(current: Pass, state: State, covered: Sequence[Interval], untouchable: int | None) -> None:
    """Save that intervals were covered; what was done there must be durable.

    Args:
        untouchable: the lowest invalid pointer met there that had to stay; None: none had.
    """
    usable, started_ms = _usable(current), current.ready.now.wall_ms
    bounds = [usable.prune_upper_bound()]
    if untouchable is not None:
        # CDAP cuts a key from its end, so a reader may well be given a row of a key that is none of ours.
        bounds.append(untouchable - 1)
    bound = max(0, min(bounds))
    newer = [Evidence(*interval, usable.timestamp_ms, bound, started_ms, current.id) for interval in covered]
    with state.transaction():
        if not _refuted_meanwhile(current, state):
            state.replace_evidence(boundary.with_newer(state.evidence(), newer))


def _refuted_meanwhile(current: Pass, state: State) -> bool:
    """Whether a claim was refuted since the pass began: what it has covered before may be what was false."""
    return rounds.refutation(state) != current.refutation


def conclude_run(
    current: Pass, state: State, terms: Terms, clocks: ClockAnchor, finished_ms: int, barred: Sequence[str]
) -> None:
    """Save what a run has reached.

    Args:
        clocks: what the machine's clocks show now.
        barred: why it may claim nothing (:func:`obstacles`).
    """
    _save_sight(current.ready, state, clocks)
    ready, context = current.ready, current.context
    done = {key: work for key, work in context.topics.items() if _is_done(current, key)}
    state.save_frontiers(_applied(state, context, [work for work in done.values() if not work.waits]))
    state.save_strikes(_strikes(current, state, [work.topic.topic for work in done.values() if not work.waits]))
    open_ids, started_ms = ready.ids.open_ids(), ready.now.wall_ms
    refuted = _refuted_meanwhile(current, state)
    proven = current.complete and current.round is not None and not refuted
    evidence = state.evidence()
    if current.complete and ready.tx.usable is not None:
        settled_ms = boundary.covered_since_ms(evidence) if proven else None
        open_ids = txstate.covered(open_ids, started_ms, finished_ms, terms.lifetime, settled_ms)
    state.save_open_ids(open_ids)
    state.forget_open_ids(ready.ids.gone)
    if context.thorough:
        state.forget_closed_ids(ready.ids.left, started_ms - txstate.REMEMBER_CLOSED_MS)
    if proven:
        rounds.end(state)
        if not barred:
            _save_claim(current, state, terms, evidence)
    if current.finished and context.thorough and not refuted:
        rounds.searched(state, rounds.refutation(state))
        state.save_last_thorough_ms(current.round.began_ms if current.round else started_ms)
        _stop_wanting(state, started_ms, finished_ms)
    _forget_the_future(state, started_ms)


def _stop_wanting(state: State, started_ms: int, finished_ms: int) -> None:
    """Everything was looked at: forget that this was asked for, unless it was while the run was under way."""
    wanted_ms = state.note(rounds.WANTED)
    if wanted_ms is not None and not started_ms < wanted_ms <= finished_ms:
        state.save_note(rounds.WANTED, None)


def _strikes(current: Pass, state: State, visited: list[TopicId]) -> dict[TopicId, Strikes | None]:
    """What changes in the records of failures. A topic without metadata has nothing left that could fail."""
    context, known = current.context, state.strikes()
    blamed = {key: error for key, error in current.outcome.failed.items() if key not in current.outcome.refused}
    failed = {topic: error for key, error in blamed.items() if (topic := TopicId.from_prefix(key)) is not None}
    gone = {topic for topic in known if topic.prefix not in context.topics and _is_done(current, topic.prefix)}
    written = {key.topic for key, entry in current.outcome.entries.items() if key.held is None and entry.rows}
    now_ms, write_failed = current.ready.now.wall_ms, current.outcome.write_failed
    return quarantine.judge(known, failed, gone.union(visited), written, now_ms, write_failed=write_failed)


def _is_done(current: Pass, key: bytes) -> bool:
    """Whether all was done in this topic that was to be."""
    context = current.context
    undone = key in current.outcome.failed or key in current.outcome.withheld or context.is_aside(key)
    return context.in_scope(key) and not undone


def _applied(state: State, context: RunContext, done: Iterable[TopicWork]) -> dict[TopicId, FrontierRecord]:
    """The frontiers a run has reached, with approvals that were given while it ran."""
    present = state.frontiers()
    records = {}
    for work in done:
        topic, record = work.topic.topic, work.record
        before, now = context.records.get(topic), present.get(topic)
        if now is not None and now.approved is not None and (before is None or before.approved != now.approved):
            record = replace(record, approved=now.approved)
        records[topic] = record
    return records


def _forget_the_future(state: State, now_ms: int) -> None:
    """Withdraw what was proven by a clock that has been set back since: what it called over may not be."""
    claim, evidence = state.claim(), state.evidence()
    believed = [interval for interval in evidence if interval.started_ms <= now_ms]
    if len(believed) < len(evidence):
        state.replace_evidence(believed)
    if claim is not None and (claim.made_ms > now_ms or len(believed) < len(evidence)):
        state.save_claim(None)


def conclude_apply(current: Pass, state: State, clocks: ClockAnchor) -> None:
    """Save the sight of clock and transaction system; a plan file carried out moves no frontier and claims nothing."""
    _save_sight(current.ready, state, clocks)
    state.save_open_ids(current.ready.ids.open_ids())


def _save_sight(ready: Prepared, state: State, clocks: ClockAnchor) -> None:
    state.save_anchor(guards.next_anchor(state.anchor(), clocks))
    state.save_store(seen(ready.record, ready.tx))
    remember_snapshot(state, ready)


def obstacles(ready: Prepared, terms: Terms, store: Store) -> list[str]:
    """Why nothing can be claimed, whatever the evidence."""
    found = list(store.obstacles())
    if ready.first_contact:
        found.append("this store, with these transactions, has not been adopted")
    if not terms.lifetime_known:
        found.append(
            "transactions.max_lifetime_seconds is not set, so it is not known how long a transaction may write; "
            "set it to what the servers enforce (data.tx.max.lifetime)"
        )
    if ready.tx.usable is None:
        found.append(ready.tx.message)
    return found


def seen(record: StoreRecord, tx: TxState) -> StoreRecord:
    """The record with the transaction system as it was seen; unchanged without a usable snapshot."""
    usable = tx.usable
    if usable is None:
        return record
    return replace(record, snapshot_timestamp_ms=usable.timestamp_ms, snapshot_write_pointer=usable.write_pointer)


def _save_claim(current: Pass, state: State, terms: Terms, evidence: Sequence[Evidence]) -> None:
    _, lowest = state.lowest_open(1)
    bound = boundary.claim(evidence, [record.pointer for record in lowest], terms.lifetime).bound
    made_ms = boundary.covered_since_ms(evidence)
    state.save_claim(None if bound is None or made_ms is None else Claim(bound, made_ms, current.id))
    state.save_note(rounds.REFUTED, None)


def _usable(current: Pass) -> VisibilityState:
    usable = current.ready.tx.usable
    if usable is None:
        raise ValueError("without a snapshot nothing is proven")
    return usable
