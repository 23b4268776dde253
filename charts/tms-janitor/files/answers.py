"""Asks a janitor until it is alive and shows metrics, for two minutes at most: ``helm test``."""

from __future__ import annotations

import sys
import time
import urllib.request


def ask(path: str) -> str:
    """What the janitor answers."""
    with urllib.request.urlopen(sys.argv[1] + path, timeout=30) as answer:  # noqa: S310 - the chart says where
        return str(answer.read().decode())


def trouble() -> str:
    """What is wrong with it; nothing: an empty text."""
    try:
        alive = ask("/healthz")
        shown = "process_start_time_seconds" in ask("/metrics")
    except OSError as error:
        return str(error)
    return "" if alive == "ok" and shown else f"/healthz says {alive}, and there are {'' if shown else 'no '}metrics"


until = time.monotonic() + 120
while found := trouble():
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()
    if time.monotonic() > until:
        sys.exit(1)
    time.sleep(3)
