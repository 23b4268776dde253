"""What goes to a task and what comes back, as values: nothing in them is open, and nothing is but what was meant.

What a pass knows (:class:`~janitor.world.World`) goes as it is, by Spark's own means. What a task has counted comes
back as JSON, through the same pair of functions that carries an engine's answers over the control socket.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace

from janitor.control import values
from janitor.crew import StepName
from janitor.policy import Reason
from janitor.ranges import Range
from janitor.report import Entry, EntryKey, ForeignKey, Tally
from janitor.state.base import LedgerEntry
from janitor.walk import Walk
from janitor.world import World
from tms_core import errors
from tms_core.errors import Interrupted
from tms_core.tables.base import MetadataTable
from tms_core.topic import TopicId


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a store that a task works on.

    Attributes:
        number: which of all.
        salt: under which its rows lie; None where there are no salts.
        messages, payloads: which keys; an empty stop is the table's end.
        since_ms, everything: what the search for invalid pointers looks at (:class:`~janitor.inversions.Inversions`).
        failed, withheld: topics that former steps have left undone here.
    """

    number: int
    salt: int | None
    messages: Range
    payloads: Range
    since_ms: int | None = None
    everything: bool = True
    failed: dict[bytes, str] = field(default_factory=dict)
    withheld: frozenset[bytes] = frozenset()

    def informed(self, walk: Walk, search: tuple[int | None, bool]) -> Share:
        """The same, with what is known by now.

        Args:
            walk: what former steps have left undone.
            search: ``since_ms`` and ``everything``.
        """
        since_ms, everything = search
        failed, withheld = dict(walk.failed), frozenset(walk.withheld)
        return replace(self, since_ms=since_ms, everything=everything, failed=failed, withheld=withheld)

    def __str__(self) -> str:
        return f"part {self.number}" + ("" if self.salt is None else f" (salt {self.salt})")


@dataclass(frozen=True, slots=True)
class Run:
    """What a task that deletes has to know of its run.

    Attributes:
        id: the run's.
        holder, fence: under whose lease it goes; an empty holder: under none.
        rows_per_second: the task's share of the rate; None for no limit.
    """

    id: str
    holder: str
    fence: int
    rows_per_second: float | None


@dataclass(frozen=True, slots=True)
class Errand:
    """One step, for all tasks.

    Attributes:
        world: what the pass knows, without what is open.
        run: None for those that change nothing.
        finds: whether the task says where something is to be done, for the driver to do it (:mod:`.finding`); else, if
            it changes nothing, it says what would be done, as a plan does.
    """

    step: StepName
    world: World
    run: Run | None
    page_rows: int
    finds: bool = False


@dataclass(slots=True)
class Answer:
    """What a task has counted (:class:`~janitor.report.Tally`) and done.

    Attributes:
        failed, withheld, moved: metadata keys of topics that were left undone, why that is, and of those whose
            metadata has changed, which have to be planned anew.
        found: where something is to be done, in key order.
        ledger: what was taken.
        calls: store operations by name.
        interrupted: name and message of what ended the task early; None: nothing did.
        archive_error: why nothing more could be archived, and so deleted.
        again: whether an attempt went before this one, whose deletes are in no count.
    """

    entries: list[tuple[EntryKey, Entry]] = field(default_factory=list)
    kept: list[tuple[Reason, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    foreign: list[ForeignKey] = field(default_factory=list)
    unknown: list[TopicId] = field(default_factory=list)
    pointers: list[tuple[TopicId, list[int]]] = field(default_factory=list)
    untouchable: int | None = None
    scanned: list[tuple[str, int]] = field(default_factory=list)
    failures: list[tuple[str, str, int]] = field(default_factory=list)
    seeks_spared: int = 0
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    withheld: list[bytes] = field(default_factory=list)
    moved: list[bytes] = field(default_factory=list)
    found: list[Range] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    interrupted: tuple[str, str] | None = None
    archive_error: str | None = None
    write_failed: bool = False
    again: bool = False

    @classmethod
    def of(cls, tally: Tally) -> Answer:
        return cls(
            entries=list(tally.entries.items()),
            kept=list(tally.kept.items()),
            errors=tally.errors,
            foreign=tally.foreign,
            unknown=sorted(tally.unknown),
            pointers=[(topic, sorted(found)) for topic, found in tally.pointers.items()],
            untouchable=tally.untouchable,
            scanned=list(tally.scanned.items()),
            failures=[(table, reason, number) for (table, reason), number in tally.failures.items()],
            seeks_spared=tally.seeks_spared,
        )

    @property
    def tally(self) -> Tally:
        return Tally(
            entries=dict(self.entries),
            kept=Counter(dict(self.kept)),
            errors=self.errors,
            foreign=self.foreign,
            unknown=set(self.unknown),
            pointers={topic: set(found) for topic, found in self.pointers},
            untouchable=self.untouchable,
            scanned=Counter(dict(self.scanned)),
            failures=Counter({(table, reason): number for table, reason, number in self.failures}),
            seeks_spared=self.seeks_spared,
        )

    @property
    def interruption(self) -> Interrupted | None:
        """What ended the task early."""
        if self.interrupted is None:
            return None
        name, message = self.interrupted
        found: Interrupted = getattr(errors, name)(message)
        return found

    def pack(self) -> str:
        return json.dumps(values.pack(self))

    @classmethod
    def unpack(cls, text: str) -> Answer:
        found: Answer = values.unpack(cls, json.loads(text))
        return found


class NoMetadata(MetadataTable):
    """Stands for the metadata table on the way to a task, which has its own; nobody asks it anything."""

    def rows(self) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError

    def get(self, key: bytes) -> bytes | None:
        raise NotImplementedError

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        raise NotImplementedError


def portable(world: World) -> World:
    """What a pass knows, without what is open, or what only whoever plans topics needs."""
    return replace(world, metadata=NoMetadata(), records={}, consumers=None)
