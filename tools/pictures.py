"""The pictures of README and docs: ``make pictures`` takes them from the tour on the sample store, light and dark.

The tour's janitor serves the status page and a topic's page. The dashboard is drawn from the samples of a real
Prometheus (:mod:`tools.monitoring.preview`), without Grafana.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

# The browser and the Prometheus of the tests: this is a tool of those who develop.
from tests.janitor.http.browser import Browser, Page, PageError
from tests.monitoring.prometheus import Prometheus
from tools.monitoring.preview import Source, page

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
_BOARD = ROOT / "charts/tms-janitor/files/dashboard.json"
#: What the tour is run with: free ports, and a folder that is given up afterwards.
_TOUR = "import sys, pathlib; from examples.tour import main; main(pathlib.Path(sys.argv[1]), any_ports=True)"
#: True once a topic is held, and runs are drawn beside it.
_HELD = "document.querySelector('#held .cmd') && document.querySelectorAll('#plot rect').length > 1"
_TOPIC_DRAWN = "document.querySelector('#detail .cmd')"
_WIDTH, _HEIGHT = 1280, 900
#: How often the browser waits its whole time limit.
_LOOKS = 3
#: For how long Prometheus scrapes the tour: until what was held is approved, and a while longer.
_SCRAPED_SECONDS = 75
#: The rows of the dashboard that are drawn, and what its variables stand for.
_ROWS = ("Health", "Runs")
_NAMESPACE, _JOB = "messaging", "janitor"
_CHOSEN = {"$namespace": _NAMESPACE, "$job": _JOB, "$__rate_interval": "15s"}


def main() -> int:
    """Take all pictures; returns an exit code."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-u", "-c", _TOUR, "data"],
            cwd=name,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as tour,
    ):
        folder = Path(name)
        try:
            url = _page_of(tour)
            targets = {_JOB: [urlsplit(url).netloc]}
            with (
                Prometheus(folder / "prometheus", targets, {"groups": []}, _NAMESPACE) as prometheus,
                Browser.start(folder / "profile") as browser,
            ):
                begin = time.time()
                tab = browser.open()
                tab.shape(_WIDTH, _HEIGHT)
                _take_pages(tab, url)
                time.sleep(max(0.0, begin + _SCRAPED_SECONDS - time.time()))
                _take_dashboard(tab, prometheus, (begin, time.time()), folder / "dashboard.html")
        finally:
            tour.send_signal(signal.SIGINT)
            tour.communicate()
    return 0


def _take_pages(tab: Page, url: str) -> None:
    """Take pictures of the status page and of a held topic's page."""
    tab.go(url)
    _wait(tab, _HELD)
    _take(tab, "status")
    tab.go(f"{url}topics/demo:orders")
    _wait(tab, _TOPIC_DRAWN)
    _take(tab, "topic")


def _take_dashboard(tab: Page, prometheus: Prometheus, span: tuple[float, float], path: Path) -> None:
    """Take a picture of the first rows of the dashboard over a span of time; its page is written to ``path``."""
    document = json.loads(_BOARD.read_text(encoding="utf-8"))
    source = Source(lambda expression: prometheus.query_range(expression, *span), span, _CHOSEN)
    path.write_text(page(document, source, _ROWS), encoding="utf-8")
    tab.go(path.as_uri())
    _wait(tab, "document.readyState === 'complete' && document.querySelector('section')")
    _take(tab, "dashboard")


def _take(tab: Page, name: str) -> None:
    """Take pictures of the whole tab, light and dark."""
    tab.shape(_WIDTH, _HEIGHT)
    tab.shape(_WIDTH, tab.run("document.documentElement.scrollHeight"))
    for scheme in ("light", "dark"):
        tab.prefer(prefers_color_scheme=scheme)
        tab.screenshot(FOLDER / f"{name}-{scheme}.png")


def _wait(tab: Page, condition: str) -> None:
    """Return when it holds; the tour takes its time until a topic is held."""
    for _ in range(_LOOKS - 1):
        with suppress(PageError):
            tab.until(condition)
            return
    tab.until(condition)


def _page_of(tour: subprocess.Popen[str]) -> str:
    """Return the address of the tour's status page from its output."""
    for line in tour.stdout or ():
        found = re.search(r"Status page: (\S+)", line)
        if found:
            return found[1]
    raise SystemExit("the tour ended before its status page was up")


if __name__ == "__main__":
    sys.exit(main())
