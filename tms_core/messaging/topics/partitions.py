"""Partitions and routes of a topic: which topics its messages are in. Rules only; nothing here reads or writes.

A topic with the property ``partitions: "8"`` has its messages in eight ordinary topics, ``orders-0`` to ``orders-7``: a
*family*. Which of them is crc32 of the message's key, modulo their number. Another number makes another family
(``orders-f2-0`` …), since other keys meet in its partitions; the one before it is *sealed*: it takes no more messages,
and a group in order reads it completely first. A topic that had messages before it had partitions is the first family
itself, number 0.

A topic with the property ``routes: {"users": 2, "pages": 3}`` has a copy of each message in ``orders-users`` and
``orders-pages``, topics with partitions, each by a key of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from tms_core.errors import BadRequest, MetadataError, quoted
from tms_core.topic import TopicId

#: What a topic asks for: a number of partitions, or a JSON object of the names of routes and their numbers.
PARTITIONS, ROUTES = "partitions", "routes"
#: What the server notes: the families of a topic, oldest first; in a part, whose it is, and when it was sealed. An
#: older version has noted, too, which groups have read it to its end since, each with the transaction it did it in.
FAMILIES, PART_OF, SEALED, DRAINED = "families", "part_of", "sealed", "drained"
_OWN = (FAMILIES, PART_OF, SEALED, DRAINED)

MOST_PARTITIONS = 1000
MOST_ROUTES = 16
#: How many families a topic has at most: its number of partitions changes no oftener while their messages live.
MOST_FAMILIES = 16

_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_ROUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
#: What no route may be called: the name of a family, and of the topic for messages that cannot be processed.
_TAKEN = re.compile(r"f[0-9]+|dead")
_FAMILY = re.compile(r"(\d+):(\d+)(?::(\d+))?")


class Family(NamedTuple):
    """Partitions among which keys are spread alike.

    Attributes:
        number: counts the families of a topic from 1; 0: the topic itself, before it had partitions.
        sealed_ms: since when none of them takes messages; None: they do.
    """

    number: int
    partitions: int
    sealed_ms: int | None = None


class Layout(NamedTuple):
    """Where the messages of a topic are.

    Attributes:
        families: its families, oldest first; none where it has routes.
        routes: the names of its routes.
    """

    topic: TopicId
    families: tuple[Family, ...] = ()
    routes: tuple[str, ...] = ()

    @property
    def has_own(self) -> bool:
        """Return whether some messages are in the topic itself, from the time before it had partitions."""
        return any(not family.number for family in self.families)

    @property
    def is_changing(self) -> bool:
        """Return whether a family is still to be sealed."""
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
        """Return all topics that are made, changed and deleted with it."""
        members = [member for family in self.families for member in self.members(family)]
        return [self.route(name) for name in self.routes] + [one for one in members if one != self.topic]

    def before(self, part: TopicId) -> list[TopicId]:
        """Return the topics that are read completely before this one, which is a part."""
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
            number: what :func:`number_of` says of its key, or any in turn.
        """
        takes = next((family for family in self.families if family.sealed_ms is None), self.families[-1])
        return self.members(takes)[number % takes.partitions]


class PartitionsAsked(NamedTuple):
    """The partitions and routes in the properties of a topic.

    Attributes:
        partitions: how many; None: it does not say.
        routes: the number of partitions of each route; None: it does not say.
        others: all other properties but those that only the server notes.
    """

    partitions: int | None
    routes: dict[str, int] | None
    others: dict[str, str]


def number_of(key: bytes | str) -> int:
    """What a key's partition is found by."""
    return crc32(key.encode() if isinstance(key, str) else key)


def wanted(properties: Mapping[str, str]) -> PartitionsAsked:
    """Parse the request of a client.

    Raises:
        BadRequest: a number of partitions or a route that is none, or both.
    """
    others = {name: value for name, value in properties.items() if name not in (PARTITIONS, ROUTES, *_OWN)}
    partitions, routes = properties.get(PARTITIONS), properties.get(ROUTES)
    if partitions is not None and routes is not None:
        raise BadRequest("A topic has partitions or routes.", "Give one of them: each route has its own partitions.")
    return PartitionsAsked(
        None if partitions is None else _number(partitions), None if routes is None else _routes(routes), others
    )


def layout_of(topic: TopicId, properties: Mapping[str, str]) -> Layout | None:
    """Return where the messages of a topic with these properties are; None: in the topic itself.

    Raises:
        MetadataError: the server's note cannot be read.
    """
    said = properties.get(FAMILIES)
    if said is None:
        return None
    if said == ROUTES:
        return Layout(topic, routes=tuple(routes_of(properties)))
    found = [_FAMILY.fullmatch(one) for one in said.split(" ")]
    families = [
        Family(int(one[1]), int(one[2]), None if one[3] is None else int(one[3])) for one in found if one is not None
    ]
    if len(families) < len(found):
        raise MetadataError(f"topic {topic}: its families {quoted(said)} cannot be read")
    return Layout(topic, tuple(families))


def noted(layout: Layout, routes: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return the properties that say where the messages of a topic are."""
    if routes:
        return {ROUTES: json.dumps(routes, separators=(",", ":")), FAMILIES: ROUTES}
    families = (
        f"{number}:{partitions}" + ("" if sealed_ms is None else f":{sealed_ms}")
        for number, partitions, sealed_ms in layout.families
    )
    return {PARTITIONS: str(layout.families[-1].partitions), FAMILIES: " ".join(families)}


def routes_of(properties: Mapping[str, str]) -> dict[str, int]:
    """Return the routes of a topic and their numbers of partitions; none where it has none."""
    return _routes(properties[ROUTES]) if properties.get(FAMILIES) == ROUTES else {}


def drained_by(properties: Mapping[str, str], group: str) -> int | None:
    """Return the transaction in which a group has read a sealed partition completely, 0 if that is not known, as an
    older version has noted it; None: it has not.
    """
    groups = dict(one.split(":") for one in properties.get(DRAINED, "").split(" ") if ":" in one)
    return int(groups[group]) if group in groups else None


def _routes(text: str) -> dict[str, int]:
    example = 'Write for example {"users": 2, "pages": 3}.'
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"routes: {_shown(text)} is no JSON.", example) from error
    if not isinstance(given, dict) or not 0 < len(given) <= MOST_ROUTES:
        raise BadRequest(f"routes: {_shown(text)} is no object of 1 to {MOST_ROUTES} routes.", example)
    for name in given:
        if not _ROUTE.fullmatch(name) or _TAKEN.fullmatch(name):
            raise BadRequest(f"routes: {_shown(name)} cannot be a route.", "Use letters, digits and '_'; not 'dead'.")
    return {name: _number(str(number)) for name, number in given.items()}


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > MOST_PARTITIONS:
        raise BadRequest(f"{_shown(text)} is no number of partitions.", f"Give 1 to {MOST_PARTITIONS}.")
    return int(text)


def _shown(text: str) -> str:
    return quoted(text)
