"""Commands of the janitor and its operator; every command is checked against the invariants.

The operator adopts, approves, truncates and restores at any time, but checks the clock before accepting it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from janitor.archive.restore import Request
from janitor.report import Report
from janitor.run.prepare import Feedback
from janitor.state.base import EVERYTHING
from tests.builders import FileEngine, ProcessKilled
from tests.simulation import log
from tests.simulation.invariants import CommandCheck, PlanScope, Violation, check_ledger, check_searched, describe
from tests.simulation.model import topic_id
from tests.simulation.operations import Operation
from tests.simulation.store import ALL
from tests.simulation.world import World
from tms_core.errors import ArchiveError, Refused, StoreError
from tms_core.tables.base import MESSAGES


class Interruption(StrEnum):
    CRASH = "crash"
    ERROR = "error"
    HALT = "halt"
    TAKE_OVER = "take over"


@dataclass(frozen=True, repr=False)
class Run(Operation):
    """Run one pass.

    Attributes:
        topic: the only topic in scope; None for all.
        at_call: the store call before which ``concurrent`` happens.
        concurrent: another operation, a crash, a stop request, a lost lease, or a store error.
        patient: whether to skip topics with few due rows.
    """

    adopt: bool = False
    topic: str | None = None
    batch_rows: int = 2000
    patient: bool = False
    at_call: int = 0
    concurrent: Operation | Interruption | None = None

    def on(self, world: World) -> None:
        if self.adopt and not world.looks_right:
            return
        check = CommandCheck(world)
        lease = world.take_lease()
        feedback = Feedback(world.manager, ("messaging",)) if world.feeds_back else None
        engine = world.engine(self.batch_rows, lease=lease, is_stopping=lambda: check.is_stopping, feedback=feedback)
        recover(world, engine)
        if self.concurrent is not None and not self.adopt:
            world.store.trigger.set(self.at_call, lambda call: self._interrupt(world, check, call))
        patterns = () if self.topic is None else (str(topic_id(self.topic)),)
        report = None
        try:
            report = engine.run_once(adopt=self.adopt, patterns=patterns, incremental=self.patient)
        except ProcessKilled:
            world.event_counts["run crashed"] += 1
        except StoreError:
            world.event_counts["run failed"] += 1
            lease.release()
        else:
            lease.release()
        world.store.trigger.clear()
        record_adoption(world)
        check.check_writes()
        if report is None or not report.tripped:
            seen = {name: topic for name, topic in check.topics.items() if self.topic in (None, name)}
            world.reference.observe_interrupted(seen, world.now_ms)
        if report is not None:
            check_ledger(world, report.id, check.changes)
            self._record_report(world, check, report)
        world.read_boundary()

    def _interrupt(self, world: World, check: CommandCheck, call: str) -> None:
        if self.concurrent is Interruption.CRASH:
            raise ProcessKilled
        if self.concurrent is Interruption.ERROR:
            raise StoreError("the disk is full.")
        check.check_until_interruption(call, self.batch_rows)
        if isinstance(self.concurrent, Operation):
            self.concurrent.on(world)
        elif self.concurrent is Interruption.TAKE_OVER:
            world.take_lease("another")
            check.check_end()
        else:
            check.is_stopping = True
            check.check_end()

    def _record_report(self, world: World, check: CommandCheck, report: Report) -> None:
        """Record what the janitor has learned from a run."""
        world.event_counts["ids truncated by the janitor"] += report.truncated
        if report.tripped:
            world.event_counts["run blocked"] += 1
            world.event_counts["snapshot of another system read"] += world.other_manager is not None
            return
        notes = {note.guard for note in report.guards}
        world.event_counts["run interrupted"] += bool(notes & {"interrupted", "lease"})
        world.event_counts["topic paused"] += "paused" in notes
        world.event_counts["topic quarantined"] += "quarantine" in notes
        if notes & {"interrupted", "lease"}:
            return
        world.remember_clock()
        seen = {
            name: topic
            for name, topic in world.topics.items()
            if self.topic in (None, name) and name not in check.paused and not _failed(name, report)
        }
        world.reference.observe(check.topics, seen, world.now_ms)
        if self.topic is None and report.snapshot is not None and not report.errors:
            check_searched(world, check)
        world.event_counts["rows held"] += report.held_rows()
        world.event_counts["boundary proven"] += report.boundary is not None


def record_adoption(world: World) -> None:
    """Record an adoption by a run or an apply, which must not replace an earlier adoption."""
    adopted_before = world.has_adopted
    if world.record_adoption() and adopted_before:
        raise Violation("no permission", "a run has adopted a store although another store was adopted before")


def recover(world: World, engine: FileEngine) -> None:
    """Close the run of a crashed process, like every process at its start."""
    lost = engine.recover()
    world.event_counts["run recovered"] += len(lost)
    if lost:
        check_ledger(world, None, 0)


def _failed(name: str, report: Report) -> bool:
    """Return whether the run reports an error of the topic."""
    starts = (f"topic {topic_id(name)}: ", f"topic {topic_id(name)} ")
    return any(error.startswith(starts) for error in report.errors)


@dataclass(frozen=True, repr=False)
class Plan(Operation):
    slot: int

    def on(self, world: World) -> None:
        check = CommandCheck(world, may_write=False)
        report = world.engine().preview(out=world.folder / f"plan.{self.slot}")
        check.check_writes()
        world.read_boundary()
        if report.boundary is not None:
            world.boundaries.append(("the boundary in a plan", report.boundary))


@dataclass(frozen=True, repr=False)
class Apply(Operation):
    slot: int
    adopt: bool = False

    def on(self, world: World) -> None:
        path = world.folder / f"plan.{self.slot}"
        if not path.exists() or (self.adopt and not world.looks_right):
            return
        check = CommandCheck(world, allowed=PlanScope.read(path))
        engine = world.engine(lease=world.take_lease())
        recover(world, engine)
        try:
            report = engine.carry_out(path, adopt=self.adopt)
        except Refused:
            world.event_counts["plan rejected"] += 1
            return
        record_adoption(world)
        check.check_writes()
        check_ledger(world, report.id, check.changes)
        if not report.tripped:
            world.remember_clock()
            world.event_counts["plan applied"] += 1
        world.read_boundary()


# --- the operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Adopt(Operation):
    """Adopt the store after a check of the clock and the settings."""

    def on(self, world: World) -> None:
        if world.looks_right:
            world.engine().adopt()
            world.record_adoption(anyway=True)
            world.read_boundary()


@dataclass(frozen=True, repr=False)
class Verify(Operation):
    """Verify the boundary against every row."""

    def on(self, world: World) -> None:
        before = world.state.boundary()
        found = world.engine().verify()
        world.read_boundary()
        if found.refuted:
            world.event_counts["boundary refuted"] += 1
            if world.state.boundary() is not None:
                raise Violation("false boundary", f"{before} was refuted, but is still published")


@dataclass(frozen=True, repr=False)
class WriteBack(Operation):
    """Revert the inversion of an aborted row, and verify the boundary."""

    def on(self, world: World) -> None:
        row = world.write_back()
        if row is None or row.pointer is None:
            return
        # The janitor cannot know before the audit.
        world.boundaries = []
        before = world.event_counts["boundary refuted"]
        Verify().on(world)
        if world.event_counts["boundary refuted"] == before:
            raise Violation("false boundary", f"it was verified, but {describe(row)} is below it")
        world.refuted.add(row.pointer)


@dataclass(frozen=True, repr=False)
class Approve(Operation):
    """Release the holds of one topic, or all holds and the clock after a check of the clock."""

    topic: str | None = None

    def on(self, world: World) -> None:
        if self.topic is None and not world.clock_is_right:
            return
        patterns = (EVERYTHING,) if self.topic is None else (str(topic_id(self.topic)),)
        try:
            world.engine().approve(patterns, clock=self.topic is None)
        except Refused:
            return
        topics = {name: topic for name, topic in world.topics.items() if self.topic in (None, name)}
        world.reference.approve(topics, world.now_ms)
        if self.topic is None:
            world.accept_clock()


@dataclass(frozen=True, repr=False)
class Pause(Operation):
    """Pause or resume one topic or all topics."""

    topic: str | None = None
    paused: bool = True

    def on(self, world: World) -> None:
        known = {*world.topics, *world.reference.paused}
        for name in sorted(known) if self.topic is None else (self.topic,):
            pattern = str(topic_id(name))
            if self.paused:
                world.state.pause(pattern, world.wall_ms)
                world.reference.paused.add(name)
            else:
                world.state.resume(pattern)
                world.reference.paused.discard(name)


@dataclass(frozen=True, repr=False)
class Truncate(Operation):
    """Truncate the invalid list up to the proven boundary."""

    def on(self, world: World) -> None:
        if world.state.store() is None:
            return
        proven, _ = world.engine().boundary()
        if proven is not None:
            world.event_counts["ids truncated"] += world.manager.truncate(proven.bound)


@dataclass(frozen=True, repr=False)
class FeedBack(Operation):
    """Let the janitor truncate proven ids itself from now on."""

    def on(self, world: World) -> None:
        world.feeds_back = True


@dataclass(frozen=True, repr=False)
class DamageLog(Operation):
    """Damage the log of LevelDB; the operator repairs it before the next operation.

    Attributes:
        percent: position of the flipped bit in the log, or the rest of its last record.
        torn: whether the log is truncated, like after a crash, instead of a flipped bit.
    """

    percent: int = 0
    torn: bool = False

    def on(self, world: World) -> None:
        rows = world.store.message.read(MESSAGES, b"", None, ALL).items
        if not rows:
            return
        with TemporaryDirectory(dir=world.folder) as folder:
            killed = log.write_and_kill(Path(folder), rows)
            (log.truncate_last_record if self.torn else log.flip_bit)(killed, self.percent)
            try:
                left = log.keys_left(killed)
            except StoreError:
                if self.torn:
                    raise
                world.event_counts["damaged log rejected"] += 1
                return
        world.event_counts["damaged log opened"] += 1
        lost = {key for key, _ in rows} - left - killed.last
        if lost:
            raise Violation("live row lost", f"LevelDB has dropped {len(lost)} rows after the damage in its log")


@dataclass(frozen=True, repr=False)
class BackUp(Operation):
    slot: int

    def on(self, world: World) -> None:
        world.back_up(self.slot)


@dataclass(frozen=True, repr=False)
class Restore(Operation):
    slot: int
    in_place: bool

    def on(self, world: World) -> None:
        if world.restore(self.slot, in_place=self.in_place):
            # Statements about the replaced store do not count.
            world.boundaries = []


@dataclass(frozen=True, repr=False)
class EnableArchive(Operation):
    """Archive rows before their deletion from now on."""

    def on(self, world: World) -> None:
        world.archives = True


@dataclass(frozen=True, repr=False)
class RestoreArchived(Operation):
    """Restore all archived rows of a topic, to itself or to another topic."""

    topic: str
    target: str | None = None

    def on(self, world: World) -> None:
        target = self.target or self.topic
        request = Request(topic_id(self.topic), topic_id(target))
        try:
            done = world.engine().restore(world.archive_folder, request)
        except Refused as error:
            world.event_counts["restore rejected" if "transactions" in error.message else "restore failed"] += 1
            return
        except ArchiveError:
            return
        world.event_counts["rows restored"] += done.restored
        world.event_counts["rows restored and hidden"] += world.record_restored(target)


@dataclass(frozen=True, repr=False)
class LoseState(Operation):
    def on(self, world: World) -> None:
        world.lose_state()
        world.read_boundary()
