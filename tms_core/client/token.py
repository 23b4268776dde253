"""The bearer token: who sends a request. It is read when it is used, and shown nowhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tms_core.errors import ConfigurationError

#: What may follow ``Bearer`` (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


class Token:
    """Where the token comes from.

    Args:
        given: the token, what returns it, or None.
        file: a file that holds it; read for each request, so that it can be replaced while the program runs.

    Raises:
        ConfigurationError: both are given.
    """

    def __init__(self, given: str | Callable[[], str] | None = None, file: Path | str | None = None) -> None:
        if given is not None and file is not None:
            raise ConfigurationError("A token and a token file are given.", "Give one of them.")
        self._given = given
        self._file = None if file is None else Path(file)

    def __repr__(self) -> str:
        return "<Token>" if self._given is not None or self._file is not None else "<no Token>"

    def headers(self) -> dict[str, str]:
        """The headers of a request that carry the token.

        Raises:
            ConfigurationError: the file cannot be read, or what was found is no token.
        """
        if self._file is not None:
            found = self._read(self._file)
        elif self._given is None:
            return {}
        else:
            found = self._given if isinstance(self._given, str) else self._given()
        if not _TOKEN.fullmatch(found):
            raise ConfigurationError("The token is not valid: it is empty, or has characters that no token has.")
        return {"authorization": f"Bearer {found}"}

    def _read(self, file: Path) -> str:
        try:
            return file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigurationError(f"The token file {file} cannot be read: {reason}.") from error
