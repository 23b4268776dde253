"""The search for a message: its rows in the store, and the records of deleted rows in the state.

A message id has no generation (``docs/reference/formats/rows.md``, "Message ids"), so the search reads every generation
with rows. The ledger records deleted rows only as ranges. A range proves the deletion of *this* row only for message
rows, which are deleted without gaps. Payload rows are scattered, and a run that died leaves only announcements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from janitor.inspect.answer import FoundRow, LedgerReach, MissingRow, Trace, Why
from janitor.inspect.fate import judge
from janitor.inspect.rows import pointer_state
from janitor.rules.policy import Delete, Row, Rule, decide
from janitor.rules.ranges import find_referenced, search_range, timeless_range, topic_stop
from janitor.state.base import LedgerEntry, State
from janitor.state.values import Pointer
from janitor.sweep.run import Run
from janitor.sweep.transactions import oldest_open_ms
from tms_core.consumers.retention import processed_by
from tms_core.errors import FormatError, StoreError
from tms_core.logs.printable import moment
from tms_core.rowkey import GENERATION_BYTES, Cutoff, MessageId, MessageKey, PayloadKey, java_abs, stop_key
from tms_core.tables.base import MESSAGES, MessageValue, Reads
from tms_core.topic import TopicId

#: The maximum number of ledger entries in an answer for one row, and of searched entries.
TRACES = 100
SEARCHED_ENTRIES = 10_000
#: The number of rows in a page of the search for messages that refer to a payload.
PAGE_ROWS = 2000

_DAY_MS = 86_400_000
#: The rules that delete rows.
_DELETION_RULES = frozenset({Rule.EXPIRED, Rule.OLD_GENERATION, Rule.PROCESSED})


def why(
    store: Reads,
    state: State,
    run: Run,
    topic: TopicId,
    message_id: MessageId,
    now_ms: int,
    history_days: int,
) -> Why:
    """Return the rule and time of a message's deletion with its hold, or the run that deleted the message.

    Args:
        run: the run of a full plan, with loaded topics.
        now_ms: the time of the query.
        history_days: how long the state keeps its ledger.

    Raises:
        StoreError, StateError: the store or the state could not be read.
    """
    strikes = state.strikes().get(topic)
    search = _Search(store, state, run, topic, message_id, strikes.probe_ms if strikes else None)
    found, missing = search.find()
    work = run.topics.get(topic.prefix)
    return Why(
        topic,
        message_id,
        now_ms,
        work.topic.generation if work else None,
        work.topic.ttl_seconds if work else None,
        run.unparsed.get(topic.prefix, ""),
        tuple(found),
        tuple(missing),
        find_ledger_reach(state, now_ms, history_days),
        tuple(pattern for pattern in run.paused if topic.matches((pattern,))),
        work is not None and work.topic.consumed,
    )


def find_ledger_reach(state: State, now_ms: int, history_days: int) -> LedgerReach:
    """Return the period for which the state's ledger is complete.

    Raises:
        StateError: the state could not be read.
    """
    created_ms = state.created_ms()
    if created_ms is None:
        return LedgerReach(None, None, history_days)
    since_ms = max(created_ms, now_ms - history_days * _DAY_MS, state.ledger_since_ms() or created_ms)
    return LedgerReach(created_ms, since_ms, history_days)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for one message in a store, a state and a run."""

    store: Reads
    state: State
    run: Run
    topic: TopicId
    message_id: MessageId
    probe_ms: int | None

    def find(self) -> tuple[list[FoundRow], list[MissingRow]]:
        """Return existing and missing rows of the message."""
        found: list[FoundRow] = []
        missing: list[MissingRow] = []
        for key, value in self._messages():
            message = self._message(key, value)
            found.append(message)
            if message.refers and self.message_id.in_payload_table and message.pointer is not None:
                payload_key = PayloadKey(self.topic, key.generation, java_abs(message.pointer), *self.message_id[2:])
                if self._has_payload(payload_key):
                    found.append(self._payload(payload_key, message))
                else:
                    missing.append(
                        MissingRow("payload", payload_key.pack(), self._traces([payload_key], _DELETION_RULES))
                    )
        if not found:
            missing.append(MissingRow("message", None, self._traces(self._candidates(), _DELETION_RULES)))
        return found, missing

    def _messages(self) -> Iterator[tuple[MessageKey, MessageValue | None]]:
        """Yield the message's rows in all generations, with their values; None if a value cannot be read."""
        table, prefix = self.store.message, self.topic.prefix
        start, stop = prefix, topic_stop(prefix)
        while start < stop and (first := table.first(start, stop)) is not None:
            head = first[: len(prefix) + GENERATION_BYTES]
            start = (stop_key(head) or stop) if len(head) == len(prefix) + GENERATION_BYTES else first + b"\x00"
            generation = int.from_bytes(head[len(prefix) :], "big", signed=True)
            key = MessageKey(self.topic, generation, *self.message_id[:2])
            raw = key.pack()
            if table.first(raw, raw + b"\x00") is not None:
                values = [value for _, value in table.read(MESSAGES, raw, raw + b"\x00", 1).items]
                yield key, values[0] if values else None

    def _message(self, key: MessageKey, value: MessageValue | None) -> FoundRow:
        pointer = value.pointer if value else None
        fate = judge(self.run, Row("message", key, pointer), key, probe_ms=self.probe_ms)
        return FoundRow(
            table="message",
            key=key.pack(),
            generation=key.generation,
            time_ms=key.publish_ms,
            pointer=None if pointer is None else Pointer(pointer),
            transaction=pointer_state(pointer, self.run.transactions.snapshot) if value else "unreadable",
            refers=pointer is not None and value is not None and value.payload is None,
            fate=fate,
            unprocessed=self._unmet_condition(key) if fate.rule is Rule.EXPIRED and fate.action != "delete" else "",
            inverted=self._traces([key], {Rule.INVALID_TRANSACTION}) if pointer is not None and pointer < 0 else (),
        )

    def _unmet_condition(self, key: MessageKey) -> str:
        """Return the condition of L7 that a message does not meet; empty if L7 does not apply."""
        work, rows = self.run.topics[self.topic.prefix], self.run.processed
        if not work.topic.consumed or key.generation != work.topic.generation:
            return ""
        if rows is None:
            return "there is no usable transaction snapshot"
        try:
            limits = processed_by(rows.side, work.topic, rows.snapshot.dummy_transaction())
        except (StoreError, FormatError) as error:
            return f"the positions of its consumers cannot be read: {error}"
        waiting = sorted(name for name, limit in limits.items() if limit <= key.publish_ms << 16 | key.sequence)
        hold_end_ms = key.publish_ms + rows.hold_seconds * 1000 + 1
        if not limits:
            return "no consumer is registered"
        if waiting:
            return f"not processed by {', '.join(waiting)}"
        if hold_end_ms > self.run.now_ms:
            return f"janitor.hold_seconds keeps it until {moment(hold_end_ms)}"
        if key.publish_ms >= oldest_open_ms(rows.snapshot):
            return "an older transaction is in progress"
        return "its topic is held" if work.frontier.hold is not None else ""

    def _has_payload(self, key: PayloadKey) -> bool:
        raw = key.pack()
        return self.store.payload.first(raw, raw + b"\x00") is not None

    def _payload(self, key: PayloadKey, message: FoundRow) -> FoundRow:
        row, referenced = Row("payload", key), not message.fate.doomed or self._is_referenced(key)
        fate = judge(self.run, row, key, referenced=referenced, message=message.fate, probe_ms=self.probe_ms)
        return FoundRow(
            table="payload",
            key=key.pack(),
            generation=key.generation,
            time_ms=key.write_ms,
            pointer=Pointer(key.write_pointer),
            transaction=pointer_state(key.write_pointer, self.run.transactions.snapshot),
            refers=False,
            fate=fate,
        )

    def _is_referenced(self, key: PayloadKey) -> bool:
        """Return whether another remaining message refers to the row; False if the rules keep the row anyway."""
        work = self.run.topics.get(self.topic.prefix)
        if work is None:
            return False
        verdict = decide(Row("payload", key), work.topic, work.frontier, self.run.transactions, False, None)
        if not isinstance(verdict, Delete):
            return False
        since_ms, lifetime = work.frontier.cutoff.ms, self.run.terms.lifetime
        windows = (
            search_range(self.topic, key.generation, since_ms, [key], lifetime, work.frontier.processed_now),
            timeless_range(self.topic, key.generation),
        )
        return any(find_referenced(self.store.message, windows, {key.write_pointer}, PAGE_ROWS))

    def _candidates(self) -> list[MessageKey]:
        """Return the possible keys of the message, in all generations of the ledger and the announcements."""
        known = {
            *self.state.ledger_generations(self.topic),
            *(entry.generation for entry in self._read_announcements()),
        }
        return [MessageKey(self.topic, generation, *self.message_id[:2]) for generation in sorted(known)]

    def _read_announcements(self) -> list[LedgerEntry]:
        """Return the announcements of unfinished runs in the topic."""
        unfinished = {run.id for run in self.state.unfinished_runs()}
        return [entry for entry in self.state.intents() if entry.topic == self.topic and entry.run_id in unfinished]

    def _traces(self, keys: Sequence[MessageKey | PayloadKey], rules: Collection[Rule]) -> tuple[Trace, ...]:
        """Return the ledger entries that may include one of these rows, newest first."""
        table = "payload" if any(isinstance(key, PayloadKey) for key in keys) else "message"
        announced = self._read_announcements()
        traces = []
        for key in keys:
            raw = key.pack()
            entries = self.state.ledger(SEARCHED_ENTRIES, topic=self.topic, key=raw)
            entries += [entry for entry in announced if entry.start <= raw < entry.stop]
            for entry in entries:
                if entry.table == table and entry.rule in rules and _may_have(entry, key.time_ms):
                    certain = table == "message" and rules is _DELETION_RULES and entry.rows is not None
                    traces.append(Trace.of(entry, certain=certain))
        return tuple(sorted(traces, key=lambda trace: trace.at_ms, reverse=True)[:TRACES])


def _may_have(entry: LedgerEntry, time_ms: int) -> bool:
    """Return whether an entry can include a row with this time."""
    if entry.oldest_ms is not None and entry.newest_ms is not None:
        return entry.oldest_ms <= time_ms <= entry.newest_ms
    return entry.rule != Rule.EXPIRED or Cutoff(entry.cutoff_ms).expires(time_ms)
