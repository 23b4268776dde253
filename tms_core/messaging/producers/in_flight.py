"""The requests of producers that are being written, so that a newer instance can wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock

from tms_core.errors import Unavailable

#: The maximum wait of a new instance for running requests of older instances, in seconds.
_WAIT_SECONDS = 30
#: The entry of a registration that is being changed.
_CHANGING = (b"", 0)


class InFlight:
    """The requests that are being written, and the registrations that are being changed; threads may share it."""

    def __init__(self) -> None:
        #: For the key of each request, the key of its producer and the generation in the request.
        self._busy: dict[bytes, tuple[bytes, int]] = {}
        # A plain lock, because each request acquires it; a Condition is acquired in Python code, which is slower.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        #: The number of waiting threads.
        self._waiting = 0

    def begin(self, key: bytes, producer: bytes, generation: int) -> bool:
        """Register a running request, before its generation is checked.

        Args:
            producer: the key of its producer.
            generation: the generation in the request.

        Returns:
            False if another request with this key is running.
        """
        with self._lock:
            if key in self._busy:
                return False
            self._busy[key] = producer, generation
        return True

    def end(self, keys: Iterable[bytes]) -> None:
        """Remove finished requests."""
        with self._lock:
            for key in keys:
                del self._busy[key]
            # Each request calls this, but threads rarely wait: the check is cheaper than a notification.
            if self._waiting:
                self._changed.notify_all()

    @contextmanager
    def lock(self, key: bytes) -> Iterator[None]:
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
        """Wait until no request of an older generation is running.

        Raises:
            Unavailable: a request is still running after 30 seconds.
        """

        def are_finished() -> bool:
            return not any(key == producer and older < generation for key, older in self._busy.values())

        with self._lock:
            if not self._wait_for(are_finished):
                raise Unavailable(
                    f"Requests of the previous instance of producer {name} are still being written.", "Try again."
                )

    def _wait_for(self, predicate: Callable[[], bool]) -> bool:
        """Wait for a predicate, with the lock held; return False after a timeout."""
        self._waiting += 1
        try:
            return self._changed.wait_for(predicate, _WAIT_SECONDS)
        finally:
            self._waiting -= 1
