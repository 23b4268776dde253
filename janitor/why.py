"""Why a message is still there and when it will go, or which run took it.

The answer is the law's: each row that is there is put to ``decide`` as the next run would put it, and again as it will
stand when it comes due, so that there is no second copy of the law here that could differ. Of a row that is gone only
the ledger can tell, and only of ranges: that a run took *this* row is certain of message rows, which go without gaps;
payload rows lie scattered, and a run that died has left no more than what it had set out to do.

An id names no generation (``docs/formats.md``, "Message ids"), so every one that has rows is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from janitor.frontier import elapsed_ms
from janitor.policy import Delete, Frontier, Hold, Invert, Reason, Row, Rule, Verdict, decide
from janitor.ranges import topic_stop
from janitor.references import find_referenced, search_range, timeless_range
from janitor.report import DataTable
from janitor.state.base import LedgerEntry, State
from janitor.world import TopicWork, World, matches
from tms_core.rowkey import GENERATION_BYTES, LONG_MAX, Cutoff, MessageId, MessageKey, PayloadKey, java_abs, stop_key
from tms_core.tables.base import MessageValue, Store
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState, transaction_ms

#: How many entries of the ledger are named at most for one row, and among how many of its range they are looked for.
TRACES = 100
SEARCHED_ENTRIES = 10_000
#: Rows per page where messages that refer to a payload are looked for.
PAGE_ROWS = 2000

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a row.

    Attributes:
        action: what the next run does with it.
        reason: why it stays; None where it goes.
        rule: the rule that takes it, now or in time; None: none ever does, as things are.
        due_ms: the first moment at which that rule takes it; None where time has nothing to do with it.
        hold: what keeps the rule from it.
        until_ms: when the hold ends by itself; None: never, or nobody can say.
        goes_ms: the first moment at which a run takes it, if nobody does anything; None: not by time alone.
        invert: its transaction is invalid, so its pointer is to be negated as long as the row stays.
    """

    action: Literal["delete", "invert", "keep"]
    reason: Reason | None
    rule: Rule | None = None
    due_ms: int | None = None
    hold: Hold | None = None
    until_ms: int | None = None
    goes_ms: int | None = None
    invert: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """An entry of the ledger that speaks of a row.

    Attributes:
        certain: whether the run took the row if it was there; otherwise it may have.
    """

    entry: LedgerEntry
    certain: bool

    def to_json(self) -> dict[str, Any]:
        return {"certain": self.certain, **self.entry.to_json()}


@dataclass(frozen=True, slots=True)
class Found:
    """A row that is in the store.

    Attributes:
        time_ms: what its age is measured from: publish time, or the payload's write time.
        pointer: the write pointer as it is stored; None outside transactions.
        transaction: its state, as ``janitor inspect`` names it; empty outside transactions, ``unreadable`` for a row
            whose value cannot be read.
        refers: a message that takes its payload from the payload table.
        inverted: runs that may have negated its pointer.
    """

    table: DataTable
    key: bytes
    generation: int
    time_ms: int
    pointer: int | None
    transaction: str
    refers: bool
    fate: Fate
    inverted: tuple[Trace, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "key": self.key.hex(),
            "generation": self.generation,
            "time_ms": self.time_ms,
            "pointer": None if self.pointer is None else str(self.pointer),
            "transaction": self.transaction or None,
            "refers": self.refers,
            **asdict(self.fate),
            "inverted": [trace.to_json() for trace in self.inverted],
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """A row that is not in the store.

    Attributes:
        key: None for a message row: its generation is not known.
        taken: runs that took it, or may have; newest first.
    """

    table: DataTable
    key: bytes | None
    taken: tuple[Trace, ...]

    def to_json(self) -> dict[str, Any]:
        key = self.key and self.key.hex()
        return {"table": self.table, "key": key, "taken": [trace.to_json() for trace in self.taken]}


@dataclass(frozen=True, slots=True)
class Memory:
    """How far back the ledger can be relied on.

    Attributes:
        created_ms: when this memory began; None when nobody wrote that down.
        complete_since_ms: from when on every deletion of this janitor's is in the ledger; None when it is not known.
        history_days: how long entries are kept.
    """

    created_ms: int | None
    complete_since_ms: int | None
    history_days: int


@dataclass(frozen=True, slots=True)
class Why:
    """The answer.

    Attributes:
        generation, ttl_seconds: the topic's metadata; None where there is none that can be read.
        problem: why it cannot be read; empty where it can, or where there is no row.
        found: rows that are there, each message row before its payload row.
        missing: rows that are not.
        resume: the patterns to resume that pause the topic.
    """

    topic: TopicId
    message_id: MessageId
    now_ms: int
    generation: int | None
    ttl_seconds: int | None
    problem: str
    found: tuple[Found, ...]
    missing: tuple[Missing, ...]
    memory: Memory
    resume: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values; keys and ids are in hex, write pointers are decimal strings."""
        return {
            "tms_namespace": self.topic.namespace,
            "topic": self.topic.topic,
            "message_id": str(self.message_id),
            "publish_ms": self.message_id.publish_ms,
            "sequence": self.message_id.sequence,
            "now_ms": self.now_ms,
            "generation": self.generation,
            "ttl_seconds": self.ttl_seconds,
            "problem": self.problem or None,
            "found": [found.to_json() for found in self.found],
            "missing": [missing.to_json() for missing in self.missing],
            "resume": list(self.resume),
            "memory": asdict(self.memory),
        }


def why(
    store: Store, state: State, world: World, topic: TopicId, message_id: MessageId, now_ms: int, history_days: int
) -> Why:
    """Which rule will take a message, when, and what holds it; or which run has taken it. Nothing is written.

    Args:
        world: as a thorough plan judges, its topics loaded.
        now_ms: the moment of the question.
        history_days: how long the memory keeps its ledger.

    Raises:
        StoreError: the store or the state could not be read.
    """
    strikes = state.strikes().get(topic)
    ask = _Question(store, state, world, topic, message_id, strikes.probe_ms if strikes else None)
    found, missing = ask.answer()
    work = world.topics.get(topic.prefix)
    return Why(
        topic,
        message_id,
        now_ms,
        work.topic.generation if work else None,
        work.topic.ttl_seconds if work else None,
        world.unparsed.get(topic.prefix, ""),
        tuple(found),
        tuple(missing),
        remembered(state, now_ms, history_days),
        tuple(pattern for pattern in world.paused if matches(topic, (pattern,))),
    )


def remembered(state: State, now_ms: int, history_days: int) -> Memory:
    """How far back the state's ledger can be relied on.

    Raises:
        StoreError: the state could not be read.
    """
    created_ms = state.created_ms()
    if created_ms is None:
        return Memory(None, None, history_days)
    since_ms = max(created_ms, now_ms - history_days * _DAY_MS, state.ledger_since_ms() or created_ms)
    return Memory(created_ms, since_ms, history_days)


# --- the law, asked for the present and for the future ---------------------------------------------------------------


def judge(
    world: World,
    row: Row,
    key: MessageKey | PayloadKey,
    *,
    referenced: bool = False,
    message: Fate | None = None,
    probe_ms: int | None = None,
) -> Fate:
    """What becomes of a row.

    Args:
        row, key: the row, and its key.
        referenced: whether a message that stays refers to this payload row (L5).
        message: what becomes of a message that refers to it.
        probe_ms: when its topic is tried again, if it is quarantined.
    """
    work = world.topics.get(key.topic.prefix)
    topic, frontier = (work.topic, work.frontier) if work else (None, None)
    verdict = decide(row, topic, frontier, world.transactions, referenced, None)
    stopped = _stopped(world, key.topic)
    fate = _now(verdict, stopped, _inverts(world, row))
    rule = _rule_in_time(world, key, work) if work else None
    if rule is None or work is None:
        return replace(fate, hold=stopped if fate.invert else None)
    due_ms = _due_ms(key, work)
    fate = replace(fate, rule=rule, due_ms=due_ms if rule is Rule.EXPIRED else None)
    hold = stopped or (Hold.PROTECTED if work.frontier.hold is Hold.PROTECTED else None)
    if hold is not None:
        return replace(fate, hold=hold, until_ms=probe_ms if hold is Hold.QUARANTINED else None)
    fate = _in_time(world, work, key, fate, isinstance(verdict, Delete))
    return _with_message(world, key, fate, message) if isinstance(key, PayloadKey) else fate


def _now(verdict: Verdict, stopped: Hold | None, invert: bool) -> Fate:
    if isinstance(verdict, Delete):
        return Fate("keep", Reason.HELD, invert=invert) if stopped else Fate("delete", None, invert=invert)
    action: Literal["invert", "keep"] = "invert" if isinstance(verdict, Invert) and not stopped else "keep"
    return Fate(action, verdict.reason, invert=invert)


def _stopped(world: World, topic: TopicId) -> Hold | None:
    """What keeps runs from changing anything in a topic."""
    if world.is_paused(topic.prefix):
        return Hold.PAUSED
    return Hold.QUARANTINED if world.is_quarantined(topic.prefix) else world.label


def _inverts(world: World, row: Row) -> bool:
    """Whether the law would negate the row's pointer, if no other rule took it."""
    return isinstance(decide(row, None, None, world.transactions, False, None), Invert)


def _due_ms(key: MessageKey | PayloadKey, work: TopicWork) -> int:
    """The first moment whose cut-off lies behind the row's time: a row exactly at the cut-off lives."""
    return key.time_ms + work.topic.ttl_seconds * 1000 + 1


def _rule_in_time(world: World, key: MessageKey | PayloadKey, work: TopicWork) -> Rule | None:
    """The rule that takes the row once it is due and nothing holds it or needs it."""
    if key.time_ms == LONG_MAX:
        return None
    ripe = Frontier.open(max(world.now_ms, _due_ms(key, work)), work.topic)
    # As a message's row, because L5 then does not ask.
    verdict = decide(Row("message", key), work.topic, ripe, world.transactions, False, None)
    return verdict.rule if isinstance(verdict, Delete) else None


def _in_time(world: World, work: TopicWork, key: MessageKey | PayloadKey, fate: Fate, goes: bool) -> Fate:
    """When time alone takes the row: when it is due, or when the hold on the frontier (S8) has come to its end."""
    ripe_ms = max(world.now_ms, fate.due_ms or 0)
    if work.frontier.hold is not Hold.FRONTIER or goes:
        return replace(fate, goes_ms=ripe_ms)
    pending, hold_ms = work.record.pending, world.terms.hold_seconds * 1000
    waited_ms = elapsed_ms(pending.since, world.now) if pending else 0
    end_ms = world.now_ms + hold_ms - waited_ms
    goes_ms = max(ripe_ms, end_ms)
    # A held cut-off moves with time, and may come to the row before the hold ends.
    reached = replace(work.frontier, now_ms=ripe_ms, cutoff=Cutoff(key.time_ms + 1), due=Cutoff(key.time_ms + 1))
    if isinstance(decide(Row("message", key), work.topic, reached, world.transactions, False, None), Delete):
        reached_ms = world.now_ms + key.time_ms + 1 - work.frontier.cutoff.ms
        goes_ms = min(goes_ms, max(ripe_ms, _due_ms(key, work), reached_ms))
    if goes_ms == ripe_ms:
        return replace(fate, goes_ms=ripe_ms)
    return replace(fate, goes_ms=goes_ms, hold=Hold.FRONTIER, until_ms=end_ms)


def _with_message(world: World, key: PayloadKey, fate: Fate, message: Fate | None) -> Fate:
    """L5: a payload waits for its transaction, and for the messages that refer to it."""
    goes_ms = fate.goes_ms
    if world.transactions.snapshot is None and fate.rule is Rule.EXPIRED and goes_ms is not None:
        goes_ms = max(goes_ms, transaction_ms(key.write_pointer) + world.transactions.undecided_ms)
    elif fate.reason is Reason.UNDECIDED:
        goes_ms = None
    if message is not None and goes_ms is not None:
        goes_ms = None if message.goes_ms is None else max(goes_ms, message.goes_ms)
    elif fate.reason is Reason.REFERENCED:
        goes_ms = None
    return replace(fate, goes_ms=goes_ms)


# --- the rows, and what is remembered of them ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Question:
    """One question, and all it is put to."""

    store: Store
    state: State
    world: World
    topic: TopicId
    message_id: MessageId
    probe_ms: int | None

    def answer(self) -> tuple[list[Found], list[Missing]]:
        found: list[Found] = []
        missing: list[Missing] = []
        for key, value in self._messages():
            message = self._message(key, value)
            found.append(message)
            if message.refers and self.message_id.in_payload_table and message.pointer is not None:
                wanted = PayloadKey(self.topic, key.generation, java_abs(message.pointer), *self.message_id[2:])
                if self._has_payload(wanted):
                    found.append(self._payload(wanted, message))
                else:
                    missing.append(Missing("payload", wanted.pack(), self._traces([wanted], _TAKING)))
        if not found:
            missing.append(Missing("message", None, self._traces(self._candidates(), _TAKING)))
        return found, missing

    def _messages(self) -> Iterator[tuple[MessageKey, MessageValue | None]]:
        """The rows of every generation under the id's time and sequence; None for a value that cannot be read."""
        table, prefix = self.store.message, self.topic.prefix
        start, stop = prefix, topic_stop(prefix)
        while start < stop and (keys := table.keys(start, stop, 1).items):
            head = keys[0][: len(prefix) + GENERATION_BYTES]
            start = (stop_key(head) or stop) if len(head) == len(prefix) + GENERATION_BYTES else keys[0] + b"\x00"
            generation = int.from_bytes(head[len(prefix) :], "big", signed=True)
            key = MessageKey(self.topic, generation, *self.message_id[:2])
            raw = key.pack()
            if table.keys(raw, raw + b"\x00", 1).items:
                values = [value for _, value in table.rows(raw, raw + b"\x00", 1).items]
                yield key, values[0] if values else None

    def _message(self, key: MessageKey, value: MessageValue | None) -> Found:
        pointer = value.pointer if value else None
        return Found(
            table="message",
            key=key.pack(),
            generation=key.generation,
            time_ms=key.publish_ms,
            pointer=pointer,
            transaction=_state(pointer, self.world.transactions.snapshot) if value else "unreadable",
            refers=pointer is not None and value is not None and value.payload is None,
            fate=judge(self.world, Row("message", key, pointer), key, probe_ms=self.probe_ms),
            inverted=self._traces([key], {Rule.INVALID_TRANSACTION}) if pointer is not None and pointer < 0 else (),
        )

    def _has_payload(self, key: PayloadKey) -> bool:
        raw = key.pack()
        return bool(self.store.payload.keys(raw, raw + b"\x00", 1).items)

    def _payload(self, key: PayloadKey, message: Found) -> Found:
        referenced = message.fate.action != "delete" or self._is_referenced(key)
        fate = judge(
            self.world,
            Row("payload", key),
            key,
            referenced=referenced,
            message=message.fate,
            probe_ms=self.probe_ms,
        )
        return Found(
            table="payload",
            key=key.pack(),
            generation=key.generation,
            time_ms=key.write_ms,
            pointer=key.write_pointer,
            transaction=_state(key.write_pointer, self.world.transactions.snapshot),
            refers=False,
            fate=fate,
        )

    def _is_referenced(self, key: PayloadKey) -> bool:
        """Whether another message that stays refers to the row; looked for only where the law asks."""
        work = self.world.topics.get(self.topic.prefix)
        if work is None or judge(self.world, Row("payload", key), key).reason is not None:
            return False
        since_ms, lifetime = work.frontier.cutoff.ms, self.world.terms.lifetime
        windows = (
            search_range(self.topic, key.generation, since_ms, [key], lifetime),
            timeless_range(self.topic, key.generation),
        )
        return bool(find_referenced(self.store.message, windows, {key.write_pointer}, PAGE_ROWS, lambda: None))

    def _candidates(self) -> list[MessageKey]:
        """The keys the message may have had, by what the ledger and the announcements know of generations."""
        known = {*self.state.ledger_generations(self.topic), *(entry.generation for entry in self._announced())}
        return [MessageKey(self.topic, generation, *self.message_id[:2]) for generation in sorted(known)]

    def _announced(self) -> list[LedgerEntry]:
        """What runs have set out to do in the topic that have not ended."""
        going_on = {run.id for run in self.state.unfinished_runs()}
        return [entry for entry in self.state.intents() if entry.topic == self.topic and entry.run_id in going_on]

    def _traces(self, keys: Sequence[MessageKey | PayloadKey], rules: Collection[Rule]) -> tuple[Trace, ...]:
        """Entries of these rules that may speak of one of the keys, newest first."""
        table = "payload" if any(isinstance(key, PayloadKey) for key in keys) else "message"
        announced = self._announced()
        traces = []
        for key in keys:
            raw = key.pack()
            entries = self.state.ledger(SEARCHED_ENTRIES, topic=self.topic, key=raw)
            entries += [entry for entry in announced if entry.start <= raw < entry.stop]
            for entry in entries:
                if entry.table == table and entry.rule in rules and _may_have(entry, key.time_ms):
                    certain = table == "message" and rules is _TAKING and entry.rows is not None
                    traces.append(Trace(entry, certain))
        return tuple(sorted(traces, key=lambda trace: trace.entry.at_ms, reverse=True)[:TRACES])


#: Rules that delete.
_TAKING = frozenset({Rule.EXPIRED, Rule.OLD_GENERATION})


def _may_have(entry: LedgerEntry, time_ms: int) -> bool:
    """Whether a row of that time can have been among those of an entry."""
    if entry.oldest_ms is not None and entry.newest_ms is not None:
        return entry.oldest_ms <= time_ms <= entry.newest_ms
    return entry.rule != Rule.EXPIRED or Cutoff(entry.cutoff_ms).expires(time_ms)


def _state(pointer: int | None, snapshot: VisibilityState | None) -> str:
    """The state of a pointer's transaction, in the words of ``janitor inspect``."""
    if pointer is None:
        return ""
    if pointer < 0:
        return "rolled_back"
    if snapshot is None:
        return "positive"
    if snapshot.is_invalid(pointer):
        return "invalid"
    return "undecided" if snapshot.is_undecided(pointer) else "committed"
