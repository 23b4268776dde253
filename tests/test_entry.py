"""The start of a command, also as the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from janitor.cli import main as janitor_main
from janitor.state.records import Note
from janitor.state.sqlite.state import SqliteState
from tests.support import require_or_skip, require_tool
from tms_core.cli import entry
from tms_core.cli import main as tms_main

#: A program whose import prints a line and does not end.
SLOW = """
import sys, time, types
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "slow":
            print("started", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Slow())
from tms_core.cli.entry import main
main("slow")
"""


#: A program for the time before the start of the command; it ends at the end of its input.
EARLY = """
import sys
print("started", flush=True)
sys.stdin.readline()
"""


#: A command that checks that all standard streams are open on the null device.
CHECKING = """
import os, sys
def main():
    sys.stdin.read()
    for stream in (sys.stdout, sys.stderr):
        print("text", file=stream, flush=True)
    null = os.stat(os.devnull).st_rdev
    raise SystemExit(7 if all(os.fstat(number).st_rdev == null for number in range(3)) else 8)
"""


@pytest.fixture
def first_process() -> list[str]:
    """Return the start of a command line whose process is the first process of a process namespace."""
    unshare = require_tool("unshare", "apt-get install util-linux")
    command = [unshare, "--pid", "--fork", "--kill-child"]
    if os.getuid():
        command.append("--map-root-user")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        require_or_skip("this user cannot create a process namespace; run it as root")
    return command


def test_first_process_ends_by_sigterm_during_its_imports(first_process: list[str]) -> None:
    with subprocess.Popen([*first_process, sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        [child] = _children(process.pid)
        os.kill(child, signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_closed_standard_streams_are_the_null_device(tmp_path: Path) -> None:
    (tmp_path / "checking.py").write_text(CHECKING)
    script = f"exec {sys.executable} -c \"from tms_core.cli.entry import main; main('checking')\" <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 7


def test_full_standard_output_is_an_error() -> None:
    tms = Path(sys.executable).with_name("tms")
    script = f"exec {tms} admin token ada >/dev/full"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("TMS-ERROR")) == (1, 1)
    assert "Standard output" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("blocked", [True, False], ids=["blocked as in images", "not blocked"])
def test_sigterm_before_the_imports_is_kept(tmp_path: Path, first_process: list[str], blocked: bool) -> None:
    if subprocess.run(["env", "--block-signal=TERM", "true"], capture_output=True, check=False).returncode:
        require_or_skip("env blocks no signals; it is that of GNU coreutils 8.31 or newer that does")
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    (tmp_path / "ended.py").write_text("def main():\n    raise SystemExit(7)\n")
    command = tmp_path / "command"
    interpreter = f"/usr/bin/env -S --block-signal=TERM {sys.executable}" if blocked else sys.executable
    command.write_text(f"#!{interpreter}\nfrom tms_core.cli.entry import main\nmain('ended')\n")
    command.chmod(0o755)
    with subprocess.Popen(
        [*first_process, str(command)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "started\n"
        [child] = _children(process.pid)
        os.kill(child, signal.SIGTERM)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(timeout=60) == (128 + signal.SIGTERM if blocked else 7)


def test_sigterm_of_any_other_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["tms", "--version"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def _children(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(number) for number in children.split()]


# --- start-up time ---------------------------------------------------------------------------------------------------

#: The modules with slow imports, which a help text does not need.
HEAVY = {
    "apscheduler", "fastavro", "happybase", "httpx2", "plyvel", "plyvel_next", "prometheus_client", "pyarrow",
    "pydantic", "pyspark", "rich", "starlette", "thriftpy2", "uvicorn", "janitor.app.session", "tms_core.client",
    "tms_core.settings.models",
}  # fmt: skip

#: A program that runs a command and prints which of the named modules it has imported.
IMPORTED = """
import atexit, sys
name, module, heavy = sys.argv[0], sys.argv[1], sys.argv[2].split(",")
atexit.register(lambda: print("imported:", *sorted(set(heavy) & set(sys.modules))))
sys.argv = [name, *sys.argv[3:]]
from tms_core.cli import entry
entry.main(module)
"""


@pytest.mark.parametrize("program", ["janitor", "tms"])
@pytest.mark.parametrize("typed", [["--version"], ["--help"], [], "complete"], ids=str)
def test_question_about_a_program_imports_nothing_slow(program: str, typed: list[str] | str) -> None:
    module = {"janitor": "janitor.cli.main", "tms": "tms_core.cli.main"}[program]
    completing = {f"_{program.upper()}_COMPLETE": "bash_complete", "COMP_WORDS": f"{program} ", "COMP_CWORD": "1"}
    done = _run(module, **completing) if isinstance(typed, str) else _run(module, *typed)
    shown, _, imported = done.stdout.rpartition("imported:")
    assert imported.split() == []
    assert shown or done.stderr


def commands(group: click.Group, *before: str) -> list[str]:
    """Return the words of each command of a program, including the commands of groups."""
    found, context = [], click.Context(group)
    for name in group.list_commands(context):
        found.append(" ".join([*before, name]))
        if isinstance(command := group.get_command(context, name), click.Group):
            found += commands(command, *before, name)
    return found


@pytest.mark.parametrize("words", commands(janitor_main.cli))
def test_question_about_a_janitor_command_imports_nothing_slow(words: str) -> None:
    assert _imported_by("janitor.cli.main", *words.split(), "--help") <= {"rich"}


@pytest.mark.parametrize("words", commands(tms_main.cli))
def test_question_about_a_tms_command_imports_nothing_slow(words: str) -> None:
    of_the_janitor = words in ("admin backup", "admin restore")
    assert _imported_by("tms_core.cli.main", *words.split(), "--help") <= ({"rich"} if of_the_janitor else set())


def test_completion_of_a_topic_imports_no_client_and_settings() -> None:
    environ = {"_TMS_COMPLETE": "bash_complete", "COMP_WORDS": "tms topic show de", "COMP_CWORD": "3"}
    assert _imported_by("tms_core.cli.main", **environ, TMS_URL="http://127.0.0.1:9") == set()


@pytest.mark.parametrize("option", ["--leveldb store", "--config janitor.yaml", ""])
def test_completion_by_the_janitor_is_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.chdir(tmp_path)
    state = tmp_path / ("store.janitor" if option else "data/messaging.janitor")
    with SqliteState(state) as made:
        made.save_note(Note.TOPICS, [["default", "orders", 1, 60]])
    (tmp_path / "janitor.yaml").write_text("storage: {leveldb: {path: store}}")
    words = f"janitor topic {option}{' ' if option else ''}de"
    environ = {"_JANITOR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = _run("janitor.cli.main", **environ)
    shown, _, imported = done.stdout.rpartition("imported:")
    assert shown == "plain,default:orders\n"
    assert set(imported.split()) <= {"plyvel", "plyvel_next", "rich"}


def test_run_on_hbase_imports_no_leveldb_and_no_web_server() -> None:
    imported = _imported_by("janitor.cli.main", "run", "--once", "--hbase", "127.0.0.1:9", "--format", "json")
    assert {"happybase", "janitor.app.session"} <= imported
    assert not imported & {"apscheduler", "httpx2", "plyvel", "plyvel_next", "pyarrow", "starlette", "uvicorn"}


def _imported_by(module: str, *arguments: str, **environ: str) -> set[str]:
    done = _run(module, *arguments, **environ)
    return set(done.stdout.rpartition("imported:")[2].split())


def _run(module: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, module, ",".join(HEAVY), *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("program", [janitor_main, tms_main], ids=["janitor", "tms"])
def test_list_of_commands_shows_the_short_help_of_each_command(program: ModuleType) -> None:
    group: click.Group = program.cli
    context = click.Context(group)
    formatter = click.HelpFormatter(width=200)
    group.format_commands(context, formatter)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert f"{name} " in formatter.getvalue()
        assert f" {command.get_short_help_str(100)}\n" in formatter.getvalue(), name
