"""The first moments of a command, as the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import require_or_skip, require_tool
from tms_core.cli import entry

#: A module that takes for ever to be imported, and says that it has begun.
SLOW = """
import sys, time, types
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "slow":
            print("begun", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Slow())
from tms_core.cli.entry import main
main("slow")
"""


def test_given_the_first_process_of_a_container_when_sigterm_comes_while_it_imports_then_it_ends() -> None:
    unshare = require_tool("unshare", "apt-get install util-linux")
    command = [unshare, "--pid", "--fork", "--kill-child"]
    if os.getuid():
        command.append("--map-root-user")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        require_or_skip("this user may make no process namespace; run it as root")
    with subprocess.Popen([*command, sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        [child] = _children(process.pid)
        os.kill(child, signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_given_any_other_process_when_a_command_begins_then_sigterm_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["tms", "--version"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def _children(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(number) for number in children.split()]
