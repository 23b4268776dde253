"""Who hears of the work under way: always the same observer, and whoever asked for the work.

An engine that writes has one observer for its whole life, and calls it in the thread that does the work. That thread
is the one that answers a client, or a job's own. So the thread tells whose work it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from janitor.observe import Observer, tell_nobody
from tms_core.topic import TopicId


class Audience:
    """An observer that also tells whoever asked for what this thread does.

    Args:
        always: told of everything.
    """

    def __init__(self, always: Observer = tell_nobody) -> None:
        self._always = always
        self._asking = threading.local()

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        self._always(phase, topic, rows)
        asking: Observer = getattr(self._asking, "observer", tell_nobody)
        asking(phase, topic, rows)

    @contextmanager
    def joined(self, observer: Observer) -> Iterator[None]:
        """Tell this observer, too, of what this thread does while the block runs."""
        self._asking.observer = observer
        try:
            yield
        finally:
            del self._asking.observer
