"""Authentication and permissions of each request (``docs/reference/rest-consumers.md``, "Permissions of each route").

The token of a request says who sent it; :class:`Authenticator` has two kinds, tokens of a file and JWT. Verifying one
costs up to a tenth of a millisecond, and producers send the same one with every message, so those that were good are
remembered by their SHA-256, until they expire or what they were verified with changes. A look-up by the hash of a
secret gives nothing away: measuring its time would tell about a hash, and not about the token. Invalid tokens are never
cached, so requests without a valid token use no memory.

Rules (``server.auth.rules``) only allow; what none of them allows is refused. They are part of the settings and change
with a restart, so what was decided once for a principal and a topic holds, and the next request costs a look into a
dictionary.

A file of tokens or keys (:class:`WatchedFile`) is in force until a better one takes its place, without a restart. It is
read again at most once a second, when it is needed, and whole: it is small, and comparing its bytes misses no change,
as comparing times of modification may. A file that cannot be used (gone, half written, open to others) leaves the
former in force, since refusing every client would be worse; the log says so once.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, Forbidden, Unauthorized, shortened
from tms_core.failed_attempts import MOST_WAITING, FailedAttempts
from tms_core.logs.loggers import get_logger
from tms_core.server.auth.quotas import Quotas
from tms_core.settings.models import AuthQuota, AuthRule
from tms_core.topic import TopicId, remembered

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
logger = get_logger(__name__)

#: How old what was read may be before the file is looked at again, in milliseconds.
LOOK_MS = 1000

T = TypeVar("T")


class Need(Enum):
    """The check of a request before it is handled."""

    #: Nothing; no token is asked for.
    NOTHING = "nothing"
    #: A principal that is known, whatever the rules say of it.
    KNOWN = "known"
    #: At least one of the three on the topic.
    ANY = "any"
    ADMIN = "admin"
    PUBLISH = "publish"
    CONSUME = "consume"
    #: To read the metrics; no topic's.
    OBSERVE = "observe"


def _length(_: str, topic: TopicId, *more: object) -> int:
    return len(topic.namespace) + len(topic.topic) + sum(len(name) for name in more if isinstance(name, str))


class Rules:
    """The rules in force."""

    def __init__(self, rules: Sequence[AuthRule]) -> None:
        self._rules = tuple(rules)
        self._remembered = remembered(_DECISIONS, _length)(self.rights)
        self._remembered_names = remembered(_DECISIONS, _length)(self._may_use)

    def rights(self, principal: str, topic: TopicId) -> frozenset[str]:
        """Return all that a principal may do on a topic, looked up anew: ``admin``, ``publish``, ``consume``."""
        return frozenset(right for rule in self._of(principal, topic) for right in rule.can) - {Need.OBSERVE.value}

    def allow(self, principal: str, topic: TopicId, need: Need, name: str = "") -> bool:
        """Return whether a principal has the permission ``need`` on a topic.

        Args:
            name: of the consumer or producer that it would act as; empty: of none.
        """
        if name and need in (Need.CONSUME, Need.PUBLISH):
            return self._remembered_names(principal, topic, need, name)
        rights = self._remembered(principal, topic)
        return bool(rights) if need is Need.ANY else need.value in rights

    def observes(self, principal: str) -> bool:
        """Return whether a principal may read the metrics."""
        return any(Need.OBSERVE.value in rule.can for rule in self._rules if rule.principal in (principal, EVERYBODY))

    def _may_use(self, principal: str, topic: TopicId, need: Need, name: str) -> bool:
        rules = [rule for rule in self._of(principal, topic) if need.value in rule.can]
        patterns = (rule.consumers if need is Need.CONSUME else rule.producers for rule in rules)
        return any(fnmatchcase(name, pattern) for names in patterns for pattern in names)

    def _of(self, principal: str, topic: TopicId) -> Iterator[AuthRule]:
        """Yield the rules that are about a principal and a topic."""
        for rule in self._rules:
            if rule.principal in (principal, EVERYBODY) and any(_matches(topic, pattern) for pattern in rule.topics):
                yield rule


def _matches(topic: TopicId, pattern: str) -> bool:
    """Return whether a rule's pattern covers a topic; namespace and topic match apart, so ``*`` crosses no colon."""
    namespace, _, name = pattern.partition(":")
    return fnmatchcase(topic.namespace, namespace) and fnmatchcase(topic.topic, name)


def is_principal(name: str) -> bool:
    """Return whether a name can be a principal's: visible characters, neither everybody's nor like the start of a
    comment.
    """
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
        """Look whether what tokens are verified with has changed; True: a valid token may have become invalid."""
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
        connections: how many the server takes at once.

    Attributes:
        quotas: what each principal may use.
        failed: the failed attempts of late, by address.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        rules: Rules,
        clock: Clock,
        quotas: Sequence[AuthQuota] = (),
        connections: int = 10 * MOST_WAITING,
    ) -> None:
        self._authenticator = authenticator
        self._rules = rules
        self._clock = clock
        self.quotas = Quotas(quotas, clock)
        self.failed = FailedAttempts(clock, min(MOST_WAITING, connections // 10))
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

    def require(self, principal: str, topic: TopicId, need: Need, name: str = "") -> None:
        """Let a principal do something on a topic.

        Args:
            name: of the consumer or producer that it would act as; empty: of none.

        Raises:
            Forbidden: no rule allows it. It is the same whether there is such a topic or not.
        """
        if not self._rules.allow(principal, topic, need, name):
            what = "do anything" if need is Need.ANY else need.value
            named = f" as {shortened(name)}" if name and need in (Need.CONSUME, Need.PUBLISH) else ""
            raise Forbidden(
                f"{principal} may not {what} on {topic}{named}.",
                "Ask the operator of this server for a rule (server.auth).",
            )

    def require_observer(self, principal: str) -> None:
        """Let a principal read the metrics.

        Raises:
            Forbidden: no rule allows it.
        """
        if not self._rules.observes(principal):
            raise Forbidden(
                f"{principal} may not read the metrics.", "Ask the operator of this server for a rule (can: [observe])."
            )

    def administered(self, principal: str, topics: Iterable[TopicId]) -> int:
        """Return how many of some topics a principal may administer: those that count for its quota."""
        return sum(Need.ADMIN.value in self._rules.rights(principal, topic) for topic in topics)

    def visible(self, principal: str, topics: Iterable[TopicId]) -> list[TopicId]:
        """Return those of some topics on which a principal may do something."""
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


class WatchedFile(Generic[T]):
    """A file and what its contents mean.

    Args:
        setting: that names it, for errors.
        parse: makes sense of its contents; or raises ``ConfigurationError``, which starts with the first argument, the
            file's name and setting, and must not quote them.
        private: whether it is warned of when others may read it.

    Raises:
        ConfigurationError: it cannot be read, others may write it, or ``parse`` refuses it.
    """

    def __init__(
        self, setting: str, path: Path, parse: Callable[[str, bytes], T], clock: Clock, *, private: bool
    ) -> None:
        self._path = path
        self._name = f"{setting} {path}"
        self._parse = parse
        self._clock = clock
        self._private = private
        self._complaint = ""
        self._looked_ms = clock.running_ms()
        self._contents, mode = self._read()
        #: What the contents mean that are in force.
        self.value = parse(self._name, self._contents)
        self._warn_of_readers(mode)

    def refresh(self) -> bool:
        """Look at the file again, if it is time to; True: there is another :attr:`value` now."""
        now_ms = self._clock.running_ms()
        if now_ms - self._looked_ms < LOOK_MS:
            return False
        self._looked_ms = now_ms
        try:
            contents, mode = self._read()
            changed = contents != self._contents
            value = self._parse(self._name, contents) if changed else self.value
        except ConfigurationError as error:
            if str(error) != self._complaint:
                logger.error("%s Until then the former contents are in force.", error)
            self._complaint = str(error)
            return False
        self._complaint = ""
        if changed:
            self._contents, self.value = contents, value
            logger.info("%s has changed and is in force", self._name)
            self._warn_of_readers(mode)
        return changed

    def _read(self) -> tuple[bytes, int]:
        """Contents and mode, both of the same file, even while another is put in its place."""
        try:
            with self._path.open("rb") as file:
                contents, mode = file.read(), os.fstat(file.fileno()).st_mode
        except OSError as error:
            raise ConfigurationError(
                f"{self._name} cannot be read: {error.strerror}.", "Give a file that this user may read."
            ) from error
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{self._name} can be written by other users, who could give themselves access.",
                f"chmod go-w {self._path}",
            )
        return contents, mode

    def _warn_of_readers(self, mode: int) -> None:
        if self._private and mode & stat.S_IROTH:
            logger.warning("%s can be read by every user of this machine; chmod o-r %s", self._name, self._path)
