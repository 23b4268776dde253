"""Topics in the metadata table: their creation, change and deletion.

A row is never removed: a deletion negates its generation, and a new creation uses the next higher generation. Every
change compares the row with the bytes that were read, so rows that Gson would have encoded differently can be changed,
too. CDAP compares with its own encoding, and then retries forever. A topic that is created again has the new
properties on every store; CDAP keeps the old properties in HBase.

Each batch of messages and each fetch reads the row, and only its parsed form is cached. Therefore a topic that another
process deleted disappears at once. LevelDB has one process, so there a row is read again only after a change of the
table (:attr:`~tms_core.tables.base.MetadataReads.version`).
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
    encode_properties,
    no_topic,
    parse_java_int,
    remembered,
)

#: The most attempts of a change while other processes change the topic.
_ATTEMPTS = 20
#: The largest encoded size of a topic's properties in bytes; each use of the topic reads them.
PROPERTIES_BYTES = 64 << 10
#: The most counted messages, and the keys of a page: about a second's work.
_MOST_COUNTED, _COUNTED_PAGE = 100_000, 4000
_GENERATION, _TTL = "generation", "ttl"
#: The property that requires or forbids transactions, and its values.
TRANSACTIONS = "transactions"
REQUIRED, FORBIDDEN, OPTIONAL = "required", "forbidden", "optional"


class _MetadataRow(NamedTuple):
    """A metadata row and its contents; both None if the row does not exist."""

    raw: bytes | None
    topic: TopicMetadata | None


class TopicRegistry:
    """The topics of one store; threads may share it.

    Args:
        default_ttl_seconds: the TTL of a topic without the property.
        changed: called with a topic that another process has changed since the last read here.

    Attributes:
        changes: the number of changes that this registry has made or seen.
    """

    def __init__(
        self, table: MetadataTable, default_ttl_seconds: int, changed: Callable[[TopicId], object] | None = None
    ) -> None:
        self._table = table
        self._changed = changed
        self._defaults = {_TTL: str(default_ttl_seconds)}
        self._parsed: dict[TopicId, tuple[bytes, TopicMetadata]] = {}
        #: Topics that exist, each with the version of the table before its row was read.
        self._current: dict[TopicId, tuple[int, TopicMetadata]] = {}
        self.changes = 0

    def get(self, topic: TopicId) -> TopicMetadata:
        """Return a topic that is not deleted.

        Raises:
            TopicNotFound: the topic does not exist, or was deleted.
            BadRequest: the name is invalid.
            MetadataError: its row is damaged.
        """
        # The version first: after a change in between, the row is read again.
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
        """Return a topic that has messages of its own.

        Raises:
            PartitionsChanged: its messages are in its partitions.
            BadRequest, TopicNotFound, MetadataError: as :meth:`get`.
        """
        found = self.get(topic)
        layout = layout_of(topic, found.properties) if FAMILIES in found.properties else None
        if layout is not None and not layout.has_own:
            first, *_ = layout.parts
            raise PartitionsChanged(
                f"Topic {topic} has its messages in {first} and others.", "Use one of these topics."
            )
        return found

    def create(self, topic: TopicId, properties: Mapping[str, str]) -> TopicMetadata:
        """Create a topic, also after a deletion (``HBaseMetadataTable.createTopic``), and return it.

        Raises:
            BadRequest: the name or a property is invalid, or the properties are too large.
            TopicExists: the topic exists.
            MetadataError: its row is damaged.
            Unavailable: other processes keep changing it.
        """
        values = self._with_defaults(properties)
        check_length(topic)
        for _ in range(_ATTEMPTS):
            row = self._row(topic)
            if row.topic is not None and not row.topic.deleted:
                raise TopicExists(
                    f"Topic {topic} already exists.",
                    f"Choose another name, or look at its properties: tms topic show {topic}",
                )
            generation = 1 - row.topic.generation if row.topic else 1
            if generation > INT_MAX:
                raise BadRequest(f"Topic {topic} was created too often.", "Choose another name.")
            if made := self._write(topic, row, values, generation):
                return made
        raise _contention_error(topic)

    def update(self, topic: TopicId, properties: Mapping[str, str], *, expected: TopicMetadata | None = None) -> None:
        """Replace all properties except the generation; an omitted property returns to its default.

        Args:
            expected: the topic as it was read; the change fails if it has other properties now. None: do not compare.

        Raises:
            BadRequest: the name or a property is invalid, or the properties are too large.
            TopicNotFound: the topic does not exist, or was deleted.
            MetadataError: its row is damaged.
            Unavailable: other processes keep changing it.
        """
        values = self._with_defaults(properties)
        for _ in range(_ATTEMPTS):
            row, known = self._living(topic)
            if expected is not None and dict(known.properties) != dict(expected.properties):
                raise _contention_error(topic)
            if self._write(topic, row, values, known.generation):
                return
        raise _contention_error(topic)

    def delete(self, topic: TopicId) -> None:
        """Delete a topic: negate its generation; the row and all other properties stay.

        Raises:
            BadRequest, TopicNotFound, MetadataError, Unavailable: as :meth:`update`.
        """
        for _ in range(_ATTEMPTS):
            row, known = self._living(topic)
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
        """Return the topics of a namespace, or of all, in key order, without deleted topics and damaged rows."""
        found = []
        for key, raw in self._table.rows():
            topic = TopicId.from_prefix(key)
            if topic is None or namespace not in (None, topic.namespace):
                continue
            try:
                lives = not self._parse(topic, raw).deleted
            except MetadataError:
                continue
            if lives:
                found.append(topic)
        return found

    def _living(self, topic: TopicId) -> tuple[_MetadataRow, TopicMetadata]:
        row = self._row(topic)
        if row.topic is None or row.topic.deleted:
            raise no_topic(topic)
        return row, row.topic

    def _row(self, topic: TopicId) -> _MetadataRow:
        raw = self._table.get(_prefix(topic))
        return _MetadataRow(raw, None if raw is None else self._parse(topic, raw))

    def _parse(self, topic: TopicId, raw: bytes) -> TopicMetadata:
        known = self._parsed.get(topic)
        if known is not None and known[0] == raw:
            return known[1]
        parsed = TopicMetadata.parse(topic.prefix, raw)
        self._parsed[topic] = (raw, parsed)
        return parsed

    def _with_defaults(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Return properties with defaults; a generation is checked and ignored, as in ``CoreMessagingService``."""
        values = self._defaults | dict(properties)
        ttl = parse_java_int(values[_TTL])
        if ttl is None or ttl <= 0:
            raise BadRequest(
                f"A ttl of {quoted(values[_TTL])} is not possible.", f"Give whole seconds from 1 to {INT_MAX}."
            )
        if _GENERATION in values and parse_java_int(values[_GENERATION]) in (None, 0, INT_MIN):
            raise BadRequest(
                f"{quoted(values[_GENERATION])} is not a generation.", "Leave it out: the store counts them."
            )
        if values.get(TRANSACTIONS, OPTIONAL) not in (REQUIRED, FORBIDDEN, OPTIONAL):
            raise BadRequest(
                f"transactions: {quoted(values[TRANSACTIONS])} is not one of its values.",
                "Write required, forbidden or optional.",
            )
        if values.get(RETENTION, BY_TTL) not in (CONSUMED, BY_TTL):
            raise BadRequest(
                f"retention: {quoted(values[RETENTION])} is not one of its values.", "Write consumed or ttl."
            )
        if values.get(HOLD, TRANSACTION) != TRANSACTION:
            raise BadRequest(
                f"hold: {quoted(values[HOLD])} is not one of its values.", "Write transaction, or leave it out."
            )
        if len({name.encode("utf-8", "replace") for name in values}) < len(values):
            raise BadRequest("Two properties have the same name once halves of surrogate pairs are written as '?'.")
        size = len(encode_properties(values))
        if size > PROPERTIES_BYTES:
            raise BadRequest(
                f"The properties have {size} bytes, where {PROPERTIES_BYTES} are the most.",
                "Store large values elsewhere, and their names here.",
            )
        return values

    def _write(
        self, topic: TopicId, row: _MetadataRow, properties: Mapping[str, str], generation: int
    ) -> TopicMetadata | None:
        """Write the row if it is unchanged, and return the topic; None: another process has changed the row."""
        value = encode_properties({**properties, _GENERATION: str(generation)})
        if not self._table.compare_and_set(topic.prefix, row.raw, value):
            return None
        self.changes += 1
        return self._parse(topic, value)


def count_ages(table: MessageReads, topic: TopicMetadata, older_than_seconds: int, now_ms: int) -> Ages:
    """Count the messages of a topic, and those that a shorter TTL would hide, by keys alone.

    Raises:
        StoreError: the table could not be read.
    """
    generation = topic.rows_prefix
    resume: bytes | None = _from(topic, Cutoff.at(now_ms, topic.ttl_seconds))
    newer, messages, older = _from(topic, Cutoff.at(now_ms, older_than_seconds)), 0, 0
    while resume is not None and messages < _MOST_COUNTED:
        page = table.read(KEYS, resume, generation + NEGATIVE, _COUNTED_PAGE)
        messages += len(page.items)
        older += bisect_left(page.items, newer)
        resume = page.resume
    return Ages(messages, older, resume is not None)


def _from(topic: TopicMetadata, cutoff: Cutoff) -> bytes:
    return time_prefix(topic.topic.prefix, topic.generation, cutoff.ms)


@remembered(4096, lambda topic: len(topic.namespace) + len(topic.topic))
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
                f"The {kind}'s name has {len(name)} bytes, where {NAME_BYTES} are the most.", "Shorten it."
            )


def _contention_error(topic: TopicId) -> Unavailable:
    return Unavailable(f"Topic {topic} kept changing during the request.", "Try again.")
