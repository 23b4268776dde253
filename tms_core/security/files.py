"""Files with secrets, certificates and keys: their permissions, and values that follow their changes.

The Python client imports this module, so it imports neither settings nor the packages of the log.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from tms_core.clock import Clock, SystemClock
from tms_core.errors import ConfigurationError

#: The shortest token that a service accepts, in bytes: a shorter token could be guessed.
TOKEN_BYTES = 32
#: The shortest interval between two reads of a file, in seconds.
LOOK_SECONDS: float = 1
#: The maximum size of a file in bytes.
_MAX_BYTES = 1 << 24
logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Files and the value parsed from their contents; threads may share it.

    The files are read completely, at most once a second: a comparison of contents detects every change, and a
    comparison of modification times does not. If the files are unusable (deleted, half written, writable by others),
    the previous value stays in force, because rejecting every client would be worse. The log reports this once, and
    :attr:`is_outdated` is true until the files are usable again.

    Args:
        files: each file by its setting.
        parse: returns the value for the contents, which are one argument for each file. It raises
            ``ConfigurationError``, or ``OSError`` as Python's ssl does. Neither may quote the contents.
        refuse_writers: whether to reject a file that other users can write.
        secret: the setting of a file to reject also if users other than its owner and group can read it.

    Attributes:
        name: settings and files, for messages.
        value: the current value.
        is_public: whether every user of the machine could read one of the files at the last read.

    Raises:
        ConfigurationError: a file cannot be read, other users have permissions on it, or ``parse`` rejects it.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        parse: Callable[..., T],
        clock: Clock | None = None,
        *,
        refuse_writers: bool = False,
        secret: str = "",
    ) -> None:
        self.name = " and ".join(f"{setting} {path}" for setting, path in files.items())
        self._files = files
        self._parse = parse
        self._clock = clock or SystemClock()
        self._refuse_writers = refuse_writers
        self._secret = secret
        self._lock = Lock()
        self._complaint = ""
        self._read_ms = self._clock.monotonic_ms()
        self.is_public = False
        self._contents = self._read()
        self.value = self._parsed(self._contents)

    @property
    def is_outdated(self) -> bool:
        """Return whether the files were unusable at the last read, so that :attr:`value` is the previous value."""
        return bool(self._complaint)

    def refresh(self) -> bool:
        """Read the files again if the last read is a second old; return whether :attr:`value` has changed."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._read_ms < LOOK_SECONDS * 1000:
                return False
            self._read_ms = now_ms
            try:
                contents = self._read()
                changed = contents != self._contents
                if changed:
                    self.value = self._parsed(contents)
            except ConfigurationError as error:
                if str(error) != self._complaint:
                    logger.error("%s Until then the previous contents are in force.", error)
                self._complaint = str(error)
                return False
            self._complaint, self._contents = "", contents
            if changed:
                logger.info("%s: the contents have changed and are in force", self.name)
            return changed

    def _parsed(self, contents: list[bytes]) -> T:
        try:
            return self._parse(*contents)
        except OSError as error:
            raise ConfigurationError(
                f"{self.name} cannot be used: {error}.",
                "Use a certificate and its private key, as PEM files without a passphrase.",
            ) from error

    def _read(self) -> list[bytes]:
        files = [self._read_file(setting, path) for setting, path in self._files.items()]
        self.is_public = any(mode & stat.S_IROTH for _, mode in files)
        return [contents for contents, _ in files]

    def _read_file(self, setting: str, path: Path) -> tuple[bytes, int]:
        name = f"{setting} {path}"
        contents, mode = _read_regular(name, path)
        if self._refuse_writers and mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{name} can be written by other users, who could grant themselves access.", f"chmod go-w {path}"
            )
        if setting == self._secret:
            _check_secret_mode(name, path, mode)
        return contents, mode


def check_secret_file(setting: str, path: Path) -> None:
    """Check that other users can neither read nor write a file. Its group may read it, as in secrets of Kubernetes.

    Raises:
        ConfigurationError: other users can, or the file does not exist.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(f"{setting} {path}", error) from error
    _check_secret_mode(f"{setting} {path}", path, mode)


def _check_secret_mode(name: str, path: Path, mode: int) -> None:
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigurationError(f"{name} can be read or written by other users.", f"chmod g-w,o-rwx {path}")


def read_token(setting: str, path: Path, min_bytes: int = TOKEN_BYTES) -> bytes:
    """Return the token in a file, without surrounding whitespace.

    Args:
        setting: the setting of the file, for errors.
        min_bytes: the shortest valid token.

    Raises:
        ConfigurationError: the file cannot be read, or its token is too short.
    """
    token = _read_regular(f"{setting} {path}", path)[0].strip()
    if not token:
        raise ConfigurationError(f"{setting} {path} is empty.", f"Create a token: openssl rand -hex 32 > {path}")
    if len(token) < min_bytes:
        raise ConfigurationError(
            f"{setting} {path} has a token of fewer than {min_bytes} bytes.",
            f"Create a random token: openssl rand -hex 32 > {path}",
        )
    return token


def check_file(setting: str, path: Path) -> None:
    """Check that a file can be read, and is not empty.

    Raises:
        ConfigurationError: it cannot be read, is too large, is not a regular file, or is empty.
    """
    if not _read_regular(f"{setting} {path}", path)[0].strip():
        raise ConfigurationError(f"{setting} {path} is empty.", "Use another file.")


def token_reader(setting: str, path: Path) -> Callable[[], bytes]:
    """Return a function that reads the token in a file.

    Each call reads the file again, so that operators can replace a token while the program runs.

    Raises:
        ConfigurationError: as :func:`read_token`, also from the function; or other users can read or write the file.
    """
    check_secret_file(setting, path)
    read = partial(read_token, setting, path)
    read()
    return read


def _read_regular(name: str, path: Path) -> tuple[bytes, int]:
    """Return contents and mode of a regular file; a pipe would block the caller until a process writes to it.

    Raises:
        ConfigurationError: the file cannot be read, is too large, or is not a regular file.
    """
    try:
        # O_NONBLOCK opens a pipe without a writer at once, and does not change how a regular file is read.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 a descriptor
            # The mode of the open file: another file may have replaced it at the path.
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                # Files of the kernel have a size of 0 but contents.
                contents = file.read(_MAX_BYTES + 1)
                if len(contents) > _MAX_BYTES:
                    raise ConfigurationError(
                        f"{name} has more than {_MAX_BYTES} bytes, the limit.", "Use another file."
                    )
                return contents, status.st_mode
    except OSError as error:
        raise _unreadable(name, error) from error
    raise ConfigurationError(f"{name} is not a regular file.", "Use a file, not a pipe, socket or device.")


def _unreadable(name: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{name} cannot be read: {error.strerror}.", "Use a file that this user can read.")
