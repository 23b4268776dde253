"""The Java helper: its errors, and a single build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop import java as module
from tests.interop.java import Interop, JavaFailed


def test_missing_maven_names_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("java", "javac"):
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install maven" in (Interop.available() or "")


def test_failed_java_command_reports_its_message(java: Interop, tmp_path: Path) -> None:
    with pytest.raises(JavaFailed, match="no table 'nope': meta, message or payload"):
        java.run("raw", tmp_path, "nope")


@pytest.mark.parametrize("arguments", [["bogus"], ["prune"], ["prune", "somewhere", "--rows", "1"], ["fill", "--now"]])
def test_wrong_java_command_line_is_rejected(java: Interop, arguments: list[str]) -> None:
    with pytest.raises(JavaFailed, match="IllegalArgumentException"):
        java.run(*arguments)


def test_finished_build_does_not_call_maven_again(java: Interop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_call", pytest.fail)
    java.build()
