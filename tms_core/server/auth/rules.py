"""Who may do what on which topic: the rules of ``server.auth.rules``.

Rules only allow; what none of them allows is refused. They are part of the settings and change with a restart, so what
was decided once for a principal and a topic holds, and the next request costs a look into a dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache

from tms_core.settings.models import AuthRule
from tms_core.topic import TopicId, is_remembered

#: The principal of a rule for everybody who is known.
EVERYBODY = "*"
#: How many decisions are remembered; two principals on each of some thousand topics.
_REMEMBERED = 8192
#: The longest name of a principal, in characters; it appears in every line of the access log.
_LONGEST = 256


class Need(Enum):
    """What a request needs before it is answered."""

    #: Nothing; no token is asked for.
    NOTHING = "nothing"
    #: A principal that is known, whatever the rules say of it.
    KNOWN = "known"
    #: At least one of the three on the topic.
    ANY = "any"
    ADMIN = "admin"
    PUBLISH = "publish"
    CONSUME = "consume"


class Rules:
    """The rules in force.

    Args:
        rules: in any order.
    """

    def __init__(self, rules: Sequence[AuthRule]) -> None:
        self._rules = tuple(rules)
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self.rights)

    def rights(self, principal: str, topic: TopicId) -> frozenset[str]:
        """All that a principal may do on a topic, looked up anew: ``admin``, ``publish``, ``consume``."""
        name = str(topic)
        return frozenset(
            right
            for rule in self._rules
            if rule.principal in (principal, EVERYBODY) and any(fnmatchcase(name, pattern) for pattern in rule.topics)
            for right in rule.can
        )

    def allow(self, principal: str, topic: TopicId, need: Need) -> bool:
        """Whether a principal may do on a topic what takes ``need``."""
        look_up = self._remembered if is_remembered(topic.namespace, topic.topic) else self.rights
        rights = look_up(principal, topic)
        return bool(rights) if need is Need.ANY else need.value in rights


def is_principal(name: str) -> bool:
    """Whether a name can be a principal's: visible characters, neither everybody's nor like the begin of a comment."""
    return 0 < len(name) <= _LONGEST and name.isprintable() and " " not in name and name[0] not in (EVERYBODY, "#")
