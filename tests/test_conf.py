"""``conf/``: systemd accepts the units, and their command lines start."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from janitor.cli.options import REFUSED
from janitor.control.server import STOP_SECONDS
from janitor.settings import AllSettings
from tests.janitor.cli.test_help import resolve
from tests.support import require_tool
from tms_core.cli.outcome import BUSY, USAGE
from tms_core.cli.serve import serve

CONF = Path(__file__).parents[1] / "conf"
UNIT, SERVE_UNIT = CONF / "tms-janitor.service", CONF / "tms-serve.service"
ONCE_UNIT, TIMER = CONF / "tms-janitor-once.service", CONF / "tms-janitor-once.timer"


def entries(unit: Path = UNIT) -> dict[str, list[str]]:
    """Return the values of a unit by section and name; a name may have several values."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in unit.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(f"{section}.{name}", []).append(value)
    return found


def test_unit_starts_the_daemon_with_a_valid_command_line() -> None:
    [line] = entries()["Service.ExecStart"]
    program, *words = shlex.split(line)
    assert Path(program).name == "janitor"
    assert words[0] == "run"
    assert "--once" not in words
    resolve(shlex.join(words))


def test_unit_reloads_by_sighup_and_stops_by_sigterm() -> None:
    found = entries()
    assert found["Service.ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert found["Service.KillSignal"] == ["SIGTERM"]
    # A stop waits for the current batch, then for responses through the control socket.
    assert int(found["Service.TimeoutStopSec"][0]) >= 3 * STOP_SECONDS


def test_unit_does_not_restart_after_permanent_failures() -> None:
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


def verify_unit(unit: Path) -> tuple[int, str]:
    """Return the exit code and the output of ``systemd-analyze verify``."""
    analyze = require_tool("systemd-analyze", "apt-get install systemd")
    found = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("shipped", [UNIT, SERVE_UNIT, ONCE_UNIT, TIMER], ids=lambda unit: unit.name)
def test_unit_passes_the_check_of_systemd(tmp_path: Path, shipped: Path) -> None:
    for unit in {shipped, ONCE_UNIT}:  # which the timer starts
        text = unit.read_text(encoding="utf-8")
        (tmp_path / unit.name).write_text(re.sub(r"/opt/tms-janitor/bin/\w+", sys.executable, text))
    assert verify_unit(tmp_path / shipped.name) == (0, "")


def test_once_unit_runs_once_and_starts_cdap_again() -> None:
    found = entries(ONCE_UNIT)
    program, *words = shlex.split(found["Service.ExecStart"][0])
    assert Path(program).name == "janitor"
    assert words[:2] == ["run", "--once"]
    resolve(shlex.join(words))
    [holder] = found["Unit.Conflicts"]
    assert found["Unit.After"] == [holder]
    assert found["Service.ExecStopPost"][0].endswith(f"start --no-block {holder}")


def test_compose_file_starts_the_image_of_this_version_and_prometheus_finds_both() -> None:
    compose = yaml.safe_load((CONF.parent / "compose.yaml").read_text(encoding="utf-8"))
    server, prometheus = compose["services"]["tms"], compose["services"]["prometheus"]
    assert server["image"] == f"${{TMS_IMAGE:-tms-janitor:{version('tms-janitor')}}}"
    assert (server["entrypoint"], server["command"][0]) == (["tms"], "serve")
    serve.make_context("serve", server["command"][1:])
    settings = AllSettings()
    scraped = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped["scrape_configs"]}
    assert targets == {
        "tms-janitor-server": [f"{settings.server.host}:{settings.server.port}"],
        "tms-janitor": [f"{settings.janitor.http.host}:{settings.janitor.http.port}"],
    }
    alerts = (CONF / "prometheus/rules.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'job="([^"]+)"', alerts)) <= set(targets)
    selectors = set(re.findall(r'job=~?"([^"]+)"', alerts))
    assert all(any(re.fullmatch(selector, job) for selector in selectors) for job in targets)
    assert all((CONF.parent / source.split(":")[0]).is_file() for source in prometheus["volumes"] if "/rules" in source)


@pytest.mark.parametrize("wrong", ["ExecStart=", "Restart=sometimes", "NoSuchThing=1"])
def test_unit_with_a_mistake_is_found_by_systemd(tmp_path: Path, wrong: str) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(f"[Service]\nExecStart={sys.executable}\n{wrong}\n")
    assert verify_unit(unit)[1]
