"""Play a history, drawn from a seed or given, and check every invariant after every operation.

Every history ends with a settled world. Then no row that the rules delete may be left, and the boundary must be as high
as it can be: liveness, which a janitor that does nothing would violate.
"""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random

from tests.simulation.chance import TOPICS, TTLS, Chance
from tests.simulation.commands import Adopt, EnableArchive, FeedBack, Pause, Run, Truncate
from tests.simulation.invariants import (
    Violation,
    check_boundary_reached,
    check_claims,
    check_complete,
    check_payloads,
    check_reader,
)
from tests.simulation.model import HOUR_MS
from tests.simulation.operations import (
    Break,
    Create,
    FillDisk,
    Garble,
    Misconfigure,
    Operation,
    Protect,
    SetClock,
    SkewServer,
    Wait,
)
from tests.simulation.stories import STORIES
from tests.simulation.world import World

#: Drawn operations per history.
STEPS = 110

History = Sequence[Operation]


class HistoryFailed(Exception):
    """A history ended in a violation.

    Attributes:
        history: the operations played, including the failing one.
        violation: the broken invariant.
        at_end: whether the failure happened while the world was settled.
    """

    def __init__(self, history: History, violation: Violation, *, at_end: bool) -> None:
        super().__init__(str(violation))
        self.history = history
        self.violation = violation
        self.at_end = at_end


def play(operations: Iterable[Operation], *, orderly_end: bool = True) -> Counter[str]:
    """Play a history; return the count of each event."""
    with tempfile.TemporaryDirectory(prefix="tms-simulation-") as folder:
        return _play(World(Path(folder)), lambda _: iter(operations), orderly_end=orderly_end)


def play_seed(seed: int, steps: int = STEPS) -> Counter[str]:
    """Play the random history of a seed.

    In odd seeds the janitor truncates the invalid list itself; in half of all seeds it archives deleted rows.
    """
    with tempfile.TemporaryDirectory(prefix="tms-simulation-") as folder:
        first = [*([FeedBack()] if seed % 2 else []), *([EnableArchive()] if seed % 4 < 2 else [])]
        return _play(
            World(Path(folder)), lambda world: chain(first, draw(Random(seed), world, steps)), orderly_end=True
        )


def _play(world: World, operations: Callable[[World], Iterator[Operation]], *, orderly_end: bool) -> Counter[str]:
    happened: list[Operation] = []
    at_end = False
    try:
        for operation in operations(world):
            happened.append(operation)
            operation.on(world)
            check_reader(world)
            check_payloads(world)
            check_claims(world)
        if orderly_end:
            at_end = True
            settle_world(world)
    except Violation as violation:
        raise HistoryFailed(happened, violation, at_end=at_end) from violation
    # Unexpected errors can be shrunk, too.
    except Exception as error:
        raise HistoryFailed(happened, Violation("unexpected error", repr(error)), at_end=at_end) from error
    finally:
        world.state.close()
    return world.event_counts


def settle_world(world: World) -> None:
    """Repair clocks, topics and settings, decide all transactions, and run the janitor to completion."""
    for name in world.topics:
        Break(name, broken=False).on(world)
        Garble(name, on_purpose=False).on(world)
        Protect(name, protected=False).on(world)
    FillDisk(full=False).on(world)
    Misconfigure(wrong=False).on(world)
    Pause(paused=False).on(world)
    SetClock(0).on(world)
    SkewServer(0).on(world)
    Wait(25 * HOUR_MS).on(world)
    Adopt().on(world)
    Run().on(world)
    check_complete(world)
    check_claims(world)
    Wait(25 * HOUR_MS).on(world)
    prune_bound = world.manager.prune_bound()
    Run().on(world)
    check_boundary_reached(world, prune_bound)
    check_claims(world)
    Truncate().on(world)
    check_reader(world)


def draw(random: Random, world: World, steps: int) -> Iterator[Operation]:
    chance = Chance(random, world)
    story: deque[Operation] = deque()
    for name in TOPICS[: chance.up_to(len(TOPICS))]:
        yield Create(name, chance.pick(TTLS))
    if chance.happens(0.8):
        yield Adopt()
    for _ in range(steps):
        if not story and chance.happens(0.15):
            story.extend(chance.pick(STORIES)(chance))
        yield story.popleft() if story and chance.happens(0.7) else chance.operation()
