"""The pyjanitor package has the same import name; beside it nothing may be believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from janitor.cli.main import execute


def test_command_beside_pyjanitor_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "pyjanitor-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pyjanitor\nVersion: 1.0\n")
    assert execute(["config", "show"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    capsys.readouterr()
    assert execute(["config", "show"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "pyjanitor is installed in this environment" in err
    assert "Install each of the two into a separate environment" in err
