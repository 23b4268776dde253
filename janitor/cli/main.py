"""The ``janitor`` command: its verbs, and the border where errors become sentences and exit codes."""

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
_QUESTIONS = frozenset(
    {"boundary", "doctor", "history", "inspect", "ledger", "plan", "status", "topic", "verify", "why"}
)
_ASKED = "interrupted; nothing in the store was changed"
_INTERRUPTED = "interrupted; what was done is done, the next run goes on from there"
_CODES = ((Refused, REFUSED), *outcome.CODES)


#: The verbs, each a module of its own, with the first sentence of its help.
_VERBS = {
    "adopt": "Accept this store as it is now.",
    "apply": "Carry out a plan file, at most.",
    "approve": "Let go what is held, or accept the machine's clock.",
    "archive": "Look at deleted rows that are still kept, and bring them back.",
    "backup": "Back up a store into the new folder FOLDER.",
    "boundary": "Show up to where the store is proven clean.",
    "config": "Look at the settings.",
    "doctor": "Check whether all is in place for a run.",
    "exporter": "Serve metrics and status page where no daemon runs.",
    "history": "Show past runs, newest first, or one run's report.",
    "inspect": "Look into the tables and the transaction snapshot.",
    "ledger": "Show what was taken: from which key to which, by which rule.",
    "pause": "Stop deleting and inverting.",
    "plan": "Show what a run would do.",
    "restore": "Restore the backup FOLDER to where the settings have the store.",
    "resume": "Take pauses back, and try quarantined topics again.",
    "run": "Delete what is due, on a schedule or once.",
    "spark": "The same work on Spark, for stores too large for one process.",
    "status": "Show what the janitor does, what waits and why.",
    "sweep-now": "Have the process that holds the store sweep at once.",
    "topic": "Show one topic: size over time, ttl, what is held and why, consumers, what was taken.",
    "verify": "Prove the boundary, or refute it.",
    "why": "Say why a message is still there, or who took it.",
}


@click.group(
    cls=LazyGroup,
    lazy={
        verb: LazyCommand(f"janitor.cli.{verb.replace('-', '_')}:command", sentence)
        for verb, sentence in _VERBS.items()
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
    From then on, as a daemon with a status page, or in single passes from cron or a timer:
      janitor run --config janitor.yaml
      janitor run --once --config janitor.yaml

    \b
    When something looks wrong:
      janitor status --config janitor.yaml
      janitor pause --config janitor.yaml

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 a guard stopped it or the store
    is not adopted, 4 another process holds the store, 5 something was left undone.
    """
    context = click.get_current_context()
    context.ensure_object(dict)["verb"] = context.invoked_subcommand


cli.add_command(completion("janitor"))


def main(arguments: Sequence[str] | None = None, clock: Clock | None = None) -> None:
    """Run a command and exit with its code.

    Args:
        arguments: the command line without the program's name; ``sys.argv`` by default.
        clock: what time it is; the machine's by default.
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
        interrupted=lambda: _ASKED if found.get("verb") in _QUESTIONS else _INTERRUPTED,
        typed=common.arguments,
    )
