"""The pictures in README and docs are of what is shown now."""

from __future__ import annotations

import re

from tools.pictures import FOLDER, ROOT, digests

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_given_what_the_pictures_are_made_from_as_it_is_then_they_were_made_from_that() -> None:
    assert (FOLDER / "made-from").read_text(encoding="ascii") == digests(), "take them anew: make pictures"


def test_given_the_pictures_then_each_is_shown_somewhere_light_and_dark() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = {name.rsplit("/", 1)[1] for name in re.findall(r"[\w/]*pictures/[\w-]+\.png", pages)}
    assert shown == {path.name for path in FOLDER.glob("*.png")}


def test_given_the_pictures_then_each_is_small_enough_for_a_page() -> None:
    assert {path.name for path in FOLDER.glob("*.png") if path.stat().st_size > 300_000} == set()
