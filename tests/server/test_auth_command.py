"""``tms admin token``: creates tokens, shows each once, and accepts no secret as an argument."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from tests.builders import NOW_MS
from tms_core.cli.main import execute
from tms_core.clock import ManualClock
from tms_core.server.auth.tokens import Tokens


def test_admin_token_shows_the_token_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["admin", "token", "ada"]) == 0
    out, err = capsys.readouterr()
    token, line = out.splitlines()
    assert "The token of ada, shown only once." in err
    assert token not in err
    assert token not in line
    (tmp_path / "tokens").write_text(line)
    assert Tokens(tmp_path / "tokens", ManualClock(NOW_MS)).identify(token.encode()).principal == "ada"


def test_admin_token_into_a_file_prints_only_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ada.token"
    assert execute(["admin", "token", "ada", "--token-file", str(file)]) == 0
    out, err = capsys.readouterr()
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in out + err
    (tmp_path / "tokens").write_text(out)
    assert Tokens(tmp_path / "tokens", ManualClock(NOW_MS)).identify(token.encode()).principal == "ada"


def test_admin_token_leaves_an_existing_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ada.token"
    file.write_text("mine")
    assert execute(["admin", "token", "ada", "--token-file", str(file)]) == 2
    assert file.read_text() == "mine"
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be created: File exists." in err
    assert "--token-file" in err


def test_admin_token_on_a_full_disk_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ada.token"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        code = execute(["admin", "token", "ada", "--token-file", str(file)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    out, err = capsys.readouterr()
    assert (code, out, file.exists()) == (2, "", False)
    assert str(file) in err
    assert "--token-file" in err


def test_help_of_admin_token_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["admin", "token", "--help"]) == 0
    assert "tms admin token ada --token-file ada.token >> tokens" in capsys.readouterr().out
