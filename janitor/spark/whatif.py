"""A policy that is not in force: what somebody would change, in one line, as ``ttl=3d,topic=default:*``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from janitor.world import matches
from tms_core.errors import ConfigurationError
from tms_core.topic import INT_MAX, TopicMetadata

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AMOUNTS = re.compile(r"(?:\d{1,10}[smhd])+")
_AMOUNT = re.compile(r"(\d+)([smhd])")
_EXAMPLE = "Write ttl=3d,topic=default:* (units s, m, h and d); several policies are separated by semicolons."


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change.

    Attributes:
        ttl_seconds: what the ttl would be.
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
            raise ConfigurationError(f"{text.strip()!r} is no policy.", _EXAMPLE)
        seconds = sum(int(number) * _UNIT_SECONDS[unit] for number, unit in _AMOUNT.findall(ttls[0]))
        if not 1 <= seconds <= INT_MAX:
            raise ConfigurationError(f"A ttl of {seconds} s is none.", f"It lies between 1 and {INT_MAX} seconds.")
        return cls(seconds, patterns or ("*:*",))


def changed(topic: TopicMetadata, changes: tuple[WhatIf, ...]) -> TopicMetadata:
    """The topic as it would be."""
    for change in changes:
        if matches(topic.topic, change.patterns):
            topic = replace(topic, ttl_seconds=change.ttl_seconds)
    return topic
