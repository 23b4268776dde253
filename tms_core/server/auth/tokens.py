"""Random tokens issued by an operator; the server stores their SHA-256 only.

A token has 256 random bits, so it cannot be found by trying, whatever the hash. A slow hash (bcrypt, scrypt) protects
words that people choose, and would cost each publish a tenth of a second. Therefore operators cannot bring their own
secrets: :func:`new_token` makes them. Every entry is compared in constant time, even after a match, so the duration
reveals nothing about the entries.
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
from tms_core.server.auth.gate import Identity, is_principal

logger = get_logger(__name__)

#: Random bytes in a token.
_BYTES = 32
#: The prefix of tokens, so that scanners find secrets that were published by mistake.
_MARK = "tms_"
_LINE = re.compile(r"(\S+):\s+sha256\$([0-9a-f]{64})\s*(?:#.*)?")


class _Entry(NamedTuple):
    principal: str
    digest: bytes


class Tokens:
    """The tokens of a file.

    At the start there has to be one, since a server that refuses every client is a mistake. A file that becomes empty
    later revokes all tokens, so every request is refused.

    Args:
        path: lines of ``PRINCIPAL: sha256$HEX``, of which a principal may have several; ``#`` starts a comment.

    Raises:
        ConfigurationError: the file cannot be used, or has no token in it.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        name = "server.auth.tokens_file"
        self._path = path
        self._file = WatchedFiles({name: path}, partial(_entries, f"{name} {path}"), clock, refuse_writers=True)
        self._warn_of_readers()
        if not self._file.value:
            raise ConfigurationError(
                f"server.auth.tokens_file {path} has no token in it.",
                "Make a token and its line: tms admin token PRINCIPAL",
            )

    def refresh(self) -> bool:
        """See :class:`~tms_core.server.auth.gate.Authenticator`."""
        changed = self._file.refresh()
        if changed:
            self._warn_of_readers()
            if not self._file.value:
                logger.warning("the tokens file no longer contains a token; every request is refused until it has one")
        return changed

    def identify(self, token: bytes) -> Identity:
        """Return the identity of a token.

        Raises:
            Unauthorized: the token is unknown or expired.
        """
        digest = sha256(token).digest()
        found = [entry.principal for entry in self._file.value if hmac.compare_digest(entry.digest, digest)]
        if not found:
            raise Unauthorized("Unknown or expired token.", "Ask the operator of this server for one.")
        return Identity(found[0], None)

    def _warn_of_readers(self) -> None:
        if self._file.is_public:
            logger.warning("%s can be read by every user of this machine; chmod o-r %s", self._file.name, self._path)


def new_token(random: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Make a new token.

    Args:
        random: gives so many random bytes.
    """
    return _MARK + urlsafe_b64encode(random(_BYTES)).decode("ascii").rstrip("=")


def token_line(principal: str, token: str) -> str:
    """Return the line of a token in the file: its principal and its hash.

    Raises:
        ConfigurationError: the name of the principal is invalid.
    """
    if not is_principal(principal):
        raise ConfigurationError(
            f"{quoted(principal)} cannot be the name of a principal.", "Write one without spaces; * means everybody."
        )
    return f"{principal}: sha256${sha256(token.encode('ascii')).hexdigest()}"


def _entries(file: str, contents: bytes) -> list[_Entry]:
    """Return the lines of a tokens file; errors have line numbers only, since a line may contain a secret."""
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
                "The token itself must not be in the file. Make a token and its line: tms admin token PRINCIPAL",
            )
        digest = bytes.fromhex(match[2])
        if digest in seen:
            raise ConfigurationError(
                f"{file}, line {number} is the token of line {seen[digest]} again.",
                "Give every principal a separate token.",
            )
        seen[digest] = number
        entries.append(_Entry(match[1], digest))
    return entries
