"""Topics in the metadata table: made, described, changed, deleted.

A row is never removed: deleting negates its generation, creating again goes one above. Every change compares the row
with the very bytes that were read, so a row that Gson would have written differently can be changed too; CDAP compares
with its own encoding, and then retries without end. What counts on re-creation are the new properties, on every store;
CDAP keeps the old ones in HBase.

Nothing is remembered but the parsed form of rows, and the row is read each time: a topic that another process deleted
is gone at once. That is one read for each batch of messages and each fetch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tms_core.errors import BadRequest, MetadataError, PartitionsChanged, TopicExists, Unavailable, quoted
from tms_core.messaging.model import Ages
from tms_core.messaging.topics.partitions import FAMILIES, layout_of
from tms_core.rowkey import NEGATIVE, Cutoff, generation_prefix, time_prefix
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

#: How often a change is tried again because another one came in between.
_ATTEMPTS = 20
#: The most bytes that the properties of a topic may have as they are stored; each read of the topic reads them.
PROPERTIES_BYTES = 64 << 10
#: How many messages are counted at most, and how many keys a page has: a second's work, and no more memory than that.
_MOST_COUNTED, _COUNTED_PAGE = 100_000, 4000
_GENERATION, _TTL = "generation", "ttl"
#: The property that says whether messages are published in transactions, and what it may be.
TRANSACTIONS = "transactions"
REQUIRED, FORBIDDEN, OPTIONAL = "required", "forbidden", "optional"


class _MetadataRow(NamedTuple):
    """A metadata row and its contents; both None when there is none."""

    raw: bytes | None
    topic: TopicMetadata | None

    @property
    def lives(self) -> bool:
        return self.topic is not None and not self.topic.deleted


class TopicRegistry:
    """The topics of one store; threads may share it.

    Args:
        default_ttl_seconds: the ttl of a topic that does not say.
        changed: called with a topic that another process has changed since it was read here.

    Attributes:
        changes: how many changes this registry has made or seen.
    """

    def __init__(
        self, table: MetadataTable, default_ttl_seconds: int, changed: Callable[[TopicId], object] | None = None
    ) -> None:
        self._table = table
        self._changed = changed
        self._defaults = {_TTL: str(default_ttl_seconds)}
        self._parsed: dict[TopicId, tuple[bytes, TopicMetadata]] = {}
        self.changes = 0

    def get(self, topic: TopicId) -> TopicMetadata:
        """Return a living topic.

        Raises:
            TopicNotFound: there is none, or it was deleted.
            BadRequest: that is no name of a topic.
            MetadataError: its row is damaged.
        """
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
        return found

    def read(self, topic: TopicId) -> TopicMetadata:
        """Return a living topic that has messages of its own.

        Raises:
            PartitionsChanged: they are in its partitions.
            BadRequest, TopicNotFound, MetadataError: as :meth:`get`.
        """
        found = self.get(topic)
        layout = layout_of(topic, found.properties) if FAMILIES in found.properties else None
        if layout is not None and not layout.has_own:
            first, *_ = layout.parts
            raise PartitionsChanged(f"Topic {topic} has its messages in {first} and others.", "Name one of those.")
        return found

    def create(self, topic: TopicId, properties: Mapping[str, str]) -> TopicMetadata:
        """Make a topic, again if it was deleted (``HBaseMetadataTable.createTopic``); returns it.

        Raises:
            BadRequest: the name, a ttl or a generation that is none, or more of them than is kept.
            TopicExists: there is one.
            MetadataError: its row is damaged.
            Unavailable: others keep changing it.
        """
        wanted = self._completed(properties)
        check_length(topic)
        for _ in range(_ATTEMPTS):
            row = self._row(topic)
            if row.lives:
                raise TopicExists(
                    f"There is a topic {topic} already.", "Choose another name, or change its properties."
                )
            generation = 1 - row.topic.generation if row.topic else 1
            if generation > INT_MAX:
                raise BadRequest(f"Topic {topic} was created too often.", "Choose another name.")
            if made := self._write(topic, row, wanted, generation):
                return made
        raise _contended(topic)

    def update(self, topic: TopicId, properties: Mapping[str, str], *, former: TopicMetadata | None = None) -> None:
        """Replace all properties but the generation; the rest out is the default again, not what it was.

        Args:
            former: the topic as it was read; None: whatever it is now.

        Raises:
            BadRequest: the name, a ttl or a generation that is none, or more of them than is kept.
            TopicNotFound: there is none, or it was deleted.
            MetadataError: its row is damaged.
            Unavailable: others keep changing it.
        """
        wanted = self._completed(properties)
        for _ in range(_ATTEMPTS):
            row = self._living(topic)
            if former is not None and row.topic is not None and dict(row.topic.properties) != dict(former.properties):
                raise _contended(topic)
            if self._write(topic, row, wanted, row.topic.generation if row.topic else 1):
                return
        raise _contended(topic)

    def delete(self, topic: TopicId) -> None:
        """Negate the generation; all other properties stay, and so does the row.

        Raises:
            BadRequest, TopicNotFound, MetadataError, Unavailable: as :meth:`update`.
        """
        for _ in range(_ATTEMPTS):
            row = self._living(topic)
            if row.topic and self._write(topic, row, row.topic.properties, -row.topic.generation):
                return
        raise _contended(topic)

    def check(self, properties: Mapping[str, str]) -> None:
        """Check that a topic can have these properties.

        Raises:
            BadRequest: it cannot.
        """
        self._completed(properties)

    def all(self, namespace: str | None = None) -> list[TopicId]:
        """Return the living topics of a namespace, or of all, in key order; rows that do not parse are left out."""
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

    def _living(self, topic: TopicId) -> _MetadataRow:
        row = self._row(topic)
        if not row.lives:
            raise no_topic(topic)
        return row

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

    def _completed(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Defaults and the caller's; a generation is checked and does not count (``CoreMessagingService``)."""
        wanted = self._defaults | dict(properties)
        ttl = parse_java_int(wanted[_TTL])
        if ttl is None or ttl <= 0:
            raise BadRequest(
                f"A ttl of {quoted(wanted[_TTL])} is not possible.", f"Give whole seconds from 1 to {INT_MAX}."
            )
        if _GENERATION in wanted and parse_java_int(wanted[_GENERATION]) in (None, 0, INT_MIN):
            raise BadRequest(f"{quoted(wanted[_GENERATION])} is no generation.", "Leave it out: the store counts them.")
        if wanted.get(TRANSACTIONS, OPTIONAL) not in (REQUIRED, FORBIDDEN, OPTIONAL):
            raise BadRequest(
                f"transactions: {quoted(wanted[TRANSACTIONS])} is none of its values.",
                "Write required, forbidden or optional.",
            )
        if wanted.get(RETENTION, BY_TTL) not in (CONSUMED, BY_TTL):
            raise BadRequest(f"retention: {quoted(wanted[RETENTION])} is none of its values.", "Write consumed or ttl.")
        if wanted.get(HOLD, TRANSACTION) != TRANSACTION:
            raise BadRequest(
                f"hold: {quoted(wanted[HOLD])} is none of its values.", "Write transaction, or leave it out."
            )
        if len({name.encode("utf-8", "replace") for name in wanted}) < len(wanted):
            raise BadRequest("Two properties have the same name once halves of surrogate pairs are written as '?'.")
        size = len(encode_properties(wanted))
        if size > PROPERTIES_BYTES:
            raise BadRequest(
                f"The properties have {size} bytes, where {PROPERTIES_BYTES} are the most.",
                "Keep what is larger elsewhere, and its name here.",
            )
        return wanted

    def _write(
        self, topic: TopicId, row: _MetadataRow, properties: Mapping[str, str], generation: int
    ) -> TopicMetadata | None:
        """Return the topic as it is now; None: another writer came first."""
        value = encode_properties({**properties, _GENERATION: str(generation)})
        if not self._table.compare_and_set(topic.prefix, row.raw, value):
            return None
        self.changes += 1
        return self._parse(topic, value)


def count_ages(table: MessageReads, topic: TopicMetadata, older_than_seconds: int, now_ms: int) -> Ages:
    """Count by keys alone how many messages a shorter ttl would hide.

    Raises:
        StoreError: the table could not be read.
    """
    generation = generation_prefix(topic.topic.prefix, topic.generation)
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
    """Return the topic's row key.

    Raises:
        BadRequest: no topic can have that name (CDAP's ``EntityId``).
    """
    prefix = f"{topic.namespace}:{topic.topic}:".encode("utf-8", "replace")
    if TopicId.from_prefix(prefix) != topic:
        raise BadRequest(
            f"{quoted(str(topic))} cannot be a topic.", "Use letters, digits and '_'; in a topic also '-'."
        )
    return prefix


def check_length(topic: TopicId) -> None:
    """Check that a topic can be made with this name.

    Raises:
        BadRequest: a part of it is too long.
    """
    for kind, name in (("namespace", topic.namespace), ("topic", topic.topic)):
        if len(name) > NAME_BYTES:
            raise BadRequest(
                f"The {kind}'s name has {len(name)} bytes, where {NAME_BYTES} are the most.", "Shorten it."
            )


def _contended(topic: TopicId) -> Unavailable:
    return Unavailable(f"Topic {topic} kept changing meanwhile.", "Try again.")
