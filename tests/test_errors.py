"""Errors: each has a message, a hint and a code, and a common base class."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import click
import pytest

from janitor.cli.main import cli as janitor
from tms_core.cli.main import cli as tms
from tms_core.errors import (
    Conflict,
    FormatError,
    PlanRefused,
    Refused,
    SnapshotError,
    TmsError,
    UnsupportedSnapshotVersion,
    code_of_guard,
)


def test_error_that_is_printed_ends_with_its_hint() -> None:
    error = PlanRefused("The topic has moved.", "Make a new plan.")
    assert (error.message, error.hint) == ("The topic has moved.", "Make a new plan.")
    assert str(error) == "The topic has moved. Make a new plan."
    assert str(TmsError("It failed.")) == "It failed."


@pytest.mark.parametrize(
    ("reason", "message"),
    [("It failed", "No: It failed."), ("It failed.", "No: It failed."), ("It failed..", "No: It failed...")],
)
def test_error_that_embeds_a_sentence_ends_with_one_period(reason: str, message: str) -> None:
    error = TmsError(f"No: {reason}.", "Look.")
    assert (error.message, str(error), error.args) == (message, f"{message} Look.", (message,))


def test_error_of_another_process_arrives_with_its_hint() -> None:
    error = pickle.loads(pickle.dumps(PlanRefused("It moved.", "Look again.")))  # noqa: S301
    assert str(error) == "It moved. Look again."


@pytest.mark.parametrize("family", [SnapshotError, FormatError, TmsError])
def test_error_is_caught_by_each_of_its_base_classes(family: type[TmsError]) -> None:
    with pytest.raises(family, match="version 9"):
        raise UnsupportedSnapshotVersion("version 9")


def test_snapshot_error_is_not_a_refusal() -> None:
    assert not issubclass(SnapshotError, Refused)


def test_error_of_any_class_survives_pickling() -> None:
    kinds: list[type[TmsError]] = [TmsError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert Conflict in kinds
    for kind in kinds:
        error = kind.__new__(kind, "It failed.")
        error.__dict__ |= {"message": "It failed.", "hint": "Look.", "transaction_id": 7, "key": "a", "client": "b"}
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            found = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301
            assert (type(found), found.args, vars(found)) == (kind, ("It failed.",), vars(error))


def test_conflict_survives_pickling_with_its_fields() -> None:
    found = pickle.loads(pickle.dumps(Conflict("It conflicts.", 7, "key", "me")))  # noqa: S301
    assert (str(found), found.transaction_id, found.key, found.client) == ("It conflicts.", 7, "key", "me")


# --- codes -----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
#: Guards whose names are not in the calls of ``GuardNote``.
STOPPED = {"interrupted", "lease"}


def codes_of_the_source() -> set[str]:
    """Return every code that a source file names, and those of all guards."""
    texts = [
        path.read_text(encoding="utf-8") for name in ("janitor", "tms_core") for path in (ROOT / name).rglob("*.py")
    ]
    guards = {name for text in texts for name in re.findall(r'GuardNote\(\s*"(\w+)"', text)} | STOPPED
    return {code for text in texts for code in re.findall(r'"(TMS-[A-Z-]+)"', text)} | set(map(code_of_guard, guards))


def rows_of_the_page() -> list[tuple[str, str]]:
    return re.findall(r"^\| `(TMS-[A-Z-]+)` \| (.+) \|$", PAGE, flags=re.MULTILINE)


def test_error_page_lists_every_code_once_and_sorted() -> None:
    assert [code for code, _ in rows_of_the_page()] == sorted(codes_of_the_source())


def test_error_page_commands_exist() -> None:
    commands = [words for _, row in rows_of_the_page() for words in re.findall(r"`((?:janitor|tms) [a-z][^`]*)`", row)]
    assert len(commands) > 40
    programs: dict[str, click.Command] = {"janitor": janitor, "tms": tms}
    for command in commands:
        name, *words = command.split()
        found = programs[name]
        for word in words:
            if isinstance(found, click.Group):
                found = found.get_command(click.Context(found), word) or pytest.fail(command)
            elif word.startswith("--"):
                assert word == "--help" or any(word in option.opts for option in found.params), command


def test_unrelated_errors_have_different_codes() -> None:
    kinds: list[type[TmsError]] = [TmsError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for one in kinds:
        for other in kinds:
            assert one.code != other.code or issubclass(one, other) or issubclass(other, one) or _shares(one, other)


def _shares(one: type[TmsError], other: type[TmsError]) -> bool:
    """Return whether two errors have the code of a common ancestor, as two kinds of damaged snapshots do."""
    return any(kind.code == one.code for kind in one.__mro__ if issubclass(kind, TmsError) and issubclass(other, kind))
