"""One pass: its start, and the report of its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from janitor.boundary import coverage as rounds
from janitor.boundary.coverage import Round
from janitor.report import EXPECTED, NOT_COUNTED, GuardNote, MessagesLeft, Mode, Report, StoreBytes, counts_as_done
from janitor.rules.policy import Rule
from janitor.run.deps import Deps
from janitor.run.prepare import Prepared
from janitor.state.base import State, TopicCount
from janitor.sweep.context import RunContext, TopicWork
from janitor.sweep.outcome import Outcome
from janitor.sweep.sweep import Scope
from tms_core.errors import Halted, Interrupted
from tms_core.tables.base import UNREADABLE, Reads
from tms_core.topic import TopicId

NOT_ADOPTED = GuardNote(
    "adoption", True, "this store is not adopted yet, nothing is deleted; look at janitor plan, then: janitor adopt"
)
#: How many of the topics that wait for a consumer are named.
NAMED_TOPICS = 20
#: How old a count may be by which it is told how many messages there are, in milliseconds.
MESSAGES_MS = 86_400_000
#: How many of the ledger's last entries are asked for what was swept since it was counted.
LEDGER_ENTRIES = 500


@dataclass(slots=True)
class Pass:
    """A running pass, and its counts.

    Attributes:
        running_ms: the machine's running time when it started.
        calls: which store operations had been made by then.
        boundary: the claim in force; None while there is none.
        round: the round of thorough passes it goes on with; None as long as it proves nothing.
        halted: the reason of an early stop; None when it came completely.
        truncated: transactions removed from the invalid list.
        refutation: how the last claim was refuted, as that was known when it started.
        notes: further notes.
        bytes_before: the size of the store on its disk at the start; None where that is not known.
        counts: the background count at the start.
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
    bytes_before: int | None = None
    counts: Mapping[TopicId, TopicCount] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Return whether it came to every topic that is not put aside."""
        return not (self.outcome.errors or self.context.patterns or self.outcome.withheld or self.halted)

    @property
    def complete(self) -> bool:
        """Return whether it covered every topic (rule S4)."""
        return self.finished and not self.context.has_aside

    @property
    def proves(self) -> bool:
        """Return whether a part that it covers is evidence: it reads everything, under a snapshot, with nothing put
        aside.
        """
        context = self.context
        scoped = context.patterns or context.limits is not None
        return context.thorough and self.ready.tx.usable is not None and not scoped and not context.has_aside

    def add(self, outcome: Outcome) -> None:
        """Take in the findings and done.

        Raises:
            Exception: the cause of an early stop, unless requested.
        """
        self.outcome += outcome
        ended = self.outcome.ended
        if isinstance(ended, Interrupted):
            self.halted = ended
        elif ended is not None:
            raise ended


def new_id(started_ms: int, token_hex: Callable[[int], str]) -> str:
    """Return the id of a run that starts now."""
    return f"{started_ms}-{token_hex(4)}"


def begin(deps: Deps, mode: Mode, ready: Prepared, context: RunContext) -> Pass:
    """Return a pass that has read nothing yet."""
    started_ms = deps.clock.now_ms()
    run_id = new_id(started_ms, deps.token_hex)
    calls, refuted = Counter(deps.store.calls), rounds.refutation(deps.state)
    return Pass(
        run_id,
        mode,
        started_ms,
        deps.clock.running_ms(),
        calls,
        ready,
        context,
        Outcome(),
        refutation=refuted,
        # Opening packs LevelDB's logs, so a plan and the run after it would tell two sizes.
        bytes_before=deps.store.disk_bytes() if deps.opened_bytes is None else deps.opened_bytes,
    )


def load_topics(deps: Deps, current: Pass) -> None:
    """Read the topics, and tell the observer about how many of their messages are due, as far as they were counted."""
    context, current.counts = current.context, deps.state.counts()
    context.load_topics()
    found = (
        (current.counts.get(work.topic.topic), work) for key, work in context.topics.items() if context.in_scope(key)
    )
    deps.observer(EXPECTED, None, sum(_expected_rows(count, work) for count, work in found if count is not None))


def _expected_rows(count: TopicCount, work: TopicWork) -> int:
    """About how many of a topic's messages are due: they lie evenly in the time from the oldest to the newest."""
    frontier = work.frontier
    cutoff = frontier.due if work.counts_held else frontier.cutoff
    if count.oldest_ms is None or count.newest_ms is None or cutoff.ms <= count.oldest_ms:
        return 0
    if cutoff.ms > count.newest_ms:
        return count.messages
    return round(count.messages * (cutoff.ms - count.oldest_ms) / (count.newest_ms - count.oldest_ms))


def scope(deps: Deps, current: Pass, begin_round: Callable[[Sequence[Reads]], Round] | None = None) -> Scope:
    """The work of a pass.

    Args:
        begin_round: as of :class:`~janitor.sweep.sweep.Scope`.
    """
    return Scope(
        current.id,
        current.mode,
        deps.store,
        current.context,
        deps.division,
        deps.batch_rows,
        deps.expiries,
        begin_round,
        partial(phase, deps, current),
    )


@contextmanager
def phase(deps: Deps, current: Pass, name: str) -> Iterator[None]:
    """Measure how long a phase takes."""
    started = deps.clock.running_ms()
    yield
    current.outcome.phase_seconds[name] = (deps.clock.running_ms() - started) / 1000


# -- the report ------------------------------------------------------------------------------------------------------


def report(deps: Deps, current: Pass) -> Report:
    """The result of a pass; rows and topics that nothing is known of are named in the log."""
    ready, outcome = current.ready, current.outcome
    deps.unrecognised.name(outcome, deps.store.metadata)
    return Report(
        id=current.id,
        mode=current.mode,
        started_ms=current.started_ms,
        effective_now_ms=ready.now.wall_ms,
        snapshot=ready.tx.used,
        entries=outcome.entries,
        kept=outcome.kept,
        boundary=current.boundary,
        guards=_notes(current, deps.state),
        errors=outcome.errors,
        store_calls=sum(calls_made(current, deps.store).values()),
        seeks_spared=outcome.seeks_spared,
        duration_seconds=(deps.clock.running_ms() - current.running_ms) / 1000,
        phase_seconds=outcome.phase_seconds,
        thorough=current.context.thorough,
        truncated=current.truncated,
        store_bytes=StoreBytes(current.bytes_before, deps.store.disk_bytes() if current.mode == "apply" else None),
        messages=_messages(deps, current),
    )


def _messages(deps: Deps, current: Pass) -> MessagesLeft:
    """About how many messages there were and are left; unknown where none goes, or the counts do not say it."""
    rows: Counter[tuple[bool, bool]] = Counter()
    for key, entry in current.outcome.entries.items():
        if key.table == "message" and key.rule is not Rule.INVALID_TRANSACTION:
            work = current.context.topics.get(key.topic.prefix)
            old = work is None or work.topic.is_old(key.generation)
            if old and entry.rows and (work is None or not work.topic.deleted):
                return NOT_COUNTED  # the count may be of that generation or of the living one
            rows[counts_as_done(current.mode, key.held), old] += entry.rows
    gone = rows[True, False] + rows[True, True]
    counts = _counts(deps, current) if gone and not current.outcome.unsure else None
    if not counts:
        return NOT_COUNTED
    before = sum(count.messages for count in counts) + rows[True, True] + rows[False, True]
    return (
        MessagesLeft(before, before - gone, min(count.counted_ms for count in counts))
        if gone <= before
        else NOT_COUNTED
    )


def _counts(deps: Deps, current: Pass) -> list[TopicCount] | None:
    """Return the counts of a pass's topics; None where one is missing, is older than a day, or was swept since."""
    found: list[TopicCount] = []
    swept: dict[TopicId, int] = {}
    entries = deps.state.ledger(LEDGER_ENTRIES)
    for entry in entries:
        swept[entry.topic] = max(entry.at_ms, swept.get(entry.topic, 0))
    known_ms = entries[-1].at_ms if len(entries) == LEDGER_ENTRIES else 0
    since_ms = max(known_ms, current.started_ms - MESSAGES_MS)
    for key, work in current.context.topics.items():
        if work.topic.deleted or not current.context.in_scope(key):
            continue
        count = current.counts.get(work.topic.topic)
        if count is None or not since_ms <= count.counted_ms <= current.started_ms:
            return None
        if swept.get(work.topic.topic, 0) >= count.counted_ms:
            return None
        found.append(count)
    return found


def calls_made(current: Pass, store: Reads) -> Counter[str]:
    """Return the store operations of a pass so far, by name."""
    made = store.calls - current.calls
    del made[UNREADABLE]
    return made


def _notes(current: Pass, state: State) -> list[GuardNote]:
    ready = current.ready
    notes = list(ready.notes)
    if current.mode == "apply" and not ready.adopted:
        notes.append(NOT_ADOPTED)
    if current.halted is not None:
        name = "halted" if isinstance(current.halted, Halted) else "lease"
        notes.append(GuardNote(name, False, str(current.halted)))
    notes += _notes_on_aside(current, state)
    notes += _notes_on_consumers(current)
    if ready.tx.problem is not None and ready.tx.message:
        notes.append(GuardNote("snapshot", False, ready.tx.message))
    notes += [GuardNote("snapshot", False, f"passed over {item}") for item in ready.tx.rejected]
    notes += [GuardNote("metadata", False, message) for message in current.context.unparsed.values()]
    return notes + current.notes


def _notes_on_aside(current: Pass, state: State) -> list[GuardNote]:
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
        message = f"{topic} is left out after {record.count} failures in a row, the last error: {record.error}"
        notes.append(GuardNote("quarantine", False, message))
    return notes


def _notes_on_consumers(current: Pass) -> list[GuardNote]:
    """For whom rows are held, and which topics' consumers could not be read."""
    consumers, seconds = current.context.consumers, current.context.terms.consumer_hold_seconds
    waiting = sorted(consumers.waiting.items()) if consumers is not None else ()
    notes = [
        GuardNote(
            "consumer",
            False,
            f"{topic} keeps messages that consumer {position.name} has not read, for at most {seconds} s after their "
            "ttl",
        )
        for topic, position in waiting[:NAMED_TOPICS]
    ]
    if len(waiting) > NAMED_TOPICS:
        notes.append(GuardNote("consumer", False, f"and {len(waiting) - NAMED_TOPICS} topics more wait for consumers"))
    unknown = current.context.processed.unknown if current.context.processed is not None else {}
    notes += [
        GuardNote(
            "consumer",
            False,
            f"{topic} keeps messages that its consumers have processed, because the consumers' positions cannot be "
            f"read: {why}",
        )
        for topic, why in sorted(unknown.items())[:NAMED_TOPICS]
    ]
    return notes
