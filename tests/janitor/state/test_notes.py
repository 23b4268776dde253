"""Notes: no two have one name, since all names stand in one place and none is written beside them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from janitor.state.records import Note

MODULES = sorted((Path(__file__).parents[3] / "janitor").rglob("*.py"))


def test_the_names_of_all_notes_are_named() -> None:
    written = [
        f"{module.name}:{call.lineno}"
        for module in MODULES
        for call in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("note", "save_note")
        if call.args and isinstance(call.args[0], ast.Constant | ast.JoinedStr)
    ]
    assert written == []


@pytest.mark.parametrize("name", ["decided", "lineage", "restored", "in_progress"])
def test_notes_that_safety_rests_on_keep_their_names(name: str) -> None:
    assert Note(name).value == name
