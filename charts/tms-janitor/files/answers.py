"""Wait until a janitor is healthy and serves metrics, for two minutes at most: the test of ``helm test``."""

from __future__ import annotations

import sys
import time
import urllib.request


def ask(path: str) -> str:
    """Return the body of the janitor's response."""
    with urllib.request.urlopen(sys.argv[1] + path, timeout=30) as answer:  # noqa: S310 - the chart sets the URL
        return str(answer.read().decode())


def trouble() -> str:
    """Return what is wrong with the janitor; empty: nothing."""
    try:
        alive = ask("/healthz")
        shown = "process_start_time_seconds" in ask("/metrics")
    except OSError as error:
        return str(error)
    return "" if alive == "ok" and shown else f"/healthz returned {alive}, /metrics has {'' if shown else 'no '}metrics"


until = time.monotonic() + 120
while found := trouble():
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()
    if time.monotonic() > until:
        sys.exit(1)
    time.sleep(3)
