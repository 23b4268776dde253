"""JSON Web Tokens: valid tokens, and each reason to reject one."""

from __future__ import annotations

import json
import sys
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.builders import NOW_MS
from tests.server.identities import bearer, gate_of
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, Unauthorized, Unavailable
from tms_core.server.auth.jwt import Jwt
from tms_core.server.serving import make_gate
from tms_core.settings.models import AuthSettings

NOW = NOW_MS // 1000
RSA = rsa.generate_private_key(65537, 2048)
P256, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
P384, P521, KOBLITZ = (ec.generate_private_key(curve()) for curve in (ec.SECP384R1, ec.SECP521R1, ec.SECP256K1))
ED = ed25519.Ed25519PrivateKey.generate()
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
CLAIMS = {"sub": "ada", "exp": NOW + 3600}

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def jwk(key: PrivateKey, **more: object) -> dict[str, object]:
    public = key.public_key()
    if isinstance(public, rsa.RSAPublicKey):
        return RSAAlgorithm.to_jwk(public, as_dict=True) | more
    if isinstance(public, ec.EllipticCurvePublicKey):
        return ECAlgorithm.to_jwk(public, as_dict=True) | more
    return OKPAlgorithm.to_jwk(public, as_dict=True) | more


def jwks(*keys: dict[str, object]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def sign(key: Any = P256, algorithm: str = "ES256", kid: str | None = None, **claims: Any) -> str:
    headers = None if kid is None else {"kid": kid}
    wanted = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    return jwt.encode(wanted, key, algorithm, headers=headers)


def issuer(folder: Path, contents: bytes | None = None, **settings: Any) -> Jwt:
    """Return a verifier of tokens of an issuer with these keys, by default P256."""
    path = folder / "keys"
    path.write_bytes(pem(P256) if contents is None else contents)
    wanted = {"kind": "jwt", "key_file": path, "algorithms": ALGORITHMS, **settings}
    return Jwt(AuthSettings.model_validate(wanted), path, ManualClock(NOW_MS))


def refused(known: Jwt, token: str | bytes) -> str:
    with pytest.raises(Unauthorized) as caught:
        known.identify(token.encode() if isinstance(token, str) else token)
    return str(caught.value)


def segment(value: object) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


# --- valid tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        *((RSA, name) for name in ALGORITHMS if name[1] == "S" and name[0] in "RP"),
        (P256, "ES256"),
        (P384, "ES384"),
        (P521, "ES512"),
        (ED, "EdDSA"),
    ],
)
def test_jwt_signed_with_any_kind_of_key_is_good(tmp_path: Path, key: PrivateKey, algorithm: str) -> None:
    for contents in (pem(key), jwks(jwk(key)), jwks(jwk(key, alg=algorithm, use="sig", kid="1"))):
        principal, expires_ms = issuer(tmp_path, contents).identify(sign(key, algorithm).encode())
        assert (principal, expires_ms) == ("ada", NOW_MS + 3_630_000)


def test_jwt_is_verified_with_the_key_that_it_names(tmp_path: Path) -> None:
    known = issuer(tmp_path, jwks(jwk(P256, kid="old"), jwk(OTHER, kid="new"), jwk(RSA, kid="rsa")))
    assert known.identify(sign(P256, kid="old").encode()).principal == "ada"
    assert known.identify(sign(OTHER, kid="new").encode()).principal == "ada"
    assert "InvalidSignatureError" in refused(known, sign(P256, kid="new"))
    assert "do not match exactly one key" in refused(known, sign(P256, kid="newest"))
    assert "do not match exactly one key" in refused(known, sign(P256, kid="rsa"))
    # A token without a key id must match exactly one key.
    assert "exactly one" in refused(known, sign(P256))
    assert known.identify(sign(RSA, "RS256").encode()).principal == "ada"
    assert "exactly one" in refused(issuer(tmp_path, jwks(jwk(P256), jwk(OTHER))), sign(P256))
    known = issuer(tmp_path, jwks(jwk(OTHER, kid="new"), jwk(P256, kid="new"), jwk(P256, kid="new")))
    assert [known.identify(sign(key, kid="new").encode()).principal for key in (OTHER, P256)] == ["ada", "ada"]
    forged = sign(ec.generate_private_key(ec.SECP256R1()), kid="new")
    assert "InvalidSignatureError" in refused(known, forged)


def test_pem_key_verifies_a_token_with_any_key_id(tmp_path: Path) -> None:
    assert issuer(tmp_path).identify(sign(kid="whatever").encode()).principal == "ada"


def test_principal_claim_setting_selects_the_claim(tmp_path: Path) -> None:
    known = issuer(tmp_path, principal_claim="email")
    assert known.identify(sign(email="ada@example.com").encode()).principal == "ada@example.com"
    assert "its claim email is not a valid name of a principal" in refused(known, sign())


# --- algorithms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "HS512", "ES256K", "RS256", "", "ES384", ["ES256"], 5])
def test_jwt_with_another_algorithm_than_its_key_is_rejected(tmp_path: Path, algorithm: object) -> None:
    known = issuer(tmp_path)
    _, payload, signature = sign().split(".")
    for end in (signature, ""):
        refused(known, f"{segment({'alg': algorithm, 'typ': 'JWT'})}.{payload}.{end}")
    refused(known, f"{segment({'typ': 'JWT'})}.{payload}.{signature}")


@pytest.mark.parametrize("contents", [pem(RSA), jwks(jwk(RSA))], ids=["pem", "jwks"])
def test_jwt_signed_with_the_public_key_as_a_secret_is_rejected(tmp_path: Path, contents: bytes) -> None:
    known = issuer(tmp_path, contents)
    header, payload = segment({"alg": "HS256", "typ": "JWT"}), segment(CLAIMS)
    for secret in (pem(RSA), pem(RSA).strip(), contents):
        algorithm = jwt.get_algorithm_by_name("HS256")
        signature = algorithm.sign(f"{header}.{payload}".encode(), secret)
        refused(known, f"{header}.{payload}.{urlsafe_b64encode(signature).decode().rstrip('=')}")


def test_jwt_with_a_disallowed_algorithm_is_rejected(tmp_path: Path) -> None:
    known = issuer(tmp_path, pem(RSA), algorithms=["RS256"])
    assert known.identify(sign(RSA, "RS256").encode()).principal == "ada"
    assert "do not match exactly one key" in refused(known, sign(RSA, "PS256"))
    known = issuer(tmp_path, jwks(jwk(RSA, alg="PS256")))
    assert known.identify(sign(RSA, "PS256").encode()).principal == "ada"
    assert "do not match exactly one key" in refused(known, sign(RSA, "RS256"))


# --- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "error_text"),
    [
        ({"exp": None}, "MissingRequiredClaimError"),
        ({"exp": NOW - 30}, "it has expired"),
        ({"exp": NOW - 3600}, "it has expired"),
        ({"exp": str(NOW + 3600)}, "its times are not numbers of seconds"),
        ({"exp": True}, "its times are not numbers of seconds"),
        ({"exp": -1}, "its times are not numbers of seconds"),
        ({"exp": 10**400}, "its times are not numbers of seconds"),
        ({"exp": float("inf")}, "its times are not numbers of seconds"),
        ({"exp": float("nan")}, "its times are not numbers of seconds"),
        ({"exp": {}}, "its times are not numbers of seconds"),
        ({"nbf": NOW + 31}, "it is not valid yet"),
        ({"nbf": "now"}, "its times are not numbers of seconds"),
        ({"sub": None}, "its claim sub is not a valid name of a principal"),
        ({"sub": ""}, "its claim sub is not a valid name of a principal"),
        ({"sub": "*"}, "its claim sub is not a valid name of a principal"),
        ({"sub": "a\nb"}, "its claim sub is not a valid name of a principal"),
        ({"sub": "a" * 257}, "its claim sub is not a valid name of a principal"),
        ({"aud": "another"}, "InvalidAudienceError"),
        ({"aud": ["another"]}, "InvalidAudienceError"),
    ],
)
def test_jwt_with_wrong_claims_is_rejected(tmp_path: Path, claims: dict[str, Any], error_text: str) -> None:
    assert error_text in refused(issuer(tmp_path), sign(**claims))


@pytest.mark.parametrize("claims", [{"exp": NOW - 29}, {"exp": NOW + 0.5}, {"nbf": NOW + 30}, {"nbf": NOW - 1}])
def test_jwt_within_the_clock_leeway_is_good(tmp_path: Path, claims: dict[str, Any]) -> None:
    assert issuer(tmp_path).identify(sign(**claims).encode()).principal == "ada"


def test_jwt_of_another_issuer_or_audience_is_rejected(tmp_path: Path) -> None:
    known = issuer(tmp_path, issuer="https://id.example.com", audience="tms")
    right: dict[str, Any] = {"iss": "https://id.example.com", "aud": "tms"}
    assert known.identify(sign(**right).encode()).principal == "ada"
    assert known.identify(sign(**right | {"aud": ["x", "tms"]}).encode()).principal == "ada"
    ways: list[dict[str, Any]] = [{"iss": None}, {"iss": "https://id.example.com/"}, {"aud": None}, {"aud": "TMS"}]
    for wrong in [*ways, {"aud": []}]:
        refused(known, sign(**right | wrong))


# --- malformed tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"...",
        b"a.b.c",
        b"tms_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",
        segment([]).encode() + b".e30.e30",
        (urlsafe_b64encode(b"[" * 5000).decode().rstrip("=") + ".e30.e30").encode(),
        (segment({"alg": "ES256", "kid": 5}) + ".e30.e30").encode(),
        (segment({"alg": "ES256", "crit": ["x"], "x": 1}) + ".e30.e30").encode(),
        (segment({"alg": "ES256", "crit": ["b64"], "b64": False}) + "..e30").encode(),
    ],
)
def test_malformed_jwt_is_rejected(tmp_path: Path, token: bytes) -> None:
    refused(issuer(tmp_path), token)


TOKEN = sign().encode()


@given(st.integers(0, len(TOKEN) - 1), st.sampled_from(b".=-_Aaz09"), st.integers(0, 2))
def test_any_change_of_a_valid_jwt_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, at: int, letter: int, gone: int
) -> None:
    changed = TOKEN[:at] + bytes([letter]) + TOKEN[at + gone :]
    if changed != TOKEN:
        refused(issuer(tmp_path_factory.mktemp("keys")), changed)


@given(st.binary(max_size=200))
def test_jwt_of_any_bytes_is_rejected(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    known = issuer(tmp_path_factory.mktemp("keys"))
    text = urlsafe_b64encode(noise).decode().rstrip("=")
    header, payload, signature = TOKEN.decode().split(".")
    for token in (f"{text}.{payload}.{signature}", f"{header}.{text}.{signature}", text):
        refused(known, token)


def test_rejection_of_a_jwt_shows_no_part_of_it(tmp_path: Path) -> None:
    known = issuer(tmp_path, audience="tms")
    for token in (sign(sub="secretly"), sign(OTHER, sub="secretly"), sign(aud="secretly")):
        message = refused(known, token)
        assert "secretly" not in message
        assert not any(part in message for part in token.split("."))
        assert message.startswith("The token is not valid for this server: ")
        assert message.endswith("issuer.")
    assert b"secretly" in urlsafe_b64decode(sign(sub="secretly").split(".")[1] + "==")


# --- key files -------------------------------------------------------------------------------------------------------


def private_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


#: By name, because keys differ between processes and the ids of tests may not.
BAD_FILES = {
    "nothing": (b"", "PEM"),
    "a word": (b"hunter2", "PEM"),
    "a private key": (private_pem(P256), "openssl pkey"),
    "broken JSON": (b"{", "RFC 7517"),
    "no keys": (b"{}", "RFC 7517"),
    "keys of another type": (b'{"keys": 5}', "RFC 7517"),
    "a key of another type": (b'{"keys": ["hunter2"]}', "RFC 7517"),
    "an empty set": (b'{"keys": []}', "server.auth.algorithms"),
    "a shared key": (jwks({"kty": "oct", "k": "hunter2"}), "private"),
    "a private member": (jwks(jwk(P256, d="hunter2")), "private"),
    "a key to encrypt": (jwks(jwk(P256, use="enc")), "server.auth.algorithms"),
    "an algorithm to encrypt": (jwks(jwk(RSA, alg="RSA-OAEP")), "server.auth.algorithms"),
    "an algorithm of secrets": (jwks(jwk(RSA, alg="HS256")), "server.auth.algorithms"),
    "half a key": (jwks({"kty": "EC", "crv": "P-256"}), "server.auth.algorithms"),
    "another curve": (pem(KOBLITZ), "server.auth.algorithms"),
    "a short key": (pem(rsa.generate_private_key(65537, 1024)), "2048 bits"),  # noqa: S505 it is refused
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_key_file_is_rejected_and_not_quoted(tmp_path: Path, name: str) -> None:
    contents, error_text = BAD_FILES[name]
    with pytest.raises(ConfigurationError) as caught:
        issuer(tmp_path, contents)
    message = str(caught.value)
    assert message.startswith(f"server.auth.key_file {tmp_path / 'keys'} ")
    assert error_text in message
    assert "hunter2" not in message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_MEMBERS = ("kty", "alg", "use", "crv", "n", "e", "x", "y")


@given(st.sampled_from([jwk(RSA), jwk(P256), jwk(ED)]), st.dictionaries(st.sampled_from(_MEMBERS), _JSON, max_size=4))
def test_jwk_with_any_members_keeps_other_keys_usable(
    tmp_path_factory: pytest.TempPathFactory, key: dict[str, object], members: dict[str, object]
) -> None:
    good = jwk(P256, kid="good", alg="ES256")
    found = issuer(tmp_path_factory.mktemp("keys"), jwks(key | {"kid": "odd"} | members, good))
    assert found.identify(sign(kid="good").encode()).principal == "ada"


@given(_JSON)
def test_jwks_of_any_json_is_rejected(tmp_path_factory: pytest.TempPathFactory, keys: object) -> None:
    folder = tmp_path_factory.mktemp("keys")
    for contents in ({"keys": keys}, {"keys": [keys]}):
        with pytest.raises(ConfigurationError):
            issuer(folder, json.dumps(contents).encode())


def test_jwks_that_is_too_deep_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="JWKS"):
        issuer(tmp_path, b'{"keys": ' + b"[" * 100_000)


def test_key_file_writable_by_others_is_rejected(tmp_path: Path) -> None:
    issuer(tmp_path)
    (tmp_path / "keys").chmod(0o646)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        issuer(tmp_path)


def test_key_file_that_is_replaced_changes_which_tokens_are_good(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", ManualClock(NOW_MS)
    path.write_bytes(pem(P256))
    gate = gate_of(clock, kind="jwt", key_file=path)
    old, new = bearer(sign(P256)), bearer(sign(OTHER))
    assert gate.principal(old) == "ada"
    path.write_bytes(pem(OTHER))
    clock.advance(1000)
    with pytest.raises(Unauthorized):
        gate.principal(old)
    assert gate.principal(new) == "ada"


def test_jwt_that_a_bad_key_file_may_verify_is_not_wrong(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", ManualClock(NOW_MS)
    path.write_bytes(jwks(jwk(P256, kid="old")))
    gate = gate_of(clock, kind="jwt", key_file=path)
    path.write_bytes(b"half writ")
    clock.advance(1000)
    for token in (sign(OTHER, kid="new"), sign(OTHER)):
        with pytest.raises(Unavailable):
            gate.principal(bearer(token))
    assert gate.principal(bearer(sign(P256, kid="old"))) == "ada"
    for token in (sign(exp=NOW - 3600), "no token"):
        with pytest.raises(Unauthorized):
            gate.principal(bearer(token))
    path.write_bytes(jwks(jwk(OTHER, kid="new")))
    clock.advance(1000)
    assert gate.principal(bearer(sign(OTHER, kid="new"))) == "ada"


def test_cached_jwt_is_rejected_after_it_expires(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", ManualClock(NOW_MS)
    path.write_bytes(pem(P256))
    gate = gate_of(clock, kind="jwt", key_file=path)
    token = bearer(sign(exp=NOW - 20))
    for _ in range(10):
        assert gate.principal(token) == "ada"
        clock.advance(1000)
    with pytest.raises(Unauthorized, match="it has expired"):
        gate.principal(token)


# --- requirements of each kind ---------------------------------------------------------------------------------------


def test_jwt_without_pyjwt_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tms_core.server.auth.jwt")
    monkeypatch.setitem(sys.modules, "jwt", None)
    settings = AuthSettings(kind="jwt", key_file=tmp_path / "keys")
    with pytest.raises(ConfigurationError, match=r"pip install .\.\[jwt\]"):
        make_gate(settings, ManualClock(NOW_MS))


@pytest.mark.parametrize("kind", ["tokens", "jwt"])
def test_gate_without_a_file_is_rejected(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"server\.auth\.tokens_file"):
        make_gate(AuthSettings.model_construct(kind=kind), ManualClock(NOW_MS))
