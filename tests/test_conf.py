"""``conf/``: the systemd unit is one that systemd reads, and that starts a command line of ours."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from janitor.cli.options import REFUSED
from janitor.control.server import STOP_SECONDS
from tests.janitor.cli.test_help import resolve
from tests.support import require_tool
from tms_core.cli.outcome import BUSY, USAGE
from tms_core.cli.serve import serve

CONF = Path(__file__).parents[1] / "conf"
UNIT, SERVE_UNIT = CONF / "tms-janitor.service", CONF / "tms-serve.service"


def entries(unit: Path = UNIT) -> dict[str, list[str]]:
    """Return a unit's lines by name, with the section before it; a name may be given several times."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in unit.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(f"{section}.{name}", []).append(value)
    return found


def test_the_unit_starts_the_daemon_by_a_command_line_that_parses() -> None:
    [line] = entries()["Service.ExecStart"]
    program, *words = shlex.split(line)
    assert Path(program).name == "janitor"
    assert words[0] == "run"
    assert "--once" not in words
    resolve(shlex.join(words))


def test_the_unit_reloads_by_the_signal_that_sweeps_and_stops_by_the_one_that_ends() -> None:
    found = entries()
    assert found["Service.ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert found["Service.KillSignal"] == ["SIGTERM"]
    # A stop waits for the batch under way, then for answers through the control socket.
    assert int(found["Service.TimeoutStopSec"][0]) >= 3 * STOP_SECONDS


def test_the_unit_does_not_start_anew_what_would_end_the_same_way() -> None:
    found = entries()
    assert found["Service.Restart"] == ["on-failure"]
    assert set(found["Service.RestartPreventExitStatus"][0].split()) == {str(USAGE), str(REFUSED), str(BUSY)}


def test_serve_unit_starts_tms_serve_and_stops_and_reloads_by_its_signals() -> None:
    found = entries(SERVE_UNIT)
    program, *words = shlex.split(found["Service.ExecStart"][0])
    assert (Path(program).name, words[0]) == ("tms", "serve")
    serve.make_context(
        "serve", [word.replace("/etc/tms-janitor/tms.yaml", str(CONF / "standalone.yaml")) for word in words[1:]]
    )
    assert found["Service.ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert found["Service.KillSignal"] == ["SIGTERM"]
    assert set(found["Service.RestartPreventExitStatus"][0].split()) == {str(USAGE), str(BUSY)}


@pytest.mark.parametrize("shipped", [UNIT, SERVE_UNIT], ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, shipped: Path) -> None:
    analyze = require_tool("systemd-analyze", "apt-get install systemd")
    unit = tmp_path / shipped.name
    text = shipped.read_text(encoding="utf-8")
    unit.write_text(re.sub(r"/opt/tms-janitor/bin/\w+", sys.executable, text))
    found = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@pytest.mark.parametrize("wrong", ["ExecStart=", "Restart=sometimes", "NoSuchThing=1"])
def test_given_a_unit_with_a_mistake_then_systemd_says_so(tmp_path: Path, wrong: str) -> None:
    analyze = require_tool("systemd-analyze", "apt-get install systemd")
    unit = tmp_path / UNIT.name
    unit.write_text(f"[Service]\nExecStart={sys.executable}\n{wrong}\n")
    found = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
    assert found.stdout + found.stderr
