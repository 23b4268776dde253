"""A real Prometheus on this machine that scrapes every second."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx2
import yaml

from janitor.metrics.catalogue import Definition
from tests.support import require_tool

#: The time after which a wait fails, in seconds; long, because the machine may be busy.
PATIENCE_SECONDS = 180


def until(condition: Callable[[], bool], expected: str | Callable[[], str]) -> None:
    """Wait until a condition is true; after the time limit, fail with the expected event."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        text = expected if isinstance(expected, str) else expected()
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s: {text}"
        time.sleep(0.2)


class Prometheus:
    """A Prometheus that runs until the block ends.

    Args:
        folder: a folder for its files; it must not exist.
        targets: ``HOST:PORT`` of its targets by job.
        rules: the rules of its alerts.
        namespace: the ``namespace`` label of all scraped series.
    """

    def __init__(
        self, folder: Path, targets: dict[str, list[str]], rules: dict[str, Any], namespace: str = "tests"
    ) -> None:
        program = require_tool("prometheus", "apt-get install prometheus, or make system-deps")
        folder.mkdir()
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": names, "labels": {"namespace": namespace}}]}
                for job, names in targets.items()
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log = folder / "log"
        command = [
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stderr=log, stdout=log)
        self._client = httpx2.Client(timeout=PATIENCE_SECONDS, trust_env=False)
        self._url = ""

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current series of an expression."""
        return self._ask("query", query=expression)

    def query_range(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Return the series of an expression in each second between two Unix times."""
        return self._ask("query_range", query=expression, start=str(begin), end=str(end), step="1s")

    def _ask(self, path: str, **params: str) -> list[dict[str, Any]]:
        answer = self._client.get(f"{self._url}/api/v1/{path}", params=params)
        assert answer.status_code == 200, f"{params['query']}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def firing(self, alert: str) -> bool:
        return bool(self.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}'))

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        found = re.search(r"Listening on.* address=(127\.0\.0\.1:\d+)", self._log.read_text())
        if found:
            self._url = f"http://{found[1]}"
        return bool(found)

    def __enter__(self) -> Self:
        until(self._listens, "Prometheus listens")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(timeout=PATIENCE_SECONDS)


def label_values(metric: Definition) -> dict[str, frozenset[str] | None]:
    """Return the possible values of each label; None: users choose them."""
    if metric.known is None:
        return dict.fromkeys(metric.labels)
    return {label: frozenset(series[at] for series in metric.known) for at, label in enumerate(metric.labels)}
