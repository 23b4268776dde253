"""S5: the type checker rejects writes by code that only has read access."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: A comment contains the error that mypy must report; lines without a comment are valid.
SNIPPET = """
from janitor.run.prepare import Deps
from tms_core.tables.compaction import DeletedRanges
from janitor.sweep.findings import Due, Invalid
from janitor.sweep.scan import Part
from tms_core.tables.base import KEYS, MessageTable, Reads, Store
from tms_core.tables.read_only import read_only


def of_a_question(deps: Deps) -> None:
    deps.store.message.read(KEYS, b"", None, 1)
    deps.store.message.delete([b""])  # "MessageReads" has no attribute "delete"
    deps.store.metadata.compare_and_set(b"", None, b"")  # "MetadataReads" has no attribute "compare_and_set"


def of_a_step(part: Part) -> None:
    part.messages.first(b"")
    part.store.payload.put([(b"", b"")])  # "PayloadReads" has no attribute "put"
    part.run.store.metadata.compare_and_set(b"", None, b"")  # "MetadataReads" has no attribute "compare_and_set"


def of_the_executor_of_a_plan(due: Due, invalid: Invalid) -> None:
    due.table.delete(due.batch.keys)  # "KeyReads" has no attribute "delete"
    invalid.table.invert(invalid.cells)  # "MessageReads" has no attribute "invert"
    DeletedRanges().add(due.table, due.batch.keys)  # has incompatible type "KeyReads"; expected "KeyTable"


def inverts(table: MessageTable) -> None:
    table.invert([])


def of_a_store_for_reading(store: Store) -> None:
    inverts(store.message)
    face: Reads = read_only(store)
    inverts(face.message)  # has incompatible type "MessageReads"; expected "MessageTable"
"""


def test_type_checker_rejects_writes_by_reading_code(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = {int(line): text for line, text in re.findall(r"^.*snippet\.py:(\d+): error: (.*)$", output, re.MULTILINE)}
    lines = enumerate(SNIPPET.splitlines(), 1)
    wanted = {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}
    assert found.keys() == wanted.keys(), output
    assert all(text in found[number] for number, text in wanted.items()), output
