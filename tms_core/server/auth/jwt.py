"""JSON Web Tokens of an external issuer, verified with its public keys; the only module that imports PyJWT.

Keys come from a file (PEM or JWKS), never from the network during a request: another program fetches the issuer's keys
and replaces the file. Each key is used only with the allowed algorithms of its type. No allowed algorithm uses a shared
secret, so a public key is never misused as a secret (RFC 8725). This module checks times itself, because PyJWT reads
the system clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, MessagingError, Unauthorized
from tms_core.security.files import WatchedFiles
from tms_core.server.auth.gate import Identity, is_principal, unverifiable_error
from tms_core.settings.models import AuthSettings

PublicKey: TypeAlias = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES = {"secp256r1": ("ES256",), "secp384r1": ("ES384",), "secp521r1": ("ES512",)}
#: The minimum size of an RSA key in bits (RFC 7518, 3.3).
_RSA_BITS = 2048
#: The tolerance for the issuer's clock, in seconds.
LEEWAY_SECONDS = 30
#: The highest time in a claim, in seconds; in milliseconds it is exact as a double.
_LAST_SECOND = 2**53 // 1000
#: The exceptions of PyJWT and cryptography for an invalid or unsupported key.
_KEY_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, UnsupportedAlgorithm)
_OPTIONS: Any = {"require": ["exp"], "verify_exp": False, "verify_nbf": False, "verify_iat": False}


class _Key(NamedTuple):
    #: The ``kid``; None: the key has no ``kid``, and matches the ``kid`` of any token.
    name: str | None
    key: PublicKey
    algorithms: list[str]


class Jwt:
    """The tokens of one issuer.

    Args:
        settings: the keys ``server.auth.*`` for kind jwt.

    Raises:
        ConfigurationError: the key file cannot be used.
    """

    def __init__(self, settings: AuthSettings, path: Path, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        name = "server.auth.key_file"
        parse = partial(_keys, settings.algorithms, f"{name} {path}")
        self._file = WatchedFiles({name: path}, parse, clock, refuse_writers=True)

    def refresh(self) -> bool:
        """See :class:`~tms_core.server.auth.gate.Authenticator`."""
        return self._file.refresh()

    def identify(self, token: bytes) -> Identity:
        """Return the identity of a token.

        Raises:
            Unauthorized: the signature is not valid, the audience is not this server, the token is not valid yet or has
                expired, or it has no principal.
            Unavailable: no key verifies the signature, and the key file is unusable.
        """
        try:
            claims = self._claims(token)
        except jwt.InvalidSignatureError as error:
            raise self._unverified(type(error).__name__) from error
        except jwt.PyJWTError as error:
            # Use only the name of the error, because PyJWT's messages may contain parts of the token.
            raise _rejection(type(error).__name__) from error
        expires_ms = self._check_times(claims)
        principal = claims.get(self._settings.principal_claim)
        if not isinstance(principal, str) or not is_principal(principal):
            raise _rejection(f"its claim {self._settings.principal_claim} is not a valid name of a principal")
        return Identity(principal, expires_ms)

    def _claims(self, token: bytes) -> Mapping[str, object]:
        header = jwt.get_unverified_header(token)
        name, algorithm = header.get("kid"), header.get("alg")
        fitting = [
            key
            for key in self._file.value
            if algorithm in key.algorithms and (name is None or key.name in (None, name))
        ]
        # A file may have several keys of one kid, for example a key twice, or a renewed key with the old kid.
        has_one_kid = name is not None and all(key.name == name for key in fitting)
        if not fitting or (len(fitting) > 1 and not has_one_kid):
            raise self._unverified("its kid and algorithm do not match exactly one key of this server")
        for key in fitting[:-1]:
            with suppress(jwt.InvalidSignatureError):
                return self._decode(token, key)
        return self._decode(token, fitting[-1])

    def _decode(self, token: bytes, key: _Key) -> Mapping[str, object]:
        claims: dict[str, object] = jwt.decode(
            token,
            key.key,
            algorithms=key.algorithms,
            audience=self._settings.audience,
            issuer=self._settings.issuer,
            options=_OPTIONS,
        )
        return claims

    def _unverified(self, why: str) -> MessagingError:
        """Return the error for a token that no key in force verifies."""
        return unverifiable_error() if self._file.is_outdated else _rejection(why)

    def _check_times(self, claims: Mapping[str, object]) -> int:
        """Check the times of a token, and return its expiry in milliseconds.

        Raises:
            Unauthorized: the token has expired, is not valid yet, or has invalid times.
        """
        now_ms, leeway_ms = self._clock.now_ms(), LEEWAY_SECONDS * 1000
        expires_ms = _milliseconds(claims["exp"]) + leeway_ms
        if expires_ms <= now_ms:
            raise _rejection("it has expired")
        if "nbf" in claims and _milliseconds(claims["nbf"]) - leeway_ms > now_ms:
            raise _rejection("it is not valid yet")
        return expires_ms


def _rejection(why: str) -> Unauthorized:
    return Unauthorized(f"The token is not valid for this server: {why}.", "Request a new token from its issuer.")


def _milliseconds(seconds: object) -> int:
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= _LAST_SECOND:
        return int(seconds * 1000)
    raise _rejection("its times are not numbers of seconds")


# --- keys ------------------------------------------------------------------------------------------------------------


def _keys(allowed: Collection[str], file: str, contents: bytes) -> list[_Key]:
    """Return the keys of a file that have an allowed algorithm."""
    found = _from_jwks(file, contents) if contents.lstrip().startswith(b"{") else _from_pem(file, contents)
    keys = [_Key(key.name, key.key, [name for name in key.algorithms if name in allowed]) for key in found]
    usable = [key for key in keys if key.algorithms]
    if not usable:
        raise ConfigurationError(
            f"{file} has no key for any of server.auth.algorithms ({', '.join(allowed)}).",
            f"Use a key of RSA with at least {_RSA_BITS} bits, P-256, P-384, P-521 or Ed25519.",
        )
    return usable


def _from_pem(file: str, contents: bytes) -> Iterator[_Key]:
    try:
        key = load_pem_public_key(contents)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{file} is neither a public key in PEM nor a JWKS.",
            "Export the public key of the issuer: openssl pkey -in PRIVATE.pem -pubout",
        ) from error
    yield from _usable(None, key, None)


def _from_jwks(file: str, contents: bytes) -> Iterator[_Key]:
    for entry in _jwks_entries(file, contents):
        if "d" in entry or "k" in entry:
            raise ConfigurationError(
                f"{file} contains a private or shared key.", "Remove it, because only the issuer may have it."
            )
        if entry.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(entry).key
        except (jwt.PyJWTError, *_KEY_ERRORS):
            continue  # an unsupported or invalid key; other keys may be usable
        name = entry.get("kid")
        yield from _usable(name if isinstance(name, str) else None, key, entry.get("alg"))


def _jwks_entries(file: str, contents: bytes) -> list[dict[str, Any]]:
    try:
        found = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise _jwks_error(file) from error
    entries = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _jwks_error(file)
    return entries


def _jwks_error(file: str) -> ConfigurationError:
    return ConfigurationError(f"{file} is not a JWKS.", 'A JWKS is a JSON object {"keys": […]}, see RFC 7517.')


def _usable(name: str | None, key: object, only: object) -> Iterator[_Key]:
    """Yield a key with its ``alg``, or with all algorithms of its type; yield nothing for an unsupported key."""
    if isinstance(key, RSAPublicKey) and key.key_size >= _RSA_BITS:
        fitting: tuple[str, ...] = _RSA
    elif isinstance(key, EllipticCurvePublicKey):
        fitting = _CURVES.get(key.curve.name, ())
    elif isinstance(key, Ed25519PublicKey):
        fitting = ("EdDSA",)
    else:
        return
    yield _Key(name, key, [algorithm for algorithm in fitting if only in (None, algorithm)])
