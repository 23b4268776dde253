"""What became of each topic over time: its ttl and generation, and its size.

An operator asks for both: changes before a topic was held, and space saved by a TTL. They are two notes
of the state, bounded in length, and no rule of deletion depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from janitor.state.base import State
from janitor.state.figures import KeptFigures
from janitor.state.records import Note, TopicCount
from tms_core.topic import TopicId, TopicMetadata

#: How many changes of one topic are remembered.
KEPT_CHANGES = 20
#: How many sizes of one topic are remembered, and of how many topics: the largest.
KEPT_SIZES, SIZED_TOPICS = 60, 200
#: How many of them are told where many topics are.
SKETCHED_SIZES = 24
#: How old a remembered size may be.
SIZES_MS = 30 * 86_400_000


class Change(NamedTuple):
    """A topic's metadata became another.

    Attributes:
        seen_ms: when the janitor saw it first.
        ttl_before, ttl_seconds: before and after.
        generation_before, generation: before and after, signed.
    """

    seen_ms: int
    ttl_before: int
    ttl_seconds: int
    generation_before: int
    generation: int


class Size(NamedTuple):
    """A topic's size at one moment, as the background count found it."""

    counted_ms: int
    messages: int
    size_bytes: int


class KnownTopic(NamedTuple):
    """A topic, as a run or a read of the metadata table found it; ``generation`` is signed."""

    tms_namespace: str
    topic: str
    generation: int
    ttl_seconds: int

    @property
    def name(self) -> str:
        return f"{self.tms_namespace}:{self.topic}"


TOPICS: KeptFigures[list[KnownTopic]] = KeptFigures(Note.TOPICS, list[KnownTopic], [])
#: The changes of each topic, oldest first; a topic that never changed is missing.
CHANGES: KeptFigures[dict[str, list[Change]]] = KeptFigures(Note.TOPIC_CHANGES, dict[str, list[Change]], {})
#: The sizes of the largest topics, oldest first.
SIZES: KeptFigures[dict[str, list[Size]]] = KeptFigures(Note.TOPIC_SIZES, dict[str, list[Size]], {})


def save_topics(state: State, topics: Iterable[TopicMetadata], now_ms: int) -> None:
    """Save the topics and their changes; costs no write when nothing has.

    Raises:
        StateError: the state could not be read or written.
    """
    found = [KnownTopic(t.topic.namespace, t.topic.topic, t.generation, t.ttl_seconds) for t in topics]
    known_topics = TOPICS.read(state)
    if found == known_topics:
        return
    before = {topic.name: topic for topic in known_topics}
    TOPICS.save(state, found)
    changed = {
        topic.name: Change(now_ms, old.ttl_seconds, topic.ttl_seconds, old.generation, topic.generation)
        for topic in found
        if (old := before.get(topic.name)) is not None and old != topic
    }
    if changed:
        known = dict(CHANGES.read(state))
        for name, change in changed.items():
            known[name] = [*known.get(name, []), change][-KEPT_CHANGES:]
        CHANGES.save(state, {name: changes for name, changes in known.items() if name in before})


def save_sizes(state: State, counts: Mapping[TopicId, TopicCount]) -> None:
    """Remember the sizes of the largest topics, fewer and fewer of longer ago.

    Args:
        counts: as they are now, of all topics.
    """
    known = SIZES.read(state)
    largest = sorted(counts.items(), key=lambda item: (-item[1].size_bytes, item[0]))[:SIZED_TOPICS]
    SIZES.save(
        state,
        {
            str(topic): thinned(known.get(str(topic), []), Size(count.counted_ms, count.messages, count.size_bytes))
            for topic, count in largest
        },
    )


def thinned(former: Sequence[Size], newest: Size) -> list[Size]:
    """Return the sizes with a new one, at most ``KEPT_SIZES``, spread over their time; the first and the last stay."""
    found = [size for size in former if newest.counted_ms - SIZES_MS <= size.counted_ms < newest.counted_ms] + [newest]
    if len(found) > KEPT_SIZES:
        # The one whose neighbours are nearest to each other says least.
        gaps = [after.counted_ms - before.counted_ms for before, after in zip(found, found[2:], strict=False)]
        del found[1 + gaps.index(min(gaps))]
    return found


def sketches(state: State) -> dict[str, list[tuple[int, int]]]:
    """Return the sizes of each of the largest topics as pairs of time and bytes, oldest first, by ``NS:TOPIC``.

    At most ``SKETCHED_SIZES`` of each, spread over the time that they span; the first and the last are among them.
    """
    found = {}
    for name, sizes in SIZES.read(state).items():
        step_ms = (sizes[-1].counted_ms - sizes[0].counted_ms) / (SKETCHED_SIZES - 1)
        kept = sizes[:1]
        for size in sizes[1:-1]:
            # So far apart that there is room for the last one.
            if min(size.counted_ms - kept[-1].counted_ms, sizes[-1].counted_ms - size.counted_ms) >= step_ms:
                kept.append(size)
        found[name] = [(size.counted_ms, size.size_bytes) for size in [*kept, *sizes[1:][-1:]]]
    return found
