"""The documentation site: links, menu and the length of pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "zensical.toml"
LONGEST_PAGE_LINES = 250
#: Pages that are generated from the code.
LONG_PAGES = {"api.md", "janitor.md", "tms.md"}


def build(folder: Path, *, addition: str = "") -> subprocess.CompletedProcess[str]:
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("assets"))
    shutil.copy(CONFIGURATION, folder)
    with (folder / "docs/README.md").open("a", encoding="utf-8") as page:
        page.write(addition)
    program = Path(sys.executable).with_name("zensical")
    return subprocess.run([program, "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False)


def test_site_without_broken_links_builds(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build/site/reference/deletion-rules.html").exists()


@pytest.mark.parametrize("link", ["no-page.md", "reference/rest.md#no-heading"])
def test_site_with_broken_link_fails(link: str, tmp_path: Path) -> None:
    assert build(tmp_path, addition=f"\n[broken]({link})\n").returncode != 0


def linked_pages(menu: Any) -> Iterator[str]:
    """Yield the pages of a menu and of all menus in it."""
    if isinstance(menu, str):
        yield menu
    else:
        for each in menu.values() if isinstance(menu, dict) else menu:
            yield from linked_pages(each)


def test_menu_has_each_page_once() -> None:
    menu = tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))["project"]["nav"]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert sorted(linked_pages(menu)) == sorted(pages)


def test_page_has_at_most_250_lines() -> None:
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in ROOT.glob("docs/**/*.md")}
    long = {path.name for path, lines in lengths.items() if lines > LONGEST_PAGE_LINES}
    assert long - LONG_PAGES == set()


def test_heading_of_a_page_written_by_hand_is_unique() -> None:
    found = Counter(
        heading
        for path in ROOT.glob("docs/**/*.md")
        if path.name not in LONG_PAGES | {"configuration.md"}
        for heading in re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    )
    assert [heading for heading, number in found.items() if number > 1] == []


def test_content_of_a_list_is_indented_by_four_spaces() -> None:
    """The site shows lists and paragraphs with fewer spaces outside the list item, although GitHub nests them."""
    outside = [
        f"{path.name}: {line}"
        for path in ROOT.glob("docs/**/*.md")
        for line in re.findall(
            r"^ {1,3}[-*] .+$|(?<=\n\n) {1,3}\S.+$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE
        )
    ]
    assert outside == []


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
