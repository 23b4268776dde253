"""Random tokens issued by an operator; the server stores only their SHA-256.

A token has 256 random bits, so a fast hash suffices. Operators cannot choose tokens themselves: a chosen secret would
need a slow hash (bcrypt, scrypt), which would cost each publish a tenth of a second. Every entry is compared in
constant time, even after a match, so the duration reveals nothing about the entries.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, Unauthorized, quoted
from tms_core.logs.loggers import get_logger
from tms_core.security.files import WatchedFiles
from tms_core.server.auth.gate import Identity, is_principal, unverifiable_error

logger = get_logger(__name__)

#: The number of random bytes in a token.
_BYTES = 32
#: The prefix of tokens, with which secret scanners find leaked tokens.
_PREFIX = "tms_"
_LINE = re.compile(r"(\S+):\s+sha256\$([0-9a-f]{64})\s*(?:#.*)?")


class _Entry(NamedTuple):
    principal: str
    digest: bytes


class Tokens:
    """The tokens of a file.

    A server does not start with an empty file, because it would reject every client. If the file becomes empty later,
    all tokens are revoked.

    Args:
        path: a file with lines of ``PRINCIPAL: sha256$HEX``; a principal may have several lines, and ``#`` starts a
            comment.

    Raises:
        ConfigurationError: the file cannot be used, or has no token.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        name = "server.auth.tokens_file"
        self._path = path
        self._file = WatchedFiles({name: path}, partial(_entries, f"{name} {path}"), clock, refuse_writers=True)
        self._warn_of_readers()
        if not self._file.value:
            raise ConfigurationError(
                f"server.auth.tokens_file {path} has no token.",
                "Create a token and its line: tms admin token PRINCIPAL",
            )

    def refresh(self) -> bool:
        """See :class:`~tms_core.server.auth.gate.Authenticator`."""
        changed = self._file.refresh()
        if changed:
            self._warn_of_readers()
            if not self._file.value:
                logger.warning("the tokens file no longer contains a token; every request is rejected until it does")
        return changed

    def identify(self, token: bytes) -> Identity:
        """Return the identity of a token.

        Raises:
            Unauthorized: the token is unknown or expired.
            Unavailable: the token is unknown, and the file is unusable.
        """
        digest = sha256(token).digest()
        found = [entry.principal for entry in self._file.value if hmac.compare_digest(entry.digest, digest)]
        if not found and self._file.is_outdated:
            raise unverifiable_error()
        if not found:
            raise Unauthorized("Unknown or expired token.", "Ask the operator of this server for a token.")
        return Identity(found[0], None)

    def _warn_of_readers(self) -> None:
        if self._file.is_public:
            logger.warning("every user of this machine can read %s; run: chmod o-r %s", self._file.name, self._path)


def new_token(random: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Create a token.

    Args:
        random: returns a number of random bytes.
    """
    return _PREFIX + urlsafe_b64encode(random(_BYTES)).decode("ascii").rstrip("=")


def token_line(principal: str, token: str) -> str:
    """Return the line of a token for the tokens file: the principal and the hash.

    Raises:
        ConfigurationError: the name of the principal is invalid.
    """
    if not is_principal(principal):
        raise ConfigurationError(
            f"{quoted(principal)} cannot be the name of a principal.",
            "Use printable characters without spaces; the name must not start with * or #.",
        )
    return f"{principal}: sha256${sha256(token.encode('ascii')).hexdigest()}"


def _entries(file: str, contents: bytes) -> list[_Entry]:
    """Parse a tokens file; errors contain only line numbers, because a line may contain a secret."""
    entries: list[_Entry] = []
    seen: dict[bytes, int] = {}
    for number, line in enumerate(contents.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None or not is_principal(match[1]):
            raise ConfigurationError(
                f"{file}, line {number} is not PRINCIPAL: sha256$ and 64 hex digits.",
                "The file must not contain the token itself. Create a token and its line: tms admin token PRINCIPAL",
            )
        digest = bytes.fromhex(match[2])
        if digest in seen:
            raise ConfigurationError(
                f"{file}, line {number} repeats the token of line {seen[digest]}.",
                "Create a separate token for each principal: tms admin token PRINCIPAL",
            )
        seen[digest] = number
        entries.append(_Entry(match[1], digest))
    return entries
