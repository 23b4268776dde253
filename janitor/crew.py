"""Walking the parts of a store side by side.

A store in LevelDB is one part. One in HBase has a part for each salt, whose rows lie apart from those of the others,
and most of a sweep's time is spent waiting for servers. So each step of a pass goes through all parts at once, by as
many threads as are wanted, and is over everywhere before the next one begins: whether a payload is still needed depends
on messages of any part.

What is learnt in a part is counted in it, and put together at the end. A part that was searched for invalid pointers
without an error is written down at once (:mod:`janitor.rounds`), whatever becomes of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import Literal

from janitor.intervals import Interval
from janitor.inversions import Inversions
from janitor.messages import Messages
from janitor.observe import Observer
from janitor.own_ttls import OwnTtls
from janitor.payloads import Payloads
from janitor.report import Tally
from janitor.rounds import Round
from janitor.walk import Act, Walk
from janitor.world import World
from tms_core.side import Expiries, Expiry
from tms_core.tables.base import Store

#: What is done in one part.
Step = Callable[[Walk], None]
#: The steps of a pass, in their order.
StepName = Literal["message", "invert", "payload"]


def nothing_more(_: Walk) -> None:
    """A step leaves nothing to be written down."""


class Crew:
    """One pass over a store.

    Args:
        workers: how many parts are walked at once.
        parts: what is walked side by side, where these are not the store's own.
        begin_round: called before anything is searched, with the parts: the round this pass goes on with, which is told
            of those that were covered; None: it proves nothing.
        expiries: messages with a ttl of their own; None: there are none.

    Attributes:
        failed: metadata keys of topics that were left undone in some part, and why.
        withheld: metadata keys of topics in which deleting was stopped on the way.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        act: Act,
        *,
        page_rows: int,
        observer: Observer,
        workers: int,
        begin_round: Callable[[Sequence[Store]], Round] | None = None,
        expiries: Expiries | None = None,
        parts: Sequence[Store] | None = None,
    ) -> None:
        self._parts = store.parts() if parts is None else parts
        self._whole = Walk(store, world, act, Tally(), page_rows=page_rows, observer=observer)
        self._own_ttls = OwnTtls(self._whole, expiries) if expiries is not None else None
        self._walks = [
            Walk(part, world, act, Tally(), page_rows=page_rows, observer=observer, whole=store) for part in self._parts
        ]
        self._workers = workers
        self._begin_round = begin_round
        self._round: Round | None = None

    @property
    def failed(self) -> dict[bytes, str]:
        return {prefix: error for walk in self._all for prefix, error in walk.failed.items()}

    @property
    def withheld(self) -> frozenset[bytes]:
        return frozenset(prefix for walk in self._all for prefix in walk.withheld)

    @property
    def expired(self) -> list[Expiry]:
        """Messages with a ttl of their own whose rows are gone; to be forgotten once that is durable."""
        return self._own_ttls.done if self._own_ttls is not None else []

    @property
    def _all(self) -> list[Walk]:
        return [*self._walks, self._whole]

    def walk(self, tally: Tally, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Take the steps; what was counted is in ``tally`` also when one of them raises.

        Messages come first, because a payload is free once its message is gone; inversions after them, because a row
        that goes need not be inverted.

        Args:
            phase: entered for each step with its name.

        Raises:
            Interrupted: the pass is over.
            StoreError: a table could not be read between topics either.
        """
        try:
            with phase("message"):
                self._take("message", lambda walk: Messages(walk).delete())
                if self._own_ttls is not None:
                    self._learn_of_failures()
                    self._own_ttls.delete()
            with phase("invert"):
                if self._begin_round is not None:
                    self._round = self._begin_round(self._parts)
                    self._round.record_gaps(self._parts)
                self._take("invert", self._invert, self._record)
            with phase("payload"):
                self._take("payload", lambda walk: Payloads(walk).delete())
        finally:
            for walk in self._all:
                tally.add(walk.tally)

    def _learn_of_failures(self) -> None:
        """A topic that was left undone in a part is left alone in the whole, too."""
        for walk in self._walks:
            self._whole.failed.update(walk.failed)
            self._whole.withheld |= walk.withheld

    def _invert(self, walk: Walk) -> None:
        since_ms, everything = self._search(walk)
        Inversions(walk, since_ms, everything=everything).invert()

    def _search(self, walk: Walk) -> tuple[int | None, bool]:
        """From which publish time on a part is searched, and whether under keys that are none of ours as well."""
        if self._round is not None and self._round.has_done(walk.store):
            return self._round.since_ms, False
        return walk.world.search_since_ms, True

    def _record(self, walk: Walk) -> None:
        """Write down that a part was covered, if all of it was (rule S4)."""
        undone = walk.failed or walk.withheld or walk.tally.errors
        if self._round is not None and not undone and not self._round.has_done(walk.store):
            self._round.record([Interval(*walk.store.span)], walk.tally.untouchable)

    def _take(self, name: StepName, step: Step, then: Step = nothing_more) -> None:
        """Take a step in all parts, and ``then`` another one, in this thread, in each that it ended well in."""
        if len(self._walks) == 1:
            step(self._walks[0])
            then(self._walks[0])
            return
        with ThreadPoolExecutor(self._workers, "walk") as pool:
            futures = {pool.submit(step, walk): walk for walk in self._walks}
            for future in as_completed(futures):
                if future.exception() is None:
                    then(futures[future])
        # Whatever went wrong in one part, the others have come to their end.
        for future in futures:
            future.result()
