"""Files with secrets, certificates and keys: their permissions, and values that follow their changes.

The client of the server uses this module too, therefore it imports neither settings nor the log's packages.
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

#: The smallest token that a service demands, in bytes: a shorter one could be guessed.
TOKEN_BYTES = 32
#: The age of contents from which on files are read again, in seconds.
LOOK_SECONDS: float = 1
logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Files, and the value that their contents have; threads may share it.

    The files are read again at most once a second, and whole: a comparison of bytes misses no change, as a comparison
    of modification times may. Files that cannot be used (deleted, half written, writable by others) leave the previous
    value in force, because refusing every client would be worse. The log reports this once.

    Args:
        files: each file by the setting that names it.
        parse: returns the value of the contents, one argument for each file. It raises ``ConfigurationError``, or
            ``OSError`` as Python's ssl does. Neither may quote the contents.
        refuse_writers: whether a file that other users can write is refused.
        secret: the setting of a file that is also refused if other users can read it, except its group.

    Attributes:
        name: settings and files, for messages.
        value: the value of the contents in force.
        is_public: whether every user of the machine could read one of the files when they were read last.

    Raises:
        ConfigurationError: a file cannot be read, other users have permissions on it, or ``parse`` refuses it.
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
        self._looked_ms = self._clock.monotonic_ms()
        self.is_public = False
        self._contents = self._read()
        self.value = self._parsed(self._contents)

    def refresh(self) -> bool:
        """Read the files again, if it is time to; True: there is another :attr:`value` now."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._looked_ms < LOOK_SECONDS * 1000:
                return False
            self._looked_ms = now_ms
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
                "Give certificates and keys that belong together, as PEM files without a passphrase.",
            ) from error

    def _read(self) -> list[bytes]:
        files = [self._contents_of(setting, path) for setting, path in self._files.items()]
        self.is_public = any(mode & stat.S_IROTH for _, mode in files)
        return [contents for contents, _ in files]

    def _contents_of(self, setting: str, path: Path) -> tuple[bytes, int]:
        name = f"{setting} {path}"
        contents, mode = _read_regular(name, path)
        if self._refuse_writers and mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{name} can be written by other users, who could give themselves access.", f"chmod go-w {path}"
            )
        if setting == self._secret:
            _check_secret_mode(name, path, mode)
        return contents, mode


def check_secret_file(setting: str, path: Path) -> None:
    """See that other users can neither change nor read a file; its group may read it, as Kubernetes mounts secrets.

    Raises:
        ConfigurationError: they can, or it cannot be found.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(f"{setting} {path}", error) from error
    _check_secret_mode(f"{setting} {path}", path, mode)


def _check_secret_mode(name: str, path: Path, mode: int) -> None:
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigurationError(f"{name} can be read or written by other users.", f"chmod g-w,o-rwx {path}")


def read_token(setting: str, path: Path, shortest: int = TOKEN_BYTES) -> bytes:
    """Return the token of a file, without whitespace around it.

    Args:
        setting: the one that names the file, for errors.
        shortest: how many bytes it has at least.

    Raises:
        ConfigurationError: it cannot be read, or has no token of this length.
    """
    token = _read_regular(f"{setting} {path}", path)[0].strip()
    if not token:
        raise ConfigurationError(f"{setting} {path} is empty.", "Put a token into it.")
    if len(token) < shortest:
        raise ConfigurationError(
            f"{setting} {path} has a token of fewer than {shortest} characters.",
            f"Make a random one: openssl rand -hex 32 > {path}",
        )
    return token


def token_reader(setting: str, path: Path) -> Callable[[], bytes]:
    """Return the reader of a token, which only the owner of its file and its group can read now.

    Each call reads the file again, so a token can be replaced while the program runs.

    Raises:
        ConfigurationError: as :func:`read_token`, also from the reader; or other users can read or change the file.
    """
    check_secret_file(setting, path)
    read = partial(read_token, setting, path)
    read()
    return read


def _read_regular(name: str, path: Path) -> tuple[bytes, int]:
    """Return contents and mode of a regular file; a pipe would block the caller until somebody writes to it.

    Raises:
        ConfigurationError: the file cannot be read, or is not a regular file.
    """
    try:
        # O_NONBLOCK opens a pipe without a writer at once, and does not change how a regular file is read.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 a descriptor
            # The mode of the same file, even while another is put in its place.
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode):
                return file.read(), mode
    except OSError as error:
        raise _unreadable(name, error) from error
    raise ConfigurationError(f"{name} is not a regular file.", "Give a file, not a pipe, socket or device.")


def _unreadable(name: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{name} cannot be read: {error.strerror}.", "Give a file that this user may read.")
