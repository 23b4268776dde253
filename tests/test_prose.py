"""The count of sentence patterns, and the record that it may not exceed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import prose
from tools.prose import count, count_docstrings, count_matches, risen


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("A pass deletes what is due.", "free relative clause"),
        ("Who has the lease may write.", "free relative clause"),
        ("The operator is told which rows wait.", "reporting passive"),
        ("A run begins after the guards.", "begin or end"),
        ("A row of one that is gone stays.", "bare pronoun"),
        ("Rows are kept. So it is with holds.", "inversion"),
        ("The count is made anew.", "avoided word"),
        (" ".join(["word"] * 31) + ".", "long sentence"),
    ],
)
def test_count_text_with_a_pattern_finds_it(text: str, pattern: str) -> None:
    assert count(text) == {pattern: 1}


@pytest.mark.parametrize(
    "text", ["Expired rows are deleted.", "```\nwhat is due\n```", "`what is due`", " ".join(["word"] * 30) + "."]
)
def test_count_plain_text_and_code_finds_nothing(text: str) -> None:
    assert count(text) == {}


@pytest.mark.parametrize(
    ("docstring", "without"),
    [
        ("Return the rows.", 0),
        ("The rows.", 1),
        ("Whether it is open.", 1),
        ("Rows of a topic.", 1),
        ("Delete rows.", 0),
    ],
)
def test_count_docstrings_of_a_function_expects_a_verb(docstring: str, without: int) -> None:
    source = f'def f():\n    """{docstring}"""\n\n\nclass C:\n    """The rows."""\n'
    assert count_docstrings(source)["docstring without a verb"] == without


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        ('"keeps all of its rows"', 1),
        ('"quoted by a page"', 0),
        ('"planted by the test"', 0),
        ('r"topic \\d+ .* rows"', 0),
    ],
)
def test_count_matches_finds_words_of_a_message_that_no_page_quotes(pattern: str, number: int) -> None:
    source = f"with pytest.raises(StoreError, match={pattern}):\n    pass\n"
    found = count_matches(source, "the topic keeps all of its rows\nquoted by a page", "quoted by a page")
    assert found["sentence in a match"] == number


def test_risen_with_more_than_recorded_names_file_and_pattern() -> None:
    assert risen({"a.md": {"x": 2, "y": 1}}, {"a.md": {"x": 1, "y": 1}}) == ["a.md: x: 2, at most 1"]
    assert risen({"a.md": {"x": 1}}, {"a.md": {"x": 3}}) == []


def test_risen_after_a_file_was_moved_allows_the_counts_of_the_old_file() -> None:
    assert risen({"new.md": {"x": 2}}, {"old.md": {"x": 2}}) == []
    assert risen({"new.md": {"x": 2}, "newer.md": {"x": 1}}, {"old.md": {"x": 2}}) == ["newer.md: x: 1, at most 0"]


@pytest.mark.parametrize(
    ("options", "today", "code"),
    [
        ([], {"a.md": {"x": 1}}, 0),
        ([], {"a.md": {"x": 1}, "b.md": {"x": 2}}, 0),
        ([], {"a.md": {"x": 3}, "b.md": {"x": 1}}, 1),
        (["--force", "a.md"], {"a.md": {"x": 3}, "b.md": {"x": 1}}, 1),
        ([], {"a.md": {"x": 2}, "b.md": {"x": 2}, "new.md": {"y": 1}}, 1),
        (["--force", "new.md"], {"a.md": {"x": 2}, "b.md": {"x": 2}, "new.md": {"y": 1}}, 0),
        (["--force", "other.md"], {"a.md": {"x": 2}, "b.md": {"x": 2}, "new.md": {"y": 1}}, 1),
        ([], {"a.md": {"x": 2}, "renamed.md": {"x": 3}}, 1),
        (["--force", "renamed.md"], {"a.md": {"x": 2}, "renamed.md": {"x": 3}}, 0),
    ],
)
def test_record_of_risen_counts_is_rejected_and_names_them(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    today: dict[str, dict[str, int]],
    code: int,
) -> None:
    record, known = tmp_path / "prose.json", {"a.md": {"x": 2}, "b.md": {"x": 2}}
    record.write_text(json.dumps(known))
    monkeypatch.setattr(prose, "RECORD", record)
    monkeypatch.setattr(prose, "counts", lambda _: today)
    monkeypatch.setattr(prose, "totals", lambda _: [])
    assert prose.main(["--record", *options]) == code
    assert json.loads(record.read_text()) == (known if code else today)
    assert bool(capsys.readouterr().out) == bool(code)
