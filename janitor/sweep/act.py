"""What is done with findings, and what may come in its way.

A plan's act does nothing, a run's deletes (:mod:`janitor.sweep.executor`), and a task of Spark may only say where
something is to be done.
"""

from __future__ import annotations

from typing import Protocol

from janitor.sweep.findings import Due, Finding, Read
from janitor.sweep.outcome import Counted, Done
from janitor.sweep.permission import Withheld
from tms_core.errors import ArchiveError, StoreError


class Moved(Exception):
    """A topic's metadata changed between planning and deleting (rule S2); the batch was dropped."""


class NotArchived(Withheld):
    """Rows could not be archived, so nothing more is deleted."""

    def __init__(self, error: ArchiveError) -> None:
        super().__init__(str(error))


class Unsure(Exception):
    """The store failed on a batch, so it is not known which of its rows went."""

    def __init__(self, due: Due, at_ms: int, error: StoreError) -> None:
        super().__init__(str(error))
        self.due = due
        self.at_ms = at_ms
        self.error = error


class Act(Protocol):
    """What is done with findings."""

    def alive(self) -> None:
        """Called before every jump.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def progress(self, read: Read) -> None:
        """Told of every page.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def apply(self, finding: Finding) -> Done:
        """Do what is to be done with a finding.

        Raises:
            Moved: the topic is no longer what the finding says; nothing was done.
            Withheld: nothing may be changed in this topic now; nothing was.
            Unsure: the store failed on the way.
            StoreError: the store failed; nothing was done.
            Interrupted: the pass is over; nothing was done.
        """
        ...

    def pay(self, taken: Counted) -> None:
        """Called after rows were taken; waits until they are within the rate.

        Raises:
            Interrupted: the pass is over.
        """
        ...
