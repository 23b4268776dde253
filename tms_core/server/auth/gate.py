"""Authentication and permissions of each request (``docs/reference/rest-consumers.md``, "Permissions of each route").

The token of a request identifies its sender. :class:`Authenticator` has two implementations: tokens of a file, and JWT.
A verification takes up to a tenth of a millisecond, and producers send the same token with every message. Therefore
valid tokens are cached by their SHA-256 until they expire or the keys change. The time of a lookup depends on the hash
and not on the token, so it reveals nothing. Invalid tokens are never cached, so they cannot fill the memory.

Rules (``server.auth.rules``) only allow; everything else is rejected. Rules change only at a restart, so the decision
for a principal and a topic is cached as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import NamedTuple, Protocol

from tms_core.clock import Clock
from tms_core.errors import Forbidden, Unauthorized, Unavailable, shortened
from tms_core.server.auth.quotas import Quotas
from tms_core.settings.models import AuthQuota, AuthRule
from tms_core.topic import TopicId, cache_names
from tms_core.web.failed_attempts import MAX_WAITING, FailedAttempts

#: The maximum number of cached tokens.
_MAX_TOKENS = 4096
#: A bearer token in the grammar of RFC 6750, of at most 8 KiB.
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]{1,8192}) *", re.IGNORECASE)

Headers = Iterable[tuple[bytes, bytes]]
#: The principal of a rule for all authenticated principals.
EVERYBODY = "*"
#: The maximum number of cached decisions: two principals on each of about four thousand topics.
_MAX_DECISIONS = 8192
#: The maximum length of a principal's name, which appears in every line of the access log.
_MAX_NAME = 256


class Need(Enum):
    """The permission that a request needs."""

    #: No token.
    NOTHING = "nothing"
    #: An authenticated principal, independent of the rules.
    KNOWN = "known"
    #: At least one of ADMIN, PUBLISH and CONSUME on the topic.
    ANY = "any"
    ADMIN = "admin"
    PUBLISH = "publish"
    CONSUME = "consume"
    #: Reading the metrics, independent of topics.
    OBSERVE = "observe"


def _length(_: str, topic: TopicId, *more: object) -> int:
    return len(topic.namespace) + len(topic.topic) + sum(len(name) for name in more if isinstance(name, str))


class Rules:
    """The rules in force."""

    def __init__(self, rules: Sequence[AuthRule]) -> None:
        self._rules = tuple(rules)
        self._cached_permissions = cache_names(_MAX_DECISIONS, _length)(self.permissions_of)
        self._cached_may_use = cache_names(_MAX_DECISIONS, _length)(self._may_use)

    def permissions_of(self, principal: str, topic: TopicId) -> frozenset[str]:
        """Return the permissions of a principal on a topic, uncached: ``admin``, ``publish``, ``consume``."""
        return frozenset(need for rule in self._rules_for(principal, topic) for need in rule.can) - {Need.OBSERVE.value}

    def allow(self, principal: str, topic: TopicId, need: Need, name: str = "") -> bool:
        """Return whether a principal has the permission ``need`` on a topic.

        Args:
            name: the consumer or producer as which the principal acts; empty: none.
        """
        if name and need in (Need.CONSUME, Need.PUBLISH):
            return self._cached_may_use(principal, topic, need, name)
        permissions = self._cached_permissions(principal, topic)
        return bool(permissions) if need is Need.ANY else need.value in permissions

    def observes(self, principal: str) -> bool:
        """Return whether a principal may read the metrics."""
        return any(Need.OBSERVE.value in rule.can for rule in self._rules if rule.principal in (principal, EVERYBODY))

    def _may_use(self, principal: str, topic: TopicId, need: Need, name: str) -> bool:
        rules = [rule for rule in self._rules_for(principal, topic) if need.value in rule.can]
        patterns = (rule.consumers if need is Need.CONSUME else rule.producers for rule in rules)
        return any(fnmatchcase(name, pattern) for names in patterns for pattern in names)

    def _rules_for(self, principal: str, topic: TopicId) -> Iterator[AuthRule]:
        """Yield the rules that apply to a principal and a topic."""
        for rule in self._rules:
            if rule.principal in (principal, EVERYBODY) and any(_matches(topic, pattern) for pattern in rule.topics):
                yield rule


def _matches(topic: TopicId, pattern: str) -> bool:
    """Return whether a pattern covers a topic; namespace and name match separately, so ``*`` matches no colon."""
    namespace, _, name = pattern.partition(":")
    return fnmatchcase(topic.namespace, namespace) and fnmatchcase(topic.topic, name)


def is_principal(name: str) -> bool:
    """Return whether a principal can have this name: printable, no spaces, and the first character is not * or #."""
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and " " not in name and name[0] not in (EVERYBODY, "#")


class Identity(NamedTuple):
    """The principal of a token.

    Attributes:
        expires_ms: the expiry of the token in milliseconds; None: it does not expire.
    """

    principal: str
    expires_ms: int | None


class Authenticator(Protocol):
    """A method of authentication."""

    def refresh(self) -> bool:
        """Reload changed keys or tokens; return whether a cached token may have become invalid."""
        ...

    def identify(self, token: bytes) -> Identity:
        """Verify a token, and return its identity.

        Raises:
            Unauthorized: the token is not valid.
            Unavailable: the file of tokens or keys is unusable, and the token is not valid by its previous contents.
        """
        ...


class Gate:
    """The access control of a server: tokens, rules and quotas.

    Args:
        connections: the maximum number of connections of the server.

    Attributes:
        quotas: the quotas of principals.
        failed: the recent failed attempts by address.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        rules: Rules,
        clock: Clock,
        quotas: Sequence[AuthQuota] = (),
        connections: int = 10 * MAX_WAITING,
    ) -> None:
        self._authenticator = authenticator
        self._rules = rules
        self._clock = clock
        self.quotas = Quotas(quotas, clock)
        self.failed = FailedAttempts(clock, min(MAX_WAITING, connections // 10))
        self._known: dict[bytes, Identity] = {}

    def principal(self, headers: Headers) -> str:
        """Return the principal of a request with these headers.

        Raises:
            Unauthorized: the request has no valid token.
            Unavailable: as :meth:`Authenticator.identify`.
        """
        token = _bearer(headers)
        if self._authenticator.refresh():
            self._known.clear()
        digest = sha256(token).digest()
        known = self._known.get(digest)
        if known is None or (known.expires_ms is not None and known.expires_ms <= self._clock.now_ms()):
            self._known.pop(digest, None)
            known = self._authenticator.identify(token)
            if len(self._known) >= _MAX_TOKENS:
                del self._known[next(iter(self._known))]
            self._known[digest] = known
        return known.principal

    def identify(self, headers: Headers) -> str | None:
        """Return the principal of a request with these headers; None: the request has no valid token."""
        try:
            return self.principal(headers)
        except (Unauthorized, Unavailable):
            return None

    def allows(self, principal: str, topic: TopicId, need: Need, name: str) -> bool:
        """Return whether a principal has a permission on a topic, and may act as a consumer or producer."""
        return self._rules.allow(principal, topic, need, name)

    def require(self, principal: str, topic: TopicId, need: Need, name: str = "") -> None:
        """Check that a principal has a permission on a topic.

        Args:
            name: the consumer or producer as which the principal acts; empty: none.

        Raises:
            Forbidden: no rule allows it. The error does not depend on the existence of the topic.
        """
        if not self._rules.allow(principal, topic, need, name):
            action = "do anything" if need is Need.ANY else need.value
            named = f" as {shortened(name)}" if name and need in (Need.CONSUME, Need.PUBLISH) else ""
            raise Forbidden(
                f"{principal} may not {action} on {topic}{named}.",
                "Ask the operator of this server for a rule (server.auth.rules).",
            )

    def require_observer(self, principal: str) -> None:
        """Check that a principal may read the metrics.

        Raises:
            Forbidden: no rule allows it.
        """
        if not self._rules.observes(principal):
            raise Forbidden(
                f"{principal} may not read the metrics.",
                "Ask the operator of this server for a rule with can: [observe] (server.auth.rules).",
            )

    def administered(self, principal: str, topics: Iterable[TopicId]) -> int:
        """Return the number of topics that a principal may administer, which count towards its quota."""
        return sum(Need.ADMIN.value in self._rules.permissions_of(principal, topic) for topic in topics)

    def visible(self, principal: str, topics: Iterable[TopicId]) -> list[TopicId]:
        """Return the topics on which a principal has any permission."""
        return [topic for topic in topics if self._rules.permissions_of(principal, topic)]


def unverifiable_error() -> Unavailable:
    """Return the error for a token that may be valid by the contents of an unusable file."""
    return Unavailable(
        "This server cannot read its file of tokens or keys, so it cannot verify the token.",
        "Try again later. The operator of this server finds the file and the reason in its log.",
    )


def _bearer(headers: Headers) -> bytes:
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        raise Unauthorized("This server requires a token.", "Send the header Authorization: Bearer TOKEN.")
    # Reject several headers, because a proxy in front may use another one than this server.
    match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        raise Unauthorized("The Authorization header has no bearer token.", "Send Authorization: Bearer TOKEN, once.")
    return match[1]
