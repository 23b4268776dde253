"""Names of stored values belong to the layout: a janitor with other names must reject the state."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from janitor.metrics.catalogue import RESULTS
from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.base import _STORE_VALUES
from janitor.state.hbase.root import LAYOUT
from janitor.state.records import MessagesLeft, Note, RunRecord, StoreBytes
from janitor.state.sqlite.state import SCHEMA_VERSION
from janitor.state.values import pack
from tests.janitor.test_report import report

#: The layouts of a state file and of HBase's table, and the names that both store. Add a new name here. After a rename,
#: raise both layouts too.
LAYOUTS = 7, 5
NAMES = """
    after before blocked blocked_by boundary claim consumer consumers counted_ms counts daemon decided
    deleted_bytes done duration_seconds effective_now_ms error errors evidence expired failed finished_ms
    first_contact frontier frontiers full full_pass full_pass_wanted_ms guards heartbeat_ms held held_before id ids
    in_progress interrupted invalid_transaction kept late_transactions left lineage live lost messages mode
    newer_generation note old_generation overdue partial paused phase_seconds processed protected quarantined
    referenced refuted rehearsed_ms restored result retired_run round seeks_spared snapshot started_ms
    statistics store_bytes store_calls strikes success_ms topic_changes topic_sizes topics topics_omitted totals
    transaction transactions_decided truncated undecided unknown_topic unrecognized
"""


def test_names_of_stored_values_are_those_of_the_layouts() -> None:
    recorded = {field.name for kind in (RunRecord, StoreBytes, MessagesLeft) for field in fields(kind)}
    names = {*Note, *_STORE_VALUES, *Rule, *Reason, *Hold, *RESULTS, *pack(report()), *recorded}
    assert (SCHEMA_VERSION, LAYOUT) == LAYOUTS
    assert names == set(NAMES.split())


MODULES = sorted((Path(__file__).parents[3] / "janitor").rglob("*.py"))


def test_notes_are_never_accessed_by_a_literal_name() -> None:
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
def test_notes_that_safety_depends_on_keep_their_names(name: str) -> None:
    assert Note(name).value == name
