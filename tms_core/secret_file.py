"""Whether a file with a secret in it is its owner's alone."""

from __future__ import annotations

import stat
from pathlib import Path

from tms_core.errors import ConfigurationError


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
