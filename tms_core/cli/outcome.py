"""The outcome of a command: errors become text with an error code, and an exit code, only here.

    error: Folder /data does not exist. [TMS-STORE-NOT-FOUND]
    hint: Set the folder that contains system.tms.meta (--leveldb, or storage.leveldb.path).

With ``--format json``, standard error has a JSON object instead, with ``code``, ``message`` and ``hint``.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import click
from click.core import ParameterSource

from tms_core import errors
from tms_core.errors import ConfigurationError, StateBusy, StoreBusy, StoreLayoutError, TmsError
from tms_core.logs.printable import complete, printable

DONE, FAILED, USAGE, BUSY, INTERRUPTED = 0, 1, 2, 4, 130

#: The options that select a server or a store.
LOCATION_OPTIONS = ("server", "tx_server", "token_file", "ca_file", "config", "leveldb", "hbase")

#: The exit codes of errors other than :data:`FAILED`; the first matching class applies.
CODES: tuple[tuple[type[TmsError], int], ...] = (
    (ConfigurationError, USAGE),
    (StoreLayoutError, USAGE),
    (StoreBusy, BUSY),
    (StateBusy, BUSY),
)


#: The errors of a write to a full or failed disk.
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@contextmanager
def complete_hints() -> Iterator[None]:
    """Add the typed options to the commands in the texts of errors that the block raises."""
    try:
        yield
    except TmsError as error:
        error.message, error.hint = (complete(text, arguments()) for text in (error.message, error.hint))
        raise


def arguments() -> str:
    """Return the typed options that select the server or the store, for commands in hints; omit the environment's."""
    context = click.get_current_context()
    values = {
        option.opts[0]: context.params[option.name]
        for option in context.command.params
        if option.name in LOCATION_OPTIONS and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }
    return " ".join(f"{option} {shlex.quote(str(value))}" for option, value in values.items())


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
        name: the name of the program in its help texts.
        arguments: the command line without the program's name; None: ``sys.argv``.
        obj: the object in the context of the command.
        interrupted: the message after Ctrl-C.
        typed: a function that returns the typed options, for the commands in hints.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--format=json" in words or ("--format", "json") in pairwise(words)
    try:
        code = command.main(words, prog_name=name, standalone_mode=False, obj=obj)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show(sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        help_command = f"{name if context is None else context.command_path} --help"
        # The messages of this project's types are complete; click's messages lack the name of the option.
        is_whole = error.message.startswith("invalid ")
        _show(as_json, errors.USAGE, error.message if is_whole else error.format_message(), help_command)
        return error.exit_code
    except click.Abort:
        click.echo(interrupted(), err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has exited.
        _discard_output()
        return FAILED
    except OSError as error:
        # Errors of other files are errors of the tree, so this is standard output.
        if error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        message = f"Standard output cannot be written: {error.strerror}."
        _show(as_json, TmsError.code, message, "Free space on its disk, or write the output to another file.")
        return FAILED
    except TmsError as error:
        # An error may quote text from a server, a store or a client; escape control characters.
        message, hint = (printable(complete(text, typed())) for text in (error.message, error.hint))
        _show(as_json, error.code, message, hint)
        return next((code for kind, code in codes if isinstance(error, kind)), FAILED)


def _discard_output() -> None:
    """Discard the rest of standard output, so that Python's flush at shutdown does not report the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(as_json: bool, code: str, message: str, hint: str) -> None:
    """Print an error to standard error."""
    if as_json:
        error = {"code": code, "message": message} | ({"hint": hint} if hint else {})
        click.echo(json.dumps({"error": error}), err=True)
        return
    click.secho(f"error: {message} [{code}]", fg=None if os.environ.get("NO_COLOR") else "red", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
