"""Slots: topics are divided among servers, and each slot has a leader of its own.

A topic's slot is the CRC-32 of its name modulo the number of slots, so any server knows whom to ask, and all that is
about one topic, messages, positions, claims and producers, has one leader. With one slot one server leads everything.
What is about no single topic, such as the list of topics, is asked of the leader of slot 0; any server could answer,
since topics are not fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from zlib import crc32

from tms_core.rowkey import topic_prefix
from tms_core.server.ha.leadership import Leadership

T = TypeVar("T")


class Slots:
    """Who leads each slot, as one server sees it.

    Args:
        leaderships: one for each slot.
    """

    def __init__(self, leaderships: Sequence[Leadership]) -> None:
        self.leaderships = tuple(leaderships)

    def number(self, key: bytes) -> int:
        """The slot of a key that begins with a topic's name (``namespace:topic:``); 0 for any other."""
        if len(self.leaderships) == 1:
            return 0
        prefix = topic_prefix(key)
        return 0 if prefix is None else slot_of(prefix, len(self.leaderships))

    def of(self, key: bytes) -> Leadership:
        """Who leads what a key is about."""
        return self.leaderships[self.number(key)]

    def divided(self, items: Sequence[T], key: Callable[[T], bytes]) -> Iterator[list[T]]:
        """The items of each slot, in the order they had."""
        parts: dict[int, list[T]] = {}
        for item in items:
            parts.setdefault(self.number(key(item)), []).append(item)
        yield from parts.values()

    @property
    def led(self) -> int:
        """How many slots this server leads."""
        return sum(leadership.leads for leadership in self.leaderships)


def slot_of(prefix: bytes, slots: int) -> int:
    """The slot of a topic.

    Args:
        prefix: the start of its keys, ``namespace:topic:``.
        slots: how many there are.
    """
    return crc32(prefix[:-1]) % slots
