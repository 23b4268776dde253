"""From ``server.auth`` to the gate that stands before the routes."""

from __future__ import annotations

from pathlib import Path

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError
from tms_core.server.auth.gate import Authenticator, Gate
from tms_core.server.auth.rules import Rules
from tms_core.server.auth.tokens import Tokens
from tms_core.settings.models import AuthSettings


def make_gate(settings: AuthSettings, clock: Clock) -> Gate | None:
    """What lets requests pass; None: everybody may do everything, which the settings allow on loopback only.

    Args:
        settings: ``server.auth``.
        clock: by which tokens expire and files are looked at again.

    Raises:
        ConfigurationError: the tokens or keys cannot be used, or PyJWT is not installed.
    """
    authenticator: Authenticator
    if settings.kind == "none":
        return None
    if settings.kind == "tokens":
        authenticator = Tokens(_given(settings.tokens_file), clock)
    else:
        authenticator = _jwt(settings, _given(settings.key_file), clock)
    return Gate(authenticator, Rules(settings.rules), clock)


def _given(path: Path | None) -> Path:
    if path is None:
        raise ConfigurationError("server.auth names no file of tokens or keys.", "Set tokens_file or key_file.")
    return path


def _jwt(settings: AuthSettings, path: Path, clock: Clock) -> Authenticator:
    try:
        from tms_core.server.auth.jwt import Jwt  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "server.auth.kind is jwt, and PyJWT is not installed.", "pip install 'tms-janitor[jwt]'"
        ) from error
    return Jwt(settings, path, clock)
