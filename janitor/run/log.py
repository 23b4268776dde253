"""The log of runs: changes, notes of guards and errors of each run."""

from __future__ import annotations

import logging

from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.state.figures import GuardNote
from tms_core.logs.printable import complete

logger = logging.getLogger(__name__)

#: The adjective for deleted rows, by rule.
_DELETED = {Rule.EXPIRED: "expired", Rule.OLD_GENERATION: "old-generation", Rule.PROCESSED: "processed"}


class RunLog:
    """A log of the runs of one process, which repeats no note and no error of the previous run.

    Args:
        arguments: the options that select the store, for the commands in messages of guards.
    """

    def __init__(self, arguments: str = "") -> None:
        self._arguments = arguments
        self._first = True
        self._notes: set[tuple[str, bool]] = set()
        self._errors: set[str] = set()

    def write(self, report: Report) -> None:
        """Log the changes, notes and errors of a run."""
        figures = {str(rule): report.total(rule) for rule in Rule}
        held_rows = report.held_rows()
        snapshot = report.snapshot.source if report.snapshot else ""
        fields = {
            "run": report.id,
            **figures,
            "held": held_rows,
            "seconds": report.duration_seconds,
            "snapshot": snapshot,
        }
        level = logging.INFO if any(figures.values()) or self._first else logging.DEBUG
        self._first = False
        judged = f"judged by {snapshot}" if snapshot else "without a transaction snapshot"
        holds = f"; {held_rows:,} {'row is' if held_rows == 1 else 'rows are'} held" if held_rows else ""
        logger.log(
            level,
            "%s %s: %s%s (%s)",
            _kind(report),
            report.id,
            _describe(report),
            holds,
            judged,
            extra={"fields": fields},
        )
        if report.truncated:
            logger.info("%d transactions without rows left the invalid list", report.truncated)
        self._write_notes(report)
        for error in report.errors:
            if error not in self._errors:
                logger.error("%s", error, extra={"fields": {"run": report.id}})
        self._errors = set(report.errors)

    def _write_notes(self, report: Report) -> None:
        for note in report.guards:
            if (note.guard, note.tripped) not in self._notes:
                message = complete(note.message, self._arguments)
                logger.log(_level(note), "%s: %s", note.guard, message, extra={"fields": {"run": report.id}})
        self._notes = {(note.guard, note.tripped) for note in report.guards}


def _level(note: GuardNote) -> int:
    """Return the log level of a note: a stop request is not an error."""
    if note.guard == "interrupted":
        return logging.INFO
    return logging.ERROR if note.tripped else logging.WARNING


def _describe(report: Report) -> str:
    """Return a description of the changes of a run or plan."""
    counts = [(report.total(rule), words) for rule, words in _DELETED.items()]
    deleted = " and ".join(f"{count:,} {words}" for count, words in counts if count)
    inverted = report.total(Rule.INVALID_TRANSACTION)
    parts = [f"{deleted} {_row(sum(count for count, _ in counts))} deleted"] if deleted else []
    parts += [f"{inverted:,} {_row(inverted)} of invalid transactions inverted"] if inverted else []
    # A guard may have blocked the run before it read anything.
    nothing = "nothing was done" if report.tripped else "nothing was due"
    return (", ".join(parts) or nothing) + (", if it were a run" if parts and report.mode == "plan" else "")


def _row(count: int) -> str:
    return "row" if count == 1 else "rows"


def _kind(report: Report) -> str:
    return "plan" if report.mode == "plan" else "run"
