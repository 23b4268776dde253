"""Secrets never appear in logs, responses, errors or settings, and open ports are reported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from janitor.cli.main import execute as janitor
from tests.server.client import JSON, Client
from tests.server.conftest import serving
from tests.server.identities import RULES, Identities, JwtIdentities, TokenIdentities
from tests.support import raising
from tms_core.errors import StoreError
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.server.serving import exposure_warnings
from tms_core.settings.models import Settings, load
from tms_core.topic import TopicId

PATH = "/v1/namespaces/default/topics/t"


@pytest.fixture(params=[TokenIdentities, JwtIdentities])
def identities(request: pytest.FixtureRequest, tmp_path: Path) -> Identities:
    made: Identities = request.param(tmp_path)
    return made


def test_debug_log_and_answers_contain_no_token(
    identities: Identities, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    tokens = [identities.good("owner"), identities.wrong("owner"), identities.expired("owner")]
    tokens.append(identities.good("stranger"))
    with serving(gate=identities.gate, access_log=True) as server:
        server.service.create_topic(TopicId("default", "t"), {})
        monkeypatch.setattr(server.service, "delete_topic", raising(StoreError("The disk is gone.")))
        monkeypatch.setattr(server.service, "update_topic", raising(RuntimeError))
        messages = []
        for token in tokens:
            for scheme in ("Bearer ", "Basic ", ""):
                known = {"authorization": scheme + token, "content_type": JSON}
                with Client(server.port) as client:
                    messages += [client.ask("POST", f"{PATH}/publish", b'{"messages": ["a"]}', **known)]
                    messages += [client.ask("POST", f"{PATH}/publish", b"nonsense", **known)]
                    messages += [client.ask("GET", f"/nothing?access_token={token}", b"", **known)]
                    messages += [client.ask("DELETE", PATH, b"", **known)]
                    messages += [client.ask("PUT", f"{PATH}/properties", b"{}", **known)]
    assert {answer.status for answer in messages} == {200, 400, 401, 403, 404, 500}
    assert "Traceback" in caplog.text
    assert "POST /v1/namespaces/default/topics/t/publish 200" in caplog.text
    assert not [token for token in tokens if token in caplog.text]
    assert not [token for token in tokens for answer in messages if token in f"{answer.headers} {answer.text}"]


def test_access_log_encodes_a_line_break_in_a_path(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tms_core.access")
    with serving(access_log=True) as server, Client(server.port) as client:
        assert client.ask("GET", "/a%0aINFO%20forged").status == 404
    assert "GET /a%0AINFO%20forged 404" in caplog.text


def test_access_log_names_the_principal(identities: Identities, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tms_core.access")
    with serving(gate=identities.gate, access_log=True) as server, Client(server.port) as client:
        client.ask("GET", "/metrics", b"", authorization=f"Bearer {identities.good('observer')}")
        client.ask("GET", PATH, b"", authorization=f"Bearer {identities.good('observer')}")
        client.ask("GET", "/metrics", b"", authorization=f"Bearer {identities.wrong('observer')}")
    ends = [record.getMessage().rpartition("ms")[2] for record in caplog.records if record.name == "tms_core.access"]
    assert ends == [" observer", " observer", ""]


def test_shown_settings_have_only_the_path_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = new_token()
    line = token_line("ada", token)
    (tmp_path / "secret-tokens").write_text(line)
    config = tmp_path / "tms.yaml"
    config.write_text("server: {auth: {kind: tokens, tokens_file: secret-tokens}}\n")
    settings = load(config, {}, {}).settings
    assert janitor(["config", "show", "--config", str(config)]) == 0
    for text in (repr(settings), str(settings.model_dump()), capsys.readouterr().out):
        assert "secret-tokens" in text
        assert token not in text
        assert line.rpartition("$")[2] not in text


# --- unauthenticated paths -------------------------------------------------------------------------------------------

TOKENS = {"kind": "tokens", "tokens_file": "t", "rules": RULES}
OPEN = {"allow_without_token": True}


@pytest.mark.parametrize(
    ("server", "transactions", "messages"),
    [
        ({}, {"thrift": "127.0.0.1:1"}, []),
        ({"auth": TOKENS}, {"thrift": "localhost:1"}, []),
        ({"auth": TOKENS, "host": "10.0.0.1"}, {"thrift": "[::1]:1"}, ["server.tls"]),
        ({"auth": TOKENS, "host": "10.0.0.1", "tls": {"certificate": "c", "key": "k"}}, {"thrift": "127.0.0.1:1"}, []),
        ({"auth": TOKENS | {"rules": []}}, {"thrift": "127.0.0.1:1"}, ["server.auth.rules"]),
        ({}, {"thrift": "0.0.0.0:1"} | OPEN, ["set transactions.admin_token_file"]),
        # Without the setting, the server refuses to start.
        ({}, {"thrift": "0.0.0.0:1"}, []),
        ({}, {"thrift": "0.0.0.0:1", "source": "thrift"} | OPEN, []),
        ({"auth": TOKENS}, {"thrift": "tx-1:1"} | OPEN, ["set transactions.admin_token_file"]),
    ],
)
def test_serve_warns_of_settings_that_expose_the_server(
    server: dict[str, object], transactions: dict[str, object], messages: list[str]
) -> None:
    settings = Settings.model_validate({"server": server, "transactions": transactions})
    sentences = list(exposure_warnings(settings))
    assert len(sentences) == len(messages)
    for sentence, part in zip(sentences, messages, strict=True):
        assert part in sentence
