"""The pages about HBase: messages, settings and worked examples agree with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_docs import FORMATS, MESSAGE, PAYLOAD, ROOT, SPEAKING, W, in_page, literal, string_literals, tables
from tms_core.rowkey import salt
from tms_core.tables.hbase.cdap import STATE_TABLE
from tms_core.tables.hbase.described import REQUIRED_SETTINGS
from tms_core.tables.hbase.schema import SPLIT_POLICY, janitor_table_spec, table_specs

NAMES = ("how-to/hbase", "how-to/hbase-servers", "how-to/adopt")
PAGE = "\n".join(
    (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in (*NAMES, "reference/messages/hbase")
)
#: The names of errors, including those of the modules for HBase.
KINDS = SPEAKING | {"ConnectionLost", "NotServed", "ScannerLost", "ThriftTimeout", "StoreNotFound", "StoreUnavailable"}
KINDS |= {"StateBusy", "StateError", "StateUnavailable"}
#: Other modules with messages about HBase.
BESIDE = (
    ROOT / "janitor/app/hbase_place.py",
    ROOT / "tms_core/security/kerberos.py",
    *sorted((ROOT / "janitor/state").glob("*.py")),
)


def sources() -> Iterator[ast.Module]:
    for package in ("janitor", "tms_core"):
        for path in sorted((ROOT / package).rglob("hbase/**/*.py")):
            yield ast.parse(path.read_text(encoding="utf-8"))
    yield from (ast.parse(path.read_text(encoding="utf-8")) for path in BESIDE)


def reported_messages() -> Iterator[str]:
    for tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                yield from [text for text in map(literal, node.args) if " " in text][:1]
            if isinstance(node, ast.Yield) and node.value is not None and " " in (text := literal(node.value)):
                yield text


def test_every_failure_and_obstacle_of_hbase_is_on_its_page() -> None:
    page = " ".join(PAGE.split())
    sentences = list(reported_messages())
    assert len(sentences) > 25
    assert [sentence for sentence in sentences if not in_page(sentence, page)] == []


def test_every_message_that_the_page_quotes_exists_in_the_code() -> None:
    texts = string_literals(sources())
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)
    assert len(quoted) > 25
    for message in quoted:
        pieces = [piece.strip(" .;:,") for piece in message.split("…")]
        longest = max(pieces, key=len)
        assert any(longest in text for text in texts), message


def test_every_setting_that_is_advised_has_its_reason_and_its_line_on_the_page() -> None:
    [rows] = [rows for head, *rows in tables(PAGE) if head == ["setting", "advised", "why"]]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    typed = dict(re.findall(r"'?([\w.]+)'? => '([^']+)'", PAGE.partition("### Cheap sweeps")[2].partition("\n## ")[0]))
    assert named == set(typed) - {"NAME"}
    assert {name: typed[name] for name in REQUIRED_SETTINGS} == REQUIRED_SETTINGS
    assert typed["SPLIT_POLICY"] == SPLIT_POLICY


def test_tables_and_attributes_match_the_created_tables() -> None:
    specs = table_specs("cdap_system", 16, "NONE")
    [rows] = [rows for head, *rows in tables(FORMATS) if head == ["attribute", "of", "value"]]
    documented = {name: of for names, of, _ in rows for name in re.findall(r"`([^`]+)`", names)}
    made = {name for spec in specs for name in spec.attributes}
    assert made == set(documented) - {"cdap.version", "cdap.hbase.version", "coprocessor$1"}
    for name in made:
        having = [spec.name.removeprefix("tms.") for spec in specs if name in spec.attributes]
        assert having == (["meta", "message", "payload"] if documented[name] == "all" else documented[name].split(", "))
    for name in (*(spec.name for spec in specs), janitor_table_spec("x").name, STATE_TABLE):
        assert f"`{name}`" in FORMATS


@pytest.mark.parametrize("key", [MESSAGE.pack(), PAYLOAD.pack(), W.to_bytes(8, "big")], ids=["message", "payload", "W"])
def test_worked_example_of_rows_matches_the_code(key: bytes) -> None:
    [rows] = [rows for head, *rows in tables(FORMATS) if head[:2] == ["example, with 16 buckets", "row"]]
    shown = " ".join(cell for row in rows for cell in row)
    assert (key if len(key) == 8 else salt(key, 16) + key).hex(" ") in shown
