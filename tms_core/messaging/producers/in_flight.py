"""What producers have under way, so that a newer instance can wait for it; threads may share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock

from tms_core.errors import Unavailable

#: How long a new instance waits for what older ones have under way, in seconds.
_WAIT_SECONDS = 30
#: Stands for a registration that is being changed.
_CHANGING = (b"", 0)


class InFlight:
    """The requests that are being written, and the registrations that are being changed."""

    def __init__(self) -> None:
        #: By the key of a request, its producer's and the generation that it names.
        self._busy: dict[bytes, tuple[bytes, int]] = {}
        # Entered for each request; that of a condition is entered in Python.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        #: How many wait for a change.
        self._waiting = 0

    def begin(self, key: bytes, producer: bytes, generation: int) -> bool:
        """Return a request is under way, whether its generation counts or not.

        Args:
            producer: the key of its producer.
            generation: the one that it names.

        Returns:
            Whether it is; not where one with the same key was before.
        """
        with self._lock:
            is_new = key not in self._busy
            if is_new:
                self._busy[key] = producer, generation
        return is_new

    def end(self, keys: Iterable[bytes]) -> None:
        """Requests are written, or never will be."""
        with self._lock:
            for key in keys:
                del self._busy[key]
            if self._waiting:
                self._changed.notify_all()

    @contextmanager
    def only(self, key: bytes) -> Iterator[None]:
        """Be the only one that changes a registration."""
        with self._lock:
            if not self._wait_for(lambda: key not in self._busy):
                raise Unavailable("Another instance of the producer is being registered.", "Try again.")
            self._busy[key] = _CHANGING
        try:
            yield
        finally:
            self.end([key])

    def wait_for_older(self, producer: bytes, name: str, generation: int) -> None:
        """Return when nothing of generations before this one is under way; later requests are refused."""

        def is_over() -> bool:
            return not any(who == producer and older < generation for who, older in self._busy.values())

        with self._lock:
            if not self._wait_for(is_over):
                raise Unavailable(
                    f"Requests of the former instance of producer {name} are still being written.", "Try again."
                )

    def _wait_for(self, change: Callable[[], bool]) -> bool:
        """Wait, with the lock, until something has come about; returns whether it has."""
        self._waiting += 1
        try:
            return self._changed.wait_for(change, _WAIT_SECONDS)
        finally:
            self._waiting -= 1
