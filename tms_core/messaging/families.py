"""Create, change and delete topics with partitions or routes, together with the topics that store their messages.

The stores have no transactions over several metadata rows, so the order of writes makes each change atomic. New
partitions exist before the topic names them, and old partitions are deleted before the topic. If a change is
interrupted before the topic names the new family, the client repeats the request; later, the next request completes it.

A change of the number of partitions has these steps:

1. Create the new family, and register the groups of the old family there.
2. Name the new family in the topic's properties; from now on groups read it.
3. Seal the old family.
4. Record the seal in the topic's properties; from now on messages are published to the new family.

Therefore, for each key, no message in the new family is older than a message in the old family.

When a group has drained a sealed partition, the leader of the partition stores this in a row next to the position.
Leaders of other partitions read that row, because they must not read a partition that they do not lead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock, RLock
from typing import NamedTuple

from tms_core.clock import HonestClock
from tms_core.consumers.claim_rows import draining_transaction
from tms_core.consumers.claims import ConsumerGroup
from tms_core.consumers.positions import Position, Positions
from tms_core.errors import BadRequest, TopicExists, TopicNotFound, Unavailable
from tms_core.messaging.publish.open_topics import OpenTopics
from tms_core.messaging.topics.catalog import MAX_ATTEMPTS, TopicChanged, TopicRegistry, check_length
from tms_core.messaging.topics.partitions import (
    FAMILIES,
    MAX_FAMILIES,
    PART_OF,
    PARTITIONS,
    ROUTES,
    SEALED,
    Family,
    Layout,
    PartitionRequest,
    layout_of,
    layout_properties,
    parse_request,
    routes_of,
)
from tms_core.rowkey import MessageId, stop_key
from tms_core.tables.base import Store
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata

#: A topic to create, and its properties.
NewTopic = tuple[TopicId, dict[str, str]]
#: A function that raises Forbidden if the client may not create a topic.
Permit = Callable[[TopicId], None]


def permit_all(_: TopicId) -> None:
    """Permit every topic; for callers whose permissions are checked elsewhere."""


class _PartitionChange(NamedTuple):
    """A planned change of a topic's partitions; it is carried out after the names and permissions are checked.

    Attributes:
        row: the topic before the change.
        layout: the partitions before the change.
        after: the partitions after the change.
        new_topics: the partitions to create, with their properties.
        properties: the topic's properties after the change.
    """

    row: TopicMetadata
    layout: Layout
    after: Layout
    new_topics: list[NewTopic]
    properties: dict[str, str]


class Families:
    """The topics of a store, with and without partitions; threads may share it.

    Args:
        side: the side table without the leader's fence, because groups are registered in partitions of other leaders.
        wait_for_writes: waits for the running writes to a topic.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        store: Store,
        open_topics: OpenTopics,
        clock: HonestClock,
        side: SideTable,
        wait_for_writes: Callable[[TopicId], None],
    ) -> None:
        self._topics = topics
        self._store = store
        self._open_topics = open_topics
        self._clock = clock
        self._side = side
        self._positions = Positions(side)
        self._wait_for_writes = wait_for_writes
        self._created_empty: dict[TopicId, TopicMetadata] = {}
        self._creating = Lock()
        self._lock = RLock()

    # -- requests of clients ------------------------------------------------------------------------------------------

    def create(self, topic: TopicId, properties: Mapping[str, str], permit: Permit = permit_all) -> None:
        """Create the parts of a topic, and then the topic.

        Args:
            permit: called with each new topic before the first topic is created.

        Raises:
            Forbidden: raised by ``permit``.
            TopicExists: a topic with the name of the topic or of a part exists.
            BadRequest, MetadataError, StoreError, Unavailable: as :meth:`TopicRegistry.create`.
        """
        request = parse_request(properties)
        new_topics = list(_tree(topic, request.partitions, request.routes or {}, request.others))
        if len(new_topics) == 1:
            permit(topic)
            self._create_one(*new_topics[0])
            return
        with self._lock:
            with suppress(TopicNotFound):
                self._topics.get(topic)
                raise TopicExists(
                    f"Topic {topic} already exists.",
                    f"Choose another name, or look at its properties: tms topic show {topic}",
                )
            self._check_names_unused(new_topics, permit)
            for new_topic in new_topics:
                self._recreate(*new_topic)

    def update(self, topic: TopicId, properties: Mapping[str, str], permit: Permit = permit_all) -> None:
        """Replace the properties of a topic and its parts; an omitted property returns to its default.

        Omitted partitions and routes stay unchanged, because they have messages.

        Args:
            permit: called with each new part before the first part is created.

        Raises:
            Forbidden: raised by ``permit``.
            BadRequest: the topic is part of another topic, a route is missing, or as :meth:`TopicRegistry.update`.
            TopicExists: a topic with the name of a new part exists.
            TopicNotFound, MetadataError, StoreError, Unavailable: as :meth:`TopicRegistry.update`.
        """
        request = parse_request(properties)
        with self._lock:
            for remaining in reversed(range(MAX_ATTEMPTS)):
                row = self._topics.get(topic)
                self._require_no_parent(row)
                if request.partitions is not None or request.routes is not None or FAMILIES in row.properties:
                    break
                try:
                    # Expect the row: another server may have added partitions since, which this change would remove.
                    self._change(topic, request.others, row)
                except TopicChanged:
                    if not remaining:
                        raise
                else:
                    return
            if request.routes is not None or row.properties.get(FAMILIES) == ROUTES:
                self._update_routes(row, request, permit)
            else:
                change = self._plan_partitions(topic, request.partitions, request.others)
                self._check_names_unused(change.new_topics, permit)
                self._change_partitions(change, request.others)

    def delete(self, topic: TopicId) -> None:
        """Delete the parts of a topic, and then the topic.

        Raises:
            BadRequest: the topic is part of another topic.
            TopicNotFound, MetadataError, StoreError, Unavailable: as :meth:`TopicRegistry.delete`.
        """
        with self._lock:
            row = self._topics.get(topic)
            self._require_no_parent(row)
            self._delete(row)

    def properties_of(self, topic: TopicId) -> dict[str, str]:
        """Complete an interrupted change of a topic's partitions, and return all properties of the topic.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`TopicRegistry.get`.
        """
        row = self._topics.get(topic)
        if _is_changing(row):
            # If another server leads the topic, that server completes the change.
            with suppress(Unavailable):
                row = self._finish(topic)
        return dict(row.properties)

    def predecessors(self, part: TopicMetadata) -> list[TopicId]:
        """Return the partitions that an ordered group must drain before it reads a partition.

        Raises:
            MetadataError, StoreError: as :meth:`update`.
        """
        with suppress(TopicNotFound):
            parent = self._topics.get(TopicId(part.topic.namespace, part.properties[PART_OF]))
            layout = layout_of(parent.topic, parent.properties)
            return [] if layout is None else layout.predecessors(part.topic)
        return []

    def wait_for_writes(self, topic: TopicId) -> None:
        """Wait for this server's running writes to a topic."""
        self._wait_for_writes(topic)

    def drained(self, topic: TopicId, name: str) -> int | None:
        """Return the transaction in which a group drained a sealed partition.

        Returns:
            0 if the transaction is unknown or the partition was deleted; None if the group has not drained it.

        Raises:
            FormatError, MetadataError, StoreError: a row is damaged, or the store failed.
        """
        try:
            part = self._topics.get(topic)
        except TopicNotFound:
            return 0
        return draining_transaction(self._side, ConsumerGroup.of(part, name))

    def was_created_empty(self, topic: TopicMetadata) -> bool:
        """Return whether this process created the topic's first generation without rows, and the topic is unchanged.

        Rows of such a topic expire by time alone, never by a changed TTL. Therefore invariant S8 does not hold them.
        """
        # `_create_one` holds the lock until the created topic is recorded.
        with self._creating:
            return self._created_empty.get(topic.topic) == topic

    # -- partitions and routes ----------------------------------------------------------------------------------------

    def _plan_partitions(self, topic: TopicId, partitions: int | None, others: Mapping[str, str]) -> _PartitionChange:
        """Plan a change of a topic's properties and number of partitions; a topic without partitions may get some."""
        row = self._finish(topic)
        layout = layout_of(topic, row.properties) or Layout(topic, (Family(0, 1),))
        last = layout.families[-1]
        remaining = tuple(one for one in layout.families if one.sealed_ms is None or self._holds_rows(layout, one))
        new = Family(last.number + 1, partitions or last.partitions)
        if new.partitions == last.partitions and last.number:
            after, new_topics = layout._replace(families=remaining), []
        else:
            after = layout._replace(families=(*remaining, new))
            new_topics = [(member, {**others, PART_OF: topic.topic}) for member in after.members(new)]
        own = {PART_OF: row.properties[PART_OF]} if PART_OF in row.properties else {}
        properties = {**others, **layout_properties(after), **own}
        self._topics.check(properties)
        if len(after.families) > MAX_FAMILIES:
            raise BadRequest(
                f"The number of partitions of topic {topic} was changed too often: messages of {len(remaining)} "
                "earlier numbers still exist.",
                "Change the number again when the oldest messages have expired.",
            )
        return _PartitionChange(row, layout, after, new_topics, properties)

    def _change_partitions(self, change: _PartitionChange, others: Mapping[str, str]) -> None:
        row, layout, after, new_topics, properties = change
        topic = layout.topic
        # In this order: groups are registered in a new partition before anyone can publish to it, so that it holds
        # its first message for them. The topic names the new partitions only after all of them exist.
        for member, values in new_topics:
            self._register(self._recreate(member, values), topic, layout.members(layout.families[-1]))
        self._change_members(after, others)
        self._change(topic, properties, row)
        self._finish(topic)
        for family in set(layout.families) - set(after.families):
            for member in set(layout.members(family)) - {topic}:
                self._delete_part(member, topic)

    def _register(self, member: TopicMetadata, topic: TopicId, previous: Iterable[TopicId]) -> None:
        """Register all groups of the previous partitions at the start of a new partition, which then holds messages."""
        names = set()
        for one in previous:
            with suppress(TopicNotFound):
                part = self._topics.get(one) if one == topic else self._find_part(one, topic)
                names |= {position.name for position in self._positions.of(part)}
        for name in sorted(names):
            self._positions.move(member, None, Position(name, MessageId(0, 0), self._clock.now_ms(), 0))

    def _change_members(self, layout: Layout, others: Mapping[str, str]) -> None:
        for family in layout.families:
            sealed = {} if family.sealed_ms is None else {SEALED: str(family.sealed_ms)}
            for member in set(layout.members(family)) - {layout.topic}:
                properties = {**others, PART_OF: layout.topic.topic, **sealed}
                try:
                    self._change(member, properties, self._find_part(member, layout.topic))
                except TopicNotFound:
                    # A client has deleted the partition on its own, so create it again.
                    self._create_one(member, properties)

    def _update_routes(self, row: TopicMetadata, request: PartitionRequest, permit: Permit) -> None:
        topic, old_routes = row.topic, routes_of(row.topic, row.properties)
        if not old_routes or request.partitions is not None:
            raise BadRequest(
                f"Topic {topic} has routes, so it cannot have partitions."
                if old_routes
                else f"Topic {topic} cannot have routes, because it was created without routes.",
                "Create another topic.",
            )
        routes = request.routes or old_routes
        if missing := old_routes.keys() - routes.keys():
            raise BadRequest(
                f"Topic {topic} has a route {min(missing)}, which may have unread messages.",
                "Add the route to the property routes.",
            )
        layout = Layout(topic, routes=tuple(routes))
        properties = {**request.others, **layout_properties(layout, routes)}
        self._topics.check(properties)
        new = [
            one
            for name in routes.keys() - old_routes.keys()
            for one in _tree(layout.route(name), routes[name], {}, request.others, topic)
        ]
        changes = [self._plan_partitions(layout.route(name), routes[name], request.others) for name in old_routes]
        self._check_names_unused([*new, *(one for change in changes for one in change.new_topics)], permit)
        for one in new:
            self._recreate(*one)
        for change in changes:
            self._change_partitions(change, request.others)
        self._change(topic, properties, row)

    def _finish(self, topic: TopicId) -> TopicMetadata:
        """Seal all families except the last one, record the seals in the topic, and return the topic's metadata."""
        with self._lock:
            row = self._topics.get(topic)
            layout = layout_of(topic, row.properties)
            if layout is None or not layout.is_changing:
                return row
            now_ms = self._clock.now_ms()
            *previous, last = layout.families
            for family in previous:
                if family.sealed_ms is None:
                    self._seal(layout.members(family), topic, now_ms)
            sealed = (family._replace(sealed_ms=family.sealed_ms or now_ms) for family in previous)
            properties = {**row.properties, **layout_properties(layout._replace(families=(*sealed, last)))}
            self._topics.update(topic, properties, expected=row)
            return self._topics.get(topic)

    def _seal(self, members: Iterable[TopicId], topic: TopicId, now_ms: int) -> None:
        for member in members:
            with suppress(TopicNotFound, TopicExists):
                if member != topic:
                    part = self._find_part(member, topic)
                    self._change(member, {**part.properties, SEALED: str(now_ms)}, part)

    def _check_names_unused(self, new_topics: Sequence[NewTopic], permit: Permit) -> None:
        """Check that topics can be created.

        Check all permissions first, so that a client without permission does not learn which topics exist.
        """
        for topic, _ in new_topics:
            permit(topic)
        for topic, properties in new_topics:
            check_length(topic)
            self._topics.check(properties)
            self._interrupted_part(topic, properties)

    def _interrupted_part(self, topic: TopicId, properties: Mapping[str, str]) -> TopicMetadata | None:
        """Return the part that an interrupted request has left; None: the name is unused.

        Raises:
            TopicExists: another topic has the name.
        """
        try:
            found = self._topics.get(topic)
        except TopicNotFound:
            return None
        is_part = PART_OF in properties and found.properties.get(PART_OF) == properties[PART_OF]
        if not is_part or self._parent(found) is not None:
            raise TopicExists(
                f"Topic {topic} already exists.",
                "A partition or route would have the same name. Choose another name.",
            )
        return found

    def _require_no_parent(self, topic: TopicMetadata) -> None:
        parent = self._parent(topic)
        if parent is not None:
            raise BadRequest(f"Topic {topic.topic} is part of {parent}.", f"Change {parent}.")

    def _parent(self, part: TopicMetadata) -> TopicId | None:
        """Return the topic that a part belongs to; None: it is not a part, or an interrupted request has left it."""
        with suppress(TopicNotFound):
            if PART_OF in part.properties:
                parent = self._topics.get(TopicId(part.topic.namespace, part.properties[PART_OF]))
                layout = layout_of(parent.topic, parent.properties)
                if layout is not None and part.topic in layout.parts:
                    return parent.topic
        return None

    def _holds_rows(self, layout: Layout, family: Family) -> bool:
        """Return whether a sealed family has messages, including those that were being written during the seal."""
        with suppress(Unavailable):
            for member in layout.members(family):
                self._wait_for_writes(member)
                if self._has_rows(member):
                    return True
            return False
        # A partition with another leader cannot be checked here, so assume that it has messages.
        return True

    # -- one topic ----------------------------------------------------------------------------------------------------

    def _create_one(self, topic: TopicId, properties: Mapping[str, str]) -> TopicMetadata:
        with self._creating:
            created = self._topics.create(topic, properties)
            # A server that does not lead the topic can create it, but not read its rows.
            with suppress(Unavailable):
                if created.generation == 1 and not self._has_rows(topic):
                    self._created_empty[topic] = created
            return created

    def _recreate(self, topic: TopicId, properties: Mapping[str, str]) -> TopicMetadata:
        """Delete a topic that an interrupted request may have left, and create it."""
        # Check again, because other clients create topics without the lock.
        interrupted = self._interrupted_part(topic, properties)
        if interrupted is not None:
            self._delete(interrupted)
        return self._create_one(topic, properties)

    def _change(self, topic: TopicId, properties: Mapping[str, str], expected: TopicMetadata) -> None:
        self._topics.update(topic, properties, expected=expected)
        # With a longer TTL, the cache would show rows that the janitor has deleted under the shorter TTL.
        self._open_topics.invalidate_rows(topic)

    def _delete(self, row: TopicMetadata) -> None:
        layout = layout_of(row.topic, row.properties)
        for part in [] if layout is None else layout.parts:
            self._delete_part(part, row.topic)
        self._topics.delete(row.topic, expected=row)
        self._open_topics.drop(row.topic)
        self._created_empty.pop(row.topic, None)

    def _delete_part(self, topic: TopicId, parent: TopicId) -> None:
        with suppress(TopicNotFound, TopicExists):
            self._delete(self._find_part(topic, parent))

    def _find_part(self, topic: TopicId, parent: TopicId) -> TopicMetadata:
        """Return a partition or route of a topic.

        Raises:
            TopicNotFound: the part does not exist.
            TopicExists: after an interrupted deletion, another client has created a topic with the name of the part.
        """
        found = self._topics.get(topic)
        if found.properties.get(PART_OF) != parent.topic:
            hint = f"It is not part of {parent}, whose deletion was interrupted. Complete it: tms topic delete {parent}"
            raise TopicExists(f"Topic {topic} already exists.", hint)
        return found

    def _has_rows(self, topic: TopicId) -> bool:
        stop = stop_key(topic.prefix)
        return any(table.first(topic.prefix, stop) is not None for table in (self._store.message, self._store.payload))


def _tree(
    topic: TopicId,
    partitions: int | None,
    routes: Mapping[str, int],
    others: Mapping[str, str],
    part_of: TopicId | None = None,
) -> Iterator[NewTopic]:
    """Yield a topic and its parts with their properties, in the order of their creation: parts first."""
    own = dict(others) if part_of is None else {**others, PART_OF: part_of.topic}
    if partitions is not None:
        layout = Layout(topic, (Family(1, partitions),))
        for member in layout.members(layout.families[0]):
            yield member, {**others, PART_OF: topic.topic}
        own |= layout_properties(layout)
    elif routes:
        layout = Layout(topic, routes=tuple(routes))
        for name, number in routes.items():
            yield from _tree(layout.route(name), number, {}, others, topic)
        own |= layout_properties(layout, routes)
    yield topic, own


def _is_changing(topic: TopicMetadata) -> bool:
    if PARTITIONS not in topic.properties:
        return False
    layout = layout_of(topic.topic, topic.properties)
    return layout is not None and layout.is_changing
