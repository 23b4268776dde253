"""A scheduler for counts of many topics with a common budget of rows, so that a huge topic does not delay small topics.

A count is a generator that yields the number of rows of each page, and returns its result. A topic is due some time
after its last count, or when its result is outdated. Rows are read in *turns*. A count that is longer than a turn stays
unfinished, and from then on turns alternate between an unfinished count and due topics. Therefore a huge topic takes at
most half of the budget from small topics, and the reverse. Unfinished counts live as long as the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Generic, Protocol, TypeVar

from janitor.sweep.executor import Pacer
from tms_core.clock import Clock
from tms_core.errors import StopRequested, StoreError
from tms_core.topic import TopicId

T = TypeVar("T")

#: A topic and the counted generation.
Life = tuple[TopicId, int]
#: The interval at which finished counts are saved together, in milliseconds; a commit for each topic would be too slow.
SAVE_EVERY_MS = 3_000


class Counts(Protocol[T]):
    """A kind of count, such as the sizes of topics: which topics to count, how, and what to do with the result."""

    def list_topics(self) -> Sequence[Life]:
        """Return the existing topics, in the order of counting."""
        ...

    def is_outdated(self, life: Life) -> bool:
        """Return whether the last count of a topic must be repeated before its refresh time."""
        ...

    def begin(self, life: Life) -> Generator[int, None, T]:
        """Return a new count of a topic."""
        ...

    def note_result(self, life: Life, found: T) -> None:
        """Note the result of a count."""
        ...

    def note_failure(self, life: Life, error: StoreError) -> None:
        """Note the first failure of a count since its last result."""
        ...

    def save(self) -> None:
        """Save the results since the last call."""
        ...


class CountScheduler(Generic[T]):
    """A scheduler that counts topics in turns.

    Args:
        counts: the counts to make.
        clock: the clock for ages and turns.
        pacer: the budget, possibly shared; it may stop the count before each page.
        turn_rows: the length of a turn, in rows.
        refresh_seconds: the age at which a count is repeated.
    """

    def __init__(self, counts: Counts[T], clock: Clock, pacer: Pacer, *, turn_rows: int, refresh_seconds: int) -> None:
        self._counts = counts
        self._clock = clock
        self._pacer = pacer
        self._turn_rows = turn_rows
        self._refresh_ms = refresh_seconds * 1000
        self._looked_ms = self._saved_ms = 0
        self._due: deque[Life] = deque()
        self._unfinished: deque[tuple[Life, Generator[int, None, T]]] = deque()
        #: Rows read for due topics since the last turn of an unfinished topic.
        self._rows_since_turn = 0
        self._tried_ms: dict[Life, int] = {}
        self._failing: set[Life] = set()

    def step(self) -> None:
        """Count due topics, until no count is unfinished or the process is stopping; call this repeatedly.

        A topic that cannot be read is retried when it is due again.

        Raises:
            StoreError: the topics could not be read, or counts could not be saved.
        """
        try:
            self._find_due()
            while self._take_turn():
                pass
        except StopRequested:
            return
        finally:
            self._save()

    def _find_due(self) -> None:
        """Update the existing topics and the queue of due topics."""
        self._looked_ms = self._clock.monotonic_ms()
        living = self._counts.list_topics()
        known = set(living)
        self._unfinished = deque(item for item in self._unfinished if item[0] in known)
        self._tried_ms = {life: at_ms for life, at_ms in self._tried_ms.items() if life in known}
        busy = {life for life, _ in self._unfinished}
        self._due = deque(life for life in living if life not in busy and self._is_due(life))

    def _is_due(self, life: Life) -> bool:
        tried_ms = self._tried_ms.get(life)
        old = tried_ms is None or self._looked_ms - tried_ms >= self._refresh_ms
        return old or self._counts.is_outdated(life)

    def _take_turn(self) -> bool:
        """Count for one turn; return whether there was a count to continue."""
        if self._unfinished and not self._due and self._clock.monotonic_ms() - self._looked_ms >= self._refresh_ms:
            self._find_due()
        if self._unfinished and (not self._due or self._rows_since_turn >= self._turn_rows):
            self._rows_since_turn = 0
            self._count(*self._unfinished.popleft())
        elif self._due:
            life = self._due.popleft()
            self._rows_since_turn += self._count(life, self._counts.begin(life))
        else:
            return False
        return True

    def _count(self, life: Life, counting: Generator[int, None, T]) -> int:
        """Read for one turn; return the number of read rows."""
        # Append it to the queue now: if the count is interrupted, the next step continues it.
        self._unfinished.append((life, counting))
        rows = 0
        try:
            while rows < self._turn_rows:
                self._pacer.keep_alive()
                # An empty page counts as one row, because it also needs a read.
                cost = max(next(counting), 1)
                rows += cost
                self._pacer.throttle(cost)
        except StopIteration as end:
            self._ended(life)
            self._failing.discard(life)
            self._counts.note_result(life, end.value)
            if self._clock.monotonic_ms() - self._saved_ms >= SAVE_EVERY_MS:
                self._save()
        except StoreError as error:
            self._ended(life)
            if life not in self._failing:
                self._failing.add(life)
                self._counts.note_failure(life, error)
        except BaseException:
            # An error of the generator has ended it: continued, it would return None instead of a result.
            if getgeneratorstate(counting) == GEN_CLOSED:
                self._ended(life)
            raise
        return rows

    def _ended(self, life: Life) -> None:
        self._unfinished.pop()
        self._tried_ms[life] = self._clock.monotonic_ms()

    def _save(self) -> None:
        self._counts.save()
        self._saved_ms = self._clock.monotonic_ms()
