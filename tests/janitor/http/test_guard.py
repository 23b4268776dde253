"""The token of the status page and the metrics."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from janitor.http.guard import guarded
from tms_core.clock import SystemClock
from tms_core.errors import ConfigurationError
from tms_core.web.failed_attempts import FailedAttempts

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "token"
    found.touch(0o600)
    found.write_text(f"{TOKEN}\n")
    return found


def client(file: Path | None) -> TestClient:
    inner = Starlette(routes=[Route("/{path:path}", lambda _: PlainTextResponse("served"))])
    return TestClient(guarded(inner, file))


def basic(user: str, password: str) -> str:
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/status", "/healthz/", "//healthz"])
@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer", 401),
        (TOKEN, 401),
        (basic("anybody", TOKEN), 200),
        (basic(TOKEN, ""), 401),
        ("Basic !!", 401),
    ],
)
def test_request_without_the_token_is_rejected(file: Path, path: str, given: str | None, status: int) -> None:
    answer = client(file).get(path, headers={} if given is None else {"authorization": given})
    assert answer.status_code == status
    assert (answer.text == "served") == (status == 200)
    assert ("www-authenticate" in answer.headers) == (status == 401)


def test_probe_needs_no_token_and_no_file_means_no_token(file: Path) -> None:
    assert [client(file).get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
    assert client(None).get("/").status_code == 200


def test_token_file_that_changes_counts_at_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    asking = client(file)
    file.write_text("f" * 32)
    assert asking.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 401
    assert asking.get("/", headers={"authorization": f"Bearer {'f' * 32}"}).status_code == 200
    file.unlink()
    for _ in range(3):
        answer = asking.get("/", headers={"authorization": f"Bearer {'f' * 32}"})
        assert (answer.status_code, answer.json()["code"]) == (503, "TMS-CONFIGURATION")
        assert str(file) not in answer.text
    assert [str(file) in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("token", "mode", "message"),
    [("x" * 31, 0o600, "fewer than 32 bytes"), (TOKEN, 0o644, "by other users"), (TOKEN, 0o620, "by other users")],
)
def test_token_that_is_short_or_open_to_others_is_rejected(file: Path, token: str, mode: int, message: str) -> None:
    file.write_text(token)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=message):
        client(file)


def test_only_wrong_tokens_count_as_failed_attempts(file: Path) -> None:
    class DeletionCount(FailedAttempts):
        async def delay(self, address: str) -> None:
            self.note(address)

    failed = DeletionCount(SystemClock())
    asking = TestClient(guarded(Starlette(), file, failed))
    for token in ("wrong", TOKEN, "wrong"):
        asking.get("/", headers={"authorization": f"Bearer {token}"})
    assert [round(count) for count, _ in failed._failed.values()] == [2]
