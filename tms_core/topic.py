"""Topics: their names, stored properties, and generations.

A topic's row in the metadata table is never removed. Deleting a topic negates its generation; creating it again sets
the next positive generation. To a reader, a missing row and a deleted topic are alike; to the janitor they are
opposites, so these types distinguish them. Byte layouts: ``docs/reference/formats/rows.md``, "Metadata table".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

from tms_core.errors import MetadataError, TopicNotFound, quoted, shortened

#: Namespaces and topics that CDAP accepts (EntityId, TopicId); neither contains a colon.
_NAMESPACE = re.compile(rb"[a-zA-Z0-9_]+")
_TOPIC = re.compile(rb"[a-zA-Z0-9_-]+")

#: The grammar of Java's Integer.parseInt: an optional sign and digits. Java accepts every Unicode decimal digit that
#: fits into one char.
_JAVA_INT = re.compile(r"([+-]?)(\d+)")
_LAST_CHAR = "\uffff"

#: Longest name of a new namespace or topic, in bytes. CDAP has no limit, so longer names are still read.
NAME_BYTES = 255
#: Names of consumers and producers: the characters of topics, so that a name can be a part of a path.
CONSUMER_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{NAME_BYTES}}}")

#: The wildcards of shell patterns (:meth:`TopicId.matches`); names of topics cannot contain them.
WILDCARDS = frozenset("*?[")

P = ParamSpec("P")
R = TypeVar("R")

#: The property that allows deletions before the TTL (``consumed``), and its values.
RETENTION = "retention"
CONSUMED, BY_TTL = "consumed", "ttl"
#: The property that delays the expiry of messages, and its value.
HOLD, TRANSACTION = "hold", "transaction"

INT_MIN = -(2**31)
INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, order=True)
class TopicId:
    """A topic's name, written ``namespace:topic``.

    Ordering is by name; rows sort by :attr:`prefix`, which differs (``t1-x:`` < ``t10:`` < ``t1:``).
    """

    namespace: str
    topic: str

    @classmethod
    def parse(cls, text: str) -> TopicId:
        """Parse ``namespace:topic``.

        Raises:
            ValueError: a part is missing, or has characters that CDAP does not accept.
        """
        topic = cls.from_prefix(text.encode("utf-8", "surrogatepass") + b":")
        if topic is None:
            raise ValueError(
                f"{quoted(text)} is not a topic: write namespace:topic in letters, digits and '_', in a topic also '-'"
            )
        return topic

    @classmethod
    def from_prefix(cls, prefix: bytes) -> TopicId | None:
        """Return the topic of a row prefix ``namespace:topic:``; None if the prefix does not match the grammar."""
        parts = prefix.split(b":")
        if len(parts) != 3 or parts[2]:
            return None
        if not _NAMESPACE.fullmatch(parts[0]) or not _TOPIC.fullmatch(parts[1]):
            return None
        return cls(parts[0].decode("ascii"), parts[1].decode("ascii"))

    @property
    def prefix(self) -> bytes:
        """Return the metadata row key, which is also the prefix of all data rows of the topic."""
        return f"{self.namespace}:{self.topic}:".encode("ascii")

    def matches(self, patterns: Iterable[str]) -> bool:
        """Return whether ``namespace:topic`` matches one of the shell patterns."""
        name = str(self)
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def __str__(self) -> str:
        return f"{self.namespace}:{self.topic}"


def parse_java_int(text: str) -> int | None:
    """Return a 32-bit integer in Java's grammar (``Integer.parseInt``), or None. Leading zeros are allowed."""
    match = _JAVA_INT.fullmatch(text)
    if match is None or max(text) > _LAST_CHAR:
        return None
    digits = "".join(str(int(digit)) for digit in match[2]).lstrip("0")
    if len(digits) > len(str(INT_MAX)):
        return None
    value = int(f"{match[1]}{digits or '0'}")
    return value if INT_MIN <= value <= INT_MAX else None


@dataclass(frozen=True)
class TopicMetadata:
    """A topic's stored properties, parsed.

    Attributes:
        generation: positive while the topic exists, negative after its deletion; never 0 and never -2^31.
        ttl_seconds: the lifetime of a row; > 0.
        properties: all stored properties, including ``generation`` and ``ttl``.
    """

    topic: TopicId
    generation: int
    ttl_seconds: int
    properties: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def parse(cls, key: bytes, value: bytes) -> TopicMetadata:
        """Parse a row of the metadata table.

        Raises:
            MetadataError: the key is not a topic's, the value is not a JSON object of strings, or CDAP does not accept
                ``generation`` or ``ttl`` (TopicMetadata). Such a topic is unknown, so its rows are kept (rule L1).
        """
        topic = TopicId.from_prefix(key)
        if topic is None:
            raise MetadataError(f"metadata row {quoted(key)} is not named namespace:topic:")
        name, properties = shortened(str(topic)), _properties(topic, value)
        generation, ttl_seconds = (parse_java_int(properties.get(own, "")) for own in ("generation", "ttl"))
        if generation is None or generation in (0, INT_MIN):
            raise MetadataError(f"topic {name}: generation {quoted(properties.get('generation'))} is not a generation")
        if ttl_seconds is None or ttl_seconds <= 0:
            raise MetadataError(
                f"topic {name}: ttl {quoted(properties.get('ttl'))} is not a positive number of seconds"
            )
        return cls(topic, generation, ttl_seconds, properties)

    # Cached, because each batch of messages and each fetch reads it.
    @cached_property
    def rows_prefix(self) -> bytes:
        """Return the key prefix of the rows of this generation (:func:`tms_core.rowkey.generation_prefix`)."""
        return self.topic.prefix + (self.generation & 0xFFFFFFFF).to_bytes(4, "big")

    @property
    def deleted(self) -> bool:
        return self.generation < 0

    @property
    def consumed(self) -> bool:
        """Return whether messages are deleted after all consumers have processed them (rule L7)."""
        return self.properties.get(RETENTION) == CONSUMED and not self.deleted

    @property
    def holds_transactions(self) -> bool:
        """Return whether messages stay visible for the longest lifetime of a transaction in addition to their TTL."""
        return self.properties.get(HOLD) == TRANSACTION and not self.deleted

    @property
    def old_below(self) -> int:
        """Return the generation below which rows are old."""
        return first_kept_generation(self.generation)

    def is_old(self, data_generation: int) -> bool:
        """Return whether rows of ``data_generation`` belong to an old generation (CDAP's MessagingUtils)."""
        return data_generation < self.old_below


def _length(*names: Sized) -> int:
    return sum(map(len, names))


def cache_names(number: int, length: Callable[..., int] = _length) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache the results of a function of names, except of long names.

    Long names are never names of topics, and clients could fill the memory with them.

    Args:
        number: the largest number of cached results.
        length: returns the total length of the function's arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        cached = cast("Callable[P, R]", lru_cache(maxsize=number)(function))

        @wraps(function)
        def look_up(*names: P.args, **named: P.kwargs) -> R:
            return (cached if length(*names, **named) <= 3 * NAME_BYTES else function)(*names, **named)

        return look_up

    return decorate


def readable_topics(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[TopicMetadata]:
    """Yield the topics of rows of the metadata table; omit rows that do not parse."""
    for row in rows:
        with suppress(MetadataError):
            yield TopicMetadata.parse(*row)


def living_topics(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[TopicMetadata]:
    """Yield the topics of :func:`readable_topics` that are not deleted."""
    return (topic for topic in readable_topics(rows) if not topic.deleted)


def no_topic(topic: TopicId) -> TopicNotFound:
    """Return the error for an unknown topic."""
    return TopicNotFound(
        f"Topic {topic} does not exist.",
        f"List the topics: tms topic list {topic.namespace}; or create it: tms topic create {topic}",
    )


def first_kept_generation(metadata_generation: int) -> int:
    """Return the lowest data generation that is not old: ``|m|`` for a live topic, ``|m| + 1`` for a deleted topic."""
    return metadata_generation if metadata_generation > 0 else 1 - metadata_generation


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return the bytes that Gson writes for a sorted map of strings: compact, with HTML characters escaped."""
    by_java_order = sorted(properties.items(), key=lambda item: item[0].encode("utf-16-be", "surrogatepass"))
    text = json.dumps(dict(by_java_order), separators=(",", ":"), ensure_ascii=False)
    for char in "=<>&'\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")


def _properties(topic: TopicId, value: bytes) -> dict[str, str]:
    try:
        loaded = json.loads(value.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"topic {shortened(str(topic))}: its properties are not JSON: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(item, str) for item in loaded.values()):
        raise MetadataError(f"topic {shortened(str(topic))}: its properties are not a JSON object of strings")
    return loaded


def _reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the pairs as a mapping; reject duplicate keys, as Gson does."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a property is defined twice")
    return found
