"""The pictures in README and docs: each is shown, and small."""

from __future__ import annotations

import re

from tools.pictures import FOLDER, ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_given_the_pictures_then_each_is_shown_somewhere_light_and_dark() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = {name.rsplit("/", 1)[1] for name in re.findall(r"[\w/]*pictures/[\w-]+\.png", pages)}
    assert shown == {path.name for path in FOLDER.glob("*.png")}


def test_given_the_pictures_then_each_is_small_enough_for_a_page() -> None:
    assert {path.name for path in FOLDER.glob("*.png") if path.stat().st_size > 300_000} == set()
