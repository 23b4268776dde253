"""Files with a secret in them: whether they are their owner's alone, and the token that one holds."""

from __future__ import annotations

import stat
from pathlib import Path

from tms_core.errors import ConfigurationError

#: How many bytes a token has at least that a service demands: fewer could be found by trying.
TOKEN_BYTES = 32


def check_secret_file(setting: str, path: Path) -> None:
    """See that other users can neither change nor read a file; its group may read it, as Kubernetes mounts secrets.

    Raises:
        ConfigurationError: they can, or it cannot be found.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigurationError(
            f"{setting} {path} cannot be read: {error.strerror}.", "Give a file that this user may read."
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigurationError(f"{setting} {path} can be read or written by other users.", f"chmod g-w,o-rwx {path}")


def refuse_passphrase() -> str:
    """Stand in for the passphrase of a private key, for which OpenSSL would otherwise prompt on the terminal.

    Raises:
        OSError: always; OpenSSL asks only for the passphrase of an encrypted key.
    """
    raise OSError("the private key is encrypted with a passphrase")


def read_token(setting: str, path: Path, shortest: int = TOKEN_BYTES) -> bytes:
    """Return the token of a file, without whitespace around it.

    Args:
        setting: the one that names the file, for errors.
        shortest: how many bytes it has at least.

    Raises:
        ConfigurationError: it cannot be read, or has no token of this length.
    """
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"{setting} {path} cannot be read: {error.strerror}.", "Give a file that this user may read."
        ) from error
    if not token:
        raise ConfigurationError(f"{setting} {path} is empty.", "Put a token into it.")
    if len(token) < shortest:
        raise ConfigurationError(
            f"{setting} {path} has a token of fewer than {shortest} characters.",
            f"Make a random one: openssl rand -hex 32 > {path}",
        )
    return token
