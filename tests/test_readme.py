"""The page about tests: its examples run, and it names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(code: str, tmp_path: Path) -> None:
    exec(compile(code, "tests/README.md", "exec"), {"folder": tmp_path})  # noqa: S102 the page's own code


def test_page_names_files_that_exist() -> None:
    named = {name.rstrip("/") for name in re.findall(r"`(tests/[\w/.]+)`", PAGE)}
    named |= {name.replace(".", "/") + ".py" for name in re.findall(r"`((?:tests|tms_core)(?:\.\w+)+)`", PAGE)}
    assert {name for name in named if not (ROOT / name).exists()} == set()
