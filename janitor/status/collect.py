"""The collection of the status from the state, and from a running daemon.

Only the current activity needs the daemon. Therefore the status is also available if the process is down, or if sweeps
are CronJobs and only an exporter runs. Nothing here reads the store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

from janitor import boundary
from janitor.report import HELD, Entry, Report
from janitor.rules.policy import Hold, Rule
from janitor.run import guards
from janitor.state.base import OpenIdRecord, RunRecord, State, TopicCount
from janitor.state.figures import CONSUMERS, LATE, SNAPSHOT, STATISTICS, BlockedReaders
from janitor.state.records import Note
from janitor.state.topic_history import CHANGES, TOPICS, Change, sketches
from janitor.state.values import pack
from janitor.status.status import (
    AheadTopic,
    BoundaryFigures,
    HeldTopic,
    OpenTransaction,
    Overdue,
    Quarantined,
    Running,
    SnapshotFigures,
    Status,
    TopicFigures,
)
from janitor.sweep.run import Terms
from tms_core.clock import Clock
from tms_core.logs.printable import complete, duration, moment
from tms_core.tables.lease import LeaseRecord
from tms_core.topic import TopicId
from tms_core.transaction.model import transaction_ms

#: The maximum number of open transactions in the status.
NAMED_OPEN = 10
#: The number of last runs that are searched for a finished run.
RECENT_RUNS = 20


#: Scheduled runs without a daemon count as down after this time without a heartbeat, in milliseconds, but not before
#: twice the longest interval between the last runs.
SILENT_MS = 3_600_000
#: The note of a sweeping daemon; a single run deletes it.
DAEMON_NOTE = Note.DAEMON


@dataclass(frozen=True, slots=True)
class Deployment:
    """The constant facts of a process.

    Attributes:
        store: the name of the store, for display.
        arguments: the command options that select the store.
        schedule: a description of the schedule of sweeps.
        every_seconds: the interval of sweeps; None for a crontab.
    """

    store: str
    mode: Literal["apply", "plan_only"]
    schedule: str
    terms: Terms
    every_seconds: int | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Live:
    """The part of the status that only the daemon knows."""

    started_ms: int
    heartbeat_ms: int
    next_run_ms: int | None = None
    running: Running | None = None
    leader: bool = True


def collect(state: State, deployment: Deployment, clock: Clock, live: Live | None = None) -> Status:
    """Return the current status.

    Args:
        live: the facts from the daemon; None without a daemon.

    Raises:
        StateError: the state cannot be read.
    """
    clocks = guards.read_clocks(clock)
    record = state.store()
    runs = state.runs(RECENT_RUNS)
    last = next((run for run in runs if run.finished_ms is not None), None)
    report = state.report(last.id, Report) if last else None
    overdue = HELD.read(state)
    lead_ms = guards.measure_lead_ms(state.anchor(), clocks)
    lease, counts = LeaseRecord.parse(state.lease()), state.counts()
    # Later times come from a wrong clock, so they prove neither a running process nor a successful run.
    latest_ms = clocks.wall_ms + deployment.terms.lifetime.allowance_ms
    succeeded = state.note(Note.SUCCESS, dict[str, int]) or {}
    sign_ms = _last_sign(state, runs, latest_ms)
    return Status(
        version=_version(),
        store=deployment.store,
        process="running" if live else _process(state, runs, clocks.wall_ms, sign_ms),
        mode=deployment.mode,
        schedule=deployment.schedule,
        every_seconds=deployment.every_seconds,
        now_ms=clocks.wall_ms,
        started_ms=live.started_ms if live else None,
        heartbeat_ms=live.heartbeat_ms if live else sign_ms,
        next_run_ms=live.next_run_ms if live else None,
        history_since_ms=state.created_ms(),
        adopted_ms=record.adopted_ms if record else None,
        leader=live.leader if live else False,
        lease_holder=lease.holder if lease else "",
        running=live.running if live else None,
        last_run=last,
        last_success_ms={table: ms for table, ms in succeeded.items() if ms <= latest_ms},
        paused=state.pauses(),
        quarantined=_quarantined_topics(state),
        held=_held_topics(state, deployment, overdue, counts),
        overdue=_overdue(overdue),
        kept=state.note(Note.KEPT, dict[str, int]) or {},
        guards=report.guards if report else (),
        snapshot=_snapshot(state),
        boundary=_boundary(state, deployment.terms, clocks.wall_ms),
        skew_seconds={} if lead_ms is None else {"monotonic": lead_ms / 1000},
        topics=_topics(state, overdue, counts),
        consumers=CONSUMERS.read(state),
        late=[_late(found, deployment.arguments) for found in LATE.read(state)] if live else [],
        statistics=STATISTICS.read(state),
        ahead=[
            AheadTopic(str(name), count.newest_ms)
            for name, count in counts.items()
            if count.newest_ms is not None and count.newest_ms > latest_ms
        ],
        counters=state.counters(),
    )


def _process(
    state: State, runs: Sequence[RunRecord], now_ms: int, sign_ms: int | None
) -> Literal["between_runs", "down"]:
    """Return ``down`` if the last process was a daemon, or if scheduled runs have stopped."""
    starts = _in_order([run.started_ms for run in reversed(runs) if run.started_ms <= now_ms])
    longest_ms = max((later - earlier for earlier, later in pairwise(starts)), default=0)
    if state.note(DAEMON_NOTE) or sign_ms is None or now_ms - sign_ms > max(SILENT_MS, 2 * longest_ms):
        return "down"
    return "between_runs"


def _in_order(times: Iterable[int]) -> list[int]:
    """Return the longest ascending sequence of recorded times up to the last, to skip times of a wrong clock."""
    parts: list[list[int]] = []
    for ms in times:
        parts.append([*max((part for part in parts if part[-1] <= ms), key=len, default=[]), ms])
    return parts[-1] if parts else []


def _last_sign(state: State, runs: Sequence[RunRecord], latest_ms: int) -> int | None:
    """Return the last heartbeat of the last recorded run; None without a run, or if a wrong clock dated it.

    Args:
        latest_ms: the latest plausible time.
    """
    last = runs[0] if runs and runs[0].id != state.note(Note.RETIRED, str) else None
    signs = (last.finished_ms, last.heartbeat_ms, last.started_ms) if last else ()
    return max((ms for ms in signs if ms is not None and ms <= latest_ms), default=None)


def _quarantined_topics(state: State) -> list[Quarantined]:
    return [
        Quarantined(str(topic), record.quarantined_ms, record.count, record.error, record.probe_ms)
        for topic, record in state.strikes().items()
        if record.quarantined_ms is not None and record.probe_ms is not None
    ]


def _held_topics(
    state: State, deployment: Deployment, overdue: Sequence[Entry], counts: Mapping[TopicId, TopicCount]
) -> list[HeldTopic]:
    """Return the topics with held deletions, according to their frontiers and to the last run."""
    frontiers = state.frontiers()
    approved = {topic for topic, record in frontiers.items() if record.approved is not None}
    waiting: dict[TopicId, list[Entry]] = defaultdict(list)
    for item in overdue:
        # An approval takes effect at once, before the next run deletes the rows.
        if item.held and not (item.held is Hold.FRONTIER and item.topic in approved):
            waiting[item.topic].append(item)
    hold_ms = deployment.terms.hold_seconds * 1000
    ends = {
        topic: record.pending.since.wall_ms + hold_ms
        for topic, record in frontiers.items()
        if record.pending is not None and topic not in approved
    }
    pauses = tuple(pause.pattern for pause in state.pauses())
    found = (
        _held_topic(topic, waiting.get(topic, []), ends.get(topic), pauses, deployment.arguments, counts.get(topic))
        for topic in sorted({*waiting, *ends})
    )
    ttls = {known.name: known.ttl_seconds for known in TOPICS.read(state)}
    changed = CHANGES.read(state)
    return [
        _with_cause(
            _with_end(hold, ttls.get(hold.topic), deployment.terms), changed.get(hold.topic, ()), deployment.arguments
        )
        for hold in found
        if hold is not None
    ]


def _with_cause(hold: HeldTopic, changed: Sequence[Change], arguments: str) -> HeldTopic:
    """Return the held topic with the cause of its jump, and the commands that keep its rows."""
    if hold.reason != Hold.FRONTIER:
        return hold
    pause = complete(f"janitor pause {hold.topic}", arguments)
    if not changed:
        return replace(hold, keep=(pause,))
    last = changed[-1]
    if last.generation != last.generation_before:
        change = f"generation {last.generation_before} → {last.generation}"
        return replace(hold, cause=f"{change}, seen {moment(last.seen_ms)}", keep=(pause,))
    change = f"ttl {duration(last.ttl_before * 1000)} → {duration(last.ttl_seconds * 1000)}"
    revert = complete(f"tms topic update {hold.topic} --ttl {last.ttl_before}", arguments)
    return replace(hold, cause=f"{change}, seen {moment(last.seen_ms)}", keep=(revert, pause))


def _late(found: BlockedReaders, arguments: str) -> BlockedReaders:
    return replace(found, command=complete(f"tms tx invalidate {found.transaction}", arguments))


def _with_end(hold: HeldTopic, ttl_seconds: int | None, terms: Terms) -> HeldTopic:
    """Return the held topic with the time when its oldest row is deleted, if a consumer holds it."""
    hold_seconds = terms.consumer_hold_seconds
    if hold.reason != Hold.CONSUMER or hold.oldest_ms is None or ttl_seconds is None or hold_seconds is None:
        return hold
    return replace(hold, until_ms=hold.oldest_ms + (ttl_seconds + hold_seconds) * 1000 + 1)


def _held_topic(
    topic: TopicId,
    items: Sequence[Entry],
    until_ms: int | None,
    pauses: tuple[str, ...],
    arguments: str,
    count: TopicCount | None,
) -> HeldTopic | None:
    """Return a held topic; None if its hold was released since the last run."""
    reason = str(Hold.FRONTIER if until_ms is not None else items[0].held)
    pattern = next((pause for pause in pauses if topic.matches((pause,))), None)
    if pattern is not None:
        reason, until_ms = str(Hold.PAUSED), None
    elif reason == Hold.PAUSED:
        return None
    commands = {
        str(Hold.FRONTIER): f"janitor approve {topic}",
        str(Hold.PAUSED): f"janitor resume '{pattern}'",
        str(Hold.FIRST_CONTACT): "janitor adopt",
    }
    return HeldTopic(
        topic=str(topic),
        reason=reason,
        rows=sum(item.rows for item in items),
        size_bytes=_held_bytes(items, count),
        oldest_ms=_oldest(items),
        until_ms=until_ms,
        command=complete(commands.get(reason, ""), arguments),
    )


def _held_bytes(items: Sequence[Entry], count: TopicCount | None) -> int:
    """Estimate the size of held rows, in the unit of topic sizes (:mod:`janitor.stats.topic_sizes`).

    Rows of the current generation get their share of the counted size; other rows have the size from the run.
    """
    current = [item for item in items if item.rule != Rule.OLD_GENERATION]
    messages = sum(item.rows for item in current if item.table == "message")
    if count is None or not count.messages or not messages:
        return sum(item.bytes for item in items)
    others = sum(item.bytes for item in items if item.rule == Rule.OLD_GENERATION)
    return int(others) + count.size_bytes * min(int(messages), count.messages) // count.messages


def _overdue(items: Sequence[Entry]) -> list[Overdue]:
    found: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for item in items:
        found[item.table, item.rule].append(item)
    return [
        Overdue(table, rule, sum(item.rows for item in part), _oldest(part))
        for (table, rule), part in sorted(found.items())
    ]


def _oldest(items: Sequence[Entry]) -> int | None:
    return min((item.oldest_ms for item in items if item.oldest_ms is not None), default=None)


def _snapshot(state: State) -> SnapshotFigures:
    number, lowest = state.lowest_open(NAMED_OPEN)
    return SnapshotFigures(
        **pack(SNAPSHOT.read(state)), open=number, oldest_open=[_open_transaction(record) for record in lowest]
    )


def _open_transaction(record: OpenIdRecord) -> OpenTransaction:
    return OpenTransaction(str(record.pointer), transaction_ms(record.pointer), record.first_seen_ms)


def _boundary(state: State, terms: Terms, now_ms: int) -> BoundaryFigures:
    _, lowest = state.lowest_open(1)
    evidence = state.evidence()
    present = boundary.prove(evidence, [record.pointer for record in lowest], terms.lifetime)
    limits = [(str(limit.bound), limit.reason) for limit in present.limits]
    obstacles = list(present.obstacles)
    if not terms.lifetime_known:
        obstacles.append(
            "transactions.max_lifetime_seconds is not set, so the janitor does not know how long a transaction may "
            "write"
        )
    refuted = boundary.refutation(state)
    if refuted is not None:
        obstacles.insert(0, refuted.message)
    proven = state.boundary()
    # Without a configured lifetime no boundary is published.
    last = str(proven.bound) if proven is not None and terms.lifetime_known else None
    if proven is None or not boundary.in_force(proven, evidence, now_ms, terms.lifetime):
        refutation = refuted.message if refuted else ""
        return BoundaryFigures(limits=limits, obstacles=obstacles, refuted=refutation, last=last)
    return BoundaryFigures(str(proven.bound), proven.made_ms, proven.run_id, limits, obstacles, last=last)


def _topics(state: State, overdue: Sequence[Entry], counts: Mapping[TopicId, TopicCount]) -> list[TopicFigures]:
    by_topic: dict[TopicId, list[Entry]] = defaultdict(list)
    for item in overdue:
        by_topic[item.topic].append(item)
    sizes = sketches(state)
    found = []
    for known in TOPICS.read(state):
        topic = TopicId(known.tms_namespace, known.topic)
        items, count = by_topic.get(topic, []), counts.get(topic)
        figures = TopicFigures(
            *known,
            **(pack(count) if count else {}),
            overdue_rows=sum(item.rows for item in items),
            oldest_overdue_ms=_oldest(items),
            sizes=sizes.get(known.name, ()),
        )
        found.append(figures)
    return found


@cache
def _version() -> str:
    """Return the version of this program, also after the installed package was replaced or its files are unreadable."""
    from importlib import metadata  # noqa: PLC0415 a slow import

    return metadata.version("tms-janitor")
