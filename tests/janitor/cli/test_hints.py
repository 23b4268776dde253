"""What is printed to be typed next is typed as it stands, in each state in which it is printed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest

import janitor
from janitor.cli.main import cli
from janitor.cli.options import complete
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, topic
from tests.janitor.cli.conftest import Outcome, Site
from tms_core.tables.leveldb.store import LevelDBStore

#: A command as it is printed: up to what cannot be part of one.
_COMMAND = re.compile(r"janitor ((?:[a-z]+ )[^\n;,]*?--config janitor\.yaml)")


def commands(*shown: Outcome) -> list[str]:
    found = [words for outcome in shown for words in _COMMAND.findall(outcome.out + outcome.err)]
    # What a person puts in is written in capitals.
    return [words for words in found if not re.search(r"\b[A-Z_]{4,}\b", words)]


def new(_: Site) -> None:
    return


def adopted(site: Site) -> None:
    site.janitor("adopt")


def ttl_shortened(site: Site) -> None:
    site.janitor("run --once --adopt")
    with LevelDBStore(site.store) as store:
        topic(store, "default:orders", ttl_seconds=30)
    site.janitor("run --once")


def paused(site: Site) -> None:
    site.janitor("adopt")
    site.janitor("pause 'default:*'")


def clock_ahead(site: Site) -> None:
    site.janitor("run --once --adopt")
    site.clock.step(DAY)


def state_of_another_store(site: Site) -> None:
    site.janitor("adopt")
    with SqliteState(site.folder / "data/janitor") as state:
        record = state.store()
        assert record is not None
        state.save_store(replace(record, identity="another"))


STATES: dict[str, Callable[[Site], None]] = {
    found.__name__: found for found in (new, adopted, ttl_shortened, paused, clock_ahead, state_of_another_store)
}
ASKED = (
    "plan", "run --once", "approve --all", "status", "topic default:orders", "doctor", "boundary --explain", "adopt",
    "verify",
)  # fmt: skip


@pytest.mark.parametrize("line", ASKED)
@pytest.mark.parametrize("prepare", STATES.values(), ids=STATES)
def test_given_a_state_when_a_command_is_typed_then_each_command_it_prints_works_as_it_stands(
    site: Site, prepare: Callable[[Site], None], line: str
) -> None:
    prepare(site)
    for words in commands(site.janitor(line)):
        typed = site.run(words)
        assert typed.code in (0, 3), (words, typed)
        assert (typed.code, words.startswith("plan")) != (3, True), typed


def test_given_a_run_that_a_guard_stopped_when_looked_back_at_then_what_it_named_works_as_it_stands(site: Site) -> None:
    site.janitor("run --once")
    [run] = site.janitor("history --format json").json["runs"]
    for line in ("history", f"history {run['id']}"):
        assert commands(site.janitor(line))[-2:] == ["plan --config janitor.yaml", "adopt --config janitor.yaml"]


def test_given_what_is_paused_when_planned_then_resume_is_what_is_typed_next(site: Site) -> None:
    paused(site)
    shown = site.janitor("plan")
    assert "next: janitor resume 'default:*' --config janitor.yaml\n" in shown.out


@pytest.mark.parametrize(
    ("bare", "whole"),
    [
        ("look at janitor plan, then: janitor adopt", "look at janitor plan -o, then: janitor adopt -o"),
        ("say so with: janitor approve --clock", "say so with: janitor approve --clock -o"),
        ("janitor pause default:orders", "janitor pause default:orders -o"),
        ("See what there is: janitor archive list", "See what there is: janitor archive list -o"),
        (
            "The commands that write are janitor run and janitor apply.",
            "The commands that write are janitor run and janitor apply.",
        ),
    ],
)
def test_given_a_sentence_that_names_commands_when_completed_then_each_leads_to_the_same_store(
    bare: str, whole: str
) -> None:
    assert complete(bare, "-o") == whole


#: Sentences, not commands: what is said of a program, or needs more than its options.
_SAID = ("The commands that write are", "the first janitor run", "exit 2", "Open the store itself", "or janitor run")


def _texts() -> list[str]:
    """Every text below the commands that names one, without docstrings."""
    found = []
    for path in Path(janitor.__file__).parent.rglob("*.py"):
        if path.parent.name in ("cli", "spark"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "``" not in node.value:
                found += [line for line in node.value.splitlines() if re.search(r"[:;,] janitor [a-z]", line)]
    return found


def test_the_commands_that_errors_and_guards_name_are_verbs_and_are_completed() -> None:
    texts = [text for text in _texts() if not any(said in text for said in _SAID)]
    assert texts
    for text in texts:
        for verb in re.findall(r"[:;,] janitor ([a-z]+)", text):
            assert verb in cli.list_commands(click.Context(cli)), text
