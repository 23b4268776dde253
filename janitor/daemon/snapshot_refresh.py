"""The transaction snapshot of a daemon, refreshed on its own schedule.

A sweep must not wait for a slow file system or transaction service. A snapshot that is temporarily unreadable must not
prevent inversions while an older snapshot is fresh. Therefore a job reads snapshots, and sweeps use the last snapshot
and check its age (invariant S14).
"""

from __future__ import annotations

import logging
from threading import Lock

from tms_core.errors import NoSnapshot, SnapshotError
from tms_core.transaction.source.source import Loaded, SnapshotSource

logger = logging.getLogger(__name__)


class CachedSource:
    """A source that returns the last read snapshot.

    Args:
        source: the source that reads snapshots.
    """

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._lock = Lock()
        self._loaded: Loaded | None = None
        self._error: Exception | None = None
        self._message = ""

    def refresh(self) -> None:
        """Read the newest snapshot; log an error once, and again if it changes."""
        try:
            loaded = self._source.latest()
        except (NoSnapshot, SnapshotError, OSError) as error:
            with self._lock:
                self._error = error
            self._log_change(f"the transaction snapshot could not be read: {error}")
            return
        with self._lock:
            self._loaded, self._error = loaded, None
        self._log_change("")

    def latest(self) -> Loaded:
        """Return the last snapshot; the first call reads a snapshot.

        Raises:
            NoSnapshot, SnapshotError, OSError: no snapshot was ever read; the error is the reason.
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
        """Return the last snapshot; None if no snapshot was read yet."""
        with self._lock:
            return self._loaded

    def _log_change(self, message: str) -> None:
        if message and message != self._message:
            logger.warning("%s", message)
        elif self._message and not message:
            logger.info("transaction snapshots are readable again")
        self._message = message
