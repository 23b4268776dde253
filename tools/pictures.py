"""The pictures of README and docs: ``make pictures`` takes them from the tour on the sample store, light and dark.

A picture of a page that looks different by now misleads, so ``docs/pictures/made-from`` has a digest of the page that
they were taken of, and a test compares it.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

# The browser of the tests: it needs no package, and this is a tool of those who develop.
from tests.janitor.http.browser import Browser, Page, PageError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
#: What the tour is run with: free ports, and a folder that is given up afterwards.
_TOUR = "import sys, pathlib; from examples.tour import main; main(pathlib.Path(sys.argv[1]), any_ports=True)"
#: True once a topic is held, and runs are drawn beside it.
_HELD = "document.querySelector('#held .cmd') && document.querySelectorAll('#plot rect').length > 1"
_TOPIC_DRAWN = "document.querySelector('#detail .cmd')"
_WIDTH, _HEIGHT = 1280, 900
#: How often the browser waits its whole time limit.
_LOOKS = 3


def digest() -> str:
    """What identifies the status page as it is drawn now."""
    return hashlib.sha256(files("janitor.http").joinpath("page.html").read_bytes()).hexdigest()


def main() -> int:
    """Take all pictures; returns an exit code."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-u", "-c", _TOUR, "data"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as tour,
    ):
        try:
            url = _page_of(tour)
            with Browser.start(Path(folder) / "profile") as browser:
                page = browser.open()
                page.shape(_WIDTH, _HEIGHT)
                page.go(url)
                _wait(page, _HELD)
                for scheme in ("light", "dark"):
                    page.prefer(prefers_color_scheme=scheme)
                    page.screenshot(FOLDER / f"status-{scheme}.png")
                page.go(f"{url}topics/demo:orders")
                _wait(page, _TOPIC_DRAWN)
                for scheme in ("light", "dark"):
                    page.prefer(prefers_color_scheme=scheme)
                    page.screenshot(FOLDER / f"topic-{scheme}.png")
        finally:
            tour.send_signal(signal.SIGINT)
            tour.communicate()
    (FOLDER / "made-from").write_text(f"{digest()}\n", encoding="ascii")
    return 0


def _wait(page: Page, condition: str) -> None:
    """Return when it holds; the tour takes its time until a topic is held."""
    for _ in range(_LOOKS - 1):
        with suppress(PageError):
            page.until(condition)
            return
    page.until(condition)


def _page_of(tour: subprocess.Popen[str]) -> str:
    """The address that the tour tells of its status page."""
    for line in tour.stdout or ():
        found = re.search(r"Its status page: (\S+)", line)
        if found:
            return found[1]
    raise SystemExit("the tour ended before its status page was up")


if __name__ == "__main__":
    sys.exit(main())
