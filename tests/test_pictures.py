"""The pictures in README and docs: each is used, and small."""

from __future__ import annotations

import re

from tools.pictures import FOLDER, ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_every_picture_is_shown_on_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = {name.rsplit("/", 1)[1] for name in re.findall(r"[\w/]*pictures/[\w-]+\.png", pages)}
    assert shown == {path.name for path in FOLDER.glob("*.png")}


def test_every_picture_is_at_most_300_kilobytes() -> None:
    assert {path.name for path in FOLDER.glob("*.png") if path.stat().st_size > 300_000} == set()
