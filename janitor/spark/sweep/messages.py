"""What goes to a task and what comes back, as values: nothing in them is open, and nothing is but what was meant.

What a pass knows (:class:`~janitor.sweep.context.RunContext`) goes as it is, by Spark's own means. What a task has
found and done comes back as JSON, through the same pair of functions that carries an engine's answers over the control
socket.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace

from janitor.control import values
from janitor.sweep.context import RunContext
from janitor.sweep.outcome import Outcome
from janitor.sweep.sweep import StepJob, StepName
from tms_core import errors
from tms_core.errors import Interrupted, StateError
from tms_core.tables.base import KeyRange, MetadataReads


@dataclass(frozen=True, slots=True)
class TaskShare:
    """The part of a store that a task works on.

    Attributes:
        number: which of all.
        salt: under which its rows lie; None where there are no salts.
        messages, payloads: which keys.
        since_ms, everything, failed: as of a job (:class:`~janitor.sweep.sweep.StepJob`).
    """

    number: int
    salt: int | None
    messages: KeyRange
    payloads: KeyRange
    since_ms: int | None = None
    everything: bool = True
    failed: frozenset[bytes] = frozenset()

    def informed(self, job: StepJob) -> TaskShare:
        """Return the same, with what is known by now."""
        return replace(self, since_ms=job.since_ms, everything=job.everything, failed=job.failed)

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
class TaskSpec:
    """One step, for all tasks.

    Attributes:
        context: what the pass knows, without what is open.
        run: None for those that change nothing.
        finds: whether the task says where something is to be done, for the driver to do it; else, if it changes
            nothing, it says what would be done, as a plan does.
    """

    step: StepName
    context: RunContext
    run: Run | None
    page_rows: int
    finds: bool = False


@dataclass(slots=True)
class TaskResult:
    """What a task has found and done.

    Attributes:
        calls: store operations by name.
        interrupted: name and message of what ended the task early; None: nothing did.
        again: whether an attempt went before this one, whose deletes are in no count.
    """

    outcome: Outcome
    calls: list[tuple[str, int]] = field(default_factory=list)
    interrupted: tuple[str, str] | None = None
    again: bool = False

    @classmethod
    def of(cls, outcome: Outcome, calls: Counter[str]) -> TaskResult:
        """What is sent of an outcome: all but what is open."""
        ended = outcome.ended
        interrupted = (type(ended).__name__, ended.message) if isinstance(ended, Interrupted | StateError) else None
        return cls(replace(outcome, ended=None), sorted(calls.items()), interrupted)

    @property
    def received(self) -> Outcome:
        """Return the outcome, with what ended it."""
        if self.interrupted is None:
            return self.outcome
        name, message = self.interrupted
        ended: Interrupted | StateError = getattr(errors, name)(message)
        return replace(self.outcome, ended=ended)

    def pack(self) -> str:
        return json.dumps(values.pack(self))

    @classmethod
    def unpack(cls, text: str) -> TaskResult:
        found: TaskResult = values.unpack(cls, json.loads(text))
        return found


class NoMetadata(MetadataReads):
    """Stands for the metadata table on the way to a task, which has its own; it is never read."""

    def rows(self) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError

    def get(self, key: bytes) -> bytes | None:
        raise NotImplementedError


def portable(context: RunContext) -> RunContext:
    """What a pass knows, without what is open, or what only the choice of topics needs."""
    return replace(context, metadata=NoMetadata(), records={}, consumers=None, processed=None)
