"""Other ttls than those in force (``janitor plan --what-if``), in one line, as ``ttl=3d,topic=default:*``.

The result is a plan of the store with supposed metadata (:func:`supposed`): with all holds, and without any write.
"""

from __future__ import annotations

import json
import re
from copy import copy
from dataclasses import dataclass, replace

from janitor.sweep.context import matches, parse_or_none
from tms_core.errors import ConfigurationError
from tms_core.tables.base import MetadataReads, Reads
from tms_core.topic import INT_MAX, TopicMetadata, encode_properties

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AMOUNTS = re.compile(r"(?:\d{1,10}[smhd])+")
_AMOUNT = re.compile(r"(\d+)([smhd])")
_EXAMPLE = "Write ttl=3d,topic=default:* (units s, m, h and d); several policies are separated by semicolons."


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change.

    Attributes:
        ttl_seconds: the supposed TTL.
        patterns: shell patterns of the topics it would be the ttl of.
    """

    ttl_seconds: int
    patterns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> tuple[WhatIf, ...]:
        """Read changes; where several speak of a topic the last one counts.

        Raises:
            ConfigurationError: the text is none; says how it is written.
        """
        return tuple(cls._parse_one(one) for one in text.split(";") if one.strip())

    @classmethod
    def _parse_one(cls, text: str) -> WhatIf:
        pairs = [part.strip().partition("=") for part in text.split(",")]
        ttls = [value for name, _, value in pairs if name == "ttl"]
        patterns = tuple(value for name, _, value in pairs if name == "topic")
        well_named = all(name in ("ttl", "topic") for name, _, _ in pairs)
        well_formed = len(ttls) == 1 and all(pattern.count(":") == 1 for pattern in patterns)
        if not (well_named and well_formed and _AMOUNTS.fullmatch(ttls[0])):
            raise ConfigurationError(f"{text.strip()!r} is not a ttl for a what-if plan.", _EXAMPLE)
        seconds = sum(int(number) * _UNIT_SECONDS[unit] for number, unit in _AMOUNT.findall(ttls[0]))
        if not 1 <= seconds <= INT_MAX:
            raise ConfigurationError(
                f"A ttl of {seconds} s is not possible.", f"It lies between 1 and {INT_MAX} seconds."
            )
        return cls(seconds, patterns or ("*:*",))


def changed(topic: TopicMetadata, changes: tuple[WhatIf, ...]) -> TopicMetadata:
    """Return the topic as it would be."""
    for change in changes:
        if matches(topic.topic, change.patterns):
            topic = replace(topic, ttl_seconds=change.ttl_seconds)
    return topic


def supposed(store: Reads, changes: tuple[WhatIf, ...]) -> Reads:
    """Return a store that is only read, as if its metadata had been changed."""
    found = copy(store)
    found.metadata = SupposedMetadata(store.metadata, changes)
    return found


class SupposedMetadata(MetadataReads):
    """A metadata table as it would be; rows that do not parse are as they are."""

    def __init__(self, table: MetadataReads, changes: tuple[WhatIf, ...]) -> None:
        self._table = table
        self._changes = changes

    def rows(self) -> list[tuple[bytes, bytes]]:
        return [(key, self._supposed(key, value)) for key, value in self._table.rows()]

    def get(self, key: bytes) -> bytes | None:
        value = self._table.get(key)
        return None if value is None else self._supposed(key, value)

    def _supposed(self, key: bytes, value: bytes) -> bytes:
        topic = parse_or_none(key, value)
        if topic is None:
            return value
        then = changed(topic, self._changes)
        return value if then == topic else encode_properties({**json.loads(value), "ttl": str(then.ttl_seconds)})
