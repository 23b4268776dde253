"""Random histories: what happens, in which order, from a seed; and playing one.

Operations are drawn one by one with a look at the site, so that they mostly have something to work on. Pure chance
rarely gets deep, so now and then a short script is begun, a story of the kind the rules were written for, whose steps
come up between the random ones. At the end of every history everything is put in order, and then nothing that the law
takes may be left and the claim must go as far as it may: a janitor that does nothing is not a safe one.
"""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from tests.simulation.invariants import (
    Violation,
    check_claim_reached,
    check_claims,
    check_complete,
    check_reader,
)
from tests.simulation.model import (
    ALLOWANCE_MS,
    DAY_MS,
    ERROR_MS,
    HOLD_MS,
    HOUR_MS,
    IN_FLIGHT_MS,
    LATE_MS,
    LIFETIME_MS,
    LOST_MS,
    MINUTE_MS,
    SKEW_MS,
)
from tests.simulation.operations import (
    Abort,
    Adopt,
    Apply,
    Approve,
    BackUp,
    Checkpoint,
    Commit,
    Create,
    DamageSnapshot,
    Delete,
    Garble,
    Invalidate,
    LoseState,
    Odd,
    Operation,
    Plan,
    Protect,
    Publish,
    PublishIn,
    PutForeign,
    Reboot,
    Restore,
    Run,
    SetClock,
    SetTtl,
    SkewServer,
    Start,
    Store,
    Trouble,
    Truncate,
    Wait,
)
from tests.simulation.site import Site

STEPS = 110
TOPICS = ("a", "a-b", "b")
TTLS = (10 * 60, 3600, 6 * 3600, 2 * 86400, 10 * 86400)
TIMEOUTS_MS = (30_000, 10 * MINUTE_MS, LIFETIME_MS)
WAITS_MS = (1, 30_000, MINUTE_MS, MINUTE_MS, 10 * MINUTE_MS, 10 * MINUTE_MS, HOUR_MS, HOUR_MS + 1, 2 * HOUR_MS)
LONG_WAITS_MS = (3 * HOUR_MS + 6 * MINUTE_MS, 6 * HOUR_MS, 25 * HOUR_MS, 3 * DAY_MS, 8 * DAY_MS)
AGES_MS = (0, 0, 0, 30_000, 110_000, 121_000, None)
ERRORS_MS = (0, 0, 0, ERROR_MS, -ERROR_MS, -HOUR_MS, HOUR_MS, DAY_MS, -3 * DAY_MS, 30 * DAY_MS, LOST_MS)

History = Sequence[Operation]


# --- playing ---------------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A history ended in a violation.

    Attributes:
        history: what had happened by then, the last operation included.
        violation: what was found.
    """

    def __init__(self, history: History, violation: Violation) -> None:
        super().__init__(str(violation))
        self.history = history
        self.violation = violation


def play(operations: Iterable[Operation], *, orderly_end: bool = True) -> Counter[str]:
    """Play a history.

    Args:
        operations: what happens.
        orderly_end: put everything in order at the end, and look whether everything was done.

    Returns:
        What was reached on the way.

    Raises:
        Failed: an invariant does not hold.
    """
    with tempfile.TemporaryDirectory(prefix="tms-simulation-") as folder:
        return _play(Site(Path(folder)), lambda _: iter(operations), orderly_end=orderly_end)


def play_seed(seed: int, steps: int = STEPS) -> Counter[str]:
    """Play the random history of a seed.

    Raises:
        Failed: an invariant does not hold.
    """
    with tempfile.TemporaryDirectory(prefix="tms-simulation-") as folder:
        return _play(Site(Path(folder)), lambda site: draw(Random(seed), site, steps), orderly_end=True)


def _play(site: Site, operations: Callable[[Site], Iterator[Operation]], *, orderly_end: bool) -> Counter[str]:
    happened: list[Operation] = []
    try:
        for operation in operations(site):
            happened.append(operation)
            operation.on(site)
            check_reader(site)
            check_claims(site)
        if orderly_end:
            put_in_order(site)
    except Violation as violation:
        raise Failed(happened, violation) from violation
    finally:
        site.state.close()
    return site.reached


def put_in_order(site: Site) -> None:
    """Set clocks, topics and settings right, let everything be decided, and have the janitor do all there is to do."""
    for name in site.topics:
        Garble(name, on_purpose=False).on(site)
        Protect(name, protected=False).on(site)
    SetClock(0).on(site)
    SkewServer(0).on(site)
    Wait(25 * HOUR_MS).on(site)
    Run(adopt=True).on(site)
    check_complete(site)
    check_claims(site)
    Wait(4 * HOUR_MS).on(site)
    Run().on(site)
    check_claim_reached(site)
    check_claims(site)
    Truncate().on(site)
    check_reader(site)


# --- drawing ---------------------------------------------------------------------------------------------------------


def draw(random: Random, site: Site, steps: int) -> Iterator[Operation]:
    """What happens next, and next, looking at the site in between."""
    scripted: deque[Operation] = deque()
    for name in TOPICS[: random.randint(1, 3)]:
        yield Create(name, random.choice(TTLS))
    if random.random() < 0.8:
        yield Adopt()
    for _ in range(steps):
        if not scripted and random.random() < 0.15:
            scripted.extend(random.choice(SCRIPTS)(random, site))
        if scripted and random.random() < 0.7:
            yield scripted.popleft()
        else:
            yield _any(random, site)


def _any(random: Random, site: Site) -> Operation:
    kinds, weights = zip(*_WEIGHTS.items(), strict=True)
    kind: Callable[[Random, Site], Operation] = random.choices(kinds, weights)[0]
    return kind(random, site)


def _topic(random: Random) -> str:
    return random.choice(TOPICS)


def _tx(random: Random, site: Site) -> int:
    """Mostly one that is not done; sometimes one that does not exist."""
    active = [number for number, client in site.clients.items() if not client.done]
    return random.choice(active[-4:]) if active else 0


def _next_tx(site: Site) -> int:
    return max(site.clients, default=0) + 1


def _publish_in(random: Random, site: Site) -> Operation:
    late_ms = random.choice((0, 0, 0, MINUTE_MS, LATE_MS // 2, LATE_MS))
    in_flight_ms = random.choice((0, 0, 0, IN_FLIGHT_MS))
    refers = random.random() < 0.4
    rows = 1 if refers else random.randint(1, 3)
    return PublishIn(_tx(random, site), _topic(random), rows, refers, late_ms, in_flight_ms)


def _start(random: Random, site: Site) -> Operation:
    return Start(_next_tx(site), random.choice(TIMEOUTS_MS), random.random() < 0.3)


def _wait(random: Random, site: Site) -> Operation:
    waits = WAITS_MS if random.random() < 0.85 else LONG_WAITS_MS
    return Wait(random.choice(waits), random.choice(AGES_MS))


def _run(random: Random, site: Site) -> Operation:
    batch_rows = random.choice((1, 2, 5, 2000))
    if random.random() < 0.1:
        return Run(topic=_topic(random), batch_rows=batch_rows)
    if random.random() < 0.6:
        return Run(batch_rows=batch_rows)
    at_call = random.randint(1, random.choice((3, 8, 25)))
    if random.random() < 0.4:
        return Run(batch_rows=batch_rows, at_call=at_call, meanwhile=random.choice(tuple(Trouble)))
    meanwhile = random.choice((_create, _delete, _set_ttl, _publish_in, _publish_in, _commit, _abort, _store))
    return Run(batch_rows=batch_rows, at_call=at_call, meanwhile=meanwhile(random, site))


def _create(random: Random, site: Site) -> Operation:
    return Create(_topic(random), random.choice(TTLS))


def _delete(random: Random, site: Site) -> Operation:
    return Delete(_topic(random))


def _set_ttl(random: Random, site: Site) -> Operation:
    return SetTtl(_topic(random), random.choice(TTLS))


def _commit(random: Random, site: Site) -> Operation:
    return Commit(_tx(random, site))


def _abort(random: Random, site: Site) -> Operation:
    return Abort(_tx(random, site))


def _store(random: Random, site: Site) -> Operation:
    return Store(_tx(random, site), _topic(random), random.randint(1, 2))


_WEIGHTS: dict[Callable[[Random, Site], Operation], float] = {
    _wait: 20,
    _run: 12,
    _publish_in: 10,
    _start: 7,
    _store: 5,
    _commit: 4,
    _abort: 2,
    _create: 2,
    _delete: 1.5,
    _set_ttl: 2,
    lambda random, site: Publish(_topic(random), random.randint(1, 3)): 6,
    lambda random, site: Checkpoint(_tx(random, site)): 2,
    lambda random, site: Invalidate(_tx(random, site)): 1,
    lambda random, site: Garble(_topic(random), random.random() < 0.4): 1,
    lambda random, site: Protect(_topic(random), random.random() < 0.4): 1,
    lambda random, site: PutForeign(_topic(random), random.choice(("message", "payload")), random.choice(tuple(Odd))): 1,
    lambda random, site: SkewServer(random.choice((0, SKEW_MS, -SKEW_MS))): 1.5,
    lambda random, site: SetClock(random.choice(ERRORS_MS)): 2.5,
    lambda random, site: Reboot(random.choice(ERRORS_MS)): 1,
    lambda random, site: DamageSnapshot(random.choice((-1, 0, 10, 50, 90))): 2,
    lambda random, site: Adopt(): 1.5,
    lambda random, site: Approve(random.choice((None, None, *TOPICS))): 2,
    lambda random, site: Plan(random.randint(1, 2)): 2,
    lambda random, site: Apply(random.randint(1, 2), random.random() < 0.2): 2,
    lambda random, site: Truncate(): 2,
    lambda random, site: BackUp(random.randint(1, 2)): 1.5,
    lambda random, site: Restore(random.randint(1, 2), random.random() < 0.5): 0.7,
    lambda random, site: LoseState(): 0.3,
}


# --- stories ---------------------------------------------------------------------------------------------------------


def unaware_client(random: Random, site: Site) -> list[Operation]:
    """A transaction times out, is seen invalid, is scanned, and its client still publishes afterwards."""
    tx, topic = _next_tx(site), _topic(random)
    twists = (Wait(MINUTE_MS), SetClock(ERROR_MS), SkewServer(-SKEW_MS), Garble(topic), Checkpoint(tx))
    return [
        Start(tx, 30_000),
        PublishIn(tx, topic),
        random.choice(twists),
        Wait(MINUTE_MS),
        Run(),
        Wait(random.choice((MINUTE_MS, HOUR_MS))),
        PublishIn(tx, topic),
        random.choice(twists),
        Run(),
        PublishIn(tx, topic, in_flight_ms=random.choice((0, IN_FLIGHT_MS))),
        Wait(LIFETIME_MS - random.choice((0, 1, MINUTE_MS))),
        PublishIn(tx, topic, late_ms=random.choice((0, LATE_MS))),
        Run(),
        Wait(LATE_MS),
        PublishIn(tx, topic, late_ms=LATE_MS),
        Wait(10 * MINUTE_MS),
        Run(),
        Truncate(),
    ]


def slow_transaction(random: Random, site: Site) -> list[Operation]:
    """Payloads grow old before their message is published, and the message is committed after that."""
    tx, topic = _next_tx(site), _topic(random)
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


def no_snapshot(random: Random, site: Site) -> list[Operation]:
    """The transaction service writes no snapshots, and a transaction takes all the time it may."""
    tx, topic = _next_tx(site), _topic(random)
    return [
        Start(tx, LIFETIME_MS),
        Store(tx, topic),
        Wait(LIFETIME_MS - random.choice((0, 1, MINUTE_MS, 4 * MINUTE_MS)), None),
        SetClock(random.choice((0, ERROR_MS))),
        Run(),
        PublishIn(tx, topic, refers=True),
        Commit(tx),
        Wait(random.choice((1, ALLOWANCE_MS)), None),
        Run(),
    ]


def clock_behind(random: Random, site: Site) -> list[Operation]:
    """The janitor's clock was behind when something changed, and is right after the next boot."""
    topic = _topic(random)
    return [
        Publish(topic, 2),
        SetClock(random.choice((-HOUR_MS, -3 * DAY_MS))),
        random.choice((Delete(topic), SetTtl(topic, TTLS[0]), Create(topic, TTLS[0]))),
        Run(),
        Wait(MINUTE_MS),
        Reboot(),
        Run(),
    ]


def shortened_ttl(random: Random, site: Site) -> list[Operation]:
    """A ttl is shortened, by mistake or not."""
    topic = _topic(random)
    end = [Approve(topic), SetTtl(topic, 10 * 86400), Wait(HOLD_MS - 10 * MINUTE_MS), Wait(HOLD_MS)]
    return [
        Publish(topic, 2),
        Wait(3 * HOUR_MS),
        Run(),
        SetTtl(topic, random.choice(TTLS[:2])),
        Run(),
        random.choice(end),
        Run(),
    ]


def created_again(random: Random, site: Site) -> list[Operation]:
    """A topic is deleted and created again; what was in it is old."""
    topic = _topic(random)
    return [
        Publish(topic, 2),
        Run(),
        Delete(topic),
        Run(),
        Create(topic, random.choice(TTLS)),
        Publish(topic),
        Wait(random.choice((MINUTE_MS, HOLD_MS))),
        Run(),
    ]


def changed_meanwhile(random: Random, site: Site) -> list[Operation]:
    """A topic is given more time, or deleted, while the janitor is at work on it."""
    topic = _topic(random)
    change = random.choice((SetTtl(topic, TTLS[-1]), Garble(topic), Delete(topic)))
    return [
        SetTtl(topic, TTLS[0]),
        Approve(),
        Publish(topic, 3),
        Wait(HOUR_MS),
        Run(batch_rows=1, at_call=random.randint(2, 12), meanwhile=change),
    ]


def unreadable(random: Random, site: Site) -> list[Operation]:
    """A topic's metadata cannot be read for a while."""
    topic = _topic(random)
    return [Publish(topic), Garble(topic), Run(), Wait(HOLD_MS), Run(), Garble(topic, on_purpose=False), Run()]


def protected(random: Random, site: Site) -> list[Operation]:
    """A topic is protected beyond its ttl."""
    topic = _topic(random)
    return [Publish(topic), Protect(topic), Wait(6 * HOUR_MS + 1), Run(), Protect(topic, protected=False), Run()]


def planned(random: Random, site: Site) -> list[Operation]:
    """A plan is made, looked at, and carried out; something happened in between."""
    meanwhile = random.choice((_wait, _wait, _publish_in, _any))
    return [Plan(3), meanwhile(random, site), Apply(3, adopt=random.random() < 0.3)]


def restored(random: Random, site: Site) -> list[Operation]:
    """A backup is restored after the janitor has claimed."""
    tx, topic = _next_tx(site), _topic(random)
    return [
        Start(tx, 30_000),
        PublishIn(tx, topic),
        BackUp(3),
        Wait(LIFETIME_MS + HOUR_MS + 10 * MINUTE_MS),
        Run(),
        Wait(MINUTE_MS),
        Run(),
        Restore(3, in_place=random.random() < 0.5),
        random.choice((Truncate(), Run(), Adopt())),
        Run(),
        Truncate(),
    ]


SCRIPTS: tuple[Callable[[Random, Site], list[Operation]], ...] = (
    unaware_client,
    slow_transaction,
    no_snapshot,
    clock_behind,
    shortened_ttl,
    created_again,
    changed_meanwhile,
    unreadable,
    protected,
    planned,
    restored,
)
