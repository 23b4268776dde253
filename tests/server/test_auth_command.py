"""``tms admin token``: makes tokens, shows each once, and takes no secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.builders import NOW_MS
from tms_core.cli.main import execute
from tms_core.clock import ManualClock
from tms_core.server.auth.tokens import Tokens


def test_given_a_principal_when_a_token_is_made_then_it_is_shown_with_a_line_that_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["admin", "token", "ada"]) == 0
    out, err = capsys.readouterr()
    token, line = out.splitlines()
    assert "The token of ada, shown this once." in err
    assert token not in err
    assert token not in line
    (tmp_path / "tokens").write_text(line)
    assert Tokens(tmp_path / "tokens", ManualClock(NOW_MS)).identify(token.encode()).principal == "ada"


def test_given_a_file_for_the_token_when_it_is_made_then_it_is_its_owners_and_only_the_line_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ada.token"
    assert execute(["admin", "token", "ada", "--token-file", str(file)]) == 0
    out, err = capsys.readouterr()
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in out + err
    (tmp_path / "tokens").write_text(out)
    assert Tokens(tmp_path / "tokens", ManualClock(NOW_MS)).identify(token.encode()).principal == "ada"


def test_given_a_file_that_is_there_when_a_token_would_go_into_it_then_it_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ada.token"
    file.write_text("mine")
    assert execute(["admin", "token", "ada", "--token-file", str(file)]) == 2
    assert file.read_text() == "mine"
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be created: File exists." in err
    assert "Give --token-file a new file." in err


def test_the_help_shows_what_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["admin", "token", "--help"]) == 0
    assert "tms admin token ada --token-file ada.token >> tokens" in capsys.readouterr().out
