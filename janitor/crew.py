"""Walking the parts of a store side by side.

A store in LevelDB is one part. One in HBase has a part for each salt, whose rows lie apart from those of the others,
and most of a sweep's time is spent waiting for servers. So each step of a pass goes through all parts at once, by as
many threads as are wanted, and is over everywhere before the next one begins: whether a payload is still needed depends
on messages of any part.

What is learnt in a part is counted in it, and put together at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from janitor.inversions import Inversions
from janitor.messages import Messages
from janitor.observe import Observer
from janitor.payloads import Payloads
from janitor.report import Tally
from janitor.walk import Act, Walk
from janitor.world import World
from tms_core.tables.base import Store

#: The steps of a pass, in order: messages first, because a payload is free once its message is gone; inversions after
#: them, because a row that goes need not be inverted.
_STEPS: tuple[tuple[str, Callable[[Walk], None]], ...] = (
    ("message", lambda walk: Messages(walk).delete()),
    ("invert", lambda walk: Inversions(walk).invert()),
    ("payload", lambda walk: Payloads(walk).delete()),
)


class Crew:
    """One pass over a store.

    Args:
        workers: how many parts are walked at once.

    Attributes:
        failed: metadata keys of topics that were left undone in some part, and why.
        withheld: metadata keys of topics in which deleting was stopped on the way.
    """

    def __init__(
        self, store: Store, world: World, act: Act, *, page_rows: int, observer: Observer, workers: int
    ) -> None:
        self._walks = [
            Walk(part, world, act, Tally(), page_rows=page_rows, observer=observer, whole=store)
            for part in store.parts()
        ]
        self._workers = workers

    @property
    def failed(self) -> dict[bytes, str]:
        return {prefix: error for walk in self._walks for prefix, error in walk.failed.items()}

    @property
    def withheld(self) -> frozenset[bytes]:
        return frozenset(prefix for walk in self._walks for prefix in walk.withheld)

    def walk(self, tally: Tally, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Take the steps; what was counted is in ``tally`` also when one of them raises.

        Args:
            phase: entered for each step with its name.

        Raises:
            Interrupted: the pass is over.
            StoreError: a table could not be read between topics either.
        """
        try:
            for name, step in _STEPS:
                with phase(name):
                    self._take(step)
        finally:
            for walk in self._walks:
                tally.add(walk.tally)

    def _take(self, step: Callable[[Walk], None]) -> None:
        if len(self._walks) == 1:
            step(self._walks[0])
            return
        with ThreadPoolExecutor(self._workers, "walk") as pool:
            futures = [pool.submit(step, walk) for walk in self._walks]
        # Whatever went wrong in one part, the others have come to their end.
        for future in futures:
            future.result()
