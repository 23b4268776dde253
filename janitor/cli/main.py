"""The ``janitor`` command: its verbs, and the conversion of errors into messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from janitor.app.options import Common
from janitor.cli.options import REFUSED, common_options
from tms_core.cli import outcome
from tms_core.cli.lazy import LazyCommand, LazyGroup, completion
from tms_core.clock import Clock
from tms_core.errors import Refused

#: Verbs that change nothing in the store.
_QUERIES = frozenset({"boundary", "doctor", "history", "inspect", "ledger", "plan", "status", "topic", "verify", "why"})
_UNCHANGED = "interrupted; nothing in the store was changed"
_INTERRUPTED = "interrupted; completed changes are kept, and the next run continues"
_CODES = ((Refused, REFUSED), *outcome.CODES)


#: The verbs by section of the help, with the first sentence of the help of each verb.
_VERBS = {
    "Clean": {
        "plan": "Show the rows that a run would delete or invert.",
        "run": "Delete expired rows, once or on a schedule.",
        "apply": "Carry out a plan file.",
        "sweep-now": "Start a sweep in the process that holds the store.",
        "spark": "Count and clean a large store on Spark.",
    },
    "Inspect": {
        "status": "Show the status of the janitor, held topics and required actions.",
        "topic": "Show one topic: size, ttl, holds, consumers and deletions.",
        "why": "Explain why a message is still stored, or which run deleted it.",
        "inspect": "Show the tables and the transaction snapshot, without changing them.",
        "history": "Show past runs, or the report of one run.",
        "doctor": "Check the preconditions of a run.",
    },
    "Undo and prove": {
        "archive": "List and restore archived rows.",
        "backup": "Back up the store to a new folder.",
        "restore": "Restore a backup to the configured place.",
        "ledger": "Show which key ranges were deleted, and by which rule.",
        "boundary": "Show the prune boundary, up to which the store is proven clean.",
        "verify": "Verify the prune boundary.",
    },
    "Administer": {
        "adopt": "Adopt the store in its present state.",
        "approve": "Release held topics, or accept the machine's clock.",
        "pause": "Pause deletions and inversions in topics.",
        "resume": "Resume paused and quarantined topics.",
        "config": "Show the settings.",
        "exporter": "Serve metrics and the status page without a daemon.",
    },
}


@click.group(
    cls=LazyGroup,
    lazy={
        verb: LazyCommand(f"janitor.cli.{verb.replace('-', '_')}:command", sentence, section)
        for section, verbs in _VERBS.items()
        for verb, sentence in verbs.items()
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@common_options
def cli() -> None:
    """Clean a CDAP messaging store: expired rows, old generations, invalid transactions.

    \b
    First time:
      janitor plan --leveldb data/messaging --snapshots data/tx.snapshot
      janitor run --once --adopt --leveldb data/messaging --snapshots data/tx.snapshot

    \b
    Then as a daemon with a status page, or in single runs from cron or a timer:
      janitor run --config janitor.yaml
      janitor run --once --config janitor.yaml

    \b
    To investigate a problem:
      janitor status --config janitor.yaml
      janitor pause --config janitor.yaml

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 a guard stopped it or the store
    is not adopted, 4 another process holds the store, 5 some work was not done.
    """
    context = click.get_current_context()
    context.ensure_object(dict)["verb"] = context.invoked_subcommand


cli.add_command(completion("janitor"))


def main(arguments: Sequence[str] | None = None, clock: Clock | None = None) -> None:
    """Run a command and exit with its code.

    Args:
        arguments: the command line without the program's name; ``sys.argv`` by default.
        clock: the clock; by default the clock of the machine.
    """
    sys.exit(execute(arguments, clock))


def execute(arguments: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Run a command and return its exit code."""
    found: dict[str, object] = {"clock": clock, "common": (common := Common())}
    return outcome.execute(
        cli,
        "janitor",
        arguments,
        obj=found,
        codes=_CODES,
        interrupted=lambda: _UNCHANGED if found.get("verb") in _QUERIES else _INTERRUPTED,
        typed=common.arguments,
    )
