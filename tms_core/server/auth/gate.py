"""Who sent a request, and whether he may: what stands before every route (``docs/rest.md``, "Who may do what").

The token of a request says who sent it; :class:`Authenticator` has two kinds, tokens of a file and JWT. Verifying one
costs up to a tenth of a millisecond, and producers send the same one with every message, so those that were good are
remembered by their SHA-256, until they expire or what they were verified with changes. A look-up by the hash of a
secret gives nothing away: measuring its time would tell about a hash, and not about the token. What was not good is
never remembered, so requests without a good token use no memory.

Rules (``server.auth.rules``) only allow; what none of them allows is refused. They are part of the settings and change
with a restart, so what was decided once for a principal and a topic holds, and the next request costs a look into a
dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, Protocol

from tms_core.clock import Clock
from tms_core.errors import Forbidden, Unauthorized
from tms_core.settings.models import AuthRule
from tms_core.topic import TopicId

#: How many good tokens are remembered.
_REMEMBERED = 4096
#: A bearer token in the grammar of RFC 6750, and no longer than any issuer makes them.
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]{1,8192}) *", re.IGNORECASE)

Headers = Iterable[tuple[bytes, bytes]]
#: The principal of a rule for everybody who is known.
EVERYBODY = "*"
#: How many decisions are remembered; two principals on each of some thousand topics.
_DECISIONS = 8192
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
        self._remembered = lru_cache(maxsize=_DECISIONS)(self.rights)

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
        rights = self._remembered(principal, topic)
        return bool(rights) if need is Need.ANY else need.value in rights


def is_principal(name: str) -> bool:
    """Whether a name can be a principal's: visible characters, neither everybody's nor like the begin of a comment."""
    return 0 < len(name) <= _LONGEST and name.isprintable() and " " not in name and name[0] not in (EVERYBODY, "#")


class Identity(NamedTuple):
    """Whose token it is.

    Attributes:
        expires_ms: from when on it does not count any more; None: it does not end by itself.
    """

    principal: str
    expires_ms: int | None


class Authenticator(Protocol):
    """A way to prove who one is."""

    def refresh(self) -> bool:
        """Look whether what tokens are verified with has changed; True: what was good may not be any more."""
        ...

    def identify(self, token: bytes) -> Identity:
        """Whose token it is, right now.

        Raises:
            Unauthorized: it is not good.
        """
        ...


class Gate:
    """Lets requests pass, or not.

    Args:
        authenticator: knows tokens.
        rules: know who may do what.
        clock: by which tokens expire.
    """

    def __init__(self, authenticator: Authenticator, rules: Rules, clock: Clock) -> None:
        self._authenticator = authenticator
        self._rules = rules
        self._clock = clock
        self._known: dict[bytes, Identity] = {}

    def principal(self, headers: Headers) -> str:
        """Who sent a request with these headers.

        Raises:
            Unauthorized: that is not proven.
        """
        token = _bearer(headers)
        if self._authenticator.refresh():
            self._known.clear()
        digest = sha256(token).digest()
        known = self._known.get(digest)
        if known is None or (known.expires_ms is not None and known.expires_ms <= self._clock.now_ms()):
            self._known.pop(digest, None)
            known = self._authenticator.identify(token)
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = known
        return known.principal

    def require(self, principal: str, topic: TopicId, need: Need) -> None:
        """Let a principal do something on a topic.

        Raises:
            Forbidden: no rule allows it. It is the same whether there is such a topic or not.
        """
        if not self._rules.allow(principal, topic, need):
            what = "do anything" if need is Need.ANY else need.value
            raise Forbidden(
                f"{principal} may not {what} on {topic}.", "Ask the operator of this server for a rule (server.auth)."
            )

    def visible(self, principal: str, topics: Iterable[TopicId]) -> list[TopicId]:
        """Those of some topics on which a principal may do something."""
        return [topic for topic in topics if self._rules.rights(principal, topic)]


def _bearer(headers: Headers) -> bytes:
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        raise Unauthorized("This server answers no request without a token.", "Send it as Authorization: Bearer TOKEN.")
    # Two would mean one thing to a proxy in front and another here.
    match = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        raise Unauthorized("This is no bearer token.", "Send one, as Authorization: Bearer TOKEN.")
    return match[1]
