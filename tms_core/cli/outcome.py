"""How a command ends: errors become sentences and exit codes here, and nowhere before."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from click.core import ParameterSource

from tms_core.errors import ConfigurationError, StateBusy, StoreBusy, StoreLayoutError, TmsError
from tms_core.logs.printable import complete, printable

DONE, FAILED, USAGE, BUSY, INTERRUPTED = 0, 1, 2, 4, 130

#: The options that lead to a server or a store.
LEADING = ("server", "token_file", "ca_file", "config", "leveldb", "hbase")

#: The exit codes of errors that are not just :data:`FAILED`; the first that fits counts.
CODES: tuple[tuple[type[TmsError], int], ...] = (
    (ConfigurationError, USAGE),
    (StoreLayoutError, USAGE),
    (StoreBusy, BUSY),
    (StateBusy, BUSY),
)


@contextmanager
def completing() -> Iterator[None]:
    """Gives the commands that an error of the block names the options they need here."""
    try:
        yield
    except TmsError as error:
        error.message, error.hint = (complete(text, arguments()) for text in (error.message, error.hint))
        raise


def arguments() -> str:
    """Return the options that lead to where the running command works, to be typed again; not what the environment
    says.
    """
    context = click.get_current_context()
    given = {
        option.opts[0]: context.params[option.name]
        for option in context.command.params
        if option.name in LEADING and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }
    return " ".join(f"{option} {shlex.quote(str(value))}" for option, value in given.items())


def execute(
    command: click.Command,
    name: str,
    arguments: Sequence[str] | None,
    *,
    obj: object = None,
    codes: Sequence[tuple[type[TmsError], int]] = CODES,
    interrupted: Callable[[], str] = lambda: "interrupted",
    typed: Callable[[], str] = str,
) -> int:
    """Run a command and return its exit code.

    Args:
        name: of the program, as its help says it.
        arguments: the command line without the program's name; ``sys.argv`` where None.
        obj: what the command finds in its context.
        interrupted: what is said after Ctrl-C.
        typed: the options that led here, for the commands that a hint names.
    """
    try:
        code = command.main(
            None if arguments is None else list(arguments), prog_name=name, standalone_mode=False, obj=obj
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show(sys.stderr)
        return error.exit_code
    except click.Abort:
        click.echo(interrupted(), err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; Python must not complain about that while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except TmsError as error:
        # An error quotes what a server, a store or a client has made up.
        message, hint = (printable(complete(text, typed())) for text in (error.message, error.hint))
        click.secho(message, fg=None if os.environ.get("NO_COLOR") else "red", err=True)
        if hint:
            click.echo(hint, err=True)
        return next((code for kind, code in codes if isinstance(error, kind)), FAILED)
