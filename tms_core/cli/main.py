"""The ``tms`` command: the server, a client for the terminal, and the administration of stores."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from tms_core.cli import outcome
from tms_core.cli.lazy import LazyCommand, LazyGroup, completion

_MESSAGES, _ADMINISTER = "Messages and transactions", "Serve and administer"
#: The commands by name; each help is the first sentence of the command's docstring.
_COMMANDS = {
    "topic": LazyCommand("tms_core.cli.topics:topic", "Create, show, change and delete topics.", _MESSAGES),
    "publish": LazyCommand("tms_core.cli.messages:publish", "Publish messages.", _MESSAGES),
    "poll": LazyCommand("tms_core.cli.messages:poll", "Print the messages of a topic.", _MESSAGES),
    "consumer": LazyCommand("tms_core.cli.consumers:consumer", "Show consumers and set their positions.", _MESSAGES),
    "producer": LazyCommand("tms_core.cli.producers:producer", "Show producers and fence their instances.", _MESSAGES),
    "tx": LazyCommand("tms_core.cli.tx:tx", "Show and end transactions.", _MESSAGES),
    "serve": LazyCommand("tms_core.cli.serve:serve", "Serve messages and transactions.", _ADMINISTER),
    "admin": LazyCommand("tms_core.cli.admin:admin", "Administer a store.", _ADMINISTER),
}


@click.group(
    cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="tms-janitor", prog_name="tms")
def cli() -> None:
    """Serve, publish and read messages in transactions.

    \b
    Start a server in one terminal:
      tms serve

    \b
    Use it in a second terminal:
      tms topic create default:orders --ttl 7d
      tms publish default:orders -m "hello"
      tms poll default:orders

    \b
    Use a server that is not in the settings:
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
