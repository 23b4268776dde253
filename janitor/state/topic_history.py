"""The history of each topic: changes of its TTL and generation, and its size.

The changes explain why a topic is held, and the sizes show the effect of a TTL. Both are notes of the state with a
limited length, and no deletion rule depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from janitor.state.base import State
from janitor.state.figures import KeptFigures
from janitor.state.records import Note, TopicCount
from tms_core.topic import TopicId, TopicMetadata

#: The maximum number of changes for a topic.
MAX_CHANGES = 20
#: The maximum number of sizes for a topic, and of topics with sizes, largest first.
MAX_SIZES, SIZED_TOPICS = 60, 200
#: The maximum number of sizes for each topic in a list of topics.
SKETCHED_SIZES = 24
#: The maximum age of a size, in milliseconds.
SIZES_MS = 30 * 86_400_000


class Change(NamedTuple):
    """A change of a topic's metadata.

    Attributes:
        seen_ms: the time at which the janitor first saw the change.
        ttl_before, ttl_seconds: the TTL before and after, in seconds.
        generation_before, generation: the generation before and after, signed.
    """

    seen_ms: int
    ttl_before: int
    ttl_seconds: int
    generation_before: int
    generation: int


class Size(NamedTuple):
    """The size of a topic in one background count."""

    counted_ms: int
    messages: int
    size_bytes: int


class KnownTopic(NamedTuple):
    """A topic of the metadata table when it was last read; ``generation`` is signed."""

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
    """Save the topics and their changes; write nothing without a change.

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
            known[name] = [*known.get(name, []), change][-MAX_CHANGES:]
        CHANGES.save(state, {name: changes for name, changes in known.items() if name in before})


def save_sizes(state: State, counts: Mapping[TopicId, TopicCount]) -> None:
    """Add the present sizes of the largest topics, and thin out older sizes.

    Args:
        counts: the present counts of all topics.
    """
    known = SIZES.read(state)
    largest = sorted(counts.items(), key=lambda item: (-item[1].size_bytes, item[0]))[:SIZED_TOPICS]
    SIZES.save(
        state,
        {
            str(topic): thin_out(known.get(str(topic), []), Size(count.counted_ms, count.messages, count.size_bytes))
            for topic, count in largest
        },
    )


def thin_out(sizes: Sequence[Size], newest: Size) -> list[Size]:
    """Add a size and limit the list to ``MAX_SIZES``, evenly spread over time; keep the first and the last size."""
    first_ms = newest.counted_ms - SIZES_MS
    found = [size for size in sizes if first_ms <= size.counted_ms < newest.counted_ms] + [newest]
    if len(found) > MAX_SIZES:
        # Drop the size whose neighbors are closest to each other: it adds the least information.
        gaps = [after.counted_ms - before.counted_ms for before, after in zip(found, found[2:], strict=False)]
        del found[1 + gaps.index(min(gaps))]
    return found


def sketches(state: State) -> dict[str, list[tuple[int, int]]]:
    """Return the sizes of the largest topics as pairs of time and bytes, oldest first, by ``NS:TOPIC``.

    A topic has at most ``SKETCHED_SIZES`` sizes, evenly spread over time, with the first and the last size.
    """
    found = {}
    for name, sizes in SIZES.read(state).items():
        step_ms = (sizes[-1].counted_ms - sizes[0].counted_ms) / (SKETCHED_SIZES - 1)
        thinned = sizes[:1]
        for size in sizes[1:-1]:
            # Keep a distance of at least one step from the previous and from the last size.
            if min(size.counted_ms - thinned[-1].counted_ms, sizes[-1].counted_ms - size.counted_ms) >= step_ms:
                thinned.append(size)
        found[name] = [(size.counted_ms, size.size_bytes) for size in [*thinned, *sizes[1:][-1:]]]
    return found
