"""Take the screenshots of README and docs from the tour on the sample store, light and dark: ``make pictures``.

The tour's janitor serves the status page and a topic's page. :mod:`tools.monitoring.preview` draws the dashboard from
the samples of a real Prometheus, without Grafana.
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

# A tool for developers may import the browser and the Prometheus of the tests.
from tests.janitor.http.browser import Browser, Page, PageError
from tests.monitoring.prometheus import Prometheus
from tools.monitoring.preview import Source, page

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
_BOARD = ROOT / "charts/tms-janitor/files/dashboard.json"
#: The program of the tour, with free ports and a temporary folder.
_TOUR = "import sys, pathlib; from examples.tour import main; main(pathlib.Path(sys.argv[1]), any_ports=True)"
#: A condition on the status page: a topic is held, and the chart shows at least two bars.
_HELD = "document.querySelector('#held .cmd') && document.querySelectorAll('#plot rect').length > 1"
_TOPIC_DRAWN = "document.querySelector('#detail .cmd')"
_WIDTH, _HEIGHT = 1280, 900
#: The number of attempts to wait for a condition, each with the browser's time limit.
_WAIT_ATTEMPTS = 3
#: The seconds for which Prometheus scrapes the tour: past the approval of the held topic.
_SCRAPED_SECONDS = 75
#: The rows of the dashboard to draw, and the values of its variables.
_ROWS = ("Health", "Runs")
_NAMESPACE, _JOB = "messaging", "janitor"
_VARIABLES = {"$namespace": _NAMESPACE, "$job": _JOB, "$__rate_interval": "15s"}


def main() -> int:
    """Take all pictures; return an exit code."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(  # noqa: S603 the tour
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
                tab.resize(_WIDTH, _HEIGHT)
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
    """Take a picture of the dashboard's first rows over a span of time; write its page to ``path``."""
    document = json.loads(_BOARD.read_text(encoding="utf-8"))
    source = Source(lambda expression: prometheus.query_range(expression, *span), span, _VARIABLES)
    path.write_text(page(document, source, _ROWS), encoding="utf-8")
    tab.go(path.as_uri())
    _wait(tab, "document.readyState === 'complete' && document.querySelector('section')")
    _take(tab, "dashboard")


def _take(tab: Page, name: str) -> None:
    """Take pictures of the whole tab, light and dark."""
    tab.resize(_WIDTH, _HEIGHT)
    tab.resize(_WIDTH, tab.run("document.documentElement.scrollHeight"))
    for scheme in ("light", "dark"):
        tab.prefer(prefers_color_scheme=scheme)
        tab.screenshot(FOLDER / f"{name}-{scheme}.png")


def _wait(tab: Page, condition: str) -> None:
    """Wait for a condition; the browser's time limit alone is too short for the tour's first held topic."""
    for _ in range(_WAIT_ATTEMPTS - 1):
        with suppress(PageError):
            tab.until(condition)
            return
    tab.until(condition)


def _page_of(tour: subprocess.Popen[str]) -> str:
    """Return the URL of the tour's status page from its output."""
    for line in tour.stdout or ():
        found = re.search(r"Status page: (\S+)", line)
        if found:
            return found[1]
    raise SystemExit("the tour stopped before it printed the URL of its status page")


if __name__ == "__main__":
    sys.exit(main())
