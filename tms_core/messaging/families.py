"""Topics with partitions or routes: their creation, change and deletion, with the topics of their messages.

The stores have no transactions over several metadata rows, so the order of writes makes each change atomic. New
partitions exist before the topic names them, and old partitions are deleted before the topic. If a change is
interrupted, the same request repeats it. If the topic names the new family already, the next request finishes it.

A change of the number of partitions has these steps:

1. Create the new family, with the groups of the old one.
2. The topic names the new family; from now on groups know it.
3. Seal the old family.
4. The topic notes the seal; only from now on messages are published to the new family.

Therefore, for each key, no message in the new family is older than a message in the old one.

The server that leads a partition notes in a row next to the position that a group has read the sealed partition
completely. Servers of other partitions read that row, and need not read a partition that they do not lead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock, RLock

from tms_core.clock import HonestClock
from tms_core.consumers.claim_rows import drained_in
from tms_core.consumers.claims import ConsumerGroup
from tms_core.consumers.positions import Position, Positions
from tms_core.errors import BadRequest, TopicExists, TopicNotFound, Unavailable
from tms_core.messaging.publish.open_topics import OpenTopics
from tms_core.messaging.topics.catalog import TopicRegistry, check_length
from tms_core.messaging.topics.partitions import (
    FAMILIES,
    MOST_FAMILIES,
    PART_OF,
    PARTITIONS,
    ROUTES,
    SEALED,
    Family,
    Layout,
    PartitionRequest,
    layout_of,
    noted,
    parse_request,
    routes_of,
)
from tms_core.rowkey import MessageId, stop_key
from tms_core.tables.base import Store
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata

Made = tuple[TopicId, dict[str, str]]
#: A function that raises if a client may not create a topic.
Permit = Callable[[TopicId], None]


def permit_all(_: TopicId) -> None:
    """Permit every topic, for a caller that was checked already or is not checked at all."""


class Families:
    """The topics of a store, with and without partitions; threads may share it.

    Args:
        side: the table of the groups' positions; it accepts writes for partitions that other servers lead, too.
        settle: waits for running writes to a topic.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        store: Store,
        open_topics: OpenTopics,
        clock: HonestClock,
        side: SideTable,
        settle: Callable[[TopicId], None],
    ) -> None:
        self._topics = topics
        self._store = store
        self._open_topics = open_topics
        self._clock = clock
        self._side = side
        self._positions = Positions(side)
        self._settle = settle
        self._newborn: dict[TopicId, TopicMetadata] = {}
        self._making = Lock()
        self._lock = RLock()

    # -- requests of clients ------------------------------------------------------------------------------------------

    def create(self, topic: TopicId, properties: Mapping[str, str], permit: Permit = permit_all) -> None:
        """Create a topic, and its parts before it.

        Args:
            permit: called with each topic before the first one is created.

        Raises:
            Forbidden: ``permit`` raised it.
            TopicExists: the topic exists, or a topic has the name of a part.
            BadRequest, MetadataError, StoreError, Unavailable: as :meth:`TopicRegistry.create`.
        """
        request = parse_request(properties)
        made = list(_tree(topic, request.partitions, request.routes or {}, request.others))
        if len(made) == 1:
            permit(topic)
            self._make(*made[0])
            return
        with self._lock:
            with suppress(TopicNotFound):
                self._topics.get(topic)
                raise TopicExists(
                    f"Topic {topic} already exists.",
                    f"Choose another name, or look at its properties: tms topic show {topic}",
                )
            self._check_free(made, permit)
            for one in made:
                self._recreate(*one)

    def update(self, topic: TopicId, properties: Mapping[str, str], permit: Permit = permit_all) -> None:
        """Replace the properties of a topic and its parts; an omitted property returns to its default.

        Omitted partitions and routes stay unchanged, because they hold messages.

        Args:
            permit: called with each new part before the first one is created.

        Raises:
            Forbidden: ``permit`` raised it.
            BadRequest: the topic is part of another one, a route is missing, or as :meth:`TopicRegistry.update`.
            TopicExists: a topic has the name of a new part.
            TopicNotFound, MetadataError, StoreError, Unavailable: as :meth:`TopicRegistry.update`.
        """
        request = parse_request(properties)
        with self._lock:
            row = self._topics.get(topic)
            self._require_whole(row)
            if request.partitions is None and request.routes is None and FAMILIES not in row.properties:
                self._change(topic, request.others)
            elif request.routes is not None or row.properties.get(FAMILIES) == ROUTES:
                self._update_routes(row, request, permit)
            else:
                self._update_partitions(topic, request.partitions, request.others, permit)

    def delete(self, topic: TopicId) -> None:
        """Delete a topic, and its parts before it.

        Raises:
            BadRequest: the topic is part of another topic.
            TopicNotFound, MetadataError, StoreError, Unavailable: as :meth:`TopicRegistry.delete`.
        """
        with self._lock:
            row = self._topics.get(topic)
            self._require_whole(row)
            self._delete(row)

    def properties_of(self, topic: TopicId) -> dict[str, str]:
        """Return all properties of a topic; finish an interrupted change of its partitions first.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`TopicRegistry.get`.
        """
        row = self._topics.get(topic)
        if _is_changing(row):
            # Another server leads, and will finish it.
            with suppress(Unavailable):
                row = self._finish(topic)
        return dict(row.properties)

    def before(self, part: TopicMetadata) -> list[TopicId]:
        """Return the partitions that a group in order reads completely before this one.

        Raises:
            MetadataError, StoreError: as :meth:`update`.
        """
        with suppress(TopicNotFound):
            whole = self._topics.get(TopicId(part.topic.namespace, part.properties[PART_OF]))
            layout = layout_of(whole.topic, whole.properties)
            return [] if layout is None else layout.before(part.topic)
        return []

    def settle(self, topic: TopicId) -> None:
        """Wait for running writes of this server to a topic."""
        self._settle(topic)

    def drained(self, topic: TopicId, name: str) -> int | None:
        """Return the transaction in which a group has read a sealed partition completely.

        Returns:
            0 if the transaction is unknown or the partition was deleted; None if the group has unread messages.

        Raises:
            FormatError, MetadataError, StoreError: a row is damaged, or could not be read.
        """
        try:
            part = self._topics.get(topic)
        except TopicNotFound:
            return 0
        return drained_in(self._side, ConsumerGroup.of(part, name))

    def is_newborn(self, topic: TopicMetadata) -> bool:
        """Return whether this process created the topic in its first generation, without rows, and it is unchanged.

        Rows of such a topic become due by time alone, never by a changed setting. Therefore invariant S8 does not hold
        them.
        """
        # The lock waits for a topic that exists but whose creation is not noted yet.
        with self._making:
            return self._newborn.get(topic.topic) == topic

    # -- partitions and routes ----------------------------------------------------------------------------------------

    def _update_partitions(
        self, topic: TopicId, partitions: int | None, others: Mapping[str, str], permit: Permit
    ) -> None:
        """Change a topic that has partitions, or gets partitions."""
        row = self._finish(topic)
        layout = layout_of(topic, row.properties) or Layout(topic, (Family(0, 1),))
        last = layout.families[-1]
        remaining = tuple(one for one in layout.families if one.sealed_ms is None or self._holds_rows(layout, one))
        new = Family(last.number + 1, partitions or last.partitions)
        if new.partitions == last.partitions and last.number:
            after, made = layout._replace(families=remaining), []
        else:
            after = layout._replace(families=(*remaining, new))
            made = [(member, {**others, PART_OF: topic.topic}) for member in after.members(new)]
        own = {PART_OF: row.properties[PART_OF]} if PART_OF in row.properties else {}
        properties = {**others, **noted(after), **own}
        self._topics.check(properties)
        if len(after.families) > MOST_FAMILIES:
            raise BadRequest(
                f"The number of partitions of topic {topic} was changed too often: messages of {len(remaining)} "
                "earlier numbers are still there.",
                "Change it again when the oldest have expired.",
            )
        self._check_free(made, permit)
        # In this order: groups are registered in a new partition before anyone can publish to it, so that it keeps
        # messages for them from the first one on. The topic names the partitions only when all exist.
        for member, values in made:
            self._recreate(member, values)
            self._register(member, layout.members(last))
        self._change_members(after, others)
        self._change(topic, properties)
        self._finish(topic)
        for family in set(layout.families) - set(remaining):
            for member in set(layout.members(family)) - {topic}:
                self._delete_if_there(member)

    def _register(self, member: TopicId, previous: Iterable[TopicId]) -> None:
        """Register all groups of the previous partitions at the start of a new one, so that it keeps their messages."""
        names = set()
        for one in previous:
            with suppress(TopicNotFound):
                names |= {position.name for position in self._positions.of(self._topics.get(one))}
        for name in sorted(names):
            position = Position(name, MessageId(0, 0), self._clock.now_ms(), 0)
            self._positions.move(self._topics.get(member), None, position)

    def _change_members(self, layout: Layout, others: Mapping[str, str]) -> None:
        for family in layout.families:
            sealed = {} if family.sealed_ms is None else {SEALED: str(family.sealed_ms)}
            for member in set(layout.members(family)) - {layout.topic}:
                properties = {**others, PART_OF: layout.topic.topic, **sealed}
                try:
                    self._change(member, properties)
                except TopicNotFound:
                    # Another program has deleted it.
                    self._make(member, properties)

    def _update_routes(self, row: TopicMetadata, request: PartitionRequest, permit: Permit) -> None:
        topic, old_routes = row.topic, routes_of(row.properties)
        if not old_routes or request.partitions is not None:
            raise BadRequest(
                f"Topic {topic} cannot have routes.", "Routes are set when a topic is created; create another topic."
            )
        routes = request.routes or old_routes
        if missing := old_routes.keys() - routes.keys():
            raise BadRequest(f"Topic {topic} has a route {min(missing)}.", "Name it too; its messages may be unread.")
        layout = Layout(topic, routes=tuple(routes))
        properties = {**request.others, **noted(layout, routes)}
        self._topics.check(properties)
        new = [
            one
            for name in routes.keys() - old_routes.keys()
            for one in _tree(layout.route(name), routes[name], {}, request.others, topic)
        ]
        self._check_free(new, permit)
        for one in new:
            self._recreate(*one)
        for name in old_routes:
            self._update_partitions(layout.route(name), routes[name], request.others, permit)
        self._change(topic, properties)

    def _finish(self, topic: TopicId) -> TopicMetadata:
        """Seal the families that are not the last one, note that in the topic, and return its metadata."""
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
            properties = {**row.properties, **noted(layout._replace(families=(*sealed, last)))}
            self._topics.update(topic, properties, expected=row)
            return self._topics.get(topic)

    def _seal(self, members: Iterable[TopicId], topic: TopicId, now_ms: int) -> None:
        for member in members:
            with suppress(TopicNotFound):
                if member != topic:
                    self._change(member, {**self._topics.get(member).properties, SEALED: str(now_ms)})

    def _check_free(self, made: Sequence[Made], permit: Permit) -> None:
        """Check that topics can be created.

        The permissions come first, so that a client without permission does not learn about other topics.
        """
        for topic, _ in made:
            permit(topic)
        for topic, properties in made:
            check_length(topic)
            self._topics.check(properties)
            with suppress(TopicNotFound):
                found = self._topics.get(topic)
                if found.properties.get(PART_OF) != properties.get(PART_OF) or self._whole(found) is not None:
                    raise TopicExists(
                        f"Topic {topic} already exists.",
                        "One of the partitions would have that name. Choose another name.",
                    )

    def _require_whole(self, topic: TopicMetadata) -> None:
        whole = self._whole(topic)
        if whole is not None:
            raise BadRequest(f"Topic {topic.topic} is part of {whole}.", f"Change {whole}.")

    def _whole(self, part: TopicMetadata) -> TopicId | None:
        """Return the topic that a part belongs to; None: it belongs to no topic, or an interrupted request left it."""
        with suppress(TopicNotFound):
            if PART_OF in part.properties:
                whole = self._topics.get(TopicId(part.topic.namespace, part.properties[PART_OF]))
                layout = layout_of(whole.topic, whole.properties)
                if layout is not None and part.topic in layout.parts:
                    return whole.topic
        return None

    def _holds_rows(self, layout: Layout, family: Family) -> bool:
        """Return whether a sealed family has messages, including those that were being written during the seal."""
        with suppress(Unavailable):
            for member in layout.members(family):
                self._settle(member)
                if self._has_rows(member):
                    return True
            return False
        # Another server leads one of them.
        return True

    # -- one topic ----------------------------------------------------------------------------------------------------

    def _make(self, topic: TopicId, properties: Mapping[str, str]) -> None:
        with self._making:
            made = self._topics.create(topic, properties)
            # A server that does not lead the topic has created it, but cannot read its rows.
            with suppress(Unavailable):
                if made.generation == 1 and not self._has_rows(topic):
                    self._newborn[topic] = made

    def _recreate(self, topic: TopicId, properties: Mapping[str, str]) -> None:
        """Create a topic; first delete what an interrupted request has left of it."""
        self._delete_if_there(topic)
        self._make(topic, properties)

    def _change(self, topic: TopicId, properties: Mapping[str, str]) -> None:
        self._topics.update(topic, properties)
        # With a longer TTL, the cache would show rows that the janitor has deleted under the shorter TTL.
        self._open_topics.forget_cached(topic)

    def _delete(self, row: TopicMetadata) -> None:
        layout = layout_of(row.topic, row.properties)
        for part in [] if layout is None else layout.parts:
            self._delete_if_there(part)
        self._topics.delete(row.topic)
        self._open_topics.drop(row.topic)
        self._newborn.pop(row.topic, None)

    def _delete_if_there(self, topic: TopicId) -> None:
        with suppress(TopicNotFound):
            self._delete(self._topics.get(topic))

    def _has_rows(self, topic: TopicId) -> bool:
        stop = stop_key(topic.prefix)
        return any(table.first(topic.prefix, stop) is not None for table in (self._store.message, self._store.payload))


def _tree(
    topic: TopicId,
    partitions: int | None,
    routes: Mapping[str, int],
    others: Mapping[str, str],
    part_of: TopicId | None = None,
) -> Iterator[Made]:
    """Yield a topic and its parts with their properties, in the order of their creation: parts first."""
    own = dict(others) if part_of is None else {**others, PART_OF: part_of.topic}
    if partitions is not None:
        layout = Layout(topic, (Family(1, partitions),))
        for member in layout.members(layout.families[0]):
            yield member, {**others, PART_OF: topic.topic}
        own |= noted(layout)
    elif routes:
        layout = Layout(topic, routes=tuple(routes))
        for name, number in routes.items():
            yield from _tree(layout.route(name), number, {}, others, topic)
        own |= noted(layout, routes)
    yield topic, own


def _is_changing(topic: TopicMetadata) -> bool:
    if PARTITIONS not in topic.properties:
        return False
    layout = layout_of(topic.topic, topic.properties)
    return layout is not None and layout.is_changing
