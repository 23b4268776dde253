"""A pass whose parts are walked by tasks on Spark: planned, guarded, counted and concluded by the engine as any other.

The engine does not change. It prepares, asks its guards, takes each step of a pass in all parts before the next one
begins, and saves what was reached; only who walks the parts is another crew. While tasks are at work the driver shows
that the run is alive and renews its lease; when that is lost, the tasks are called back, and those that do not hear it
end at their next batch by themselves.

Traded: what a task takes is counted when it ends. What an attempt took that was lost is in the ledger without a number,
because each attempt announces where it will delete before it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from janitor.conclude import Pass
from janitor.crew import Crew, Step, StepName, nothing_more
from janitor.engine import Engine
from janitor.ranges import Range
from janitor.rounds import Round
from janitor.spark.access import Access
from janitor.spark.errands import Answer, Errand, Run, Share, portable
from janitor.spark.guided import GuidedCrew, Looking
from janitor.spark.parts import cut_evenly
from janitor.spark.ranged import NOTHING, RangedStore
from janitor.spark.sender import Sender
from janitor.state.base import LedgerEntry, State
from janitor.sweep import Sweep
from janitor.walk import REPLANS, Act
from tms_core.errors import ArchiveError, StoreUnavailable
from tms_core.lease import LeaseRecord
from tms_core.tables.base import Store
from tms_core.tables.hbase import HBasePart

logger = logging.getLogger(__name__)

_ALL = Range(b"", b"")


class SparkCrew(Crew):
    """A crew whose parts are walked elsewhere: those of a store in HBase by a sweep, and those of any by a plan.

    Args:
        shares: of each part what is to be walked.
        sender: has it walked.
        run: what tasks have to know of a run that deletes; None for a plan.
        state: where tasks announce what they are about to take.
        begin_round, options: as of every crew.
    """

    def __init__(
        self,
        store: Store,
        world: Any,
        act: Act,
        *,
        shares: Sequence[tuple[Share, Store]],
        sender: Sender,
        run: Run | None,
        state: State,
        page_rows: int,
        **options: Any,
    ) -> None:
        parts = [part for _, part in shares]
        super().__init__(store, world, act, page_rows=page_rows, workers=1, parts=parts, **options)
        self._world = world
        self._act = act
        self._page_rows = page_rows
        self._shares = [share for share, _ in shares]
        self._sender = sender
        self._run = run
        self._state = state
        #: Where entries of the ledger begin that tasks have answered for.
        self._answered: set[tuple[object, ...]] = set()

    def _take(self, name: StepName, step: Step, then: Step = nothing_more) -> None:
        """Have a step taken in all parts, and once more in topics that have moved meanwhile (rule S2)."""
        due = [share.informed(walk, self._search(walk)) for share, walk in zip(self._shares, self._walks, strict=True)]
        if name == "invert" and all(share.since_ms is None for share in due):
            due = []
        world = self._world
        for _ in range(REPLANS):
            if not due:
                break
            moved = self._send(Errand(name, portable(world), self._run, self._page_rows), due)
            topics = {prefix for prefixes in moved.values() for prefix in prefixes}
            for prefix in topics:
                self._world.reread(prefix)
            world = replace(self._world, patterns=tuple(sorted(prefix[:-1].decode() for prefix in topics)))
            due = [share for share in due if share.number in moved]
        for share in due:
            for prefix in moved[share.number]:
                restless = StoreUnavailable("its metadata keeps changing; left for the next run")
                self._walks[share.number].fail("message" if name == "message" else "payload", prefix, restless)
        for walk in self._walks:
            then(walk)

    def _send(self, errand: Errand, shares: list[Share]) -> dict[int, list[bytes]]:
        """Have shares done; returns which topics have moved, by the number of the share."""
        answers: list[Answer] = []
        try:
            answers = self._sender.send(errand, shares, self._act.alive)
        finally:
            self._account(answers)
        interrupted = None
        for share, answer in zip(shares, answers, strict=True):
            walk = self._walks[share.number]
            walk.tally.add(answer.tally)
            walk.failed.update(answer.failed)
            walk.withheld.update(answer.withheld)
            interrupted = interrupted or answer.interruption
        if interrupted is not None:
            raise interrupted
        return {share.number: answer.moved for share, answer in zip(shares, answers, strict=True) if answer.moved}

    def _account(self, answers: list[Answer]) -> None:
        """Take in what tasks took; of what lost attempts took only where."""
        for answer in answers:
            self._whole.store.calls.update(dict(answer.calls))
        if self._run is None or not isinstance(self._act, Sweep):
            return
        taken = [entry for answer in answers for entry in answer.ledger]
        self._act.take_in(taken)
        self._answered.update(map(_beginning, taken))
        for answer in answers:
            self._act.write_failed |= answer.write_failed
            if answer.archive_error is not None:
                self._act.archive_error = ArchiveError(answer.archive_error)
        # Also where no task says that another one went before it: Spark may have killed one of two that ran at once.
        own = [entry for entry in self._state.intents() if entry.run_id == self._run.id]
        lost = [e for e in own if _beginning(e) not in self._answered and not self._act.announced(e)]
        self._answered.update(map(_beginning, lost))
        if lost:
            logger.warning("%d announcements of attempts that were lost go into the ledger without a count", len(lost))
        self._act.take_in(lost)


def _beginning(entry: LedgerEntry) -> tuple[object, ...]:
    """What an entry and its announcement have in common."""
    return entry.topic, entry.generation, entry.table, entry.rule, entry.start


#: Cuts a store into shares, each with the part of the driver's own store that stands for it.
Cut = Callable[[Store], list[tuple[Share, Store]]]


class SparkEngine(Engine):
    """An engine whose passes are walked on Spark; everything else is :class:`~janitor.engine.Engine`'s.

    Args:
        sender: has tasks done.
        cut: cuts the store into shares.
        looking: of a store that nobody but this process can write: who has tasks look at it; None where tasks delete.
        arguments: as of every engine.
    """

    def __init__(
        self, *arguments: Any, sender: Sender, cut: Cut, looking: Looking | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._sender = sender
        self._cut = cut
        self._looking = looking

    def _crew(self, current: Pass, act: Act, begin_round: Callable[[Sequence[Store]], Round] | None) -> Crew:
        shares = self._cut(self.store)
        common: dict[str, Any] = {
            "page_rows": self._batch_rows,
            "observer": self._observer,
            "begin_round": begin_round,
            "expiries": self._expiries,
        }
        if self._looking is not None and isinstance(act, Sweep):
            looked_at = [share for share, _ in shares]
            return GuidedCrew(self.store, current.world, act, shares=looked_at, looking=self._looking, **common)
        run = self._run(current, len(shares)) if isinstance(act, Sweep) else None
        return SparkCrew(
            self.store,
            current.world,
            act,
            shares=shares,
            sender=self._sender,
            run=run,
            state=self.state,
            **common,
        )

    def _run(self, current: Pass, tasks: int) -> Run:
        record = LeaseRecord.parse(self.state.lease()) if self._lease is not None else None
        if record is not None and self._lease is not None and record.fence != self._lease.fence:
            record = None  # It is kept elsewhere, where the driver alone looks after it.
        rate = self._rows_per_second
        # Not all tasks need be at work at once; a rate is a limit, and not a promise.
        share = None if not rate else rate / max(1, tasks)
        return Run(current.id, record.holder if record else "", record.fence if record else 0, share)


def cutter(access: Access, partitions: int | None) -> Cut:
    """Cuts the store that settings name: by salt in HBase, by bytes in LevelDB.

    Args:
        partitions: about how many shares of a LevelDB store; None: by its size.
    """

    def cut(store: Store) -> list[tuple[Share, Store]]:
        if access.is_leveldb:
            messages, payloads = (cut_evenly(table, _ALL, partitions) for table in (store.message, store.payload))
            ranges = zip_longest(messages, payloads, fillvalue=NOTHING)
            return [
                (Share(at, None, *both), RangedStore(store, *([one] for one in both))) for at, both in enumerate(ranges)
            ]
        parts = [(part.salt, part) for part in store.parts() if isinstance(part, HBasePart)]
        if parts:
            return [(Share(at, salt, _ALL, _ALL), part) for at, (salt, part) in enumerate(parts)]
        # A store's face for reading does not show its parts.
        nothing = RangedStore(store, (), ())
        with access.salted() as salted:
            return [(Share(at, salt, _ALL, _ALL), nothing) for at, (salt, _) in enumerate(salted)]

    return cut
