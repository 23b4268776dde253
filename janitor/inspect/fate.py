"""The future of one row: the rules, applied to the present and to later times.

Only ``decide`` determines when a row is deleted. It is called for the next run, for the time when the row is due, and
for the time when a held cutoff reaches the row. There is no second copy of the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from janitor.rules.policy import Delete, Frontier, Hold, Invert, Reason, Row, Rule, Verdict, decide, elapsed_ms
from janitor.sweep.run import Run, TopicWork
from tms_core.rowkey import LONG_MAX, Cutoff, MessageKey, PayloadKey
from tms_core.topic import TopicId
from tms_core.transaction.model import transaction_ms


@dataclass(frozen=True, slots=True)
class Fate:
    """The decision of the rules on a row, now or later.

    Attributes:
        action: the action of the next run.
        reason: the reason why the row is kept; None if it is deleted.
        rule: the rule that deletes it, now or later; None if no rule deletes it according to the present facts.
        due_ms: the time at which it is due by that rule; None if the rule does not depend on time.
        hold: the hold that delays the rule.
        until_ms: the time when the hold expires; None if it does not expire, or if unknown.
        goes_ms: the earliest time at which a run deletes it if no operator acts; None if that needs more than time.
        invert: whether its transaction is invalid, so that runs negate its pointer while the row exists.
    """

    action: Literal["delete", "invert", "keep"]
    reason: Reason | None
    rule: Rule | None = None
    due_ms: int | None = None
    hold: Hold | None = None
    until_ms: int | None = None
    goes_ms: int | None = None
    invert: bool = False

    @property
    def doomed(self) -> bool:
        """Return whether the next run deletes the row, or would if the store were adopted."""
        return self.action == "delete" or (self.reason is Reason.HELD and self.hold is Hold.FIRST_CONTACT)


def judge(
    run: Run,
    row: Row,
    key: MessageKey | PayloadKey,
    *,
    referenced: bool = False,
    message: Fate | None = None,
    probe_ms: int | None = None,
) -> Fate:
    """Return the future of a row.

    Args:
        row, key: the row, and its key.
        referenced: whether a remaining message refers to this payload row (L5).
        message: the future of a message that refers to it.
        probe_ms: the time of the next probe of a quarantined topic.
    """
    work = run.topics.get(key.topic.prefix)
    topic, frontier = (work.topic, work.frontier) if work else (None, None)
    verdict = decide(row, topic, frontier, run.transactions, referenced, None)
    stopped = _find_hold(run, key.topic)
    fate = _present_fate(verdict, stopped, _inverts(run, row))
    rule = _rule_in_time(run, key, work) if work else None
    if rule is None or work is None:
        return replace(fate, hold=stopped if fate.invert else None)
    due_ms = _due_ms(key, work)
    if due_ms > run.now_ms and rule is Rule.EXPIRED and work.frontier.is_processed(key):
        rule = Rule.PROCESSED
    fate = replace(fate, rule=rule, due_ms=due_ms if rule is Rule.EXPIRED else None)
    hold = stopped or (Hold.PROTECTED if work.frontier.hold is Hold.PROTECTED else None)
    if hold is not None:
        return replace(fate, hold=hold, until_ms=probe_ms if hold is Hold.QUARANTINED else None)
    fate = _add_times(run, work, key, fate, isinstance(verdict, Delete))
    return _with_message(run, key, fate, message) if isinstance(key, PayloadKey) else fate


def _present_fate(verdict: Verdict, stopped: Hold | None, invert: bool) -> Fate:
    if isinstance(verdict, Delete):
        return Fate("keep", Reason.HELD, invert=invert) if stopped else Fate("delete", None, invert=invert)
    action: Literal["invert", "keep"] = "invert" if isinstance(verdict, Invert) and not stopped else "keep"
    return Fate(action, verdict.reason, invert=invert)


def _find_hold(run: Run, topic: TopicId) -> Hold | None:
    """Return the hold that forbids all changes in a topic; None without such a hold."""
    if run.is_paused(topic.prefix):
        return Hold.PAUSED
    return Hold.QUARANTINED if run.is_quarantined(topic.prefix) else run.label


def _inverts(run: Run, row: Row) -> bool:
    """Return whether the rules would negate the row's pointer if no other rule deleted it."""
    return isinstance(decide(row, None, None, run.transactions, False, None), Invert)


def _due_ms(key: MessageKey | PayloadKey, work: TopicWork) -> int:
    """Return the first time whose cutoff is after the row's time: a row exactly at the cutoff is not due."""
    return key.time_ms + work.topic.ttl_seconds * 1000 + 1


def _rule_in_time(run: Run, key: MessageKey | PayloadKey, work: TopicWork) -> Rule | None:
    """Return the rule that deletes the row when it is due, without holds and references."""
    if key.time_ms == LONG_MAX:
        return None
    due_frontier = Frontier.open(max(run.now_ms, _due_ms(key, work)), work.topic)
    # Treat it as a message row, to which L5 does not apply.
    verdict = decide(Row("message", key), work.topic, due_frontier, run.transactions, False, None)
    return verdict.rule if isinstance(verdict, Delete) else None


def _add_times(run: Run, work: TopicWork, key: MessageKey | PayloadKey, fate: Fate, is_deleted: bool) -> Fate:
    """Return the fate with the time of deletion: when the row is due, or when the hold on the frontier (S8) ends."""
    ripe_ms = max(run.now_ms, fate.due_ms or 0)
    due_ms = None if is_deleted else fate.due_ms
    if work.frontier.hold is Hold.CONSUMER and due_ms is not None and due_ms <= run.now_ms:
        end_ms = due_ms + (run.terms.consumer_hold_seconds or 0) * 1000
        return replace(fate, goes_ms=end_ms, hold=Hold.CONSUMER, until_ms=end_ms)
    if work.frontier.hold is Hold.TRANSACTION and due_ms is not None and due_ms <= run.now_ms:
        return replace(fate, hold=Hold.TRANSACTION)
    if work.frontier.hold is not Hold.FRONTIER or is_deleted:
        return replace(fate, goes_ms=ripe_ms)
    pending, hold_ms = work.record.pending, run.terms.hold_seconds * 1000
    waited_ms = elapsed_ms(pending.since, run.now) if pending else 0
    end_ms = run.now_ms + hold_ms - waited_ms
    goes_ms = max(ripe_ms, end_ms)
    # A held cutoff moves with time, and may reach the row before the end of the hold.
    reached = replace(work.frontier, now_ms=ripe_ms, cutoff=Cutoff(key.time_ms + 1), due=Cutoff(key.time_ms + 1))
    if isinstance(decide(Row("message", key), work.topic, reached, run.transactions, False, None), Delete):
        reached_ms = run.now_ms + key.time_ms + 1 - work.frontier.cutoff.ms
        goes_ms = min(goes_ms, max(ripe_ms, reached_ms))
    if goes_ms == ripe_ms:
        return replace(fate, goes_ms=ripe_ms)
    return replace(fate, goes_ms=goes_ms, hold=Hold.FRONTIER, until_ms=end_ms)


def _with_message(run: Run, key: PayloadKey, fate: Fate, message: Fate | None) -> Fate:
    """Apply L5: a payload waits for its transaction, and for the messages that refer to it."""
    goes_ms = fate.goes_ms
    if run.transactions.snapshot is None and fate.rule is Rule.EXPIRED and goes_ms is not None:
        goes_ms = max(goes_ms, transaction_ms(key.write_pointer) + run.transactions.undecided_ms)
    elif fate.reason is Reason.UNDECIDED:
        goes_ms = None
    if fate.reason is Reason.REFERENCED and (message is None or message.doomed):
        goes_ms = None  # it depends on another message, which is unknown here
    elif message is not None and goes_ms is not None:
        goes_ms = None if message.goes_ms is None else max(goes_ms, message.goes_ms)
    return replace(fate, goes_ms=goes_ms)
