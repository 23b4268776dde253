"""One pass: its topics, its costs and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from janitor.report import EXPECTED, Report, Totals, deleted_bytes, sort_entries
from janitor.rules.policy import Rule
from janitor.run.prepare import Deps
from janitor.state.base import ProvenBoundary, State, TopicCount
from janitor.state.figures import GuardNote
from janitor.state.records import NOT_COUNTED, MessagesLeft, StoreBytes
from janitor.state.values import Pointer
from janitor.sweep.findings import Read
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Run, TopicWork
from janitor.sweep.sweep import Event, StepStarted
from tms_core.errors import StopRequested
from tms_core.tables.base import UNREADABLE
from tms_core.topic import TopicId

NOT_ADOPTED = GuardNote(
    "adoption", True, "nothing is deleted, because this store is not adopted; look at janitor plan, then: janitor adopt"
)
#: The maximum number of topics with rows held for consumers that a report names.
NAMED_TOPICS = 20
#: The maximum age of a count that a report uses, in milliseconds.
MESSAGES_MS = 86_400_000
#: The number of last ledger entries that are searched for deletions after the count.
LEDGER_ENTRIES = 500


def is_finished(run: Run, outcome: Outcome) -> bool:
    """Return whether a pass processed every topic that is not paused or quarantined."""
    return not (outcome.errors or run.patterns or outcome.withheld or outcome.interruption)


def is_complete(run: Run, outcome: Outcome) -> bool:
    """Return whether a pass covered every topic (invariant S4)."""
    return is_finished(run, outcome) and not run.has_skipped_topics


def load_topics(deps: Deps, run: Run) -> Mapping[TopicId, TopicCount]:
    """Read the topics, and report the expected number of due messages of counted topics to the observer.

    Returns:
        The results of the background count.
    """
    counts = deps.state.counts()
    run.load_topics()
    found = ((counts.get(work.topic.topic), work) for key, work in run.topics.items() if run.in_scope(key))
    deps.observer(EXPECTED, None, sum(_expected_rows(count, work) for count, work in found if count is not None))
    return counts


def _expected_rows(count: TopicCount, work: TopicWork) -> int:
    """Estimate the due messages of a topic, as if publish times were evenly distributed from oldest to newest."""
    frontier = work.frontier
    cutoff = frontier.due if work.counts_held else frontier.cutoff
    if count.oldest_ms is None or count.newest_ms is None or cutoff.ms <= count.oldest_ms:
        return 0
    if cutoff.ms > count.newest_ms:
        return count.messages
    return round(count.messages * (cutoff.ms - count.oldest_ms) / (count.newest_ms - count.oldest_ms))


class Costs:
    """The costs of a pass: the time of its phases, its calls and the size of the store.

    It consumes the events of the pass, and reports their progress to the observer.

    Attributes:
        bytes_before: the size of the store on disk before the pass; None if unknown.
    """

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._calls_before = Counter(deps.store.calls)
        self._started_ms = deps.clock.monotonic_ms()
        # Opening LevelDB compacts its logs, so a plan and a run after it would show different sizes.
        self.bytes_before = deps.store.disk_bytes() if deps.opened_bytes is None else deps.opened_bytes
        self.phase_seconds: dict[str, float] = {}
        self._name = ""
        self._since_ms = 0

    @property
    def seconds(self) -> float:
        """Return the duration of the pass so far."""
        return (self._deps.clock.monotonic_ms() - self._started_ms) / 1000

    def calls(self) -> Counter[str]:
        """Return the store operations of the pass so far, by name."""
        made = self._deps.store.calls - self._calls_before
        del made[UNREADABLE]
        return made

    def consume(self, event: Event) -> None:
        """Consume an event: report progress, or start a phase."""
        if isinstance(event, Read):
            self._deps.observer(event.phase, event.topic, event.rows)
        elif isinstance(event, StepStarted):
            self.start(event.step)

    def start(self, name: str) -> None:
        """Finish the current phase and start another; an empty name starts none."""
        now_ms = self._deps.clock.monotonic_ms()
        if self._name:
            self.phase_seconds[self._name] = (now_ms - self._since_ms) / 1000
        self._name, self._since_ms = name, now_ms


# -- the report ------------------------------------------------------------------------------------------------------


def report(
    deps: Deps,
    run: Run,
    outcome: Outcome,
    costs: Costs,
    boundary: ProvenBoundary | None,
    counts: Mapping[TopicId, TopicCount],
) -> Report:
    """Return the report of a pass, and log unrecognized rows and topics.

    Args:
        outcome: receives the store calls of the pass.
        boundary: the boundary in force.
        counts: the results of the background count when the pass started.
    """
    ready = run.ready
    deps.unknown_row_log.name(outcome, deps.store.metadata)
    outcome.calls = costs.calls()
    topics = sort_entries(outcome.entries.values())
    return Report(
        id=run.id,
        mode=run.mode,
        started_ms=run.record.started_ms,
        effective_now_ms=ready.now.wall_ms,
        snapshot=ready.tx.used,
        topics=topics,
        totals=Totals.of(run.mode, topics, outcome.kept),
        deleted_bytes=deleted_bytes(run.mode, topics),
        boundary=Pointer(boundary.bound) if boundary else None,
        guards=_notes(run, outcome, deps.state),
        errors=outcome.errors,
        store_calls=outcome.calls.total(),
        seeks_spared=outcome.seeks_spared,
        duration_seconds=costs.seconds,
        phase_seconds=costs.phase_seconds,
        full=run.full,
        truncated=outcome.truncated,
        store_bytes=StoreBytes(costs.bytes_before, deps.store.disk_bytes() if run.mode == "apply" else None),
        messages=_messages(deps, run, outcome, counts),
    )


def _messages(deps: Deps, run: Run, outcome: Outcome, known: Mapping[TopicId, TopicCount]) -> MessagesLeft:
    """Estimate the number of messages before and after the pass; unknown without deletions or recent counts."""
    rows: Counter[tuple[bool, bool]] = Counter()
    for entry in outcome.entries.values():
        if entry.table == "message" and entry.rule is not Rule.INVALID_TRANSACTION:
            work = run.topics.get(entry.topic.prefix)
            old = work is None or work.topic.is_old(entry.generation)
            if old and entry.rows and (work is None or not work.topic.deleted):
                return NOT_COUNTED  # the count may be of the old or of the current generation
            rows[entry.counts_as_done(run.mode), old] += entry.rows
    deletions = rows[True, False] + rows[True, True]
    counts = _counts(deps, run, known) if deletions and not outcome.unsure else None
    if not counts:
        return NOT_COUNTED
    before = sum(count.messages for count in counts) + rows[True, True] + rows[False, True]
    return (
        MessagesLeft(before, before - deletions, min(count.counted_ms for count in counts))
        if deletions <= before
        else NOT_COUNTED
    )


def _counts(deps: Deps, run: Run, known: Mapping[TopicId, TopicCount]) -> list[TopicCount] | None:
    """Return the counts of a pass's topics; None if a count is missing or too old, or a topic was swept since."""
    found: list[TopicCount] = []
    swept: dict[TopicId, int] = {}
    entries = deps.state.ledger(LEDGER_ENTRIES)
    for entry in entries:
        swept[entry.topic] = max(entry.at_ms, swept.get(entry.topic, 0))
    known_ms = entries[-1].at_ms if len(entries) == LEDGER_ENTRIES else 0
    since_ms = max(known_ms, run.record.started_ms - MESSAGES_MS)
    for key, work in run.topics.items():
        if work.topic.deleted or not run.in_scope(key):
            continue
        count = known.get(work.topic.topic)
        if count is None or not since_ms <= count.counted_ms <= run.record.started_ms:
            return None
        if swept.get(work.topic.topic, 0) >= count.counted_ms:
            return None
        found.append(count)
    return found


def _notes(run: Run, outcome: Outcome, state: State) -> list[GuardNote]:
    ready = run.ready
    notes = list(ready.notes)
    if run.mode == "apply" and not ready.adopted:
        notes.append(NOT_ADOPTED)
    if outcome.interruption is not None:
        name = "interrupted" if isinstance(outcome.interruption, StopRequested) else "lease"
        notes.append(GuardNote(name, False, str(outcome.interruption)))
    notes += _notes_on_skipped(run, state)
    notes += _notes_on_consumers(run)
    if ready.tx.problem is not None and ready.tx.message:
        notes.append(GuardNote("snapshot", False, ready.tx.message))
    notes += [GuardNote("snapshot", False, f"skipped {item}") for item in ready.tx.rejected]
    notes += [GuardNote("metadata", False, message) for message in run.unparsed.values()]
    return notes + outcome.notes


def _notes_on_skipped(run: Run, state: State) -> list[GuardNote]:
    """Return the notes on topics that the run skipped."""
    notes = []
    if run.paused:
        patterns = ", ".join(sorted(run.paused))
        notes.append(
            GuardNote("paused", False, f"nothing changes in {patterns}, because it is paused; to undo: janitor resume")
        )
    strikes = state.strikes() if run.quarantined else {}
    for topic in sorted(set(run.quarantined) & set(strikes)):
        record = strikes[topic]
        message = f"{topic} is skipped after {record.count} failures in a row, the last error: {record.error}"
        notes.append(GuardNote("quarantine", False, message))
    return notes


def _notes_on_consumers(run: Run) -> list[GuardNote]:
    """Return the notes on consumers for which rows are held, and on topics whose consumers could not be read."""
    consumers, seconds = run.consumers, run.terms.consumer_hold_seconds
    waiting = sorted(consumers.waiting.items()) if consumers is not None else ()
    notes = [
        GuardNote(
            "consumer",
            False,
            f"{topic} keeps messages that consumer {position.name} has not read, for up to {seconds} s after their ttl",
        )
        for topic, position in waiting[:NAMED_TOPICS]
    ]
    if len(waiting) > NAMED_TOPICS:
        notes.append(GuardNote("consumer", False, f"{len(waiting) - NAMED_TOPICS} more topics keep unread messages"))
    unknown = run.processed.unknown if run.processed is not None else {}
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
