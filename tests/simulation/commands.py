"""What the janitor and its operator do; each command of the janitor's is watched and judged.

An operator in a hurry adopts, approves, truncates and restores at any moment, but not blindly: they look at the clock
before they vouch for it.
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
from tests.builders import FileEngine
from tests.simulation import log
from tests.simulation.invariants import Allowed, Violation, Watch, check_ledger, check_searched, describe
from tests.simulation.model import topic_id
from tests.simulation.operations import Operation
from tests.simulation.site import Site
from tests.simulation.store import ALL, Crash
from tms_core.errors import ArchiveError, Refused, StoreError
from tms_core.tables.base import MESSAGES


class Trouble(StrEnum):
    """What can go wrong inside a run."""

    CRASH = "crash"
    ERROR = "error"
    HALT = "halt"
    TAKE_OVER = "take over"


@dataclass(frozen=True, repr=False)
class Run(Operation):
    """One pass.

    Attributes:
        topic: the only topic in scope; None for all.
        at_call: before which of its store calls ``meanwhile`` happens.
        meanwhile: another operation, or the process dies, or is asked to end, or loses its lease, or the store fails.
        patient: leave topics alone in which little has come due.
    """

    adopt: bool = False
    topic: str | None = None
    batch_rows: int = 2000
    patient: bool = False
    at_call: int = 0
    meanwhile: Operation | Trouble | None = None

    def on(self, site: Site) -> None:
        if self.adopt and not site.looks_right:
            return
        watch = Watch(site)
        lease = site.take_lease()
        told = Feedback(site.manager, ("messaging",)) if site.feeds_back else None
        engine = site.engine(self.batch_rows, lease=lease, is_stopping=lambda: watch.is_stopping, feedback=told)
        recover(site, engine)
        if self.meanwhile is not None and not self.adopt:
            site.store.alarm.set(self.at_call, lambda call: self._interrupt(site, watch, call))
        patterns = () if self.topic is None else (str(topic_id(self.topic)),)
        report = None
        try:
            report = engine.run_once(adopt=self.adopt, patterns=patterns, incremental=self.patient)
        except Crash:
            site.reached["crashed"] += 1
        except StoreError:
            site.reached["failed"] += 1
            lease.release()
        else:
            lease.release()
        site.store.alarm.clear()
        notice_adoption(site)
        watch.judge()
        if report is None or not report.tripped:
            seen = {name: topic for name, topic in watch.topics.items() if self.topic in (None, name)}
            site.reference.glimpse(seen, site.now_ms)
        if report is not None:
            check_ledger(site, report.id, watch.changes)
            self._learn(site, watch, report)
        site.read_claims()

    def _interrupt(self, site: Site, watch: Watch, call: str) -> None:
        if self.meanwhile is Trouble.CRASH:
            raise Crash
        if self.meanwhile is Trouble.ERROR:
            raise StoreError("the disk is full.")
        watch.interrupted(call, self.batch_rows)
        if isinstance(self.meanwhile, Operation):
            self.meanwhile.on(site)
        elif self.meanwhile is Trouble.TAKE_OVER:
            site.take_lease("another")
            watch.ended()
        else:
            watch.is_stopping = True
            watch.ended()

    def _learn(self, site: Site, watch: Watch, report: Report) -> None:
        """Take note of what the janitor now remembers."""
        site.reached["fed back"] += report.truncated
        if report.tripped:
            site.reached["stopped"] += 1
            site.reached["read another system's snapshot"] += site.other_manager is not None
            return
        notes = {note.guard for note in report.guards}
        site.reached["ended"] += bool(notes & {"interrupted", "lease"})
        site.reached["paused"] += "paused" in notes
        site.reached["quarantined"] += "quarantine" in notes
        if notes & {"interrupted", "lease"}:
            return
        site.clock_was_remembered()
        seen = {
            name: topic
            for name, topic in site.topics.items()
            if self.topic in (None, name) and name not in watch.paused and not _failed(name, report)
        }
        site.reference.observe(watch.topics, seen, site.now_ms)
        if self.topic is None and report.snapshot is not None and not report.errors:
            check_searched(site, watch)
        site.reached["held"] += report.held_rows()
        site.reached["claimed"] += report.boundary is not None


def notice_adoption(site: Site) -> None:
    """Take note if a run or an apply has adopted the store, which only a person may do where one was adopted before."""
    adopted_before = site.has_adopted
    if site.notice_adoption() and adopted_before:
        raise Violation("no permission", "a run has adopted the store, and another one was adopted before")


def recover(site: Site, engine: FileEngine) -> None:
    """What a process does first: close the run of one that has died."""
    lost = engine.recover()
    site.reached["recovered"] += len(lost)
    if lost:
        check_ledger(site, None, 0)


def _failed(name: str, report: Report) -> bool:
    """Whether the topic is one that the run left undone."""
    starts = (f"topic {topic_id(name)}: ", f"topic {topic_id(name)} ")
    return any(error.startswith(starts) for error in report.errors)


@dataclass(frozen=True, repr=False)
class Plan(Operation):
    """Preview, into a plan file."""

    slot: int

    def on(self, site: Site) -> None:
        watch = Watch(site, may_write=False)
        report = site.engine().preview(out=site.folder / f"plan.{self.slot}")
        watch.judge()
        site.read_claims()
        if report.boundary is not None:
            site.claims.append(("the boundary in a plan", report.boundary))


@dataclass(frozen=True, repr=False)
class Apply(Operation):
    """Carry out a plan file."""

    slot: int
    adopt: bool = False

    def on(self, site: Site) -> None:
        path = site.folder / f"plan.{self.slot}"
        if not path.exists() or (self.adopt and not site.looks_right):
            return
        watch = Watch(site, allowed=Allowed.read(path))
        engine = site.engine(lease=site.take_lease())
        recover(site, engine)
        try:
            report = engine.carry_out(path, adopt=self.adopt)
        except Refused:
            site.reached["refused"] += 1
            return
        notice_adoption(site)
        watch.judge()
        check_ledger(site, report.id, watch.changes)
        if not report.tripped:
            site.clock_was_remembered()
            site.reached["applied"] += 1
        site.read_claims()


# --- the operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Adopt(Operation):
    """Accept the store; the operator has looked at the clock and the settings first."""

    def on(self, site: Site) -> None:
        if site.looks_right:
            site.engine().adopt()
            site.notice_adoption(anyway=True)
            site.read_claims()


@dataclass(frozen=True, repr=False)
class Verify(Operation):
    """Hold every row against the claim."""

    def on(self, site: Site) -> None:
        before = site.state.claim()
        found = site.engine().verify()
        site.read_claims()
        if found.refuted:
            site.reached["claim refuted"] += 1
            if site.state.claim() is not None:
                raise Violation("false claim", f"{before} was refuted and stands")


@dataclass(frozen=True, repr=False)
class WriteBack(Operation):
    """A tool writes a row of an aborted transaction as it was before it was inverted, and the claim is verified."""

    def on(self, site: Site) -> None:
        row = site.write_back()
        if row is None or row.pointer is None:
            return
        # The janitor cannot know before it has looked.
        site.claims = []
        before = site.reached["claim refuted"]
        Verify().on(site)
        if site.reached["claim refuted"] == before:
            raise Violation("false claim", f"it was verified with {describe(row)} below it")
        site.refuted.add(row.pointer)


@dataclass(frozen=True, repr=False)
class Approve(Operation):
    """Let held frontiers go: of one topic, or all and the clock, at which the operator has looked first."""

    topic: str | None = None

    def on(self, site: Site) -> None:
        if self.topic is None and not site.clock_is_right:
            return
        patterns = (EVERYTHING,) if self.topic is None else (str(topic_id(self.topic)),)
        try:
            site.engine().approve(patterns, clock=self.topic is None)
        except Refused:
            return
        topics = {name: topic for name, topic in site.topics.items() if self.topic in (None, name)}
        site.reference.approve(topics, site.now_ms)
        if self.topic is None:
            site.clock_was_accepted()


@dataclass(frozen=True, repr=False)
class Pause(Operation):
    """Have nothing done in a topic, or in all of them, or go on with it."""

    topic: str | None = None
    paused: bool = True

    def on(self, site: Site) -> None:
        known = {*site.topics, *site.reference.paused}
        for name in sorted(known) if self.topic is None else (self.topic,):
            pattern = str(topic_id(name))
            if self.paused:
                site.state.pause(pattern, site.wall_ms)
                site.reference.paused.add(name)
            else:
                site.state.resume(pattern)
                site.reference.paused.discard(name)


@dataclass(frozen=True, repr=False)
class Truncate(Operation):
    """Drop from the invalid list what the janitor claims to be clean."""

    def on(self, site: Site) -> None:
        if site.state.store() is None:
            return
        claim, _ = site.engine().boundary()
        if claim is not None:
            site.reached["truncated"] += site.manager.truncate(claim.bound)


@dataclass(frozen=True, repr=False)
class FeedBack(Operation):
    """From now on the janitor itself has dropped from the list what it has proven clean."""

    def on(self, site: Site) -> None:
        site.feeds_back = True


@dataclass(frozen=True, repr=False)
class DamageLog(Operation):
    """The machine stops and the log of LevelDB is damaged; the operator puts it right before the janitor goes on.

    Attributes:
        percent: how far into the log a bit is another, or how much is left of its last record.
        torn: whether the log ends there; a crash does no more than that.
    """

    percent: int = 0
    torn: bool = False

    def on(self, site: Site) -> None:
        rows = site.store.message.read(MESSAGES, b"", None, ALL).items
        if not rows:
            return
        with TemporaryDirectory(dir=site.folder) as folder:
            written = log.write(Path(folder), rows)
            (log.tear if self.torn else log.flip)(written, self.percent)
            try:
                left = log.keys_left(written)
            except StoreError:
                if self.torn:
                    raise
                site.reached["log refused"] += 1
                return
        site.reached["log opened"] += 1
        lost = {key for key, _ in rows} - left - written.last
        if lost:
            raise Violation("live row lost", f"LevelDB has dropped {len(lost)} rows behind what is damaged in its log")


@dataclass(frozen=True, repr=False)
class BackUp(Operation):
    slot: int

    def on(self, site: Site) -> None:
        site.back_up(self.slot)


@dataclass(frozen=True, repr=False)
class Restore(Operation):
    """Put a backup in the store's place."""

    slot: int
    in_place: bool

    def on(self, site: Site) -> None:
        if site.restore(self.slot, in_place=self.in_place):
            # Nobody has asked the janitor since; what it says next must be true of this store.
            site.claims = []


@dataclass(frozen=True, repr=False)
class KeepRows(Operation):
    """From now on rows are archived before they are deleted."""

    def on(self, site: Site) -> None:
        site.archives = True


@dataclass(frozen=True, repr=False)
class BringBack(Operation):
    """Restore from the archive what there is of a topic, to itself or to another one."""

    topic: str
    target: str | None = None

    def on(self, site: Site) -> None:
        target = self.target or self.topic
        request = Request(topic_id(self.topic), topic_id(target))
        try:
            done = site.engine().restore(site.archive_folder, request)
        except Refused as error:
            site.reached["refused to mix" if "transactions" in error.message else "not brought back"] += 1
            return
        except ArchiveError:
            return
        site.reached["brought back"] += done.restored
        site.reached["brought back hidden"] += site.take_in_restored(target)


@dataclass(frozen=True, repr=False)
class LoseState(Operation):
    """Remove the janitor's memory."""

    def on(self, site: Site) -> None:
        site.lose_state()
        site.read_claims()
