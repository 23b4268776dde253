"""Stories: sequences of operations that exercise one rule, inserted at random into a history.

Random operations alone rarely reach deep states, for example a write after the timeout and the scan of a transaction
that is closed before the next run. Random operations separate the steps of a story, so that no two are alike.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.chance import TTLS, Chance
from tests.simulation.commands import (
    Adopt,
    Apply,
    Approve,
    BackUp,
    EnableArchive,
    Interruption,
    Pause,
    Plan,
    Restore,
    RestoreArchived,
    Run,
    Truncate,
    WriteBack,
)
from tests.simulation.model import (
    ALLOWANCE_MS,
    DAY_MS,
    ERROR_MS,
    GRACE_MS,
    HOLD_MS,
    HOUR_MS,
    LATE_MS,
    LIFETIME_MS,
    LOST_MS,
    MINUTE_MS,
    SKEW_MS,
)
from tests.simulation.operations import (
    Abort,
    Break,
    Checkpoint,
    Commit,
    Create,
    Delete,
    Garble,
    Misconfigure,
    Operation,
    Protect,
    Publish,
    PublishIn,
    Reboot,
    SetClock,
    SetTtl,
    SkewServer,
    Start,
    Store,
    Wait,
)


def client_after_timeout(chance: Chance) -> list[Operation]:
    """A client publishes after its transaction has timed out and been scanned."""
    tx, topic = chance.next_tx(), chance.topic()
    twists = (Wait(MINUTE_MS), SetClock(ERROR_MS), SkewServer(-SKEW_MS), Garble(topic), Checkpoint(tx))
    return [
        Start(tx, 30_000),
        PublishIn(tx, topic),
        chance.pick(twists),
        Wait(MINUTE_MS),
        Run(),
        Wait(chance.pick((MINUTE_MS, HOUR_MS))),
        PublishIn(tx, topic),
        chance.pick(twists),
        Run(),
        PublishIn(tx, topic, late_ms=MINUTE_MS, in_flight_ms=chance.pick((0, MINUTE_MS))),
        Wait(LIFETIME_MS - chance.pick((0, 1, MINUTE_MS))),
        PublishIn(tx, topic, late_ms=chance.pick((0, LATE_MS))),
        Run(),
        Wait(LATE_MS),
        PublishIn(tx, topic, late_ms=LATE_MS, in_flight_ms=chance.pick((0, LATE_MS))),
        Wait(chance.pick((10 * MINUTE_MS, DAY_MS))),
        chance.pick((Run(), Run(topic=chance.topic()))),
        Run(),
        Truncate(),
    ]


def late_write(chance: Chance) -> list[Operation]:
    """A row with a time before the first scan lands after the second."""
    tx, topic = chance.next_tx(), chance.topic()
    return [
        Start(tx, 30_000),
        PublishIn(tx, topic),
        Wait(10 * MINUTE_MS),
        Run(),
        Wait(LATE_MS - 10 * MINUTE_MS),
        Run(),
        PublishIn(tx, topic, late_ms=LATE_MS, in_flight_ms=LATE_MS),
        Wait(LIFETIME_MS + GRACE_MS),
        Run(),
        Wait(chance.pick((MINUTE_MS, DAY_MS))),
        Run(),
        Truncate(),
    ]


def slow_transaction(chance: Chance) -> list[Operation]:
    """Payloads expire before the publish and the commit of their message."""
    tx, topic = chance.next_tx(), chance.topic()
    return [
        Start(tx, LIFETIME_MS, long=True),
        Store(tx, topic, 2),
        Wait(HOUR_MS + 1),
        Run(),
        PublishIn(tx, topic, refers=True),
        Run(),
        Commit(tx),
        Wait(MINUTE_MS),
        Run(),
        Wait(10 * MINUTE_MS),
        Run(),
    ]


def missing_snapshots(chance: Chance) -> list[Operation]:
    """A transaction uses its full lifetime while no snapshots are written."""
    tx, topic = chance.next_tx(), chance.topic()
    return [
        Start(tx, LIFETIME_MS),
        Store(tx, topic),
        Wait(LIFETIME_MS - chance.pick((0, 1, MINUTE_MS, 4 * MINUTE_MS)), None),
        SetClock(chance.pick((0, ERROR_MS))),
        Run(),
        PublishIn(tx, topic, refers=True),
        Commit(tx),
        Wait(chance.pick((1, ALLOWANCE_MS)), None),
        Run(),
    ]


def clock_behind(chance: Chance) -> list[Operation]:
    """A topic changes while the janitor's clock is behind; the next boot corrects the clock."""
    topic = chance.topic()
    return [
        Publish(topic, 2),
        Wait(2 * HOUR_MS),
        chance.pick((SetClock(-HOUR_MS), SetClock(-3 * DAY_MS), Reboot(LOST_MS))),
        chance.pick((Delete(topic), SetTtl(topic, TTLS[0]), Create(topic, TTLS[0]))),
        Run(),
        Wait(MINUTE_MS),
        Reboot(),
        Run(),
    ]


def clock_ahead(chance: Chance) -> list[Operation]:
    """An operator approves a topic on a machine that booted in the future, then corrects the clock."""
    topic = chance.topic()
    return [
        Publish(topic, 2),
        chance.pick((SetTtl(topic, TTLS[2]), Delete(topic))),
        Reboot(30 * DAY_MS),
        chance.pick((Approve(topic), Run(), Plan(3))),
        SetClock(0),
        Create(topic, TTLS[2]),
        Publish(topic, 2),
        Wait(2 * HOUR_MS),
        SetTtl(topic, chance.pick(TTLS[:2])),
        Run(),
    ]


def shortened_ttl(chance: Chance) -> list[Operation]:
    """A ttl is shortened; the operator approves, reverts or waits."""
    topic = chance.topic()
    end = (Approve(topic), SetTtl(topic, TTLS[-1]), Wait(HOLD_MS - 10 * MINUTE_MS), Wait(HOLD_MS))
    return [
        Publish(topic, 2),
        Wait(3 * HOUR_MS),
        Run(),
        SetTtl(topic, chance.pick(TTLS[:2])),
        Run(),
        chance.pick(end),
        Run(),
    ]


def recreated_topic(chance: Chance) -> list[Operation]:
    """A topic is deleted and recreated; its rows become old."""
    topic = chance.topic()
    return [
        Publish(topic, 2),
        Run(),
        Delete(topic),
        Run(),
        Create(topic, chance.pick(TTLS)),
        Publish(topic),
        Wait(chance.pick((MINUTE_MS, HOLD_MS))),
        Run(),
    ]


def change_during_sweep(chance: Chance) -> list[Operation]:
    """A topic changes during its sweep."""
    topic = chance.topic()
    change = chance.pick((SetTtl(topic, TTLS[-1]), Garble(topic), Delete(topic)))
    return [
        SetTtl(topic, TTLS[0]),
        Approve(),
        Publish(topic, 3),
        Wait(HOUR_MS),
        Run(batch_rows=1, at_call=chance.up_to(12), concurrent=change),
    ]


def unreadable_metadata(chance: Chance) -> list[Operation]:
    """A topic's metadata is temporarily unreadable."""
    topic = chance.topic()
    old = (Publish(topic), Delete(topic), Garble(topic), Run(), Wait(HOLD_MS), Run())
    return [*old, Garble(topic, on_purpose=False), Run(), Wait(HOLD_MS), Run()]


def protected_topic(chance: Chance) -> list[Operation]:
    """A topic is protected for longer than its ttl."""
    topic = chance.topic()
    return [Publish(topic), Protect(topic), Wait(6 * HOUR_MS + 1), Run(), Protect(topic, protected=False), Run()]


def applied_plan(chance: Chance) -> list[Operation]:
    """A plan is applied after a concurrent operation."""
    concurrent = chance.pick((Approve(), chance.wait(), chance.publish_in(), chance.operation()))
    return [chance.set_ttl(), Plan(3), concurrent, Apply(3, adopt=chance.happens(0.3))]


def restored_backup(chance: Chance) -> list[Operation]:
    """A backup is restored after the janitor has proven a boundary."""
    tx, topic = chance.next_tx(), chance.topic()
    return [
        Start(tx, 30_000),
        PublishIn(tx, topic),
        BackUp(3),
        Wait(DAY_MS),
        Run(),
        Wait(MINUTE_MS),
        Run(),
        Restore(3, in_place=chance.happens(0.7)),
        *(Publish(topic, 3) for _ in range(chance.up_to(6))),
        chance.pick((Truncate(), Run(), Run(adopt=True), Adopt(), BackUp(3))),
        Run(),
        Truncate(),
    ]


def paused_topic(chance: Chance) -> list[Operation]:
    """A topic is paused during its sweep, changed or not, and resumed."""
    topic = chance.topic()
    concurrent = (Wait(6 * HOUR_MS), SetTtl(topic, chance.pick(TTLS[:2])), Delete(topic), Approve(topic))
    return [
        SetTtl(topic, TTLS[0]),
        Approve(),
        Publish(topic, 3),
        Wait(HOUR_MS),
        Run(batch_rows=1, at_call=chance.up_to(12), concurrent=Pause(topic)),
        Publish(topic, 2),
        chance.pick(concurrent),
        Run(),
        chance.pick((Wait(HOUR_MS), Wait(DAY_MS))),
        Run(patient=True),
        Pause(topic, paused=False),
        Run(patient=chance.happens(0.5)),
    ]


def failing_topic(chance: Chance) -> list[Operation]:
    """A topic fails until it is quarantined, and is repaired later."""
    topic, other = chance.topic(), chance.topic()
    again = [operation for _ in range(4) for operation in (Publish(other), Publish(topic), Wait(HOUR_MS + 1), Run())]
    return [
        *(SetTtl(topic, TTLS[0]), SetTtl(other, TTLS[0]), Approve(), Break(topic)),
        *again,
        chance.pick((Truncate(), Run())),
        Break(topic, broken=False),
        Wait(chance.pick((MINUTE_MS, 2 * HOUR_MS, DAY_MS))),
        Run(),
        Truncate(),
    ]


def interrupted_run(chance: Chance) -> list[Operation]:
    """A run is stopped, killed or fenced, and the next run continues."""
    topic, trouble = chance.topic(), chance.pick((Interruption.HALT, Interruption.CRASH, Interruption.TAKE_OVER))
    return [
        SetTtl(topic, TTLS[0]),
        Approve(),
        Publish(topic, 3),
        Wait(HOUR_MS),
        Run(batch_rows=1, at_call=chance.up_to(15), concurrent=trouble),
        chance.pick((Wait(MINUTE_MS), SetTtl(topic, TTLS[-1]), Delete(topic))),
        Run(),
    ]


def missed_rollback(chance: Chance) -> list[Operation]:
    """A topic is recreated between a publish and its rollback; its deleted rows are restored."""
    tx, topic, other = chance.next_tx(), chance.topic(), chance.topic()
    again = [Delete(topic), chance.pick((Wait(MINUTE_MS), Run())), Create(topic, TTLS[-1])]
    return [
        *(EnableArchive(), Create(topic, TTLS[-1]), Create(other, TTLS[-1]), Start(tx, LIFETIME_MS)),
        *(PublishIn(tx, topic), *again, chance.pick((PublishIn(tx, topic), Wait(1)))),
        chance.pick((Abort(tx), Commit(tx))),
        *(Wait(MINUTE_MS), Run(), Approve(), Run(), Pause(topic)),
        chance.pick((RestoreArchived(topic), RestoreArchived(topic, other))),
        Pause(topic, paused=False),
    ]


def transaction_in_two_topics(chance: Chance) -> list[Operation]:
    """A transaction publishes in two topics; deleted rows of one are restored into the other."""
    tx, topic, other = chance.next_tx(), chance.topic(), chance.topic()
    work = (Store(tx, topic), Store(tx, other), PublishIn(tx, topic, refers=True), PublishIn(tx, other, refers=True))
    return [
        *(EnableArchive(), Create(topic, TTLS[0]), Create(other, TTLS[-1]), SetTtl(topic, TTLS[0]), Approve()),
        *(Start(tx, LIFETIME_MS), *work, chance.pick((Commit(tx), Abort(tx), Wait(1)))),
        *(Wait(HOUR_MS), Run(), chance.pick((RestoreArchived(topic, other), RestoreArchived(other, topic)))),
        *(Store(tx, other), PublishIn(tx, other, refers=True), Commit(tx)),
    ]


def refuted_boundary(chance: Chance) -> list[Operation]:
    """An aborted message reappears below the proven boundary, and an audit finds it."""
    tx, topic = chance.next_tx(), chance.topic()
    return [
        *(Create(topic, TTLS[-1]), SetTtl(topic, TTLS[-1]), Start(tx, 30_000), PublishIn(tx, topic)),
        *(Wait(DAY_MS), Run(), Wait(MINUTE_MS), Run(), WriteBack()),
        chance.pick((Truncate(), Run(patient=True), Run(topic=topic), Wait(MINUTE_MS))),
        *(Run(patient=chance.happens(0.5)), Truncate()),
    ]


def wrong_snapshots(chance: Chance) -> list[Operation]:
    """The janitor temporarily reads the snapshots of another transaction service."""
    tx, topic = chance.next_tx(), chance.topic()
    return [
        *(Create(topic, TTLS[-1]), SetTtl(topic, TTLS[-1]), Start(tx), PublishIn(tx, topic), Commit(tx)),
        *(Wait(MINUTE_MS), Run(), Misconfigure(), chance.pick((Wait(MINUTE_MS), Plan(3), Publish(topic)))),
        *(Run(), Misconfigure(wrong=False), chance.pick((Apply(3), Run()))),
    ]


STORIES: tuple[Callable[[Chance], list[Operation]], ...] = (
    client_after_timeout,
    late_write,
    slow_transaction,
    missing_snapshots,
    clock_behind,
    clock_ahead,
    shortened_ttl,
    recreated_topic,
    change_during_sweep,
    unreadable_metadata,
    protected_topic,
    applied_plan,
    restored_backup,
    paused_topic,
    failing_topic,
    interrupted_run,
    missed_rollback,
    transaction_in_two_topics,
    refuted_boundary,
    wrong_snapshots,
)
