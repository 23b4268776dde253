"""The ``tms`` command: the server, its client for people, and what looks after its stores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tms_core.cli import outcome
from tms_core.cli.completion import completion
from tms_core.cli.consumers import consumer
from tms_core.cli.create_tables import create_hbase_tables
from tms_core.cli.messages import poll, publish
from tms_core.cli.producers import producer
from tms_core.cli.serve import serve
from tms_core.cli.token import make_token
from tms_core.cli.topics import topic
from tms_core.cli.tx import tx
from tms_core.tables.leveldb.store import release


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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


for command in (serve, topic, publish, poll, consumer, producer, tx, completion("tms")):
    cli.add_command(command)


@cli.group("admin")
def admin() -> None:
    """For the operator of a store."""


admin.add_command(create_hbase_tables)
admin.add_command(make_token)


@admin.command("release")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def release_store(folder: Path) -> None:
    """Make a LevelDB store readable for CDAP again.

    A sweep does this when it ends. After one that was killed, tables may still carry names that
    CDAP's Java library does not know; this puts them right and changes nothing else.

    \b
    Example:
      tms admin release data/messaging
    """
    release(folder)
    click.echo(f"{folder} can be opened by CDAP")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code.

    Args:
        arguments: the command line without the program's name; ``sys.argv`` by default.
    """
    sys.exit(execute(arguments))


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return outcome.execute(cli, "tms", arguments)
