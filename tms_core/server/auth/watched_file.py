"""A file of tokens or keys that is in force until a better one takes its place, without a restart.

It is read again at most once a second, when it is needed, and whole: it is small, and comparing its bytes misses no
change, as comparing times of modification may. A file that cannot be used (gone, half written, open to others) leaves
the former in force, since refusing every client would be worse; the log says so once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError
from tms_core.logs.loggers import get_logger

logger = get_logger(__name__)

#: How old what was read may be before the file is looked at again, in milliseconds.
LOOK_MS = 1000

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A file and what its contents mean.

    Args:
        setting: that names it, for errors.
        path: where it is.
        parse: makes sense of its contents; or raises ``ConfigurationError``, which begins with the first argument, the
            file's name and setting, and must not quote them.
        clock: by which it is looked at again.
        private: whether it is warned of when others may read it.

    Raises:
        ConfigurationError: it cannot be read, others may write it, or ``parse`` refuses it.
    """

    def __init__(
        self, setting: str, path: Path, parse: Callable[[str, bytes], T], clock: Clock, *, private: bool
    ) -> None:
        self._path = path
        self._name = f"{setting} {path}"
        self._parse = parse
        self._clock = clock
        self._private = private
        self._complaint = ""
        self._looked_ms = clock.running_ms()
        self._contents, mode = self._read()
        #: What the contents mean that are in force.
        self.value = parse(self._name, self._contents)
        self._warn_of_readers(mode)

    def refresh(self) -> bool:
        """Look at the file again, if it is time to; True: there is another :attr:`value` now."""
        now_ms = self._clock.running_ms()
        if now_ms - self._looked_ms < LOOK_MS:
            return False
        self._looked_ms = now_ms
        try:
            contents, mode = self._read()
            changed = contents != self._contents
            value = self._parse(self._name, contents) if changed else self.value
        except ConfigurationError as error:
            if str(error) != self._complaint:
                logger.error("%s Until then the former contents are in force.", error)
            self._complaint = str(error)
            return False
        self._complaint = ""
        if changed:
            self._contents, self.value = contents, value
            logger.info("%s has changed and is in force", self._name)
            self._warn_of_readers(mode)
        return changed

    def _read(self) -> tuple[bytes, int]:
        """Contents and mode, both of the same file, even while another is put in its place."""
        try:
            with self._path.open("rb") as file:
                contents, mode = file.read(), os.fstat(file.fileno()).st_mode
        except OSError as error:
            raise ConfigurationError(
                f"{self._name} cannot be read: {error.strerror}.", "Give a file that this user may read."
            ) from error
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{self._name} can be written by other users, who could give themselves access.",
                f"chmod go-w {self._path}",
            )
        return contents, mode

    def _warn_of_readers(self, mode: int) -> None:
        if self._private and mode & stat.S_IROTH:
            logger.warning("%s can be read by every user of this machine; chmod o-r %s", self._name, self._path)
