"""The pages under ``docs/`` and README: their statements agree with the code.

The tests check links, names of modules and tests, worked examples, tables of fields and columns, quoted messages, and
commands with their output.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from examples import demo
from janitor.report import COUNTED_REASONS
from janitor.rules.policy import Hold, Reason, Rule
from janitor.run import plan_file as plan
from janitor.run.guards import successor_mark
from janitor.state.records import (
    ClockAnchor,
    Evidence,
    FrontierRecord,
    LedgerEntry,
    OpenIdRecord,
    ProvenBoundary,
    RunRecord,
    StoreRecord,
    Strikes,
    TopicCount,
)
from janitor.state.sqlite.state import FILE_NAME, SqliteState
from tests.builders import DAY, MINUTE, NOW_MS, janitor, pointer, topic
from tests.interop.conftest import unpack
from tests.janitor.cli.test_help import resolve
from tests.terminal import StillClock, Terminal, exit_code
from tms_core.clock import ManualClock
from tms_core.rowkey import (
    MessageId,
    MessageKey,
    PayloadKey,
    generation_prefix,
    pointer_prefix,
    salt,
    stop_key,
    time_prefix,
)
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.store import encode
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId, TopicMetadata, encode_properties
from tools.reference.commands import without_help

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FORMATS = "\n".join(
    (ROOT / f"docs/reference/formats/{name}.md").read_text(encoding="utf-8")
    for name in ("rows", "tables", "reports", "state")
)
RULE_PAGES = "\n".join(
    (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8") for name in ("deletion-rules", "safety-invariants")
)
RUNBOOK, ALERTS = ((ROOT / f"docs/operate/{name}.md").read_text(encoding="utf-8") for name in ("runbook", "alerts"))
MESSAGES = "\n".join(
    (ROOT / f"docs/reference/messages/{name}.md").read_text(encoding="utf-8") for name in ("runs", "stores", "servers")
)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(params=PAGES, ids=page_id)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


# --- links and names -------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub creates them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = page if not path else page.parent / path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_named_file_exists(page: Path) -> None:
    named = re.findall(r"`((?:tms_core|janitor|tests|docs|conf|benchmarks)/[\w./-]*)", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)#]+)\)", index))


# --- deletion rules and safety invariants ----------------------------------------------------------------------------

RULES = [f"L{number}" for number in range(8)] + [f"S{number}" for number in range(1, 17)]


def sections() -> dict[str, str]:
    parts = re.split(r"^## ", RULE_PAGES, flags=re.MULTILINE)
    return {rule: part for part in parts if (rule := part.partition(":")[0]) in RULES}


def test_every_rule_has_its_section_and_its_line_in_the_table() -> None:
    assert list(sections()) == RULES
    assert re.findall(r"^\| ([LS]\d+) \| .+ \|$", RULE_PAGES, flags=re.MULTILINE) == RULES


@pytest.mark.parametrize("rule", RULES)
def test_rule_names_code_and_tests_that_exist(rule: str) -> None:
    section = sections()[rule]
    proofs = re.findall(r"`(tests/[\w./]+)(?:::(\w+))?`", section)
    for path, name in proofs:
        assert not name or re.search(rf"^def {name}", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    own = ROOT / f"tests/disasters/test_s{rule[1:].zfill(2)}.py"
    assert "- Code: `" in section
    assert proofs
    if rule.startswith("S"):
        assert own.relative_to(ROOT).as_posix() in {path for path, _ in proofs}


def test_rules_that_the_code_names_are_rules() -> None:
    files = [path for package in ("janitor", "tms_core") for path in (ROOT / package).rglob("*.py")]
    named = {rule for file in files for rule in re.findall(r"\b[LS]\d{1,2}\b", file.read_text(encoding="utf-8"))}
    assert named <= set(RULES)


# --- formats: worked examples ----------------------------------------------------------------------------------------

TOPIC = TopicId("default", "t1")
PREFIX = TOPIC.prefix
T = 1_500_000_000_000
W = 1_500_000_000_000_000_007
MESSAGE = MessageKey(TOPIC, 1, T, 0)
LAST_MESSAGE = MessageKey(TOPIC, 1, T, 65535)
PAYLOAD = PayloadKey(TOPIC, 1, W, T, 2)

EXAMPLES: dict[str, bytes | None] = {
    "prefix, metadata row key": PREFIX,
    "start of generation 1": generation_prefix(PREFIX, 1),
    "start of generation 2": generation_prefix(PREFIX, 2),
    "first key after the highest generation, 2^31 − 1": generation_prefix(PREFIX, 2**31),
    "message, generation 1, time T, sequence 0": MESSAGE.pack(),
    "message, generation 1, time T, sequence 65535": LAST_MESSAGE.pack(),
    "start of generation 1 at time T (a cut-off)": time_prefix(PREFIX, 1, T),
    "payload, generation 1, pointer W, time T, sequence 2": PAYLOAD.pack(),
    "start of the payloads of W in generation 1": pointer_prefix(PREFIX, 1, W),
    "stop key after everything that begins with: the prefix": stop_key(PREFIX),
    "stop key after everything that begins with: the start of generation 1": stop_key(generation_prefix(PREFIX, 1)),
    "stop key after everything that begins with: the start of generation 255": stop_key(generation_prefix(PREFIX, 255)),
    "stop key after everything that begins with: message, time T, sequence 65535": stop_key(LAST_MESSAGE.pack()),
    "salt of, with 16 buckets: message, time T, sequence 0": salt(MESSAGE.pack(), 16),
    "salt of, with 16 buckets: message, time T, sequence 1": salt(MESSAGE._replace(sequence=1).pack(), 16),
    "salt of, with 16 buckets: message, time T, sequence 65535": salt(LAST_MESSAGE.pack(), 16),
    "salt of, with 16 buckets: payload, pointer W, time T, sequence 2": salt(PAYLOAD.pack(), 16),
    "`hi`, outside a transaction": encode(MessageValue(None, b"hi")),
    "an empty payload, outside a transaction": encode(MessageValue(None, b"")),
    "`hi`, in transaction W": encode(MessageValue(W, b"hi")),
    "`hi`, in transaction W, rolled back or inverted": encode(MessageValue(-W, b"hi")),
    "reference to the payloads of W": encode(MessageValue(W, None)),
    '`{"generation":"1","ttl":"604800"}`': encode_properties({"ttl": "604800", "generation": "1"}),
    "deleted in generation 2, ttl 60, note `a<b`": encode_properties({"generation": "-2", "ttl": "60", "note": "a<b"}),
    "time T, sequence 0, payload in the message": MessageId(T, 0).pack(),
    "time T, sequence 3, payload stored 5 ms earlier with sequence 2": MessageId(T, 3, T - 5, 2).pack(),
    'document: `{"format":1,"what_if":false}`': bytes.fromhex(plan.checksum({"what_if": False, "format": 1})),
}


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the tables of a page, each as a list of rows of cells; the first row is the head."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def test_worked_examples_match_the_code() -> None:
    shown = {}
    for head, *rows in tables(FORMATS):
        if head[-1] != "bytes":
            continue
        for label, data in rows:
            name = label if head[0] == "example" else f"{head[0]}: {label}"
            shown[name] = bytes.fromhex(data.strip("`"))
    assert shown == EXAMPLES


def test_table_of_old_generations_matches_the_code() -> None:
    [rows] = [rows for head, *rows in tables(FORMATS) if head == ["data", "metadata", "old"]]
    for data, metadata, old in rows:
        assert TopicMetadata(TOPIC, int(metadata), 60).is_old(int(data)) == (old == "yes")


# --- formats: fields and columns -------------------------------------------------------------------------------------


def names_after(line: str) -> set[str]:
    """Return the names in the first column of the table after a line of the pages about formats."""
    text = FORMATS.partition(f"\n{line}")[2]
    assert text, line
    _, *rows = next(tables(text))
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}


@pytest.fixture
def plan_document(tmp_path: Path) -> dict[str, Any]:
    """Return a plan with deletions and an inversion."""
    store = MemoryStore()
    invalid = pointer(NOW_MS - DAY // 2)
    topic(store, "default:orders", ttl_seconds=86400).plain(NOW_MS - 2 * DAY).tx(invalid, NOW_MS - DAY // 2)
    kit = janitor(store, invalid=[invalid])
    kit.engine.preview(out=tmp_path / "plan.json")
    document: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    return document


def test_tables_of_the_report_and_the_plan_file_name_every_field(plan_document: dict[str, Any]) -> None:
    extra = names_after("What `plan --out FILE` writes")
    assert set(plan_document) == names_after("What `plan`, `apply` and") | extra
    assert set(plan_document["snapshot"]) == names_after("`snapshot`:")
    assert set(plan_document["terms"]) == names_after("`terms`:")
    per_topic = names_after("An entry of `topics`:") | names_after("Each entry of `topics` has four fields more:")
    assert {name for entry in plan_document["topics"] for name in entry} == per_topic
    assert set(plan_document["totals"]["kept"]) == names_after("`totals` has") == {str(r) for r in COUNTED_REASONS}
    assert {str(rule) for rule in Rule} | {"kept"} == set(plan_document["totals"])


@pytest.mark.parametrize("word", [*Rule, *Hold, *(reason for reason in Reason if reason is not Reason.LIVE)])
def test_every_word_of_a_report_is_explained(word: str) -> None:
    assert f"`{word}`" in FORMATS


def test_tables_of_the_state_name_every_column(tmp_path: Path) -> None:
    SqliteState(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        made = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        documented = re.findall(r"^`(\w+)`, (?:one row|at most one row)", FORMATS, flags=re.MULTILINE)
        assert sorted(documented) == sorted(made)
        for table in made:
            columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            assert columns == names_after(f"`{table}`, "), table


@pytest.mark.parametrize(
    ("head", "record"),
    [
        ("`store`:", StoreRecord),
        ("`anchor`:", ClockAnchor),
        ("`frontiers`, ", FrontierRecord),
        ("`ids`, ", OpenIdRecord),
        ("`evidence`, ", Evidence),
        ("`claim`:", ProvenBoundary),
        ("`strikes`, ", Strikes),
        ("`counts`, ", TopicCount),
        ("A run, ", RunRecord),
        ("An entry of the ledger, ", LedgerEntry),
    ],
)
def test_records_of_the_state_are_documented_by_field_in_order(head: str, record: Any) -> None:
    _, *rows = next(tables(FORMATS.partition(f"\n{head}")[2]))
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row[0])] == [each.name for each in fields(record)]


def test_length_of_a_mark_is_documented() -> None:
    mark = secrets.token_hex(16)
    assert len(successor_mark(mark, "another")) == len(mark) == 32
    assert "32 hex digits" in FORMATS


# --- operations: quoted messages -------------------------------------------------------------------------------------

#: The names of errors and functions with messages for operators.
SPEAKING = {
    "StoreError",
    "StoreBusy",
    "StoreNotFound",
    "StoreLayoutError",
    "NoSnapshot",
    "NotAdopted",
    "GuardTripped",
    "GuardNote",
    "PlanRefused",
    "MetadataError",
    "ArchiveError",
    "Refused",
    "StopRequested",
    "LeaseHeld",
    "LeaseLost",
    "ProducerFenced",
    "TmsError",
    "_refusal",
    "_rejection",
    "_not_understood",
}
#: The names of modules that no command of this page reaches.
UNREACHED = {"hbase"}


def literal(node: ast.expr) -> str:
    """Return a text of the source, with … for values; empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d)?[sdf]|\{\w+\}", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def sources() -> Iterator[ast.Module]:
    for package in ("janitor", "tms_core"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not UNREACHED & set(path.parts):
                yield ast.parse(path.read_text(encoding="utf-8"))


def string_literals(trees: Iterable[ast.Module]) -> set[str]:
    return {text for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr) and (text := literal(node))}


def quoted_messages() -> list[str]:
    """Return the messages in the reference: bold and in backticks."""
    return re.findall(r"\*\*`([^`]+)`\*\*", MESSAGES)


def test_reference_of_messages_quotes_messages_of_the_program() -> None:
    texts = string_literals(sources())
    assert len(quoted_messages()) > 30
    for message in quoted_messages():
        assert any(message.strip("…") in text for text in texts), message


def reported_messages() -> Iterator[str]:
    """Yield the messages of errors and guards."""
    for tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SPEAKING:
                yield from [text for text in map(literal, node.args) if " " in text][:1]
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "message":
                yield literal(node.value)


def test_every_failure_the_program_reports_is_in_the_reference_of_messages() -> None:
    page = " ".join(MESSAGES.split())
    # After a value and a semicolon follows a sentence that is quoted separately.
    sentences = [sentence for sentence in reported_messages() if sentence and not sentence.startswith("…;")]
    assert len(sentences) > 40
    assert [sentence for sentence in sentences if not in_page(sentence, page)] == []


def in_page(text: str, page: str) -> bool:
    """Return whether a page quotes the first long piece of a message without values, or else its longest piece."""
    pieces = [piece.strip(" .:") for piece in re.split("[…;]", text)]
    return next((piece for piece in pieces if len(piece) > 20), max(pieces, key=len)) in page


def test_every_first_line_of_the_status_is_in_the_table_of_first_lines() -> None:
    tree = ast.parse((ROOT / "janitor/status/health.py").read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = {literal(node) for node in ast.walk(tree) if isinstance(node, ast.expr) and node not in docstrings}
    [rows] = [rows for head, *rows in tables(RUNBOOK) if head[0] == "`janitor status`, or the page"]
    shown = " ".join(line for line, _ in rows)
    sentences = [text for text in texts if re.search(r"\w+ \w+.*[.:]$", text)]
    assert len(sentences) > 8
    assert [text for text in sentences if not in_page(text, shown)] == []


def test_every_group_of_metrics_has_a_section_on_the_page_of_alerts() -> None:
    metrics = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    groups = re.findall(r"^## (.+)$", metrics, flags=re.MULTILINE)
    by_metric = ALERTS.partition("\n## By metric\n")[2].partition("\n## ")[0]
    assert [
        group for group in groups if f"(../reference/metrics.md#{group.lower().replace(' ', '-')})" not in by_metric
    ] == []


# --- commands in all places ------------------------------------------------------------------------------------------


def command_lines(text: str) -> Iterator[str]:
    """Yield the arguments of each ``janitor`` command line of a page, in a block or in a sentence."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"(?<!`)`janitor ([^`]+)`(?!`)", prose)
    for line in text.splitlines():
        if match := re.match(r"(?:    )+(?:ExecStart=)?(?:[\w./]*/)?janitor +([^#|&]+)", line):
            yield match[1]


def test_every_command_of_a_page_parses(page: Path) -> None:
    for line in command_lines(without_help(page.read_text(encoding="utf-8"))):
        try:
            resolve(" ".join(line.replace("…", "something").split()))
        except (click.MissingParameter, IndexError):
            continue  # the sentence names a command without its arguments, or a group


def test_check_of_commands_finds_an_invalid_command() -> None:
    text = "As `janitor sweep` says.\n\n    janitor plan --al\n"
    assert list(command_lines(text)) == ["sweep", "plan --al"]
    for line in command_lines(text):
        with pytest.raises((KeyError, click.NoSuchOption)):
            resolve(line)


# --- guide and operations: commands and their output -----------------------------------------------------------------

#: The time of the output in the pages: 18 November 2026.
SHOWN_MS = 1_795_000_000_000
#: A width at which no table is wrapped.
COLUMNS = "140"


def consoles(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands in the console blocks of a page, each with its shown lines of output."""
    for block in re.findall(r"```console\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, [line for line in shown if line.strip()]


def pattern(line: str) -> str:
    """Return a line as a regular expression: … matches any text, and a space any number of spaces."""
    line = re.sub(r"\d+(\.\d+)? [kM]?B on disk", "… on disk", line)  # compressed, as each machine does it
    pieces = (r"\s+".join(map(re.escape, piece.split(" "))) for piece in " ".join(line.split()).split("…"))
    return r"\s*" + ".*".join(pieces) + r"\s*"


def first_line_not_shown(shown: list[str], printed: str) -> str | None:
    """Return the first shown line that was not printed in this order; None: all were printed."""
    lines = iter(printed.splitlines())
    return next((line for line in shown if not any(re.fullmatch(pattern(line), real) for real in lines)), None)


def test_check_of_output_finds_lines_in_another_order() -> None:
    assert first_line_not_shown(["a …", "b"], "a 1\nx\nb\n") is None
    assert first_line_not_shown(["b", "a …"], "a 1\nb\n") == "a …"
    assert first_line_not_shown(["a b"], "a  b c") == "a b"


def settings_of(page: Path) -> str:
    [shown] = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(shown)


def demonstrate(folder: Path) -> int:
    """Run ``make demo`` at the time of the pages."""
    return demo.main(folder, ManualClock(SHOWN_MS))


def test_commands_of_the_tutorials_print_the_shown_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [ROOT / f"docs/tutorials/{name}.md" for name in ("clean-a-store", "run-the-daemon")]
    unpack("sample", tmp_path)
    (tmp_path / "janitor.yaml").write_text(settings_of(pages[-1]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    codes = []
    with Terminal(StillClock(SHOWN_MS, monotonic_ms=DAY), capsys, monkeypatch) as terminal:
        for page, (command, shown) in ((path, each) for path in pages for each in consoles(path)):
            if command == "make demo":
                code, printed = demonstrate(tmp_path / "data/demo"), capsys.readouterr().out
            else:
                code, printed = terminal.type(command)
            codes.append(code)
            if not terminal.busy:
                terminal.clock.advance(MINUTE)
            assert first_line_not_shown(shown, printed) is None, f"{page.name}: {command}\n{printed}"
    # Only the run before the adoption of the store is rejected.
    assert [code for code in codes if code] == [3]


@pytest.mark.parametrize(
    "page", [path for path in PAGES if path.parent.name in ("operate", "how-to") and any(consoles(path))], ids=page_id
)
def test_commands_of_the_operation_pages_print_the_shown_output(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    unpack("sample", tmp_path / "data")
    (tmp_path / "janitor.yaml").write_text(settings_of(ROOT / "docs/reference/janitor.md"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    with Terminal(StillClock(NOW_MS, monotonic_ms=DAY), capsys, monkeypatch) as terminal:
        for line, shown in consoles(page):
            code, printed = terminal.type(line)
            assert code == exit_code(line), line
            assert first_line_not_shown(shown, printed) is None, f"{line}\n{printed}"
