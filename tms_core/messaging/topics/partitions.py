"""Partitions and routes of a topic: the topics that have its messages. Rules only, without I/O.

A topic with the property ``partitions: "8"`` has its messages in eight ordinary topics, ``orders-0`` to ``orders-7``: a
*family*. The partition of a message is crc32 of its key, modulo their number. A new number makes a new family
(``orders-f2-0`` …), because other keys share its partitions. The previous family is *sealed*: it takes no more
messages, and a group in order reads it completely first. A topic that had messages before it had partitions is family
number 0 itself.

A topic with the property ``routes: {"users": 2, "pages": 3}`` has a copy of each message in ``orders-users`` and
``orders-pages``. Routes are topics with partitions, and each route has its own keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from tms_core.errors import BadRequest, MetadataError, quoted
from tms_core.topic import TopicId

#: Properties that clients set: a number of partitions, or a JSON object of routes and their numbers of partitions.
PARTITIONS, ROUTES = "partitions", "routes"
#: Properties that the server sets: the families of a topic, oldest first; in a part, the whole topic, and the time of
#: its seal.
FAMILIES, PART_OF, SEALED = "families", "part_of", "sealed"
_OWN = (FAMILIES, PART_OF, SEALED)

MOST_PARTITIONS = 1000
MOST_ROUTES = 16
#: The most families of a topic: this limits changes of the number of partitions while their messages live.
MOST_FAMILIES = 16

_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_ROUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
#: Reserved names that a route must not have: names of families, and of the dead letter topic.
_TAKEN = re.compile(r"f[0-9]+|dead")
_FAMILY = re.compile(r"(\d+):(\d+)(?::(\d+))?")


class Family(NamedTuple):
    """A family: partitions with one distribution of keys.

    Attributes:
        number: the number of the family, from 1; 0: the topic itself, before it had partitions.
        sealed_ms: the time of its seal in milliseconds; None: it takes messages.
    """

    number: int
    partitions: int
    sealed_ms: int | None = None


class Layout(NamedTuple):
    """The topics that have the messages of a topic.

    Attributes:
        families: its families, oldest first; empty if it has routes.
        routes: the names of its routes.
    """

    topic: TopicId
    families: tuple[Family, ...] = ()
    routes: tuple[str, ...] = ()

    @property
    def has_own(self) -> bool:
        """Return whether some messages are in the topic itself, because it had messages before it had partitions."""
        return any(not family.number for family in self.families)

    @property
    def is_changing(self) -> bool:
        """Return whether a family has to be sealed."""
        return any(family.sealed_ms is None for family in self.families[:-1])

    def members(self, family: Family) -> list[TopicId]:
        """Return the topics of a family."""
        if not family.number:
            return [self.topic]
        start = self.topic.topic if family.number == 1 else f"{self.topic.topic}-f{family.number}"
        return [TopicId(self.topic.namespace, f"{start}-{at}") for at in range(family.partitions)]

    def route(self, name: str) -> TopicId:
        """Return the topic of a route."""
        return TopicId(self.topic.namespace, f"{self.topic.topic}-{name}")

    @property
    def parts(self) -> list[TopicId]:
        """Return all topics that are created, changed and deleted with it."""
        members = [member for family in self.families for member in self.members(family)]
        return [self.route(name) for name in self.routes] + [one for one in members if one != self.topic]

    def before(self, part: TopicId) -> list[TopicId]:
        """Return the partitions that a group in order reads completely before a part."""
        found: list[TopicId] = []
        for family in self.families:
            members = self.members(family)
            if part in members:
                return found
            found += members
        return []

    def place(self, number: int) -> TopicId:
        """Return the topic that a message is published to.

        Args:
            number: the result of :func:`number_of` for its key, or any number.
        """
        takes = next((family for family in self.families if family.sealed_ms is None), self.families[-1])
        return self.members(takes)[number % takes.partitions]


class PartitionRequest(NamedTuple):
    """The partitions and routes in the properties of a topic.

    Attributes:
        partitions: their number; None: the property is missing.
        routes: the number of partitions of each route; None: the property is missing.
        others: all other properties, without those that only the server sets.
    """

    partitions: int | None
    routes: dict[str, int] | None
    others: dict[str, str]


def number_of(key: bytes | str) -> int:
    """Return the number that determines the partition of a key."""
    return crc32(key.encode() if isinstance(key, str) else key)


def parse_request(properties: Mapping[str, str]) -> PartitionRequest:
    """Parse the partitions and routes in the properties of a request.

    Raises:
        BadRequest: a number or a route is invalid, or the request has both.
    """
    others = {name: value for name, value in properties.items() if name not in (PARTITIONS, ROUTES, *_OWN)}
    partitions, routes = properties.get(PARTITIONS), properties.get(ROUTES)
    if partitions is not None and routes is not None:
        raise BadRequest("A topic has partitions or routes.", "Give one of them: each route has its own partitions.")
    return PartitionRequest(
        None if partitions is None else _number(partitions), None if routes is None else _routes(routes), others
    )


def layout_of(topic: TopicId, properties: Mapping[str, str]) -> Layout | None:
    """Return the layout of a topic with these properties; None: its messages are in the topic itself.

    Raises:
        MetadataError: the property ``families`` is invalid.
    """
    text = properties.get(FAMILIES)
    if text is None:
        return None
    if text == ROUTES:
        return Layout(topic, routes=tuple(routes_of(properties)))
    found = [_FAMILY.fullmatch(one) for one in text.split(" ")]
    families = [
        Family(int(one[1]), int(one[2]), None if one[3] is None else int(one[3])) for one in found if one is not None
    ]
    if len(families) < len(found):
        raise MetadataError(f"topic {topic}: its families {quoted(text)} cannot be read")
    return Layout(topic, tuple(families))


def noted(layout: Layout, routes: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return the properties that describe a layout."""
    if routes:
        return {ROUTES: json.dumps(routes, separators=(",", ":")), FAMILIES: ROUTES}
    families = (
        f"{number}:{partitions}" + ("" if sealed_ms is None else f":{sealed_ms}")
        for number, partitions, sealed_ms in layout.families
    )
    return {PARTITIONS: str(layout.families[-1].partitions), FAMILIES: " ".join(families)}


def routes_of(properties: Mapping[str, str]) -> dict[str, int]:
    """Return the routes of a topic and their numbers of partitions; empty for a topic without routes."""
    return _routes(properties[ROUTES]) if properties.get(FAMILIES) == ROUTES else {}


def _routes(text: str) -> dict[str, int]:
    example = 'Write for example {"users": 2, "pages": 3}.'
    try:
        routes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"routes: {_quote(text)} is not JSON.", example) from error
    if not isinstance(routes, dict) or not 0 < len(routes) <= MOST_ROUTES:
        raise BadRequest(f"routes: {_quote(text)} is not an object of 1 to {MOST_ROUTES} routes.", example)
    for name in routes:
        if not _ROUTE.fullmatch(name) or _TAKEN.fullmatch(name):
            raise BadRequest(f"routes: {_quote(name)} cannot be a route.", "Use letters, digits and '_'; not 'dead'.")
    return {name: _number(str(number)) for name, number in routes.items()}


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > MOST_PARTITIONS:
        raise BadRequest(f"{_quote(text)} is not a number of partitions.", f"Give 1 to {MOST_PARTITIONS}.")
    return int(text)


def _quote(text: str) -> str:
    return quoted(text)
