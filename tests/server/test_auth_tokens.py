"""Tokens of a file: creation, comparison, caching, and reload without a restart."""

from __future__ import annotations

import hmac
import logging
import os
import re
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.builders import NOW_MS
from tests.server.client import JSON, Client
from tests.server.conftest import serving
from tests.server.identities import bearer, gate_of
from tests.support import record_calls, wait_until
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, Unauthorized, Unavailable, quoted
from tms_core.security import files
from tms_core.security.files import read_token
from tms_core.server.auth import gate as auth
from tms_core.server.auth.gate import Gate, Identity, Need, Rules, is_principal
from tms_core.server.auth.tokens import Tokens, new_token, token_line
from tms_core.settings.models import AuthRule
from tms_core.topic import TopicId

ADA, BOB, ADA_AGAIN = "tms_ada", "tms_bob", "tms_ada_again"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with the tokens of two principals."""
    path = tmp_path / "tokens"
    path.touch(0o600)
    write(path, ("ada", ADA), ("bob", BOB))
    return path


def write(path: Path, *tokens: tuple[str, str]) -> None:
    path.write_text("".join(f"{token_line(principal, token)}\n" for principal, token in tokens))


def rejection(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Tokens(path, ManualClock(NOW_MS))
    return str(caught.value)


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_new_token_has_256_random_bits_and_its_line_only_the_hash() -> None:
    reads = []

    def random(count: int) -> bytes:
        reads.append(count)
        return bytes(range(count))

    token = new_token(random)
    assert reads == [32]
    assert token == f"tms_{'AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8'}"
    assert token_line("ada", token) == f"ada: sha256${sha256(token.encode()).hexdigest()}"
    assert len({new_token() for _ in range(100)}) == 100


@pytest.mark.parametrize("principal", ["", "*", "#ada", "a b", "a\tb", "a\nb", "\x1b[2J", "a" * 257])
def test_token_line_of_an_invalid_principal_is_rejected(principal: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(quoted(principal))):
        token_line(principal, "x")


@given(st.text().filter(is_principal))
def test_line_of_any_name_is_read_as_its_principal(tmp_path_factory: pytest.TempPathFactory, principal: str) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(token_line(principal, ADA), encoding="utf-8")
    assert Tokens(path, ManualClock(NOW_MS)).identify(ADA.encode()) == Identity(principal, None)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_token_lookup_takes_as_many_comparisons_for_any_token(
    file: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    names = [f"token{number}" for number in range(count)]
    write(file, *(("ada", name) for name in names))
    tokens = Tokens(file, ManualClock(NOW_MS))
    compared = record_calls(monkeypatch, hmac, "compare_digest")
    counts = set()
    for name in [*names, "nobody's", ""]:
        compared.clear()
        try:
            tokens.identify(name.encode())
        except Unauthorized:
            assert name not in names
        counts.add(len(compared))
        assert {len(side) for pair in compared for side in pair} == {32}
    assert counts == {count}


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "error_text"),
    [
        ("", "has no token."),
        ("# nothing\n", "has no token."),
        ("\nada: hunter2", "line 2 "),
        ("hunter2", "line 1 "),
        ("ada: sha256$hunter2", "line 1 "),
        ("ada: sha1$" + "0" * 64, "line 1 "),
        ("ada: sha256$" + "A" * 64, "line 1 "),
        ("ada: sha256$" + "0" * 63, "line 1 "),
        ("ada sha256$" + "0" * 64, "line 1 "),
        ("*: sha256$" + "0" * 64, "line 1 "),
        ("\udcff: hunter2", "line 1 "),
        (f"{token_line('ada', ADA)}\n{token_line('bob', ADA)}", "line 2 .*line 1"),
    ],
)
def test_bad_tokens_file_is_rejected_by_line_and_not_quoted(file: Path, contents: str, error_text: str) -> None:
    file.write_bytes(contents.encode("utf-8", "surrogateescape"))
    message = rejection(file)
    assert message.startswith(f"server.auth.tokens_file {file}")
    assert re.search(error_text, message)
    assert "hunter2" not in message


def test_comment_after_the_line_of_a_token_is_ignored(file: Path) -> None:
    file.write_text(f"\n  {token_line('system:shop', ADA)}  # made in May\n")
    assert Tokens(file, ManualClock(NOW_MS)).identify(ADA.encode()).principal == "system:shop"


def test_missing_tokens_file_is_named_with_its_setting(tmp_path: Path) -> None:
    assert f"server.auth.tokens_file {tmp_path / 'none'} " in rejection(tmp_path / "none")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_tokens_file_writable_by_others_is_rejected(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert rejection(file).endswith(f"chmod go-w {file}")


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, False), (0o400, False)])
def test_tokens_file_readable_by_all_users_logs_a_warning(
    file: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    file.chmod(mode)
    Tokens(file, ManualClock(NOW_MS))
    assert (str(file) in caplog.text) == warned


# --- rotation --------------------------------------------------------------------------------------------------------


def test_tokens_file_that_changed_counts_after_a_second(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock(NOW_MS)
    gate = gate_of(clock, kind="tokens", tokens_file=file)
    assert gate.principal(bearer(BOB)) == "bob"
    write(file, ("ada", ADA), ("ada", ADA_AGAIN))
    clock.advance(999)
    assert gate.principal(bearer(BOB)) == "bob"
    clock.advance(1)
    with pytest.raises(Unauthorized):
        gate.principal(bearer(BOB))
    assert gate.principal(bearer(ADA_AGAIN)) == "ada"
    assert gate.principal(bearer(ADA)) == "ada"
    assert caplog.text.count("server.auth.tokens_file") == 1


@pytest.mark.parametrize("is_revoked", [True, False])
def test_waiting_poll_whose_token_was_revoked_gets_no_messages(file: Path, is_revoked: bool) -> None:
    clock = ManualClock(NOW_MS)
    rules = [{"principal": "bob", "topics": ["*:*"], "can": ["consume"]}]
    gate = gate_of(clock, kind="tokens", tokens_file=file, rules=rules)
    with serving(gate=gate) as server, Client(server.port) as client:
        topic = TopicId("default", "t")
        server.service.create_topic(topic)
        request = {"authorization": f"Bearer {BOB}", "content_type": JSON}
        path, body = "/v1/namespaces/default/topics/t/poll", b'{"waitSeconds": 60}'
        client.send("POST", path, body, **request)
        wait_until(lambda: server.context.waiting.polls)
        if is_revoked:
            write(file, ("ada", ADA))
        clock.advance(1000)
        server.service.publish(topic, [b"a"])
        assert len(client.answer().json) == (0 if is_revoked else 1)
        assert client.ask("POST", path, b"{}", **request).status == (401 if is_revoked else 200)


def spoil(path: Path) -> None:
    path.write_text("ada: hunter2")


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def fill(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("harm", [spoil, open_to_all, fill, Path.unlink])
def test_tokens_file_that_becomes_invalid_keeps_the_tokens_and_logs_once(
    file: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    clock = ManualClock(NOW_MS)
    tokens = Tokens(file, clock)
    for _ in range(2):
        harm(file)
        caplog.clear()
        for _ in range(3):
            clock.advance(1000)
            assert not tokens.refresh()
            assert tokens.identify(BOB.encode()).principal == "bob"
        assert caplog.text.count("Until then the previous contents are in force") == 1
        assert "hunter2" not in caplog.text
        # A later failure is logged again.
        file.touch()
        file.chmod(0o600)
        write(file, ("ada", ADA), ("bob", BOB))
        clock.advance(1000)
        assert not tokens.refresh()
    write(file, ("bob", ADA))
    clock.advance(1000)
    assert tokens.refresh()
    assert tokens.identify(ADA.encode()).principal == "bob"


@pytest.mark.parametrize("harm", [spoil, open_to_all, Path.unlink])
def test_token_that_a_bad_tokens_file_may_have_is_not_wrong(
    file: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    clock = ManualClock(NOW_MS)
    gate = gate_of(clock, kind="tokens", tokens_file=file)
    write(file, ("ada", ADA), ("bob", ADA_AGAIN))
    harm(file)
    clock.advance(1000)
    with serving(gate=gate) as server, Client(server.port) as client:
        answered = {
            token: client.ask("GET", "/v1/topics", authorization=f"Bearer {token}") for token in (BOB, ADA_AGAIN)
        }
        nameless = client.ask("GET", "/v1/topics")
    assert (answered[BOB].status, answered[ADA_AGAIN].status, nameless.status) == (200, 503, 401)
    assert answered[ADA_AGAIN].headers["x-tms-error"] == Unavailable.code
    assert "retry-after" in answered[ADA_AGAIN].headers
    assert str(file) not in answered[ADA_AGAIN].text
    assert f"server.auth.tokens_file {file}" in caplog.text


@pytest.mark.parametrize("contents", ["", "# nobody\n", "\n\n"])
def test_tokens_file_without_tokens_rejects_every_request(
    file: Path, caplog: pytest.LogCaptureFixture, contents: str
) -> None:
    clock = ManualClock(NOW_MS)
    gate = gate_of(clock, kind="tokens", tokens_file=file)
    assert gate.principal(bearer(ADA)) == "ada"
    file.write_text(contents)
    for _ in range(3):
        clock.advance(1000)
        with pytest.raises(Unauthorized):
            gate.principal(bearer(ADA))
    assert [record.levelno for record in caplog.records if "every request is rejected" in record.message] == [
        logging.WARNING
    ]
    write(file, ("ada", ADA))
    clock.advance(1000)
    assert gate.principal(bearer(ADA)) == "ada"


# --- caching ---------------------------------------------------------------------------------------------------------


class FakeVerifier:
    """A verifier of tokens, each of which is the name of its principal, except for ``wrong``.

    Attributes:
        tokens: the verified tokens.
    """

    def __init__(self, expires_ms: int | None = None) -> None:
        self.tokens: list[bytes] = []
        self.expires_ms = expires_ms
        self.changed = False

    def refresh(self) -> bool:
        return self.changed

    def identify(self, token: bytes) -> Identity:
        self.tokens.append(token)
        if token == b"wrong":
            raise Unauthorized("It is wrong.")
        return Identity(token.decode(), self.expires_ms)


def gate_with_verifier(expires_ms: int | None = None) -> tuple[FakeVerifier, ManualClock, Gate]:
    verifier, clock = FakeVerifier(expires_ms), ManualClock(NOW_MS)
    return verifier, clock, Gate(verifier, Rules([]), clock)


def test_gate_verifies_an_expired_token_again() -> None:
    verifier, clock, gate = gate_with_verifier(expires_ms=NOW_MS + 1000)
    gate.principal(bearer("ada"))
    clock.advance(999)
    gate.principal(bearer("ada"))
    assert len(verifier.tokens) == 1
    clock.advance(1)
    gate.principal(bearer("ada"))
    assert len(verifier.tokens) == 2


def test_gate_with_a_wrong_token_remembers_nothing() -> None:
    verifier, _, gate = gate_with_verifier()
    for _ in range(3):
        with pytest.raises(Unauthorized):
            gate.principal(bearer("wrong"))
    assert verifier.tokens == [b"wrong"] * 3


def test_gate_remembers_the_newest_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MAX_TOKENS", 2)
    verifier, _, gate = gate_with_verifier()
    for token in ("a", "b", "c", "c", "b", "a"):
        gate.principal(bearer(token))
    assert verifier.tokens == [b"a", b"b", b"c", b"a"]


def test_gate_caches_only_hashes_of_tokens() -> None:
    _, _, gate = gate_with_verifier()
    gate.principal(bearer("tms_secret"))
    assert set(gate._known) == {sha256(b"tms_secret").digest()}


# --- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"ada",
        b"Basic YWRhOmFkYQ==",
        b"Bearer a b",
        b"Bearer a,b",
        b"Bearer \xff",
        b"Bearer " + b"a" * 8193,
    ],
)
def test_header_without_a_bearer_token_is_rejected(value: bytes) -> None:
    verifier, _, gate = gate_with_verifier()
    with pytest.raises(Unauthorized, match="Authorization: Bearer TOKEN"):
        gate.principal([(b"authorization", value)])
    assert verifier.tokens == []


@pytest.mark.parametrize("value", [b"Bearer ada", b"bearer ada", b"BEARER   ada  "])
def test_bearer_header_ignores_case_and_spaces(value: bytes) -> None:
    _, _, gate = gate_with_verifier()
    assert gate.principal([(b"host", b"x"), (b"authorization", value)]) == "ada"


def test_request_with_two_tokens_is_rejected() -> None:
    _, _, gate = gate_with_verifier()
    with pytest.raises(Unauthorized, match="no bearer token"):
        gate.principal([*bearer("ada"), *bearer("ada")])


# --- rules -----------------------------------------------------------------------------------------------------------


def rule(principal: str, topics: list[str], *can: str) -> AuthRule:
    return AuthRule.model_validate({"principal": principal, "topics": topics, "can": can})


def test_permissions_are_those_of_all_matching_rules() -> None:
    rules = Rules(
        [
            rule("ada", ["shop:orders-*", "shop:audit"], "publish"),
            rule("ada", ["shop:orders-1"], "consume"),
            rule("*", ["public:*"], "consume"),
            rule("a*", ["other:*"], "admin"),
        ]
    )
    assert rules.permissions_of("ada", TopicId("shop", "orders-1")) == {"publish", "consume"}
    assert rules.permissions_of("ada", TopicId("shop", "audit")) == {"publish"}
    assert rules.permissions_of("ada", TopicId("shop", "audit-2")) == set()
    assert rules.permissions_of("Ada", TopicId("shop", "audit")) == set()
    assert rules.permissions_of("ada", TopicId("SHOP", "audit")) == set()
    assert rules.permissions_of("bob", TopicId("public", "x")) == {"consume"}
    # Except for ``*``, a principal is not a pattern.
    assert rules.permissions_of("ada", TopicId("other", "x")) == set()


def test_rule_pattern_matches_namespace_and_topic_separately() -> None:
    rules = Rules([rule("ada", ["prod*:x", "*:sh?red"], "consume")])
    allowed, denied = ["prod:x", "production:x", "any:shared"], ["prod:secretx:x", "any:shaared", "prod:xx"]
    topics = {name: TopicId(*name.split(":", 1)) for name in (*allowed, *denied)}
    assert [name for name, topic in topics.items() if rules.permissions_of("ada", topic)] == allowed


def test_rule_with_names_covers_only_consumers_and_producers_that_match() -> None:
    given = {"principal": "ada", "topics": ["a:*"], "can": ["consume", "publish"]}
    narrow = AuthRule.model_validate({**given, "consumers": ["ada-*"], "producers": ["p?"]})
    rules, topic = Rules([narrow, rule("ben", ["a:b"], "consume")]), TopicId("a", "b")
    for _ in range(2):
        assert rules.allow("ada", topic, Need.CONSUME)
        assert rules.allow("ada", topic, Need.CONSUME, "ada-1")
        assert not rules.allow("ada", topic, Need.CONSUME, "ben-1")
        assert rules.allow("ada", topic, Need.PUBLISH, "p1")
        assert not rules.allow("ada", topic, Need.PUBLISH, "ada-1")
        assert rules.allow("ben", topic, Need.CONSUME, "anything")
        assert not rules.allow("ben", topic, Need.PUBLISH, "p1")


def test_rule_to_observe_needs_no_topics_and_any_other_does() -> None:
    observer = AuthRule.model_validate({"principal": "prometheus", "can": ["observe"]})
    assert Rules([observer]).observes("prometheus")
    assert not Rules([observer]).observes("ada")
    assert not Rules([observer]).permissions_of("prometheus", TopicId("a", "b"))
    with pytest.raises(ValidationError) as caught:
        AuthRule.model_validate({"principal": "ada", "can": ["observe", "consume"]})
    assert [error["ctx"]["setting"] for error in caught.value.errors()] == ["topics"]


@pytest.mark.parametrize("pattern", ["*", "prod*", "a:b:c", ":x", "x:"])
def test_rule_pattern_without_one_colon_is_rejected(pattern: str) -> None:
    with pytest.raises(ValidationError, match="NAMESPACE:TOPIC"):
        rule("ada", [pattern], "consume")


@pytest.mark.parametrize(
    ("can", "let_in"),
    [("admin", {Need.ADMIN, Need.ANY}), ("publish", {Need.PUBLISH, Need.ANY}), ("consume", {Need.CONSUME, Need.ANY})],
)
def test_rule_with_one_permission_allows_no_other(can: str, let_in: set[Need]) -> None:
    rules, topic = Rules([rule("ada", ["*:*"], can)]), TopicId("a", "b")
    needs = {Need.ADMIN, Need.PUBLISH, Need.CONSUME, Need.ANY}
    for _ in range(2):
        assert {need for need in needs if rules.allow("ada", topic, need)} == let_in
    assert not {need for need in needs if rules.allow("bob", topic, need)}


def test_rules_keep_nothing_of_a_name_that_is_too_long() -> None:
    rules, topic = Rules([rule("ada", ["*:*"], "publish")]), TopicId("a", "b" * 60_000)
    assert rules.allow("ada", topic, Need.PUBLISH)
    tracemalloc.start()
    try:
        for number in range(20):
            rules.allow("ada", TopicId("a", str(number) * 60_000), Need.PUBLISH)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 60_000


def test_file_that_is_a_pipe_is_rejected_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert str(tmp_path / "pipe") in rejection(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"server\.token .*pipe"):
        read_token("server.token", tmp_path / "pipe")


def test_token_file_that_hides_its_size_is_not_read_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_BYTES", 100)
    with pytest.raises(ConfigurationError, match="100 bytes"):
        read_token("server.token", Path("/proc/self/maps"))
