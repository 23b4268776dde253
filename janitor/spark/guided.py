"""A driver's own pass over a store that it alone can write, guided by tasks that have looked at a copy.

It is the pass of one process in every respect: guards, lease, frontiers, archive, ledger, evidence, claims. Only where
nothing is to be done it does not go, because tasks have been there: for the pointers of invalid transactions and for
payload rows, which are what a pass has to look for. Nobody else can write meanwhile, so what tasks saw is still so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from janitor.crew import Crew, Step, StepName, nothing_more
from janitor.observe import Observer
from janitor.policy import Reason
from janitor.ranges import Range
from janitor.report import Tally
from janitor.spark.errands import Errand, Share, portable
from janitor.spark.ranged import RangedStore
from janitor.spark.sender import Sender
from janitor.walk import Act, Walk
from janitor.world import World
from tms_core.tables.base import Store

#: Gives somebody who has tasks done, on a store as it is now, as long as the block runs.
Looking = Callable[[], AbstractContextManager[Sender]]


class GuidedCrew(Crew):
    """A crew of one, that goes only where tasks have found something to do.

    What is taken is counted by the driver, who takes it; what stays is counted by the tasks, who saw all of it.

    Args:
        shares: of each part what tasks look at.
        looking: gives somebody who has tasks look at the store as it is now; asked once, when they are needed, and held
            until the walk ends.
        store, world, act, page_rows, observer: as of every crew.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        act: Act,
        *,
        shares: Sequence[Share],
        looking: Looking,
        page_rows: int,
        observer: Observer,
        **options: Any,
    ) -> None:
        super().__init__(store, world, act, page_rows=page_rows, observer=observer, workers=1, **options)
        self._store = store
        self._world = world
        self._act = act
        self._page_rows = page_rows
        self._observer = observer
        self._shares = shares
        self._looking = looking

        self._sender: Sender | None = None
        self._needed = ExitStack()

    def walk(self, tally: Tally, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        with self._needed:
            super().walk(tally, phase)

    def _take(self, name: StepName, step: Step, then: Step = nothing_more) -> None:
        """Take a step where there is something to do."""
        [main] = self._walks
        if not self._needs_looking(name, main):
            super()._take(name, step, then)
            return
        found = self._look(name, main)
        ranges = (found, []) if name == "invert" else ([], found)
        there = RangedStore(self._store, *ranges)
        walk = Walk(
            *(there, self._world, self._act, Tally()),
            page_rows=self._page_rows,
            observer=self._observer,
            whole=self._store,
        )
        _hand_over(main, walk)
        try:
            step(walk)
        finally:
            main.tally.add(_taken(walk.tally))
            _hand_over(walk, main)
        then(main)

    def _needs_looking(self, name: StepName, main: Walk) -> bool:
        """Whether there may be much to look at; what is due of messages lies in one range of each topic."""
        if name == "invert":
            return self._search(main)[0] is not None and self._store.message.first(b"") is not None
        return name == "payload" and self._store.payload.first(b"") is not None

    def _look(self, name: StepName, main: Walk) -> list[Range]:
        """Have tasks look for what there is to do; returns where that is."""
        search = self._search(main)
        shares = [share.informed(main, search) for share in self._shares]
        if self._sender is None:
            # Not before messages are gone, or tasks would look at those, too.
            self._sender = self._needed.enter_context(self._looking())
        errand = Errand(name, portable(self._world), None, self._page_rows, finds=True)
        answers = self._sender.send(errand, shares, self._act.alive)
        for answer in answers:
            main.tally.add(_staying(answer.tally))
            main.failed.update(answer.failed)
            self._store.calls.update(dict(answer.calls))
        return sorted(reach for answer in answers for reach in answer.found)


def _hand_over(done: Walk, following: Walk) -> None:
    """Let a walk know what another one has left undone."""
    following.failed.update(done.failed)
    following.withheld |= done.withheld


def _taken(tally: Tally) -> Tally:
    """What was counted of rows that went, or that only whoever would have taken them could tell to be needed."""
    entries = {key: entry for key, entry in tally.entries.items() if key.held is None}
    kept = Counter({Reason.REFERENCED: tally.kept[Reason.REFERENCED]})
    return replace(tally, entries=entries, kept=kept, foreign=[], unknown=set())


def _staying(tally: Tally) -> Tally:
    """What was counted of rows that stay."""
    return replace(tally, entries={key: entry for key, entry in tally.entries.items() if key.held is not None})
