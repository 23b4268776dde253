"""``tms admin token``: makes a token for one user or program, and the line by which the server knows it.

Tokens are made here and nowhere else: what a person would choose could be guessed from its hash, and a secret given as
an argument would be in the list of processes and in the history of the shell.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from tms_core.errors import ConfigurationError


@click.command("token")
@click.argument("principal")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the token to this new file, for its owner only, instead of printing it.",
)
def make_token(principal: str, token_file: Path | None) -> None:
    """Make a token for PRINCIPAL, whom rules of server.auth.rules let do something.

    The token is shown this once; the server keeps its SHA-256 only. The line goes into
    server.auth.tokens_file, which a running server reads again by itself. To replace a token, add
    the line of a new one, hand it out, and take the old line away.

    \b
    Examples:
      tms admin token ada
      tms admin token ada --token-file ada.token >> tokens
    """
    from tms_core.server.auth.tokens import new_token, token_line  # noqa: PLC0415 a help text does without it

    token = new_token()
    line = token_line(principal, token)
    if token_file is None:
        click.echo(token)
        click.echo(f"The token of {principal}, shown this once. Its line for server.auth.tokens_file:", err=True)
    else:
        _write(token_file, token)
    click.echo(line)


def _write(path: Path, token: str) -> None:
    try:
        # Never into a file that is there already, which other users may be allowed to read.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be made: {error.strerror}.", "Give --token-file a new file."
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{token}\n")
