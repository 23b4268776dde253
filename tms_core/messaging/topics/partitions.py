"""The rules of partitions and routes, without I/O.

A topic with the property ``partitions: "8"`` stores its messages in eight ordinary topics, ``orders-0`` to
``orders-7``: a *family*. The partition of a message is the crc32 of its key modulo the number of partitions. A new
number creates a new family (``orders-f2-0`` …), because it distributes keys differently. The previous family is
*sealed*: it accepts no more messages, and an ordered group drains it first. If a topic had messages before it got
partitions, the topic itself is family 0.

A topic with the property ``routes: {"users": 2, "pages": 3}`` stores a copy of each message in ``orders-users`` and
``orders-pages``. Routes are topics with partitions, and each route distributes messages by another key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from tms_core.errors import BadRequest, MetadataError, quoted
from tms_core.topic import TopicId

#: Properties that clients set: the number of partitions, or a JSON object with the number of partitions of each route.
PARTITIONS, ROUTES = "partitions", "routes"
#: Properties that the server sets: the families of a topic, oldest first; for a part, its topic, and the time of its
#: seal.
FAMILIES, PART_OF, SEALED = "families", "part_of", "sealed"
_SERVER_PROPERTIES = (FAMILIES, PART_OF, SEALED)

MAX_PARTITIONS = 1000
MAX_ROUTES = 16
#: The maximum number of families with messages, which limits how often the number of partitions can be changed.
MAX_FAMILIES = 16

_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_ROUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
#: Reserved names: suffixes of families and of the dead letter topic.
_RESERVED = re.compile(r"f[0-9]+|dead")
_FAMILY = re.compile(r"(\d{1,9}):([1-9]\d{0,3})(?::(\d{1,19}))?")


class Family(NamedTuple):
    """A family: partitions with the same distribution of keys.

    Attributes:
        number: the number of the family, from 1; 0: the topic itself, before it got partitions.
        sealed_ms: the time of the seal in milliseconds; None: the family accepts messages.
    """

    number: int
    partitions: int
    sealed_ms: int | None = None


class Layout(NamedTuple):
    """The topics that store the messages of a topic.

    Attributes:
        families: the families, oldest first; empty for a topic with routes.
        routes: the names of the routes.
    """

    topic: TopicId
    families: tuple[Family, ...] = ()
    routes: tuple[str, ...] = ()

    @property
    def has_own(self) -> bool:
        """Return whether the topic itself stores messages from before it got partitions."""
        return any(not family.number for family in self.families)

    @property
    def is_changing(self) -> bool:
        """Return whether a change is incomplete: an older family is not sealed."""
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
        """Return the topics of all partitions or routes."""
        members = [member for family in self.families for member in self.members(family)]
        return [self.route(name) for name in self.routes] + [one for one in members if one != self.topic]

    def predecessors(self, part: TopicId) -> list[TopicId]:
        """Return the partitions that an ordered group must drain before a part."""
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
            number: the hash of the key (:func:`hash_key`), or any number.
        """
        target = next((family for family in self.families if family.sealed_ms is None), self.families[-1])
        return self.members(target)[number % target.partitions]


class PartitionRequest(NamedTuple):
    """The partitions and routes in the properties of a topic.

    Attributes:
        partitions: the number of partitions; None: the property is missing.
        routes: the number of partitions of each route; None: the property is missing.
        others: all other properties except the properties that only the server sets.
    """

    partitions: int | None
    routes: dict[str, int] | None
    others: dict[str, str]


def hash_key(key: bytes | str) -> int:
    """Return the hash that determines the partition of a key."""
    return crc32(key.encode() if isinstance(key, str) else key)


def parse_request(properties: Mapping[str, str]) -> PartitionRequest:
    """Parse the partitions and routes in the properties of a request.

    Raises:
        BadRequest: a number or a route is invalid, or the request has both.
    """
    others = {
        name: value for name, value in properties.items() if name not in (PARTITIONS, ROUTES, *_SERVER_PROPERTIES)
    }
    partitions, routes = properties.get(PARTITIONS), properties.get(ROUTES)
    if partitions is not None and routes is not None:
        raise BadRequest(
            "A topic cannot have both partitions and routes.", "Set the number of partitions of each route in routes."
        )
    return PartitionRequest(
        None if partitions is None else _number(partitions), None if routes is None else _routes(routes), others
    )


def layout_of(topic: TopicId, properties: Mapping[str, str]) -> Layout | None:
    """Return the layout of a topic with these properties; None: its messages are in the topic itself.

    Raises:
        MetadataError: the property ``families`` or ``routes`` is invalid.
    """
    text = properties.get(FAMILIES)
    if text is None:
        return None
    if text == ROUTES:
        return Layout(topic, routes=tuple(routes_of(topic, properties)))
    found = [_FAMILY.fullmatch(one) for one in text.split(" ")]
    families = [
        Family(int(one[1]), int(one[2]), None if one[3] is None else int(one[3])) for one in found if one is not None
    ]
    # A larger layout was not written by this program, and its list of partitions could fill the memory.
    is_too_large = len(found) > MAX_FAMILIES or any(family.partitions > MAX_PARTITIONS for family in families)
    if len(families) < len(found) or is_too_large:
        raise MetadataError(f"topic {topic}: its families {quoted(text)} cannot be read")
    return Layout(topic, tuple(families))


def layout_properties(layout: Layout, routes: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return the properties that describe a layout."""
    if routes:
        return {ROUTES: json.dumps(routes, separators=(",", ":")), FAMILIES: ROUTES}
    families = (
        f"{number}:{partitions}" + ("" if sealed_ms is None else f":{sealed_ms}")
        for number, partitions, sealed_ms in layout.families
    )
    return {PARTITIONS: str(layout.families[-1].partitions), FAMILIES: " ".join(families)}


def routes_of(topic: TopicId, properties: Mapping[str, str]) -> dict[str, int]:
    """Return the number of partitions of each route of a topic; empty for a topic without routes.

    Raises:
        MetadataError: the property ``routes`` is invalid.
    """
    if properties.get(FAMILIES) != ROUTES:
        return {}
    text = properties.get(ROUTES, "")
    try:
        return _routes(text)
    except BadRequest as error:
        raise MetadataError(f"topic {topic}: its routes {quoted(text)} cannot be read") from error


def _routes(text: str) -> dict[str, int]:
    example = 'Use an object such as {"users": 2, "pages": 3}.'
    try:
        routes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"routes: {_quote(text)} is not JSON.", example) from error
    if not isinstance(routes, dict) or not 0 < len(routes) <= MAX_ROUTES:
        raise BadRequest(f"routes: {_quote(text)} is not an object of 1 to {MAX_ROUTES} routes.", example)
    for name in routes:
        if not _ROUTE.fullmatch(name) or _RESERVED.fullmatch(name):
            raise BadRequest(
                f"routes: {_quote(name)} cannot be a route.",
                "Use a letter, and then letters, digits and '_'. The names 'dead', 'f1', 'f2' and so on are reserved.",
            )
    return {name: _number(str(number)) for name, number in routes.items()}


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > MAX_PARTITIONS:
        raise BadRequest(f"{_quote(text)} is not a number of partitions.", f"Use 1 to {MAX_PARTITIONS}.")
    return int(text)


def _quote(text: str) -> str:
    return quoted(text)
