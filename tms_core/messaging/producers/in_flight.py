"""The running requests of producers, so that a newer instance can wait for them; threads may share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock

from tms_core.errors import Unavailable

#: How long a new instance waits for running requests of older instances, in seconds.
_WAIT_SECONDS = 30
#: The entry of a registration that is being changed.
_CHANGING = (b"", 0)


class InFlight:
    """The requests that are being written, and the registrations that are being changed."""

    def __init__(self) -> None:
        #: By the key of a request, its producer's and the generation that it names.
        self._busy: dict[bytes, tuple[bytes, int]] = {}
        # A plain lock, because each request enters it; a Condition is entered in Python code, which is slower.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        #: The number of waiting threads.
        self._waiting = 0

    def begin(self, key: bytes, producer: bytes, generation: int) -> bool:
        """Note that a request is under way, before its generation is checked.

        Args:
            producer: the key of its producer.
            generation: the generation in the request.

        Returns:
            Whether it was noted; False if a request with the same key is under way.
        """
        with self._lock:
            if key in self._busy:
                return False
            self._busy[key] = producer, generation
        return True

    def end(self, keys: Iterable[bytes]) -> None:
        """Note that requests are no longer under way."""
        with self._lock:
            for key in keys:
                del self._busy[key]
            # Each request calls this, and a thread rarely waits: the check costs less than a notification.
            if self._waiting:
                self._changed.notify_all()

    @contextmanager
    def only(self, key: bytes) -> Iterator[None]:
        """Lock a registration for a change.

        Raises:
            Unavailable: another thread holds the lock for too long.
        """
        with self._lock:
            if not self._wait_for(lambda: key not in self._busy):
                raise Unavailable("Another instance of the producer is being registered.", "Try again.")
            self._busy[key] = _CHANGING
        try:
            yield
        finally:
            self.end([key])

    def wait_for_older(self, producer: bytes, name: str, generation: int) -> None:
        """Wait until no request of an older generation is under way.

        Raises:
            Unavailable: a request takes too long.
        """

        def is_over() -> bool:
            return not any(who == producer and older < generation for who, older in self._busy.values())

        with self._lock:
            if not self._wait_for(is_over):
                raise Unavailable(
                    f"Requests of the former instance of producer {name} are still being written.", "Try again."
                )

    def _wait_for(self, change: Callable[[], bool]) -> bool:
        """Wait for a condition while holding the lock; return whether it is met."""
        self._waiting += 1
        try:
            return self._changed.wait_for(change, _WAIT_SECONDS)
        finally:
            self._waiting -= 1
