"""What a pass leaves behind in memory once the store's own writes are durable.

A run that covered everything moves frontiers, and if it was a thorough one it closes open ids and may make a claim
(rule S4). A run that did not, because it was scoped, a topic failed, or no snapshot could be used, moves only what it
really reached. The caller wraps all of it in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from janitor import boundary, guards, quarantine, txstate
from janitor.prepare import Prepared
from janitor.report import GuardNote, Mode, Tally
from janitor.state.base import Claim, ClockAnchor, Evidence, FrontierRecord, State, StoreRecord, Strikes
from janitor.txstate import TxState
from janitor.world import Terms, TopicWork, World
from tms_core.errors import Interrupted
from tms_core.tables.base import UNREADABLE, Store
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState


@dataclass(slots=True)
class Pass:
    """A walk under way, and what is counted of it.

    Attributes:
        running_ms: the machine's running time when it began.
        calls: which store operations had been made by then.
        boundary: the claim in force; None while there is none.
        failed: metadata keys of topics that were left undone, and why.
        withheld: metadata keys of topics in which deleting was stopped on the way.
        halted: why the walk ended early; None when it came to its end.
        write_failed: whether the store refused to write something.
    """

    id: str
    mode: Mode
    started_ms: int
    running_ms: int
    calls: Counter[str]
    ready: Prepared
    world: World
    tally: Tally
    boundary: int | None = None
    failed: Mapping[bytes, str] = field(default_factory=dict)
    withheld: frozenset[bytes] = frozenset()
    halted: Interrupted | None = None
    write_failed: bool = False

    @property
    def finished(self) -> bool:
        """Whether it came to every topic that is not put aside."""
        return not (self.tally.errors or self.world.patterns or self.withheld or self.halted)

    @property
    def complete(self) -> bool:
        """Whether it covered every topic (rule S4)."""
        return self.finished and not self.world.has_aside


def calls_made(current: Pass, store: Store) -> Counter[str]:
    """The store operations of a pass so far, by name."""
    made = store.calls - current.calls
    del made[UNREADABLE]
    return made


def notes_on_aside(current: Pass, state: State) -> list[GuardNote]:
    """What there is to say of topics in which nothing was changed."""
    world = current.world
    notes = []
    if world.paused:
        patterns = ", ".join(sorted(world.paused))
        notes.append(
            GuardNote("paused", False, f"nothing is changed in {patterns}, because it is paused: janitor resume")
        )
    strikes = state.strikes() if world.quarantined else {}
    for topic in sorted(set(world.quarantined) & set(strikes)):
        record = strikes[topic]
        message = f"{topic} is passed by after {record.count} failures in a row, the last one: {record.error}"
        notes.append(GuardNote("quarantine", False, message))
    return notes


def conclude_run(current: Pass, state: State, terms: Terms, clocks: ClockAnchor, finished_ms: int) -> None:
    """Save what a run has reached.

    Args:
        clocks: what the machine's clocks show now.
    """
    conclude_apply(current, state, clocks)
    ready, world = current.ready, current.world
    done = {key: work for key, work in world.topics.items() if _is_done(current, key)}
    state.save_frontiers(_applied(state, world, [work for work in done.values() if not work.waits]))
    state.save_strikes(_strikes(current, state, [work.topic.topic for work in done.values() if not work.waits]))
    open_ids, usable, started_ms = ready.ids.open_ids(), ready.tx.usable, ready.now.wall_ms
    if current.complete and usable is not None:
        open_ids = txstate.covered(open_ids, started_ms, finished_ms, terms.lifetime, thorough=world.thorough)
    state.save_open_ids(open_ids)
    state.forget_open_ids(ready.ids.gone)
    if world.thorough:
        state.forget_closed_ids(ready.ids.left, started_ms - txstate.REMEMBER_CLOSED_MS)
    if current.complete and usable is not None and world.thorough:
        _save_evidence(current, state, terms, usable)
    if current.finished and world.thorough:
        state.save_last_thorough_ms(ready.now.wall_ms)
    _forget_the_future(state, ready.now.wall_ms)


def _strikes(current: Pass, state: State, visited: list[TopicId]) -> dict[TopicId, Strikes | None]:
    """What changes in the records of failures. A topic without metadata has nothing left that could fail."""
    world, known = current.world, state.strikes()
    failed = {topic: error for key, error in current.failed.items() if (topic := TopicId.from_prefix(key)) is not None}
    gone = {topic for topic in known if topic.prefix not in world.topics and _is_done(current, topic.prefix)}
    written = {key.topic for key, entry in current.tally.entries.items() if key.held is None and entry.rows}
    return quarantine.judge(
        known, failed, gone.union(visited), written, current.ready.now.wall_ms, write_failed=current.write_failed
    )


def _is_done(current: Pass, key: bytes) -> bool:
    """Whether all was done in this topic that was to be."""
    world = current.world
    undone = key in current.failed or key in current.withheld or world.is_aside(key)
    return world.in_scope(key) and not undone


def _applied(state: State, world: World, done: Iterable[TopicWork]) -> dict[TopicId, FrontierRecord]:
    """The frontiers a run has reached, with approvals that were given while it ran."""
    present = state.frontiers()
    records = {}
    for work in done:
        topic, record = work.topic.topic, work.record
        before, now = world.records.get(topic), present.get(topic)
        if now is not None and now.approved is not None and (before is None or before.approved != now.approved):
            record = replace(record, approved=now.approved)
        records[topic] = record
    return records


def _forget_the_future(state: State, now_ms: int) -> None:
    """Withdraw what was proven by a clock that has been set back since: what it called over may not be."""
    claim = state.claim()
    if claim is not None and claim.made_ms > now_ms:
        state.save_claim(None)
    evidence = state.evidence()
    if any(interval.started_ms > now_ms for interval in evidence):
        state.replace_evidence([interval for interval in evidence if interval.started_ms <= now_ms])


def conclude_apply(current: Pass, state: State, clocks: ClockAnchor) -> None:
    """Save the sight of clock and transaction system; a plan file carried out moves no frontier and claims nothing."""
    state.save_anchor(guards.next_anchor(state.anchor(), clocks))
    state.save_store(seen(current.ready.record, current.ready.tx))


def obstacles(ready: Prepared, terms: Terms) -> list[str]:
    """Why nothing can be claimed, whatever the evidence."""
    found = []
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


def _save_evidence(current: Pass, state: State, terms: Terms, usable: VisibilityState) -> None:
    started_ms = current.ready.now.wall_ms
    bounds = [usable.prune_upper_bound()]
    if current.tally.untouchable is not None:
        # CDAP cuts a key from its end, so a reader may well be given such a row.
        bounds.append(current.tally.untouchable - 1)
    interval = Evidence(b"", None, usable.timestamp_ms, max(0, min(bounds)), started_ms, current.id)
    state.replace_evidence([interval])
    if obstacles(current.ready, terms):
        return
    _, lowest = state.lowest_open(1)
    bound = boundary.claim([interval], [record.pointer for record in lowest], terms.lifetime).bound
    state.save_claim(None if bound is None else Claim(bound, started_ms, current.id))
