"""Printed commands: each runs unchanged, in each state in which it is printed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import click
import pytest

import janitor
import tms_core
from janitor.cli.history import LOST, RUNNING
from janitor.cli.history import status as run_status
from janitor.cli.main import cli as janitor_cli
from janitor.state.records import RunRecord
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, NOW_MS, SECOND
from tests.janitor.cli.conftest import CommandKit, Outcome
from tms_core.cli.main import cli as tms_cli
from tms_core.logs.printable import complete
from tms_core.tables.lease import WALL_ALLOWANCE_MS, LeaseRecord

#: A command in a text, up to a character that cannot be part of it.
_NAMED = re.compile(
    rf"\b(?:janitor (?:{'|'.join(janitor_cli.list_commands(click.Context(janitor_cli)))})"
    rf"|tms (?:{'|'.join(tms_cli.list_commands(click.Context(tms_cli)))}))\b(?:(?!\b(?:janitor|tms) )[^\n;,)])*"
)
#: Commands in texts that are not meant to be typed.
_NOT_TYPED = (
    "The commands that write are", "the first janitor run",
    "for janitor apply", "janitor spark needs", "the manager inside `tms serve`",
    "that the transaction service of `tms serve` requires",
    "the address of tms serve", "a store with tms serve", "CDAP, tms serve", "as tms serve does", "another tms serve",
    "as tms poll prints it", "start the server without it", "Usage: ", "--help",
    "allow the transaction service of `tms serve`", "runs the manager in `tms serve`",
    "or start tms serve with its janitor", "of the transaction service of `tms serve`;",
    "tms serve voids their claims", "1 if janitor status asks",
)  # fmt: skip
_OPTIONS = "--config janitor.yaml"


def commands(*shown: Outcome) -> list[str]:
    """Return the printed commands, without ``janitor``; check that each one has the options that select the store."""
    lines = [line for outcome in shown for line in (outcome.out + outcome.err).splitlines()]
    named = [
        words for line in lines if not any(phrase in line for phrase in _NOT_TYPED) for words in _NAMED.findall(line)
    ]
    assert [words for words in named if _OPTIONS not in words] == []
    # Placeholders are in capitals.
    found = [words.partition(_OPTIONS)[0] + _OPTIONS for words in named if not re.search(r"\b[A-Z_]{4,}\b", words)]
    return [words.removeprefix("janitor ") for words in found if words.startswith("janitor ")]


def keep_new(_: CommandKit) -> None:
    return


def adopt(kit: CommandKit) -> None:
    kit.janitor("adopt")


def shorten_ttl(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    kit.set_ttl("default:orders", 30)
    kit.janitor("run --once")


def pause_topic(kit: CommandKit) -> None:
    kit.janitor("adopt")
    kit.janitor("pause 'default:*'")


def set_clock_ahead(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    kit.clock.step(DAY)


def use_state_of_another_store(kit: CommandKit) -> None:
    kit.janitor("adopt")
    with SqliteState(kit.folder / "data/janitor") as state:
        record = state.store()
        assert record is not None
        state.save_store(replace(record, identity="another"))


STATES: dict[str, Callable[[CommandKit], None]] = {
    found.__name__: found
    for found in (keep_new, adopt, shorten_ttl, pause_topic, set_clock_ahead, use_state_of_another_store)
}
LINES = (
    "plan", "run --once", "approve --all", "status", "topic default:orders", "doctor", "boundary --explain", "adopt",
    "verify",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("prepare", STATES.values(), ids=STATES)
def test_printed_command_runs_unchanged(kit: CommandKit, prepare: Callable[[CommandKit], None], line: str) -> None:
    prepare(kit)
    for words in commands(kit.janitor(line)):
        typed = kit.run(words)
        assert typed.code in (0, 3), (words, typed)
        assert (typed.code, words.startswith("plan")) != (3, True), typed


def test_history_of_a_blocked_run_prints_working_commands(kit: CommandKit) -> None:
    kit.janitor("run --once")
    [run] = kit.janitor("history --format json").json["runs"]
    for line in ("history", f"history {run['id']}"):
        assert commands(kit.janitor(line))[-2:] == ["plan --config janitor.yaml", "adopt --config janitor.yaml"]


@pytest.mark.parametrize(
    ("bare", "whole"),
    [
        ("see janitor plan, then: janitor adopt", "see janitor plan --config c, then: janitor adopt --config c"),
        (
            "start it (tms serve), or see: tms tx list",
            "start it (tms serve --config c), or see: tms tx list --config c",
        ),
        ("see: janitor history --config c", "see: janitor history --config c"),
        ("say so with: janitor approve --clock", "say so with: janitor approve --clock --config c"),
        ("janitor pause default:orders", "janitor pause default:orders --config c"),
        ("List the archive: janitor archive list", "List the archive: janitor archive list --config c"),
        (
            "The commands that write are janitor run and janitor apply.",
            "The commands that write are janitor run and janitor apply.",
        ),
    ],
)
def test_complete_adds_the_options_to_commands_in_a_text(bare: str, whole: str) -> None:
    assert complete(bare, "--config c") == whole


def _texts(package: Path) -> Iterator[str]:
    """Yield every text of a package that names a command, without docstrings, with X for placeholders."""
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in {*parts, *docstrings}
            ):
                yield node.value


@pytest.mark.parametrize("package", [janitor, tms_core], ids=["janitor", "tms_core"])
def test_text_that_names_a_command_gets_its_options(package: ModuleType) -> None:
    found = [text for text in _texts(Path(str(package.__file__)).parent) if _NAMED.search(text)]
    assert len(found) > 10
    for text in found:
        if not any(phrase in text for phrase in _NOT_TYPED):
            for words in _NAMED.findall(complete(text, _OPTIONS)):
                assert _OPTIONS in words, text


@pytest.mark.parametrize("bare", ["until `janitor adopt`.", "run janitor approve --all", "ask tms topic list"])
def test_complete_of_a_command_in_an_unexpected_place_adds_no_options(bare: str) -> None:
    assert not any(_OPTIONS in words for words in _NAMED.findall(complete(bare, _OPTIONS)))


@pytest.mark.parametrize(
    ("sign_ms", "alive"),
    [
        (NOW_MS - 60 * SECOND, True),
        (NOW_MS - 60 * SECOND - 1, False),
        (NOW_MS + WALL_ALLOWANCE_MS, True),
        (NOW_MS + WALL_ALLOWANCE_MS + 1, False),
    ],
)
def test_sign_of_life_far_ahead_of_the_clock_does_not_count(sign_ms: int, alive: bool) -> None:
    assert LeaseRecord("host:1", 1, 1, sign_ms, 60).is_renewed(NOW_MS) == alive
    run = RunRecord("a", "apply", sign_ms, heartbeat_ms=sign_ms)
    assert run_status(run, NOW_MS, 60) == (RUNNING if alive else LOST)


@pytest.mark.parametrize("package", [janitor, tms_core], ids=["janitor", "tms_core"])
def test_options_of_a_recommended_command_come_from_complete_alone(package: ModuleType) -> None:
    by_hand = re.compile(r"(?:janitor|tms) [^\"\n]*\{[a-z_.]*arguments(?:\(\))?\}")
    for path in Path(str(package.__file__)).parent.rglob("*.py"):
        assert not by_hand.search(path.read_text(encoding="utf-8")), path
