"""The ``tms`` command: the server, its client for people, and what looks after its stores."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from tms_core.cli import outcome
from tms_core.cli.lazy import LazyCommand, LazyGroup, completion

_COMMANDS = {
    "admin": LazyCommand("tms_core.cli.admin:admin", "For the operator of a store."),
    "consumer": LazyCommand(
        "tms_core.cli.consumers:consumer", "See how far behind consumers are; set where they go on."
    ),
    "poll": LazyCommand("tms_core.cli.messages:poll", "Print the messages of a topic."),
    "producer": LazyCommand(
        "tms_core.cli.producers:producer", "See who publishes under a name; fence an instance that hangs."
    ),
    "publish": LazyCommand("tms_core.cli.messages:publish", "Publish messages."),
    "serve": LazyCommand("tms_core.cli.serve:serve", "Serve messages and transactions until a signal ends it."),
    "topic": LazyCommand("tms_core.cli.topics:topic", "Make, look at, change and delete topics."),
    "tx": LazyCommand("tms_core.cli.tx:tx", "Look after transactions: who holds them, and how to end one."),
}


@click.group(
    cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="tms-janitor", prog_name="tms")
def cli() -> None:
    """Serve messages and transactions, publish and read them, and look after a messaging store.

    \b
    In a minute:
      tms serve &
      tms topic create default:orders --ttl 7d
      tms publish default:orders -m "hello"
      tms poll default:orders

    \b
    Another server than that of the settings:
      tms poll default:orders --server https://tms.example:11015 --token-file token
      export TMS_URL=https://tms.example:11015 TMS_TOKEN_FILE=token

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 4 another process holds the store.
    """


cli.add_command(completion("tms"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code.

    Args:
        arguments: the command line without the program's name; ``sys.argv`` by default.
    """
    sys.exit(execute(arguments))


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return outcome.execute(cli, "tms", arguments)
