"""What can be asked of a janitor, wherever its engine is: in this process, or behind a socket.

The commands know only this. The names of the methods are also those on the wire, and their annotations say how
arguments and answers are read there (``janitor.control.values``), so there is one table of what may be asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from janitor.boundary import Boundary
from janitor.inquiry import Planned
from janitor.inspect import Audit, Inspected, Table
from janitor.picture import Picture
from janitor.plan import PlanFile
from janitor.report import Report
from janitor.restore import Request, Restored
from janitor.state.base import Claim
from janitor.why import Why
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId

#: Decisions that are not taken while a run is under way.
WAITING = frozenset({"adopt", "apply", "restore"})


class Asks(Protocol):
    """Questions: nothing in the store is changed by them. :class:`~janitor.engine.Engine` says what each means."""

    def plan(self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "") -> Planned: ...

    def inspect(self, table: Table, patterns: tuple[str, ...], limit: int) -> Inspected: ...

    def boundary(self) -> tuple[Claim | None, Boundary]: ...

    def audit(self) -> Audit: ...

    def why(self, topic: TopicId, message_id: MessageId) -> Why: ...

    def snapshot_figures(self, limit: int) -> dict[str, Any]: ...

    def restorable(self, folder: Path, request: Request) -> Restored: ...


class Decides(Protocol):
    """Decisions of an operator, and what may write because of them."""

    def adopt(self) -> list[TopicId]: ...

    def approve(self, patterns: tuple[str, ...] = ()) -> list[TopicId]: ...

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report: ...

    def restore(self, folder: Path, request: Request) -> Restored: ...


class Desk(Asks, Decides, Protocol):
    """All of it."""


class Decider(Decides, Protocol):
    """What decides in the process that holds the store: its engine, or something before that."""

    def at_work(self) -> bool:
        """Whether a run is under way, which a decision of ``WAITING`` has to wait for."""
        ...


class Views(Protocol):
    """What a process that holds a store shows of itself."""

    def picture(self) -> Picture:
        """What is seen now."""
        ...

    def nudge(self) -> None:
        """Look again, because something has changed that is shown."""
        ...


class Greeting(NamedTuple):
    """Who answers.

    Attributes:
        version: of the package.
        pid: of the process.
        store: the identity of the store it holds (``Store.identity``).
        settings: names the settings it works by (``janitor.settings.config_digest``).
    """

    version: str
    pid: int
    store: str
    settings: str


def methods(kind: type) -> frozenset[str]:
    """The names of a protocol's methods."""
    return frozenset(name for name in vars(kind) if not name.startswith("_"))
