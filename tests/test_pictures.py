"""The pictures in README and docs are of the page as it is."""

from __future__ import annotations

import re

from tools.pictures import FOLDER, ROOT, digest


def test_given_the_status_page_as_it_is_then_the_pictures_were_taken_of_it() -> None:
    assert (FOLDER / "made-from").read_text(encoding="ascii").strip() == digest(), "take them anew: make pictures"


def test_given_the_pictures_then_each_is_shown_somewhere_light_and_dark() -> None:
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/operations.md"))
    shown = {name.rsplit("/", 1)[1] for name in re.findall(r"[\w/]*pictures/[\w-]+\.png", pages)}
    assert shown == {path.name for path in FOLDER.glob("*.png")}
