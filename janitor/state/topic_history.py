"""What became of each topic over time: its ttl and generation, and its size.

An operator asks for both: changes before a topic was held, and space saved by a TTL. They are two notes
of the state, bounded in length, and no rule of deletion depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from janitor.state.base import State
from janitor.state.records import Note, TopicCount
from tms_core.topic import TopicId, TopicMetadata

_TOPICS_NOTE = Note.TOPICS
_CHANGES_NOTE = Note.TOPIC_CHANGES
_SIZES_NOTE = Note.TOPIC_SIZES
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


def save_topics(state: State, topics: Iterable[TopicMetadata], now_ms: int) -> None:
    """Save the topics and their changes; costs no write when nothing has.

    Raises:
        StateError: the state could not be read or written.
    """
    found: list[Any] = [[t.topic.namespace, t.topic.topic, t.generation, t.ttl_seconds] for t in topics]
    former = state.note(_TOPICS_NOTE)
    if found == former:
        return
    before = {f"{row[0]}:{row[1]}": row for row in former or ()}
    changed = {
        f"{namespace}:{topic}": Change(now_ms, old[3], ttl_seconds, old[2], generation)
        for namespace, topic, generation, ttl_seconds in found
        if (old := before.get(f"{namespace}:{topic}")) is not None and old[2:] != [generation, ttl_seconds]
    }
    state.save_note(_TOPICS_NOTE, found)
    if changed:
        known = state.note(_CHANGES_NOTE) or {}
        for name, change in changed.items():
            known[name] = [*known.get(name, []), list(change)][-KEPT_CHANGES:]
        state.save_note(_CHANGES_NOTE, {name: rows for name, rows in known.items() if name in before})


def changes(state: State) -> dict[str, list[Change]]:
    """Return the changes of each topic, oldest first, by ``NS:TOPIC``; topics that never changed are not in it."""
    return {name: [Change(*row) for row in rows] for name, rows in (state.note(_CHANGES_NOTE) or {}).items()}


def save_sizes(state: State, counts: Mapping[TopicId, TopicCount]) -> None:
    """Remember the sizes of the largest topics, fewer and fewer of longer ago.

    Args:
        counts: as they are now, of all topics.
    """
    known = state.note(_SIZES_NOTE) or {}
    largest = sorted(counts.items(), key=lambda item: (-item[1].size_bytes, item[0]))[:SIZED_TOPICS]
    kept = {}
    for topic, count in largest:
        former = [Size(*row) for row in known.get(str(topic), ())]
        kept[str(topic)] = [
            list(size) for size in thinned(former, Size(count.counted_ms, count.messages, count.size_bytes))
        ]
    if kept != known:
        state.save_note(_SIZES_NOTE, kept)


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
    for name, rows in (state.note(_SIZES_NOTE) or {}).items():
        step_ms = (rows[-1][0] - rows[0][0]) / (SKETCHED_SIZES - 1)
        kept = rows[:1]
        for row in rows[1:-1]:
            # So far apart that there is room for the last one.
            if row[0] - kept[-1][0] >= step_ms and rows[-1][0] - row[0] >= step_ms:
                kept.append(row)
        found[name] = [(counted_ms, size_bytes) for counted_ms, _, size_bytes in [*kept, *rows[1:][-1:]]]
    return found


def sizes(state: State, topic: str) -> list[Size]:
    """Return the sizes of a topic, oldest first; of none that is not among the largest."""
    return [Size(*row) for row in (state.note(_SIZES_NOTE) or {}).get(topic, ())]
