"""Create, change and delete topics in the metadata table.

A row is never removed: a deletion negates the generation, and the next creation uses the next higher generation. Every
change is a compare-and-set with the bytes that were read, so rows can be changed that Gson would encode differently.
CDAP compares with its own encoding, and retries such a change forever. A topic that is created again has only the new
properties on every store; CDAP keeps the old properties in HBase.

Each batch of messages and each fetch reads the row; only the parsed form is cached. Therefore a deletion by another
process takes effect immediately. LevelDB has a single process, which reads a row again only after a change of the table
(:attr:`~tms_core.tables.base.MetadataReads.version`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tms_core.errors import BadRequest, MetadataError, PartitionsChanged, TopicExists, Unavailable, quoted
from tms_core.messaging.model import Ages
from tms_core.messaging.topics.partitions import FAMILIES, layout_of
from tms_core.rowkey import NEGATIVE, Cutoff, time_prefix
from tms_core.tables.base import KEYS, MessageReads, MetadataTable
from tms_core.topic import (
    BY_TTL,
    CONSUMED,
    HOLD,
    INT_MAX,
    INT_MIN,
    NAME_BYTES,
    RETENTION,
    TRANSACTION,
    TopicId,
    TopicMetadata,
    cache_names,
    encode_properties,
    no_topic,
    parse_java_int,
)

#: The maximum number of attempts of a change while other processes change the topic.
MAX_ATTEMPTS = 20
#: The maximum size of a topic's encoded properties in bytes; each use of the topic reads them.
PROPERTIES_BYTES = 64 << 10
#: The maximum number of counted messages, which takes about a second, and the number of keys in a page.
_MAX_COUNTED, _COUNTED_PAGE = 100_000, 4000
_GENERATION, _TTL = "generation", "ttl"
#: The property that requires or forbids transactions, and its values.
TRANSACTIONS = "transactions"
REQUIRED, FORBIDDEN, OPTIONAL = "required", "forbidden", "optional"


class _MetadataRow(NamedTuple):
    """A metadata row as stored and parsed; both None if the row does not exist."""

    raw: bytes | None
    topic: TopicMetadata | None


class TopicChanged(Unavailable):
    """Other processes changed the topic after this process read it, so nothing was changed."""


class TopicRegistry:
    """The topics of one store; threads may share it.

    Args:
        default_ttl_seconds: the TTL of a topic without the property ``ttl``.
        changed: called with a topic that another process has changed since its last read.

    Attributes:
        changes: the number of changes that this registry has made or observed.
    """

    def __init__(
        self, table: MetadataTable, default_ttl_seconds: int, changed: Callable[[TopicId], object] | None = None
    ) -> None:
        self._table = table
        self._changed = changed
        self._defaults = {_TTL: str(default_ttl_seconds)}
        self._parsed: dict[TopicId, tuple[bytes, TopicMetadata]] = {}
        #: Existing topics, each with the version of the table before its row was read.
        self._current: dict[TopicId, tuple[int, TopicMetadata]] = {}
        self.changes = 0

    def get(self, topic: TopicId) -> TopicMetadata:
        """Return the metadata of an existing topic.

        Raises:
            TopicNotFound: the topic does not exist, or was deleted.
            BadRequest: the name is invalid.
            MetadataError: its row is damaged.
        """
        # Read the version before the row: after a change in between, the next call reads the row again.
        version, current = self._table.version, self._current.get(topic)
        if current is not None and current[0] == version:
            return current[1]
        raw, known = self._table.get(_prefix(topic)), self._parsed.get(topic)
        if known is not None and known[0] == raw:
            found: TopicMetadata | None = known[1]
        else:
            found = None if raw is None else self._parse(topic, raw)
            if known is not None:
                self.changes += 1
                if self._changed is not None:
                    self._changed(topic)
        if found is None or found.deleted:
            raise no_topic(topic)
        if version is not None:
            self._current[topic] = version, found
        return found

    def read(self, topic: TopicId) -> TopicMetadata:
        """Return the metadata of a topic that stores messages itself.

        Raises:
            PartitionsChanged: only partitions or routes of the topic store messages.
            BadRequest, TopicNotFound, MetadataError: as :meth:`get`.
        """
        found = self.get(topic)
        layout = layout_of(topic, found.properties) if FAMILIES in found.properties else None
        if layout is not None and not layout.has_own:
            first, *_ = layout.parts
            raise PartitionsChanged(
                f"Topic {topic} stores its messages in {first} and other topics.",
                f"Use one of its partitions: tms topic show {topic}",
            )
        return found

    def create(self, topic: TopicId, properties: Mapping[str, str]) -> TopicMetadata:
        """Create a topic, which may have been deleted before (``HBaseMetadataTable.createTopic``), and return it.

        Raises:
            BadRequest: the name or a property is invalid, or the properties are too large.
            TopicExists: the topic exists.
            MetadataError: its row is damaged.
            Unavailable: other processes keep changing it.
        """
        values = self._with_defaults(properties)
        check_length(topic)
        for _ in range(MAX_ATTEMPTS):
            row = self._row(topic)
            if row.topic is not None and not row.topic.deleted:
                raise TopicExists(
                    f"Topic {topic} already exists.",
                    f"Choose another name, or look at its properties: tms topic show {topic}",
                )
            generation = 1 - row.topic.generation if row.topic else 1
            if generation > INT_MAX:
                raise BadRequest(f"Topic {topic} has reached the highest generation.", "Choose another name.")
            if made := self._write(topic, row, values, generation):
                return made
        raise _contention_error(topic)

    def update(self, topic: TopicId, properties: Mapping[str, str], *, expected: TopicMetadata | None = None) -> None:
        """Replace all properties except the generation; an omitted property returns to its default.

        Args:
            expected: the expected metadata; the change fails if the topic has other properties. None: do not compare.

        Raises:
            BadRequest: the name or a property is invalid, or the properties are too large.
            TopicNotFound: the topic does not exist, or was deleted.
            MetadataError: its row is damaged.
            Unavailable: other processes keep changing it.
        """
        values = self._with_defaults(properties)
        for _ in range(MAX_ATTEMPTS):
            row, known = self._existing(topic, expected)
            if self._write(topic, row, values, known.generation):
                return
        raise _contention_error(topic)

    def delete(self, topic: TopicId, *, expected: TopicMetadata | None = None) -> None:
        """Delete a topic by negating its generation; the row and all other properties stay.

        Args:
            expected: as of :meth:`update`.

        Raises:
            BadRequest, TopicNotFound, MetadataError, Unavailable: as :meth:`update`.
        """
        for _ in range(MAX_ATTEMPTS):
            row, known = self._existing(topic, expected)
            if self._write(topic, row, known.properties, -known.generation):
                return
        raise _contention_error(topic)

    def check(self, properties: Mapping[str, str]) -> None:
        """Check the properties of a topic.

        Raises:
            BadRequest: a property is invalid, or the properties are too large.
        """
        self._with_defaults(properties)

    def all(self, namespace: str | None = None) -> list[TopicId]:
        """Return the existing topics of one or all namespaces in key order; skip damaged rows."""
        found = []
        for key, raw in self._table.rows():
            topic = TopicId.from_prefix(key)
            if topic is None or namespace not in (None, topic.namespace):
                continue
            try:
                exists = not self._parse(topic, raw).deleted
            except MetadataError:
                continue
            if exists:
                found.append(topic)
        return found

    def _existing(self, topic: TopicId, expected: TopicMetadata | None) -> tuple[_MetadataRow, TopicMetadata]:
        row = self._row(topic)
        if row.topic is None or row.topic.deleted:
            raise no_topic(topic)
        if expected is not None and dict(row.topic.properties) != dict(expected.properties):
            raise _contention_error(topic)
        return row, row.topic

    def _row(self, topic: TopicId) -> _MetadataRow:
        raw = self._table.get(_prefix(topic))
        return _MetadataRow(raw, None if raw is None else self._parse(topic, raw))

    def _parse(self, topic: TopicId, raw: bytes) -> TopicMetadata:
        known = self._parsed.get(topic)
        if known is not None and known[0] == raw:
            return known[1]
        parsed = TopicMetadata.parse(topic.prefix, raw)
        if parsed.deleted:
            # A quota limits the topics of a principal, but not how many of them it deletes.
            self._parsed.pop(topic, None)
            self._current.pop(topic, None)
        else:
            self._parsed[topic] = (raw, parsed)
        return parsed

    def _with_defaults(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Check properties, and add defaults; a generation is checked and ignored, as in ``CoreMessagingService``."""
        values = self._defaults | dict(properties)
        ttl = parse_java_int(values[_TTL])
        if ttl is None or ttl <= 0:
            raise BadRequest(
                f"A ttl of {quoted(values[_TTL])} is not possible.", f"Use whole seconds from 1 to {INT_MAX}."
            )
        if _GENERATION in values and parse_java_int(values[_GENERATION]) in (None, 0, INT_MIN):
            raise BadRequest(
                f"{quoted(values[_GENERATION])} is not a generation.", "Omit the property; the store assigns it."
            )
        if values.get(TRANSACTIONS, OPTIONAL) not in (REQUIRED, FORBIDDEN, OPTIONAL):
            raise BadRequest(
                f"The property transactions cannot have the value {quoted(values[TRANSACTIONS])}.",
                "Use required, forbidden or optional.",
            )
        if values.get(RETENTION, BY_TTL) not in (CONSUMED, BY_TTL):
            raise BadRequest(
                f"The property retention cannot have the value {quoted(values[RETENTION])}.", "Use consumed or ttl."
            )
        if values.get(HOLD, TRANSACTION) != TRANSACTION:
            raise BadRequest(
                f"The property hold cannot have the value {quoted(values[HOLD])}.", "Use transaction, or omit it."
            )
        if len({name.encode("utf-8", "replace") for name in values}) < len(values):
            raise BadRequest("The names of two properties are equal after unpaired surrogates are replaced by '?'.")
        size = len(encode_properties(values))
        if size > PROPERTIES_BYTES:
            raise BadRequest(
                f"The properties have {size} bytes; the maximum is {PROPERTIES_BYTES}.",
                "Store large values elsewhere, and references to them in the properties.",
            )
        return values

    def _write(
        self, topic: TopicId, row: _MetadataRow, properties: Mapping[str, str], generation: int
    ) -> TopicMetadata | None:
        """Write the row by compare-and-set, and return the topic; None: another process has changed the row."""
        value = encode_properties({**properties, _GENERATION: str(generation)})
        if not self._table.compare_and_set(topic.prefix, row.raw, value):
            return None
        self.changes += 1
        return self._parse(topic, value)


def count_ages(table: MessageReads, topic: TopicMetadata, older_than_seconds: int, now_ms: int) -> Ages:
    """Count the messages of a topic, and the messages that a shorter TTL would hide; read only keys.

    Raises:
        StoreError: the table could not be read.
    """
    generation = topic.rows_prefix
    resume: bytes | None = _from(topic, Cutoff.at(now_ms, topic.ttl_seconds))
    newer, messages, older = _from(topic, Cutoff.at(now_ms, older_than_seconds)), 0, 0
    while resume is not None and messages < _MAX_COUNTED:
        page = table.read(KEYS, resume, generation + NEGATIVE, _COUNTED_PAGE)
        messages += len(page.items)
        older += bisect_left(page.items, newer)
        resume = page.resume
    return Ages(messages, older, resume is not None)


def _from(topic: TopicMetadata, cutoff: Cutoff) -> bytes:
    return time_prefix(topic.topic.prefix, topic.generation, cutoff.ms)


@cache_names(4096, lambda topic: len(topic.namespace) + len(topic.topic))
def _prefix(topic: TopicId) -> bytes:
    """Return the row key of a topic.

    Raises:
        BadRequest: the name is invalid (CDAP's ``EntityId``).
    """
    prefix = f"{topic.namespace}:{topic.topic}:".encode("utf-8", "replace")
    if TopicId.from_prefix(prefix) != topic:
        raise BadRequest(
            f"{quoted(str(topic))} cannot be a topic.", "Use letters, digits and '_'; in a topic also '-'."
        )
    return prefix


def check_length(topic: TopicId) -> None:
    """Check the length of a new topic's name.

    Raises:
        BadRequest: the namespace or the name is too long.
    """
    for kind, name in (("namespace", topic.namespace), ("topic", topic.topic)):
        if len(name) > NAME_BYTES:
            raise BadRequest(
                f"The {kind}'s name has {len(name)} bytes; the maximum is {NAME_BYTES}.", "Use a shorter name."
            )


def _contention_error(topic: TopicId) -> TopicChanged:
    return TopicChanged(f"Other processes changed topic {topic} during the request.", "Try again.")
