"""The transaction snapshot of a daemon, refreshed on a schedule of its own.

A sweep must not wait for a slow file system or a transaction service, and a snapshot that cannot be read for a moment
must not cost a sweep its inversions while an older one is still fresh. So a job reads, and sweeps take the data read
last; how old it is they judge themselves, at the moment they use it (rule S14).
"""

from __future__ import annotations

import logging
from threading import Lock

from tms_core.errors import NoSnapshot, SnapshotError
from tms_core.transaction.source.source import Loaded, SnapshotSource

logger = logging.getLogger(__name__)


class Refreshed:
    """A source that answers with the data read last.

    Args:
        source: where snapshots are read.
    """

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._lock = Lock()
        self._loaded: Loaded | None = None
        self._error: Exception | None = None
        self._said = ""

    def refresh(self) -> None:
        """Read the newest snapshot; an error is logged once, and again when it changes."""
        try:
            loaded = self._source.latest()
        except (NoSnapshot, SnapshotError, OSError) as error:
            with self._lock:
                self._error = error
            self._say(f"the transaction snapshot could not be read: {error}")
            return
        with self._lock:
            self._loaded, self._error = loaded, None
        self._say("")

    def latest(self) -> Loaded:
        """What was read last; the first time it is read now.

        Raises:
            NoSnapshot, SnapshotError, OSError: nothing was ever read, and this is why.
        """
        with self._lock:
            loaded, error = self._loaded, self._error
        if loaded is None and error is None:
            self.refresh()
            return self.latest()
        if loaded is not None:
            return loaded
        raise error or NoSnapshot("No snapshot was read yet.")

    @property
    def seen(self) -> Loaded | None:
        """What was read last; None as long as nothing was."""
        with self._lock:
            return self._loaded

    def _say(self, message: str) -> None:
        if message and message != self._said:
            logger.warning("%s", message)
        elif self._said and not message:
            logger.info("transaction snapshots can be read again")
        self._said = message
