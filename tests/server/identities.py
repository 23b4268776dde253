"""Principals with valid, invalid and expired tokens of both kinds."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.builders import NOW_MS
from tests.server.client import JSON, Answer, Client
from tests.server.conftest import Serving
from tms_core.clock import ManualClock
from tms_core.server.auth.gate import Gate
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.server.serving import make_gate
from tms_core.settings.models import AuthSettings
from tms_core.web.failed_attempts import FailedAttempts

#: The topics and the permissions of each principal. The stranger has no permissions in ``default``.
ROLES = {
    "admin": ("default:*", ["admin"]),
    "publisher": ("default:*", ["publish"]),
    "consumer": ("default:*", ["consume"]),
    "owner": ("default:*", ["admin", "publish", "consume"]),
    "observer": ("none:*", ["observe"]),
    "stranger": ("other:*", ["admin", "publish", "consume"]),
}
RULES = [{"principal": role, "topics": [topics], "can": can} for role, (topics, can) in ROLES.items()]


class Identities(Protocol):
    """Tokens of one kind, and a gate that verifies them."""

    gate: Gate

    def good(self, role: str) -> str: ...

    def wrong(self, role: str) -> str: ...

    def expired(self, role: str) -> str: ...


class TokenIdentities:
    """Tokens of a file; an expired token is one that was removed from the file."""

    def __init__(self, folder: Path) -> None:
        self._good = {role: new_token() for role in ROLES}
        self._expired = {role: new_token() for role in ROLES}
        file, clock = folder / "tokens", ManualClock(NOW_MS)
        file.touch(0o600)
        pairs = [*self._good.items(), *self._expired.items()]
        file.write_text("".join(f"{token_line(role, token)}\n" for role, token in pairs))
        self.gate = gate_of(clock, kind="tokens", tokens_file=file)
        for role, token in self._expired.items():
            assert self.gate.principal(bearer(token)) == role
        file.write_text("".join(f"{token_line(role, token)}\n" for role, token in self._good.items()))
        clock.advance(1000)

    def good(self, role: str) -> str:
        return self._good[role]

    def wrong(self, role: str) -> str:
        return new_token()

    def expired(self, role: str) -> str:
        return self._expired[role]


class JwtIdentities:
    """JSON Web Tokens of an issuer with a P-256 key."""

    def __init__(self, folder: Path) -> None:
        self._clock = ManualClock(NOW_MS)
        self._key, self._other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        file = folder / "issuer.pem"
        file.write_bytes(self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        self.gate = gate_of(self._clock, kind="jwt", key_file=file)

    def good(self, role: str) -> str:
        return self._sign(self._key, role, timedelta(hours=1))

    def wrong(self, role: str) -> str:
        return self._sign(self._other, role, timedelta(hours=1))

    def expired(self, role: str) -> str:
        return self._sign(self._key, role, timedelta(hours=-1))

    def _sign(self, key: ec.EllipticCurvePrivateKey, role: str, lives: timedelta) -> str:
        expires = self._clock.now_ms() // 1000 + int(lives.total_seconds())
        return jwt.encode({"sub": role, "exp": expires}, key, "ES256")


class UnlimitedAttempts(FailedAttempts):
    """Failed attempts without delays."""

    def note(self, address: str) -> float:
        return 0.0


def gate_of(clock: ManualClock, *, patient: bool = True, **settings: Any) -> Gate:
    """Return the gate of settings; a patient gate does not delay requests after failed attempts."""
    gate = make_gate(AuthSettings.model_validate({"rules": RULES, **settings}), clock)
    assert gate is not None
    if patient:
        gate.failed = UnlimitedAttempts(clock)
    return gate


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"localhost"), (b"authorization", b"Bearer " + token.encode())]


class PrincipalClient:
    """A client of a server that sends each request with the token of a principal.

    Args:
        tokens: the token of each principal.
        prefix: the prefix of all paths.
    """

    def __init__(self, server: Serving, client: Client, tokens: dict[str, str], prefix: str = "") -> None:
        self.server, self.client, self.tokens, self._prefix = server, client, tokens, prefix

    def headers(self, who: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens.get(who, who)}", "content_type": JSON}

    def ask(self, who: str, method: str, path: str, body: object = None, **headers: str) -> Answer:
        data = json.dumps({} if body is None else body).encode()
        return self.client.ask(method, f"{self._prefix}{path}", data, **{**self.headers(who), **headers})
