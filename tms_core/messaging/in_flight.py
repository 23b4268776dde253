"""What producers have under way, so that a newer instance can wait for it; threads may share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from tms_core.errors import Unavailable
from tms_core.messaging.producer_rows import ProducerName

#: How long a new instance waits for what older ones have under way, in seconds.
_WAIT_SECONDS = 30


class InFlight:
    """The requests that are being written, and the registrations that are being changed."""

    def __init__(self) -> None:
        self._busy: set[bytes] = set()
        self._generations: Counter[tuple[ProducerName, int]] = Counter()
        self._changed = Condition()

    def begin(self, key: bytes, producer: ProducerName, generation: int) -> None:
        """A request is under way, whether its generation counts or not.

        Raises:
            Unavailable: one with the same key is.
        """
        with self._changed:
            if key in self._busy:
                raise Unavailable(f"A request of producer {producer.name} to this topic is under way.", "Try again.")
            self._busy.add(key)
            self._generations[producer, generation] += 1

    def end(self, key: bytes, producer: ProducerName, generation: int) -> None:
        """It is written, or never will be."""
        with self._changed:
            self._busy.discard(key)
            left = self._generations.pop((producer, generation)) - 1
            if left:
                self._generations[producer, generation] = left
            self._changed.notify_all()

    @contextmanager
    def only(self, key: bytes) -> Iterator[None]:
        """Be the only one that changes a registration."""
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._busy, _WAIT_SECONDS):
                raise Unavailable("Another instance of the producer is being registered.", "Try again.")
            self._busy.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(key)
                self._changed.notify_all()

    def wait_for_older(self, producer: ProducerName, generation: int) -> None:
        """Return when nothing of generations before this one is under way; what comes from now on is refused."""

        def is_over() -> bool:
            return not any(who == producer and older < generation for who, older in self._generations)

        with self._changed:
            if not self._changed.wait_for(is_over, _WAIT_SECONDS):
                raise Unavailable(
                    f"Requests of the former instance of producer {producer.name} are still being written.",
                    "Try again.",
                )
