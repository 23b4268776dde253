"""The ``tms`` command: ``admin release`` makes a store usable for CDAP, or explains why it cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import NOW_MS, topic
from tests.support import raising, record_calls
from tms_core.cli.main import execute, main
from tms_core.cli.remote import Remote
from tms_core.settings import models
from tms_core.tables.base import KEYS
from tms_core.tables.leveldb.store import LevelDBStore

MESSAGES = "system.tms.message"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one table file in the message folder, named as C++ LevelDB leaves it when it is killed."""
    folder = tmp_path / "messaging"
    with LevelDBStore(folder, create=True) as store:
        topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS)
        store.message.compact(b"", b"\xff")
    [table] = (folder / MESSAGES).glob("*.sst")
    table.rename(table.with_suffix(".ldb"))
    return folder


def test_release_after_a_crash_renames_tables_for_cdap(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert execute(["admin", "release", str(folder)]) == 0
        assert {path.suffix for path in folder.glob("*/*.[ls][ds][bt]")} == {".sst"}
        assert capsys.readouterr().out == f"{folder} can be opened by CDAP\n"
    with LevelDBStore(folder) as store:
        assert len(store.message.read(KEYS, b"", None, 10).items) == 1


def test_release_of_a_missing_store_exits_1_and_creates_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["admin", "release", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(tmp_path / "nowhere") in captured.err
    assert "[TMS-STORE-NOT-FOUND]" in captured.err
    assert "storage.leveldb.path" in captured.err
    assert list(tmp_path.iterdir()) == []


def make_layout_of_cdap_6(folder: Path) -> None:
    (folder / "cdap_system.tms.message.orders.1").mkdir()


def damage(folder: Path) -> None:
    (folder / MESSAGES / "CURRENT").write_text("nonsense\n")


@pytest.mark.parametrize(
    ("harm", "code", "message"), [(make_layout_of_cdap_6, 2, "CDAP 6"), (damage, 1, "[TMS-STORE]")]
)
def test_release_of_another_or_a_damaged_store_is_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], code: int, message: str
) -> None:
    harm(folder)
    assert execute(["admin", "release", str(folder)]) == code
    assert message in capsys.readouterr().err


def test_release_of_an_open_store_exits_4_and_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LevelDBStore(folder):
        before = sorted(path.name for path in (folder / MESSAGES).iterdir())
        assert execute(["admin", "release", str(folder)]) == 4
        assert sorted(path.name for path in (folder / MESSAGES).iterdir()) == before
    assert "[TMS-STORE-BUSY]" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["admin"], ["release"], ["admin", "release"], ["admin", "release", "--force"]])
def test_wrong_usage_exits_2_without_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tms" in captured.err


@pytest.mark.parametrize("arguments", [["--help"], ["admin", "-h"], ["admin", "release", "--help"], ["--version"]])
def test_help_and_version_are_on_standard_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(arguments) == 0
    captured = capsys.readouterr()
    assert "tms" in captured.out
    assert captured.err == ""


def test_help_of_release_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    execute(["admin", "release", "--help"])
    assert "tms admin release data/messaging" in capsys.readouterr().out


def test_release_interrupted_by_ctrl_c_exits_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tms_core.tables.leveldb.store.release", raising(KeyboardInterrupt))
    assert execute(["admin", "release", str(folder)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_program_exits_with_the_code_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["admin", "release", str(tmp_path / "nowhere")])
    assert stopped.value.code == 1


def test_installed_program_runs() -> None:
    program = Path(sys.executable).with_name("tms")
    assert subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.startswith("tms, ")


def test_command_that_asks_a_server_loads_its_settings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = record_calls(monkeypatch, models, "load")
    Remote(None, None, None, None, "table").client().close()
    assert len(loaded) == 1


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_help_of_a_janitor_command_shows_tms_in_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["admin", command, "--help"])
    shown = capsys.readouterr().out.partition("Example")[2]
    assert f"tms admin {command} " in shown
    assert f"janitor {command} " not in shown


@pytest.mark.parametrize(
    ("name", "option", "value", "words"),
    [
        ("TMS_CONFIG", "--config", "nowhere.yaml", ["topic", "list"]),
        ("TMS_CONFIG", "--config", "nowhere.yaml", ["serve"]),
        ("TMS_TOKEN_FILE", "--token-file", "/", ["topic", "list"]),
    ],
)
def test_wrong_value_names_the_variable_or_the_option_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    option: str,
    value: str,
    words: list[str],
) -> None:
    assert execute([*words, option, value]) == 2
    message = capsys.readouterr().err
    assert (f"Invalid value for '{option}'" in message, name in message) == (True, False)
    monkeypatch.setenv(name, value)
    assert execute(words) == 2
    message = capsys.readouterr().err
    assert (f"Invalid value for '{name}'" in message, option in message) == (True, False)


@pytest.mark.parametrize("address", ["tephra-1", "tephra-1:", "tephra-1:0", "tephra-1:99999"])
def test_tx_server_that_is_no_address_is_wrong_usage(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert execute(["tx", "list", "--tx-server", address]) == 2
    assert f"invalid address {address!r}: use HOST:PORT" in capsys.readouterr().err
