"""A reference implementation of the deletion rules with complete knowledge and true time.

It is derived from rules L0 to L5 and S8, not from the janitor's code, and permits no deletion that could lose a row. It
knows the error of every clock and the fate of every transaction. The janitor sees topics only during runs, and clocks
with small errors; the reference tolerates exactly these differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.simulation.model import ALLOWANCE_MS, ERROR_MS, HOLD_MS, Row, Topic

#: Maximum error of the difference of two readings of a correct clock.
DRIFT_MS = 2 * ERROR_MS

Pair = tuple[int, int]


def is_old(generation: int, current: int) -> bool:
    return generation < _kept_from(current)


def _kept_from(current: int) -> int:
    """Return the lowest generation that is not old."""
    return current if current > 0 else 1 - current


@dataclass(frozen=True, slots=True)
class PermittedFrontier:
    """The permitted frontier of one topic in true time (invariant S8).

    Attributes:
        generation: the last released metadata generation; 0: none.
        cutoff_ms: the last released cutoff.
        at_ms: the time of that release.
        pending: held jumps by generation and ttl, with the time of the first run that saw them.
        approved: the jump that an operator approved.
    """

    generation: int = 0
    cutoff_ms: int = 0
    at_ms: int = 0
    pending: dict[Pair, int] = field(default_factory=dict)
    approved: Pair | None = None

    def earned_ms(self, now_ms: int) -> int:
        """Return the cutoff that time alone permits."""
        return self.cutoff_ms + now_ms - self.at_ms

    def union(self, other: PermittedFrontier) -> PermittedFrontier:
        """Return the union of two frontiers at the same time."""
        return PermittedFrontier(
            max(self.generation, other.generation, key=_kept_from),
            max(self.cutoff_ms, other.cutoff_ms),
            self.at_ms,
            self.pending | other.pending,
            other.approved or self.approved,
        )


class Reference:
    """The permissions of the janitor.

    Attributes:
        adopted: whether an operator has adopted the current store.
        protected: topics whose rows must not be deleted.
        paused: topics that must not be changed.
    """

    def __init__(self) -> None:
        self.adopted = False
        self.protected: set[str] = set()
        self.paused: set[str] = set()
        self._frontiers: dict[str, PermittedFrontier] = {}

    # -- changes by operators and runs ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Discard everything that the janitor has learned."""
        self.adopted = False
        self._frontiers.clear()

    def adopt(self, topics: Mapping[str, Topic], now_ms: int) -> None:
        """Permit all present topics up to the rules."""
        self.adopted = True
        for name, topic in _readable(topics).items():
            self._frontiers[name] = _frontier_of_rules(topic, now_ms)

    def approve(self, topics: Mapping[str, Topic], now_ms: int) -> None:
        """Approve the held jumps of these topics."""
        for name, topic in _readable(topics).items():
            if name not in self.protected | self.paused and not self._granted(name, topic, now_ms):
                self._hold(name, topic, now_ms)
                self._frontiers[name] = replace(self._frontiers[name], approved=_pair(topic))

    def observe(self, before: Mapping[str, Topic], after: Mapping[str, Topic], now_ms: int) -> None:
        """Record a completed run, which saw the topics before or after a change."""
        for name, topic in after.items():
            earlier = before.get(name, topic)
            self._observe(name, earlier, now_ms)
            if topic != earlier:
                first = self._frontiers.get(name)
                self._observe(name, topic, now_ms)
                if first is not None:
                    self._frontiers[name] = first.union(self._frontiers[name])

    def observe_interrupted(self, topics: Mapping[str, Topic], now_ms: int) -> None:
        """Record an interrupted run, which starts the holds of jumps."""
        for name, topic in _readable(topics).items():
            if name not in self.protected | self.paused and not self._granted(name, topic, now_ms):
                frontier = self._frontiers.get(name, PermittedFrontier(at_ms=now_ms))
                since_ms = frontier.pending.get(_pair(topic), now_ms)
                self._frontiers[name] = replace(frontier, pending={_pair(topic): since_ms})

    def _observe(self, name: str, topic: Topic, now_ms: int) -> None:
        if topic.garbled:
            return
        if name in self.protected:
            # Rows accumulated under protection are a new jump without wait or approval.
            frontier = self._frontiers.get(name, PermittedFrontier())
            self._frontiers[name] = PermittedFrontier(frontier.generation, frontier.cutoff_ms, now_ms)
        elif self._granted(name, topic, now_ms):
            self._frontiers[name] = _frontier_of_rules(topic, now_ms)
        else:
            self._hold(name, topic, now_ms)

    def _hold(self, name: str, topic: Topic, now_ms: int) -> None:
        frontier = self._frontiers.get(name, PermittedFrontier(at_ms=now_ms))
        cutoff_ms = min(now_ms - topic.ttl_seconds * 1000, frontier.earned_ms(now_ms))
        since_ms = frontier.pending.get(_pair(topic), now_ms)
        self._frontiers[name] = PermittedFrontier(frontier.generation, cutoff_ms, now_ms, {_pair(topic): since_ms})

    def _granted(self, name: str, topic: Topic, now_ms: int) -> bool:
        """Return whether the frontier may advance to the cutoff of the rules."""
        frontier = self._frontiers.get(name)
        if frontier is None:
            return False
        older = _kept_from(topic.generation) > _kept_from(frontier.generation)
        ahead_ms = now_ms - topic.ttl_seconds * 1000 - frontier.earned_ms(now_ms)
        further = topic.generation > 0 and ahead_ms > ALLOWANCE_MS + DRIFT_MS
        since_ms = frontier.pending.get(_pair(topic))
        waited = since_ms is not None and now_ms - since_ms >= HOLD_MS - DRIFT_MS
        return not (older or further) or waited or frontier.approved == _pair(topic)

    # -- the verdict ---------------------------------------------------------------------------------------------

    def objection(
        self, row: Row, topic: Topic | None, now_ms: int, wall_ms: int, *, undecided: bool, referenced: bool
    ) -> tuple[str, str] | None:
        """Return the broken invariant and the reason if the row must exist, else None.

        Args:
            topic: metadata of its topic; None: unknown.
            now_ms: true time.
            wall_ms: the janitor's clock, which the rules use.
            undecided: whether its transaction was in progress.
            referenced: whether a live message refers to it.
        """
        if row.unrecognized or topic is None or topic.garbled:
            return "live row lost", "its key or its topic is unknown"
        if row.topic in self.protected:
            return "live row lost", "its topic is protected"
        old = is_old(row.generation, topic.generation)
        expired = row.generation == topic.generation and row.time_ms < wall_ms - topic.ttl_seconds * 1000
        if not old and not expired:
            return "live row lost", f"its topic is at generation {topic.generation}, ttl {topic.ttl_seconds} s"
        generation, cutoff_ms = self._reached(row.topic, topic, now_ms)
        freely_old = old and is_old(row.generation, generation)
        if not freely_old and row.time_ms >= cutoff_ms:
            return "frontier overrun", "its topic's frontier is before the row"
        if row.table == "payload" and not freely_old:
            if undecided:
                return "live row lost", "its transaction was undecided"
            if referenced:
                return "live row lost", "a kept message refers to it"
        return None

    def _reached(self, name: str, topic: Topic, now_ms: int) -> tuple[int, int]:
        """Return the generation and the cutoff up to which rows may be deleted now."""
        if self._granted(name, topic, now_ms):
            return topic.generation, 2**63
        frontier = self._frontiers.get(name)
        return (0, 0) if frontier is None else (frontier.generation, frontier.earned_ms(now_ms) + DRIFT_MS)


def _readable(topics: Mapping[str, Topic]) -> dict[str, Topic]:
    return {name: topic for name, topic in topics.items() if not topic.garbled}


def _pair(topic: Topic) -> Pair:
    return topic.generation, topic.ttl_seconds


def _frontier_of_rules(topic: Topic, now_ms: int) -> PermittedFrontier:
    return PermittedFrontier(topic.generation, now_ms - topic.ttl_seconds * 1000, now_ms)
