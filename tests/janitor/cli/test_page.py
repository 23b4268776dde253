"""The reference pages of commands: every command line in them runs and prints what the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import DAY, NOW_MS
from tests.interop.conftest import unpack
from tests.janitor.cli.test_help import ALL, resolve
from tests.terminal import StillClock, Terminal, exit_code
from tests.test_docs import consoles, first_line_not_shown, settings_of
from tools.reference.commands import without_help

PAGE, TMS_PAGE = (Path(__file__).parents[3] / f"docs/reference/{name}.md" for name in ("janitor", "tms"))
TEXT = without_help(PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    unpack("sample", tmp_path / "data")
    (tmp_path / "janitor.yaml").write_text(settings_of(PAGE), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_commands_print_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Terminal(StillClock(NOW_MS, monotonic_ms=DAY), capsys, monkeypatch) as terminal:
        for page, (line, shown) in ((path, each) for path in (PAGE, TMS_PAGE) for each in consoles(path)):
            code, printed = terminal.type(line)
            assert code == exit_code(line), line
            assert first_line_not_shown(shown, printed) is None, f"{page.name}: {line}\n{printed}"


def others() -> Iterator[str]:
    """Yield the command lines in blocks that the test above does not run."""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL):
        if language != "console":
            yield from re.findall(r"janitor ((?:run|completion) [^\n)]*)", block)


def test_every_other_command_line_parses() -> None:
    found = list(others())
    assert len(found) == 2
    for line in found:
        resolve(line)


# The tests of Spark run the commands of docs/how-to/spark.md.
@pytest.mark.parametrize("verb", [*(verb for verb in ALL if not verb.startswith("spark ")), "tms admin release"])
def test_every_command_has_a_worked_example(verb: str) -> None:
    typed = verb if verb.startswith("tms") else f"janitor {verb}"
    assert any(line.startswith(typed) for page in (PAGE, TMS_PAGE) for line, _ in consoles(page))
