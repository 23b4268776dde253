"""Topics: their names, stored properties, and generations.

A topic's row in the metadata table is never removed: deleting a topic negates its generation, creating it again goes
one above. So "no row" and "deleted" look alike to a reader and are opposites to a cleaner, and the types here keep
them apart. Byte layouts: ``docs/reference/formats/rows.md``, "Metadata table".
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

#: Namespaces and topics as CDAP accepts them (EntityId, TopicId): a colon can be in neither.
_NAMESPACE = re.compile(rb"[a-zA-Z0-9_]+")
_TOPIC = re.compile(rb"[a-zA-Z0-9_-]+")

#: Java's Integer.parseInt for decimal text: an optional sign, digits, nothing else. Any Unicode decimal digits will do
#: that fit one of Java's chars.
_JAVA_INT = re.compile(r"([+-]?)(\d+)")
_LAST_CHAR = "\uffff"

#: The longest name of a namespace or topic that is made here, in bytes. CDAP has no limit, and what it made is read.
NAME_BYTES = 255
#: What a consumer or a producer may be called: as topics are, so that it is a part of a path.
CONSUMER_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{NAME_BYTES}}}")

P = ParamSpec("P")
R = TypeVar("R")

#: The property that says when messages go besides their ttl, and what it may be.
RETENTION = "retention"
CONSUMED, BY_TTL = "consumed", "ttl"
#: The property that says what messages wait for although their ttl is over, and what it may be.
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
        """Read ``namespace:topic``.

        Raises:
            ValueError: a part is missing or holds characters CDAP does not accept.
        """
        topic = cls.from_prefix(text.encode("utf-8", "surrogatepass") + b":")
        if topic is None:
            raise ValueError(
                f"{quoted(text)} is not a topic: write namespace:topic in letters, digits and '_', in a topic also '-'"
            )
        return topic

    @classmethod
    def from_prefix(cls, prefix: bytes) -> TopicId | None:
        """Return the topic whose rows start with ``prefix`` (``namespace:topic:``), or None when the grammar does not
        fit.
        """
        parts = prefix.split(b":")
        if len(parts) != 3 or parts[2]:
            return None
        if not _NAMESPACE.fullmatch(parts[0]) or not _TOPIC.fullmatch(parts[1]):
            return None
        return cls(parts[0].decode("ascii"), parts[1].decode("ascii"))

    @property
    def prefix(self) -> bytes:
        """Return the metadata row key, with which every data row of the topic starts."""
        return f"{self.namespace}:{self.topic}:".encode("ascii")

    def matches(self, patterns: Iterable[str]) -> bool:
        """Return whether the name matches one of the shell patterns over ``namespace:topic``."""
        name = str(self)
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def __str__(self) -> str:
        return f"{self.namespace}:{self.topic}"


def parse_java_int(text: str) -> int | None:
    """Return a 32-bit integer in Java's grammar (``Integer.parseInt``), or None. Leading zeros do not count."""
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
        generation: positive while the topic exists, negative once deleted; never 0 and never -2^31.
        ttl_seconds: how long a row lives; > 0.
        properties: all properties as stored, ``generation`` and ``ttl`` among them.
    """

    topic: TopicId
    generation: int
    ttl_seconds: int
    properties: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def parse(cls, key: bytes, value: bytes) -> TopicMetadata:
        """Read one row of the metadata table.

        Raises:
            MetadataError: the key is not a topic's, the value is not a JSON object of strings, or ``generation`` or
                ``ttl`` is missing or outside what CDAP accepts (TopicMetadata). Such a topic is treated as unknown
                (rule L1): nothing of it is deleted.
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

    # Cached, because each batch of messages and each fetch asks for it.
    @cached_property
    def rows_prefix(self) -> bytes:
        """Return the start of the keys of its rows, of this generation (:func:`tms_core.rowkey.generation_prefix`)."""
        return self.topic.prefix + (self.generation & 0xFFFFFFFF).to_bytes(4, "big")

    @property
    def deleted(self) -> bool:
        return self.generation < 0

    @property
    def consumed(self) -> bool:
        """Return whether messages go once all consumers have processed them (rule L7)."""
        return self.properties.get(RETENTION) == CONSUMED and not self.deleted

    @property
    def holds_transactions(self) -> bool:
        """Return whether messages are there for a while after their transaction is over, however long it was."""
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


def remembered(number: int, length: Callable[..., int] = _length) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache a function of names, except for long names, which would fill memory.

    Long ones are no name of a topic, and anybody can ask for as many as they like.

    Args:
        number: of how many names at most.
        length: how long the names are that it is called with.
    """

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        known = cast("Callable[P, R]", lru_cache(maxsize=number)(make))

        @wraps(make)
        def look_up(*names: P.args, **named: P.kwargs) -> R:
            return (known if length(*names, **named) <= 3 * NAME_BYTES else make)(*names, **named)

        return look_up

    return decorate


def readable_topics(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[TopicMetadata]:
    """Yield the topics of rows of the metadata table; rows that do not parse are left out."""
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
    """Return the lowest data generation that is not old: ``|m|`` of a living topic, one above it for a deleted one."""
    return metadata_generation if metadata_generation > 0 else 1 - metadata_generation


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return the bytes Gson writes for a sorted map of strings: compact, sorted, HTML characters escaped."""
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
    """Gson refuses an object that names a key twice; it would not be clear which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a property is there twice")
    return found
