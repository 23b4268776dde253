"""What the janitor and its operator do; each command of the janitor's is watched and judged.

An operator in a hurry adopts, approves, truncates and restores at any moment, but not blindly: they look at the clock
before they vouch for it, and do not trust a claim about a store into which they have just put a backup.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from janitor.report import Report
from tests.simulation.invariants import Allowed, Watch
from tests.simulation.model import topic_id
from tests.simulation.operations import Operation
from tests.simulation.site import Site
from tests.simulation.store import Crash
from tms_core.errors import Refused, StoreError


class Trouble(StrEnum):
    """What can go wrong inside a run."""

    CRASH = "crash"
    ERROR = "error"


@dataclass(frozen=True, repr=False)
class Run(Operation):
    """One pass.

    Attributes:
        topic: the only topic in scope; None for all.
        at_call: before which of its store calls ``meanwhile`` happens.
        meanwhile: another operation, or the process dies, or the store fails.
    """

    adopt: bool = False
    topic: str | None = None
    batch_rows: int = 2000
    at_call: int = 0
    meanwhile: Operation | Trouble | None = None

    def on(self, site: Site) -> None:
        if self.adopt and not site.clock_is_right:
            return
        watch = Watch(site)
        if self.meanwhile is not None and not self.adopt:
            site.store.alarm.set(self.at_call, lambda call: self._interrupt(site, watch, call))
        patterns = () if self.topic is None else (str(topic_id(self.topic)),)
        report = None
        try:
            report = site.engine(self.batch_rows).run_once(adopt=self.adopt, patterns=patterns)
        except Crash:
            site.reached["crashed"] += 1
        except StoreError:
            site.reached["failed"] += 1
        site.store.alarm.clear()
        site.notice_adoption()
        watch.judge()
        if report is not None:
            self._learn(site, watch, report)
        site.read_claims()

    def _interrupt(self, site: Site, watch: Watch, call: str) -> None:
        if self.meanwhile is Trouble.CRASH:
            raise Crash
        if self.meanwhile is Trouble.ERROR:
            raise StoreError("the disk is full.")
        if isinstance(self.meanwhile, Operation):
            watch.interrupted(call)
            self.meanwhile.on(site)

    def _learn(self, site: Site, watch: Watch, report: Report) -> None:
        """Take note of what the janitor now remembers."""
        if report.tripped:
            site.reached["stopped"] += 1
            return
        site.clock_was_remembered()
        seen = {
            name: topic
            for name, topic in site.topics.items()
            if self.topic in (None, name) and not _failed(name, report)
        }
        site.reference.observe(watch.topics, seen, site.now_ms)
        complete = not report.errors and self.topic is None and report.snapshot is not None
        if complete and report.thorough:
            site.restored_in_place = False
        site.reached["held"] += report.held_rows()
        site.reached["claimed"] += report.boundary is not None


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
        if not path.exists() or (self.adopt and not site.clock_is_right):
            return
        watch = Watch(site, allowed=Allowed.read(path))
        try:
            report = site.engine().carry_out(path, adopt=self.adopt)
        except Refused:
            site.reached["refused"] += 1
            return
        site.notice_adoption()
        watch.judge()
        if not report.tripped:
            site.clock_was_remembered()
            site.reached["applied"] += 1
        site.read_claims()


# --- the operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Adopt(Operation):
    """Accept the store; the operator has looked at the clock first."""

    def on(self, site: Site) -> None:
        if site.clock_is_right:
            site.engine().adopt()
            site.notice_adoption(anyway=True)
            site.read_claims()


@dataclass(frozen=True, repr=False)
class Approve(Operation):
    """Let held frontiers go: of one topic, or all and the clock, at which the operator has looked first."""

    topic: str | None = None

    def on(self, site: Site) -> None:
        if self.topic is None and not site.clock_is_right:
            return
        patterns = () if self.topic is None else (str(topic_id(self.topic)),)
        try:
            site.engine().approve(patterns)
        except Refused:
            return
        topics = {name: topic for name, topic in site.topics.items() if self.topic in (None, name)}
        site.reference.approve(topics, site.now_ms)
        if self.topic is None:
            site.clock_was_accepted()


@dataclass(frozen=True, repr=False)
class Truncate(Operation):
    """Drop from the invalid list what the janitor claims to be clean.

    An operator who has restored a backup in place waits for a pass that looks at everything, as the runbook says.
    """

    def on(self, site: Site) -> None:
        if site.restored_in_place or site.state.store() is None:
            return
        claim, _ = site.engine().boundary()
        if claim is not None:
            site.reached["truncated"] += site.manager.truncate(claim.bound)


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
            site.read_claims()


@dataclass(frozen=True, repr=False)
class LoseState(Operation):
    """Remove the janitor's memory."""

    def on(self, site: Site) -> None:
        site.lose_state()
        site.read_claims()
