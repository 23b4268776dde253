"""Help: every command has examples, and every example runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import shell_complete

from janitor.cli.main import cli
from tests.janitor.cli.conftest import CommandKit
from tms_core.cli.main import cli as tms
from tms_core.settings.models import FLAGS


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


ALL = [" ".join(path) for path in commands()]


def examples(kit: CommandKit, verb: str) -> list[str]:
    shown = kit.run(f"{verb} --help").out
    return re.findall(r"^ +(?:eval \"\$\()?janitor (.+?)(?:\)\"| > .*)?$", shown, flags=re.MULTILINE)


@pytest.mark.parametrize("verb", ["", *ALL])
def test_help_of_a_command_shows_examples_that_parse(kit: CommandKit, verb: str) -> None:
    shown = examples(kit, verb)
    assert shown
    for line in shown:
        resolve(line)


def resolve(line: str) -> None:
    """Parse a command line without running it."""
    command: click.Command = cli
    words = shlex.split(line)
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    # With the group's options for help, because click caches those of the first context of a command.
    command.make_context(command.name, words, obj={}, **cli.context_settings).close()


@pytest.mark.parametrize("verb", [verb for verb in ALL if verb != "completion"])
def test_help_of_a_command_lists_the_common_options(kit: CommandKit, verb: str) -> None:
    shown = kit.run(f"{verb} -h").out
    for option in ("--config", "--leveldb", "--hbase", "--snapshots", "--format", "--log-format", "--version"):
        assert option in shown


@pytest.mark.parametrize("command", [cli, tms.get_command(click.Context(tms), "serve")], ids=["janitor", "tms serve"])
def test_help_of_an_option_names_the_variable_of_its_setting(command: click.Command) -> None:
    shown = dict(re.findall(r"--(\w+) [^-]*?\[env:\s+TMS_(\w+)\]", command.get_help(click.Context(command))))
    assert shown.pop("config") == "CONFIG"
    assert shown
    for option, variable in shown.items():
        assert variable.lower().replace("__", ".") in FLAGS[option]("x")


@pytest.mark.parametrize("verb", ["", "archive", "inspect", "config", *ALL])
def test_help_of_a_command_cuts_no_summary(kit: CommandKit, verb: str) -> None:
    shown = kit.run(f"{verb} --help").out
    assert not re.search(r"\w\.\.\.$", shown, flags=re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", {"plan", "run", "status", "pause", "archive", "completion"}),
        ("archive ", {"list", "restore"}),
        ("st", {"status"}),
        ("plan --", {"--topic", "--out", "--at", "--config", "--format"}),
        ("status --format ", {"table", "json"}),
        ("completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_completion_offers_commands_options_and_values(
    typed: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"janitor {typed}"
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    shell_complete(cli, {"obj": {}}, "janitor", "_JANITOR_COMPLETE", "bash_complete")
    found = {line.rpartition(",")[2] for line in capsys.readouterr().out.splitlines()}
    assert offered <= found
    assert typed != "st" or found == offered
